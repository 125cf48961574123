"""The declaration of deduplication: how copies are found, which of them stays, and the reasons it drops for."""

from typing import Literal

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from pipeline.engine.stage import Relation
from schemas.config import Section, decision, execution, location
from schemas.tables import DOCUMENTS, SCORES

RULES = ("source_rank", "snapshot", "earliest", "latest", "longest", "shortest")
SIDES = ("highest", "lowest")
REHYDRATION = {1: 1, 2: 2, 3: 3, 5: 5, 100: 8, 1000: 1}
MINHASH_ONLY = frozenset(("threshold", "bands", "rows"))
SIMHASH_ONLY = frozenset(("max_distance", "blocks"))
NEAR_ONLY = MINHASH_ONLY | SIMHASH_ONLY | {"min_similarity", "verify", "rounds"}
"""Settings that only say something where near copies are looked for, by the one kind of signature or the other."""


def _numeric(schema: pa.Schema) -> set[str]:
    kinds = (pa.types.is_floating, pa.types.is_integer)
    return {field.name for field in schema if any(kind(field.type) for kind in kinds)}


SIGNAL_COLUMNS = frozenset((_numeric(DOCUMENTS) | _numeric(SCORES)) - {"drop_value", "drop_limit", "anchor"})
"""What `highest:<signal>` and `lowest:<signal>` may name."""


class DedupConfig(Section):
    """How copies are found and which of them stays."""

    exact: Literal["off", "normalised", "raw"] = "normalised"
    """Whether documents of equal text are joined: equal in NFKC, lower case and single spaces, or byte for byte."""
    near: bool = True
    """Whether near copies are joined, by the signatures that `[signature]` asks for."""
    min_similarity: float = Field(0.7, ge=0, le=1)
    """Least Jaccard similarity of a joined pair of MinHash signatures, or of shingles with `verify = jaccard`; what the
    audit takes for a copy, also with SimHash, which otherwise does not look at it."""
    threshold: float | None = Field(None, gt=0, lt=1)
    """Similarity that bands and rows are chosen for, so that false positives and false negatives together are fewest;
    None: `bands` and `rows` as given."""
    bands: int = Field(14, ge=1)
    """Bands of a MinHash signature; with 14 of 8 rows half of the pairs of similarity 0.69 become candidates."""
    rows: int = Field(8, ge=1)
    """Values of the signature in a band; bands x rows may leave some of it unused."""
    max_distance: int = Field(3, ge=0, le=16)
    """Most differing bits of a joined pair of SimHash signatures. Source of 3: Manku et al. 2007, section 4."""
    blocks: int = Field(6, ge=2, le=24)
    """Blocks that a SimHash is cut into; there is a table for every choice of blocks less `max_distance` of them."""
    verify: Literal["estimate", "jaccard"] = "estimate"
    """What decides about a candidate pair: the share of equal values in two signatures, or the true Jaccard similarity
    of the shingles, for which the texts of candidates are read again."""
    rounds: int = Field(3, ge=1, le=16)
    """How many documents of a bucket may lead: members that do not match the first are tried against the next."""
    scope: tuple[Literal["language", "source", "snapshot"], ...] = ()
    """What copies must have in common to be joined; empty: copies are found across everything."""
    keep: tuple[str, ...] = ("source_rank", "longest", "earliest")
    """Which copy stays: the first by these rules in turn, then the smallest doc_id. Rules: `source_rank`, `snapshot`
    (by name, earliest first), `earliest` and `latest` (by date), `longest` and `shortest` (in bytes), and
    `highest:<signal>` or `lowest:<signal>`, any number measured of a document, such as `highest:language_score`."""
    source_ranks: tuple[str, ...] = ()
    """Sources from best to worst for `source_rank`; those not named come last, all equal."""
    indexes: tuple[str, ...] = location(())
    """Run folders of earlier snapshots, written with `write_index`, oldest first: their copies win. What they hold
    enters the fingerprint by digest."""
    write_index: bool = False
    """Whether what a later snapshot needs (leaders of buckets, their signatures, representatives) is written."""
    by_url: Literal["off", "newest", "longest", "first"] = decision("off")
    """Which of the documents of one canonical URL stays, before copies of text are looked at."""
    rehydration: dict[int, int] = decision(REHYDRATION)
    """Weight of a surviving document by the size of its cluster: the entry with the largest size that is not above it.
    Source of the default: FineWeb-2 (Penedo et al. 2025, arXiv 2506.20920)."""
    finish_edges: int = execution(4_000_000, ge=0)
    """Clusters are finished in one task once at most this many edges are left; 0 runs the rounds to their end."""
    partitions: int | None = execution(None, ge=1)
    """Partitions of the shuffles; None: as many as Spark's default parallelism, more where data are many."""

    @field_validator("keep")
    @classmethod
    def _known_rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for rule in value:
            side, colon, signal = rule.partition(":")
            if rule in RULES or (colon and side in SIDES and signal in SIGNAL_COLUMNS):
                continue
            raise ValueError(f"expected rules of {', '.join(RULES)}, highest:<signal> or lowest:<signal>, got {rule!r}")
        return value

    @field_validator("rehydration")
    @classmethod
    def _starts_at_one(cls, value: dict[int, int]) -> dict[int, int]:
        if 1 not in value or min(value) < 1 or min(value.values()) < 0:
            raise ValueError(f"expected weights of at least 0 by sizes from 1 on, got {value}")
        return value

    @model_validator(mode="after")
    def _is_of_use(self) -> "DedupConfig":
        given = self.model_fields_set
        if not self.near and self.exact == "off":
            raise ValueError("exact is off and near is false, so no copy would be found; turn one of them on")
        if not self.near and (idle := sorted(given & NEAR_ONLY)):
            raise ValueError(f"near is false, so {', '.join(idle)} would be ignored; leave them out")
        if self.threshold is not None and given & {"bands", "rows"}:
            raise ValueError("expected a threshold or bands and rows, got both. Leave one out.")
        if self.blocks <= self.max_distance:
            raise ValueError(f"blocks must be more than max_distance, found {self.blocks} and {self.max_distance}")
        if self.write_index and (self.verify == "jaccard" or self.keep[:1] != ("snapshot",)):
            raise ValueError(
                "write_index: expected keep rules that begin with 'snapshot', and signatures to verify by, or a later "
                f"snapshot would undo this one or need text. Found keep = {list(self.keep)}, verify = {self.verify!r}."
            )
        if self.indexes and self.by_url not in ("off", "first"):
            raise ValueError(
                f"indexes are given, and earlier snapshots keep their documents: by_url must be off or first, found "
                f"{self.by_url!r}"
            )
        if self.indexes and "snapshot" in self.scope:
            raise ValueError(
                "indexes are given, but scope keeps snapshots apart, so none would be asked; drop one of them"
            )
        if "source_rank" not in self.keep and self.source_ranks:
            raise ValueError("source_ranks are given, but keep does not name source_rank")
        return self


DEDUP = Relation(
    name="dedup",
    version=3,
    config=DedupConfig,
    reasons={
        "dropped_before": "a verdict had dropped the document; it is here for its cluster",
        "same_url": "another document of its canonical URL stays",
        "exact_duplicate": "its text equals that of the survivor, as `dedup.exact` compares them",
        "near_duplicate": "it is joined with the survivor by verified near copies",
    },
)
EXACT, NEAR, SAME_URL, DROPPED_BEFORE = "exact_duplicate", "near_duplicate", "same_url", "dropped_before"
