"""Connected components against scipy's, by rounds alone and with the bounded finish."""

import numpy as np
import pytest
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from pipeline.dedup.components import components

pytestmark = pytest.mark.spark


def name(number: int) -> bytes:
    return int(number).to_bytes(16, "big")


def expected(pairs: np.ndarray, size: int) -> dict[bytes, bytes]:
    """Cluster by document, for every document with an edge, from scipy."""
    graph = coo_matrix((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(size, size))
    _, labels = connected_components(graph, directed=False)
    smallest = {}
    for node in range(size):
        smallest.setdefault(labels[node], node)
    touched = np.unique(pairs[pairs[:, 0] != pairs[:, 1]])
    return {name(node): name(smallest[labels[node]]) for node in touched}


def random_pairs() -> tuple[np.ndarray, int]:
    return np.random.default_rng(3).integers(0, 600, (450, 2)), 600


def chain() -> tuple[np.ndarray, int]:
    order = np.random.default_rng(5).permutation(40)
    return np.stack([order[:-1], order[1:]], axis=1), 40


def star() -> tuple[np.ndarray, int]:
    return np.stack([np.full(299, 150), np.delete(np.arange(300), 150)], axis=1), 300


@pytest.mark.parametrize("graph", [random_pairs, chain, star])
@pytest.mark.parametrize("finish_edges", [0, 10_000])
def test_components_equal_scipys(spark, graph, finish_edges):
    pairs, size = graph()
    frame = spark.createDataFrame([(name(a), name(b)) for a, b in pairs], "a binary, b binary")
    found, rounds = components(frame, finish_edges)
    rows = found.collect()
    assert {bytes(row.doc): bytes(row.cluster) for row in rows} == expected(pairs, size)
    assert len(rows) == len(expected(pairs, size))
    assert (rounds == 0) == (finish_edges > 0)


def test_no_edges_no_clusters(spark):
    found, rounds = components(spark.createDataFrame([], "a binary, b binary"), 10)
    assert found.collect() == []
    assert rounds == 0
