"""The fit of a law finds the numbers that runs were made from, and says how sure it is."""

import math

import numpy as np
import pytest

from schemas.errors import ConfigError
from train.scaling import fit
from train.scaling.fit import MeasuredLoss, fit_law, objective, starts
from train.scaling.laws import APPROACH_3, BESIROGLU, LossLaw


def runs_of(law: LossLaw, number: int, noise: float, seed: int = 1) -> list[MeasuredLoss]:
    """Runs of 40 million to 16 billion parameters whose losses are off by a share of `noise`."""
    random = np.random.default_rng(seed)
    sizes = zip(10 ** random.uniform(7.6, 10.2, number), 10 ** random.uniform(9, 11.5, number), strict=True)
    return [MeasuredLoss(n, d, law.loss(n, d) * math.exp(random.normal() * noise)) for n, d in sizes]


def test_the_gradient_is_that_of_the_objective() -> None:
    runs = np.log([(one.params, one.tokens, one.loss) for one in runs_of(BESIROGLU, 30, 0.003)])
    theta = np.array([[6.0, 7.0, 0.6, 0.35, 0.36], [5.0, 0.0, -1.0, 0.0, 2.0]])
    _, slopes = objective(theta, runs)
    for place in range(5):
        step = np.zeros(5)
        step[place] = 1e-6
        expected = (objective(theta + step, runs)[0] - objective(theta - step, runs)[0]) / 2e-6
        assert slopes[:, place] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert len(starts()) == 6 * 6 * 5 * 5 * 5


@pytest.mark.parametrize("law", [BESIROGLU, APPROACH_3], ids=lambda law: law.name)
def test_runs_without_noise_give_the_law_back(law: LossLaw) -> None:
    found = fit_law(runs_of(law, 25, 0.0), draws=0)
    for name in ("floor", "a", "b", "alpha", "beta"):
        assert getattr(found.law, name) == pytest.approx(getattr(law, name), rel=1e-3)
    assert found.objective < 1e-12
    assert found.intervals == {}


def test_intervals_hold_the_law_that_noisy_runs_come_from() -> None:
    found = fit_law(runs_of(BESIROGLU, 80, 0.004), draws=60)
    for name, interval in found.intervals.items():
        truth = getattr(BESIROGLU, name)
        assert interval.low < getattr(found.law, name) < interval.high
        assert interval.low < truth < interval.high
    assert set(found.intervals) == {"floor", "a", "b", "alpha", "beta", "exponent"}
    narrow, wide = (fit_law(runs_of(BESIROGLU, 80, noise), draws=20).intervals["floor"] for noise in (0.001, 0.01))
    assert narrow.high - narrow.low < 0.3 * (wide.high - wide.low)


def test_a_few_wild_runs_hardly_move_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the Huber loss is for; a fit of least squares is the control, and moves far."""
    runs = runs_of(BESIROGLU, 60, 0.002)
    wild = [*runs[:-3], *(MeasuredLoss(one.params, one.tokens, one.loss * 1.5) for one in runs[-3:])]
    found = fit_law(wild, draws=0).law
    assert found.floor == pytest.approx(BESIROGLU.floor, rel=0.02)
    assert found.exponent == pytest.approx(BESIROGLU.exponent, abs=0.03)
    monkeypatch.setattr(fit, "DELTA", 1e3)
    squares = fit_law(wild, draws=0).law
    assert abs(squares.floor - BESIROGLU.floor) > 3 * abs(found.floor - BESIROGLU.floor)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "expected runs of at least 2 different sizes, got 0"),
        ([MeasuredLoss(1e9, 10**d, 3.0) for d in range(8, 16)], "expected runs of at least 2 different sizes, got 1"),
        (
            [MeasuredLoss(10**n, 1e9, 3.0) for n in range(6, 14)],
            "expected runs of at least 2 different numbers of tokens, got 1",
        ),
        (
            [MeasuredLoss(10**n, 10**n, 3.0, f"run-{n}", kind=f"loss {n % 2}") for n in range(6, 14)],
            "expected losses of one kind, got the loss 0 of run-12 and the loss 1 of run-13. Leave out",
        ),
        ([MeasuredLoss(10**n, 10**n, 3.0) for n in range(6, 11)], "expected at least 6 runs, got 5"),
        ([MeasuredLoss(1e9, 1e9, math.nan)] * 8, r"expected .* a loss above 0 for every run, got run 1: \[1"),
        ([MeasuredLoss(0, 1e9, 3.0)] * 8, r"got run 1: \[0\.0, 1000000000\.0, 3\.0\]; .*run 5: [^;]*\. Correct"),
    ],
)
def test_runs_that_no_law_can_be_fitted_to(runs: list[MeasuredLoss], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_law(runs)
