"""muP: shapes, initial weights, rates and factors by width, and a coordinate check with and without it."""

import math

import pytest
import torch

from schemas.errors import ConfigError
from tests.support.model_oracle import some_ids
from train.config.optim import OPTIMIZERS
from train.config.plan import PlanConfig
from train.config.settings import load_settings
from train.eval.coordinates import MAX_GROWTH, Coordinates, check_coordinates, describe_check, growth
from train.export.llama import without_scales
from train.model.shape import ModelShape, choose_shape
from train.model.transformer import Transformer, build_model, initial_weight
from train.optim.optimizer import make_optimizer, update

BASE = 32


def shape_of(width: int, parametrization: str = "mup", **changes) -> ModelShape:
    base = {"mup_base_width": BASE} if parametrization == "mup" else {}
    given = {"d_model": width, "num_layers": 2, "parametrization": parametrization, "tie_embeddings": False}
    return choose_shape(1e5, 97, PlanConfig.model_validate(given | base | changes))


def model_of(shape: ModelShape) -> Transformer:
    model = build_model(shape).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, shape, 0))
    return model


def test_at_the_base_width_both_parametrizations_are_the_same() -> None:
    assert shape_of(BASE) == shape_of(BASE, "standard")


@pytest.mark.parametrize(("changes", "base_head"), [({}, 16), ({"num_heads": 4, "num_kv_heads": 4}, 8)])
def test_a_wider_shape_has_its_scales(changes: dict, base_head: int) -> None:
    shape = shape_of(4 * BASE, **changes)
    assert (shape.width_multiplier, shape.head_dim) == (4.0, 32)
    # Scores are (q·k) / sqrt(base head) · base head / head: in proportion to 1 / head.
    assert shape.query_scale / math.sqrt(shape.head_dim) == pytest.approx(math.sqrt(base_head) / shape.head_dim)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.weight", 1.0),
        ("head.weight", 1.0),
        ("blocks.0.attention.query.weight", 0.25),
        ("blocks.1.ffn.up.weight", 0.25),
        ("transform.dense.weight", 0.25),
    ],
)
def test_initial_deviations(name: str, expected: float) -> None:
    """Those of the embedding and the output do not change with the width; variances of the others are as 1 / width."""
    shape, size = shape_of(16 * BASE), torch.Size((400, 400))
    narrow = initial_weight(name, size, shape_of(BASE), 0).std().item()
    assert initial_weight(name, size, shape, 0).std().item() / narrow == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"qk_norm": True}, {"bias": True}])
def test_a_model_without_factors_computes_the_same(changes: dict) -> None:
    """The factors of queries and logits are in the matrices of the model that is exported."""
    shape, ids = shape_of(4 * BASE, **changes), some_ids()
    model = model_of(shape)
    state, plain = without_scales({name: p.detach() for name, p in model.named_parameters()}, shape)
    other = build_model(plain).to_empty(device="cpu")
    assert not other.load_state_dict(state, strict=True).missing_keys
    assert (plain.width_multiplier, plain.query_scale, plain.tie_embeddings) == (1, 1, False)
    torch.testing.assert_close(other(ids), model(ids), rtol=1e-4, atol=1e-6)
    unscaled = model_of(shape.model_copy(update={"width_multiplier": 1.0}))
    for (_, theirs), (_, ours) in zip(unscaled.named_parameters(), model.named_parameters(), strict=True):
        theirs.data.copy_(ours.data)
    torch.testing.assert_close(model(ids) * 4, unscaled(ids), rtol=1e-4, atol=1e-6)


def test_adamw_has_rates_by_parameter() -> None:
    """As torch's own AdamW with a group for each: the rate of a layer's matrix by a quarter, the decay unchanged."""
    models = [model_of(shape_of(4 * BASE)) for _ in range(2)]
    for model in models:
        model(some_ids()).square().mean().backward()
    settings = load_settings({"optim": {"weight_decay": 0.1}}, [], "test")
    update(make_optimizer(dict(models[0].named_parameters()), settings.optim, width_multiplier=4.0), 1e-2)
    groups = []
    for name, parameter in models[1].named_parameters():
        factor = 0.25 if name.startswith("blocks.") and parameter.ndim == 2 else 1.0
        decay = 0.1 if parameter.ndim == 2 and name != "embedding.weight" else 0.0
        groups.append({"params": [parameter], "lr": 1e-2 * factor, "weight_decay": decay / factor})
    torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8).step()
    for (name, ours), (_, theirs) in zip(*(model.named_parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, msg=name)


def test_muon_has_half_the_power() -> None:
    models = [model_of(shape_of(4 * BASE)) for _ in range(2)]
    settings = load_settings({"optim": {"optimizer": "muon", "weight_decay": 0.0}}, [], "test")
    moved = []
    for model, width in zip(models, (4.0, 1.0), strict=True):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(some_ids()).square().mean().backward()
        update(make_optimizer(dict(model.named_parameters()), settings.optim, width_multiplier=width), 1e-2)
        moved.append({name: (p.detach() - before[name]).norm() for name, p in model.named_parameters()})
    for name, norm in moved[0].items():
        factor = 0.5 if name.startswith("blocks.") and name.endswith("weight") and "norm" not in name else 1.0
        assert norm.item() == pytest.approx(factor * moved[1][name].item(), rel=1e-3), name


BERT = {
    **{"norm": "layernorm", "norm_position": "post", "positions": "learned", "max_positions": 64, "bias": True},
    **{"activation": "gelu", "head_transform": True, "num_token_types": 2},
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_matrix_of_the_head_of_bert_has_the_rate_of_a_hidden_matrix(optimizer: str) -> None:
    """AdamW updates it with either optimizer, so its rate falls with the width, not with the root of it."""
    parameters = dict(model_of(shape_of(4 * BASE, **BERT)).named_parameters())
    settings = load_settings({"optim": {"optimizer": optimizer}}, [], "test")
    made = make_optimizer(parameters, settings.optim, width_multiplier=4.0)
    rates = {member.name: member.rate_multiplier for member in made.members}
    by_id = ("embedding.weight", "head.weight", "extra.positions.weight", "extra.types.weight")
    assert {name: rates[name] for name in by_id} == dict.fromkeys(by_id, 1.0)
    assert (rates["transform.dense.weight"], rates["transform.dense.bias"]) == (0.25, 1.0)
    assert rates["blocks.0.ffn.up.weight"] == (0.25 if optimizer == "adamw" else 0.5)


def test_optimizers_without_known_rates_are_declared() -> None:
    assert {name for name, row in OPTIMIZERS.items() if row.width_power is not None} >= {"adamw", "muon"}
    assert OPTIMIZERS["lamb"].width_power is None


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"mup_base_width": 64}, "mup_base_width requires parametrization = mup"),
        ({"parametrization": "mup", "positions": "relative"}, "parametrization = mup requires positions = rope"),
    ],
)
def test_settings_without_effect_are_refused(plan: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({"plan": plan}, [], "test")


def checked(parametrization: str, optimizer: str, changes: dict | None = None) -> list[Coordinates]:
    plan = (
        {"parametrization": parametrization}
        | (changes or {})
        | ({"mup_base_width": BASE} if parametrization == "mup" else {})
    )
    settings = load_settings({"plan": plan, "optim": {"optimizer": optimizer}}, [], "test")
    return check_coordinates(settings, 256, BASE)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_coordinates_with_and_without_mup(optimizer: str) -> None:
    """Over widths of 32 to 256: with muP nothing moves further in a wider model, without it most places do."""
    with_mup, without = checked("mup", optimizer), checked("standard", optimizer)
    assert [model.width for model in with_mup] == [32, 64, 128, 256]
    assert max(growth(with_mup, place) for place in with_mup[0].moved[-1]) < 1.1 < MAX_GROWTH
    assert max(growth(without, place) for place in without[0].moved[-1]) > 1.25
    assert with_mup[0].moved == without[0].moved  # the base width
    assert "activations move alike at all widths" in describe_check(with_mup, "mup")[-1]
    assert "a learning rate is right for one width only" in describe_check(without, "standard")[-1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_coordinates_with_the_head_of_bert(optimizer: str) -> None:
    with_mup, without = checked("mup", optimizer, BERT), checked("standard", optimizer, BERT)
    assert growth(with_mup, "head") < 1.1
    assert growth(without, "head") > 1.2
