"""Tests of the bands for a threshold: datasketch's choice over a grid, and integrals by hand."""

import pytest
from datasketch.lsh import _optimal_param

from pipeline.minhash.bands import optimal_bands

THRESHOLDS = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.72, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99]


@pytest.mark.parametrize("permutations", [1, 2, 3, 7, 16, 32, 64, 112])
def test_choice_is_datasketchs(permutations: int) -> None:
    chosen = {threshold: optimal_bands(threshold, permutations) for threshold in THRESHOLDS}
    assert chosen == {threshold: _optimal_param(threshold, permutations, 0.5, 0.5) for threshold in THRESHOLDS}


@pytest.mark.slow
@pytest.mark.parametrize("permutations", [100, 128, 200, 256])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.2, 0.8), (0.9, 0.1)])
def test_choice_is_datasketchs_for_long_signatures(permutations: int, weights: tuple[float, float]) -> None:
    chosen = {threshold: optimal_bands(threshold, permutations, *weights) for threshold in THRESHOLDS}
    assert chosen == {threshold: _optimal_param(threshold, permutations, *weights) for threshold in THRESHOLDS}


@pytest.mark.parametrize(
    ("weights", "expected"), [((0.5, 0.5), (1, 1)), ((0.99, 0.01), (1, 2)), ((0.01, 0.99), (2, 1))]
)
def test_weights_decide_between_two_values(weights: tuple[float, float], expected: tuple[int, int]) -> None:
    # threshold 1/2, false positives and negatives: 1 x 1: 1/8 and 1/8; 1 x 2: 1/24 and 5/24; 2 x 1: 5/24 and 1/24
    assert optimal_bands(0.5, 2, *weights) == expected


def test_known_layouts() -> None:
    assert optimal_bands(0.9, 128) == (5, 25)  # that library's own example
    bands, rows = optimal_bands(0.7, 512)
    assert 480 < bands * rows <= 512
