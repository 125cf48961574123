"""Statistics of drop rates: a group against comparable other documents, with intervals and tests.

Documents are compared within strata, such as those of one language and length. The rate of the others is weighted as
the documents of the group are spread over the strata. The test is that of Mantel and Haenszel (1959), which is exact
where few drops are expected. Intervals are those of Wilson (1927), and by them those of differences (Newcombe 1998,
method 10) and of ratios (Donner and Zou 2012).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Z = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95 %."""
MIN_EXPECTED = 10.0
"""Least expected number of documents in a cell of the summed table for the normal approximation; below it, the exact
test is made."""
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """The drop rate of a group, and that of comparable others."""

    documents: int
    """Documents of the group in strata that have other documents too."""
    dropped: int
    expected: float
    """Drop rate of the others, weighted like the documents of the group, 0..1."""
    others: float
    """Effective number of other documents: as many, unweighted, would have the same variance at equal rates."""
    p: float
    """Probability of a difference at least as large if the group made none, 0..1."""

    @property
    def rate(self) -> float:
        """Drop rate of the group, 0..1."""
        return self.dropped / self.documents

    @property
    def difference(self) -> float:
        """Drop rate of the group minus that of the others."""
        return self.rate - self.expected

    @property
    def ratio(self) -> float:
        """Drop rate of the group over that of the others; infinite if no other is dropped, 1 if none at all."""
        if self.expected:
            return self.rate / self.expected
        return math.inf if self.rate else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `rate`."""
        return wilson(self.rate, self.documents)

    @property
    def difference_interval(self) -> tuple[float, float]:
        """The 95 % interval of `difference`."""
        (low, high), (low_of_others, high_of_others) = self.interval, wilson(self.expected, self.others)
        below = math.hypot(self.rate - low, high_of_others - self.expected)
        above = math.hypot(high - self.rate, self.expected - low_of_others)
        return self.difference - below, self.difference + above

    @property
    def ratio_interval(self) -> tuple[float, float]:
        """The 95 % interval of `ratio`; its end is infinite if no rate of the others can be excluded."""
        (low, high), (low_of_others, high_of_others) = self.interval, wilson(self.expected, self.others)
        product = self.rate * self.expected
        below = low * (2 * self.rate - low), high_of_others * (2 * self.expected - high_of_others)
        above = high * (2 * self.rate - high), low_of_others * (2 * self.expected - low_of_others)
        return _bound(product, *below, -1), _bound(product, *above, 1)


def _bound(product: float, of_group: float, of_others: float, sign: int) -> float:
    """Return a root of `of_others` x² - 2 `product` x + `of_group`, which is an end of the interval of a ratio."""
    root = math.sqrt(max(0.0, product * product - of_group * of_others))
    if sign < 0:  # the same root in a form that also holds where `of_others` is 0 or negative
        return max(0.0, of_group / (product + root)) if product + root > 0 else 0.0
    return (product + root) / of_others if of_others > 0 else math.inf


def wilson(rate: float, number: float) -> tuple[float, float]:
    """Return the 95 % interval of a rate that was measured on so many documents."""
    square = Z * Z
    center = (rate + square / (2 * number)) / (1 + square / number)
    half = Z * math.sqrt(rate * (1 - rate) / number + square / (4 * number * number)) / (1 + square / number)
    return (0.0 if rate == 0 else max(0.0, center - half)), (1.0 if rate == 1 else min(1.0, center + half))


def compare(group: tuple[Ints, Ints], everyone: tuple[Ints, Ints]) -> Rates | None:
    """Return the rates of a group and of others; None if no stratum has documents of both.

    Each pair has, by stratum, the number of documents and of those dropped; `everyone` includes the group.
    """
    documents, dropped = group
    others, others_dropped = everyone[0] - documents, everyone[1] - dropped
    shared = (documents > 0) & (others > 0)
    documents, dropped, others, others_dropped = (each[shared] for each in (documents, dropped, others, others_dropped))
    total = int(documents.sum())
    if not total:
        return None
    weights = documents / total
    expected = float((weights * (others_dropped / others)).sum())
    effective = float(1 / (weights * weights / others).sum())
    p = mantel_haenszel(documents, dropped, documents + others, dropped + others_dropped)
    return Rates(total, int(dropped.sum()), min(1.0, expected), effective, p)


def mantel_haenszel(documents: Ints, dropped: Ints, everyone: Ints, all_dropped: Ints) -> float:
    """Return the two-sided p of the number of drops of a group, given those of each stratum.

    The arrays have, by stratum: documents of the group, those dropped, all documents, all drops.
    """
    n, k, size = documents.astype(float), all_dropped.astype(float), everyone.astype(float)
    drops = int(dropped.sum())
    expected = float((n * k / size).sum())
    cells = (
        (expected, documents, all_dropped, drops),
        (float(n.sum()) - expected, documents, everyone - all_dropped, int(documents.sum()) - drops),
        (float(k.sum()) - expected, everyone - documents, all_dropped, int(all_dropped.sum()) - drops),
        (
            float((size - n - k).sum()) + expected,
            everyone - documents,
            everyone - all_dropped,
            int((everyone - documents - all_dropped).sum()) + drops,
        ),
    )
    rarest = min(cells, key=lambda cell: cell[0])
    if rarest[0] < MIN_EXPECTED:
        return _exact(rarest[1], rarest[2], everyone, rarest[3])
    several = size > 1
    n, k, size = n[several], k[several], size[several]
    variance = float((n * k * (size - n) * (size - k) / (size * size * (size - 1))).sum())
    distance = max(0.0, abs(drops - expected) - 0.5)
    return math.erfc(distance / math.sqrt(2 * variance)) if variance else 1.0


def _exact(chosen: Ints, marked: Ints, everyone: Ints, observed: int) -> float:
    """Return the two-sided p of `observed`, the sum over strata of the marked documents among those chosen.

    Each stratum is hypergeometric. The expected sum is below MIN_EXPECTED, so sums far above it have no probability.
    """
    total, start = np.ones(1), 0
    for n, k, size in zip(chosen.tolist(), marked.tolist(), everyone.tolist()):
        lowest, masses = _hypergeometric(n, k, size)
        start += lowest
        total = np.convolve(total, masses)[:_MOST]
    at = observed - start
    below, above = float(total[: at + 1].sum()), float(total[at:].sum())
    return min(1.0, 2 * min(below, above))


_MOST = 400
"""Number of values of a sum that have a probability above rounding, if fewer than MIN_EXPECTED are expected."""


def _hypergeometric(chosen: int, marked: int, size: int) -> tuple[int, Floats]:
    """Return the least number of marked documents among those chosen, and the probability of each number from it on."""
    low, high = max(0, chosen + marked - size), min(chosen, marked)
    numbers = range(low, min(high, low + _MOST) + 1)
    whole = _log_choose(size, chosen)
    logs = [_log_choose(marked, k) + _log_choose(size - marked, chosen - k) - whole for k in numbers]
    return low, np.exp(np.array(logs))


def _log_choose(size: int, chosen: int) -> float:
    return math.lgamma(size + 1) - math.lgamma(chosen + 1) - math.lgamma(size - chosen + 1)


def adjusted(values: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number, so that those up to a level have at most this share of false ones.

    Source: Benjamini and Hochberg 1995, Journal of the Royal Statistical Society B 57, section 3.
    """
    order = sorted(range(len(values)), key=lambda at: -values[at])
    found, least = [0.0] * len(values), 1.0
    for place, at in enumerate(order):
        least = min(least, values[at] * len(values) / (len(values) - place))
        found[at] = least
    return found
