"""Settings of the step `repeats`: the units that are compared, when they are cut, and reasons to drop a document."""

from typing import Literal

from pydantic import Field, model_validator

from pipeline.engine.stage import Relation
from schemas.config import Section

Unit = Literal["paragraph", "line", "sentences", "substring"]
WORDS, BYTES = 50, 100
_BY_UNIT: dict[str, set[str]] = {
    "sentences": {"sentences"},
    "substring": {"substring_unit", "substring_length", "on_substring", "max_repeated_share"},
}


class RepeatsConfig(Section):
    """Which repeated passages are cut. They are searched in the documents that `dedup` keeps, within its `scope` and in
    its keep order. The remaining text of a document is measured and judged again.

    Measured again are the quality signals (of the text as if the passages had never been there), toxicity, and scores
    of models if the run has them. Not measured again are the language, evaluation sets, and the perplexity of a
    checkpoint: their stored values are judged. Cut-offs that were computed from the data remain those of `verdicts`.
    """

    units: tuple[Unit, ...] = ()
    """Kinds of units that are compared; empty: the step does not run. `line`: text between line breaks (CCNet's
    "paragraph"; Wenzek et al. 2020, arXiv 1911.00359, 3.1). `paragraph`: text between blank lines. `sentences`:
    consecutive sentences, as many as the setting `sentences` (C4; Raffel et al. 2020, arXiv 1910.10683, 2.2). These are
    compared in the normal form of CCNet: lower case, digits as 0, no accents, no punctuation. `substring`: runs of at
    least `substring_length` words or bytes, compared unchanged (Lee et al. 2022, arXiv 2107.06499). A span that two
    kinds cover is cut once, with the reason of the kind that is listed first."""
    min_count: int = Field(2, ge=2)
    """Least occurrences of a repeat, in one document or many. C4, CCNet and Lee et al.: 2."""
    keep_first: bool = True
    """Whether the first occurrence of a repeat is kept: the first in the first document in keep order. CCNet's paper
    and C4 keep one; False is CCNet's second mode, which cuts all."""
    min_unit_chars: int = Field(1, ge=1)
    """Least length of the normal form of a unit that is compared [code points]. CCNet: no limit."""
    sentences: int = Field(3, ge=1, le=16)
    """Consecutive sentences in a unit [sentences]. C4: 3."""
    substring_unit: Literal["words", "bytes"] = "words"
    """Unit of the length of a run: words between whitespace of any kind (single characters in writing without spaces),
    or bytes of UTF-8."""
    substring_length: int | None = Field(None, ge=4, le=4096)
    """Shortest run that is a repeat; None: 50 words, or 100 bytes. Lee et al.: 50 tokens, which are 100 bytes there."""
    on_substring: Literal["cut", "drop"] = "cut"
    """Whether repeated runs are cut, or documents with too large a share of them are dropped and others left whole."""
    max_repeated_share: float = Field(0.2, ge=0, lt=1)
    """Largest share of repeated runs in a document with `drop` [code points over code points]; 0: any run drops the
    document. Default: the partial drop that RefinedWeb tried (Penedo et al. 2023, arXiv 2306.01116)."""
    min_left_chars: int = Field(1, ge=1)
    """Least text that the cuts must leave of a document [code points]; the quality checks apply in addition."""

    @property
    def length(self) -> int:
        """Return the length of the shortest run that is a repeat [words or bytes]."""
        return self.substring_length or (WORDS if self.substring_unit == "words" else BYTES)

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "RepeatsConfig":
        given = self.model_fields_set
        problems = []
        if repeated := sorted({unit for unit in self.units if self.units.count(unit) > 1}):
            problems.append(f"units with {', '.join(repeated)} more than once")
        if not self.units:
            problems += [f"{name} (ignored without units)" for name in sorted(given - {"units"})]
        else:
            for unit, names in _BY_UNIT.items():
                if unit not in self.units:
                    problems += [f"{name} (ignored without the unit {unit!r})" for name in sorted(given & names)]
            if "min_unit_chars" in given and set(self.units) == {"substring"}:
                problems.append("min_unit_chars (ignored with the unit 'substring' alone)")
            if "max_repeated_share" in given and self.on_substring == "cut":
                problems.append("max_repeated_share (ignored with on_substring 'cut')")
        if problems:
            raise ValueError(f"expected settings that have an effect, got {'; '.join(problems)}. Remove them.")
        return self


REPEATS = Relation(
    name="repeats",
    version=1,
    config=RepeatsConfig,
    reasons={
        "dropped_before": "deduplication or an earlier verdict drops the document",
        "repeated_share": "repeated runs make up too large a share of it",
        "nothing_left": "the cuts leave too little of it",
    },
)
DROPPED_BEFORE, REPEATED_SHARE, NOTHING_LEFT = "dropped_before", "repeated_share", "nothing_left"
