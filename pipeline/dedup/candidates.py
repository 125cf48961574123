"""The search for copies in all parts: rounds of bucketing and verification over DataFrames, each saved to storage.

A round shuffles narrow rows by key, then joins each document of a bucket with its own signature, and then with the
signature of the bucket's leader. Documents that do not match their leader enter the next round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.dedup.index import Indexes, part_number
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
from pipeline.engine.tasks import num_groups
from pipeline.minhash.stage import shingle_hashes

MAX_BROADCAST_ROWS = 200_000
"""Most documents that are broadcast to every worker rather than shuffled [rows]."""
MAX_BLOCKS = 10**8
"""Most blocks of a shuffle, writers times readers: a server of shuffles opens each of them."""


@dataclass
class CopySearchOutcome:
    """The matches found in all rounds of a search for copies, and the bucket leaders for a snapshot index."""

    rounds: list[Mapping[str, StoredFrame]] = field(default_factory=list)
    """Saved frames of each round by kind, see `verify.OUTCOMES`."""
    leads: list[DataFrame] = field(default_factory=list)
    """Rows (KEYS) of the bucket leaders, one frame per round. Empty unless `write_index` is set."""

    def similar(self, *kinds: str) -> Iterator[DataFrame]:
        """Yield the frame (node, other, similarity) of each round and kind; for the kinds, see `verify.OUTCOMES`."""
        return (kept[kind].frame for kept in self.rounds for kind in kinds)


@dataclass(frozen=True)
class CopySearch:
    """The parts of the documents and the settings that all rounds of a search for copies share."""

    spark: SparkSession
    tasks: Sequence[DedupTask]
    scratch: FrameStore
    partitions: int
    indexes: Indexes
    """The indexes of earlier snapshots; there may be none."""


def find_copies(search: CopySearch) -> CopySearchOutcome:
    """Run all rounds of bucketing and verification, and return which documents match others."""
    config = search.tasks[0].dedup
    compare = make_comparison(config, search.tasks[0].signature)
    outcome = CopySearchOutcome()
    rest: StoredFrame | None = None
    rows = dataframe_from_tasks(search.spark, keys_of_part, search.tasks, KEYS_DDL)
    for number in range(config.rounds):
        pairs = bucket_pairs(search, rows, number, outcome)
        joined = join_payloads(search, pairs, rest)
        outcomes, what = partial(outcomes_of, compare=compare), f"compare candidate pairs, round {number + 1}"
        kept = search.scratch.store_each(f"round-{number}", joined, outcomes, OUTCOMES, what)
        outcome.rounds.append(kept)
        rest = kept[FAILED]
        if not rest.rows:
            break
        rows = rest.frame
    return outcome


def bucket_pairs(search: CopySearch, rows: DataFrame, number: int, outcome: CopySearchOutcome) -> DataFrame:
    """Return the candidate pairs (PAIRS) of round `number`, made from the keys of documents, `rows` (KEYS).

    With `write_index`, also append the bucket leaders to `outcome.leads`.
    """
    config = search.tasks[0].dedup
    width = order_bytes(config)
    if search.indexes:
        in_order = search.indexes.in_buckets(rows, number, search.partitions, width)
    else:
        in_order = rows.repartition(search.partitions, "key").sortWithinPartitions("key", "order")
    if not (config.write_index or search.indexes or config.verify == "jaccard"):  # the others read the pairs twice
        return in_order.mapInArrow(partial(pairs_of_buckets, width=width), PAIRS_DDL)
    streamed = partial(rows_of_buckets, width=width)
    kept = search.scratch.store_each(f"buckets-{number}", in_order, streamed, KINDS, "fill buckets")
    if config.write_index:
        outcome.leads.append(kept[LEADERS].frame.where(part_number("order") < EARLIER))
    return kept[PAIRED].frame


def join_payloads(search: CopySearch, pairs: DataFrame, rest: StoredFrame | None) -> DataFrame:
    """Return `pairs` with the payloads by which their documents are compared (CARRIED), sorted by leader.

    The row with a leader's payload precedes the pairs of that leader. `rest` holds the documents that did not match
    their leader in the previous round; None in round 0.
    """
    payloads = payload_rows(search, pairs)
    if rest is not None:  # later rounds pair no other documents of this run
        nodes = rest.frame.select(F.substring("order", -NODE_BYTES, NODE_BYTES).alias("node")).distinct()
        few = F.broadcast(nodes) if rest.rows <= MAX_BROADCAST_ROWS else nodes
        payloads = payloads.join(few, "node", "left_semi")
    if search.indexes:
        payloads = payloads.union(search.indexes.find(pairs, "payload"))
    files = search.indexes.leader_files
    writers = sum(num_groups(search.spark, len(each)) for each in (search.tasks, files))
    readers = payload_partitions(search.partitions, writers)
    empty = F.lit(b"")
    own = payloads.select("node", empty.alias("leader"), F.lit(0).cast("long").alias("key"), empty, "payload")
    by_node = pairs.withColumn("payload", empty).union(own)
    by_node = by_node.repartition(readers, "node").sortWithinPartitions("node", "leader")
    carried = by_node.mapInArrow(attach_payloads, CARRIED_DDL)
    return carried.repartition(readers, "leader").sortWithinPartitions("leader", "node")


def payload_partitions(partitions: int, writers: int) -> int:
    """Return the number of partitions of the shuffle of pairs and payloads: `partitions`, within MAX_BLOCKS.

    `writers`: number of Spark tasks that read payloads. The other writers are those of the pairs, one for each of the
    `partitions` of their keys.
    """
    return max(1, min(partitions, MAX_BLOCKS // (partitions + writers)))


def outcomes_of(number: int, batches: Iterator[pa.RecordBatch], compare: Compare) -> Outcomes:
    """Compare the pairs of one Spark partition; return an iterator over (kind of result, batch), see OUTCOMES."""
    return compare_pairs(batches, compare)


def payload_rows(search: CopySearch, pairs: DataFrame) -> DataFrame:
    """Return rows (node, payload) of all documents of this run that `pairs` may contain.

    A payload is the data by which a document is compared, such as text digest and signature.
    """
    task = search.tasks[0]
    if task.dedup.near and task.dedup.verify == "jaccard":
        members = pairs.select("node", part_number("node").cast("int").alias("part")).distinct()
        return map_parts(members, search.tasks, shingles_of_part, PAYLOADS_DDL)
    return dataframe_from_tasks(search.spark, payloads_of_part, search.tasks, PAYLOADS_DDL)


def keys_of_part(task: DedupTask) -> Iterator[pa.RecordBatch]:
    """Yield a row (key, keep order) for each key of each document of a part.

    Of equal documents in one `DedupWindow`, only the first in keep order has rows.
    """
    for window in read_windows(task):
        yield from key_rows(keys_of(window, task), window.orders[window.first])


def payloads_of_part(task: DedupTask) -> Iterator[pa.RecordBatch]:
    """Yield text digest and signature (PAYLOADS) of each document of a part.

    Of equal documents in one `DedupWindow`, only the first in keep order has a row.
    """
    for window in read_windows(task):
        batch = window.batch.filter(pa.array(window.first))
        payload = payloads_of(batch, task.dedup)
        columns = [binary_array(window.nodes[window.first]), binary_array(payload)]
        yield pa.RecordBatch.from_arrays(columns, schema=PAYLOADS)


def shingles_of_part(task: DedupTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield text digest and shingle hashes (PAYLOADS) of the documents of a part that are in `batches`.

    The first column of `batches` holds the nodes of the documents. The shingles are those of the part's source: a
    number never matches one of a source with another choice of `signature.numbers`.
    """
    candidates = {node[:-PART_BYTES] for batch in batches for node in batch.column(0).to_pylist()}
    if not candidates:
        return
    columns = {"documents": ["language", "text_digest", "raw_digest"], "text": ["text", "cuts"]}
    for batch in read_measured(task.part, columns, TEXTS_AT_ONCE):
        rows = [row for row in batch.to_pylist() if row["doc_id"] in candidates]
        payloads = []
        for row in rows:
            body = apply_cuts(row["text"], row["cuts"] or [])
            digest = {"normalised": row["text_digest"], "raw": row["raw_digest"], "off": b""}[task.dedup.exact]
            payloads.append(digest + shingle_hashes(body, row["language"], task.signature).astype("<u8").tobytes())
        part = task.part.ordinal.to_bytes(PART_BYTES, "big")
        nodes = pa.array([row["doc_id"] + part for row in rows], pa.binary())
        yield pa.RecordBatch.from_arrays([nodes, pa.array(payloads, pa.binary())], schema=PAYLOADS)
