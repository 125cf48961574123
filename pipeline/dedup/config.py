"""The sections `[dedup]`, `[repeats]` and `[audit]`, and the declarations of these stages with their drop reasons."""

from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from pipeline.engine.stage import Relation
from schemas.config import Recipe, Section, decision, execution, location
from schemas.tables import DOCUMENTS, DROPPED_BEFORE, SCORES

RULES = ("source_rank", "snapshot", "earliest", "latest", "longest", "shortest")
SIDES = ("highest", "lowest")
MAX_COPIES = 100
"""Most times that an epoch may read a document; up to 40, repeats have some effect (Muennighoff et al. 2023)."""
MINHASH_ONLY = frozenset(("threshold", "bands", "rows"))
SIMHASH_ONLY = frozenset(("max_distance", "blocks"))
NEAR_ONLY = MINHASH_ONLY | SIMHASH_ONLY | {"min_similarity", "verify", "rounds", "compare_survivor"}
"""Settings that have an effect only if `near` is true; some need MinHash signatures, some SimHash signatures."""


def _numeric(schema: pa.Schema) -> set[str]:
    kinds = (pa.types.is_floating, pa.types.is_integer)
    return {field.name for field in schema if any(kind(field.type) for kind in kinds)}


SIGNAL_COLUMNS = frozenset((_numeric(DOCUMENTS) | _numeric(SCORES)) - {"drop_value", "drop_limit", "anchor"})
"""Columns that the rules `highest:<signal>` and `lowest:<signal>` may name."""


class DedupConfig(Section):
    """How copies are detected, and which document of a cluster survives."""

    exact: Literal["off", "normalised", "raw"] = "normalised"
    """Which documents are exact copies: `normalised`, those with equal text after NFKC, lower case and single spaces;
    `raw`, those with equal bytes; `off`, none."""
    near: bool = True
    """Whether near copies are joined, by their signatures (section `[signature]`)."""
    min_similarity: float = Field(0.7, ge=0, le=1)
    """Least Jaccard similarity of a joined pair, estimated from MinHash signatures, or true with `verify = jaccard`.
    Also the least similarity of a copy in the audit; SimHash uses it for nothing else."""
    threshold: float | None = Field(None, gt=0, lt=1)
    """Similarity for which bands and rows are chosen, so that the sum of false positives and false negatives is least.
    None: the settings `bands` and `rows` apply."""
    bands: int = Field(14, ge=1)
    """Bands of a MinHash signature. With 14 bands of 8 rows, half of the pairs of similarity 0.69 become candidates."""
    rows: int = Field(8, ge=1)
    """Signature values in a band; bands x rows may be less than `signature.permutations`."""
    max_distance: int = Field(3, ge=0, le=16)
    """Most differing bits of a joined pair of SimHash signatures. Source of 3: Manku et al. 2007, section 4."""
    blocks: int = Field(6, ge=2, le=24)
    """Blocks that a SimHash is divided into; there is a table for every choice of `blocks - max_distance` of them."""
    verify: Literal["estimate", "jaccard"] = "estimate"
    """How a candidate pair is verified: `estimate`, by the share of equal values in two signatures; `jaccard`, by the
    true Jaccard similarity of the shingles, for which the texts of candidates are read again."""
    rounds: int = Field(3, ge=1, le=16)
    """Rounds of bucketing and verification [rounds]. In each round, all documents of a bucket are compared with its
    first in keep order. Documents that do not match it are compared again in the next round."""
    scope: tuple[Literal["language", "source", "snapshot"], ...] = ()
    """Columns in which two documents must agree to be joined; empty: copies are joined across the whole run."""
    keep: tuple[str, ...] = ("source_rank", "longest", "earliest")
    """The keep order: the document that comes first by these rules in turn survives; ties go to the smallest doc_id.
    Rules: `source_rank`, `snapshot` (by name, earliest first), `earliest` and `latest` (by date), `longest` and
    `shortest` (in bytes), and `highest:<signal>` or `lowest:<signal>` for any numeric column, such as
    `highest:language_score`."""
    source_ranks: tuple[str, ...] = ()
    """Sources from best to worst for `source_rank`; all sources that are not listed rank last, with equal rank."""
    indexes: tuple[str, ...] = location(())
    """Run folders of earlier snapshots that were written with `write_index`, oldest first. Their documents are kept
    rather than copies in this run. The content of the indexes enters the fingerprint by digest."""
    write_index: bool = False
    """Whether the snapshot index for later crawls is written: the first document of each bucket, signatures, and
    survivors. Later snapshots need it with `by_url` = `off` or `first`."""
    by_url: Literal["off", "newest", "longest", "first"] = decision("off")
    """Which of the documents with the same canonical URL survives; `off`: all. This is decided before copies of text
    are compared."""
    compare_survivor: Literal["off", "measure", "require"] = decision("require")
    """Whether a near copy is compared with the document that is kept, by the estimated similarity of their whole
    signatures. `require`: it is dropped only if they have `min_similarity`, and the similarity is the value of the
    drop. Of the others, the first in keep order is kept, and the rest are compared with that one, and so on in `rounds`
    rounds. `measure`: all are dropped, with that value, and the report shows how many are below `min_similarity`.
    `off`: all are dropped, so each is similar to some document of its cluster."""
    rehydration: dict[int, int] = decision({1: 1})
    """How often an epoch of training reads a survivor, by the size of its cluster. The entry with the largest size that
    the cluster reaches applies. The default reads every document once. FineWeb2 (Penedo et al. 2025, arXiv 2506.20920):
    {1 = 1, 2 = 2, 3 = 3, 5 = 5, 100 = 8, 1000 = 1}."""
    finish_edges: int = execution(4_000_000, ge=0)
    """Clusters are the connected components of a graph of copies. One task finishes them once at most this many edges
    are left. 0: rounds run until no edge is left."""
    partitions: int | None = execution(None, ge=1)
    """Partitions of the shuffles; None: Spark's default parallelism, or more if the data are large."""

    @property
    def compares_survivors(self) -> bool:
        """True if near copies are compared with the document that is kept."""
        return self.near and self.compare_survivor != "off"

    @property
    def requires_survivors(self) -> bool:
        """True if a near copy is dropped only if it is similar to the document that is kept."""
        return self.near and self.compare_survivor == "require"

    def decisions(self) -> dict[str, Any]:
        """Return the fields that only change decisions on stored measurements, as JSON values.

        `compare_survivor` is omitted if it is off: tables that were built before it existed stay valid.
        """
        off = {"compare_survivor"} if self.compare_survivor == "off" else set()
        return {name: value for name, value in super().decisions().items() if name not in off}

    @field_validator("keep")
    @classmethod
    def _known_rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for rule in value:
            side, colon, signal = rule.partition(":")
            if rule in RULES or (colon and side in SIDES and signal in SIGNAL_COLUMNS):
                continue
            raise ValueError(
                f"keep: expected rules of {', '.join(RULES)}, highest:<signal> or lowest:<signal>, got {rule!r}. "
                "Set dedup.keep to a list of these rules."
            )
        return value

    @field_validator("rehydration")
    @classmethod
    def _starts_at_one(cls, value: dict[int, int]) -> dict[int, int]:
        if 1 not in value or min(value) < 1 or not 1 <= min(value.values()) <= max(value.values()) <= MAX_COPIES:
            raise ValueError(
                f"rehydration: expected 1 to {MAX_COPIES} reads for size 1 and any larger sizes, got {value}. "
                "Give dedup.rehydration an entry for size 1, and set every number of reads within this range."
            )
        return value

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "DedupConfig":
        given = self.model_fields_set
        if not self.near and self.exact == "off":
            raise ValueError(
                "exact, near: expected at least one method, got exact = 'off' and near = false. Set dedup.near=true."
            )
        if not self.near and (idle := sorted(given & NEAR_ONLY)):
            raise ValueError(
                f"near: expected true with {', '.join(idle)}, got false, which ignores them. "
                f"Set dedup.near=true, or remove dedup.{', dedup.'.join(idle)}."
            )
        if self.threshold is not None and given & {"bands", "rows"}:
            raise ValueError("threshold: expected no value if bands or rows are set, got both. Remove dedup.threshold.")
        if self.blocks <= self.max_distance:
            raise ValueError(
                f"blocks: expected more than max_distance = {self.max_distance}, got {self.blocks}. "
                f"Set dedup.blocks to at least {self.max_distance + 1}."
            )
        # a later snapshot can neither drop survivors of this one nor read its text
        if self.write_index and (self.verify == "jaccard" or self.keep[:1] != ("snapshot",)):
            raise ValueError(
                "write_index: expected keep rules that begin with 'snapshot' and verify = 'estimate', got "
                f"keep = {list(self.keep)}, verify = {self.verify!r}. Put 'snapshot' first in dedup.keep and set "
                "dedup.verify='estimate', or set dedup.write_index=false."
            )
        # other rules could choose a new document, but the survivors of earlier snapshots stay
        if self.indexes and self.by_url not in ("off", "first"):
            raise ValueError(
                f"by_url: expected 'off' or 'first' with indexes, got {self.by_url!r}. Set dedup.by_url='first'."
            )
        if self.write_index and self.by_url not in ("off", "first"):
            raise ValueError(
                f"by_url: expected 'off' or 'first' with write_index, as later snapshots need it, got {self.by_url!r}. "
                "Set dedup.by_url='first', or set dedup.write_index=false."
            )
        if self.indexes and "snapshot" in self.scope:
            raise ValueError(
                "scope: expected no 'snapshot' with indexes, because that scope keeps snapshots apart, got "
                f"{list(self.scope)}. Remove 'snapshot' from dedup.scope."
            )
        if "source_rank" not in self.keep and self.source_ranks:
            raise ValueError(
                f"source_ranks: expected 'source_rank' among the keep rules, got keep = {list(self.keep)}. "
                "Add 'source_rank' to dedup.keep."
            )
        return self


DEDUP = Relation(
    name="dedup",
    version=4,
    config=DedupConfig,
    reasons={
        DROPPED_BEFORE: "an earlier verdict drops the document; it is listed for its cluster",
        "same_url": "another document of its canonical URL is kept",
        "exact_duplicate": "its text equals that of the survivor, as `dedup.exact` compares them",
        "near_duplicate": "it is a near copy of the survivor, or linked to it by near copies",
    },
)
NEAR_MEANINGS = {
    "require": "it is a near copy of the survivor, by the estimated similarity of their signatures",
    "estimate": "it is a near copy of the survivor, or linked to it by near copies, by estimated similarity",
    "jaccard": "it is a near copy of the survivor, or linked to it by near copies, by verified similarity",
}
"""What `near_duplicate` means: with `compare_survivor = "require"`, or else by the value of `dedup.verify`."""
EXACT, NEAR, SAME_URL, TAKEN_DOWN = "exact_duplicate", "near_duplicate", "same_url", "taken_down"
TAKEN_DOWN_MEANING = "a takedown removed it from an earlier snapshot, by its id, URL or domain"
"""What `taken_down` means. Only runs with indexes of runs that had takedowns have this reason."""


# Settings of the audit of deduplication: the size of its samples, and the least similarity of a copy.

MIN_DOCUMENTS, MAX_DOCUMENTS = 100, 20_000


class AuditConfig(Section):
    """Settings of the audit, which measures precision and recall of deduplication on samples. Samples are chosen by
    hashes, so they are the same at any partitioning."""

    documents: int = Field(2000, ge=0, le=MAX_DOCUMENTS)
    """Documents in each of the four samples (joined, removed, uniform, anchored); 0: no audit. Without
    `dedup.near`, there is no audit either. All pairs of a sample are compared: 2,000 documents take seconds, and twice
    as many take four times as long."""
    group: int = Field(50, ge=2)
    """Most documents of one anchor that are compared with each other. In a larger group, those with the lowest
    hashes are compared."""
    min_jaccard: float | None = Field(None, gt=0, le=1)
    """Least true Jaccard similarity of a pair that should be joined; None: `dedup.min_similarity`."""
    seed: int = Field(0, ge=0)
    """Seed of the hashes that choose the samples."""
    alarm_share: float = Field(0.5, ge=0, le=1)
    """Share of a source's or a domain's documents above which a run warns that they were dropped as copies. The summary
    and the report list pairs of them; 1: no warning."""
    alarm_documents: int = Field(50, ge=1)
    """Least documents of a source or a domain of which a run warns, without those that earlier verdicts drop."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "AuditConfig":
        others = sorted(self.model_fields_set - {"documents"})
        if not self.documents and others:
            raise ValueError(
                f"documents: expected more than 0 with {', '.join(others)}, got 0, which means no audit. "
                f"Set audit.documents to at least {MIN_DOCUMENTS}, or remove audit.{', audit.'.join(others)}."
            )
        if 0 < self.documents < MIN_DOCUMENTS:
            raise ValueError(
                f"documents: expected 0 (no audit) or at least {MIN_DOCUMENTS}, got {self.documents}. "
                f"Set audit.documents to at least {MIN_DOCUMENTS}."
            )
        if self.group > self.documents > 0:
            raise ValueError(
                f"group: expected at most documents = {self.documents}, got {self.group}. "
                f"Set audit.group to at most {self.documents}."
            )
        return self


AUDIT = Relation(name="audit", version=2, config=AuditConfig)


def is_enabled(recipe: Recipe) -> bool:
    """Return True if the recipe has an audit and joins near copies; exact copies need no audit."""
    return recipe.section("audit", AuditConfig).documents > 0 and recipe.section("dedup", DedupConfig).near


# Settings of the step `repeats`: the units that are compared, when they are cut, and reasons to drop a document.

Unit = Literal["paragraph", "line", "sentences", "substring"]
WORDS, BYTES = 50, 100
_BY_UNIT: dict[str, set[str]] = {
    "sentences": {"sentences"},
    "substring": {"substring_unit", "substring_length", "on_substring", "max_repeated_share"},
}


class RepeatsConfig(Section):
    """Which repeated passages are cut, searched in the documents that `dedup` keeps, within its `scope` and keep order.

    The remaining text of a document is measured and judged again. This covers the quality signals (of the text as if
    the passages had never been there), toxicity, and scores of models if the run has them. The language, evaluation
    sets, and the perplexity of a checkpoint are not measured again: their stored values are compared with the limits.
    Cut-offs that were computed from the data remain those of `verdicts`.
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
    """`cut`: repeated runs are cut; `drop`: documents with too large a share of them are dropped, and all others are
    left whole."""
    max_repeated_share: float = Field(0.2, ge=0, lt=1)
    """Largest share of repeated runs in a document that is kept, with `on_substring = "drop"` [code points over code
    points]; 0: any run drops the document. Default: the partial drop that RefinedWeb tried (Penedo et al. 2023, arXiv
    2306.01116)."""
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
            is_cutting = set(self.units) != {"substring"} or self.on_substring == "cut"
            if "min_left_chars" in given and not is_cutting:
                problems.append("min_left_chars (ignored with on_substring 'drop', which cuts nothing)")
            if "max_repeated_share" in given and self.on_substring == "cut":
                problems.append("max_repeated_share (ignored with on_substring 'cut')")
        if problems:
            raise ValueError(
                f"expected settings that have an effect, got {'; '.join(problems)}. Remove them from [repeats]."
            )
        return self


REPEATS = Relation(
    name="repeats",
    version=2,
    config=RepeatsConfig,
    reasons={
        DROPPED_BEFORE: "deduplication or an earlier verdict drops the document",
        "repeated_share": "repeated runs make up too large a share of it",
        "nothing_left": "the cuts leave too little of it",
    },
)
REPEATED_SHARE, NOTHING_LEFT = "repeated_share", "nothing_left"
