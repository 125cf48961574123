"""Contexts: what follows the same words, summed, and the share of its mass that goes to the back-off.

N-grams that share a context end differently, so they lie in different parts; each part sends its contexts with
their counts to the bucket of the context, and gets sums back in the order in which it sent them: no keys return.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.perplexity.kneser_ney.discounts import Discounts, Flags, Floats, Ints
from pipeline.perplexity.kneser_ney.estimate import Keys, Level, Words, buckets, news, owners, suffix_order


@dataclass(frozen=True)
class Sums:
    """What the n-grams of one part get back, in the order in which they were sent."""

    mass: Ints
    """Adjusted counts of all n-grams with the context."""
    freed: Floats
    """The share of it that goes to the back-off."""


@dataclass(frozen=True)
class Answers:
    """What one bucket of contexts finds."""

    sums: list[Sums]
    """One for each part that sent something, in the order given."""
    owners: Ints
    """The part of each distinct context, as an n-gram of its own; ascending."""
    freed: Floats
    """Of each distinct context, in suffix order."""


def sent(level: Level, kept: Flags, number: int) -> list[tuple[Words, Ints]]:
    """The contexts of n-grams with their adjusted counts, negative if pruned: one pair for each bucket."""
    contexts = level.grams[1:]
    counts = np.where(kept, level.counts, -level.counts)
    bucket = buckets(contexts, number)
    order = np.argsort(bucket, kind="stable")
    cuts = np.searchsorted(bucket[order], np.arange(1, number))
    return [(contexts[:, rows], counts[rows]) for rows in np.split(order, cuts)]


def summed(parts: list[tuple[Words, Ints]], discounts: Discounts, bits: int, bounds: Keys) -> Answers:
    """The sums of one bucket over the contexts that the parts have sent."""
    grams = np.concatenate([part[0] for part in parts], axis=1)
    signed = np.concatenate([part[1] for part in parts])
    order = suffix_order(grams, bits)
    new = news(grams[:, order])[-1]
    starts = np.flatnonzero(new)
    signed_sorted = signed[order]

    def total(values: Ints | Flags) -> Ints:
        return np.add.reduceat(values, starts, dtype=np.int64)

    mass = total(np.abs(signed_sorted))
    freed = discounts.freed(
        total(signed_sorted == 1),
        total(signed_sorted == 2),
        total(signed_sorted > 2),
        total(np.maximum(-signed_sorted, 0)),
        mass,
    )
    context = np.empty(len(order), np.intp)
    context[order] = np.cumsum(new) - 1
    cuts = np.cumsum([len(part[1]) for part in parts])[:-1]
    sums = [Sums(mass[rows], freed[rows]) for rows in np.split(context, cuts)]
    return Answers(sums, owners(grams[:, order[starts]], bounds), freed)
