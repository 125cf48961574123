"""From figures of sources to their shares: two rules, what counts as noise, and the bound that repeats set."""

import math
from collections.abc import Collection, Mapping

from train.scaling.repeats import LIFE_OF_REPEATS

SURE = 3.0
"""Standard errors by which a figure must differ from the mean: a normal error of a line through 5 points is larger in
6 of 100 cases (t with 3 degrees of freedom)."""
TINY = 1e-9
"""Differences of figures that are rounding."""
STEP_SIZE = 1.0
"""η: how far excess losses move the shares. Source: Xie et al. 2023, arXiv 2305.10429, section 3."""
SMOOTHING = 1e-3
"""c: how much of the shares is spread evenly, so that none comes to nothing. Source: the same."""
LEAST_WORTH = 0.5
"""A pass is not made where it would be worth less of a first one than this."""
UNITS = 50_000
"""Shares are whole numbers of 1/UNITS: the block of a mixture then holds them exactly, in five decimals."""

Shares = dict[str, float]


def told_apart(figures: Mapping[str, float], errors: Mapping[str, float], shares: Mapping[str, float]) -> Shares:
    """The figures that differ from their mean, weighted by the shares, beyond the noise; the others are left out.

    The noise is that of the difference: the mean has the errors of all in it, and that of the figure itself.
    """
    mean = math.fsum(shares[name] * figure for name, figure in figures.items())
    of_mean = {name: (shares[name] * error) ** 2 for name, error in errors.items()}
    found = {}
    for name, figure in figures.items():
        others = math.fsum(square for other, square in of_mean.items() if other != name)
        if abs(figure - mean) > SURE * math.sqrt(((1 - shares[name]) * errors[name]) ** 2 + others) + TINY:
            found[name] = figure
    return found


def by_excess(shares: Mapping[str, float], excess: Mapping[str, float], step_size: float = STEP_SIZE) -> Shares:
    """New shares from excess losses [nats/token]: one round of exponentiated gradient from the shares there are.

    What is no excess, below 0, counts as 0. Source: Xie et al. 2023, arXiv 2305.10429, Algorithm 1, whose rounds
    follow each other because its model trains on each one's shares; this run trained on one, so one round follows.
    """
    highest = max(excess.values())  # out of every exponent, so that none overflows
    raised = {
        name: share * math.exp(step_size * (max(excess[name], 0.0) - max(highest, 0.0)))
        for name, share in shares.items()
    }
    return _smoothed(raised)


def by_learning(shares: Mapping[str, float], speeds: Mapping[str, float]) -> Shares:
    """New shares by the learning still to be had: share · speed, where speed is -dL/d ln n at the end of the run.

    A source's tokens are a fixed share of all, so -dL/dn by a token of its own is speed / (share · n), and that of the
    whole loss, in which it has its share, speed / n: where a token tells most, more are drawn. Source: Jiang et al.
    2024, arXiv 2410.11820, section 3, without the parts that follow a mixture which changes while it trains. Where no
    source learns, the shares stay. This is a slope: it does not say how much worse a source gets that gives up much.
    """
    raised = {name: share * max(speeds[name], 0.0) for name, share in shares.items()}
    return _smoothed(raised) if any(raised.values()) else dict(shares)


def _smoothed(raised: Mapping[str, float]) -> Shares:
    total, even = math.fsum(raised.values()), 1 / len(raised)
    return {name: (1 - SMOOTHING) * value / total + SMOOTHING * even for name, value in raised.items()}


def worth_of_pass(passes: float) -> float:
    """What one more token is worth of a new one behind so many passes: the slope of the law of repeats.

    Source: Muennighoff et al. 2023, arXiv 2305.16264, section 3: D' of `worth_of_tokens`, by D.
    """
    return math.exp(-max(0.0, passes - 1) / LIFE_OF_REPEATS)


def most_passes(max_epochs: float, worth: float = LEAST_WORTH) -> float:
    """Passes over a source that are worth making: at most `max_epochs`, and none worth less than `worth` of the first.

    The inverse of `worth_of_pass`: 1 - R* · ln(worth), 11.7 for a half.
    """
    return min(max_epochs, 1 - LIFE_OF_REPEATS * math.log(worth))


def bounded(shares: Mapping[str, float], limits: Mapping[str, float]) -> Shares:
    """The shares with none above its limit; what is cut off goes to the others in proportion, until all is given.

    Where all limits together are less than 1 there is not enough data: the shares are then in proportion to them.
    """
    fixed: set[str] = set()
    found = dict(shares)
    while over := {name for name in found if name not in fixed and found[name] > limits[name]}:
        fixed |= over
        free = math.fsum(share for name, share in shares.items() if name not in fixed)
        if not free:
            total = math.fsum(limits[name] for name in fixed)
            return {name: limits[name] / total if name in fixed else 0.0 for name in shares}
        room = (1 - math.fsum(limits[name] for name in fixed)) / free
        found = {name: limits[name] if name in fixed else share * room for name, share in shares.items()}
    return found


def rounded(shares: Mapping[str, float], full: Collection[str]) -> Shares:
    """The shares as whole numbers of 1/UNITS with the sum 1, by largest remainder; a share above 0 stays above 0.

    Those of `full` sources are rounded down, unless all are full.
    """
    exact = {name: share * UNITS for name, share in shares.items()}
    counts = {name: max(int(value + TINY), 1 if value > 0 else 0) for name, value in exact.items()}
    open_ = [name for name in shares if shares[name] > 0 and name not in full] or [n for n in shares if shares[n] > 0]
    by_remainder = sorted(open_, key=lambda name: (counts[name] - exact[name], name))
    while (left := UNITS - sum(counts.values())) > 0:
        for name in by_remainder[:left]:
            counts[name] += 1
    while sum(counts.values()) > UNITS:  # what was raised to one unit is taken from the largest
        counts[max(counts, key=lambda name: (counts[name], name))] -= 1
    return {name: count / UNITS for name, count in counts.items()}
