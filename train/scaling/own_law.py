"""A law that was fitted to one's own runs: its numbers, how sure they are, and the file that holds them.

The file has the runs too; a plan keeps the law alone, so that it needs no file to be followed again.
"""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.storage import Store
from train.config.plan import OwnLaw
from train.scaling.fit import NAMES, Fit, Measured
from train.scaling.laws import LossLaw

FAR = 100.0
"""Times the compute of the largest run beyond which a law is a guess."""
LEAST_SHARE = 0.05
"""Where the interval of A or B begins, as a share of the number, below which it may as well be nothing."""
LEAST_FALL = 1.0
"""What a term must fall by over the runs, in units of their scatter about the law, to be told from nothing."""


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Point(_Block):
    """A run that the law was fitted to."""

    run: str
    """Its folder relative to the run whose ladder it is of, or as it was named."""
    params: float
    """N."""
    tokens: float
    """D."""
    loss: float
    """Measured [nats/token]."""
    fitted: float
    """L(N, D)."""
    residual: float
    """ln(loss / fitted)."""
    dataset: str = ""
    """Digest of its dataset; empty = not known."""
    plan: str = ""
    """Digest of what decided its weights; empty = not known."""


class LawFile(_Block):
    """A fitted law with the runs behind it, as `law.json` holds it."""

    format_version: Literal[1] = 1
    """Version of this layout."""
    law: OwnLaw
    """The law."""
    how: str
    """How it was fitted."""
    points: list[Point]
    """The runs."""


def law_in(own: OwnLaw) -> LossLaw:
    """The law that was fitted. Raises ConfigError if it has no best sizes where its own runs are."""
    numbers = {name: getattr(own, name) for name in NAMES}
    law = LossLaw(name="own law", source=own.source, counts=own.counts, **numbers)
    try:
        sizes = (law.for_compute(own.compute), law.for_tokens(own.tokens), law.for_params(own.params))
        found = [number for size in sizes for number in (size.params, size.tokens)]
    except (OverflowError, ZeroDivisionError):
        found = [math.inf]
    if not all(0 < number < math.inf for number in found):
        raise ConfigError(
            f"own law: expected best sizes where its {own.num_runs} runs are, got none: {law.formula}. Fit it again."
        )
    return law


def law_file(fit: Fit, measured: Sequence[Measured], share: float, how: str) -> LawFile:
    """What is to be written of a fit. Raises ConfigError if its numbers are those of no law."""
    law, datasets = fit.law, {one.dataset for one in measured}
    points = [_point(one, law) for one in measured]
    try:
        own = OwnLaw(
            **{name: getattr(law, name) for name in NAMES},
            counts=law.counts,
            held=("alpha", "beta") if fit.held else (),
            held_from=fit.held.source if fit.held else "",
            intervals={name: (found.low, found.high) for name, found in fit.intervals.items()},
            share=share,
            num_runs=fit.num_runs,
            deviation=math.sqrt(math.fsum(point.residual**2 for point in points) / len(points)),
            dataset=datasets.pop() if len(datasets) == 1 else "",
            params=max(one.params for one in measured),
            tokens=max(one.tokens for one in measured),
            compute=max(6 * one.params * one.tokens for one in measured),
        )
    except ValidationError as error:
        raise ConfigError(f"the fit: expected numbers of a law, {_wrong(error)}. Add runs.") from error
    return LawFile(law=own, how=how, points=points)


def _point(one: Measured, law: LossLaw) -> Point:
    fitted = law.loss(one.params, one.tokens)
    return Point(
        run=one.run,
        params=one.params,
        tokens=one.tokens,
        loss=one.loss,
        fitted=fitted,
        residual=math.log(one.loss / fitted),
        dataset=one.dataset,
        plan=one.plan,
    )


def write_law(place: str, found: LawFile) -> None:
    """Write a law to a file. Raises ConfigError if its runs do not say what size or length is worth."""
    law = found.law
    falls = {
        "a": law.a * _spread([point.params for point in found.points], law.alpha),
        "b": law.b * _spread([point.tokens for point in found.points], law.beta),
    }
    scatter = law.deviation * min(point.fitted for point in found.points)
    for name, what, more in (("a", "N", "size"), ("b", "D", "length")):
        low = law.intervals.get(name, (math.inf, math.inf))[0]
        if low < LEAST_SHARE * getattr(law, name) or falls[name] <= LEAST_FALL * scatter:
            raise ConfigError(
                f"{place}: expected runs whose loss falls with {what}, got {name} = {getattr(found.law, name):.3g} "
                f"({found.law.interval(name)}): no plan can go by such a law, and none is written. Fit it to runs that "
                f"differ more in {more} and see more tokens."
            )
    folder, name = _placed(place)
    folder.write_atomic(name, canonical_json(found.model_dump(mode="json")))


def _spread(sizes: Sequence[float], exponent: float) -> float:
    """What the smallest of the runs is above the largest, in the term of a law, by its factor."""
    return float(min(sizes) ** -exponent - max(sizes) ** -exponent)


def read_law(place: str, named: str = "plan.law_file =") -> LawFile:
    """The law of a file. Raises ConfigError, by the setting or flag that named it, if no plan could follow it."""
    folder, name = _placed(place)
    where = f"{named} {place}"
    if not folder.exists(name):
        raise ConfigError(f"{where}: expected a fitted law, got no such file. Make it with `penstock ladder`.")
    try:
        raw = folder.read_json(name)
    except (ContractError, ValueError, OSError) as error:  # bytes that are no text are a ValueError
        raise ConfigError(f"{where}: expected JSON, got {error}. Fit it again.") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != 1:
        raise ConfigError(
            f"{where}: expected a law of format version 1, got {version}. Fit it again with "
            "`penstock ladder` or `penstock fit-scaling`."
        )
    try:
        found = LawFile.model_validate(raw)
        law_in(found.law)
        return found
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{where}: expected a law, {_wrong(error)}. Fit it again.") from error


def _wrong(error: ValidationError) -> str:
    """What a law has that it should not have."""
    found = [
        f"{'.'.join(str(part) for part in one['loc'])}: {one['msg'].removeprefix('Value error, ')}"
        + (f" ({one['input']!r})" if not isinstance(one["input"], dict) else "")
        for one in error.errors()
    ]
    return f"found {'; '.join(found[:5])}"


def _placed(place: str) -> tuple[Store, str]:
    """Folder and name of a file, local or not."""
    parent, _, name = place.rpartition("/")
    return Store(parent or ("/" if place.startswith("/") else ".")), name
