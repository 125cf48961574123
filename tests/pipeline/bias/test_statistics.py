"""Intervals and tests of drop rates against published examples, exact enumeration and other implementations."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import false_discovery_control, hypergeom

from pipeline.bias.statistics import MIN_EXPECTED, Rates, adjusted, compare, mantel_haenszel, wilson


def ints(*values: int):
    return np.array(values, np.int64)


def test_wilson_against_the_published_example():
    """Newcombe 1998, Statistics in Medicine 17, 857-872, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for dropped, number, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(dropped / number, number) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1.0, 20) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)


def test_the_difference_against_the_published_example():
    """Newcombe 1998, Statistics in Medicine 17, 873-890, table II, example a: 56 of 70 against 48 of 80."""
    rates = Rates(70, 56, 48 / 80, 80, 0.01)
    assert rates.difference == pytest.approx(0.2)
    assert rates.difference_interval == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_the_ratio_has_an_interval_also_where_a_rate_is_0_or_1():
    low, high = Rates(100, 30, 0.1, 100, 0).ratio_interval
    assert low < 3.0 < high
    assert (low, high) == pytest.approx((1.575, 5.745), abs=1e-3)
    assert Rates(100, 30, 0.0, 100, 0).ratio == math.inf
    assert Rates(100, 0, 0.0, 100, 1).ratio == 1.0
    assert Rates(100, 0, 0.0, 100, 1).ratio_interval == (0.0, math.inf)
    assert Rates(100, 0, 0.1, 100, 0).ratio_interval[0] == 0.0
    assert Rates(100, 30, 0.0, 100, 0).ratio_interval[1] == math.inf


def test_the_ends_of_the_ratio_are_roots_of_its_equation():
    """An end R of the interval satisfies (p1 - R p2)² = (p1 - l1)² + R² (u2 - p2)², by the method of the difference."""
    for dropped, expected, others in ((30, 0.1, 100), (5, 0.3, 40), (90, 0.8, 500)):
        rates = Rates(100, dropped, expected, others, 0)
        (low, high), (low2, high2) = rates.interval, wilson(expected, others)
        below, above = rates.ratio_interval
        assert (rates.rate - below * expected) ** 2 == pytest.approx(
            (rates.rate - low) ** 2 + below**2 * (high2 - expected) ** 2
        )
        assert (rates.rate - above * expected) ** 2 == pytest.approx(
            (high - rates.rate) ** 2 + above**2 * (expected - low2) ** 2
        )


def test_rates_are_compared_within_strata():
    """By hand: others drop 10 of 100 and 40 of 80; weights 30/50 and 20/50 give 0.6 * 0.1 + 0.4 * 0.5 = 0.26."""
    rates = compare((ints(30, 20, 7, 0), ints(6, 12, 7, 0)), (ints(130, 100, 7, 50), ints(16, 52, 7, 50)))
    assert rates is not None
    assert (rates.documents, rates.dropped) == (50, 18)  # the third stratum has no others, the fourth no group
    assert rates.expected == pytest.approx(0.26)
    assert rates.others == pytest.approx(1 / (0.36 / 100 + 0.16 / 80))
    assert compare((ints(7), ints(7)), (ints(7), ints(7))) is None


def test_a_difference_between_strata_is_no_difference_of_the_group():
    """Simpson's paradox: in both languages 10 % and 50 % are dropped, and the group is mostly of the second."""
    group, everyone = (ints(10, 90), ints(1, 45)), (ints(1010, 190), ints(101, 95))
    rates = compare(group, everyone)
    assert rates is not None
    assert (rates.rate, rates.expected) == pytest.approx((0.46, 0.46))
    assert rates.p == 1.0
    pooled = compare(tuple(ints(int(x.sum())) for x in group), tuple(ints(int(x.sum())) for x in everyone))
    assert pooled is not None
    assert pooled.p < 1e-6


@pytest.mark.parametrize(
    ("n", "k", "size", "observed"), [(12, 9, 60, 5), (12, 9, 60, 0), (40, 30, 59, 25), (50, 57, 60, 48)]
)
def test_the_exact_test_of_one_stratum(n, k, size, observed):
    tails = hypergeom.cdf(observed, size, k, n), hypergeom.sf(observed - 1, size, k, n)
    found = mantel_haenszel(ints(n), ints(observed), ints(size), ints(k))
    assert found == pytest.approx(min(1.0, 2 * min(tails)))


def test_the_exact_test_of_several_strata_sums_over_all_their_outcomes():
    strata = ((5, 4, 12), (8, 3, 20), (3, 2, 9))
    n, k, size = (ints(*column) for column in zip(*strata))
    for observed in range(10):
        below = above = 0.0
        for outcome in product(*(range(min(a, b) + 1) for a, b, _ in strata)):
            mass = math.prod(hypergeom.pmf(x, c, b, a) for x, (a, b, c) in zip(outcome, strata))
            below += mass * (sum(outcome) <= observed)
            above += mass * (sum(outcome) >= observed)
        spread = ints(min(observed, 4), min(max(observed - 4, 0), 3), max(observed - 7, 0))
        assert mantel_haenszel(n, spread, size, k) == pytest.approx(min(1.0, 2 * min(below, above)))


def test_the_normal_approximation_meets_the_exact_test():
    """Just above the limit of expected documents, both agree: large p within 0.1, small ones within a factor."""
    n, k, size = 300, 300, 8_000
    assert n * k / size > MIN_EXPECTED
    for observed in (6, 11, 14, 20, 24):
        exact = min(1.0, 2 * min(hypergeom.cdf(observed, size, k, n), hypergeom.sf(observed - 1, size, k, n)))
        assert mantel_haenszel(ints(n), ints(observed), ints(size), ints(k)) == pytest.approx(exact, rel=0.6, abs=0.1)


def test_the_approximation_by_hand():
    """n = 400 of 1,000, 300 dropped, 150 of the group: expected 120, variance 400*300*600*700/(1000² * 999)."""
    variance = 400 * 300 * 600 * 700 / (1000**2 * 999)
    expected = math.erfc(29.5 / math.sqrt(2 * variance))
    assert mantel_haenszel(ints(400), ints(150), ints(1000), ints(300)) == pytest.approx(expected)


def test_adjusted_p_values():
    values = [0.01, 0.04, 0.03, 0.5, 0.9, 1e-9]
    assert adjusted(values) == pytest.approx(false_discovery_control(values).tolist())
    assert adjusted([]) == []
