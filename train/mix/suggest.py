"""Suggest a mix from the losses of a run, by excess loss over a reference run or by the speed of learning.

The mix holds the evidence for each source as numbers and a sentence. An excess loss or a learning speed that does not
differ significantly from the mean of all sources counts as the mean. Without significant differences, the shares stay
as they are. Shares that repeat a source too often are cut, and the number of missing tokens is reported. Standard
errors are estimated within a run. Over four seeds of a run of 200 steps, losses varied three times as much (0.026
instead of 0.008), which `MIN_STANDARD_ERRORS` allows for.
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

# Shares from the figures of sources: two rules, the test for significance, and the limit on repeats.

MIN_STANDARD_ERRORS = 3.0
"""Number of standard errors by which an excess loss or learning speed must differ from the mean: a normal error of a
line through 5 points is larger in 6 of 100 cases (t with 3 degrees of freedom)."""
TINY = 1e-9
"""Largest difference that counts as rounding."""
STEP_SIZE = 1.0
"""η, the step size of the exponentiated gradient. Source: Xie et al. 2023, arXiv 2305.10429, section 3."""
SMOOTHING = 1e-3
"""c, the weight of the uniform mixture in the new shares, so that no share becomes 0. Source: as for STEP_SIZE."""
LEAST_WORTH = 0.5
"""Least worth of the tokens of a further pass over a source, relative to new tokens."""
UNITS = 50_000
"""Shares are multiples of 1/UNITS: the block of a mixture then represents them exactly, in five decimals."""

Shares = dict[str, float]


def significant_figures(
    figures: Mapping[str, float], errors: Mapping[str, float], shares: Mapping[str, float]
) -> Shares:
    """Return the `figures` that differ significantly from the mean of all sources, weighted by `shares`.

    `figures`: excess loss or learning speed of each source; `errors`: standard error of each figure.
    """
    mean = math.fsum(shares[name] * figure for name, figure in figures.items())
    of_mean = {name: (shares[name] * error) ** 2 for name, error in errors.items()}
    significant = {}
    for name, figure in figures.items():
        # The error of a difference includes the error of the mean, to which all sources contribute.
        others = math.fsum(square for other, square in of_mean.items() if other != name)
        if (
            abs(figure - mean)
            > MIN_STANDARD_ERRORS * math.sqrt(((1 - shares[name]) * errors[name]) ** 2 + others) + TINY
        ):
            significant[name] = figure
    return significant


def by_excess(shares: Mapping[str, float], excess: Mapping[str, float], step_size: float = STEP_SIZE) -> Shares:
    """Return new shares from excess losses [nats/token], by one round of exponentiated gradient.

    A negative excess counts as 0. Source: Xie et al. 2023, arXiv 2305.10429, Algorithm 1.
    """
    # The algorithm trains on the new shares after each round. The measured run had fixed shares, so one round is
    # possible.
    highest = max(excess.values())  # subtracted from every exponent to avoid overflow
    raised = {
        name: share * math.exp(step_size * (max(excess[name], 0.0) - max(highest, 0.0)))
        for name, share in shares.items()
    }
    return _smoothed(raised)


def by_learning(shares: Mapping[str, float], speeds: Mapping[str, float]) -> Shares:
    """Return new shares in proportion to share · speed; if no source learns, return the same shares.

    `speeds`: -dL/d ln n of each source at the end of the run, with n tokens of all sources.
    Source: Jiang et al. 2024, arXiv 2410.11820, section 3, without the terms for a changing mixture.
    """
    # A source has share · n of all n tokens, so one more token lowers its own loss by speed / (share · n). The mean
    # loss, in which the source has weight `share`, falls by speed / n. The rule is first-order: it does not limit how
    # far the loss of a source rises when its share falls.
    raised = {name: share * max(speeds[name], 0.0) for name, share in shares.items()}
    return _smoothed(raised) if any(raised.values()) else dict(shares)


def _smoothed(raised: Mapping[str, float]) -> Shares:
    total, even = math.fsum(raised.values()), 1 / len(raised)
    return {name: (1 - SMOOTHING) * value / total + SMOOTHING * even for name, value in raised.items()}


def worth_of_pass(passes: float) -> float:
    """Return the worth of one more token of a source, relative to a new token, after `passes` passes over the source.

    Source: Muennighoff et al. 2023, arXiv 2305.16264, section 3: dD'/dD of `worth_of_tokens`.
    """
    return math.exp(-max(0.0, passes - 1) / LIFE_OF_REPEATS)


def most_passes(max_epochs: float, worth: float = LEAST_WORTH) -> float:
    """Return the maximum number of passes over a source, at most `max_epochs`.

    A token of the last pass must be worth at least `worth` new tokens.
    """
    # The inverse of `worth_of_pass`: 11.7 passes for worth = 0.5.
    return min(max_epochs, 1 - LIFE_OF_REPEATS * math.log(worth))


def clip_shares(shares: Mapping[str, float], limits: Mapping[str, float]) -> Shares:
    """Return the shares clipped to their limits; the excess goes to the other sources in proportion to their shares.

    If the limits add up to less than 1, the data is too small, and the shares are in proportion to the limits.
    """
    fixed: set[str] = set()
    clipped = dict(shares)
    while over := {name for name in clipped if name not in fixed and clipped[name] > limits[name]}:
        fixed |= over
        free = math.fsum(share for name, share in shares.items() if name not in fixed)
        if not free:
            total = math.fsum(limits[name] for name in fixed)
            return {name: limits[name] / total if name in fixed else 0.0 for name in shares}
        room = (1 - math.fsum(limits[name] for name in fixed)) / free
        clipped = {name: limits[name] if name in fixed else share * room for name, share in shares.items()}
    return clipped


def round_shares(shares: Mapping[str, float], full: Collection[str]) -> Shares:
    """Return the shares as multiples of 1/UNITS with sum 1, by largest remainder; a positive share stays positive.

    `full`: sources at their limit. Their shares are rounded down, unless all sources are full.
    """
    exact = {name: share * UNITS for name, share in shares.items()}
    counts = {name: max(int(value + TINY), 1 if value > 0 else 0) for name, value in exact.items()}
    open_ = [name for name in shares if shares[name] > 0 and name not in full] or [n for n in shares if shares[n] > 0]
    by_remainder = sorted(open_, key=lambda name: (counts[name] - exact[name], name))
    while (left := UNITS - sum(counts.values())) > 0:
        for name in by_remainder[:left]:
            counts[name] += 1
    while sum(counts.values()) > UNITS:  # units given to tiny shares are taken from the largest
        counts[max(counts, key=lambda name: (counts[name], name))] -= 1
    return {name: count / UNITS for name, count in counts.items()}


FEW_PASSES = 0.5
"""Number of passes below which only a part of a source has to be kept, if the evidence lowered its share."""
KEPT_UNITS = 10_000
"""The kept part of a source is a multiple of 1/KEPT_UNITS."""


@dataclass(frozen=True)
class Finding:
    """Excess loss or learning speed of a source, and the measurements that it was computed from."""

    figure: float
    """Excess loss or learning speed [nats/token], which decides how the share of the source changes."""
    error: float
    """Standard error of `figure`."""
    words: str
    """The start of a sentence that states `figure` and the losses that it was computed from."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The measurements that `figure` was computed from, by name."""


def suggest_by_reference(
    run: MeasuredRun, reference: MeasuredRun, tokens: float | None = None, step_size: float = STEP_SIZE
) -> Mix:
    """Return a mix with larger shares for sources with a higher excess loss.

    The excess loss of a source is its final loss in `run` minus its final loss in `reference`. `tokens`: length of the
    run that the mix is for; None = as long as `run`. Raises ConfigError if the runs are not comparable, or have too few
    measurements.
    """
    check_comparable(run, reference)
    findings = {name: _against(run, reference, name) for name, share in run.shares.items() if share}
    figures, moved = _figures(findings, run.shares)
    shares = by_excess(_used(run), figures, step_size) if moved else _used(run)
    return _mix(
        run,
        findings,
        (shares, moved),
        tokens,
        f"{reference.description}, excess loss (Xie et al. 2023, arXiv 2305.10429)",
    )


def suggest_by_law(
    run: MeasuredRun, exponent: float | None = None, source: str = "", tokens: float | None = None, from_step: int = 1
) -> Mix:
    """Return a mix with larger shares for sources whose held-out loss falls faster, by a power law of each source.

    `exponent`: exponent of the number of tokens in these laws; None = fitted to each source. `source`: the citation for
    `exponent`. `tokens`: length of the run that the mix is for; None = as long as `run`. `from_step`: first step whose
    losses are used. Raises ConfigError if a source has too few losses.
    """
    fitted = _fitted(run, exponent, from_step)
    findings = {name: _of_law(run, name, learning, exponent is not None) for name, learning in fitted.items()}
    figures, moved = _figures(findings, run.shares)
    shares = by_learning(_used(run), figures) if moved else _used(run)
    laws = (
        "the run's own held-out losses from step {}, L(n) = E + B/n^a by source (Jiang et al. 2024, arXiv 2410.11820)"
    )
    fixed = f", a = {exponent:.4g} of the law {source}" if exponent is not None else ""
    return _mix(run, findings, (shares, moved), tokens, laws.format(from_step) + fixed)


def _used(run: MeasuredRun) -> Shares:
    return {name: share for name, share in run.shares.items() if share}


def _figures(findings: Mapping[str, Finding], shares: Mapping[str, float]) -> tuple[Shares, set[str]]:
    """Return the excess loss or learning speed of each source, and the sources that differ significantly from the mean.

    A source that does not differ significantly gets the mean of all sources, weighted by `shares`.
    """
    figures = {name: finding.figure for name, finding in findings.items()}
    apart = significant_figures(figures, {name: finding.error for name, finding in findings.items()}, shares)
    mean = math.fsum(shares[name] * figure for name, figure in figures.items())
    return {name: apart.get(name, mean) for name in figures}, set(apart)


def _against(run: MeasuredRun, reference: MeasuredRun, name: str) -> Finding:
    """Return the excess loss of a source over the reference run, by held-out losses if any, else by training losses."""
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


def _fitted(run: MeasuredRun, exponent: float | None, from_step: int) -> dict[str, Learning]:
    fewest = FEWEST_OF_LAW if exponent is None else FEWEST_OF_LINE
    points = {name: run.heldout(name, from_step) for name in _used(run)}
    if few := [f"{len(curve.losses)} of {name}" for name, curve in points.items() if len(curve.losses) < fewest]:
        raise ConfigError(
            f"{run.description}: expected at least {fewest} held-out losses of every source from step {from_step} on, "
            f"got {', '.join(few)}. {run.advice()}, set a larger tokens.heldout_share, or use --reference."
        )
    return {name: learning_of(curve.tokens, curve.losses, exponent) for name, curve in points.items()}


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


# The limit on repeats, and the sentences of evidence.


@dataclass(frozen=True)
class _Shares:
    """The shares of all sources, before and after the limit on the number of passes over a source."""

    run: MeasuredRun
    length: float
    """Tokens of the run that the mix is for."""
    most: float
    """Maximum number of passes over a source."""
    unbounded: Shares
    """Shares before the limit on repeats."""
    moved: set[str]
    """Sources whose excess loss or learning speed differs significantly from the mean."""
    shares: Shares
    """Shares within the limit on repeats."""
    cut: set[str]
    """Sources whose share the limit has cut."""


def _mix(
    run: MeasuredRun,
    findings: Mapping[str, Finding],
    asked: tuple[Shares, set[str]],
    tokens: float | None,
    against: str,
) -> Mix:
    """Return the mix within the limit on repeats.

    `asked`: the shares before the limit, and the sources whose excess loss or learning speed differs significantly
    from the mean. `against`: a description of what the run was compared with.
    """
    unbounded, moved = asked
    length = float(run.plan.num_tokens if tokens is None else tokens)
    most = most_passes(run.plan.settings.plan.max_epochs)
    limits = {name: _limit(run, name, length, most) for name in unbounded}
    shares = clip_shares(unbounded, limits)
    shares = round_shares(shares, {name for name in unbounded if shares[name] >= limits[name]})
    cut = {name for name in unbounded if unbounded[name] > limits[name]}
    result = _Shares(run, length, most, unbounded, moved, shares, cut)
    sources = {
        name: _source(result, name, findings[name]) if name in findings else _left_out(run, name) for name in run.shares
    }
    return Mix(dataset=run.dataset.digest, plan=run.digest, reference=against, sources=sources)


def _source(result: _Shares, name: str, finding: Finding) -> SourceMix:
    """Return a source's new share, the part of its data to keep and the unique tokens it needs, with the evidence."""
    run, unbounded = result.run, result.unbounded[name]
    before, after, unique = run.shares[name], result.shares[name], run.unique[name]
    passes, lack, keep = after * result.length / unique, None, 1.0
    words = [finding.words, _moved(before, after, name in result.moved)]
    if name in result.cut:
        times = unbounded * result.length / unique
        lack = math.ceil(unbounded * result.length / result.most)
        words.append(
            f"a share of {unbounded:.4f} would read its {unique:,} tokens {times:.3g} times, and "
            f"{result.most:.3g} are worth it: it is cut off there, and {lack:,} unique tokens are wanted"
        )
    if name in result.moved - result.cut and after < before and passes < FEW_PASSES:
        keep = math.ceil(passes * KEPT_UNITS) / KEPT_UNITS
        words.append(f"{100 * passes:.3g} % of it is all that is read: no more need be kept")
    numbers = finding.numbers | {"tokens_seen": run.seen[name], "unique_tokens": unique, "run_tokens": result.length}
    numbers |= {"share_before": before, "share_unbounded": unbounded, "passes_most": result.most}
    numbers |= {"passes_before": before * run.plan.num_tokens / unique, "worth_of_last_pass": worth_of_pass(passes)}
    return SourceMix(share=after, repeat=passes, keep=keep, wanted_tokens=lack, why="; ".join(words), evidence=numbers)


def _left_out(run: MeasuredRun, name: str) -> SourceMix:
    why = "left out of the run, so nothing is known of it: it stays out"
    evidence = {"unique_tokens": float(run.unique[name])}
    return SourceMix(share=0.0, repeat=0.0, keep=1.0, wanted_tokens=None, why=why, evidence=evidence)


def _limit(run: MeasuredRun, name: str, length: float, most: float) -> float:
    """Return the largest permitted share of a source in a run of `length` tokens.

    `most`: maximum number of passes over the source.
    """
    # Less one row, by which a source may be ahead of its share within a block. A source of a row or two keeps 1/UNITS.
    limit = max((most * run.unique[name] - run.plan.seq_len) / length, 1 / UNITS)
    before = run.shares[name]
    # The measured run's share is permitted too, if the new run is not longer.
    was_well = length <= run.plan.num_tokens and before * length <= most * run.unique[name]
    return max(limit, before) if was_well else limit


def _moved(before: float, after: float, apart: bool) -> str:
    """Return the sentence that states how a source's share changes and why."""
    if not apart:
        noise = f"within {MIN_STANDARD_ERRORS:g} standard errors of the mean of all sources, so it counts as the mean"
        return noise + ("" if abs(after - before) < 1e-4 else f": the share goes from {before:.4f} to {after:.4f}")
    verb = "rises" if after > before else "falls"
    return f"the share {verb} from {before:.4f} to {after:.4f}"
