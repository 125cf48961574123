"""The mixture of sources: shares become exact counts per block of samples, scheduled by earliest deadline.

Within a block, after t samples, a source with c samples in a block of M has been taken between c·t/M - 1 and c·t/M + 1
times (exclusive). A schedule with that property exists for any counts (Tijdeman 1980, "The chairman assignment
problem"); serving the earliest deadline finds it (Steiner and Yeomans 1993, "Level schedules for mixed-model,
just-in-time processes"). Taking the largest deficit instead, as is common, reaches deviations above 1.
"""

import heapq
from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError

MAX_BLOCK = 1 << 16
"""Longest block [samples]: its schedule is tabulated once per process (0.1 s)."""


def block_counts(weights: Mapping[str, float]) -> dict[str, int]:
    """Samples of each source per block, sources of weight 0 left out; exact where a block of MAX_BLOCK can hold it.

    Otherwise rounded by largest remainder (Hamilton's method). Raises ConfigError if a share rounds to nothing.
    """
    # The decimal text, not the binary float: 0.7 means 7/10.
    parts = {name: Fraction(str(weight)) for name, weight in weights.items() if weight > 0}
    total = sum(parts.values())
    shares = {name: part / total for name, part in parts.items()}
    block = lcm(*(share.denominator for share in shares.values()))
    if block <= MAX_BLOCK:
        return {name: int(share * block) for name, share in shares.items()}
    counts = {name: int(share * MAX_BLOCK) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (counts[name] - shares[name] * MAX_BLOCK, name))
    for name in by_remainder[: MAX_BLOCK - sum(counts.values())]:
        counts[name] += 1
    lost = [f"{name} ({float(shares[name]):.3g})" for name, count in counts.items() if not count]
    if lost:
        raise ConfigError(
            f"train.weights: promised shares of at least {1 / MAX_BLOCK:.3g} (one sample in {MAX_BLOCK}), "
            f"found {', '.join(lost)}; raise them, or set them to 0 to leave the sources out"
        )
    return counts


def schedule(counts: list[int]) -> NDArray[np.int64]:
    """The source (index into `counts`) of every slot of one block, each source as often as its count says."""
    block = sum(counts)
    released: list[tuple[int, int, int]] = []
    future = [(1, source, 0) for source, count in enumerate(counts) if count]
    slots = np.empty(block, np.int64)
    for slot in range(1, block + 1):
        while future and future[0][0] <= slot:
            _, source, k = heapq.heappop(future)
            heapq.heappush(released, (-(-(k + 1) * block // counts[source]), source, k))
        _, source, k = heapq.heappop(released)
        slots[slot - 1] = source
        if k + 1 < counts[source]:
            # Taken before this slot, the source would be a whole sample ahead of its share.
            heapq.heappush(future, ((k + 1) * block // counts[source] + 1, source, k + 1))
    return slots


class Mixture:
    """Which source a global sample comes from, and the how-manieth of that source it is; and back."""

    def __init__(self, counts: Mapping[str, int]):
        self.counts = np.array(list(counts.values()), np.int64)
        self.block = int(self.counts.sum())
        self._slots = schedule(self.counts.tolist())
        self._places = [np.flatnonzero(self._slots == source) for source in range(len(counts))]
        self._ranks = np.empty(self.block, np.int64)
        for places in self._places:
            self._ranks[places] = np.arange(len(places))

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and position in the source's own order, for global sample indices."""
        block, slot = np.divmod(index, self.block)
        source = self._slots[slot]
        return source, block * self.counts[source] + self._ranks[slot]

    def find(self, source: int, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The global sample index of positions in a source's own order."""
        block, rank = np.divmod(position, self.counts[source])
        return block * self.block + self._places[source][rank]

    def taken(self, number: int) -> list[int]:
        """How many of the first `number` global samples each source gives."""
        blocks, slots = divmod(number, self.block)
        partial = [int(np.searchsorted(places, slots)) for places in self._places]
        return [blocks * count + part for count, part in zip(self.counts.tolist(), partial, strict=True)]
