"""Tests of the published rules, against values the papers print or that follow from their constants."""

import pytest

from train.plan import rules


@pytest.mark.parametrize(
    ("compute", "rate", "batch"),
    [
        (1e18, 1.753e-3, 2.255e5),
        (1e20, 9.860e-4, 1.017e6),
        (1e22, 5.545e-4, 4.588e6),
        # The paper's own models: 7B with 4.2e-4 and 9.4M tokens, 67B with 3.2e-4 and 18.9M, both on 2T tokens.
        (6 * 7e9 * 2e12, 4.25e-4, 9.20e6),
        (6 * 67e9 * 2e12, 3.204e-4, 1.927e7),
    ],
)
def test_deepseek(compute: float, rate: float, batch: float) -> None:
    assert rules.deepseek_learning_rate(compute) == pytest.approx(rate, rel=2e-3)
    assert rules.deepseek_batch(compute) == pytest.approx(batch, rel=2e-3)


@pytest.mark.parametrize(
    ("params", "tokens", "rate", "batch"),
    [(125e6, 2.5e9, 2.317e-3, 1.348e5), (1e9, 20e9, 9.960e-4, 4.419e5), (7e9, 140e9, 4.520e-4, 1.342e6)],
)
def test_step_law(params: float, tokens: float, rate: float, batch: float) -> None:
    assert rules.step_law_learning_rate(params, tokens) == pytest.approx(rate, rel=1e-3)
    assert rules.step_law_batch(tokens) == pytest.approx(batch, rel=1e-3)


@pytest.mark.parametrize(
    ("params", "rate", "batch"), [(108e6, 0.0047, 327_680), (125e6, 4.477e-3, 3.612e5), (1e9, 2.238e-3, 1.445e6)]
)
def test_porian(params: float, rate: float, batch: float) -> None:
    assert rules.porian_learning_rate(params) == pytest.approx(rate, rel=0.01)
    assert rules.porian_batch(params) == pytest.approx(batch, rel=0.01)


def test_kaplan() -> None:
    assert rules.kaplan_learning_rate(125e6) == pytest.approx(6.38e-4, rel=2e-3)
