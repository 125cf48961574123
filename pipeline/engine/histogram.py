"""Exact histograms of float32 values: bins are the leading bits of the number, so counts add up in any order.

A float32 whose bits are read as an integer sorts as the number does; cutting its last bits gives bins of constant
relative width. Sums of counts do not depend on the partitioning, so neither do the quantiles read off them.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

FINE = 12
"""Bits cut for quantiles: bins 0.05 % wide, 2048 to an octave."""
COARSE = 21
"""Bits cut for plots: four bins to an octave."""
_SIGN = np.uint32(1 << 31)

Counts = dict[int, int]


def bins_of(values: npt.NDArray[np.float64], cut: int) -> npt.NDArray[np.int64]:
    """The bin of each value, ascending as the values do; NaN is not allowed."""
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    keys: npt.NDArray[np.int64] = (ordered >> np.uint32(cut)).astype(np.int64)
    return keys


def lower_edge(key: int, cut: int) -> float:
    """The smallest value of a bin."""
    ordered = np.uint32(min(max(key << cut, 0), 0xFFFFFFFF))
    bits = ordered ^ _SIGN if ordered & _SIGN else ~ordered
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def count_bins(values: npt.NDArray[np.float64], cut: int) -> Counts:
    """How many values each bin holds; NaN are left out."""
    keys, counts = np.unique(bins_of(values[~np.isnan(values)], cut), return_counts=True)
    return dict(zip(keys.tolist(), counts.tolist()))


def quantile(counts: Mapping[int, int], share: float, cut: int) -> float:
    """The end of the bin in which the share (0..1) of the values is reached; NaN if there are none.

    At least that share of the values lies below what is returned, and no bin less would do.
    """
    keys = sorted(counts)
    if not keys:
        return math.nan
    reached = np.cumsum([counts[key] for key in keys])
    wanted = max(1, math.ceil(share * int(reached[-1])))
    return lower_edge(keys[int(np.searchsorted(reached, wanted))] + 1, cut)
