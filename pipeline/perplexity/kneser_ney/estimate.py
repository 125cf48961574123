"""N-grams as columns of a matrix of word ids, last word first, and what follows from their sorted order.

Row 0 holds the last words, row 1 the words before them, and so on; sorted columns are in suffix order. A sentence
begins with as many <s> as are asked for; of those, an n-gram keeps at most one, in front. So the sorted n-grams of
the highest order hold the shorter ones too: they are the runs of columns that agree in the first rows.
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
# Source: Chen and Goodman 1998, equation 26; when it fails and what then: Heafield et al. 2013 and lmplz.

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CountsOfCounts:
    """Sums over n-grams of one order: the only thing about them that the driver ever sees."""

    number: int = 0
    kept: int = 0
    """Those that pruning leaves."""
    ones: int = 0
    """Adjusted counts of 1, pruned or not; `twos`, `threes`, `fours` likewise."""
    twos: int = 0
    threes: int = 0
    fours: int = 0
    kept_ones: int = 0
    kept_twos: int = 0
    kept_more: int = 0
    """Kept with an adjusted count of 3 or more."""
    pruned_mass: int = 0
    """Adjusted counts of the pruned, summed."""
    mass: int = 0
    """All adjusted counts, summed."""

    @classmethod
    def of(cls, counts: Ints, kept: Flags) -> Self:
        """The tally of n-grams by their adjusted counts and whether they are kept."""
        few = np.bincount(np.minimum(counts, 5), minlength=6).tolist()
        left = np.bincount(np.minimum(counts[kept], 3), minlength=4).tolist()
        return cls(
            number=len(counts),
            kept=int(kept.sum()),
            ones=few[1],
            twos=few[2],
            threes=few[3],
            fours=few[4],
            kept_ones=left[1],
            kept_twos=left[2],
            kept_more=left[3],
            pruned_mass=int(counts[~kept].sum()),
            mass=int(counts.sum()),
        )

    def __add__(self, other: "Tally") -> "Tally":
        return CountsOfCounts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class Discounts:
    """What is taken from adjusted counts of 1, 2 and 3 or more."""

    one: float
    two: float
    more: float

    def of(self, counts: Ints) -> Floats:
        """The discount of each count."""
        table: Floats = np.array([0.0, self.one, self.two, self.more])
        return np.take(table, np.minimum(counts, 3))

    def freed(self, ones: Ints, twos: Ints, more: Ints, pruned: Ints, mass: Ints) -> Floats:
        """The share of each context's mass that its back-off gets, from integer sums over what follows the context."""
        shares: Floats = (self.one * ones + self.two * twos + self.more * more + pruned) / mass
        return shares


def estimate_discounts(
    order: int, tally: CountsOfCounts, fallback: Sequence[float] | None
) -> tuple[Discounts, str | None]:
    """The discounts of an order, and why the closed form failed if the fallback stands in for it.

    Raises ContractError if it fails and there is no fallback.
    """
    have = [tally.ones, tally.twos, tally.threes, tally.fours]
    problem = None
    values: list[float] = []
    if missing := [count for count in (1, 2, 3) if not have[count - 1]]:
        problem = f"no {order}-gram with an adjusted count of {missing[0]}"
    else:
        share = have[0] / (have[0] + 2 * have[1])
        values = [count - (count + 1) * share * have[count] / have[count - 1] for count in (1, 2, 3)]
        wrong = [(count, value) for count, value in enumerate(values, 1) if not 0 <= value <= count]
        if wrong:
            problem = f"a discount of {wrong[0][1]:.6g} for adjusted counts of {wrong[0][0]}"
    if problem is None:
        return Discounts(*values), None
    if fallback is None:
        raise ContractError(
            f"train_lm: expected {order}-grams with adjusted counts from which discounts follow, got {problem} "
            f"(counts of counts 1 to 4: {have}). Give more text or one with fewer repeated lines, or set "
            "discount_fallback, for example to [0.5, 1, 1.5]."
        )
    filled = [*fallback, *[fallback[-1]] * (3 - len(fallback))]
    return Discounts(*filled), problem


Words = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
UNK, BOS, EOS = 0, 1, 2
FIRST_WORD = 3
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
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


def new_gram_mask(grams: Words) -> Flags:
    """Where sorted columns differ from the one before them in the first 1, 2, ... rows, (rows, columns)."""
    new = np.ones(grams.shape, np.bool_)
    new[:, 1:] = grams[:, 1:] != grams[:, :-1]
    return np.logical_or.accumulate(new, axis=0)


def combine_counts(grams: Words, counts: Ints, bits: int) -> tuple[Words, Ints]:
    """The distinct n-grams in suffix order, with the sums of their counts."""
    order = suffix_order(grams, bits)
    grams = grams[:, order]
    starts = np.flatnonzero(new_gram_mask(grams)[-1])
    return np.ascontiguousarray(grams[:, starts]), np.add.reduceat(counts[order], starts) if len(starts) else counts


@dataclass(frozen=True)
class OrderNgrams:
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
        return OrderNgrams(self.grams[:, rows], self.counts[rows], self.raw[rows], self.suffix[rows])

    def kept(self, threshold: int, num_allowed: int) -> Flags:
        """Those that pruning leaves; ids from `num_allowed` on may not stay, sentence ends always do."""
        keep = (self.raw > threshold) & (self.grams < num_allowed).all(axis=0)
        return keep | (self.grams[0] == EOS) if len(self.grams) == 1 else keep


def ngrams_by_order(grams: Words, counts: Ints) -> list[OrderNgrams]:
    """The n-grams of every order, from 1 on, that the distinct sorted n-grams of the highest order contain."""
    new = new_gram_mask(grams)
    found: list[OrderNgrams] = []
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
        found.append(OrderNgrams(own, adjusted[valid], raw[valid], below[starts[valid]]))
        place = np.zeros(grams.shape[1], np.intp)
        place[starts[valid]] = 1
        below = np.cumsum(place) - 1
    return found


def owner_keys(grams: Words) -> Keys:
    """What decides which part an n-gram belongs to: its last two words, so that its suffixes lie there too."""
    before = grams[1] if len(grams) > 1 else np.zeros_like(grams[0])
    keys: Keys = (grams[0].astype(np.uint64) << HALF) | before
    return keys


def owner_parts(grams: Words, bounds: Keys) -> Ints:
    """The part of each n-gram; parts are ranges of suffix order that begin at the bounds."""
    return np.searchsorted(bounds, owner_keys(grams), side="right")


def context_buckets(grams: Words, number: int) -> npt.NDArray[np.unsignedinteger]:
    """A number in [0, number) for each column, from a hash of its ids; 16 bits if that is enough, to sort faster."""
    mixed = np.full(grams.shape[1], len(grams), np.uint64)
    for row in grams:
        mixed = (mixed ^ row) * HASH_FACTOR
        mixed ^= mixed >> HALF
    return (mixed % np.uint64(number)).astype(np.uint16 if number <= 1 << 16 else np.uint32)


# Contexts: what follows the same words, summed, and the share of its mass that goes to the back-off.
#
# N-grams that share a context end differently, so they lie in different parts; each part sends its contexts with
# their counts to the bucket of the context, and gets sums back in the order in which it sent them: no keys return.


@dataclass(frozen=True)
class ContextSums:
    """What the n-grams of one part get back, in the order in which they were sent."""

    mass: Ints
    """Adjusted counts of all n-grams with the context."""
    freed: Floats
    """The share of it that goes to the back-off."""


@dataclass(frozen=True)
class BucketSums:
    """What one bucket of contexts finds."""

    sums: list[ContextSums]
    """One for each part that sent something, in the order given."""
    owner_parts: Ints
    """The part of each distinct context, as an n-gram of its own; ascending."""
    freed: Floats
    """Of each distinct context, in suffix order."""


def contexts_by_bucket(level: OrderNgrams, kept: Flags, number: int) -> list[tuple[Words, Ints]]:
    """The contexts of n-grams with their adjusted counts, negative if pruned: one pair for each bucket."""
    contexts = level.grams[1:]
    counts = np.where(kept, level.counts, -level.counts)
    bucket = context_buckets(contexts, number)
    order = np.argsort(bucket, kind="stable")
    cuts = np.searchsorted(bucket[order], np.arange(1, number))
    return [(contexts[:, rows], counts[rows]) for rows in np.split(order, cuts)]


def sum_contexts(parts: list[tuple[Words, Ints]], discounts: Discounts, bits: int, bounds: Keys) -> BucketSums:
    """The sums of one bucket over the contexts that the parts have sent."""
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


# Probabilities and back-offs of one part, order by order, from counts and the sums of contexts.
#
# p(w | c) = (count - discount) / mass(c) + freed(c) p(w | c without its first word); the back-off weight of an n-gram
# is what it frees as a context. Every value depends on integers alone, so no partitioning can change a bit of it.


@dataclass(frozen=True)
class Unigrams:
    """What every part must know of the unigrams."""

    tally: CountsOfCounts
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

    def complete(self, level: OrderNgrams, part: int, bounds: Keys) -> tuple[OrderNgrams, Flags]:
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
        return OrderNgrams(grams, counts, raw, np.zeros(len(words), np.intp)), owner_parts(grams, bounds) == part


def interpolate_probabilities(
    level: OrderNgrams, sums: Sequence[ContextSums], discounts: Discounts, below: Floats
) -> Floats:
    """The probabilities of n-grams of order 2 or more; `below` are those of the level below."""
    mass, freed = np.zeros(len(level.counts), np.int64), np.zeros(len(level.counts))
    bucket = context_buckets(level.grams[1:], len(sums))
    order = np.argsort(bucket, kind="stable")
    check_sums(len(order), sum(len(part.mass) for part in sums), len(level.grams))
    if len(order):
        mass[order] = np.concatenate([part.mass for part in sums])
        freed[order] = np.concatenate([part.freed for part in sums])
    return (level.counts - discounts.of(level.counts)) / mass + freed * below[level.suffix]


def backoff_weights(grams: Words, freed: Sequence[Floats]) -> Floats:
    """The back-off weight of each n-gram: what it frees as a context, 1 if nothing can follow it."""
    weights = np.ones(grams.shape[1])
    follows = np.flatnonzero((grams[0] != EOS) & (grams[0] != UNK))
    bucket = context_buckets(grams[:, follows], len(freed))
    order = follows[np.argsort(bucket, kind="stable")]
    check_sums(len(order), sum(map(len, freed)), len(grams))
    if len(order):
        weights[order] = np.concatenate(freed)
    return weights


def check_sums(here: int, found: int, order: int) -> None:
    """Raise ContractError if the sums that came back are not those of the n-grams that wait for them."""
    if here != found:
        raise ContractError(
            f"train_lm: expected sums for {here} {order}-grams of a part, got {found}. Workers disagree, run it again."
        )


def kept_ngrams(level: OrderNgrams, keep: Flags, below: Flags) -> OrderNgrams:
    """The level without what pruning leaves out, above a level pruned likewise."""
    rows = np.flatnonzero(keep)
    place = np.cumsum(below) - 1
    return OrderNgrams(level.grams[:, rows], level.counts[rows], level.raw[rows], place[level.suffix[rows]])


# What the driver works out from the few numbers that parts report, and what the parts need to know of it.


@dataclass(frozen=True)
class EstimationPlan:
    """What every part knows once the words have their ids."""

    folder: Store
    """Of the scratch files."""
    vocabulary: list[tuple[str, int]]
    """Its files, each with the id of its first word."""
    order: int
    thresholds: list[int]
    num_allowed: int
    """Ids from here on are words that may not stay."""
    num_ids: int
    partitions: int
    bounds: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Where each part but the first begins in suffix order, as owner keys."""

    @property
    def bits(self) -> int:
        """Bits of an id."""
        return self.num_ids.bit_length()

    def shared(self) -> list[int]:
        """The words whose n-grams may lie in more than one part."""
        return sorted({int(bound) >> 32 for bound in self.bounds})

    def kept(self, level: OrderNgrams) -> Flags:
        """Those of a level that pruning leaves."""
        return level.kept(self.thresholds[len(level.grams) - 1], self.num_allowed)


@dataclass(frozen=True)
class Smoothing:
    """What every part knows once the counts of counts are known."""

    tallies: list[CountsOfCounts]
    discounts: list[Discounts]
    unigrams: Unigrams
    fallbacks: dict[int, str]
    """Orders whose discounts are those of the settings, with the reason."""

    def lines(self) -> list[int]:
        """Lines of the model for each order; <unk> and <s> have no count, but a line."""
        return [tally.kept + 2 * (order == 1) for order, tally in enumerate(self.tallies, 1)]


def make_plan(
    config: TrainLmConfig, folder: Store, vocabulary: Sequence[Mapping[str, Any]], partitions: int
) -> EstimationPlan:
    """The plan for a vocabulary whose files were reported in the order of ids."""
    firsts = FIRST_WORD + np.cumsum([0, *(entry["words"] for entry in vocabulary)])
    files = [(entry["path"], int(first)) for entry, first in zip(vocabulary, firsts)]
    num_allowed = FIRST_WORD + sum(entry["allowed"] for entry in vocabulary)
    return EstimationPlan(folder, files, config.order, config.thresholds(), num_allowed, int(firsts[-1]), partitions)


def part_bounds(samples: Iterable[Sequence[int]], partitions: int) -> Keys:
    """Bounds that cut sampled owner keys into parts of about one size; some may coincide and are then one."""
    keys = np.sort(np.array([key for sample in samples for key in sample], np.uint64))
    places = np.linspace(0, len(keys), partitions, endpoint=False)[1:].astype(np.int64)
    return np.unique(keys[places])


def make_smoothing(config: TrainLmConfig, plan: EstimationPlan, answers: Sequence[Mapping[str, Any]]) -> Smoothing:
    """How to smooth what the parts have counted. Raises ContractError if the counts of counts allow no discounts."""
    shared: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    tallies = [CountsOfCounts()] * config.order
    for answer in answers:
        tallies = [tally + CountsOfCounts(**found) for tally, found in zip(tallies, answer["tallies"])]
        for word, count, raw in answer["shared"]:
            shared[word] = (shared[word][0] + count, shared[word][1] + raw)
    both = np.array(list(shared.values()), np.int64).reshape(-1, 2)
    level = OrderNgrams(np.array([list(shared)], np.uint32), both[:, 0], both[:, 1], np.zeros(len(both), np.intp))
    tallies[0] += CountsOfCounts.of(level.counts, plan.kept(level))
    found = [estimate_discounts(order, tally, config.discount_fallback) for order, tally in enumerate(tallies, 1)]
    discounts = [item for item, _ in found]
    words = max(tallies[0].kept + 1, config.vocab_pad or 0)
    unigrams = Unigrams(tallies[0], discounts[0], words, config.interpolate_unigrams, dict(shared))
    return Smoothing(tallies, discounts, unigrams, {order: why for order, (_, why) in enumerate(found, 1) if why})
