"""Settings of decontamination: the evaluation sets, the definition of a match, and the action on matches."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.config import Section, decision, location, suggest_name

DEFAULT_FIELDS: tuple[str, ...] = (
    *("question", "prompt", "query", "problem", "instruction", "input"),
    *("text", "sentence", "premise", "goal", "ctx"),
)
"""Fields of an item that are read unless the setting `fields` names others for its evaluation set. Passages on which
questions are based (context, article …) are mostly public pages, so they are read only if `fields` names them, as in
Brown et al. 2020, C."""

_WITH_SETS = {"fields", "ngram", "ngram_chars", "min_item_words", "ignored", "action"}
_OF_ACTION = {
    "drop": {"max_ngrams", "max_contaminated_share"},
    "cut": {"cut_margin", "min_piece_chars", "min_pieces", "max_pieces"},
    "measure": set[str](),
}
_OF_CANARIES = {"canary_ignore_case", "max_canaries"}


class DecontaminateConfig(Section):
    """The evaluation sets and canaries that must not be in the training data. Without either, nothing is measured.

    A word is the text between spaces in lower case, with numbers as 0 and without punctuation and accents.
    """

    evaluation_sets: dict[str, str] = location({})
    """Evaluation sets by name: the path of a file with one item per line as a JSON object; plain, .gz, .zst or .bz2."""
    fields: dict[str, tuple[str, ...]] = Field({})
    """Fields of the items that are read, by set; `choices.text` is a nested field. Each string is a separate text.
    Default: question, prompt, query, problem, instruction, input, text, sentence, premise, goal, ctx."""
    ngram: int = Field(13, ge=5, le=20)
    """Length of the n-grams that must not be shared [words]. Default: that of GPT-3 (Brown et al. 2020, 2005.14165, C).
    PaLM uses 8."""
    ngram_chars: int = Field(20, ge=5, le=60)
    """Length of the n-grams of texts whose writing does not separate words [characters]. Default: 13 Chinese words of
    1.5 characters on average."""
    min_item_words: int = Field(8, ge=1, le=20)
    """A text shorter than an n-gram is matched as a whole if it has at least this many words [words]. In writing that
    does not separate words, the minimum is the same share of `ngram_chars`. Shorter texts are common phrases and are
    not matched. Default: the least N of GPT-3's analysis."""
    ignored: str | None = location(None)
    """Path of a file in the format of the sets. N-grams of its texts are never matched: licenses, boilerplate,
    instructions."""
    action: Literal["drop", "cut", "measure"] = decision("drop")
    """`drop`: documents that share too much are dropped; `cut`: shared text is cut out of documents; `measure`: shared
    text is only counted."""
    max_ngrams: int | None = decision(None, ge=0)
    """Largest number of distinct n-grams that a document may share with one set. None: 0, or no limit if
    `max_contaminated_share` is set."""
    max_contaminated_share: float | None = decision(None, ge=0, le=1)
    """Largest share of a document's words that may be in shared n-grams [words over words; characters where words are
    not separated]. None: no limit."""
    cut_margin: int = Field(200, ge=0)
    """Text that is cut on each side of a shared n-gram, in addition to it [code points]. Default of this setting,
    `min_piece_chars` and `max_pieces`: GPT-3, C."""
    min_piece_chars: int = Field(200, ge=0)
    """Least length of a text fragment between two cuts; shorter fragments are cut too [code points]."""
    max_pieces: int | None = decision(10, ge=1)
    """Most fragments that the cuts may leave of a document [fragments]. A document with more is dropped. "none":
    no limit."""
    min_pieces: int = decision(1, ge=1)
    """Least fragments that the cuts must leave of a document [fragments]. A document with fewer is dropped."""
    canaries: tuple[str, ...] = ()
    """Strings that mark text which must not be trained on, such as the GUID of BIG-bench; matched in the raw text."""
    canary_ignore_case: bool = False
    """Whether canaries are matched without regard to case."""
    max_canaries: int | None = decision(0, ge=0)
    """Most occurrences of canaries in a document that is kept. "none": occurrences are counted, and no document
    is dropped."""

    @property
    def ngram_limit(self) -> int | None:
        """Return how many distinct n-grams a document may share with an evaluation set; None: no limit."""
        return 0 if self.max_ngrams is None and self.max_contaminated_share is None else self.max_ngrams

    @property
    def min_item_chars(self) -> int:
        """Return the least length of an item's text in a script without spaces [characters].

        Shorter texts are ignored.
        """
        return -(-self.min_item_words * self.ngram_chars // self.ngram)

    def content(self) -> dict[str, Any]:
        """Return the settings that change measurements or text; `cut` is True if shared text is cut from documents."""
        return super().content() | {"cut": bool(self.evaluation_sets) and self.action == "cut"}

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "DecontaminateConfig":
        problems = self._unusable()
        if idle := self._idle():
            message = f"expected settings that have an effect, got {'; '.join(idle)}. Remove them from [decontaminate]."
            problems.insert(0, message)
        if problems:
            raise ValueError(" ".join(problems))
        return self

    def _idle(self) -> list[str]:
        given = self.model_fields_set
        problems = []
        if not self.evaluation_sets:
            idle = given & (_WITH_SETS | set[str]().union(*_OF_ACTION.values()))
            problems += [f"{name} (ignored without evaluation_sets)" for name in sorted(idle)]
        else:
            others = set[str]().union(*(names for action, names in _OF_ACTION.items() if action != self.action))
            problems += [f"{name} (ignored with action {self.action!r})" for name in sorted(given & others)]
        if not self.canaries:
            problems += [f"{name} (ignored without canaries)" for name in sorted(given & _OF_CANARIES)]
        if "min_item_words" in given and self.min_item_words > self.ngram:
            problems.append(
                f"min_item_words = {self.min_item_words} (ignored: a text of {self.ngram} words has an n-gram)"
            )
        return problems

    def _unusable(self) -> list[str]:
        known = list(self.evaluation_sets)
        problems = [
            f"fields: expected names of evaluation sets, got {name!r}{suggest_name(name, known)}. "
            "Correct the name in decontaminate.fields."
            for name in self.fields
            if name not in known
        ]
        problems += [
            f"fields.{name}: expected at least one field, got none. Remove decontaminate.fields.{name}."
            for name, fields in self.fields.items()
            if not fields
        ]
        problems += [
            f"canaries: expected text, got blank {canary!r}. Remove it from decontaminate.canaries."
            for canary in self.canaries
            if not canary.strip()
        ]
        return problems
