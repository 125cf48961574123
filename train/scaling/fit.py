"""Fit a scaling law L(N, D) = E + A/N^alpha + B/D^beta to runs, with bootstrap intervals.

A few runs may not determine the exponents; both are then held fixed at published values.

Source: Hoffmann et al. 2022, arXiv 2203.15556, section 3.3 and appendix D.3: the Huber loss of the logarithms,
minimized by L-BFGS from a grid of starts. The intervals are percentiles of fits to bootstrap samples of the runs, as in
Besiroglu et al. 2024, arXiv 2404.10102, which also showed that L-BFGS stops early on the mean instead of the sum.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from schemas.errors import ConfigError
from train.scaling.laws import BESIROGLU, LossLaw

DELTA = 1e-3
"""Threshold between the quadratic and the linear part of the Huber loss [difference of log losses]."""
FEWEST_RUNS = 6
"""Fewest runs for a fit: one more than the law has parameters."""
POLISHED = 64
"""Number of starts that L-BFGS refines: those of the grid with the lowest loss."""

STOPS = {"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-12}
"""Stopping criteria of L-BFGS."""
LARGEST = 700.0
"""Largest logarithm of a parameter of a law; a float holds up to 709."""
WIDEST = 0.5
"""Width of an exponent's interval, as a share of the exponent, above which the runs do not determine the exponent."""
STEEPEST = 1.0
"""Largest plausible exponent; published ones lie between 0.05 and 0.5. Where sizes hardly matter, L-BFGS finds
exponents of 30 and more with narrow intervals (12 runs of 0.2 to 0.8 million parameters, 0.1 to 7 tokens each)."""

Floats = NDArray[np.float64]
NAMES = ("floor", "a", "b", "alpha", "beta")


@dataclass(frozen=True)
class MeasuredLoss:
    """The size, length and final loss of a training run."""

    params: float
    """Number of parameters N."""
    tokens: float
    """Number of training tokens D."""
    loss: float
    """Final loss [nats/token]."""
    run: str = ""
    """Folder of the run."""
    dataset: str = ""
    """Digest of the run's dataset; empty = unknown."""
    plan: str = ""
    """Digest of everything that determined the weights; empty = unknown."""
    kind: str = ""
    """Text that the loss is of, and the tokens that it is counted in; empty = unknown."""


@dataclass(frozen=True)
class Exponents:
    """Exponents of a law that come from a publication and are not fitted."""

    alpha: float
    beta: float
    source: str


PUBLISHED = Exponents(BESIROGLU.alpha, BESIROGLU.beta, BESIROGLU.source)
"""The values at which both exponents are held if the runs do not determine them."""


@dataclass(frozen=True)
class BootstrapInterval:
    """The bounds of a bootstrap confidence interval of a fitted parameter."""

    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A fitted law with the confidence intervals of its parameters."""

    law: LossLaw
    objective: float
    """Sum of the Huber losses."""
    intervals: dict[str, BootstrapInterval]
    """Intervals of floor, a, b, alpha, beta and `exponent`, the power of C in the optimal N; held values have none."""
    num_runs: int
    drawn: tuple[LossLaw, ...] = ()
    """The laws fitted to the bootstrap samples."""
    held: Exponents | None = None
    """The exponents that were held at published values; None = they were fitted."""


def starts(held: Exponents | None = None) -> Floats:
    """Return the starting points (ln A, ln B, ln E, alpha, beta) of L-BFGS as rows of an array.

    The array has 4,500 rows, as in Hoffmann et al. 2022, or 180 if `held` gives the exponents.
    """
    logs, floors, exponents = np.arange(0, 26, 5.0), np.arange(-1, 1.1, 0.5), np.arange(0, 2.1, 0.5)
    alphas, betas = ([held.alpha], [held.beta]) if held else (exponents, exponents)
    return np.array(list(itertools.product(logs, logs, floors, alphas, betas)))


def objective(theta: Floats, runs: Floats) -> tuple[Floats, Floats]:
    """Return the sum of Huber losses over the runs, for each row of `theta`, and the gradient of each sum.

    `theta`: (rows, 5), as in `starts`; `runs`: (runs, 3) of ln N, ln D and ln L.
    """
    log_n, log_d, log_l = runs.T
    a, b, e, alpha, beta = theta.T[:, :, None]
    terms = np.stack([a - alpha * log_n, b - beta * log_d, np.broadcast_to(e, (len(theta), len(runs)))])
    highest = terms.max(0)
    shares = np.exp(terms - highest)
    total = shares.sum(0)
    shares /= total
    rest = highest + np.log(total) - log_l
    small = np.abs(rest) <= DELTA
    losses = np.where(small, 0.5 * rest**2, DELTA * (np.abs(rest) - 0.5 * DELTA)).sum(1)
    gradients = np.where(small, rest, DELTA * np.sign(rest)) * shares
    by_exponent = [-(gradients[0] * log_n).sum(1), -(gradients[1] * log_d).sum(1)]
    return losses, np.stack([*gradients.sum(2), *by_exponent], axis=1)


def _least(theta: Floats, runs: Floats, held: Exponents | None) -> tuple[float, Floats]:
    """Return the smallest sum of Huber losses that L-BFGS reaches from the start `theta`, and the parameters there."""
    from scipy.optimize import minimize

    # Centering N and D decorrelates A and B from the exponents: the same minimum in a quarter of the steps.
    middle = runs[:, :2].mean(0)
    near = runs - np.append(middle, 0)

    def at(point: Floats) -> tuple[float, Floats]:
        losses, gradients = objective(point[None], near)
        return float(losses[0]), gradients[0]

    shift = np.zeros(5)
    shift[:2] = theta[3:] * middle
    bounds = [(None, None)] * 3 + [(exponent, exponent) if held else (None, None) for exponent in theta[3:]]
    minimum = minimize(at, theta - shift, jac=True, method="L-BFGS-B", bounds=bounds, options=STOPS)
    shift[:2] = minimum.x[3:] * middle
    return float(minimum.fun), np.asarray(minimum.x + shift)


def _law(theta: Floats, name: str, source: str) -> LossLaw:
    a, b, e, alpha, beta = theta.tolist()
    return LossLaw(name, source, _exp(e), _exp(a), _exp(b), alpha, beta)


def _exp(value: float) -> float:
    # In a bootstrap sample with a single size, A is unbounded.
    return math.exp(min(value, LARGEST))


def fit_law(
    measured: Sequence[MeasuredLoss], draws: int = 200, share: float = 0.9, seed: int = 0, held: Exponents | None = None
) -> Fit:
    """Return the law fitted to runs, with intervals that contain `share` of `draws` bootstrap fits.

    `held`: exponents to use without fitting; None = fit both. Raises ConfigError if the runs are too few, do not differ
    in N and in D, or contain invalid numbers.
    """
    runs = _checked(measured)
    # The matrices of L-BFGS are 5 wide: with several BLAS threads it took 25 times as long.
    with threadpool_limits(1):
        return _fit(runs, draws, share, seed, held)


def fit_or_hold_exponents(measured: Sequence[MeasuredLoss], draws: int, share: float) -> Fit:
    """Return the law fitted to runs; if the runs do not determine an exponent, both exponents are fixed at PUBLISHED.

    An exponent is not determined if it is not between 0 and STEEPEST, or its interval is wider than WIDEST · exponent.
    Raises ConfigError as `fit_law` does.
    """
    free = fit_law(measured, draws, share)
    return fit_law(measured, draws, share, held=PUBLISHED) if open_exponents(free) else free


def open_exponents(fit: Fit) -> list[str]:
    """Return the names of the exponents that the runs of a fit do not determine."""
    exponents = [(name, getattr(fit.law, name), fit.intervals.get(name)) for name in ("alpha", "beta")]
    return [
        name
        for name, value, interval in exponents
        if not 0 < value <= STEEPEST or (interval is not None and interval.high - interval.low > WIDEST * value)
    ]


def _fit(runs: Floats, draws: int, share: float, seed: int, held: Exponents | None) -> Fit:
    grid = starts(held)
    losses = np.concatenate([objective(part, runs)[0] for part in np.array_split(grid, 45)])
    best = [_least(grid[index], runs, held) for index in np.argsort(losses, kind="stable")[:POLISHED]]
    least, theta = min(best, key=lambda minimum: minimum[0])
    random, drawn = np.random.default_rng(seed), []
    for _ in range(draws):
        sample = runs[random.integers(len(runs), size=len(runs))]
        drawn.append(_law(_least(theta, sample, held)[1], "", ""))
    intervals = {}
    for name in NAMES[:3] if held else (*NAMES, "exponent"):
        if drawn:
            intervals[name] = interval_of([_number(law, name) for law in drawn], share)
    return Fit(_law(theta, "own fit", f"L-BFGS over {len(runs)} runs"), least, intervals, len(runs), tuple(drawn), held)


def _number(law: LossLaw, name: str) -> float:
    if name == "exponent" and law.alpha + law.beta == 0:
        return math.nan
    return float(getattr(law, name))


def interval_of(values: Sequence[float], share: float) -> BootstrapInterval:
    """Return the central interval that contains `share` of the values."""
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2]).tolist()
    return BootstrapInterval(low, high)


def _checked(measured: Sequence[MeasuredLoss]) -> Floats:
    values = np.array([(run.params, run.tokens, run.loss) for run in measured], np.float64).reshape(-1, 3)
    wrong = [f"run {number}: {row}" for number, row in enumerate(values.tolist(), 1) if not _positive(row)]
    if wrong:
        raise ConfigError(
            f"fit-scaling: expected parameters, tokens and a loss above 0 for every run, got {'; '.join(wrong[:5])}. "
            "Correct these runs in the .csv file, or leave them out."
        )
    kinds = {run.kind: run.run for run in measured if run.kind}
    if len(kinds) > 1:
        (first, one), (second, other) = list(kinds.items())[:2]
        raise ConfigError(
            f"fit-scaling: expected losses of one kind, got the {first} of {one} and the {second} of {other}. Leave "
            "out one of the two kinds."
        )
    for name, column in (("sizes", 0), ("numbers of tokens", 1)):
        if len(set(values[:, column].tolist())) < 2:
            raise ConfigError(
                f"fit-scaling: expected runs of at least 2 different {name}, got {len(set(values[:, column]))}. Add "
                f"runs of other {name}."
            )
    if len(values) < FEWEST_RUNS:
        raise ConfigError(f"fit-scaling: expected at least {FEWEST_RUNS} runs, got {len(values)}. Add more runs.")
    return np.log(values)


def _positive(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)
