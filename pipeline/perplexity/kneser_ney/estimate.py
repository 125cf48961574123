"""N-grams as columns of a matrix of word ids, last word first, and what follows from their sorted order.

Row 0 holds the last words, row 1 the words before them, and so on; sorted columns are in suffix order. A sentence
begins with as many <s> as are asked for; of those, an n-gram keeps at most one, in front. So the sorted n-grams of
the highest order hold the shorter ones too: they are the runs of columns that agree in the first rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.perplexity.kneser_ney.discounts import Flags, Ints

Words = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
UNK, BOS, EOS = 0, 1, 2
FIRST_WORD = 3
MIX = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)


def windows(line: Words, order: int) -> Words:
    """The n-gram that ends at every place of a line of words and sentence ends; unsorted, with repetitions."""
    ends = np.flatnonzero(line == EOS)
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    place = np.arange(len(line)) - np.repeat(starts, ends - starts + 1)
    grams = np.full((order, len(line)), BOS, np.uint32)
    for back in range(order):
        inside = place[back:] >= back
        grams[back, back:][inside] = line[: len(line) - back][inside]
    return grams


def suffix_order(grams: Words, bits: int) -> npt.NDArray[np.intp]:
    """The permutation that sorts columns by their first row, then the second, and so on; ids have `bits` bits.

    As many rows as fit are packed into 64 bits, whose rank then stands for them in the next 64: 0.5 s for 2.8 million
    5-grams of real text, where numpy's lexsort of the rows takes 1.35 s (process time, one core).
    """
    key = np.zeros(grams.shape[1], np.uint64)
    used, shift = 0, np.uint64(bits)
    for row in grams:
        if used + bits > 64:
            key = _ranks(key)
            used = max(1, grams.shape[1].bit_length())
        key = (key << shift) | row
        used += bits
    return np.argsort(key)


def _ranks(keys: Keys) -> Keys:
    order = np.argsort(keys)
    steps = np.zeros(len(keys), np.uint64)
    if len(keys):
        steps[1:] = keys[order][1:] != keys[order][:-1]
    ranks = np.empty_like(keys)
    ranks[order] = np.cumsum(steps, dtype=np.uint64)
    return ranks


def news(grams: Words) -> Flags:
    """Where sorted columns differ from the one before them in the first 1, 2, ... rows, (rows, columns)."""
    new = np.ones(grams.shape, np.bool_)
    new[:, 1:] = grams[:, 1:] != grams[:, :-1]
    return np.logical_or.accumulate(new, axis=0)


def combined(grams: Words, counts: Ints, bits: int) -> tuple[Words, Ints]:
    """The distinct n-grams in suffix order, with the sums of their counts."""
    order = suffix_order(grams, bits)
    grams = grams[:, order]
    starts = np.flatnonzero(news(grams)[-1])
    return np.ascontiguousarray(grams[:, starts]), np.add.reduceat(counts[order], starts) if len(starts) else counts


@dataclass(frozen=True)
class Level:
    """The distinct n-grams of one order in suffix order."""

    grams: Words
    counts: Ints
    """Adjusted: how many different words stand before the n-gram; how often it occurs, if none may (it begins with
    <s>) or if it is of the highest order."""
    raw: Ints
    """How often it occurs."""
    suffix: npt.NDArray[np.intp]
    """Where the n-gram without its first word stands in the level below."""

    def where(self, rows: Flags) -> "Level":
        """Those n-grams of the level."""
        return Level(self.grams[:, rows], self.counts[rows], self.raw[rows], self.suffix[rows])

    def kept(self, threshold: int, num_allowed: int) -> Flags:
        """Those that pruning leaves; ids from `num_allowed` on may not stay, sentence ends always do."""
        keep = (self.raw > threshold) & (self.grams < num_allowed).all(axis=0)
        return keep | (self.grams[0] == EOS) if len(self.grams) == 1 else keep


def levels(grams: Words, counts: Ints) -> list[Level]:
    """The n-grams of every order, from 1 on, that the distinct sorted n-grams of the highest order contain."""
    new = news(grams)
    found: list[Level] = []
    below: npt.NDArray[np.intp] = np.zeros(grams.shape[1], np.intp)
    for order in range(1, len(grams) + 1):
        starts = np.flatnonzero(new[order - 1])
        # A second <s> is padding: what stands before it is a shorter n-gram.
        valid = grams[order - 2, starts] != BOS if order > 1 else np.ones(len(starts), np.bool_)
        raw = np.add.reduceat(counts, starts) if len(starts) else counts[:0]
        adjusted = raw
        if order < len(grams) and len(starts):
            extensions = np.add.reduceat(new[order], starts, dtype=np.int64)
            adjusted = np.where(grams[order - 1, starts] == BOS, raw, extensions)
        own = np.ascontiguousarray(grams[:order, starts[valid]])
        found.append(Level(own, adjusted[valid], raw[valid], below[starts[valid]]))
        place = np.zeros(grams.shape[1], np.intp)
        place[starts[valid]] = 1
        below = np.cumsum(place) - 1
    return found


def owner_keys(grams: Words) -> Keys:
    """What decides which part an n-gram belongs to: its last two words, so that its suffixes lie there too."""
    before = grams[1] if len(grams) > 1 else np.zeros_like(grams[0])
    keys: Keys = (grams[0].astype(np.uint64) << HALF) | before
    return keys


def owners(grams: Words, bounds: Keys) -> Ints:
    """The part of each n-gram; parts are ranges of suffix order that begin at the bounds."""
    return np.searchsorted(bounds, owner_keys(grams), side="right")


def buckets(grams: Words, number: int) -> npt.NDArray[np.unsignedinteger]:
    """A number in [0, number) for each column, from a hash of its ids; 16 bits if that is enough, to sort faster."""
    mixed = np.full(grams.shape[1], len(grams), np.uint64)
    for row in grams:
        mixed = (mixed ^ row) * MIX
        mixed ^= mixed >> HALF
    return (mixed % np.uint64(number)).astype(np.uint16 if number <= 1 << 16 else np.uint32)
