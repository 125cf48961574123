"""A mix from the losses of a run: against a reference run, or by how fast each source is still learnt.

Each source carries its evidence: the numbers, and a sentence. A figure within the noise of the mean counts as the mean,
so where nothing is beyond the noise the shares stay. What would be repeated too often is cut and asked for as tokens.
The errors are those within a run: over four seeds of a run of 200 steps a loss spread by three times as much (0.026 for
0.008), which `SURE` leaves room for.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from schemas.errors import ConfigError
from schemas.mix import Mix, SourceMix
from train.mix.measured import (
    FEWEST_OF_LAW,
    FEWEST_OF_LINE,
    Learning,
    MeasuredRun,
    check_comparable,
    has_heldout,
    learning_of,
)
from train.scaling.repeats import LIFE_OF_REPEATS

# From figures of sources to their shares: two rules, what counts as noise, and the bound that repeats set.

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


FEW_PASSES = 0.5
"""A source of which less is read in a pass may be written smaller, if its share fell by the evidence."""
KEPT_UNITS = 10_000
"""The part that is kept is a whole number of 1/KEPT_UNITS."""


@dataclass(frozen=True)
class Finding:
    """What is known of a source before repeats are looked at."""

    figure: float
    """What moves its share: excess loss, or speed of learning [nats/token]."""
    error: float
    """Its standard error."""
    words: str
    """The same as a sentence's beginning."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What it was made from."""


def suggest_by_reference(
    run: MeasuredRun, reference: MeasuredRun, tokens: float | None = None, step_size: float = STEP_SIZE
) -> Mix:
    """The mix by excess losses at the end of both runs, for a run of `tokens` (None = as long as this one).

    Raises ConfigError if the runs did not measure the same, or too seldom.
    """
    check_comparable(run, reference)
    found = {name: _against(run, reference, name) for name, share in run.shares.items() if share}
    figures, moved = _figures(found, run.shares)
    wanted = by_excess(_used(run), figures, step_size) if moved else _used(run)
    return _mix(
        run, found, (wanted, moved), tokens, f"{reference.told}, excess loss (Xie et al. 2023, arXiv 2305.10429)"
    )


def suggest_by_law(
    run: MeasuredRun, exponent: float | None = None, source: str = "", tokens: float | None = None, from_step: int = 1
) -> Mix:
    """The mix by the learning still to be had, from a power law through each source's held-out losses.

    `exponent` of the tokens: that of a law fitted elsewhere, which `source` names; None = fitted to each source.
    Measurements before `from_step` are left out. Raises ConfigError if there are too few.
    """
    learnt = _learnt(run, exponent, from_step)
    found = {name: _of_law(run, name, one, exponent is not None) for name, one in learnt.items()}
    figures, moved = _figures(found, run.shares)
    wanted = by_learning(_used(run), figures) if moved else _used(run)
    laws = (
        "the run's own held-out losses from step {}, L(n) = E + B/n^a by source (Jiang et al. 2024, arXiv 2410.11820)"
    )
    fixed = f", a = {exponent:.4g} of the law {source}" if exponent is not None else ""
    return _mix(run, found, (wanted, moved), tokens, laws.format(from_step) + fixed)


def _used(run: MeasuredRun) -> Shares:
    return {name: share for name, share in run.shares.items() if share}


def _figures(found: Mapping[str, Finding], shares: Mapping[str, float]) -> tuple[Shares, set[str]]:
    """The figures, those within the noise replaced by the mean; and the sources beyond it."""
    figures = {name: one.figure for name, one in found.items()}
    apart = told_apart(figures, {name: one.error for name, one in found.items()}, shares)
    mean = math.fsum(shares[name] * figure for name, figure in figures.items())
    return {name: apart.get(name, mean) for name in figures}, set(apart)


def _against(run: MeasuredRun, reference: MeasuredRun, name: str) -> Finding:
    """A source of both runs. Held-out losses where there are any, else those of the last steps."""
    held = has_heldout(run, name)
    own, other = run.level(name, held), reference.level(name, held)
    error = math.hypot(own.error, other.error)
    difference = own.value - other.value
    words = (
        f"{'held-out' if held else 'training'} loss {own.value:.4f}, in the reference {other.value:.4f}: "
        f"{difference:.4f} ± {error:.4f} nats/token"
    )
    if not held:
        words += " (nothing of it is held out)"
    numbers = {"loss": own.value, "loss_error": own.error, "reference": other.value, "reference_error": other.error}
    numbers |= {"excess": difference, "excess_error": error, "measurements": own.points, "is_heldout": float(held)}
    return Finding(max(0.0, difference), error, words, numbers)


def _learnt(run: MeasuredRun, exponent: float | None, from_step: int) -> dict[str, Learning]:
    fewest = FEWEST_OF_LAW if exponent is None else FEWEST_OF_LINE
    points = {name: run.heldout(name, from_step) for name in _used(run)}
    if few := [f"{len(one.losses)} of {name}" for name, one in points.items() if len(one.losses) < fewest]:
        raise ConfigError(
            f"{run.told}: expected at least {fewest} held-out losses of every source from step {from_step} on, got "
            f"{', '.join(few)}. {run.advice()}, hold documents of every source out, or compare with --reference."
        )
    return {name: learning_of(one.tokens, one.losses, exponent) for name, one in points.items()}


def _of_law(run: MeasuredRun, name: str, learning: Learning, given: bool) -> Finding:
    law, level = learning.law, run.level(name, True)
    words = (
        f"held-out loss {level.value:.4f}, falling by {law.speed:.4f} ± {learning.error:.4f} nats/token for each "
        f"e-fold of tokens: doubling them would take off {law.rest * (1 - 2**-law.exponent):.4f}"
    )
    numbers = {"loss": level.value, "loss_error": level.error, "floor": law.floor, "excess": law.rest}
    numbers |= {"exponent": law.exponent, "speed": law.speed, "speed_error": learning.error}
    numbers |= {"measurements": learning.points, "is_heldout": 1.0, "is_exponent_given": float(given)}
    return Finding(law.speed, learning.error, words, numbers)


# ------------------------------------------------------------------------------------------------- repeats and words


@dataclass(frozen=True)
class _Wish:
    """The shares that the figures ask for, and what a run of a length can follow of them."""

    run: MeasuredRun
    length: float
    """Tokens of the run that the mix is for."""
    most: float
    """Passes over a source that are worth making."""
    wanted: Shares
    """What the figures ask for."""
    moved: set[str]
    """Sources whose figure is beyond the noise."""
    shares: Shares
    """What is left of it within the bound of repeats."""
    cut: set[str]
    """Sources that it has cut."""


def _mix(
    run: MeasuredRun, found: Mapping[str, Finding], asked: tuple[Shares, set[str]], tokens: float | None, against: str
) -> Mix:
    """The mix that wanted shares become within the bound of repeats; `asked`: they, and the sources that moved them."""
    wanted, moved = asked
    length = float(run.plan.num_tokens if tokens is None else tokens)
    most = most_passes(run.plan.settings.plan.max_epochs)
    limits = {name: _limit(run, name, length, most) for name in wanted}
    shares = bounded(wanted, limits)
    shares = rounded(shares, {name for name in wanted if shares[name] >= limits[name]})
    cut = {name for name in wanted if wanted[name] > limits[name]}
    wish = _Wish(run, length, most, wanted, moved, shares, cut)
    parts = {name: _part(wish, name, found[name]) if name in found else _left_out(run, name) for name in run.shares}
    return Mix(dataset=run.dataset.digest, plan=run.digest, reference=against, sources=parts)


def _part(wish: _Wish, name: str, found: Finding) -> SourceMix:
    """What is to be done about a source of the run."""
    run, wanted = wish.run, wish.wanted[name]
    before, after, unique = run.shares[name], wish.shares[name], run.unique[name]
    passes, lack, keep = after * wish.length / unique, None, 1.0
    words = [found.words, _moved(before, after, name in wish.moved)]
    if name in wish.cut:
        lack = math.ceil(wanted * wish.length / wish.most)
        words.append(
            f"a share of {wanted:.4f} would read its {unique:,} tokens {wanted * wish.length / unique:.3g} times, and "
            f"{wish.most:.3g} are worth it: it is cut off there, and {lack:,} unique tokens are wanted"
        )
    if name in wish.moved - wish.cut and after < before and passes < FEW_PASSES:
        keep = math.ceil(passes * KEPT_UNITS) / KEPT_UNITS
        words.append(f"{100 * passes:.3g} % of it is all that is read: no more need be kept")
    numbers = found.numbers | {"tokens_seen": run.seen[name], "unique_tokens": unique, "run_tokens": wish.length}
    numbers |= {"share_before": before, "share_unbounded": wanted, "passes_most": wish.most}
    numbers |= {"passes_before": before * run.plan.num_tokens / unique, "worth_of_last_pass": worth_of_pass(passes)}
    return SourceMix(share=after, repeat=passes, keep=keep, wanted_tokens=lack, why="; ".join(words), evidence=numbers)


def _left_out(run: MeasuredRun, name: str) -> SourceMix:
    why = "left out of the run, so nothing is known of it: it stays out"
    evidence = {"unique_tokens": float(run.unique[name])}
    return SourceMix(share=0.0, repeat=0.0, keep=1.0, wanted_tokens=None, why=why, evidence=evidence)


def _limit(run: MeasuredRun, name: str, length: float, most: float) -> float:
    """The largest share that a source may have: a row less than `most` passes, for the last block of a mixture.

    What a plan of this length could do already is never cut, and a source of a row or two is not left out altogether.
    """
    limit = max((most * run.unique[name] - run.plan.seq_len) / length, 1 / UNITS)
    before = run.shares[name]
    was_well = length <= run.plan.num_tokens and before * length <= most * run.unique[name]
    return max(limit, before) if was_well else limit


def _moved(before: float, after: float, apart: bool) -> str:
    """What becomes of a share, and why."""
    if not apart:
        noise = f"within {SURE:g} standard errors of the mean of all sources, so it counts as the mean"
        return noise + ("" if abs(after - before) < 1e-4 else f": the share goes from {before:.4f} to {after:.4f}")
    way = "rises" if after > before else "falls"
    return f"the share {way} from {before:.4f} to {after:.4f}"
