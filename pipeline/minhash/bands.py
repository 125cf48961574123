"""Band keys and similarity estimates of signatures, and the choice of bands and rows for a threshold.

Signatures are the rows of a matrix. A band key is a hash of the values in one band of a signature. Two documents with
an equal band key are a candidate pair.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.minhash.permutations import VALUE, draw_odd_numbers, mix_bits
from pipeline.text.words import Codes
from schemas.errors import ContractError

Signatures = npt.NDArray[np.unsignedinteger]


def as_matrix(signatures: Sequence[bytes], value: str = VALUE) -> Signatures:
    """Return signatures of equal length as a matrix (signatures, values); `value` is the NumPy type of a stored
    value."""
    return np.frombuffer(b"".join(signatures), value).reshape(len(signatures), -1)


def band_keys(signatures: Signatures, bands: int = 14, rows: int = 8) -> Codes:
    """Return the key of every band of every signature (signatures, bands).

    Bands at the same position with equal values have equal keys. Other bands have equal keys with probability 2^-64.
    Values beyond bands x rows are not used. Raises ContractError if a signature has fewer values.
    """
    if signatures.shape[1] < bands * rows:
        raise ContractError(
            f"signature: expected at least {bands} x {rows} = {bands * rows} values, got {signatures.shape[1]}. "
            f"Set dedup.bands and dedup.rows so that their product is at most {signatures.shape[1]}."
        )
    parts = signatures[:, : bands * rows].astype(np.uint64).reshape(len(signatures), bands, rows)
    sums: Codes = (parts * draw_odd_numbers(0, "row", rows)).sum(axis=2, dtype=np.uint64)
    return mix_bits(sums + draw_odd_numbers(0, "band", bands))


def similarity(left: Signatures, right: Signatures) -> npt.NDArray[np.float64]:
    """Return the estimated similarity, 0 to 1, of row i of `left` and row i of `right`, for every i (rows,).

    For MinHash, this is the share of equal values. At a Jaccard similarity of s, its standard error is sqrt(s (1 - s) /
    permutations). For SimHash, which has one value, this is the share of equal bits.
    """
    shares: npt.NDArray[np.float64]
    if left.shape[1] == 1:
        shares = 1 - np.bitwise_count(left[:, 0] ^ right[:, 0]) / 64
    else:
        shares = np.equal(left, right).mean(axis=1)
    return shares


# Optimal bands and rows for a threshold: the pair that minimizes false positives plus false negatives.
#
# A pair of similarity s becomes a candidate with probability 1 - (1 - s^rows)^bands. This is a polynomial, so a
# Gauss-Legendre rule of enough points integrates it exactly. The library datasketch chooses the same bands and rows.
# Source: Zhu et al. 2016, "LSH Ensemble".


@lru_cache(maxsize=64)
def optimal_bands(
    threshold: float, permutations: int, false_positive_weight: float = 0.5, false_negative_weight: float = 0.5
) -> tuple[int, int]:
    """Return the best (bands, rows) for a threshold, with bands x rows <= permutations.

    They minimize the weighted sum of false positives (candidates below the threshold) and false negatives (missed pairs
    above it). Ties go to the fewest bands, then the fewest rows.
    """
    nodes, weights = np.polynomial.legendre.leggauss(permutations // 2 + 1)
    below, above = threshold * (nodes + 1) / 2, threshold + (1 - threshold) * (nodes + 1) / 2
    # by number of rows (permutations, nodes): the probability that one band differs, and that all bands so far differ
    missed = 1 - np.multiply.accumulate([np.concatenate([below, above])] * permutations)
    none = np.ones_like(missed)
    best, least = (1, 1), np.inf
    for bands in range(1, permutations + 1):
        rows = permutations // bands
        none = none[:rows] * missed[:rows]
        # integrals of the candidate probability below the threshold, and of its complement above
        errors = false_positive_weight * threshold * (1 - none[:, : len(nodes)]) @ weights
        errors += false_negative_weight * (1 - threshold) * none[:, len(nodes) :] @ weights
        if errors.min() < least:
            best, least = (bands, int(errors.argmin()) + 1), float(errors.min())
    return best
