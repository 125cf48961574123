"""Star contraction of graphs in numpy: connected components, the two star operations of a round, and packed pairs.

A node is the id of a document, a byte string; all have equal length. Edges are a matrix (edges, 2, width) of bytes. A
star is a component whose nodes are all linked to one center, its smallest node. Replacing the edges of a graph by stars
keeps its components and leaves fewer edges. Nodes are compared by all their bytes, never by a hash alone. Pairs are
packed many to a row for shuffles.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dedup.keep_order import Bytes, binary_array, rows_of_bytes
from schemas.errors import ContractError

Numbers = npt.NDArray[np.int64]
ALL = sys.maxsize
_SAME_WIDTH = "Delete the folder `clusters/v-…/scratch` in the run folder, then run `penstock run` again."
MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Odd constants of splitmix64 (Steele et al. 2014)."""


@dataclass(frozen=True)
class Graph:
    """A graph whose nodes are numbered in the order of their bytes."""

    nodes: Bytes
    """The distinct nodes, (nodes, width), in ascending order."""
    ends: Numbers
    """The numbers of the two nodes of each edge, (edges, 2)."""


def graph_of(edges: Bytes) -> Graph:
    """Return the graph of edges (edges, 2, width); self-loops and repeated edges are kept."""
    count, _, width = edges.shape
    rows = edges.reshape(2 * count, width)
    words = _words(rows)
    order = np.argsort(words[:, 0])
    ranked = words[order]
    differs = ranked[1:] != ranked[:-1]
    # Nodes that differ only after the first 8 bytes are sorted by the rest too; among digests they hardly occur.
    if (differs.any(axis=1) & ~differs[:, 0]).any():
        order = np.lexsort(words.T[::-1])
        ranked = words[order]
        differs = ranked[1:] != ranked[:-1]
    starts = np.concatenate([np.ones(min(1, len(rows)), bool), differs.any(axis=1)])
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.cumsum(starts) - 1
    return Graph(rows[order[starts]], numbers.reshape(count, 2))


def _words(rows: Bytes) -> npt.NDArray[np.uint64]:
    count, width = rows.shape
    padded = np.zeros((count, -(-width // 8) * 8), np.uint8)
    padded[:, :width] = rows
    return padded.view(">u8").astype(np.uint64)


def owners(nodes: Bytes, partitions: int) -> Numbers:
    """Return the partition that owns each node (nodes,), chosen by a hash of all its bytes."""
    mixed = np.zeros(len(nodes), np.uint64)
    for word in _words(nodes).T:
        mixed = (mixed ^ word) * MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * MIX[1]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * MIX[2]
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(partitions)).astype(np.int64)


def component_centers(nodes: int, ends: Numbers) -> Numbers:
    """Return, for each of the nodes 0 to `nodes` - 1, the smallest node of its component (nodes,)."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph = coo_matrix((np.ones(len(ends), np.int8), (ends[:, 0], ends[:, 1])), shape=(nodes, nodes))
    components, labels = connected_components(graph, directed=False)
    smallest = np.full(components, nodes, np.int64)
    np.minimum.at(smallest, labels, np.arange(nodes))
    centers: Numbers = smallest[labels]
    return centers


def forest(nodes: int, ends: Numbers) -> Numbers:
    """Return stars with the same components as the edges `ends`, as edges (node, center).

    The nodes are the numbers 0 to `nodes` - 1. The center of a star is the smallest node of its component.
    """
    center = component_centers(nodes, ends)
    leaves = np.flatnonzero(center != np.arange(nodes))
    return np.stack([leaves, center[leaves]], axis=1)


def contract(edges: Bytes) -> Bytes:
    """Replace edges by stars with the same components; return their edges (node, center), see `forest`."""
    graph = graph_of(edges)
    return graph.nodes[forest(len(graph.nodes), graph.ends)]


def send_to_both_ends(edges: Bytes, partitions: int) -> tuple[Bytes, Numbers]:
    """Replace edges by stars with the same components; return (new edges, target partitions).

    A new edge occurs once for each partition that owns one of its nodes.
    """
    graph = graph_of(edges)
    stars = forest(len(graph.nodes), graph.ends)
    owner = owners(graph.nodes, partitions)[stars]
    apart = owner[:, 0] != owner[:, 1]
    targets = np.concatenate([owner[:, 0], owner[apart, 1]])
    return graph.nodes[np.concatenate([stars, stars[apart]])], targets


def large_star(edges: Bytes, partition: int, partitions: int) -> tuple[Bytes, Numbers]:
    """Apply the large-star operation to the nodes that `partition` owns; return (new edges, target partitions).

    A new edge is sent to the owner of its larger node. A self-loop marks a node that is the smaller end of an edge.
    """
    graph = graph_of(edges)
    count = len(graph.nodes)
    owner = owners(graph.nodes, partitions)
    low, high = graph.ends.min(axis=1), graph.ends.max(axis=1)
    smallest = np.arange(count)
    np.minimum.at(smallest, high, low)
    # link each larger neighbor of an owned node to the smallest neighbor, or to the node if no neighbor is smaller
    linked = (owner[low] == partition) & (low != high)
    stars = forest(count, np.stack([high[linked], smallest[low[linked]]], axis=1))
    marks = np.zeros(count, bool)
    marks[stars[:, 1]] = True
    loops = np.flatnonzero(marks)
    linked_ends = np.concatenate([stars, np.stack([loops, loops], axis=1)])
    return graph.nodes[linked_ends], owner[linked_ends[:, 0]]


def small_star(edges: Bytes, partition: int, partitions: int) -> tuple[Bytes, Bytes]:
    """Replace the edges whose larger node `partition` owns by stars; return (remaining edges, leaves).

    A leaf (node, parent) is the edge of a node that `partition` owns and that has no self-loop. The node has no other
    edge.
    """
    graph = graph_of(edges)
    count = len(graph.nodes)
    smaller_end = np.zeros(count, bool)
    smaller_end[graph.ends[graph.ends[:, 0] == graph.ends[:, 1], 0]] = True
    stars = forest(count, graph.ends)
    owned = owners(graph.nodes, partitions) == partition
    leaf = (owned & ~smaller_end)[stars[:, 0]]
    return graph.nodes[stars[~leaf]], graph.nodes[stars[leaf]]


def all_links(edges: Bytes) -> Bytes:
    """Return (node, smallest node of its component) for every node of the graph of `edges`."""
    graph = graph_of(edges)
    count = len(graph.nodes)
    return graph.nodes[np.stack([np.arange(count), component_centers(count, graph.ends)], axis=1)]


def resolve_leaves(known: Bytes, requested: Bytes) -> tuple[Bytes, Bytes]:
    """Return the links (node, cluster) of all leaves, and the links of the parents that are not in `known`.

    `known` are links (node, cluster) of parents, and `requested` are leaves (node, parent). A parent that is not in
    `known` is the smallest node of its cluster, so it links to itself.
    """
    graph = graph_of(np.concatenate([known, requested]))
    held, leaves = graph.ends[: len(known)], graph.ends[len(known) :]
    cluster = np.arange(len(graph.nodes))
    cluster[held[:, 0]] = held[:, 1]
    new = np.zeros(len(graph.nodes), bool)
    new[leaves[:, 1]] = True
    new[held[:, 0]] = False
    roots = np.flatnonzero(new)
    links = np.stack([leaves[:, 0], cluster[leaves[:, 1]]], axis=1)
    return graph.nodes[links], graph.nodes[np.stack([roots, roots], axis=1)]


def concatenate_edges(matrices: Iterable[Bytes], limit: int = ALL) -> Iterator[Bytes]:
    """Yield the edges of all matrices, concatenated into matrices of at least `limit` edges; the last may have fewer.

    No yielded matrix is empty. Raises ContractError if nodes differ in length.
    """
    pending: list[Bytes] = []
    count = 0
    for matrix in filter(len, matrices):
        if pending and matrix.shape[2] != pending[0].shape[2]:
            widths = f"{pending[0].shape[2]} and {matrix.shape[2]}"
            raise ContractError(f"dedup: expected document ids of equal length, got {widths} bytes. {_SAME_WIDTH}")
        pending.append(matrix)
        count += len(matrix)
        if count >= limit:
            yield np.concatenate(pending)
            pending, count = [], 0
    if count:
        yield np.concatenate(pending)


# Packs: pairs of nodes are stored one to a row, but shuffled many to a row.
#
# The JVM takes longer to move a row of two nodes, and to convert it to Arrow and back, than numpy takes to process it.
# A pack holds the pairs that one task sends to one partition, up to PACK_PAIRS.

PACK_PAIRS = 1024
"""Most pairs in a pack: 40 KiB for nodes of 20 bytes, so that the thousands of rows of an Arrow batch stay below 100
MiB."""
PACKS_A_BATCH = 256
"""Most packs in an Arrow batch."""
PACKS = pa.schema([("target", pa.int32()), ("kind", pa.int32()), ("width", pa.int32()), ("pack", pa.binary())])
PACKS_DDL = "target int, kind int, width int, pack binary"
"""`target` is the partition that receives a pack, `kind` lets it distinguish packs, `width` is the length of a node
[bytes]."""


def pack_pairs(pairs: Bytes, targets: Numbers, kind: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield pairs (pairs, 2, width) as batches of at most PACKS_A_BATCH packs.

    `targets` (pairs,) are the partitions that receive the pairs; a pack holds pairs for one partition.
    """
    count, _, width = pairs.shape
    if not count:
        return
    order = np.argsort(targets, kind="stable")
    ends = np.cumsum(np.bincount(targets))
    starts = np.concatenate([np.arange(low, high, PACK_PAIRS) for low, high in zip([0, *ends[:-1]], ends)])
    bounds = np.append(starts, count)
    for first in range(0, len(starts), PACKS_A_BATCH):
        cuts = bounds[first : first + PACKS_A_BATCH + 1]
        number = len(cuts) - 1
        rows = pairs[order[cuts[0] : cuts[-1]]].reshape(-1)
        offsets = ((cuts - cuts[0]) * (2 * width)).astype(np.int32)
        columns = [
            pa.array(targets[order[cuts[:-1]]].astype(np.int32)),
            pa.array(np.full(number, kind, np.int32)),
            pa.array(np.full(number, width, np.int32)),
            pa.Array.from_buffers(pa.binary(), number, [None, pa.py_buffer(offsets), pa.py_buffer(rows)]),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=PACKS)


def unpack_pairs(batch: pa.RecordBatch) -> Bytes:
    """Return the pairs of all packs of a batch (pairs, 2, width). Raises ContractError if nodes differ in length."""
    if not batch.num_rows:
        return np.zeros((0, 2, 1), np.uint8)
    widths = pc.min_max(batch.column("width"))
    low, high = widths["min"].as_py(), widths["max"].as_py()
    if low != high:
        raise ContractError(f"dedup: expected document ids of equal length, got {low} and {high} bytes. {_SAME_WIDTH}")
    column = batch.column("pack")
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].reshape(-1, 2, low)


def pairs_of(batch: pa.RecordBatch) -> Bytes:
    """Return the first two columns of a batch as pairs (rows, 2, width). Raises ContractError if nodes differ in
    length."""
    if not batch.num_rows:
        return np.zeros((0, 2, 1), np.uint8)
    ends = [batch.column(end) for end in (0, 1)]
    lengths = [pc.min_max(pc.binary_length(end)) for end in ends]
    widths = {length[side].as_py() for length in lengths for side in ("min", "max")}
    nulls = sum(end.null_count for end in ends)
    if nulls or len(widths) > 1 or not min(widths):
        listed = " and ".join(str(width) for width in sorted(widths - {None}))
        raise ContractError(
            f"dedup: expected document ids of equal length, got {listed} bytes and {nulls} nulls. {_SAME_WIDTH}"
        )
    return np.stack([rows_of_bytes(end, min(widths)) for end in ends], axis=1)


def pair_batch(pairs: Bytes) -> pa.RecordBatch:
    """Return pairs of nodes as a batch of rows (node, cluster)."""
    columns = [binary_array(pairs[:, end]) for end in (0, 1)]
    return pa.RecordBatch.from_arrays(columns, names=["node", "cluster"])
