"""Connected components of a graph that no worker holds: rounds of stars that shed their leaves, then a bounded finish.

Source: Kiveris et al. 2014, "Connected Components in MapReduce and Beyond", section 3 (large-star, small-star), and
Lulli et al. 2017, "Fast Connected Components Computation in Large Graphs by Vertex Pruning" (leaves are put aside).
`components` says why a round loses nothing and why rounds end.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from pipeline.dedup.keep_order import Bytes
from pipeline.dedup.star_contraction import (
    PACKS_DDL,
    all_links,
    concatenate_edges,
    contract,
    large_star,
    owners,
    pack_pairs,
    pair_batch,
    pairs_of,
    resolve_leaves,
    send_to_both_ends,
    small_star,
    unpack_pairs,
)
from pipeline.engine.materialize import Batches, FrameStore, StoredFrame
from pipeline.engine.spark import task_context
from schemas.errors import ContractError

MAX_ROUNDS = 64
CHUNK_EDGES = 1 << 20
"""Edges that a task looks at together where a part of them will do."""
FEWEST_EDGES = 1 << 16
"""Edges for which it pays to have a partition: numpy takes 20 ms for them, a task of Spark as long to begin."""
PARTITION_EDGES = 1 << 21
"""Edges that a partition holds on average at most, and that a task looks at together where it needs them all: half a
gigabyte, as numpy takes about 250 bytes for an edge between nodes of 20 (measured with 2 million, input included)."""
EDGES, LEAVES, LINKS = "edges", "leaves", "links"
PAIRS_DDL = "node binary, cluster binary"
KNOWN, REQUESTED = 0, 1
KindBatches = Iterator[tuple[str, pa.RecordBatch]]


@dataclass(frozen=True)
class Components:
    """Which nodes belong together, and what it took to find out."""

    links: DataFrame
    """(node, cluster) for every node with an edge to another; the cluster is the smallest node of the component."""
    edges_by_round: tuple[int, ...]
    """Edges that were left before each round, and after the last: those that the finish took, or 0."""
    kept_bytes: int
    """What was written to the scratch folder [bytes]."""

    @property
    def rounds(self) -> int:
        """How many rounds there were."""
        return len(self.edges_by_round) - 1


def components(edges: DataFrame, scratch: FrameStore, finish_edges: int, partitions: int) -> Components:
    """The connected components of `edges`: two columns of byte strings of one width, in any order and number.

    A task that reads edges puts the stars of its own components in their place. Large-star: the owner of a node links
    its larger neighbours to the smallest. Small-star: the owner of the larger ends puts the stars of all that it
    received in its place. Each of them keeps nodes and components and adds no edge. A node that is then the smaller
    end of no edge has one edge: it is a leaf, has the cluster of its parent and takes no further part. The largest
    node of a component is always one, so edges come to an end. Nodes whose bytes are as good as random do so quickly:
    of a chain, the worst graph, a round leaves 20 to 40 per cent (4 and 64 partitions); a chain of 10^5 nodes in the
    order of their bytes took 16 rounds. At last parents pass their clusters back to their leaves.

    Once at most `finish_edges` are left, one task does the rest. There are as many partitions as asked for, unless
    they would hold more than PARTITION_EDGES or fewer than FEWEST_EDGES. Rows are kept in the folder `components` of
    `scratch`, where an interrupted run finds them again. Raises ContractError if the widths differ or MAX_ROUNDS did
    not do.
    """
    scratch = FrameStore(scratch.spark, scratch.folder.child("components"))
    left = scratch.store_each(EDGES, edges, _first_stars, {EDGES: PAIRS_DDL})[EDGES]
    counts, levels, written = [left.rows], list[StoredFrame](), left.bytes
    while left.rows > finish_edges:
        if len(levels) == MAX_ROUNDS:
            raise ContractError(
                f"dedup: expected components within {MAX_ROUNDS} rounds, got {left.rows} edges left. "
                "Raise dedup.finish_edges above them."
            )
        number = _sized(partitions, left.rows)
        step = functools.partial(_small_star, number)
        schemas = {EDGES: PAIRS_DDL, LEAVES: PAIRS_DDL}
        kept = scratch.store_each(f"round-{len(counts):02}", _large_stars(left, number), step, schemas)
        left = kept[EDGES]
        levels.append(kept[LEAVES])
        counts.append(left.rows)
        written += left.bytes + levels[-1].bytes
    # Named by the round: a run that goes on with another `finish_edges` must not take what ended at another one.
    after = f"after-{len(levels):02}"
    links = scratch.store_each(f"finish-{after}", _to_one_task(left), _finish, {LINKS: PAIRS_DDL})[LINKS]
    written += links.bytes
    if levels:
        found = _followed(links, levels, partitions)
        links = scratch.store_each(f"links-{after}", found, _write_links, {LINKS: PAIRS_DDL})[LINKS]
        written += links.bytes
    return Components(links.frame, tuple(counts), written)


def _large_stars(left: StoredFrame, partitions: int) -> DataFrame:
    """What large-star makes of edges, as packs at the owners of the larger ends."""

    def send(batches: Batches) -> Batches:
        for edges in concatenate_edges(map(pairs_of, batches), CHUNK_EDGES):
            yield from pack_pairs(*send_to_both_ends(edges, partitions))

    def work(batches: Batches) -> Batches:
        # A node with more neighbours than fit is looked at in parts: each links its larger ones to the smallest of
        # the part, which keeps components too.
        for edges in concatenate_edges(map(unpack_pairs, batches), PARTITION_EDGES):
            yield from pack_pairs(*large_star(edges, task_context().partitionId(), partitions))

    linked = _shuffled(left.mapped(send, PACKS_DDL), partitions).mapInArrow(work, PACKS_DDL)
    return _shuffled(linked, partitions)


def _to_one_task(left: StoredFrame) -> DataFrame:
    """The edges that are left, as packs in one partition."""

    def send(batches: Batches) -> Batches:
        for edges in concatenate_edges(map(pairs_of, batches), CHUNK_EDGES):
            stars = contract(edges)
            yield from pack_pairs(stars, np.zeros(len(stars), np.int64))

    return _shuffled(left.mapped(send, PACKS_DDL), 1)


def _followed(links: StoredFrame, levels: Sequence[StoredFrame], partitions: int) -> DataFrame:
    """All links, as packs: clusters of parents are passed to their leaves, those of the last round first."""
    rows = list(itertools.accumulate([links.rows, *(level.rows for level in reversed(levels))]))
    numbers = [_sized(partitions, count) for count in rows[1:]]
    known = links.mapped(_sender(0, KNOWN, numbers[0]), PACKS_DDL)
    for level, number, following in zip(reversed(levels), numbers, [*numbers[1:], 1]):
        asked = level.mapped(_sender(1, REQUESTED, number), PACKS_DDL)
        both = _shuffled(known.union(asked), number).sortWithinPartitions("kind")
        known = both.mapInArrow(_follower(following), PACKS_DDL)
    return known


def _sized(partitions: int, rows: int) -> int:
    """As many partitions as are asked for, or as the bounds of their sizes allow."""
    return max(min(partitions, -(-rows // FEWEST_EDGES)), -(-rows // PARTITION_EDGES), 1)


def _sender(end: int, kind: int, partitions: int) -> Callable[[Batches], Batches]:
    """Sends pairs to the owner of one of their ends."""

    def send(batches: Batches) -> Batches:
        for pairs in concatenate_edges(map(pairs_of, batches), CHUNK_EDGES):
            yield from pack_pairs(pairs, owners(pairs[:, end], partitions), kind)

    return send


def _follower(partitions: int) -> Callable[[Batches], Batches]:
    """Answers what is asked of a partition from what is known, which comes first; then passes on what is known."""

    def work(batches: Batches) -> Batches:
        known: list[Bytes] = []

        def leaves() -> Iterator[Bytes]:
            for batch in batches:
                asks = pc.equal(batch.column("kind"), REQUESTED)
                known.append(unpack_pairs(batch.filter(pc.invert(asks))))
                yield unpack_pairs(batch.filter(asks))

        for asked in concatenate_edges(leaves(), CHUNK_EDGES):
            held = np.concatenate([*(rows for rows in known if len(rows)), asked[:0]])
            found, roots = resolve_leaves(held, asked)
            known[:] = [held, roots]
            yield from pack_pairs(found, owners(found[:, 0], partitions))
        for pairs in concatenate_edges(known, 0):
            yield from pack_pairs(pairs, owners(pairs[:, 0], partitions))

    return work


def _first_stars(number: int, batches: Batches) -> KindBatches:
    for edges in concatenate_edges(map(pairs_of, batches), CHUNK_EDGES):
        yield EDGES, pair_batch(contract(edges))


def _small_star(partitions: int, number: int, batches: Batches) -> KindBatches:
    for edges in concatenate_edges(map(unpack_pairs, batches)):
        left, leaves = small_star(edges, number, partitions)
        yield EDGES, pair_batch(left)
        yield LEAVES, pair_batch(leaves)


def _finish(number: int, batches: Batches) -> KindBatches:
    for edges in concatenate_edges(map(unpack_pairs, batches)):
        yield LINKS, pair_batch(all_links(edges))


def _write_links(number: int, batches: Batches) -> KindBatches:
    return ((LINKS, pair_batch(unpack_pairs(batch))) for batch in batches)


def _shuffled(rows: DataFrame, partitions: int) -> DataFrame:
    return rows.repartitionById(partitions, "target")
