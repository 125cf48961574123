"""What the driver works out from the few numbers that parts report, and what the parts need to know of it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.perplexity.kneser_ney.discounts import Discounts, Flags, Tally, estimated
from pipeline.perplexity.kneser_ney.estimate import FIRST_WORD, Keys, Level
from pipeline.perplexity.kneser_ney.probabilities import Unigrams
from schemas.storage import Store


@dataclass(frozen=True)
class Plan:
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

    def kept(self, level: Level) -> Flags:
        """Those of a level that pruning leaves."""
        return level.kept(self.thresholds[len(level.grams) - 1], self.num_allowed)


@dataclass(frozen=True)
class Smoothing:
    """What every part knows once the counts of counts are known."""

    tallies: list[Tally]
    discounts: list[Discounts]
    unigrams: Unigrams
    fallbacks: dict[int, str]
    """Orders whose discounts are those of the settings, with the reason."""

    def lines(self) -> list[int]:
        """Lines of the model for each order; <unk> and <s> have no count, but a line."""
        return [tally.kept + 2 * (order == 1) for order, tally in enumerate(self.tallies, 1)]


def plan_of(config: TrainLmConfig, folder: Store, vocabulary: Sequence[Mapping[str, Any]], partitions: int) -> Plan:
    """The plan for a vocabulary whose files were reported in the order of ids."""
    firsts = FIRST_WORD + np.cumsum([0, *(entry["words"] for entry in vocabulary)])
    files = [(entry["path"], int(first)) for entry, first in zip(vocabulary, firsts)]
    num_allowed = FIRST_WORD + sum(entry["allowed"] for entry in vocabulary)
    return Plan(folder, files, config.order, config.thresholds(), num_allowed, int(firsts[-1]), partitions)


def bounds_of(samples: Iterable[Sequence[int]], partitions: int) -> Keys:
    """Bounds that cut sampled owner keys into parts of about one size; some may coincide and are then one."""
    keys = np.sort(np.array([key for sample in samples for key in sample], np.uint64))
    places = np.linspace(0, len(keys), partitions, endpoint=False)[1:].astype(np.int64)
    return np.unique(keys[places])


def smoothing_of(config: TrainLmConfig, plan: Plan, answers: Sequence[Mapping[str, Any]]) -> Smoothing:
    """How to smooth what the parts have counted. Raises ContractError if the counts of counts allow no discounts."""
    shared: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    tallies = [Tally()] * config.order
    for answer in answers:
        tallies = [tally + Tally(**found) for tally, found in zip(tallies, answer["tallies"])]
        for word, count, raw in answer["shared"]:
            shared[word] = (shared[word][0] + count, shared[word][1] + raw)
    both = np.array(list(shared.values()), np.int64).reshape(-1, 2)
    level = Level(np.array([list(shared)], np.uint32), both[:, 0], both[:, 1], np.zeros(len(both), np.intp))
    tallies[0] += Tally.of(level.counts, plan.kept(level))
    found = [estimated(order, tally, config.discount_fallback) for order, tally in enumerate(tallies, 1)]
    discounts = [item for item, _ in found]
    words = max(tallies[0].kept + 1, config.vocab_pad or 0)
    unigrams = Unigrams(tallies[0], discounts[0], words, config.interpolate_unigrams, dict(shared))
    return Smoothing(tallies, discounts, unigrams, {order: why for order, (_, why) in enumerate(found, 1) if why})
