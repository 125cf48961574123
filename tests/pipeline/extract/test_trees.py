"""Oblivious trees: the prediction of arrays equals that of a loop, for any number of rows."""

import numpy as np
import pytest

from pipeline.extract.trees import ROWS_AT_ONCE, Trees

TREES = Trees(
    features=np.array([0, 2, 1], np.int16),
    bounds=np.array([0.5, -1.0, 3.0], np.float32),
    levels=np.array([[0, 1], [2, 2]], np.int16),
    leaves=np.array([[1, 2, 4, 8], [10, 20, 40, 80]], np.float32),
    bias=0.25,
)


def by_loop(trees: Trees, row: np.ndarray) -> float:
    total = trees.bias
    for tree, leaves in enumerate(trees.leaves):
        leaf = 0
        for bit, split in enumerate(trees.levels[:, tree]):
            leaf += (row[trees.features[split]] > trees.bounds[split]) << bit
        total += leaves[leaf]
    return total


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.5, 3.0, -1.0], 1 + 10 + 0.25),  # no bound is exceeded
        ([0.6, 3.0, -1.0], 2 + 10 + 0.25),
        ([0.6, 3.1, 0.0], 8 + 80 + 0.25),
    ],
)
def test_a_row(row: list[float], expected: float) -> None:
    matrix = np.array(row, np.float32)[:, None]
    assert TREES.predict(matrix).tolist() == [expected]
    assert by_loop(TREES, matrix[:, 0]) == expected


@pytest.mark.parametrize("size", [0, 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_any_number_of_rows(size: int) -> None:
    matrix = np.random.default_rng(1).normal(0, 2, (3, size)).astype(np.float32)
    predicted = TREES.predict(matrix)
    assert predicted.shape == (size,)
    for place in {0, size // 2, size - 1} & set(range(size)):
        assert predicted[place] == pytest.approx(by_loop(TREES, matrix[:, place]))


def test_arrays_come_back() -> None:
    again = Trees.from_arrays(TREES.arrays("a"), "a")
    matrix = np.ones((3, 5), np.float32)
    assert again.predict(matrix).tolist() == TREES.predict(matrix).tolist()
