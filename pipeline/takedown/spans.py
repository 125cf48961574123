"""Salted digests of spans: that a text is absent can be verified by who scans for them, and nobody can read it there.

A span is a window of tokens or of bytes. Its mark, the upper half of a rolling hash under a multiplier that the salt
gives, is compared at every position; where it fits, the salted SHA-256 decides.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.unsignedinteger]
Marks = NDArray[np.uint32]
Traced = tuple[int, str]

WINDOWS = {"tokens": 16, "text": 32}
"""Length of a span [tokens; bytes of UTF-8]; powers of two, which the rolling hash is built of."""
MOST_OF_DOCUMENT = 64
"""Spans of a document at most, spread over it evenly; where there are fewer, they lie end to end."""
MOST = 100_000
"""Spans of a takedown at most, as long as every document has one."""
MIN_DISTINCT = 4
"""A window of fewer different units says nothing of where it comes from."""
DIGEST_BYTES = 16
BLOCK = 1 << 16


def traces_of(units: Units, kind: str, salt: str, most: int = MOST_OF_DOCUMENT) -> list[Traced]:
    """(mark, salted digest) of windows of a document; none if it is shorter than a window."""
    window = WINDOWS[kind]
    count = min(len(units) // window, most)
    if not count:
        return []
    starts = np.unique(np.linspace(0, len(units) - window, count).astype(np.int64))
    hashed = marks(units, kind, salt)
    windows = units[starts[:, None] + np.arange(window)]
    distinct = 1 + (np.diff(np.sort(windows, axis=1), axis=1) != 0).sum(axis=1)
    chosen = zip(hashed[starts].tolist(), windows, (distinct >= MIN_DISTINCT).tolist(), strict=True)
    return [(mark, digest(own, kind, salt)) for mark, own, says in chosen if says]


def share_of(documents: int) -> int:
    """Spans of each document so that those of all are not too many."""
    return max(1, min(MOST_OF_DOCUMENT, MOST // max(1, documents)))


def marks(units: Units, kind: str, salt: str) -> Marks:
    """The mark of the window that begins at each position."""
    multiplier = int.from_bytes(hashlib.sha256(f"{salt} {kind}".encode()).digest()[:8], "little") | 1
    hashed, width = units.astype(np.uint64), 1
    while width < WINDOWS[kind]:
        # The hash of a window is that of its first half times the multiplier's power, plus that of its second half.
        hashed = hashed[:-width] * np.uint64(multiplier) + hashed[width:] if len(hashed) > width else hashed[:0]
        multiplier, width = multiplier * multiplier % (1 << 64), 2 * width
    return (hashed >> np.uint64(32)).astype(np.uint32)


def digest(window: Units, kind: str, salt: str) -> str:
    """The salted digest (hex) of a window, whatever integers hold it."""
    content = window.astype("<u4" if kind == "tokens" else "<u1").tobytes()
    return hashlib.sha256(f"{salt} {kind} ".encode() + content).digest()[:DIGEST_BYTES].hex()


class Finder:
    """Looks for spans in streams of tokens or bytes."""

    def __init__(self, kind: str, salt: str, wanted: Sequence[tuple[int, Sequence[Traced]]]):
        """`wanted`: number of a document, and the spans of it."""
        self._kind, self._salt = kind, salt
        self._owners: dict[str, list[int]] = {}
        for number, spans in wanted:
            for _, one in spans:
                self._owners.setdefault(one, []).append(number)
        self._marks = np.unique(np.array([mark for _, spans in wanted for mark, _ in spans], np.uint32))
        self._likely = np.zeros(1 << 16, np.bool_)
        self._likely[self._marks >> np.uint32(16)] = True

    def find(self, units: Units) -> Iterator[tuple[int, str, list[int]]]:
        """(position, digest, numbers of its documents) of every span that stands in the units."""
        if not len(self._marks):
            return
        window = WINDOWS[self._kind]
        for first in range(0, max(0, len(units) - window + 1), BLOCK):
            block = units[first : first + BLOCK + window - 1]
            hashed = marks(block, self._kind, self._salt)
            places = np.flatnonzero(self._likely[hashed >> np.uint32(16)])
            for place in places[np.isin(hashed[places], self._marks)].tolist():
                found = digest(block[place : place + window], self._kind, self._salt)
                if found in self._owners:
                    yield first + place, found, self._owners[found]
