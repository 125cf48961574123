"""The comparison of two datasets by pairs of runs: the mean difference over seeds, its interval, and a verdict.

The runs of a pair share their seed and therefore their initial weights. The differences of the pairs are treated as a
sample of a normal distribution of unknown deviation.
Source: Student 1908, "The probable error of a mean", Biometrika 6.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from schemas.ablation import WITH, WITHOUT, Comparison, DifferenceInterval, Measurement, SourceLoss, sum_losses
from schemas.errors import ContractError

SHARE = 0.95
"""Coverage of the intervals: the probability that an interval contains the true mean."""
MOST_SEEDS = 1000


def interval_of(differences: Sequence[float], share: float = SHARE) -> DifferenceInterval:
    """Return the Student-t interval of the mean of paired differences. One pair has only a mean."""
    number, mean = len(differences), fmean(differences)
    if number < 2:
        return DifferenceInterval(mean=mean, half_width=None)
    return DifferenceInterval(mean=mean, half_width=width_factor(number, share) * stdev(differences))


def width_factor(number: int, share: float = SHARE) -> float:
    """Return half the width of the Student-t interval of the mean of `number` differences [standard deviations]."""
    from scipy.stats import t

    return float(t.ppf((1 + share) / 2, number - 1)) / math.sqrt(number)


def seeds_for_half(number: int, share: float = SHARE) -> int | None:
    """Return how many more seeds would halve the interval at the same standard deviation; None = more than 1000."""
    target = width_factor(number, share) / 2
    return next((more for more in range(1, MOST_SEEDS) if width_factor(number + more, share) <= target), None)


def verdict(interval: DifferenceInterval, number: int, share: float = SHARE) -> str:
    """Return, as text, whether the rules lower the loss.

    `interval`: of the mean, over `number` pairs, of the loss without the rules minus the loss with them [nats/token].
    """
    if interval.low is None or interval.high is None:
        return "cannot be decided with 1 seed: one pair has no scatter; give --seeds 2 or more"
    if interval.low > 0:
        return "worth it"
    if interval.high < 0:
        return "not worth it"
    if interval.low == interval.high:
        return f"no difference: each of {number} pairs is equal"
    more = seeds_for_half(number, share)
    ends = f"interval {interval.low:+.4f} to {interval.high:+.4f}"
    needed = f"more than {MOST_SEEDS} seeds" if more is None else f"{more} more seed{'s' if more > 1 else ''}"
    return f"cannot be decided with {number} seeds ({ends}); {needed} would be needed for half the width"


Losses = Mapping[tuple[str, int], Sequence[Measurement]]
"""The losses of every proxy run by (side, seed), where side is with or without the rules: one for each held-out set."""
OWN_TEXT_NOTE = (
    "Each dataset is favoured on held-out text of its own kind, so what counts is the text that the model is for; "
    "--on RUN asks about another."
)
DECIDED = ("worth it", "not worth it")
"""Verdicts that state a difference."""


def compare_sides(on: Sequence[str], seeds: Sequence[int], losses: Losses) -> list[Comparison]:
    """Return the comparison of the runs with and without the rules on every held-out set.

    For each held-out set, the comparison over all sources comes first, then one for each source if there are several.
    Raises ContractError if no source of a held-out set has targets for all runs.
    """
    comparisons = []
    for number, name in enumerate(on):
        pairs = [[losses[side, seed][number].sources for side in (WITH, WITHOUT)] for seed in seeds]
        sources = sorted(set.intersection(*(set(losses_by_source) for pair in pairs for losses_by_source in pair)))
        if not sources:
            raise ContractError(
                f"held-out text of {name!r}: expected documents that no proxy run is trained on, got none. Raise "
                "tokens.heldout_share in the recipe that made this text, then run the recipe again."
            )
        comparisons.append(_compared(name, "", [[sum_losses(side.values()) for side in pair] for pair in pairs]))
        if len(sources) > 1:
            comparisons += [
                _compared(name, source, [[side[source] for side in pair] for pair in pairs]) for source in sources
            ]
    return comparisons


def _compared(on: str, source: str, pairs: Sequence[Sequence[SourceLoss]]) -> Comparison:
    """Return the comparison on a source; `pairs`: for each seed, the loss with the rules and the loss without."""
    bits = [
        without.bits_per_byte - ours.bits_per_byte
        for ours, without in pairs
        if ours.bits_per_byte is not None and without.bits_per_byte is not None
    ]
    nats = interval_of([without.loss - ours.loss for ours, without in pairs])
    return Comparison(
        on=on,
        source=source,
        losses=tuple((ours.loss, without.loss) for ours, without in pairs),
        nats=nats,
        bits=interval_of(bits) if len(bits) == len(pairs) else None,
        answer=verdict(nats, len(pairs)),
    )


def summarize_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Return a sentence for each comparison over all sources, then a note on multiple comparisons."""
    totals = [row for row in comparisons if not row.source]
    sentences = [f"{capitalize_first(describe_heldout_set(row.on))}: {row.answer}{_measured(row)}." for row in totals]
    verdicts = {row.answer if row.answer in DECIDED else "" for row in totals}
    return " ".join([*sentences, *([OWN_TEXT_NOTE] if len(verdicts) > 1 else []), *_at_once(comparisons)])


def _at_once(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a note on how many verdicts remain after Bonferroni's correction for multiple comparisons.

    Each of n intervals then has a coverage of 1 - (1 - SHARE) / n. [] if there is nothing to correct.
    Source: Dunn 1961, "Multiple comparisons among means", Journal of the American Statistical Association 56.
    """
    number, claimed = len(comparisons), [row for row in comparisons if row.answer in DECIDED]
    if number < 2 or not claimed:
        return []
    together = 1 - (1 - SHARE) / number
    kept = [row for row in claimed if verdict(_interval_at(row, together), len(row.losses)) in DECIDED]
    return [
        f"Each of {number} intervals holds by itself at {SHARE:.0%}, so by chance alone some may lie beyond zero: "
        f"{len(claimed)} do, and {len(kept)} would if all {number} were to hold at once ({together:.1%} each)."
    ]


def _interval_at(comparison: Comparison, share: float) -> DifferenceInterval:
    return interval_of([without - ours for ours, without in comparison.losses], share)


def describe_heldout_set(on: str) -> str:
    """Return a description of a held-out set."""
    named = {WITH: "held out of the dataset with the rules", WITHOUT: "held out of the dataset without them"}
    return named.get(on, f"held out of {on}")


def capitalize_first(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def _measured(comparison: Comparison) -> str:
    if comparison.nats.low is None or comparison.nats.high is None or "interval" in comparison.answer:
        return f" (mean {comparison.nats.mean:+.4f} nats/token)"
    return f" ({comparison.nats.mean:+.4f} nats/token, {comparison.nats.low:+.4f} to {comparison.nats.high:+.4f})"
