"""Probabilities and back-offs of one part, order by order, from counts and the sums of contexts.

p(w | c) = (count - discount) / mass(c) + freed(c) p(w | c without its first word); the back-off weight of an n-gram
is what it frees as a context. Every value depends on integers alone, so no partitioning can change a bit of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.perplexity.kneser_ney.contexts import Sums
from pipeline.perplexity.kneser_ney.discounts import Discounts, Flags, Floats, Ints, Tally
from pipeline.perplexity.kneser_ney.estimate import BOS, EOS, UNK, Keys, Level, Words, buckets, owners
from schemas.errors import ContractError


@dataclass(frozen=True)
class Unigrams:
    """What every part must know of the unigrams."""

    tally: Tally
    discounts: Discounts
    vocabulary: int
    """Words that share the freed mass: all that are kept, <unk> and </s>, without <s>."""
    interpolate: bool
    shared: Mapping[int, tuple[int, int]]
    """Adjusted and raw count of the words that lie in more than one part."""

    def freed(self) -> float:
        """The share of the mass that unigrams free."""
        tally = self.tally
        sums = [tally.kept_ones, tally.kept_twos, tally.kept_more, tally.pruned_mass, tally.mass]
        return float(self.discounts.freed(*(np.array([value]) for value in sums))[0])

    def probabilities(self, words: Words, counts: Ints) -> Floats:
        """The probability of each word."""
        freed = self.freed()
        even = freed / self.vocabulary
        own = (counts - self.discounts.of(counts)) / self.tally.mass
        values = own + even if self.interpolate else own
        values[words == UNK] = even if self.interpolate else freed
        # <s> is never predicted: 1 lets a query score it at no cost.
        values[words == BOS] = 1.0
        return values

    def complete(self, level: Level, part: int, bounds: Keys) -> tuple[Level, Flags]:
        """The unigrams of a part with the whole counts of those that lie in other parts too, and which it writes.

        It writes those that it owns, even if it holds none of their n-grams; the first part has <unk> and <s> too.
        """
        shared = np.array([(word, *counts) for word, counts in self.shared.items()], np.int64).reshape(-1, 3)
        special = [[UNK, 0, 0], [BOS, 0, 0]] if part == 0 else np.zeros((0, 3), np.int64)
        extra = np.concatenate([special, shared]).astype(np.int64)
        words = np.concatenate([extra[:, 0], level.grams[0]])
        # Of equal words the first is taken: the whole count.
        words, first = np.unique(words, return_index=True)
        counts = np.concatenate([extra[:, 1], level.counts])[first]
        raw = np.concatenate([extra[:, 2], level.raw])[first]
        grams = words.astype(np.uint32).reshape(1, -1)
        return Level(grams, counts, raw, np.zeros(len(words), np.intp)), owners(grams, bounds) == part


def interpolated(level: Level, sums: Sequence[Sums], discounts: Discounts, below: Floats) -> Floats:
    """The probabilities of n-grams of order 2 or more; `below` are those of the level below."""
    mass, freed = np.zeros(len(level.counts), np.int64), np.zeros(len(level.counts))
    bucket = buckets(level.grams[1:], len(sums))
    order = np.argsort(bucket, kind="stable")
    check(len(order), sum(len(part.mass) for part in sums), len(level.grams))
    if len(order):
        mass[order] = np.concatenate([part.mass for part in sums])
        freed[order] = np.concatenate([part.freed for part in sums])
    return (level.counts - discounts.of(level.counts)) / mass + freed * below[level.suffix]


def backed_off(grams: Words, freed: Sequence[Floats]) -> Floats:
    """The back-off weight of each n-gram: what it frees as a context, 1 if nothing can follow it."""
    weights = np.ones(grams.shape[1])
    follows = np.flatnonzero((grams[0] != EOS) & (grams[0] != UNK))
    bucket = buckets(grams[:, follows], len(freed))
    order = follows[np.argsort(bucket, kind="stable")]
    check(len(order), sum(map(len, freed)), len(grams))
    if len(order):
        weights[order] = np.concatenate(freed)
    return weights


def check(here: int, found: int, order: int) -> None:
    """Raise ContractError if the sums that came back are not those of the n-grams that wait for them."""
    if here != found:
        raise ContractError(
            f"train_lm: promised sums for {here} {order}-grams of a part, found {found}; workers disagree, run it again"
        )


def kept_level(level: Level, keep: Flags, below: Flags) -> Level:
    """The level without what pruning leaves out, above a level pruned likewise."""
    rows = np.flatnonzero(keep)
    place = np.cumsum(below) - 1
    return Level(level.grams[:, rows], level.counts[rows], level.raw[rows], place[level.suffix[rows]])
