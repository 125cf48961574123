"""Word n-grams that recur in a text, for the dialects that count every occurrence of what occurs more than once.

An n-gram that recurs begins where an (n-1)-gram that recurs begins, so each size looks only at the places that the one
before left: few in most texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.text.words import Codes, Ints

SIZES = range(2, 11)
TOP_SIZES, REPEATED_SIZES = (2, 3, 4), (5, 6, 7, 8, 9, 10)
_MIX = np.uint64(0xD6E8FEB86659FD93)  # odd; makes the code of ("ab", "c") differ from that of ("a", "bc")


@dataclass(frozen=True, slots=True)
class RecurringNgrams:
    """The n-grams of one size that occur more than once."""

    n: int
    places: Ints
    """Words at which they begin, ascending."""
    most: int
    """How often the most frequent occurs; 1 if none recurs."""
    firsts: Ints
    """First places of those that occur so often; empty if none recurs."""


def recurring_ngrams(codes: Codes) -> Iterator[RecurringNgrams]:
    """The recurring n-grams of a text, given the codes of its words, for each of SIZES."""
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


def num_covered_chars(found: RecurringNgrams, offsets: Ints) -> int:
    """Characters of the words in recurring n-grams, each word counted once, given the words' offsets [code points]."""
    if not len(found.places):
        return 0
    edges = np.zeros(len(offsets), np.int64)
    edges[found.places] += 1
    edges[found.places + found.n] -= 1
    within = np.cumsum(edges[:-1]) > 0
    return int((offsets[1:] - offsets[:-1])[within].sum())


def ngram_lengths(places: Ints, n: int, offsets: Ints) -> Ints:
    """Characters of the n-grams that begin at these words."""
    return offsets[places + n] - offsets[places]
