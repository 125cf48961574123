"""Settings of deduplication, and the declaration of its reasons to drop a document."""

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
"""Settings that have an effect only with `near`, with one kind of signature or the other."""


def _numeric(schema: pa.Schema) -> set[str]:
    kinds = (pa.types.is_floating, pa.types.is_integer)
    return {field.name for field in schema if any(kind(field.type) for kind in kinds)}


SIGNAL_COLUMNS = frozenset((_numeric(DOCUMENTS) | _numeric(SCORES)) - {"drop_value", "drop_limit", "anchor"})
"""Columns that the rules `highest:<signal>` and `lowest:<signal>` may name."""


class DedupConfig(Section):
    """How copies are detected, and which document of a cluster survives."""

    exact: Literal["off", "normalised", "raw"] = "normalised"
    """Which documents are exact copies: `normalised`, of equal text in NFKC, lower case and single spaces; `raw`, of
    equal bytes; `off`, none."""
    near: bool = True
    """Whether near copies are joined, by the signatures of the section `[signature]`."""
    min_similarity: float = Field(0.7, ge=0, le=1)
    """Least Jaccard similarity of a joined pair, estimated from MinHash signatures, or true with `verify = jaccard`.
    Also the least similarity of a copy in the audit; SimHash uses it for nothing else."""
    threshold: float | None = Field(None, gt=0, lt=1)
    """Similarity for which bands and rows are chosen, so that the sum of false positives and false negatives is least;
    None: `bands` and `rows` are used."""
    bands: int = Field(14, ge=1)
    """Bands of a MinHash signature. With 14 bands of 8 rows, half of the pairs of similarity 0.69 become candidates."""
    rows: int = Field(8, ge=1)
    """Signature values in a band; bands x rows may be less than `signature.permutations`."""
    max_distance: int = Field(3, ge=0, le=16)
    """Most differing bits of a joined pair of SimHash signatures. Source of 3: Manku et al. 2007, section 4."""
    blocks: int = Field(6, ge=2, le=24)
    """Blocks that a SimHash is divided into; there is a table for every choice of `blocks - max_distance` of them."""
    verify: Literal["estimate", "jaccard"] = "estimate"
    """How a candidate pair is verified: by the share of equal values in two signatures, or by the true Jaccard
    similarity of the shingles. The latter reads the texts of candidates again."""
    rounds: int = Field(3, ge=1, le=16)
    """Rounds of bucketing and verification. In each, the members of a bucket are compared with its first document in
    keep order; those that do not match enter the next round [rounds]."""
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
    """Run folders of earlier snapshots that were written with `write_index`, oldest first; their documents survive over
    those of this run. The content of the indexes enters the fingerprint by digest."""
    write_index: bool = False
    """Whether the snapshot index for later crawls is written: leaders of buckets, their signatures, representatives."""
    by_url: Literal["off", "newest", "longest", "first"] = decision("off")
    """Which document of those with one canonical URL survives. This is decided before copies of text are."""
    rehydration: dict[int, int] = decision(REHYDRATION)
    """Weight of a survivor by the size of its cluster: the entry with the largest size up to that of the cluster.
    Source of the default: FineWeb-2 (Penedo et al. 2025, arXiv 2506.20920)."""
    finish_edges: int = execution(4_000_000, ge=0)
    """Clusters are finished in one task once at most this many edges are left; 0: rounds run until no edge is left."""
    partitions: int | None = execution(None, ge=1)
    """Partitions of the shuffles; None: Spark's default parallelism, or more if the data are large."""

    @field_validator("keep")
    @classmethod
    def _known_rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for rule in value:
            side, colon, signal = rule.partition(":")
            if rule in RULES or (colon and side in SIDES and signal in SIGNAL_COLUMNS):
                continue
            raise ValueError(
                f"keep: expected rules of {', '.join(RULES)}, highest:<signal> or lowest:<signal>, got {rule!r}. "
                "Set dedup.keep to known rules."
            )
        return value

    @field_validator("rehydration")
    @classmethod
    def _starts_at_one(cls, value: dict[int, int]) -> dict[int, int]:
        if 1 not in value or min(value) < 1 or min(value.values()) < 0:
            raise ValueError(
                f"rehydration: expected weights of at least 0 for cluster sizes from 1 on, got {value}. "
                "Set dedup.rehydration to entries that include size 1."
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
                f"Remove dedup.{', dedup.'.join(idle)}."
            )
        if self.threshold is not None and given & {"bands", "rows"}:
            raise ValueError("threshold: expected a threshold or bands and rows, got both. Remove dedup.threshold.")
        if self.blocks <= self.max_distance:
            raise ValueError(
                f"blocks: expected more than max_distance = {self.max_distance}, got {self.blocks}. "
                f"Set dedup.blocks to at least {self.max_distance + 1}."
            )
        if self.write_index and (self.verify == "jaccard" or self.keep[:1] != ("snapshot",)):
            raise ValueError(
                "write_index: expected keep rules that begin with 'snapshot' and verify = 'estimate', because a later "
                f"snapshot must not undo this one or need its text, got keep = {list(self.keep)}, "
                f"verify = {self.verify!r}. Set dedup.write_index=false."
            )
        if self.indexes and self.by_url not in ("off", "first"):
            raise ValueError(
                f"by_url: expected 'off' or 'first' with indexes, because earlier snapshots keep their documents, got "
                f"{self.by_url!r}. Set dedup.by_url='first'."
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
    version=3,
    config=DedupConfig,
    reasons={
        "dropped_before": "an earlier verdict drops the document; it is listed for its cluster",
        "same_url": "another document of its canonical URL is kept",
        "exact_duplicate": "its text equals that of the survivor, as `dedup.exact` compares them",
        "near_duplicate": "it is a near copy of the survivor, or is linked to it by verified near copies",
    },
)
EXACT, NEAR, SAME_URL, DROPPED_BEFORE = "exact_duplicate", "near_duplicate", "same_url", "dropped_before"
