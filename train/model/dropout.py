"""Dropout with counter-based masks: whether a number is dropped is a hash of its place, the same in every layout.

The place is (seed, sample, layer, site, position, channel). So a mask needs no memory between the passes, and a resumed
run, a recomputed layer and any split over ranks or micro-batches draw the same. A 64-bit key of each position is hashed
from all but the channel, and one 32-bit hash of key and channel decides. Source: Srivastava et al. 2014, JMLR 15
(dropout); Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (counter-based random numbers).

Shape suffixes: B rows, t positions of the residual stream on this rank, D width, N counters.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the distance between consecutive inputs of the 64-bit hash."""
ATTENTION_WEIGHTS, ATTENTION_OUTPUT, FEED_FORWARD_OUTPUT, EMBEDDING = range(4)
"""The sites of a layer at which numbers are dropped, and the site of the embedding."""
BEFORE_LAYERS = -1
"""The number of a layer in the draws of the embedding."""


def _signed(number: int, bits: int) -> int:
    """Return the signed integer with the same lowest bits as `number`."""
    half = 1 << (bits - 1)
    return (number + half) % (1 << bits) - half


# The multipliers of both hashes, as the signed integers that torch computes with. Integer products wrap around.
# Sources: the finalizer of SplitMix64 (Steele, Lea and Flood 2014, with the constants of Stafford's Mix13); for 32 bits
# the multipliers of the `lowbias32` that Wellons 2018 found by search ("Prospecting for hash functions").
_STEP_64, _FIRST_64, _SECOND_64 = (_signed(x, 64) for x in (GOLDEN, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STEP_32, _FIRST_32, _SECOND_32 = (_signed(x, 32) for x in (0x9E3779B1, 0x7FEB352D, 0x846CA68B))


@dataclass(frozen=True)
class RowDraws:
    """What the masks of a batch's rows are hashed from."""

    keys_B: Tensor
    """64-bit key of each row, int64."""
    positions_t: Tensor
    """Index in its row of each position of the residual stream on this rank, int64."""
    counters_N: Tensor
    """The numbers from 0 to at least the width of the stream and the positions of a row, int64."""
    # A table and no `arange` where it is used: torch.compile would fold products of an index with constants beyond 64
    # bits, and fail (torch 2.13).

    def of_layer(self, layer: int) -> "RowDraws":
        """Return the draws of one layer, by its number in the whole model."""
        # Outside of the layers: a layer's number inside of a compiled layer would be a constant of its graph.
        return replace(self, keys_B=_mix_64(self.keys_B + _signed(GOLDEN * (layer + 1), 64)))

    def keys_of(self, site: int) -> Tensor:
        """Return the 64-bit key of each row for one site, (B,)."""
        return _mix_64(self.keys_B + _signed(GOLDEN * (site + 1), 64))


def derived_keys(keys: Tensor, numbers_N: Tensor) -> Tensor:
    """Return a 64-bit key for each key and each number, (..., N)."""
    return _mix_64(keys[..., None] + (numbers_N + 1) * _STEP_64)


def _mix_64(x: Tensor) -> Tensor:
    # `>>` repeats the sign bit of a negative number, so the bits that it adds are cleared.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST_64
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND_64
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def kept(keys: Tensor, counters_N: Tensor, rate: float) -> Tensor:
    """Return which elements of each key are kept, (..., N), bool, from the numbers of the elements.

    `rate`: probability of False, rounded to a multiple of 2^-32.
    """
    x = counters_N.to(torch.int32) * _STEP_32 + keys.to(torch.int32)[..., None]
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST_32
    # The upper half of the key enters between the two rounds, so that keys with an equal lower half differ too.
    x = ((x ^ ((x >> 15) & 0x1FFFF)) + (keys >> 32).to(torch.int32)[..., None]) * _SECOND_32
    return x >= round(rate * 2**32) - 2**31


def scale_kept(x: Tensor, kept_x: Tensor, rate: float) -> Tensor:
    """Return `x` with the elements that are not kept set to 0, and the others divided by the share that is kept."""
    return torch.where(kept_x, x * (1 / (1 - rate)), 0.0)


def drop_channels(x_BtD: Tensor, rate: float, draws: RowDraws | None, site: int) -> Tensor:
    """Return the residual stream, or an addition to it, after dropout; `draws`: None = no dropout, as in evaluation."""
    if draws is None or not rate:
        return x_BtD
    keys_Bt = derived_keys(draws.keys_of(site), draws.positions_t)
    return scale_kept(x_BtD, kept(keys_Bt, draws.counters_N[: x_BtD.shape[-1]], rate), rate)
