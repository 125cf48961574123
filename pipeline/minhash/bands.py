"""Signatures as matrices: the keys of their bands and the similarity that two of them estimate."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline.minhash.fast import VALUE, mixed, odd_numbers
from pipeline.text.words import Codes
from schemas.errors import ContractError

Signatures = npt.NDArray[np.unsignedinteger]


def as_matrix(signatures: Sequence[bytes], value: str = VALUE) -> Signatures:
    """Signatures of one length as a matrix (n, values); `value` is the kind of number their family stores."""
    return np.frombuffer(b"".join(signatures), value).reshape(len(signatures), -1)


def band_keys(signatures: Signatures, bands: int = 14, rows: int = 8) -> Codes:
    """The key of every band of every signature (n, bands); equal when number and rows of the band are, up to 2^-64.

    Values beyond bands x rows are not used. Raises ContractError if there are fewer.
    """
    if signatures.shape[1] < bands * rows:
        raise ContractError(
            f"signature: promised at least {bands} x {rows} = {bands * rows} values, found {signatures.shape[1]}; "
            "use one [signature] section"
        )
    parts = signatures[:, : bands * rows].astype(np.uint64).reshape(len(signatures), bands, rows)
    sums: Codes = (parts * odd_numbers(0, "row", rows)).sum(axis=2, dtype=np.uint64)
    return mixed(sums + odd_numbers(0, "band", bands))


def similarity(left: Signatures, right: Signatures) -> npt.NDArray[np.float64]:
    """The estimated similarity of row i of one matrix and row i of the other (n,), 0 to 1.

    MinHash: the share of equal values, which estimates the Jaccard similarity with a standard error of
    sqrt(s (1 - s) / permutations), 0.04 at s = 0.7 with 112. SimHash, which has one value: the share of equal bits.
    """
    shares: npt.NDArray[np.float64]
    if left.shape[1] == 1:
        shares = 1 - np.bitwise_count(left[:, 0] ^ right[:, 0]) / 64
    else:
        shares = np.equal(left, right).mean(axis=1)
    return shares
