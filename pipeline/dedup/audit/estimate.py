"""Shares with their confidence intervals, from pairs that are weighted and come in groups.

The interval is Wilson's (1927) with an effective number of observations: n = p (1 - p) / v, v being the variance of p
by the jackknife over groups, and n at most their number. A bootstrap of groups would give a share of 1 no width, and
recall is near 1. Source: Dean and Pagano 2015, "Evaluating Confidence Interval Methods for Binomial Proportions in
Clustered Surveys".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.dedup.audit.pairs import FLOOR, Pairs, Rows

Z = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95 %."""
DIGITS = 6
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ShareEstimate:
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


def simple_share(hits: int, pairs: int, is_all: bool = False) -> ShareEstimate:
    """A share of independent pairs; `is_all`: there are no others, so that nothing is left to chance."""
    if not pairs:
        return ShareEstimate(None, None, None, 0)
    value = hits / pairs
    return _share(value, (value, value) if is_all else wilson(value, pairs), pairs)


def grouped_share(hits: Numbers, weights: Numbers, pairs: int, is_all: bool = False) -> ShareEstimate:
    """The share of the weight that is a hit, from the sums of each group (groups,)."""
    total = float(weights.sum())
    if not pairs or not total:
        return ShareEstimate(None, None, None, 0)
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


def _share(value: float, interval: tuple[float, float], pairs: int) -> ShareEstimate:
    low, high = interval
    return ShareEstimate(round(value, DIGITS), round(min(low, value), DIGITS), round(max(high, value), DIGITS), pairs)


# What the pairs of a sample add up to: recall at each similarity and the measured curve of candidates, by bins.
#
# Sums are kept by document, so that pairs can be grouped afterwards into those that depend on each other.

RECALL_MARGIN = 0.1
"""How far below the least similarity of a copy recall is told."""


def bin_edges(min_jaccard: float) -> list[float]:
    """The lower edges of the bins: steps of 0.05 from FLOOR, the least similarity of a copy, and 1 for equal sets."""
    steps = [round(0.05 * step, 2) for step in range(round(FLOOR / 0.05), 21)]
    return sorted({*steps, *([min_jaccard] if min_jaccard >= FLOOR else [])})


class PairTally:
    """Weighted pairs by document and bin."""

    def __init__(self, groups: Rows, edges: Sequence[float], layout: tuple[int, int] | None):
        """`groups` has for each document the first one of its group; pairs join groups further."""
        self._groups, self._edges, self._layout = groups, np.array(edges), layout
        self._shape = (len(groups), len(edges))
        self._weights, self._candidates, self._joined = (np.zeros(self._shape) for _ in range(3))
        self._counts = np.zeros((3, len(edges)), np.int64)
        self._jaccards, self._expected = np.zeros(len(edges)), np.zeros(len(edges))

    def add(
        self, pairs: Pairs, weights: Numbers, candidates: npt.NDArray[np.bool_], joined: npt.NDArray[np.bool_]
    ) -> None:
        """Count pairs of at least FLOOR; two documents of a pair belong to one group from now on."""
        bins = np.searchsorted(self._edges, pairs.jaccard, side="right") - 1
        cells = pairs.a * self._shape[1] + bins
        every = np.ones(len(bins), bool)
        for row, (sums, hits) in enumerate(
            ((self._weights, every), (self._candidates, candidates), (self._joined, joined))
        ):
            sums += np.bincount(cells, weights * hits, self._shape[0] * self._shape[1]).reshape(self._shape)
            self._counts[row] += np.bincount(bins[hits], minlength=self._shape[1])
        self._jaccards += np.bincount(bins, weights * pairs.jaccard, self._shape[1])
        if self._layout is not None:
            self._expected += np.bincount(bins, weights * theory(pairs.jaccard, *self._layout), self._shape[1])
        self._join(pairs)

    def _join(self, pairs: Pairs) -> None:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        ends = np.concatenate([pairs.a, np.arange(len(self._groups))]), np.concatenate([pairs.b, self._groups])
        graph = coo_matrix((np.ones(len(ends[0]), np.int8), ends), shape=(len(self._groups),) * 2)
        labels = connected_components(graph, directed=False)[1]
        self._groups = np.unique(labels, return_index=True)[1][labels]

    def pairs_from(self, edge: float) -> int:
        """How many pairs are at least this similar; `edge` is one of the edges."""
        return int(self._counts[0][self._edges >= edge].sum())

    def recall(self, min_jaccard: float, is_all: bool) -> list[dict[str, Any]]:
        """For each similarity from a little below `min_jaccard` on, the share in one cluster, and the share that shared
        a key, of the pairs that reach it."""
        edges = [edge for edge in self._edges.tolist() if edge >= min(min_jaccard, 1.0) - RECALL_MARGIN - 1e-9]
        return [
            {
                "jaccard": edge,
                "pairs": self.pairs_from(edge),
                "joined": self._share(self._joined, self._edges >= edge, is_all).to_json(),
                "candidates": self._share(self._candidates, self._edges >= edge, is_all).to_json(),
            }
            for edge in edges
        ]

    def curve(self, is_all: bool) -> list[dict[str, Any]]:
        """For each bin that holds a pair: its mean similarity, the share that shared a key, and what theory expects."""
        found = []
        for place in np.flatnonzero(self._counts[0]).tolist():
            total = float(self._weights[:, place].sum())
            pairs, candidates, joined = self._counts[:, place].tolist()
            upper = float(self._edges[place + 1]) if place + 1 < len(self._edges) else 1.0
            expected = None if self._layout is None else round(float(self._expected[place]) / total, DIGITS)
            found.append(
                {
                    "lower": float(self._edges[place]),
                    "upper": upper,
                    "jaccard": round(float(self._jaccards[place]) / total, DIGITS),
                    "pairs": pairs,
                    "candidates": candidates,
                    "joined": joined,
                    "share": self._share(self._candidates, np.arange(len(self._edges)) == place, is_all).to_json(),
                    "expected": expected,
                }
            )
        return found

    def _share(self, hits: Numbers, bins: npt.NDArray[np.bool_], is_all: bool) -> ShareEstimate:
        members = np.unique(self._groups, return_inverse=True)[1]
        found, total = (
            np.bincount(members, sums[:, bins].sum(axis=1)).astype(np.float64) for sums in (hits, self._weights)
        )
        return grouped_share(found, total, int(self._counts[0][bins].sum()), is_all)
