"""Tests of star contraction without Spark: small graphs, whole runs of rounds against scipy, and packs."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from pipeline.dedup.star_contraction import (
    PACK_PAIRS,
    PACKS,
    all_links,
    concatenate_edges,
    contract,
    graph_of,
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
from schemas.errors import ContractError


def edges(*pairs, width=1):
    """Return edges between nodes that are given as numbers."""
    flat = b"".join(int(end).to_bytes(width, "big") for pair in pairs for end in pair)
    return np.frombuffer(flat, np.uint8).reshape(-1, 2, width)


def pairs(matrix):
    """Return the sorted pairs of numbers of a matrix."""
    return sorted(tuple(int.from_bytes(end.tobytes(), "big") for end in pair) for pair in matrix)


def links_of(pairs, nodes):
    """Return {node: smallest node of its component} by scipy, for every node with an edge to another."""
    pairs = np.asarray(pairs).reshape(-1, 2)
    _, labels = connected_components(
        coo_matrix((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(nodes, nodes)), directed=False
    )
    first = {}
    for node, label in enumerate(labels):
        first.setdefault(label, node)
    touched = np.unique(pairs[pairs[:, 0] != pairs[:, 1]])
    return {int(node): int(first[labels[node]]) for node in touched}


@pytest.mark.parametrize("width", [1, 8, 16, 20])
def test_contracted_edges_are_stars_around_the_smallest(width):
    stars = contract(edges((3, 2), (2, 1), (1, 3), (3, 2), (9, 9), (7, 8), width=width))
    assert pairs(stars) == [(2, 1), (3, 1), (8, 7)]
    assert stars.shape == (3, 2, width)


def test_nodes_that_differ_after_the_first_word_stay_distinct():
    head = b"\x80" * 8
    names = [head + tail for tail in (b"\x00", b"\x01", b"\xff")]
    matrix = np.frombuffer(b"".join(names[i] for i in (2, 1, 0, 2, 1, 1)), np.uint8).reshape(-1, 2, 9)
    graph = graph_of(matrix)
    assert [row.tobytes() for row in graph.nodes] == sorted(names)
    assert graph.ends.tolist() == [[2, 1], [0, 2], [1, 1]]


def test_bytes_are_ordered_without_sign():
    assert pairs(contract(edges((255, 1), (128, 127)))) == [(128, 127), (255, 1)]


def test_owners_are_of_the_node_alone_and_spread():
    nodes = np.random.default_rng(1).integers(0, 256, (10_000, 20), np.uint8)
    partitions = owners(nodes, 8)
    assert (owners(nodes[17:18], 8) == partitions[17]).all()
    assert np.bincount(partitions, minlength=8).min() > 1100
    counted = np.arange(10_000).astype(">u4").view(np.uint8).reshape(-1, 4)
    assert np.bincount(owners(counted, 8), minlength=8).min() > 1100


def test_an_edge_goes_to_the_owners_of_both_ends_once_each():
    edge = edges((200, 7), width=2)
    ends = owners(edge.reshape(-1, 2), 50)
    assert ends[0] != ends[1]
    sent, targets = send_to_both_ends(edge, 50)
    assert (pairs(sent), sorted(targets)) == ([(200, 7), (200, 7)], sorted(ends))
    sent, targets = send_to_both_ends(edge, 1)
    assert (pairs(sent), targets.tolist()) == ([(200, 7)], [0])


def test_large_star_links_larger_neighbors_of_its_own_nodes_to_the_smallest():
    around = edges((5, 2), (5, 8), (5, 9), (1, 2))
    owner = owners(np.array([[5]], np.uint8), 97)[0]
    linked, targets = large_star(around, owner, 97)
    assert pairs(linked) == [(2, 2), (8, 2), (9, 2)]  # the loop marks 2 for its owner; 1 is not a neighbor of 5
    assert targets.tolist() == owners(linked[:, 0], 97).tolist()


def test_small_star_separates_leaves_and_keeps_smaller_ends():
    received = edges((9, 4), (9, 3), (8, 4), (4, 4), (4, 1))
    left, leaves = small_star(received, 0, 1)  # one component, whose smallest node is 1; 4 has a loop
    assert pairs(left) == [(4, 1)]
    assert pairs(leaves) == [(3, 1), (8, 1), (9, 1)]
    elsewhere = min({*range(97)} - {*owners(np.arange(10, dtype=np.uint8)[:, None], 97)})
    left, leaves = small_star(received, elsewhere, 97)
    assert (len(left), len(leaves)) == (4, 0)


def test_followed_leaves_have_their_parents_clusters():
    links, roots = resolve_leaves(edges((5, 1), (1, 1)), edges((8, 5), (9, 5), (7, 1), (4, 3)))
    assert pairs(links) == [(4, 3), (7, 1), (8, 1), (9, 1)]
    assert pairs(roots) == [(3, 3)]
    links, roots = resolve_leaves(edges(), edges((4, 3)))
    assert (pairs(links), pairs(roots)) == ([(4, 3)], [(3, 3)])


def test_joined_matrices_reach_the_limit():
    matrices = [edges((1, 2)), edges(), edges((3, 4), (5, 6)), edges((7, 8))]
    assert [len(matrix) for matrix in concatenate_edges(matrices, 2)] == [3, 1]
    assert [len(matrix) for matrix in concatenate_edges(matrices)] == [4]
    assert list(concatenate_edges([edges()])) == []


def rounds_of(edges, partitions, chunk, readers):
    """Run the rounds of the Spark side with tasks of `chunk` edges; return the links and the edges by round."""
    levels, counts = [], []
    parts = [contract(part) for part in np.array_split(edges, readers)]
    while any(map(len, parts)) and len(counts) < 64:
        counts.append(sum(map(len, parts)))
        sent = [send_to_both_ends(matrix, partitions) for matrix in concatenate_edges(parts, chunk)]
        received = shuffled(sent, partitions)
        linked = [
            large_star(matrix, number, partitions)
            for number in range(partitions)
            for matrix in concatenate_edges(cut(received[number], chunk), chunk)
        ]
        received = shuffled(linked, partitions)
        ended = [small_star(matrix, number, partitions) for number, matrix in enumerate(received) if len(matrix)]
        parts = [left for left, _ in ended]
        levels.append(np.concatenate([leaves for _, leaves in ended]))
    known = edges[:0]
    for leaves in reversed(levels):
        known = np.concatenate([known, *resolve_leaves(known, leaves)])
    return known, counts


def cut(matrix, chunk):
    return [matrix[start : start + chunk] for start in range(0, len(matrix), chunk)]


def shuffled(sent, partitions):
    matrices, targets = [np.concatenate(side) for side in zip(*sent)]
    return [matrices[targets == number] for number in range(partitions)]


def random_graph(rng):
    return rng.integers(0, 2000, (1900, 2)), 2000


def chain(rng):
    order = rng.permutation(1500)
    return rng.permutation(np.stack([order[:-1], order[1:]], axis=1)), 1500


def sorted_chain(rng):
    order = np.arange(1500)
    return rng.permutation(np.stack([order[1:], order[:-1]], axis=1)), 1500


def star(rng):
    return np.stack([np.full(1200, 600), np.arange(1200)], axis=1), 1200


def giant_and_small(rng):
    giant = rng.integers(0, 400, (900, 2))
    small = 400 + np.stack([np.arange(0, 900, 3), np.arange(1, 900, 3)], axis=1)
    return rng.permutation(np.concatenate([giant, small, small + 1, small[:, ::-1]])), 1300


@pytest.mark.parametrize("graph", [random_graph, chain, sorted_chain, star, giant_and_small])
@pytest.mark.parametrize(
    ("partitions", "chunk", "readers"), [(1, 10_000, 1), (3, 10_000, 2), (16, 40, 7), (200, 25, 60)]
)
def test_rounds_end_with_the_components_and_each_leaves_fewer_edges(graph, partitions, chunk, readers):
    ends, nodes = graph(np.random.default_rng(7))
    links, counts = rounds_of(edges(*ends, width=4), partitions, chunk, readers)
    assert pairs(links) == sorted(links_of(ends, nodes).items())
    assert all(later < earlier for earlier, later in pairwise(counts))
    assert len(counts) <= 16
    assert pairs(all_links(contract(edges(*ends, width=4)))) == pairs(links)


def test_packs_hold_every_pair_once_by_target():
    rng = np.random.default_rng(2)
    matrix = rng.integers(0, 256, (5000, 2, 20), np.uint8)
    targets = rng.choice([0, 1, 4], 5000, p=[0.6, 0.3, 0.1])
    batches = list(pack_pairs(matrix, targets, kind=3))
    table = pa.Table.from_batches(batches)
    assert table.schema == PACKS
    assert set(table["kind"].to_pylist()) == {3}
    for target in (0, 1, 4):
        mine = [unpack_pairs(batch.filter(pa.compute.equal(batch["target"], target))) for batch in batches]
        assert np.array_equal(np.concatenate(mine), matrix[targets == target])
    sizes = [len(pack) // 40 for pack in table["pack"].to_pylist()]
    assert max(sizes) == PACK_PAIRS
    assert sorted(sizes)[-3:] == [PACK_PAIRS] * 3
    assert list(pack_pairs(matrix[:0], targets[:0])) == []
    sliced = batches[0].slice(2, 3)
    assert np.array_equal(unpack_pairs(sliced), unpack_pairs(batches[0])[2 * PACK_PAIRS :][: len(unpack_pairs(sliced))])


def test_many_packs_come_in_batches_that_end_between_packs():
    matrix = np.random.default_rng(3).integers(0, 256, (700, 2, 3), np.uint8)
    targets = np.arange(700) % 600
    batches = list(pack_pairs(matrix, targets))
    assert [batch.num_rows for batch in batches] == [256, 256, 88]
    assert pairs(np.concatenate([unpack_pairs(batch) for batch in batches])) == pairs(matrix)


def test_pairs_are_read_back_from_their_rows():
    matrix = edges((1, 2), (300, 4), (5, 70_000), width=3)
    batch = pair_batch(matrix)
    assert batch.schema.names == ["node", "cluster"]
    assert np.array_equal(pairs_of(batch), matrix)
    assert np.array_equal(pairs_of(batch.slice(1)), matrix[1:])


@pytest.mark.parametrize(
    ("first", "second", "got"),
    [
        ([b"ab", b"abc"], [b"ab", b"ab"], "2 and 3 bytes and 0 nulls"),
        ([b"ab"], [b"a"], "1 and 2 bytes and 0 nulls"),
        ([b"ab", None], [b"ab", b"ab"], "2 bytes and 1 nulls"),
        ([None], [None], " bytes and 2 nulls"),
        ([b""], [b""], "0 bytes and 0 nulls"),
    ],
)
def test_nodes_of_other_widths_are_refused(first, second, got):
    batch = pa.RecordBatch.from_arrays([pa.array(first, pa.binary()), pa.array(second, pa.binary())], names=["a", "b"])
    with pytest.raises(ContractError, match=rf"expected document ids of equal length, got {got}\. Delete the folder"):
        pairs_of(batch)


def test_batches_of_other_widths_are_refused():
    with pytest.raises(ContractError, match="got 1 and 2 bytes"):
        list(concatenate_edges([edges((1, 2)), edges((1, 2), width=2)], 10))
    mixed = pa.concat_batches([next(pack_pairs(edges((1, 2), width=width), np.zeros(1, np.int64))) for width in (1, 2)])
    with pytest.raises(ContractError, match="got 1 and 2 bytes"):
        unpack_pairs(mixed)
    assert len(pairs_of(pair_batch(edges(width=2)))) == 0
