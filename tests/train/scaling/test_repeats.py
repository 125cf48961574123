"""Repeats, sizes for use, and FLOPs by appendix F, against published values and such as were computed elsewhere."""

import math

import pytest

from schemas.errors import ConfigError
from train.model.shape import ModelShape, num_parameters
from train.plan.rules import training_flops
from train.scaling.laws import APPROACH_3, BESIROGLU, for_lifetime, tokens_to_reach
from train.scaling.repeats import LAW, count_repeated_tokens, expected_loss, worth_of_params, worth_of_tokens

# ------------------------------------------------------------------------------------------------------------ repeats


@pytest.mark.parametrize(
    ("epochs", "worth"),
    [(1, 1), (2, 1.968199), (4, 3.725673), (8, 6.624119), (16, 10.582457), (40, 15.167465), (100, 16.363035)],
)
def test_epochs_are_worth(epochs: float, worth: float) -> None:
    assert worth_of_tokens(1e9, epochs * 1e9) == pytest.approx(worth * 1e9, abs=500)


def test_the_ends_of_repetition() -> None:
    assert worth_of_tokens(1e9, 0.25e9) == 0.25e9
    assert worth_of_tokens(1.0, 1e9) == pytest.approx(16.387756, abs=1e-6)
    assert worth_of_params(1e9, 1e6) == 1e6
    carried = 0.050987e9
    assert worth_of_params(1e9, carried) == pytest.approx(carried, rel=1e-4)
    assert worth_of_params(1e9, 1e15) == pytest.approx(carried * (1 + 5.309743), rel=1e-4)


@pytest.mark.parametrize(
    ("params", "tokens", "unique", "loss"),
    [(1e9, 20e9, 20e9, 2.564635), (1e9, 20e9, 5e9, 2.597458), (8.67e9, 178e9, 25e9, 2.226963)],
)
def test_loss_of_repeated_data(params: float, tokens: float, unique: float, loss: float) -> None:
    assert expected_loss(params, tokens, unique) == pytest.approx(loss, abs=1e-6)


def test_tokens_seen_once_follow_the_plain_law() -> None:
    assert LAW.scale == pytest.approx(0.225802, abs=1e-6)
    assert expected_loss(1e8, 1e11, 1e11) == pytest.approx(LAW.loss(1e8, 1e11), rel=1e-12)


def test_sources_are_repeated_one_by_one() -> None:
    found = count_repeated_tokens({"wiki": 8e9, "web": 2e9}, {"wiki": 2e9, "web": 10e9, "unused": 5e9})
    assert (found.tokens, found.unique) == (10e9, 12e9)
    assert found.worth == pytest.approx(2e9 * 3.725673 + 2e9, abs=1e3)
    assert found.share == pytest.approx(0.9451346, abs=1e-6)
    assert found.epochs == pytest.approx(10 / 12)
    assert found.seen == 4e9  # of the web its 2e9 alone


# ---------------------------------------------------------------------------------------------------- sizes for use


def test_a_model_that_nobody_uses_is_compute_optimal() -> None:
    found = for_lifetime(APPROACH_3, 2.0, 0)
    best = APPROACH_3.for_compute(found.size.compute)
    assert (found.size.params, found.size.tokens) == pytest.approx((best.params, best.tokens), rel=1e-6)


@pytest.mark.parametrize("law", [APPROACH_3, BESIROGLU], ids=lambda law: law.name)
def test_use_makes_models_smaller_and_nothing_is_cheaper(law) -> None:
    found = [for_lifetime(law, 2.1, tokens) for tokens in (0, 1e11, 1e12, 1e13)]
    sizes = [one.size.params for one in found]
    assert sizes == sorted(sizes, reverse=True)
    for one in found:
        assert law.loss(one.size.params, one.size.tokens) == pytest.approx(2.1, abs=1e-9)
        for factor in (0.9, 0.99, 1.01, 1.1):
            params = one.size.params * factor
            tokens = tokens_to_reach(law, params, 2.1)
            assert 6 * params * tokens + 2 * params * one.inference_tokens > one.compute * (1 + 1e-9)


def test_a_loss_below_the_floor_is_refused() -> None:
    assert tokens_to_reach(APPROACH_3, 1e6, 2.0) == math.inf
    with pytest.raises(
        ConfigError, match=r"expected a compute budget whose loss is above 1\.693, .* got a loss of 1\.5"
    ):
        for_lifetime(APPROACH_3, 1.5, 1e9)


# ------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(
    ("row", "printed", "without", "whole"),
    [
        ((640, 2560, 64, 10, 10), 1.03, 1.0252, 1.5801),
        ((1024, 4096, 64, 16, 20), 1.10, 1.1010, 1.3154),
        ((1280, 5120, 128, 10, 24), 1.08, 1.0830, 1.2313),
        ((1792, 7168, 128, 14, 26), 1.04, 1.0442, 1.1445),
        ((2048, 8192, 128, 16, 28), 1.03, 1.0330, 1.1153),
        ((3584, 14336, 128, 28, 40), 0.99, 0.9942, 1.0279),
    ],
)
def test_table_a4_in_both_readings(row: tuple[int, ...], printed: float, without: float, whole: float) -> None:
    """FLOPs by appendix F over 6ND, N with the embedding of 32,000 ids."""
    names = ("d_model", "d_ffw", "head_dim", "num_heads", "num_layers")
    options = {"activation": "gelu", "bias": True, "positions": "relative", "tie_embeddings": True}
    sizes = dict(zip(names, row, strict=True))
    shape = ModelShape(vocab_size=32_000, num_kv_heads=sizes["num_heads"], **sizes, **options)
    by_six = 6 * num_parameters(shape) * 2048
    found = [training_flops(shape, 2048, ends) / by_six for ends in (False, True)]
    assert found == pytest.approx([without, whole], abs=5e-5)
    assert found[0] == pytest.approx(printed, abs=0.0053)
