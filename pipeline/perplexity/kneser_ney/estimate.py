"""Estimation of an n-gram model in numpy: counts, discounts, context sums, probabilities and back-off weights.

N-grams are the columns of a matrix of word ids, last word first: row 0 holds the last words, row 1 the words before
them, and so on. Sorted columns are in suffix order. Sentences are padded with <s> in front; an n-gram keeps at most one
of them. The sorted n-grams of the highest order therefore contain all lower orders: a run of columns with equal first
rows is one shorter n-gram.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from schemas.errors import ContractError
from schemas.storage import Store

# Discounts of modified Kneser-Ney smoothing, from counts of counts.
#
# Source: Chen and Goodman 1998, equation 26. Fallback if it fails: Heafield et al. 2013 and lmplz.

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CountsOfCounts:
    """Counts of counts of the n-grams of one order: how many n-grams have a count of 1, 2, and so on."""

    number: int = 0
    """Number of n-grams."""
    kept: int = 0
    """Number of n-grams that pruning keeps."""
    ones: int = 0
    """Number of n-grams with an adjusted count of 1, pruned or not; `twos`, `threes` and `fours` are those of 2, 3 and
    4."""
    twos: int = 0
    threes: int = 0
    fours: int = 0
    kept_ones: int = 0
    """Number of kept n-grams with an adjusted count of 1; `kept_twos` are those of 2."""
    kept_twos: int = 0
    kept_more: int = 0
    """Number of kept n-grams with an adjusted count of 3 or more."""
    pruned_mass: int = 0
    """Sum of the adjusted counts of pruned n-grams."""
    mass: int = 0
    """Sum of all adjusted counts."""

    @classmethod
    def of(cls, counts: Ints, kept: Flags) -> Self:
        """Return the counts of counts for these adjusted counts. `kept` marks the n-grams that pruning keeps."""
        totals = np.bincount(np.minimum(counts, 5), minlength=6).tolist()
        kept_totals = np.bincount(np.minimum(counts[kept], 3), minlength=4).tolist()
        return cls(
            number=len(counts),
            kept=int(kept.sum()),
            ones=totals[1],
            twos=totals[2],
            threes=totals[3],
            fours=totals[4],
            kept_ones=kept_totals[1],
            kept_twos=kept_totals[2],
            kept_more=kept_totals[3],
            pruned_mass=int(counts[~kept].sum()),
            mass=int(counts.sum()),
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class Discounts:
    """Discounts of the n-grams of one order: values subtracted from adjusted counts of 1, 2, and 3 or more."""

    d1: float
    d2: float
    d3_plus: float

    def of(self, counts: Ints) -> Floats:
        """Return the discount of each adjusted count."""
        table: Floats = np.array([0.0, self.d1, self.d2, self.d3_plus])
        return np.take(table, np.minimum(counts, 3))

    def freed(self, ones: Ints, twos: Ints, more: Ints, pruned: Ints, mass: Ints) -> Floats:
        """Return the share of each context's mass that goes to its back-off.

        `ones`, `twos` and `more` are numbers of kept n-grams with an adjusted count of 1, 2, and 3 or more. `pruned` is
        the sum of the adjusted counts of pruned n-grams. `mass` is the sum over all n-grams with the context.
        """
        shares: Floats = (self.d1 * ones + self.d2 * twos + self.d3_plus * more + pruned) / mass
        return shares


def estimate_discounts(
    order: int, tally: CountsOfCounts, fallback: Sequence[float] | None
) -> tuple[Discounts, str | None]:
    """Return the discounts of one order, and why `fallback` is used (None if it is not used).

    `fallback` is used if a count of counts is zero or a computed discount is out of range. Raises ContractError if
    `fallback` is None in this case.
    """
    counts = [tally.ones, tally.twos, tally.threes, tally.fours]
    problem = None
    values: list[float] = []
    if missing := [count for count in (1, 2, 3) if not counts[count - 1]]:
        problem = f"no {order}-gram with an adjusted count of {missing[0]}"
    else:
        share = counts[0] / (counts[0] + 2 * counts[1])
        values = [count - (count + 1) * share * counts[count] / counts[count - 1] for count in (1, 2, 3)]
        invalid = [(count, value) for count, value in enumerate(values, 1) if not 0 <= value <= count]
        if invalid:
            problem = f"a discount of {invalid[0][1]:.6g} for adjusted counts of {invalid[0][0]}"
    if problem is None:
        return Discounts(*values), None
    if fallback is None:
        raise ContractError(
            f"train_lm: expected text with enough different {order}-grams to estimate discounts, got {problem} "
            f"(numbers of {order}-grams with adjusted counts 1 to 4: {counts}). "
            "Set train_lm.discount_fallback = [0.5, 1, 1.5]."
        )
    filled = [*fallback, *[fallback[-1]] * (3 - len(fallback))]
    return Discounts(*filled), problem


# Counts: the n-grams of all orders in a text, sorted, with their counts, and how they are divided into parts.

Words = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
UNK, BOS, EOS = 0, 1, 2
FIRST_WORD = 3
"""Id of the first word after the special ones."""
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)


def windows(line: Words, order: int) -> Words:
    """Return one n-gram of `order` words for each position of `line`: the n-gram that ends at this position.

    `line` has the word ids of all sentences. The id EOS ends each sentence.
    """
    ends = np.flatnonzero(line == EOS)
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    position = np.arange(len(line)) - np.repeat(starts, ends - starts + 1)
    grams = np.full((order, len(line)), BOS, np.uint32)
    for distance in range(order):
        inside = position[distance:] >= distance
        grams[distance, distance:][inside] = line[: len(line) - distance][inside]
    return grams


def suffix_order(grams: Words, bits: int) -> npt.NDArray[np.intp]:
    """Return the permutation that sorts n-grams by their last words, then by the words before the last, and so on.

    Each column of `grams` is an n-gram that starts with its last word. Word ids have `bits` bits.
    """
    # As many rows as fit are packed into a 64-bit key, and the key's rank replaces these rows in the next key.
    # 0.5 s for 2.8 million 5-grams of real text; numpy's lexsort takes 1.35 s (process time, one core).
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
    is_new = np.zeros(len(keys), np.uint64)
    if len(keys):
        is_new[1:] = keys[order][1:] != keys[order][:-1]
    ranks = np.empty_like(keys)
    ranks[order] = np.cumsum(is_new, dtype=np.uint64)
    return ranks


def new_gram_mask(grams: Words) -> Flags:
    """Return a mask (rows, n-grams): row n - 1 is True where the last n words differ from those of the n-gram before.

    Each column of `grams` is an n-gram that starts with its last word. The n-grams are in suffix order. The first
    column of the mask is True.
    """
    new = np.ones(grams.shape, np.bool_)
    new[:, 1:] = grams[:, 1:] != grams[:, :-1]
    return np.logical_or.accumulate(new, axis=0)


def combine_counts(grams: Words, counts: Ints, bits: int) -> tuple[Words, Ints]:
    """Return the distinct n-grams in suffix order, each with the sum of its counts."""
    order = suffix_order(grams, bits)
    grams = grams[:, order]
    starts = np.flatnonzero(new_gram_mask(grams)[-1])
    return np.ascontiguousarray(grams[:, starts]), np.add.reduceat(counts[order], starts) if len(starts) else counts


@dataclass(frozen=True)
class OrderNgrams:
    """The distinct n-grams of one order, in suffix order."""

    grams: Words
    counts: Ints
    """Adjusted counts: the number of different words that precede the n-gram. The raw count if the n-gram starts with
    <s> or has the highest order."""
    raw: Ints
    """Raw counts: the number of occurrences in the text."""
    suffix: npt.NDArray[np.intp]
    """Index of the n-gram without its first word, among the n-grams of the next lower order."""

    def where(self, rows: Flags) -> Self:
        """Return the n-grams that a mask selects."""
        return type(self)(self.grams[:, rows], self.counts[rows], self.raw[rows], self.suffix[rows])

    def kept(self, threshold: int, num_allowed: int) -> Flags:
        """Return a mask of the n-grams that pruning keeps.

        An n-gram is pruned if its raw count is at most `threshold`, or if the id of any of its words is at least
        `num_allowed`. The unigram `</s>` is always kept.
        """
        keep = (self.raw > threshold) & (self.grams < num_allowed).all(axis=0)
        return keep | (self.grams[0] == EOS) if len(self.grams) == 1 else keep


def ngrams_by_order(grams: Words, counts: Ints) -> list[OrderNgrams]:
    """Return the n-grams of each order, from 1 to the highest.

    `grams` are the distinct n-grams of the highest order, in suffix order. `counts` are their numbers of occurrences.
    """
    new = new_gram_mask(grams)
    orders: list[OrderNgrams] = []
    below: npt.NDArray[np.intp] = np.zeros(grams.shape[1], np.intp)
    for order in range(1, len(grams) + 1):
        starts = np.flatnonzero(new[order - 1])
        # A second <s> is padding: such a column is an n-gram of a lower order.
        valid = grams[order - 2, starts] != BOS if order > 1 else np.ones(len(starts), np.bool_)
        raw = np.add.reduceat(counts, starts) if len(starts) else counts[:0]
        adjusted = raw
        if order < len(grams) and len(starts):
            extensions = np.add.reduceat(new[order], starts, dtype=np.int64)
            adjusted = np.where(grams[order - 1, starts] == BOS, raw, extensions)
        distinct = np.ascontiguousarray(grams[:order, starts[valid]])
        orders.append(OrderNgrams(distinct, adjusted[valid], raw[valid], below[starts[valid]]))
        is_start = np.zeros(grams.shape[1], np.intp)
        is_start[starts[valid]] = 1
        below = np.cumsum(is_start) - 1
    return orders


def owner_keys(grams: Words) -> Keys:
    """Return the owner key of each n-gram, which consists of the n-gram's last two words.

    An n-gram and its suffixes of two or more words have the same key, so they are in the same part.
    """
    before = grams[1] if len(grams) > 1 else np.zeros_like(grams[0])
    keys: Keys = (grams[0].astype(np.uint64) << HALF) | before
    return keys


def owner_parts(grams: Words, bounds: Keys) -> Ints:
    """Return the index of the part that owns each n-gram.

    `bounds` has the first owner key of every part except part 0.
    """
    return np.searchsorted(bounds, owner_keys(grams), side="right")


def context_buckets(grams: Words, number: int) -> npt.NDArray[np.unsignedinteger]:
    """Return the hash bucket of each context, from 0 to `number` - 1. Each column of `grams` is a context."""
    mixed = np.full(grams.shape[1], len(grams), np.uint64)
    for row in grams:
        mixed = (mixed ^ row) * HASH_FACTOR
        mixed ^= mixed >> HALF
    # 16-bit integers sort faster.
    return (mixed % np.uint64(number)).astype(np.uint16 if number <= 1 << 16 else np.uint32)


# Contexts: sums over the n-grams with the same context, and the share of their mass that goes to the back-off.
#
# N-grams with the same context have different last words, so they are in different parts. Each part sends its contexts
# with their counts to the context's hash bucket and receives sums in the same order, so no keys are returned.


@dataclass(frozen=True)
class ContextSums:
    """The sum of adjusted counts and the back-off share of each context that one part sent."""

    mass: Ints
    """Sum of the adjusted counts of all n-grams with the context."""
    freed: Floats
    """Share of the mass that goes to the back-off."""


@dataclass(frozen=True)
class BucketSums:
    """Sums of adjusted n-gram counts, and back-off shares, for the contexts in one hash bucket."""

    sums: list[ContextSums]
    """The sums for each part that sent contexts to the bucket, in the order of the parts."""
    parts: Ints
    """Number of the part that holds each distinct context as an n-gram; ascending."""
    freed: Floats
    """Share of each distinct context's mass that goes to the back-off, in suffix order."""


def contexts_by_bucket(level: OrderNgrams, kept: Flags, number: int) -> list[tuple[Words, Ints]]:
    """Return (contexts, adjusted counts) of n-grams for each hash bucket of the contexts.

    The context of an n-gram is the n-gram without its last word. The count of a pruned n-gram is negative.
    """
    contexts = level.grams[1:]
    counts = np.where(kept, level.counts, -level.counts)
    bucket = context_buckets(contexts, number)
    order = np.argsort(bucket, kind="stable")
    cuts = np.searchsorted(bucket[order], np.arange(1, number))
    return [(contexts[:, rows], counts[rows]) for rows in np.split(order, cuts)]


def sum_contexts(parts: list[tuple[Words, Ints]], discounts: Discounts, bits: int, bounds: Keys) -> BucketSums:
    """Return the sums of adjusted counts and the back-off shares of the contexts in one hash bucket.

    `parts` has the (contexts, adjusted counts) from each part, as `contexts_by_bucket` returns them.
    """
    grams = np.concatenate([part[0] for part in parts], axis=1)
    signed = np.concatenate([part[1] for part in parts])
    order = suffix_order(grams, bits)
    new = new_gram_mask(grams[:, order])[-1]
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
    sums = [ContextSums(mass[rows], freed[rows]) for rows in np.split(context, cuts)]
    return BucketSums(sums, owner_parts(grams[:, order[starts]], bounds), freed)


# Probabilities and back-off weights of one part, order by order, from counts and context sums.
#
# p(w | c) = (count - discount) / mass(c) + freed(c) p(w | c without its first word); the back-off weight of an n-gram
# is its freed share as a context. Every value depends on integers alone, so it is the same for any partitioning.


@dataclass(frozen=True)
class Unigrams:
    """Counts of counts, discounts and vocabulary size: what a part needs to compute unigram probabilities."""

    tally: CountsOfCounts
    discounts: Discounts
    vocabulary: int
    """Number of words that share the freed mass: all kept words, <unk> and </s>, without <s>."""
    interpolate: bool
    """True if the freed mass is distributed evenly; False if <unk> gets all of it."""
    shared: Mapping[int, tuple[int, int]]
    """Adjusted and raw counts, over all parts, of the words that are in more than one part."""

    def freed(self) -> float:
        """Return the share of the unigrams' probability mass that discounts and pruning free."""
        tally = self.tally
        sums = [tally.kept_ones, tally.kept_twos, tally.kept_more, tally.pruned_mass, tally.mass]
        return float(self.discounts.freed(*(np.array([value]) for value in sums))[0])

    def probabilities(self, words: Words, counts: Ints) -> Floats:
        """Return the probability of each word, from the ids and adjusted counts of the words."""
        freed = self.freed()
        uniform = freed / self.vocabulary
        discounted = (counts - self.discounts.of(counts)) / self.tally.mass
        values = discounted + uniform if self.interpolate else discounted
        values[words == UNK] = uniform if self.interpolate else freed
        # <s> is never predicted: 1 lets a query score it at no cost.
        values[words == BOS] = 1.0
        return values

    def complete(self, level: OrderNgrams, part: int, bounds: Keys) -> tuple[OrderNgrams, Flags]:
        """Return the unigrams of a part, with counts over all parts, and a mask of the unigrams that the part writes.

        A part writes the unigrams that it owns. Part 0 also writes <unk> and <s>.
        """
        shared = np.array([(word, *counts) for word, counts in self.shared.items()], np.int64).reshape(-1, 3)
        special = [[UNK, 0, 0], [BOS, 0, 0]] if part == 0 else np.zeros((0, 3), np.int64)
        extra = np.concatenate([special, shared]).astype(np.int64)
        words = np.concatenate([extra[:, 0], level.grams[0]])
        # Of equal words np.unique keeps the first, which has the total count.
        words, first = np.unique(words, return_index=True)
        counts = np.concatenate([extra[:, 1], level.counts])[first]
        raw = np.concatenate([extra[:, 2], level.raw])[first]
        grams = words.astype(np.uint32).reshape(1, -1)
        return OrderNgrams(grams, counts, raw, np.zeros(len(words), np.intp)), owner_parts(grams, bounds) == part


def interpolate_probabilities(
    level: OrderNgrams, sums: Sequence[ContextSums], discounts: Discounts, below: Floats
) -> Floats:
    """Return the probability of each n-gram of one order, which is at least 2.

    `sums` has the context sums by hash bucket. `below` has the probabilities of the n-grams of the next lower order.
    """
    mass, freed = np.zeros(len(level.counts), np.int64), np.zeros(len(level.counts))
    bucket = context_buckets(level.grams[1:], len(sums))
    order = np.argsort(bucket, kind="stable")
    check_sums(len(order), sum(len(part.mass) for part in sums), len(level.grams))
    if len(order):
        mass[order] = np.concatenate([part.mass for part in sums])
        freed[order] = np.concatenate([part.freed for part in sums])
    return (level.counts - discounts.of(level.counts)) / mass + freed * below[level.suffix]


def backoff_weights(grams: Words, freed: Sequence[Floats]) -> Floats:
    """Return the back-off weight of each n-gram: the n-gram's back-off share as a context. 1 if no word can follow.

    `freed` has the back-off shares by hash bucket.
    """
    weights = np.ones(grams.shape[1])
    follows = np.flatnonzero((grams[0] != EOS) & (grams[0] != UNK))
    bucket = context_buckets(grams[:, follows], len(freed))
    order = follows[np.argsort(bucket, kind="stable")]
    check_sums(len(order), sum(map(len, freed)), len(grams))
    if len(order):
        weights[order] = np.concatenate(freed)
    return weights


def check_sums(expected: int, received: int, order: int) -> None:
    """Raise ContractError if a part received too few or too many values from the hash buckets."""
    if expected != received:
        raise ContractError(
            f"train_lm: expected {expected} sums for the {order}-grams of one part, got {received} sums. "
            "Run `penstock train-lm` again."
        )


def kept_ngrams(level: OrderNgrams, keep: Flags, below: Flags) -> OrderNgrams:
    """Return the n-grams of one order that pruning keeps.

    `keep` is the mask of kept n-grams of this order. `below` is the mask for the next lower order. The field `suffix`
    of the result indexes the kept n-grams of the lower order.
    """
    rows = np.flatnonzero(keep)
    index = np.cumsum(below) - 1
    return OrderNgrams(level.grams[:, rows], level.counts[rows], level.raw[rows], index[level.suffix[rows]])


# Plan and smoothing: small values that the driver computes from the reports of the parts and sends to all of them.


@dataclass(frozen=True)
class EstimationPlan:
    """Vocabulary, order, pruning thresholds and bounds of the parts: what a part needs to count n-grams."""

    folder: Store
    """Folder of the scratch files."""
    vocabulary: list[tuple[str, int]]
    """Files of the vocabulary, each with the id of its first word."""
    order: int
    thresholds: list[int]
    """Pruning threshold of each order."""
    num_allowed: int
    """First id of the words that `limit_vocab` removes."""
    num_ids: int
    partitions: int
    bounds: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Owner key at which each part except the first starts, in suffix order."""

    @property
    def bits(self) -> int:
        """Return the number of bits of a word id."""
        return self.num_ids.bit_length()

    def shared(self) -> list[int]:
        """Return the ids of the shared words: n-grams that end in a shared word may be in several parts."""
        return sorted({int(bound) >> 32 for bound in self.bounds})

    def kept(self, level: OrderNgrams) -> Flags:
        """Return a mask of the n-grams of one order that pruning keeps."""
        return level.kept(self.thresholds[len(level.grams) - 1], self.num_allowed)


@dataclass(frozen=True)
class Smoothing:
    """Counts of counts, discounts and unigrams over all parts: what a part needs to compute probabilities."""

    tallies: list[CountsOfCounts]
    discounts: list[Discounts]
    unigrams: Unigrams
    fallbacks: dict[int, str]
    """Orders that use `discount_fallback`, each with the reason."""

    def lines(self) -> list[int]:
        """Return the number of ARPA lines of each order. <unk> and <s> have a line although they have no count."""
        return [tally.kept + 2 * (order == 1) for order, tally in enumerate(self.tallies, 1)]


def make_plan(
    config: TrainLmConfig, folder: Store, vocabulary: Sequence[Mapping[str, Any]], partitions: int
) -> EstimationPlan:
    """Return the plan of the training, without the bounds of the parts.

    `vocabulary` has the result of `write_vocabulary` for each vocabulary file, in the order of word ids.
    """
    firsts = FIRST_WORD + np.cumsum([0, *(entry["words"] for entry in vocabulary)])
    files = [(entry["path"], int(first)) for entry, first in zip(vocabulary, firsts)]
    num_allowed = FIRST_WORD + sum(entry["allowed"] for entry in vocabulary)
    return EstimationPlan(folder, files, config.order, config.thresholds(), num_allowed, int(firsts[-1]), partitions)


def part_bounds(samples: Iterable[Sequence[int]], partitions: int) -> Keys:
    """Return the first owner key of every part except part 0, so that the parts have similar sizes.

    `samples` has owner keys of some n-grams of each chunk.
    """
    keys = np.sort(np.array([key for sample in samples for key in sample], np.uint64))
    positions = np.linspace(0, len(keys), partitions, endpoint=False)[1:].astype(np.int64)
    return np.unique(keys[positions])


def make_smoothing(config: TrainLmConfig, plan: EstimationPlan, answers: Sequence[Mapping[str, Any]]) -> Smoothing:
    """Return the counts of counts, discounts and unigrams of a model.

    `answers` has the result of `merge_counts` for each part. Raises ContractError if the counts give no valid discounts
    and `discount_fallback` is None.
    """
    shared: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    tallies = [CountsOfCounts()] * config.order
    for answer in answers:
        tallies = [tally + CountsOfCounts(**values) for tally, values in zip(tallies, answer["tallies"])]
        for word, count, raw in answer["shared"]:
            shared[word] = (shared[word][0] + count, shared[word][1] + raw)
    totals = np.array(list(shared.values()), np.int64).reshape(-1, 2)
    level = OrderNgrams(np.array([list(shared)], np.uint32), totals[:, 0], totals[:, 1], np.zeros(len(totals), np.intp))
    tallies[0] += CountsOfCounts.of(level.counts, plan.kept(level))
    estimates = [estimate_discounts(order, tally, config.discount_fallback) for order, tally in enumerate(tallies, 1)]
    discounts = [item for item, _ in estimates]
    words = max(tallies[0].kept + 1, config.vocab_pad or 0)
    unigrams = Unigrams(tallies[0], discounts[0], words, config.interpolate_unigrams, dict(shared))
    fallbacks = {order: reason for order, (_, reason) in enumerate(estimates, 1) if reason}
    return Smoothing(tallies, discounts, unigrams, fallbacks)
