"""What a run measured of its sources, as a mix needs it, and whether two runs measured the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.storage import Store
from schemas.tokens import HELDOUT, TRAIN, Dataset, open_dataset
from train.data.order import heldout_streams, open_streams, tokens_by_source
from train.data.packing import open_packings
from train.monitor.metrics import METRICS_NAME, StepMetrics, read_metrics
from train.plan.plan import PLAN_NAME, Plan, read_plan

# Numbers of a source's loss: where it stands at the end of a run, and how fast it still falls, each with its error.
#
# A loss at the end is read from a straight line through the last measurements, so that a curve that still falls is not
# taken for noise. How fast it falls is read from a power law of tokens. The errors are standard errors.

Floats = NDArray[np.float64]

LAST = 5
"""Measurements that the line goes through."""
FEWEST_OF_LINE = 4
"""One more than a line and its error need."""
FEWEST_OF_LAW = 6
"""Twice the numbers that a power law has."""
EXPONENTS = np.geomspace(0.095, 2.0, 40)
"""Grid of exponents that the fit begins with; the best is refined between its neighbours. The least is that of Kaplan
et al. 2020, arXiv 2001.08361, below all others published: a curve that is nearly flat would be fitted by less, too."""
REFINED = 30
"""Cuts of the range of the exponent, each to 0.618 of it."""
GROUPS = 20
"""Most groups of measurements that are left out in turn for the error of a fit."""
GOLDEN = (np.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Level:
    """A loss at the end of a run [nats/token]."""

    value: float
    error: float
    """Its standard error."""
    points: int
    """Measurements it was read from."""


@dataclass(frozen=True)
class PowerLaw:
    """L(n) = floor + rest · (n / end)^-exponent over tokens n, `end` being those of the whole run [nats/token]."""

    floor: float
    """What no number of tokens would take away."""
    rest: float
    """What stands above it at the end of the run."""
    exponent: float

    @property
    def speed(self) -> float:
        """-dL/d ln n at the end: what the loss falls by for each part that the tokens grow by."""
        return self.exponent * self.rest


@dataclass(frozen=True)
class Learning:
    """A power law through the losses of a source, and how sure its speed is."""

    law: PowerLaw
    error: float
    """Standard error of `law.speed`."""
    points: int
    """Measurements it was fitted to."""


def level_at_end(tokens: Sequence[float], losses: Sequence[float], last: int = LAST) -> Level:
    """The loss at the last measurement by a least-squares line through the `last` ones, at least FEWEST_OF_LINE."""
    x, y = np.array(tokens[-last:], np.float64), np.array(losses[-last:], np.float64)
    number, middle = len(x), x.mean()
    spread = float(((x - middle) ** 2).sum())
    slope = float(((x - middle) * (y - y.mean())).sum()) / spread
    away = float(x[-1] - middle)
    scatter = float(((y - y.mean() - slope * (x - middle)) ** 2).sum()) / (number - 2)
    error = float(np.sqrt(scatter * (1 / number + away**2 / spread)))
    return Level(float(y.mean()) + slope * away, error, number)


def fit_power_law(tokens: Floats, losses: Floats, end: float, exponent: float | None = None) -> PowerLaw:
    """The power law with the least squares, floor and rest being at least 0; `exponent` None = fitted too.

    For an exponent the other two have a closed form, so one number is searched for (variable projection: Golub and
    Pereyra 1973, SIAM Journal on Numerical Analysis 10(2)).
    """
    if exponent is not None:
        return _for_exponent(exponent, tokens, losses, end)[1]
    errors = [_for_exponent(float(one), tokens, losses, end)[0] for one in EXPONENTS]
    best = int(np.argmin(errors))
    low, high = EXPONENTS[max(best - 1, 0)], EXPONENTS[min(best + 1, len(EXPONENTS) - 1)]
    for _ in range(REFINED):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if _for_exponent(left, tokens, losses, end)[0] <= _for_exponent(right, tokens, losses, end)[0]:
            high = right
        else:
            low = left
    return _for_exponent(float(low + high) / 2, tokens, losses, end)[1]


def _for_exponent(exponent: float, tokens: Floats, losses: Floats, end: float) -> tuple[float, PowerLaw]:
    """Sum of squares, and the law of this exponent that has the least."""
    x = (tokens / end) ** -exponent
    middle, mean = x.mean(), losses.mean()
    spread = float(((x - middle) ** 2).sum())
    rest = float(((x - middle) * (losses - mean)).sum()) / spread if spread else 0.0
    floor = float(mean - rest * middle)
    if rest <= 0:
        floor, rest = max(float(mean), 0.0), 0.0
    elif floor < 0:
        floor, rest = 0.0, float((x * losses).sum() / (x * x).sum())
    return float(((floor + rest * x - losses) ** 2).sum()), PowerLaw(floor, rest, exponent)


def learning_of(tokens: Sequence[float], losses: Sequence[float], exponent: float | None = None) -> Learning:
    """The power law of a source, with the jackknife error of its speed.

    Neighbouring measurements are left out together: they share the noise of the updates between them. Source: Jiang et
    al. 2024, arXiv 2410.11820 (the law by source); Efron and Stein 1981, Annals of Statistics 9(3) (the error).
    """
    x, y = np.array(tokens, np.float64), np.array(losses, np.float64)
    parts = np.array_split(np.arange(len(x)), min(len(x), GROUPS))
    kept = [np.delete(np.arange(len(x)), part) for part in parts]
    speeds = np.array([fit_power_law(x[rows], y[rows], x[-1], exponent).speed for rows in kept])
    error = float(np.sqrt((len(parts) - 1) / len(parts) * ((speeds - speeds.mean()) ** 2).sum()))
    return Learning(fit_power_law(x, y, x[-1], exponent), error, len(x))


LAST_SHARE = 0.1
"""Share of the steps, at the end, that a training loss is read from: one step has few tokens of each source."""
ENOUGH = 12
"""Held-out measurements that an error message asks for."""
COMPARED = ("objective", "mask_share", "mean_span", "document_mask", "seq_len")
"""Settings of `[train]` that losses must share to be compared."""


@dataclass(frozen=True)
class Points:
    """Losses of a source over the tokens of the run."""

    tokens: list[float]
    """Targets of all sources up to there."""
    losses: list[float]
    """[nats/token]."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run with the steps that it has made."""

    dataset: Dataset
    plan: Plan
    digest: str
    """SHA-256 of the plan, as a lineage shows it."""
    steps: Sequence[StepMetrics]
    unique: dict[str, int]
    """Training tokens of each source that differ; of those in use, whole rows."""

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of each source in the samples of the whole plan; 0 = left out."""
        drawn = tokens_by_source(self.plan.stages)
        return {name: drawn.get(name, 0) / self.plan.num_tokens for name in self.unique}

    @cached_property
    def seen(self) -> dict[str, int]:
        """Targets of each source that the steps trained on."""
        return {name: sum(step.source_tokens.get(name, 0) for step in self.steps) for name in self.unique}

    @property
    def told(self) -> str:
        """The run in words."""
        plan = self.plan
        whole = f"{plan.num_params:,} parameters, {self.steps[-1].step:,} of {plan.steps:,} steps"
        return f"the run of plan {self.digest[:12]} ({whole})"

    def heldout(self, source: str, from_step: int = 1) -> Points:
        """Every held-out loss of a source from a step on; what was not finite is left out."""
        return self._points(
            [step.heldout[source].loss if source in step.heldout else None for step in self.steps], from_step
        )

    def training(self, source: str) -> Points:
        """Its training losses in the last steps."""
        last = max(FEWEST_OF_LINE, round(LAST_SHARE * len(self.steps)))
        found = self._points([step.losses.get(source) for step in self.steps], 1)
        return Points(found.tokens[-last:], found.losses[-last:])

    def _points(self, losses: Sequence[float | None], from_step: int) -> Points:
        done = np.cumsum([step.tokens for step in self.steps]).tolist()
        kept = [
            (float(tokens), loss)
            for step, tokens, loss in zip(self.steps, done, losses, strict=True)
            if loss is not None and step.step >= from_step
        ]
        return Points([tokens for tokens, _ in kept], [loss for _, loss in kept])

    def level(self, source: str, heldout: bool) -> Level:
        """The loss of a source at the end. Raises ConfigError if it was measured too seldom."""
        points = self.heldout(source) if heldout else self.training(source)
        if len(points.losses) < FEWEST_OF_LINE:
            kind = "held-out" if heldout else "training"
            raise ConfigError(
                f"{self.told}: expected {FEWEST_OF_LINE} {kind} losses of {source}, got {len(points.losses)}. "
                f"{self.advice() if heldout else 'train for more steps'}."
            )
        return level_at_end(points.tokens, points.losses, LAST if heldout else len(points.losses))

    def advice(self) -> str:
        """Which settings measure more often."""
        return f"train with --set train.eval_every={max(1, self.plan.steps // ENOUGH)} or less"


def measured_run(run: Store) -> MeasuredRun:
    """What stands in a run folder. Raises ContractError if it was not trained, ConfigError if it has one source."""
    dataset = open_dataset(run)
    plan, steps = read_plan(run, dataset), read_metrics(run)
    if not steps:
        raise ContractError(
            f"{run.uri}: expected losses, got no step in {METRICS_NAME}. `penstock train` measures them."
        )
    whole, rows = dataset.num_tokens(TRAIN), _rows(run, dataset, plan)
    if len(rows) < 2:
        left_out = ", ".join(sorted(whole.keys() - rows.keys()))
        more = f"; {left_out} has weight 0, so nothing is known of it" if left_out else ""
        raise ConfigError(
            f"{run.uri}: expected sources to mix, got one in use: {', '.join(rows)}{more}. There is nothing to mix."
        )
    if unread := sorted(rows.keys() - {name for name, tokens in tokens_by_source(plan.stages).items() if tokens}):
        raise ConfigError(
            f"{run.uri}: expected a row of every source in use, got none of {', '.join(unread)} in {plan.steps:,} "
            "steps. Train for longer, or leave it out with weight 0 in train.weights."
        )
    unique = {name: rows.get(name, tokens) for name, tokens in sorted(whole.items())}
    return MeasuredRun(dataset, plan, digest_of(run.read_json(PLAN_NAME)), steps, unique)


def _rows(run: Store, dataset: Dataset, plan: Plan) -> dict[str, int]:
    """Unique tokens of every source in use, as the plan counts them."""
    train = plan.settings.train
    streams = open_streams(dataset, train, open_packings(run, dataset, train))
    return {name: stream.num_units * plan.seq_len // stream.width(plan.seq_len) for name, stream in streams.items()}


def has_heldout(run: MeasuredRun, source: str) -> bool:
    """Whether held-out losses of a source were measured."""
    return bool(run.heldout(source).losses)


def check_comparable(run: MeasuredRun, reference: MeasuredRun) -> None:
    """Raises ConfigError that names all in which the losses of two runs are not of the same thing."""
    if problems := list(_differences(run, reference)):
        raise ConfigError(
            f"{reference.told}: expected losses to compare with those of {run.told}, got\n  "
            + "\n  ".join(problems)
            + "\n"
            "choose a reference on the same dataset, or on one with its tokenizer and held-out documents"
        )


def _differences(run: MeasuredRun, reference: MeasuredRun) -> Iterator[str]:
    if run.digest == reference.digest:
        yield f"the same plan {run.digest[:12]}: a run says nothing beside itself"
    tokenizers = [digest_of(one.dataset.tokenizer.model_dump(mode="json")) for one in (run, reference)]
    if tokenizers[0] != tokenizers[1]:
        yield f"tokenizer contract {tokenizers[1][:12]}, of the run {tokenizers[0][:12]}"
    for name in COMPARED:
        own, other = (getattr(one.plan.settings.train, name) for one in (run, reference))
        if own != other:
            yield f"train.{name} = {other}, of the run {own}"
    for source in sorted(name for name, share in run.shares.items() if share):
        if source not in reference.unique:
            yield f"no source {source}"
        elif not reference.shares[source]:
            yield f"{source} with weight 0: what was never read is no measure"
        elif has_heldout(run, source) and _heldout_rows(run, source) != _heldout_rows(reference, source):
            yield f"other held-out documents, or another number of them, of {source} (train.eval_sequences)"


def _heldout_rows(run: MeasuredRun, source: str) -> tuple[list[str], int]:
    """What decides which rows of a source are measured: its held-out shards, and how many rows are taken."""
    train = run.plan.settings.train
    streams = heldout_streams(run.dataset, train.seq_len)
    rows = streams[source].num_units // train.seq_len if source in streams else 0
    shards = run.dataset.streams.get(f"{source}/{HELDOUT}", [])
    return [shard.sha256 for shard in shards], min(rows, train.eval_sequences)
