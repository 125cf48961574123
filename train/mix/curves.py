"""Numbers of a source's loss: where it stands at the end of a run, and how fast it still falls, each with its error.

A loss at the end is read from a straight line through the last measurements, so that a curve that still falls is not
taken for noise. How fast it falls is read from a power law of tokens. The errors are standard errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
