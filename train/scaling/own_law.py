"""A scaling law that is fitted to the user's own runs, and its file `law.json`.

The file holds the law with the intervals of its parameters, and the runs. A plan stores a copy of the law, so that it
does not need the file later.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ConfigError, ContractError, reading
from schemas.ids import canonical_json
from schemas.storage import Store
from train.config.plan import OwnLaw
from train.scaling.fit import NAMES, Fit, MeasuredLoss
from train.scaling.laws import LossLaw
from train.scaling.repeats import expected_loss, worth_of_tokens

MAX_EXTRAPOLATION = 100.0
"""Multiple of the largest run's compute beyond which the law is unreliable."""
LEAST_SHARE = 0.05
"""Smallest lower bound of the interval of A or B, as a share of the fitted value; below it, A or B may be zero."""
LEAST_FALL = 1.0
"""Smallest significant decrease of a term of the law over the runs, in units of the runs' scatter about the law."""


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class FittedRun(_Block):
    """A run that the law was fitted to."""

    run: str
    """Folder of the run, relative to the run of the ladder, or as it was given."""
    params: float
    """Number of parameters N."""
    tokens: float
    """Number of training tokens D."""
    loss: float
    """Measured final loss [nats/token]."""
    fitted: float
    """Loss L(N, D) by the law [nats/token]."""
    residual: float
    """ln(loss / fitted)."""
    dataset: str = ""
    """Digest of the run's dataset; empty = unknown."""
    plan: str = ""
    """Digest of everything that determined the weights; empty = unknown."""


class TriedRate(_Block):
    """A run of the smallest model at one learning rate."""

    run: str
    """Folder of the run, relative to the run of the ladder."""
    rate: float
    """Peak learning rate."""
    loss: float
    """Measured final loss [nats/token]."""


class LawFile(_Block):
    """A fitted law with its runs, the content of `law.json`."""

    format_version: Literal[1] = 1
    """Version of the file's format."""
    law: OwnLaw
    """The fitted law."""
    how: str
    """Description of the fit."""
    points: list[FittedRun]
    """The runs that the law was fitted to."""
    rates: list[TriedRate] = []
    """Runs that searched the learning rate of the others; empty = the rates are those of the rule."""


def law_in(own: OwnLaw) -> LossLaw:
    """Return the law that was fitted to the user's runs as a LossLaw.

    Raises ConfigError unless its N and D are positive and finite at the largest compute, N and D of these runs.
    """
    numbers = {name: getattr(own, name) for name in NAMES}
    law = LossLaw(name="own law", source=own.source, counts=own.counts, **numbers)
    try:
        sizes = (law.for_compute(own.compute), law.for_tokens(own.tokens), law.for_params(own.params))
        numbers_of_sizes = [number for size in sizes for number in (size.params, size.tokens)]
    except (OverflowError, ZeroDivisionError):
        numbers_of_sizes = [math.inf]
    if not all(0 < number < math.inf for number in numbers_of_sizes):
        raise ConfigError(
            f"own law: expected a positive, finite N and D for the largest of its {own.num_runs} runs, got none from "
            f"`{law.formula}`. Fit the law again to more runs with `penstock fit-scaling`."
        )
    return law


def price_of_data(own_law: Mapping[str, Any] | None, params: float, tokens: float, unique: float) -> float:
    """Return the expected loss [nats/token] of `params` parameters after `tokens` training tokens.

    `unique`: unique tokens that the training tokens are drawn from. `own_law`: the law in the settings of a plan that
    was fitted to the user's runs; None = the published law of repeated data, on C4. Raises ContractError if the law is
    not valid.
    """
    if own_law is None:
        return expected_loss(params, tokens, unique)
    with reading("train/plan.json", "a valid plan.own_law", "Run `penstock plan` again."):
        own = OwnLaw.model_validate(own_law)
    return law_in(own).loss(params, worth_of_tokens(unique, tokens))


def law_file(fit: Fit, measured: Sequence[MeasuredLoss], share: float, how: str) -> LawFile:
    """Return the content of the law file of a fit. Raises ConfigError if the fitted numbers are not valid for a law."""
    law, datasets = fit.law, {run.dataset for run in measured}
    points = [_point(run, law) for run in measured]
    try:
        own = OwnLaw(
            **{name: getattr(law, name) for name in NAMES},
            counts=law.counts,
            held=("alpha", "beta") if fit.held else (),
            held_from=fit.held.source if fit.held else "",
            intervals={name: (interval.low, interval.high) for name, interval in fit.intervals.items()},
            share=share,
            num_runs=fit.num_runs,
            deviation=math.sqrt(math.fsum(point.residual**2 for point in points) / len(points)),
            dataset=datasets.pop() if len(datasets) == 1 else "",
            params=max(run.params for run in measured),
            tokens=max(run.tokens for run in measured),
            compute=max(6 * run.params * run.tokens for run in measured),
        )
    except ValidationError as error:
        raise ConfigError(
            f"fit: expected valid parameters of a law, got {_wrong(error)}. Fit the law to more runs."
        ) from error
    return LawFile(law=own, how=how, points=points)


def _point(run: MeasuredLoss, law: LossLaw) -> FittedRun:
    fitted = law.loss(run.params, run.tokens)
    return FittedRun(
        run=run.run,
        params=run.params,
        tokens=run.tokens,
        loss=run.loss,
        fitted=fitted,
        residual=math.log(run.loss / fitted),
        dataset=run.dataset,
        plan=run.plan,
    )


def write_law(path: str, content: LawFile) -> None:
    """Write a law to a file. Raises ConfigError if the law's runs do not show that N and D lower the loss."""
    law = content.law
    falls = {
        "a": law.a * _spread([point.params for point in content.points], law.alpha),
        "b": law.b * _spread([point.tokens for point in content.points], law.beta),
    }
    scatter = law.deviation * min(point.fitted for point in content.points)
    for name, variable, more in (("a", "N", "number of parameters N"), ("b", "D", "number of tokens D")):
        low = law.intervals.get(name, (math.inf, math.inf))[0]
        if low < LEAST_SHARE * getattr(law, name) or falls[name] <= LEAST_FALL * scatter:
            raise ConfigError(
                f"{path}: expected runs whose loss falls with {variable}, got {name} = {getattr(law, name):.3g} "
                f"({law.interval(name)}). Such a law cannot size a model, so the file is not written. Fit the law to "
                f"runs that differ more in their {more} and are trained on more tokens."
            )
    folder, name = _split_path(path)
    folder.write_atomic(name, canonical_json(content.model_dump(mode="json")))


def _spread(sizes: Sequence[float], exponent: float) -> float:
    """Return how much size^-exponent falls from the smallest to the largest of `sizes`."""
    return float(min(sizes) ** -exponent - max(sizes) ** -exponent)


def read_law(path: str, named: str = "plan.law_file =") -> LawFile:
    """Return the content of a law file. Raises ConfigError if it is missing or invalid.

    `named`: the setting or flag that gave the path, for the error message.
    """
    folder, name = _split_path(path)
    where = f"{named} {path}"
    if not folder.exists(name):
        raise ConfigError(f"{where}: expected a fitted law, got no such file. Make it with `penstock ladder`.")
    try:
        raw = folder.read_json(name)
    except (ContractError, ValueError, OSError) as error:  # invalid UTF-8 raises a ValueError
        raise ConfigError(
            f"{where}: expected JSON, got an error: {error}. Make the file again with `penstock ladder`."
        ) from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != 1:
        raise ConfigError(
            f"{where}: expected a law of format version 1, got {version}. Make the file again with "
            "`penstock ladder` or `penstock fit-scaling`."
        )
    try:
        content = LawFile.model_validate(raw)
        law_in(content.law)
        return content
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ValidationError as error:
        raise ConfigError(
            f"{where}: expected a law, got invalid values: {_wrong(error)}. Make the file again with `penstock ladder`."
        ) from error


def _wrong(error: ValidationError) -> str:
    """Return the first five problems of a validation error, with the invalid values."""
    problems = [
        f"{'.'.join(str(key) for key in problem['loc'])}: {problem['msg'].removeprefix('Value error, ')}"
        + (f" ({problem['input']!r})" if not isinstance(problem["input"], dict) else "")
        for problem in error.errors()
    ]
    return "; ".join(problems[:5])


def _split_path(path: str) -> tuple[Store, str]:
    """Return folder and name of a file, local or remote."""
    parent, _, name = path.rpartition("/")
    return Store(parent or ("/" if path.startswith("/") else ".")), name
