"""Shares with their confidence intervals, from pairs that are weighted and come in groups.

The interval is Wilson's (1927) with an effective number of observations: n = p (1 - p) / v, v being the variance of p
by the jackknife over groups, and n at most their number. A bootstrap of groups would give a share of 1 no width, and
recall is near 1. Source: Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in
Clustered Surveys".
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Z = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95 %."""
DIGITS = 6
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Share:
    """A share 0..1 with its interval of 95 %, and what it was taken over; None where there was nothing."""

    value: float | None
    low: float | None
    high: float | None
    pairs: int

    def to_json(self) -> dict[str, float | int | None]:
        """As the manifest holds it."""
        return {"value": self.value, "low": self.low, "high": self.high, "pairs": self.pairs}


def wilson(share: float, count: float) -> tuple[float, float]:
    """The interval of 95 % of a share of `count` observations."""
    square = Z * Z / count
    centre = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / count / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def simple_share(hits: int, pairs: int, is_all: bool = False) -> Share:
    """A share of independent pairs; `is_all`: there are no others, so that nothing is left to chance."""
    if not pairs:
        return Share(None, None, None, 0)
    value = hits / pairs
    return _share(value, (value, value) if is_all else wilson(value, pairs), pairs)


def grouped_share(hits: Numbers, weights: Numbers, pairs: int, is_all: bool = False) -> Share:
    """The share of the weight that is a hit, from the sums of each group (groups,)."""
    total = float(weights.sum())
    if not pairs or not total:
        return Share(None, None, None, 0)
    value = min(1.0, float(hits.sum()) / total)
    return _share(value, (value, value) if is_all else wilson(value, effective_groups(hits, weights)), pairs)


def effective_groups(hits: Numbers, weights: Numbers) -> float:
    """How many independent observations the groups are worth: at least 1, at most their number."""
    used = weights > 0
    hits, weights = hits[used], weights[used]
    groups, total, sum_hits = len(weights), float(weights.sum()), float(hits.sum())
    share = sum_hits / total
    if groups < 2:
        return 1.0
    if not 0 < share < 1:
        return float(groups)
    without = (sum_hits - hits) / (total - weights)
    variance = (groups - 1) / groups * float(((without - without.mean()) ** 2).sum())
    return min(float(groups), max(1.0, share * (1 - share) / variance)) if variance else float(groups)


def theory(jaccard: Numbers, bands: int, rows: int) -> Numbers:
    """The probability that two documents of this similarity share a band: 1 - (1 - s^rows)^bands."""
    found: Numbers = 1 - (1 - jaccard**rows) ** bands
    return found


def _share(value: float, interval: tuple[float, float], pairs: int) -> Share:
    low, high = interval
    return Share(round(value, DIGITS), round(min(low, value), DIGITS), round(max(high, value), DIGITS), pairs)
