"""Recurring word n-grams of a text, for the dialects that count every occurrence of a repeated n-gram.

A recurring n-gram starts where a recurring (n-1)-gram starts, so each size checks only the positions that the previous
size kept: few in most texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.text.words import Codes, Ints

SIZES = range(2, 11)
TOP_SIZES, REPEATED_SIZES = (2, 3, 4), (5, 6, 7, 8, 9, 10)
_MIX = np.uint64(0xD6E8FEB86659FD93)  # Odd; makes the code of ("ab", "c") differ from that of ("a", "bc").


@dataclass(frozen=True, slots=True)
class RecurringNgrams:
    """The n-grams of size `n` that occur more than once."""

    n: int
    places: Ints
    """Indices of their first words, ascending."""
    most: int
    """Count of the most frequent n-gram; 1 if none recurs."""
    firsts: Ints
    """First position of each n-gram with that count; empty if none recurs."""


def recurring_ngrams(codes: Codes) -> Iterator[RecurringNgrams]:
    """Yield the recurring n-grams of a text for each of SIZES, given the codes of its words."""
    places, grams = np.arange(len(codes)), codes
    for n in SIZES:
        inside = places <= len(codes) - n
        places, grams = places[inside], grams[inside]
        grams = grams * _MIX + codes[places + (n - 1)]
        order = np.argsort(grams)
        ranked = grams[order]
        equal = ranked[1:] == ranked[:-1]
        if not equal.any():
            for size in range(n, SIZES.stop):
                yield RecurringNgrams(size, places[:0], 1, places[:0])
            return
        bounds = np.concatenate(([0], np.flatnonzero(~equal) + 1, [len(grams)]))
        counts = bounds[1:] - bounds[:-1]
        recurs = np.zeros(len(grams), bool)
        recurs[order[np.repeat(counts > 1, counts)]] = True
        most = int(counts.max())
        firsts = np.minimum.reduceat(order, bounds[:-1])[counts == most]
        yield RecurringNgrams(n, places[recurs], most, places[firsts])
        places, grams = places[recurs], grams[recurs]


def num_covered_chars(ngrams: RecurringNgrams, offsets: Ints) -> int:
    """Return the number of characters in recurring n-grams, each word counted once; `offsets` in code points."""
    if not len(ngrams.places):
        return 0
    edges = np.zeros(len(offsets), np.int64)
    edges[ngrams.places] += 1
    edges[ngrams.places + ngrams.n] -= 1
    within = np.cumsum(edges[:-1]) > 0
    return int((offsets[1:] - offsets[:-1])[within].sum())


def ngram_lengths(places: Ints, n: int, offsets: Ints) -> Ints:
    """Return the number of characters of each n-gram that starts at these words."""
    return offsets[places + n] - offsets[places]
