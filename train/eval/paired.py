"""Two ways of training compared by pairs of runs: the mean difference over seeds, its interval, and what that says.

A pair shares its seed, and so the weights it starts from; the differences of the pairs are taken for a sample of a
normal distribution whose deviation nobody knows. Source: Student 1908, "The probable error of a mean", Biometrika 6.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from schemas.ablation import WITH, WITHOUT, Comparison, DifferenceInterval, Measurement, SourceLoss, sum_losses
from schemas.errors import ContractError

SHARE = 0.95
"""Of the intervals: how often such an interval holds the true mean."""
MOST_SEEDS = 1000


def interval_of(differences: Sequence[float], share: float = SHARE) -> DifferenceInterval:
    """The mean of paired differences and half the width of its Student-t interval; one pair has no interval."""
    number, mean = len(differences), fmean(differences)
    if number < 2:
        return DifferenceInterval(mean=mean, half_width=None)
    return DifferenceInterval(mean=mean, half_width=width_factor(number, share) * stdev(differences))


def width_factor(number: int, share: float = SHARE) -> float:
    """Half the width of the interval over `number` differences, by their standard deviation: t / sqrt(number)."""
    from scipy.stats import t

    return float(t.ppf((1 + share) / 2, number - 1)) / math.sqrt(number)


def seeds_for_half(number: int, share: float = SHARE) -> int | None:
    """How many seeds more would halve the width if the differences go on to scatter as they do; None = above 1000."""
    wanted = width_factor(number, share) / 2
    return next((more for more in range(1, MOST_SEEDS) if width_factor(number + more, share) <= wanted), None)


def verdict(found: DifferenceInterval, number: int, share: float = SHARE) -> str:
    """What an interval of differences (without - with, in nats/token) over `number` seeds says of the rules."""
    if found.low is None or found.high is None:
        return "cannot be told with 1 seed: one pair has no scatter; give --seeds 2 or more"
    if found.low > 0:
        return "worth it"
    if found.high < 0:
        return "not worth it"
    if found.low == found.high:
        return f"no difference: each of {number} pairs is equal"
    more = seeds_for_half(number, share)
    ends = f"interval {found.low:+.4f} to {found.high:+.4f}"
    needed = f"more than {MOST_SEEDS} seeds" if more is None else f"{more} more seed{'s' if more > 1 else ''}"
    return f"cannot be told with {number} seeds ({ends}); {needed} would be needed for half the width"


Losses = Mapping[tuple[str, int], Sequence[Measurement]]
"""What every proxy lost, by side and seed: one measurement for each held-out set."""
OWN_TEXT_NOTE = (
    "Each dataset is favoured on held-out text of its own kind, so what counts is the text that the model is for; "
    "--on RUN asks about another."
)
DECIDED = ("worth it", "not worth it")
"""Verdicts that claim a difference."""


def compare_sides(on: Sequence[str], seeds: Sequence[int], losses: Losses) -> list[Comparison]:
    """The two sides on every held-out set: over all, then by source where there are several.

    Raises ContractError if of a set nothing is left to ask about.
    """
    found = []
    for number, name in enumerate(on):
        pairs = [[losses[side, seed][number].sources for side in (WITH, WITHOUT)] for seed in seeds]
        sources = sorted(set.intersection(*(set(one) for pair in pairs for one in pair)))
        if not sources:
            raise ContractError(
                f"held-out text {name!r}: expected documents that neither side is trained on, got none. Hold out more."
            )
        found.append(_compared(name, "", [[sum_losses(one.values()) for one in pair] for pair in pairs]))
        if len(sources) > 1:
            found += [_compared(name, source, [[one[source] for one in pair] for pair in pairs]) for source in sources]
    return found


def _compared(on: str, source: str, pairs: Sequence[Sequence[SourceLoss]]) -> Comparison:
    """One row of the answer from the losses (with, without) of every seed."""
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
    """What the comparisons over all sources say, in a sentence each; then what many comparisons at once mean."""
    whole = [one for one in comparisons if not one.source]
    told = [f"{capitalize_first(describe_heldout_set(one.on))}: {one.answer}{_measured(one)}." for one in whole]
    found = {one.answer if one.answer in DECIDED else "" for one in whole}
    return " ".join([*told, *([OWN_TEXT_NOTE] if len(found) > 1 else []), *_at_once(comparisons)])


def _at_once(comparisons: Sequence[Comparison]) -> list[str]:
    """How many of the differences that are claimed would stand if all intervals were to hold at once.

    Each of n intervals is then as wide as one of a share of 1 - (1 - SHARE) / n, however they depend on each other.
    Source: Dunn 1961, "Multiple comparisons among means", Journal of the American Statistical Association 56.
    """
    number, claimed = len(comparisons), [one for one in comparisons if one.answer in DECIDED]
    if number < 2 or not claimed:
        return []
    together = 1 - (1 - SHARE) / number
    kept = [one for one in claimed if verdict(_again(one, together), len(one.losses)) in DECIDED]
    return [
        f"Each of {number} intervals holds by itself at {SHARE:.0%}, so by chance alone some may lie beyond zero: "
        f"{len(claimed)} do, and {len(kept)} would if all {number} were to hold at once ({together:.1%} each)."
    ]


def _again(one: Comparison, share: float) -> DifferenceInterval:
    return interval_of([without - ours for ours, without in one.losses], share)


def describe_heldout_set(on: str) -> str:
    """A held-out set in words."""
    named = {WITH: "held out of the dataset with the rules", WITHOUT: "held out of the dataset without them"}
    return named.get(on, f"held out of {on}")


def capitalize_first(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def _measured(one: Comparison) -> str:
    if one.nats.low is None or one.nats.high is None or "interval" in one.answer:
        return f" (mean {one.nats.mean:+.4f} nats/token)"
    return f" ({one.nats.mean:+.4f} nats/token, {one.nats.low:+.4f} to {one.nats.high:+.4f})"
