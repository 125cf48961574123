"""Exact histograms: bins sort as their values do, edges enclose them, quantiles are the same in any order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.rules import COARSE, FINE, bins_of, count_bins, lower_edge, quantile

VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(VALUES, min_size=2, max_size=20))
def test_bins_sort_as_their_values_do(values):
    bins = bins_of(np.sort(np.array(values)), 0)
    assert (np.diff(bins) >= 0).all()
    assert len(set(bins.tolist())) == len({0.0 if value == 0 else value for value in values})


@given(VALUES, st.sampled_from((COARSE, FINE, 16)))
def test_a_value_lies_between_the_edges_of_its_bin(value, cut):
    (key,) = bins_of(np.array([value]), cut).tolist()
    assert lower_edge(key, cut) <= value < lower_edge(key + 1, cut) or value == np.finfo(np.float32).max


def test_bins_are_five_hundredths_of_a_per_cent_wide():
    (key,) = bins_of(np.array([300.0]), FINE).tolist()
    assert lower_edge(key + 1, FINE) / lower_edge(key, FINE) == pytest.approx(1, abs=1 / 2048)


def test_zero_and_minus_zero_share_a_bin_and_nan_is_left_out():
    assert list(count_bins(np.array([0.0, -0.0, np.nan]), FINE).values()) == [2]
    assert count_bins(np.array([np.nan]), FINE) == {}


@pytest.mark.parametrize(("share", "below"), [(0.3, 3), (0.31, 4), (0.6, 6), (1.0, 10), (0.0, 1)])
def test_a_quantile_has_its_share_of_the_values_below(share, below):
    values = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10.0])
    cut = quantile(count_bins(values, FINE), share, FINE)
    assert (values < cut).sum() == below


@pytest.mark.parametrize(
    ("values", "share", "kept"),
    [([5.0], 0.1, 1), ([1, 2, 3.0], 0.9, 1), ([-9, -2, -2.0], 0.9, 2), ([0.0] * 9, 0.5, 9), ([1, 2, 3, 4.0], 0.5, 2)],
)
def test_the_highest_values_are_not_below_a_quantile_that_keeps_them(values, share, kept):
    counts = count_bins(np.array(values), FINE)
    assert (np.array(values) >= quantile(counts, share, FINE, keeps_highest=True)).sum() == kept


def test_a_quantile_does_not_depend_on_how_the_values_were_counted():
    values = np.random.default_rng(0).lognormal(5, 1, 1000)
    whole = count_bins(values, FINE)
    parts: dict[int, int] = {}
    for part in (values[700:], values[:700]):
        for key, count in count_bins(part, FINE).items():
            parts[key] = parts.get(key, 0) + count
    assert quantile(parts, 0.3, FINE) == quantile(whole, 0.3, FINE) == pytest.approx(np.quantile(values, 0.3), rel=0.01)


def test_no_values_have_no_quantile():
    assert math.isnan(quantile({}, 0.5, FINE))
