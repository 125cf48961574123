"""Connected components of a graph larger than any worker: rounds of star contraction, then a finish in one task.

Source: Kiveris et al. 2014, "Connected Components in MapReduce and Beyond", section 3 (large-star, small-star), and
Lulli et al. 2017, "Fast Connected Components Computation in Large Graphs by Vertex Pruning" (leaves are set aside).
The docstring of `components` explains why a round keeps all components, and why the rounds end.
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
"""Edges that a task processes at a time, if it does not need all of them together."""
FEWEST_EDGES = 1 << 16
"""Least edges that justify a partition: numpy takes 20 ms for them, as long as a Spark task takes to start."""
PARTITION_EDGES = 1 << 21
"""Most edges in a partition, on average, and in the memory of a task that needs all of them together. They take half a
gigabyte: numpy uses about 250 bytes for an edge of 20-byte nodes (measured with 2 million edges, input included)."""
EDGES, LEAVES, LINKS = "edges", "leaves", "links"
PAIRS_DDL = "node binary, cluster binary"
KNOWN, REQUESTED = 0, 1
KindBatches = Iterator[tuple[str, pa.RecordBatch]]


@dataclass(frozen=True)
class Components:
    """The connected components of a graph of documents, and the cost of their computation."""

    links: DataFrame
    """Rows (node, cluster) for every node with an edge to another; the cluster is the smallest node of the
    component."""
    edges_by_round: tuple[int, ...]
    """Edges that are left before each round, and after the last one; the final task processes the latter."""
    kept_bytes: int
    """Size of the files written to the scratch folder [bytes]."""

    @property
    def rounds(self) -> int:
        """Return the number of rounds of star contraction."""
        return len(self.edges_by_round) - 1


# Every task that reads edges first replaces them by the stars of its own components. Large-star: the owner of a node
# links its larger neighbors to the smallest. Small-star: the owner of the larger ends replaces all edges that it
# received by their stars. Each of these operations preserves nodes and components and adds no edge.
#
# After them, a node that is the smaller end of no edge has only one edge. It is a leaf: it leaves the graph, and later
# takes the cluster of its parent. The largest node of a component is always a leaf, so the number of edges reaches
# zero. Nodes of random bytes need few rounds: even of a chain, the worst graph, a round leaves only 20 to 40 per cent
# of the edges (4 and 64 partitions). A chain of 10^5 nodes in the order of their bytes took 16 rounds.


def components(edges: DataFrame, scratch: FrameStore, finish_edges: int, partitions: int) -> Components:
    """Return the connected components of `edges`, two columns of byte strings of equal length.

    Once at most `finish_edges` edges are left, one task finds their components. `partitions` is lowered or raised if
    partitions would be too small or too large.

    Rows are saved in the folder `components` of `scratch`, from which an interrupted run resumes. Raises ContractError
    if nodes differ in length, or if edges are left after MAX_ROUNDS.
    """
    scratch = FrameStore(scratch.spark, scratch.folder.child("components"))
    left = scratch.store_each(EDGES, edges, _first_stars, {EDGES: PAIRS_DDL}, "collect pairs of copies")[EDGES]
    counts, levels, written = [left.rows], list[StoredFrame](), left.bytes
    while left.rows > finish_edges:
        if len(levels) == MAX_ROUNDS:
            raise ContractError(
                f"dedup: expected components within {MAX_ROUNDS} rounds, got {left.rows} edges left. "
                f"Set dedup.finish_edges to at least {left.rows}, then run `penstock run` again."
            )
        number = _sized(partitions, left.rows)
        step = functools.partial(_small_star, number)
        schemas = {EDGES: PAIRS_DDL, LEAVES: PAIRS_DDL}
        what = f"join clusters, round {len(counts)}"
        kept = scratch.store_each(f"round-{len(counts):02}", _large_stars(left, number), step, schemas, what)
        left = kept[EDGES]
        levels.append(kept[LEAVES])
        counts.append(left.rows)
        written += left.bytes + levels[-1].bytes
    # The names contain the number of rounds: a run that resumes with a different `finish_edges` must not read links
    # that were stored after a different round.
    after = f"after-{len(levels):02}"
    last, schema = _to_one_task(left), {LINKS: PAIRS_DDL}
    links = scratch.store_each(f"finish-{after}", last, _finish, schema, "join the last clusters")[LINKS]
    written += links.bytes
    if levels:
        followed = _followed(links, levels, partitions)
        links = scratch.store_each(f"links-{after}", followed, _write_links, schema, "assign clusters")[LINKS]
        written += links.bytes
    return Components(links.frame, tuple(counts), written)


def _large_stars(left: StoredFrame, partitions: int) -> DataFrame:
    """Return the edges that `large_star` makes, as packs in the partitions that own their larger nodes."""

    def send(batches: Batches) -> Batches:
        for edges in concatenate_edges(map(pairs_of, batches), CHUNK_EDGES):
            yield from pack_pairs(*send_to_both_ends(edges, partitions))

    def work(batches: Batches) -> Batches:
        # A node with more neighbors than fit in memory is processed in several batches. Each batch links the larger
        # neighbors that it contains to the smallest that it contains, which keeps components too.
        for edges in concatenate_edges(map(unpack_pairs, batches), PARTITION_EDGES):
            yield from pack_pairs(*large_star(edges, task_context().partitionId(), partitions))

    linked = _shuffled(left.mapped(send, PACKS_DDL), partitions).mapInArrow(work, PACKS_DDL)
    return _shuffled(linked, partitions)


def _to_one_task(left: StoredFrame) -> DataFrame:
    def send(batches: Batches) -> Batches:
        for edges in concatenate_edges(map(pairs_of, batches), CHUNK_EDGES):
            stars = contract(edges)
            yield from pack_pairs(stars, np.zeros(len(stars), np.int64))

    return _shuffled(left.mapped(send, PACKS_DDL), 1)


def _followed(links: StoredFrame, levels: Sequence[StoredFrame], partitions: int) -> DataFrame:
    """Return the links (node, cluster) of all nodes, as packs.

    `links` are the links of the nodes left after the last round. `levels` are the leaves (node, parent) that each round
    removed.
    """
    rows = list(itertools.accumulate([links.rows, *(level.rows for level in reversed(levels))]))
    numbers = [_sized(partitions, count) for count in rows[1:]]
    known = links.mapped(_sender(0, KNOWN, numbers[0]), PACKS_DDL)
    # From the last round to the first, each leaf gets the cluster of its parent.
    for level, number, following in zip(reversed(levels), numbers, [*numbers[1:], 1]):
        leaves = level.mapped(_sender(1, REQUESTED, number), PACKS_DDL)
        both = _shuffled(known.union(leaves), number).sortWithinPartitions("kind")
        known = both.mapInArrow(_follower(following), PACKS_DDL)
    return known


def _sized(partitions: int, rows: int) -> int:
    """Return `partitions`, adapted to `rows` so that partitions are neither too small nor too large."""
    return max(min(partitions, -(-rows // FEWEST_EDGES)), -(-rows // PARTITION_EDGES), 1)


def _sender(end: int, kind: int, partitions: int) -> Callable[[Batches], Batches]:
    """Return a function that packs pairs of nodes, each for the partition that owns one node of the pair.

    This node is the first (`end` = 0) or the second (`end` = 1). Every pack has this `kind`, KNOWN or REQUESTED.
    """

    def send(batches: Batches) -> Batches:
        for pairs in concatenate_edges(map(pairs_of, batches), CHUNK_EDGES):
            yield from pack_pairs(pairs, owners(pairs[:, end], partitions), kind)

    return send


def _follower(partitions: int) -> Callable[[Batches], Batches]:
    """Return a function that gives each leaf (node, parent) of one partition the cluster of its parent.

    The function reads packs: first known links (node, cluster), then leaves. It yields the links of all these nodes, as
    packs for the partitions that own the nodes.
    """

    def work(batches: Batches) -> Batches:
        known: list[Bytes] = []

        def leaves() -> Iterator[Bytes]:
            for batch in batches:
                asks = pc.equal(batch.column("kind"), REQUESTED)
                known.append(unpack_pairs(batch.filter(pc.invert(asks))))
                yield unpack_pairs(batch.filter(asks))

        for requested in concatenate_edges(leaves(), CHUNK_EDGES):
            held = np.concatenate([*(rows for rows in known if len(rows)), requested[:0]])
            links, roots = resolve_leaves(held, requested)
            known[:] = [held, roots]
            yield from pack_pairs(links, owners(links[:, 0], partitions))
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
