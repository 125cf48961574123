"""Runs of words or bytes that stand elsewhere: fingerprints of all windows of n units, of which few leave the worker.

The seed of a window is the smallest fingerprint of its k-grams (k = n // 2): equal windows have equal seeds wherever
they stand, and neighbours mostly share theirs, so 2 in n - k + 2 k-grams are seeds. Only windows whose seed repeats are
compared, by 128 bits: the fingerprint of their units and, as verification, another hash of their bytes. Sources:
Schleimer, Wilkerson and Aiken 2003 (winnowing); Lee et al. 2022, arXiv 2107.06499 (runs, by one suffix array).
"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from pipeline.minhash.fast import mixed
from pipeline.text.spacy_tokens import UNSPACED
from pipeline.text.spans import Span
from pipeline.text.words import Codes, Ints, word_keys

TOKEN = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
"""A word: a character of a script that does not separate words, or a run of others between whitespace."""
CHECK_SEED = 0x1EE2022
_WINDOW_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_BYTE_KEYS = word_keys(map(chr, range(256)))


@dataclass(frozen=True)
class Tokens:
    """A text as words or as bytes."""

    text: str
    unit: str
    """`words` or `bytes`."""

    @cached_property
    def pieces(self) -> list[str]:
        """The words."""
        return TOKEN.findall(self.text)

    @cached_property
    def data(self) -> bytes:
        """The text in UTF-8; words with one space between."""
        whole = self.text if self.unit == "bytes" else " ".join(self.pieces)
        return whole.encode("utf-8", "surrogatepass")

    @cached_property
    def codes(self) -> Codes:
        """(tokens,) the key of each token."""
        if self.unit == "bytes":
            keys: Codes = _BYTE_KEYS[np.frombuffer(self.data, np.uint8)]
            return keys
        return word_keys(self.pieces)

    def checks(self, places: Ints, n: int) -> Codes:
        """(places,) XXH3 of the bytes of the windows of n tokens that begin at these places."""
        view = memoryview(self.data)
        starts, ends = self._offsets
        edges = zip(starts[places].tolist(), ends[places + (n - 1)].tolist())
        found = (xxhash.xxh3_64_intdigest(view[start:end], CHECK_SEED) for start, end in edges)
        return np.fromiter(found, np.uint64, len(places))

    @cached_property
    def _offsets(self) -> tuple[Ints, Ints]:
        """Start and end of each token in `data` [bytes]."""
        if self.unit == "bytes":
            starts = np.arange(len(self.data))
            return starts, starts + 1
        sizes = (len(piece.encode("utf-8", "surrogatepass")) for piece in self.pieces)
        lengths = np.fromiter(sizes, np.int64, len(self.pieces))
        ends = np.cumsum(lengths + 1) - 1
        return ends - lengths, ends

    def chars(self, runs: Ints) -> list[Span]:
        """The spans of the text [code points] that runs of tokens (runs, 2) cover; of bytes, those of whole characters.

        Runs are sorted and disjoint; a run of bytes without a whole character has no span.
        """
        if not len(runs):
            return []
        if self.unit == "words":
            places = [match.span() for match in TOKEN.finditer(self.text)]
            return [(places[start][0], places[end - 1][1]) for start, end in runs.tolist()]
        begins = (np.frombuffer(self.data, np.uint8) & 0xC0) != 0x80  # bytes with which a character begins
        before = np.concatenate(([0], np.cumsum(begins)))
        whole = np.append(begins, True)[runs[:, 1]]
        spans = zip(before[runs[:, 0]].tolist(), (before[runs[:, 1]] - ~whole).tolist())
        return [(start, end) for start, end in spans if start < end]


def grams(codes: Codes, n: int) -> Codes:
    """The fingerprint of every run of n tokens (len(codes) - n + 1,); empty if there are fewer tokens.

    A run is hashed as a tree of halves, so that no two contents collide by arithmetic as those of a polynomial may.
    """
    count = max(0, len(codes) - n + 1)
    level, size, done = codes, 1, 0
    found = np.zeros(count, np.uint64)
    while True:
        if n & size:
            found = mixed(found * _WINDOW_FACTOR + level[done : done + count])
            done += size
        if done == n:
            return found
        level = mixed(level[:-size] * _WINDOW_FACTOR + level[size:]) if len(level) > size else level[:0]
        size *= 2


def windowed(values: Codes, width: int, take: np.ufunc) -> Codes:
    """The least or greatest (`take`) of every `width` neighbours (len(values) - width + 1,)."""
    size = 1
    while 2 * size <= width:
        values, size = take(values[:-size], values[size:]), 2 * size
    rest = width - size
    found: Codes = take(values[: len(values) - rest], values[rest:])
    return found


def window_seeds(codes: Codes, n: int) -> Codes:
    """The seed of every window of n tokens (len(codes) - n + 1,); empty if the text is shorter."""
    if len(codes) < n:
        return np.zeros(0, np.uint64)
    k = n // 2
    return windowed(grams(codes, k), n - k + 1, np.minimum)


def seeds(codes: Codes, n: int) -> Codes:
    """The seeds of a text, one for each place where one stands.

    A window that occurs t times has its seed at t places or more, even where its occurrences overlap.
    """
    if len(codes) < n:
        return np.zeros(0, np.uint64)
    k = n // 2
    width = n - k + 1
    hashes = grams(codes, k)
    least = windowed(hashes, width, np.minimum)
    # a k-gram is a seed if it is the least of one of the windows that hold it
    best = windowed(np.pad(least, width - 1), width, np.maximum)
    found: Codes = hashes[best == hashes]
    return found


def covered(places: Ints, n: int) -> Ints:
    """The runs (runs, 2) that windows of n tokens cover together, given their places in ascending order."""
    if not len(places):
        return np.zeros((0, 2), np.int64)
    breaks = np.flatnonzero(places[1:] > places[:-1] + n)
    starts = np.concatenate((places[:1], places[breaks + 1]))
    ends = np.concatenate((places[breaks], places[-1:])) + n
    return np.stack([starts, ends], axis=1)
