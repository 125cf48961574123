"""The bands and rows for a threshold: those whose false positives and false negatives together are fewest.

A pair of similarity s becomes a candidate with probability 1 - (1 - s^rows)^bands, a polynomial, so a Gauss-Legendre
rule of enough points integrates it exactly. The choice is datasketch's. Source: Zhu et al. 2016, "LSH Ensemble".
"""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def optimal_bands(
    threshold: float, permutations: int, false_positive_weight: float = 0.5, false_negative_weight: float = 0.5
) -> tuple[int, int]:
    """(bands, rows) with bands x rows <= permutations that minimise the weighted sum of the integral of the probability
    of a candidate below the threshold and of that of none above it; the fewest bands, then rows, if two are equal."""
    nodes, weights = np.polynomial.legendre.leggauss(permutations // 2 + 1)
    below, above = threshold * (nodes + 1) / 2, threshold + (1 - threshold) * (nodes + 1) / 2
    # by number of rows (permutations, nodes): that one band does not match, and that none of the bands so far does
    missed = 1 - np.multiply.accumulate([np.concatenate([below, above])] * permutations)
    none = np.ones_like(missed)
    best, least = (1, 1), np.inf
    for bands in range(1, permutations + 1):
        rows = permutations // bands
        none = none[:rows] * missed[:rows]
        errors = false_positive_weight * threshold * (1 - none[:, : len(nodes)]) @ weights
        errors += false_negative_weight * (1 - threshold) * none[:, len(nodes) :] @ weights
        if errors.min() < least:
            best, least = (bands, int(errors.argmin()) + 1), float(errors.min())
    return best
