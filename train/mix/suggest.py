"""A mix from the losses of a run: against a reference run, or by how fast each source is still learnt.

Each source carries its evidence: the numbers, and a sentence. A figure within the noise of the mean counts as the mean,
so where nothing is beyond the noise the shares stay. What would be repeated too often is cut and asked for as tokens.
The errors are those within a run: over four seeds of a run of 200 steps a loss spread by three times as much (0.026 for
0.008), which `SURE` leaves room for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.errors import ConfigError
from schemas.mix import Mix, SourceMix
from train.mix.curves import FEWEST_OF_LAW, FEWEST_OF_LINE, Learning, learning_of
from train.mix.measured import MeasuredRun, check_comparable, has_heldout
from train.mix.shares import (
    STEP_SIZE,
    SURE,
    UNITS,
    Shares,
    bounded,
    by_excess,
    by_learning,
    most_passes,
    rounded,
    told_apart,
    worth_of_pass,
)

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
            f"{run.told}: promised at least {fewest} held-out losses of every source from step {from_step} on, found "
            f"{', '.join(few)}; {run.advice()}, hold documents of every source out, or compare with --reference"
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
