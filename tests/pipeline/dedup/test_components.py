"""Tests of connected components on Spark against scipy: by rounds, with the bounded finish, after a killed run."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

import pipeline.dedup.components as module
from pipeline.dedup.components import components
from pipeline.dedup.keep_order import binary_array, rows_of_bytes
from pipeline.engine import materialize
from pipeline.engine.materialize import FrameStore
from schemas.errors import ContractError
from schemas.storage import Store

pytestmark = pytest.mark.spark


@pytest.fixture
def scratch(spark, tmp_path):
    return FrameStore(spark, Store(str(tmp_path / "scratch")))


def named(nodes, width, rng):
    """Return distinct names of nodes in random order of their bytes (nodes, width)."""
    names = rng.integers(0, 256, (nodes, width), np.uint8)
    names[:, -4:] = np.arange(nodes, dtype=">u4").view(np.uint8).reshape(-1, 4)
    return names


def frame_of(spark, pairs, names, folder, files=5):
    """Return the edges as a DataFrame of (a, b) from several unsorted files."""
    for number in range(files):
        ends = [binary_array(names[pairs[number::files, end]]) for end in (0, 1)]
        pq.write_table(pa.table(dict(zip("ab", ends))), folder / f"edges-{number}.parquet")
    return spark.read.parquet(*sorted(str(path) for path in folder.glob("edges-*.parquet")))


def expected(pairs, names):
    """Return rows of node and smallest node of its component by scipy, for every node with an edge to another."""
    order = np.lexsort(names.T[::-1])
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    ranks = rank[pairs]
    graph = coo_matrix((np.ones(len(pairs)), (ranks[:, 0], ranks[:, 1])), shape=(len(names), len(names)))
    count, labels = connected_components(graph, directed=False)
    first = np.full(count, len(names))
    np.minimum.at(first, labels, np.arange(len(names)))
    touched = np.unique(ranks[ranks[:, 0] != ranks[:, 1]])
    return np.concatenate([names[order[touched]], names[order[first[labels[touched]]]]], axis=1)


def links_of(result, width=20):
    """Return rows of node and cluster, sorted by node."""
    table = result.links.toArrow().combine_chunks()
    if not table.num_rows:
        return np.zeros((0, 2 * width), np.uint8)
    rows = np.concatenate([rows_of_bytes(column.chunk(0), width) for column in table.columns], axis=1)
    return rows[np.lexsort(rows.T[width - 1 :: -1])]


def mixed_graph():
    """Return a giant component, many small components, a chain, a star, loops, double and reversed edges."""
    rng = np.random.default_rng(11)
    giant = rng.integers(0, 500, (1200, 2))
    small = 500 + np.stack([np.arange(0, 900, 3), np.arange(1, 900, 3)], axis=1)
    order = 1400 + rng.permutation(60)
    star = np.stack([np.full(900, 2200), np.arange(2200, 3100)], axis=1)
    loops = np.stack([np.arange(3000, 3200)] * 2, axis=1)
    chain = np.stack([order[:-1], order[1:]], axis=1)
    pairs = np.concatenate([giant, giant[:200], giant[:200, ::-1], small, small + 1, small, chain, star, loops])
    return rng.permutation(pairs), named(3200, 20, rng)


def test_the_number_of_partitions_is_bounded_by_their_size():
    fewest, most = module.FEWEST_EDGES, module.PARTITION_EDGES
    assert [module._sized(4, rows) for rows in (0, 1, fewest, fewest + 1)] == [1, 1, 1, 2]
    assert [module._sized(4, rows) for rows in (4 * fewest, 4 * most, 4 * most + 1)] == [4, 4, 5]


@pytest.mark.parametrize(
    ("partitions", "finish_edges"),
    [(1, 0), (3, 0), pytest.param(16, 0, marks=pytest.mark.slow), (3, 600), (3, 10_000)],
)
def test_links_equal_scipys_at_any_partitioning(spark, scratch, tmp_path, monkeypatch, partitions, finish_edges):
    monkeypatch.setattr(module, "FEWEST_EDGES", 1)
    monkeypatch.setattr(materialize, "SPAN_BYTES", 1)
    pairs, names = mixed_graph()
    result = components(frame_of(spark, pairs, names, tmp_path), scratch, finish_edges, partitions)
    assert np.array_equal(links_of(result), expected(pairs, names))
    counts = result.edges_by_round
    assert result.rounds == len(counts) - 1
    assert all(later < earlier for earlier, later in itertools.pairwise(counts))
    assert counts[-1] <= finish_edges
    if finish_edges == 10_000:
        assert result.rounds == 0
    else:
        assert result.rounds >= 1
        assert counts[-2] > finish_edges


@pytest.mark.parametrize("width", [3, 16])
def test_nodes_of_any_width_and_columns_of_any_name(spark, scratch, tmp_path, width):
    values = [0, 1, 2, 255, 256, 65_536, 2**24 - 1]
    names = np.array([list(value.to_bytes(width, "big")) for value in values], np.uint8)
    pairs = np.array([[6, 3], [3, 5], [4, 2], [1, 1]])
    frame = frame_of(spark, pairs, names, tmp_path, 2).toDF("member", "leader")
    result = components(frame, scratch, 0, 2)
    assert np.array_equal(links_of(result, width), expected(pairs, names))


def test_no_edges_no_links(spark, scratch):
    result = components(spark.createDataFrame([], "a binary, b binary"), scratch, 10, 2)
    assert (len(links_of(result)), result.rounds, result.edges_by_round) == (0, 0, (0,))
    assert result.links.schema.simpleString() == "struct<node:binary,cluster:binary>"


def test_a_killed_run_resumes_after_its_last_round(spark, scratch, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FEWEST_EDGES", 1)
    monkeypatch.setattr(materialize, "SPAN_BYTES", 1)
    pairs, names = mixed_graph()
    frame = frame_of(spark, pairs, names, tmp_path)
    first = components(frame, scratch, 0, 3)
    folder = scratch.folder.child("components")
    for name in (f"links-after-{first.rounds:02}.json", f"round-{first.rounds:02}.json"):
        assert folder.exists(name)
        folder.delete(name)
    unreadable = frame.where(F.raise_error(F.lit("computed again")).isNull())
    again = components(unreadable, scratch, 0, 4)
    assert np.array_equal(links_of(again), expected(pairs, names))
    assert again.edges_by_round[:-1] == first.edges_by_round[:-1]
    finished = components(unreadable, scratch, first.edges_by_round[1], 4)
    assert finished.rounds == 1 < first.rounds
    assert np.array_equal(links_of(finished), expected(pairs, names))
    scratch.clear()
    assert list(scratch.folder.walk()) == []


def test_rounds_that_do_not_end_are_refused(spark, scratch, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_ROUNDS", 1)
    monkeypatch.setattr(module, "FEWEST_EDGES", 1)
    monkeypatch.setattr(materialize, "SPAN_BYTES", 1)
    pairs, names = mixed_graph()
    with pytest.raises(
        ContractError, match=r"expected components within 1 rounds, got \d+ edges left\. Set dedup\.finish_edges"
    ):
        components(frame_of(spark, pairs, names, tmp_path), scratch, 0, 3)


def test_unequal_widths_are_refused(spark, scratch):
    frame = spark.createDataFrame([(b"ab", b"abc")], "a binary, b binary")
    with pytest.raises(ContractError, match="got 2 and 3 bytes and 0 nulls"):
        components(frame, scratch, 0, 3)


def large_random(rng):
    return rng.integers(0, 490_000, (1_000_000, 2)), 490_000


def large_chain(rng):
    order = rng.permutation(100_000)
    return rng.permutation(np.stack([order[:-1], order[1:]], axis=1)), 100_000


def large_star(rng):
    return np.stack([np.full(1_000_000, 500_000), np.arange(1_000_000)], axis=1), 1_000_000


def giant_and_small(rng):
    giant = rng.integers(0, 200_000, (600_000, 2))
    small = 200_000 + np.stack([np.arange(0, 300_000, 3), np.arange(1, 300_000, 3)], axis=1)
    return rng.permutation(np.concatenate([giant, small, small + 1])), 500_000


@pytest.mark.slow
@pytest.mark.parametrize("graph", [large_random, large_chain, large_star, giant_and_small])
def test_large_graphs_equal_scipys_by_rounds_alone_and_with_the_finish(spark, tmp_path, graph):
    rng = np.random.default_rng(3)
    pairs, nodes = graph(rng)
    names = named(nodes, 20, rng)
    frame = frame_of(spark, pairs, names, tmp_path, 16)
    links = expected(pairs, names)
    by_rounds = components(frame, FrameStore(spark, Store(str(tmp_path / "rounds"))), 0, 4)
    assert by_rounds.edges_by_round[-1] == 0
    assert by_rounds.rounds >= 1
    assert np.array_equal(links_of(by_rounds), links)
    finished = components(frame, FrameStore(spark, Store(str(tmp_path / "finish"))), 4_000_000, 4)
    assert finished.rounds == 0
    assert np.array_equal(links_of(finished), links)
