"""The losses of a run by source, from which a mix is suggested, and the check that two runs are comparable.

For each source this file computes the loss at the end of a run, how fast the loss falls, and the standard errors of
both. A source includes its documents that an epoch reads several times, which are in streams such as `web+x3`: they are
few, and mostly without a held-out document.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.paths import METRICS_NAME, PLAN_NAME
from schemas.storage import Store
from schemas.tokens import HELDOUT, TRAIN, Dataset, open_dataset, split_copies
from train.data.order import heldout_streams, open_streams, tokens_by_source
from train.data.packing import open_packings
from train.monitor.metrics import HeldoutMetrics, StepMetrics, read_metrics
from train.plan.plan import Plan, read_plan, verify_plan

# Estimates from the loss curve of a source: the loss at the end of a run and the speed at which it falls.
#
# The loss at the end comes from a straight line through the last measurements, so that a falling curve does not count
# as noise. The speed comes from a power law of tokens. The errors are standard errors.

Floats = NDArray[np.float64]

LAST = 5
"""Number of measurements at the end of a run that the straight line is fitted to."""
FEWEST_OF_LINE = 4
"""Fewest measurements for a straight line: one more than the line and its error require."""
FEWEST_OF_LAW = 6
"""Fewest measurements for a power law: twice its number of parameters."""
EXPONENTS = np.geomspace(0.095, 2.0, 40)
"""Grid of initial exponents; the best is refined between its neighbors. The smallest is that of Kaplan et al. 2020,
arXiv 2001.08361, below all other published ones: smaller exponents would fit any nearly flat curve."""
REFINED = 30
"""Golden-section steps for the exponent, each reducing the range to 0.618."""
GROUPS = 20
"""Maximum number of jackknife groups for the error of a fit."""
GOLDEN = (np.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class FinalLoss:
    """An estimate of the loss at the end of a run [nats/token]."""

    value: float
    error: float
    """Standard error of `value`."""
    points: int
    """Number of measurements used."""


@dataclass(frozen=True)
class LossCurveLaw:
    """A loss curve L(n) = floor + rest · (n / end)^-exponent [nats/token]; n: tokens so far, end: tokens of the run."""

    floor: float
    """Loss in the limit of infinite tokens."""
    rest: float
    """Loss above the floor at the end of the run."""
    exponent: float

    @property
    def speed(self) -> float:
        """-dL/d ln n at the end of the run: the decrease of the loss per relative increase of the tokens."""
        return self.exponent * self.rest


@dataclass(frozen=True)
class Learning:
    """A power law fitted to the losses of a source, with the standard error of `law.speed`."""

    law: LossCurveLaw
    error: float
    """Standard error of `law.speed`."""
    points: int
    """Number of measurements in the fit."""


def final_loss(tokens: Sequence[float], losses: Sequence[float], last: int = LAST) -> FinalLoss:
    """Return the loss at the last measurement, from a least-squares line through the latest measurements.

    `last`: number of measurements to use. At least FEWEST_OF_LINE are required.
    """
    x, y = np.array(tokens[-last:], np.float64), np.array(losses[-last:], np.float64)
    number, middle = len(x), x.mean()
    spread = float(((x - middle) ** 2).sum())
    slope = float(((x - middle) * (y - y.mean())).sum()) / spread
    away = float(x[-1] - middle)
    scatter = float(((y - y.mean() - slope * (x - middle)) ** 2).sum()) / (number - 2)
    error = float(np.sqrt(scatter * (1 / number + away**2 / spread)))
    return FinalLoss(float(y.mean()) + slope * away, error, number)


def fit_power_law(tokens: Floats, losses: Floats, end: float, exponent: float | None = None) -> LossCurveLaw:
    """Return the least-squares power law whose floor and rest are at least 0.

    `end`: tokens of the run; `exponent`: None = fitted too.
    Source: Golub and Pereyra 1973, SIAM Journal on Numerical Analysis 10(2) (variable projection).
    """
    if exponent is not None:
        return _for_exponent(exponent, tokens, losses, end)[1]
    # For a given exponent, floor and rest have a closed form, so only the exponent is searched for.
    errors = [_for_exponent(float(trial), tokens, losses, end)[0] for trial in EXPONENTS]
    best = int(np.argmin(errors))
    low, high = EXPONENTS[max(best - 1, 0)], EXPONENTS[min(best + 1, len(EXPONENTS) - 1)]
    for _ in range(REFINED):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if _for_exponent(left, tokens, losses, end)[0] <= _for_exponent(right, tokens, losses, end)[0]:
            high = right
        else:
            low = left
    return _for_exponent(float(low + high) / 2, tokens, losses, end)[1]


def _for_exponent(exponent: float, tokens: Floats, losses: Floats, end: float) -> tuple[float, LossCurveLaw]:
    """Return the smallest sum of squared errors for an exponent, and the law that reaches it."""
    x = (tokens / end) ** -exponent
    middle, mean = x.mean(), losses.mean()
    spread = float(((x - middle) ** 2).sum())
    rest = float(((x - middle) * (losses - mean)).sum()) / spread if spread else 0.0
    floor = float(mean - rest * middle)
    if rest <= 0:
        floor, rest = max(float(mean), 0.0), 0.0
    elif floor < 0:
        floor, rest = 0.0, float((x * losses).sum() / (x * x).sum())
    return float(((floor + rest * x - losses) ** 2).sum()), LossCurveLaw(floor, rest, exponent)


def learning_of(tokens: Sequence[float], losses: Sequence[float], exponent: float | None = None) -> Learning:
    """Return the power law of a source's loss against trained tokens, and the jackknife error of its speed.

    Sources: Jiang et al. 2024, arXiv 2410.11820 (the law by source); Efron and Stein 1981, Annals of Statistics 9(3).
    """
    x, y = np.array(tokens, np.float64), np.array(losses, np.float64)
    # Adjacent measurements are left out together, as they share the noise of the updates between them.
    parts = np.array_split(np.arange(len(x)), min(len(x), GROUPS))
    kept = [np.delete(np.arange(len(x)), part) for part in parts]
    speeds = np.array([fit_power_law(x[rows], y[rows], x[-1], exponent).speed for rows in kept])
    error = float(np.sqrt((len(parts) - 1) / len(parts) * ((speeds - speeds.mean()) ** 2).sum()))
    return Learning(fit_power_law(x, y, x[-1], exponent), error, len(x))


LAST_SHARE = 0.1
"""Share of the steps, at the end of a run, whose training losses are used: one step has few tokens of each source."""
ENOUGH = 12
"""Number of held-out measurements that an error message recommends."""
MAX_SHARE_CHANGE = 0.01
"""Largest difference between the shares of a source in two training stages that counts as rounding."""
COMPARED = ("objective", "mask_share", "mean_span", "document_mask", "seq_len")
"""Settings of `[train]` that must be equal for losses to be comparable."""


@dataclass(frozen=True)
class LossCurve:
    """Losses of a source during a run, each with the number of targets trained on by then."""

    tokens: list[float]
    """Training targets of all sources up to each measurement."""
    losses: list[float]
    """Losses [nats/token]."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run with the metrics of its completed steps."""

    dataset: Dataset
    plan: Plan
    digest: str
    """SHA-256 of the plan, as in the lineage."""
    steps: Sequence[StepMetrics]
    """The metrics by source."""
    unique: dict[str, int]
    """Training tokens that one epoch reads of each source; for sources in use, only those in whole rows."""

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of each source in the samples of the whole plan; 0 = left out."""
        drawn = _by_source(tokens_by_source(self.plan.stages))
        return {name: drawn.get(name, 0) / self.plan.num_tokens for name in self.unique}

    @cached_property
    def seen(self) -> dict[str, int]:
        """Number of training targets of each source in the completed steps."""
        return {name: sum(step.source_tokens.get(name, 0) for step in self.steps) for name in self.unique}

    @property
    def description(self) -> str:
        """The run in words: digest of its plan, parameters and completed steps."""
        plan = self.plan
        whole = f"{plan.num_params:,} parameters, {self.steps[-1].step:,} of {plan.steps:,} steps"
        return f"the run of plan {self.digest[:12]} ({whole})"

    def heldout(self, source: str, from_step: int = 1) -> LossCurve:
        """Return the held-out losses of a source from a step on; losses that were not finite are left out."""
        return self._points(
            [step.heldout[source].loss if source in step.heldout else None for step in self.steps], from_step
        )

    def training(self, source: str) -> LossCurve:
        """Return the last training losses of a source.

        Their number is LAST_SHARE of the steps, but at least FEWEST_OF_LINE if the run has as many.
        """
        last = max(FEWEST_OF_LINE, round(LAST_SHARE * len(self.steps)))
        points = self._points([step.losses.get(source) for step in self.steps], 1)
        return LossCurve(points.tokens[-last:], points.losses[-last:])

    def _points(self, losses: Sequence[float | None], from_step: int) -> LossCurve:
        done = np.cumsum([step.tokens for step in self.steps]).tolist()
        kept = [
            (float(tokens), loss)
            for step, tokens, loss in zip(self.steps, done, losses, strict=True)
            if loss is not None and step.step >= from_step
        ]
        return LossCurve([tokens for tokens, _ in kept], [loss for _, loss in kept])

    def level(self, source: str, heldout: bool) -> FinalLoss:
        """Return the loss of a source at the end of the run. Raises ConfigError if its losses are too few."""
        points = self.heldout(source) if heldout else self.training(source)
        if len(points.losses) < FEWEST_OF_LINE:
            kind = "held-out" if heldout else "training"
            raise ConfigError(
                f"{self.description}: expected at least {FEWEST_OF_LINE} {kind} losses of {source}, got "
                f"{len(points.losses)}. "
                f"{self.advice() if heldout else 'Train for more steps'}."
            )
        return final_loss(points.tokens, points.losses, LAST if heldout else len(points.losses))

    def advice(self) -> str:
        """Return the advice to measure held-out losses more often, with a value of train.eval_every."""
        return f"Train with --set train.eval_every={max(1, self.plan.steps // ENOUGH)} or less"


def measured_run(run: Store) -> MeasuredRun:
    """Return the metrics of a run folder with its dataset and plan.

    Raises ContractError if no step was trained, or if the plan was edited. Raises ConfigError if fewer than two sources
    are in use, if the plan reads no row of a source in use, or if its stages have different shares of the sources.
    """
    dataset = open_dataset(run)
    plan, steps = read_plan(run, dataset), read_metrics(run)
    verify_plan(run, dataset, plan)
    if not steps:
        raise ContractError(f"{run.uri}: expected losses, got no step in {METRICS_NAME}. Run `penstock train`.")
    sizes, rows = dataset.num_tokens(TRAIN), _rows(run, dataset, plan)
    whole, used = (_by_source(each, dataset.copies) for each in (sizes, sizes | rows))
    in_use = {split_copies(name)[0] for name in rows}
    if len(in_use) < 2:
        left_out = ", ".join(sorted(whole.keys() - in_use))
        more = f"; {left_out} has weight 0, so it was not measured" if left_out else ""
        raise ConfigError(
            f"{run.uri}: expected at least two sources in use, got one: {', '.join(in_use)}{more}. "
            "Give a second source a weight in train.weights."
        )
    _check_stages(run, plan)
    drawn = _by_source(tokens_by_source(plan.stages))
    if unread := sorted(name for name in in_use if not drawn.get(name)):
        raise ConfigError(
            f"{run.uri}: expected at least one row of every source in use, got none of {', '.join(unread)} in "
            f"{plan.steps:,} "
            "steps. Train for more steps, or set the weight of each such source to 0 in train.weights."
        )
    unique = {name: used[name] if name in in_use else tokens for name, tokens in sorted(whole.items())}
    heldout = {name: rows for name, (_, rows) in _heldout_of(dataset, plan).items()}
    return MeasuredRun(dataset, plan, digest_of(run.read_json(PLAN_NAME)), [_pooled(s, heldout) for s in steps], unique)


def _check_stages(run: Store, plan: Plan) -> None:
    """Raise ConfigError if the training stages draw from the sources in different shares."""
    shares = [
        {name: count / sum(stage.counts.values()) for name, count in _by_source(stage.counts).items()}
        for stage in plan.stages
    ]
    for number, own in enumerate(shares):
        names = sorted(own.keys() | shares[0].keys())
        if any(abs(own.get(name, 0.0) - shares[0].get(name, 0.0)) > MAX_SHARE_CHANGE for name in names):
            first, later = (
                ", ".join(f"{name} {each.get(name, 0.0):.3f}" for name in names) for each in (shares[0], own)
            )
            raise ConfigError(
                f"{run.uri}: expected the same shares of the sources in every training stage, got {first} in the first "
                f"and {later} in stage {number + 1}. Train a run without weights in train.stages."
            )


def _by_source(tokens: Mapping[str, int], copies: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the sum of the tokens of `web`, `web+x3` … for each source; `copies`: factors of the latter."""
    sums: dict[str, int] = {}
    for name, number in tokens.items():
        source = split_copies(name)[0]
        sums[source] = sums.get(source, 0) + number * (copies or {}).get(name, 1)
    return sums


def _pooled(step: StepMetrics, heldout_rows: Mapping[str, int]) -> StepMetrics:
    """Return the metrics of a step by source, each a mean over its streams, weighted by their numbers of targets."""
    losses, heldout = dict[str, list[tuple[float, int]]](), dict[str, list[tuple[float | None, int]]]()
    for name, loss in step.losses.items():
        losses.setdefault(split_copies(name)[0], []).append((loss, step.source_tokens.get(name, 0)))
    for name, measured in step.heldout.items():
        heldout.setdefault(split_copies(name)[0], []).append((measured.loss, heldout_rows.get(name, 0)))
    means = {name: _mean(values) for name, values in heldout.items()}
    return step.model_copy(
        update={
            "losses": {name: mean for name, values in losses.items() if (mean := _mean(values)) is not None},
            "source_tokens": _by_source(step.source_tokens),
            "heldout": {name: HeldoutMetrics(loss=mean, perplexity=None) for name, mean in means.items()},
        }
    )


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the mean of values, weighted by numbers; a single value is returned as it is, and None if one is None."""
    if len(values) == 1:
        return values[0][0]
    total = sum(number for _, number in values)
    finite = [(value, number) for value, number in values if value is not None]
    if len(finite) < len(values) or not total:
        return None
    return math.fsum(value * number for value, number in finite) / total


def _rows(run: Store, dataset: Dataset, plan: Plan) -> dict[str, int]:
    """Return the number of unique tokens of every stream in use; only tokens of whole rows count."""
    train = plan.settings.train
    streams = open_streams(dataset, train, open_packings(run, dataset, train))
    return {name: stream.num_units * plan.seq_len // stream.width(plan.seq_len) for name, stream in streams.items()}


def _heldout_of(dataset: Dataset, plan: Plan) -> dict[str, tuple[list[str], int]]:
    """Return, for each stream, the digests of its held-out shards and the number of rows that are measured."""
    train = plan.settings.train
    streams = heldout_streams(dataset, train.seq_len)
    return {
        name: (
            [shard.sha256 for shard in dataset.streams.get(f"{name}/{HELDOUT}", [])],
            min(stream.num_units // train.seq_len, train.eval_sequences),
        )
        for name, stream in streams.items()
    }


def has_heldout(run: MeasuredRun, source: str) -> bool:
    """Return True if held-out losses of a source were measured."""
    return bool(run.heldout(source).losses)


def check_comparable(run: MeasuredRun, reference: MeasuredRun) -> None:
    """Check that the losses of two runs are comparable. Raises ConfigError that lists all differences."""
    if problems := list(_differences(run, reference)):
        raise ConfigError(
            f"{reference.description}: expected losses that are comparable with those of {run.description}, got\n  "
            + "\n  ".join(problems)
            + "\n"
            "Set --reference to a run on the same dataset, or a dataset with the same tokenizer and held-out documents."
        )


def _differences(run: MeasuredRun, reference: MeasuredRun) -> Iterator[str]:
    if run.digest == reference.digest:
        yield f"the same plan {run.digest[:12]}: a run cannot be its own reference"
    tokenizers = [digest_of(each.dataset.tokenizer.model_dump(mode="json")) for each in (run, reference)]
    if tokenizers[0] != tokenizers[1]:
        yield f"tokenizer contract {tokenizers[1][:12]}, but {tokenizers[0][:12]} in the measured run"
    for name in COMPARED:
        own, other = (getattr(each.plan.settings.train, name) for each in (run, reference))
        if own != other:
            yield f"train.{name} = {other}, but {own} in the measured run"
    for source in sorted(name for name, share in run.shares.items() if share):
        if source not in reference.unique:
            yield f"no source {source}"
        elif not reference.shares[source]:
            yield f"{source} with weight 0, so it was not measured"
        elif has_heldout(run, source) and _heldout_rows(run, source) != _heldout_rows(reference, source):
            yield f"a different set or number of held-out rows of {source} (train.eval_sequences)"


def _heldout_rows(run: MeasuredRun, source: str) -> dict[str, tuple[list[str], int]]:
    """Return the held-out shards and the number of measured rows of each stream of a source."""
    found = _heldout_of(run.dataset, run.plan)
    return {name: rows for name, rows in found.items() if split_copies(name)[0] == source}
