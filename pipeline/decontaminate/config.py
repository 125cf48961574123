"""The settings of decontamination: the evaluation sets, what counts as shared with them, and what is done about it."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.config import Section, decision, location, suggest_name

DEFAULT_FIELDS: tuple[str, ...] = (
    *("question", "prompt", "query", "problem", "instruction", "input"),
    *("text", "sentence", "premise", "goal", "ctx"),
)
"""Fields of an item that are looked at unless a set names its own. Passages that questions are asked about (context,
article …) are mostly public pages themselves; they count only where `fields` names them, as in Brown et al. 2020, C."""

_WITH_SETS = {"fields", "ngram", "ngram_chars", "min_item_words", "ignored", "action"}
_OF_ACTION = {
    "drop": {"max_ngrams", "max_contaminated_share"},
    "cut": {"cut_margin", "min_piece_chars", "min_pieces", "max_pieces"},
    "measure": set[str](),
}
_OF_CANARIES = {"canary_ignore_case", "max_canaries"}


class DecontaminateConfig(Section):
    """What of the evaluation sets may not be trained on. Without sets and canaries nothing is measured.

    A word is what stands between spaces, in lower case, numbers as 0, without punctuation and accents.
    """

    evaluation_sets: dict[str, str] = location({})
    """Evaluation sets by name: the path of a file of JSON objects, one item a line; plain, .gz, .zst or .bz2."""
    fields: dict[str, tuple[str, ...]] = Field({})
    """Fields of the items that are looked at, by set; `choices.text` looks inside. Each string found is a text of its
    own. For other sets: question, prompt, query, problem, instruction, input, text, sentence, premise, goal, ctx."""
    ngram: int = Field(13, ge=5, le=20)
    """Words in a row that may not be shared [words]. Default: GPT-3 (Brown et al. 2020, 2005.14165, C); 8: PaLM."""
    ngram_chars: int = Field(20, ge=5, le=60)
    """The same for texts whose writing does not separate words [characters]: 13 Chinese words of 1.5 on average."""
    min_item_words: int = Field(8, ge=1, le=20)
    """Texts shorter than an n-gram are looked for whole if they have as many words, or the same share of `ngram_chars`
    [words]. Shorter ones are common phrases and not looked for. Default: the least N of GPT-3's analysis."""
    ignored: str | None = location(None)
    """Path of a file like the sets whose n-grams do not count: licences, boilerplate, the instructions of a set."""
    action: Literal["drop", "cut", "measure"] = decision("drop")
    """Drop documents that share too much, cut what they share out of their text, or only measure."""
    max_ngrams: int | None = decision(None, ge=0)
    """Largest number of distinct n-grams that a document may share with one set. None: 0, or off where the share
    is limited."""
    max_contaminated_share: float | None = decision(None, ge=0, le=1)
    """Largest share of words in such n-grams [words over words; characters where words are not separated]."""
    cut_margin: int = Field(200, ge=0)
    """Text that is cut on each side of an n-gram [code points]. This and the next, and `max_pieces`: GPT-3, C."""
    min_piece_chars: int = Field(200, ge=0)
    """A piece between two cuts that is shorter goes too [code points]."""
    max_pieces: int | None = decision(10, ge=1)
    """Pieces that a document may be cut into; more of them, and it is dropped [pieces]."""
    min_pieces: int = decision(1, ge=1)
    """Pieces that must be left of it [pieces]."""
    canaries: tuple[str, ...] = ()
    """Strings that mark text not to be trained on, such as the GUID of BIG-bench; looked for in the raw text."""
    canary_ignore_case: bool = False
    """Whether letters count as equal to their capitals in canaries."""
    max_canaries: int | None = decision(0, ge=0)
    """Largest number of occurrences of canaries; None only counts."""

    @property
    def ngram_limit(self) -> int | None:
        """Distinct n-grams that a document may share with one set, if that is limited."""
        return 0 if self.max_ngrams is None and self.max_contaminated_share is None else self.max_ngrams

    @property
    def min_item_chars(self) -> int:
        """Characters that a text needs to be looked for where words are not separated."""
        return -(-self.min_item_words * self.ngram_chars // self.ngram)

    def content(self) -> dict[str, Any]:
        """What changes the measurements or the text: of the action, whether it cuts."""
        return super().content() | {"cut": bool(self.evaluation_sets) and self.action == "cut"}

    @model_validator(mode="after")
    def _used(self) -> "DecontaminateConfig":
        problems = [*self._idle(), *self._unusable()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _idle(self) -> list[str]:
        given = self.model_fields_set
        problems = []
        if not self.evaluation_sets:
            idle = given & (_WITH_SETS | set[str]().union(*_OF_ACTION.values()))
            problems += [f"{name} would be ignored without evaluation_sets" for name in sorted(idle)]
        else:
            others = set[str]().union(*(names for action, names in _OF_ACTION.items() if action != self.action))
            problems += [f"{name} would be ignored with action {self.action!r}" for name in sorted(given & others)]
        if not self.canaries:
            problems += [f"{name} would be ignored without canaries" for name in sorted(given & _OF_CANARIES)]
        if "min_item_words" in given and self.min_item_words > self.ngram:
            problems.append(
                f"min_item_words = {self.min_item_words} would be ignored: a text of {self.ngram} words has an n-gram"
            )
        return problems

    def _unusable(self) -> list[str]:
        known = list(self.evaluation_sets)
        problems = [
            f"fields: {n!r} is no evaluation set{suggest_name(n, known)}" for n in self.fields if n not in known
        ]
        problems += [f"fields.{name}: no field is named" for name, fields in self.fields.items() if not fields]
        problems += [f"canaries: {canary!r} is blank" for canary in self.canaries if not canary.strip()]
        return problems
