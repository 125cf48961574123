"""The declaration of the step `repeats`: which passages are looked for, when they go, and the reasons it drops for."""

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
    """Which passages that stand elsewhere are cut. They are looked for in the documents that `dedup` keeps, within its
    `scope` and in its keep order; what is left of a document is measured and judged again.

    Measured again are the quality signals (of the text as if the passages had never been there), toxicity, and scores
    of models where the run has them. Not measured again are the language, evaluation sets, and the perplexity of a
    checkpoint: their stored values are judged. Cut-offs that the data decided stay those of `verdicts`.
    """

    units: tuple[Unit, ...] = ()
    """What is looked for; empty: the step is left out. `line`: what stands between line breaks (CCNet's "paragraph";
    Wenzek et al. 2020, arXiv 1911.00359, 3.1). `paragraph`: what stands between blank lines. `sentences`: so many
    sentences in a row as `sentences` says (C4; Raffel et al. 2020, arXiv 1910.10683, 2.2). These are compared in the
    normal form of CCNet: lower case, digits as 0, no accents, no punctuation. `substring`: runs of at least
    `substring_length` words or bytes, compared as they are (Lee et al. 2022, arXiv 2107.06499). What two kinds ask for
    is cut once, in the name of the kind that stands first here."""
    min_count: int = Field(2, ge=2)
    """Occurrences, in one document or many, from which a unit is a repeat. C4, CCNet and Lee et al.: 2."""
    keep_first: bool = True
    """Whether its first occurrence stays: that of the first document in keep order, there the first. CCNet's paper and
    C4 keep one; CCNet's second mode, in which all go, is False."""
    min_unit_chars: int = Field(1, ge=1)
    """Units whose normal form is shorter are left alone [code points]. CCNet: none is."""
    sentences: int = Field(3, ge=1, le=16)
    """Sentences in a row [sentences]. C4."""
    substring_unit: Literal["words", "bytes"] = "words"
    """What a run is counted in: words between whitespace (single characters in writing without spaces), however the
    whitespace looks; or bytes of UTF-8."""
    substring_length: int | None = Field(None, ge=4, le=4096)
    """Shortest run that is a repeat; None: 50 words, or 100 bytes. Lee et al.: 50 tokens, which are 100 bytes there."""
    on_substring: Literal["cut", "drop"] = "cut"
    """Cut repeated runs, or drop the documents of which they make too large a share and leave the others whole."""
    max_repeated_share: float = Field(0.2, ge=0, lt=1)
    """Largest share of a document that repeated runs may make with `drop` [code points over code points]; 0: any run
    drops. Default: that of the partial drop which RefinedWeb tried (Penedo et al. 2023, arXiv 2306.01116)."""
    min_left_chars: int = Field(1, ge=1)
    """What the cuts must leave of a document [code points]; how long it must be besides is for the checks to say."""

    @property
    def length(self) -> int:
        """Words or bytes of the shortest run that is a repeat."""
        return self.substring_length or (WORDS if self.substring_unit == "words" else BYTES)

    @model_validator(mode="after")
    def _used(self) -> "RepeatsConfig":
        given = self.model_fields_set
        problems = []
        if repeated := sorted({unit for unit in self.units if self.units.count(unit) > 1}):
            problems.append(f"units: expected each once, got {', '.join(repeated)} more than once")
        if not self.units:
            problems += [f"{name} would be ignored without units" for name in sorted(given - {"units"})]
        else:
            for unit, names in _BY_UNIT.items():
                if unit not in self.units:
                    problems += [f"{name} would be ignored without the unit {unit!r}" for name in sorted(given & names)]
            if "min_unit_chars" in given and set(self.units) == {"substring"}:
                problems.append("min_unit_chars would be ignored with the unit 'substring' alone")
            if "max_repeated_share" in given and self.on_substring == "cut":
                problems.append("max_repeated_share would be ignored with on_substring 'cut'")
        if problems:
            raise ValueError("; ".join(problems))
        return self


REPEATS = Relation(
    name="repeats",
    version=1,
    config=RepeatsConfig,
    reasons={
        "dropped_before": "deduplication or a verdict before it had dropped the document",
        "repeated_share": "too large a share of it are runs that stand elsewhere",
        "nothing_left": "the cuts leave too little of it",
    },
)
DROPPED_BEFORE, REPEATED_SHARE, NOTHING_LEFT = "dropped_before", "repeated_share", "nothing_left"
