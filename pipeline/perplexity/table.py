"""A table of n-grams in one array: sorted by key, each as near to its home as its neighbours allow.

The array alternates keys and values (a probability and a back-off weight, float32 each), so that one look-up touches
one cache line of a file that all workers map. The home of a key grows with the key, so the entries of linear probing
lie in the order of their keys: a search ends at the first key that is not smaller, and equal n-grams give equal bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.float32]

EMPTY = np.uint64(2**64 - 1)
"""Key of a slot without entry; keys of entries are even."""
EVEN = np.uint64(2**64 - 2)
STEP = 0x9E3779B97F4A7C15
"""Odd, so that no word is lost however far back it stands."""
HALF = np.uint64(32)
HOMES_PER_ENTRY = 1.5
"""At 1.5 a search takes 2 steps on average and a model of lmplz 24 bytes an n-gram."""
ENTRY = np.dtype([("key", "<u8"), ("probability", "<f4"), ("backoff", "<f4")])


def word_codes(words: Iterable[str]) -> Keys:
    """The xxh64 of each word's UTF-8."""
    return np.array([xxhash.xxh64_intdigest(word.encode("utf-8", "surrogatepass")) for word in words], np.uint64)


def factor(distance: int) -> np.uint64:
    """What the code of a word is multiplied with that stands so many words before the last of its n-gram."""
    return np.uint64(pow(STEP, distance, 1 << 64))


def keys_of(codes: Keys) -> Keys:
    """(n-grams,) the key of each row of `codes`, (n-grams, order), the last word in the last column."""
    factors = np.array([factor(distance) for distance in range(codes.shape[1])], np.uint64)
    keys: Keys = (codes * factors[::-1]).sum(axis=1, dtype=np.uint64) & EVEN
    return keys


def share_out(keys: Keys, parts: int) -> npt.NDArray[np.int64]:
    """The number of the part, of so many equal ones, in which each key lies; it grows with the key."""
    return ((keys >> HALF) * np.uint64(parts) >> HALF).astype(np.int64)


@dataclass(frozen=True)
class Table:
    """The n-grams of one order."""

    homes: int
    """Number of places that a key can have as its home."""
    slots: Keys
    """Key and value of each slot in turn; the last slot is empty."""

    def find(self, keys: Keys) -> tuple[npt.NDArray[np.intp], Values]:
        """Which of the keys the table has, by position, and (found, 2) their probability and back-off weight."""
        places = share_out(keys, self.homes) * 2
        seen = self.slots[places]
        on = np.flatnonzero(seen < keys)
        while len(on):
            places[on] += 2
            there = self.slots[places[on]]
            seen[on] = there
            on = on[there < keys[on]]
        found = np.flatnonzero(seen == keys)
        return found, self.slots[places[found] + 1].view(np.float32).reshape(-1, 2)


def lay_out(sorted_parts: Iterable[npt.NDArray[np.void]], homes: int) -> Iterator[Keys]:
    """The slots of a table, stretch after stretch, of entries that come sorted by key, part after part."""
    laid = 0
    for entries in sorted_parts:
        numbers = np.arange(len(entries))
        places = np.maximum.accumulate(np.maximum(share_out(entries["key"], homes), laid) - numbers) + numbers
        stretch = int(places[-1]) + 1 - laid if len(places) else 0
        slots = np.zeros((stretch, 2), np.uint64)
        slots[:, 0] = EMPTY
        slots[places - laid, 0] = entries["key"]
        slots.view(np.float32)[places - laid, 2] = entries["probability"]
        slots.view(np.float32)[places - laid, 3] = entries["backoff"]
        laid += stretch
        yield slots.reshape(-1)
    tail = np.zeros((max(0, homes - laid) + 1, 2), np.uint64)
    tail[:, 0] = EMPTY
    yield tail.reshape(-1)
