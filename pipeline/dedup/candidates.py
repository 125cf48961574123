"""Copies across all parts: rounds of buckets and verification over DataFrames, every round kept on storage.

A round shuffles narrow rows by key, each member of a bucket to its own signature, and the two together to the document
that leads; members that do not match go into the next round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.dedup.keep_order import EARLIER, NODE_BYTES, PART_BYTES, binary_array, order_bytes
from pipeline.dedup.keys import (
    KEYS_DDL,
    KINDS,
    LEADERS,
    PAIRED,
    PAIRS_DDL,
    DedupTask,
    key_rows,
    keys_of,
    pairs_of_buckets,
    payloads_of,
    read_windows,
    rows_of_buckets,
)
from pipeline.dedup.verify import (
    CARRIED_DDL,
    FAILED,
    OUTCOMES,
    PAYLOADS,
    PAYLOADS_DDL,
    Compare,
    Outcomes,
    attach_payloads,
    compare_pairs,
    make_comparison,
)
from pipeline.engine.materialize import FrameStore, StoredFrame
from pipeline.engine.parquet import TEXTS_AT_ONCE, apply_cuts, read_measured
from pipeline.engine.spark import dataframe_from_tasks, map_parts
from pipeline.minhash.stage import shingle_hashes

MAX_BROADCAST_ROWS = 200_000
"""Documents that are sent to every worker rather than shuffled [rows]."""


@dataclass(frozen=True)
class EarlierBuckets:
    """What indexes of earlier snapshots hold of the buckets."""

    bands: DataFrame
    """(key, order, position)"""
    payloads: DataFrame
    """(node, payload)"""


@dataclass
class CopySearchOutcome:
    """Outcomes of every round, and what an index is made of."""

    rounds: list[Mapping[str, StoredFrame]] = field(default_factory=list)
    """By kind: see `verify.OUTCOMES`."""
    leads: list[DataFrame] = field(default_factory=list)
    """(key, order, position) of the documents that lead a bucket, by round; empty unless asked for."""

    def similar(self, *kinds: str) -> Iterator[DataFrame]:
        """(node, other, similarity) of every round."""
        return (kept[kind].frame for kept in self.rounds for kind in kinds)


@dataclass(frozen=True)
class CopySearch:
    """What the rounds share."""

    spark: SparkSession
    tasks: Sequence[DedupTask]
    scratch: FrameStore
    partitions: int
    earlier: EarlierBuckets | None


def find_copies(search: CopySearch) -> CopySearchOutcome:
    """All rounds of buckets and verification."""
    config = search.tasks[0].dedup
    compare = make_comparison(config, search.tasks[0].signature)
    found = CopySearchOutcome()
    rest: StoredFrame | None = None
    rows = dataframe_from_tasks(search.spark, keys_of_part, search.tasks, KEYS_DDL)
    for number in range(config.rounds):
        if search.earlier is not None:
            rows = rows.union(search.earlier.bands.where(F.col("position") == number).select("key", "order"))
        pairs = bucket_pairs(search, rows, number, found)
        met = join_payloads(search, pairs, rest)
        kept = search.scratch.store_each(f"round-{number}", met, partial(outcomes_of, compare=compare), OUTCOMES)
        found.rounds.append(kept)
        rest = kept[FAILED]
        if not rest.rows:
            break
        rows = rest.frame
    return found


def bucket_pairs(search: CopySearch, rows: DataFrame, number: int, found: CopySearchOutcome) -> DataFrame:
    """The pairs of one round; with an index to write, the leaders of its buckets are put aside in `found`."""
    config = search.tasks[0].dedup
    width = order_bytes(config)
    in_order = rows.repartition(search.partitions, "key").sortWithinPartitions("key", "order")
    if not config.write_index and config.verify != "jaccard":
        return in_order.mapInArrow(partial(pairs_of_buckets, width=width), PAIRS_DDL)
    streamed = partial(rows_of_buckets, width=width)
    kept = search.scratch.store_each(f"buckets-{number}", in_order, streamed, KINDS)
    if config.write_index:
        own = kept[LEADERS].frame.where(part_number("order") != EARLIER)
        found.leads.append(own.withColumn("position", F.lit(number)))
    return kept[PAIRED].frame


def join_payloads(search: CopySearch, pairs: DataFrame, rest: StoredFrame | None) -> DataFrame:
    """Every pair with the member's own payload, those of a leader together behind its own row.

    `rest` has the documents that may be among them, besides earlier ones; None: all.
    """
    payloads = payload_rows(search, pairs)
    if rest is not None:
        nodes = rest.frame.select(F.substring("order", -NODE_BYTES, NODE_BYTES).alias("node")).distinct()
        few = F.broadcast(nodes) if rest.rows <= MAX_BROADCAST_ROWS else nodes
        earlier = payloads.where(part_number("node") == EARLIER)
        payloads = payloads.join(few, "node", "left_semi")
        payloads = payloads if search.earlier is None else payloads.union(earlier)
    nothing = F.lit(b"")
    own = payloads.select("node", nothing.alias("leader"), F.lit(0).cast("long").alias("key"), nothing, "payload")
    met = pairs.withColumn("payload", nothing).union(own)
    met = met.repartition(search.partitions, "node").sortWithinPartitions("node", "leader")
    carried = met.mapInArrow(attach_payloads, CARRIED_DDL)
    return carried.repartition(search.partitions, "leader").sortWithinPartitions("leader", "node")


def outcomes_of(number: int, batches: Iterator[pa.RecordBatch], compare: Compare) -> Outcomes:
    """The outcomes of the pairs of one partition."""
    return compare_pairs(batches, compare)


def payload_rows(search: CopySearch, pairs: DataFrame) -> DataFrame:
    """(node, payload): what documents are compared by."""
    task = search.tasks[0]
    if task.dedup.near and task.dedup.verify == "jaccard":
        members = pairs.select("node", part_number("node").cast("int").alias("part")).distinct()
        read = partial(shingles_of_part, tasks=list(search.tasks))
        return map_parts(members, len(search.tasks), read, PAYLOADS_DDL)
    own = dataframe_from_tasks(search.spark, payloads_of_part, search.tasks, PAYLOADS_DDL)
    return own if search.earlier is None else own.union(search.earlier.payloads)


def part_number(column: str) -> Column:
    """The number of the part at the end of a node."""
    return F.conv(F.hex(F.substring(column, -PART_BYTES, PART_BYTES)), 16, 10).cast("long")


def keys_of_part(task: DedupTask) -> Iterator[pa.RecordBatch]:
    """One row (key, order) for each key of each document of a part that is the first of its equals."""
    for window in read_windows(task):
        yield from key_rows(keys_of(window, task), window.orders[window.first])


def payloads_of_part(task: DedupTask) -> Iterator[pa.RecordBatch]:
    """Digest and signature of each document of a part that is the first of its equals."""
    for window in read_windows(task):
        batch = window.batch.filter(pa.array(window.first))
        payload = payloads_of(batch, task.dedup)
        columns = [binary_array(window.nodes[window.first]), binary_array(payload)]
        yield pa.RecordBatch.from_arrays(columns, schema=PAYLOADS)


def shingles_of_part(
    number: int, batches: Iterator[pa.RecordBatch], tasks: Sequence[DedupTask]
) -> Iterator[pa.RecordBatch]:
    """Digest and shingles of those documents of a part that stand in `batches` (node, part)."""
    wanted = {node[:-PART_BYTES] for batch in batches for node in batch.column(0).to_pylist()}
    if not wanted:
        return
    task = tasks[number]
    columns = {"documents": ["language", "text_digest", "raw_digest"], "text": ["text", "cuts"]}
    for batch in read_measured(task.part, columns, TEXTS_AT_ONCE):
        rows = [row for row in batch.to_pylist() if row["doc_id"] in wanted]
        payloads = []
        for row in rows:
            body = apply_cuts(row["text"], row["cuts"] or [])
            digest = {"normalised": row["text_digest"], "raw": row["raw_digest"], "off": b""}[task.dedup.exact]
            payloads.append(digest + shingle_hashes(body, row["language"], task.signature).astype("<u8").tobytes())
        part = number.to_bytes(PART_BYTES, "big")
        nodes = pa.array([row["doc_id"] + part for row in rows], pa.binary())
        yield pa.RecordBatch.from_arrays([nodes, pa.array(payloads, pa.binary())], schema=PAYLOADS)
