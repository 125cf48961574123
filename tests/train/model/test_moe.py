"""The mixture of experts by hand: routing, capacity, losses, sizes; and that a gradient reaches everything."""

from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from tests.support.layout_cases import SHAPE
from train.config.settings import Settings
from train.model.count_own import count_model
from train.model.moe import MixtureFeedForward, MoeOptions, build
from train.model.own import build_any
from train.model.shape import OwnShape, active_parameters, flops_per_token, num_parameters
from train.parallel.own_memory import checkpoint_bytes_of_any, memory_of_any

LENGTH = 8


def shape_of(**options: Any) -> OwnShape:
    """Return the shape of a mixture, counted."""
    values = SHAPE.model_dump() | {"model": "train.model.moe:build", "max_positions": LENGTH, "options": options}
    return count_model(OwnShape.model_validate(values), [LENGTH], True)


def layer_of(longest: int = LENGTH, **options: Any) -> MixtureFeedForward:
    """Return a feed-forward of width 48 whose router sends a token to the expert of its largest first numbers.

    `longest`: tokens of the longest row of the run.
    """
    shape = shape_of(**options).model_copy(update={"max_positions": longest})
    layer = MixtureFeedForward(shape, MoeOptions.model_validate(options))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
        layer.router.weight.copy_(torch.eye(layer.options.experts, 48))
    return layer


def tokens(*largest: int) -> torch.Tensor:
    """Return a row of tokens, each of which has ln 3 at one place and 0 elsewhere."""
    x = torch.zeros(1, len(largest), 48)
    x[0, range(len(largest)), list(largest)] = torch.tensor(3.0).log()
    return x


def test_the_capacity_of_a_row_and_what_is_dropped() -> None:
    """Six tokens, three experts, factor 1: two each. Expert 0 is asked four times, so the last two are dropped."""
    layer = layer_of(longest=6, experts=3, top_k=1, capacity_factor=1.0)
    x = tokens(0, 0, 1, 0, 2, 0)
    y, _, figures = layer(x)
    assert figures[0, :4].tolist() == [4, 1, 1, 2]
    assert [bool(token.any()) for token in y[0]] == [True, True, True, False, True, False]
    # A second row has its own capacity.
    both, _, figures = layer(torch.cat((x, tokens(1, 1, 2, 2, 0, 0))))
    torch.testing.assert_close(both[:1], y)
    assert figures[:, 3].tolist() == [2, 0]


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.0}, {"capacity_factor": 0.5, "top_k": 3}])
def test_logits_depend_on_no_later_token_and_on_no_length(options: dict[str, Any]) -> None:
    model = build_any(shape_of(experts=4, **options), None, True).to_empty(device="cpu")
    drawn, half = torch.Generator().manual_seed(0), LENGTH // 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_weight(name, parameter.shape, 0))
        rows = torch.randint(10, 200, (32, LENGTH), generator=drawn)
        rows[:, :half] = rows[0, :half]
        logits = model(rows)[:, :half]
        torch.testing.assert_close(logits, logits[:1].expand_as(logits))
        torch.testing.assert_close(model(rows[:1, :half]), logits[:1])


def test_weights_and_losses_by_hand() -> None:
    """A token has exp(ln 3) = 3 against 1 and 1: probabilities 0.6, 0.2, 0.2, and Z = 5."""
    layer = layer_of(experts=3, top_k=1, balance=0.5, router_z=2.0)
    x = tokens(0, 0, 1)
    y, auxiliary, figures = layer(x)
    experts = layer.experts
    up, gate = experts.up[1] @ x[0, 2], experts.gate[1] @ x[0, 2]
    torch.testing.assert_close(y[0, 2], 0.6 * (experts.down[1] @ (torch.nn.functional.silu(gate) * up)))
    # Shares 2/3, 1/3, 0; mean probabilities 1.4/3, 1/3, 0.6/3.
    balance = 3 * (2 / 3 * 1.4 / 3 + 1 / 3 * 1 / 3)
    z = torch.tensor(5.0).log().item() ** 2
    assert figures[0, 4:].tolist() == pytest.approx([balance, z, 1])
    assert auxiliary.tolist() == pytest.approx([0.5 * balance + 2 * z])
    # Two experts: 0.6 and 0.2 are made to sum to 1.
    two = layer_of(experts=3, top_k=2)
    outputs = [
        two.experts.down[e] @ (torch.nn.functional.silu(two.experts.gate[e] @ x[0, 2]) * (two.experts.up[e] @ x[0, 2]))
        for e in range(3)
    ]
    others = [0.75 * outputs[1] + 0.25 * outputs[other] for other in (0, 2)]  # either of two equal ones
    assert any(torch.allclose(two(x)[0][0, 2], other, atol=1e-6) for other in others)


def test_the_sizes_are_those_of_the_parameters() -> None:
    shape = shape_of(experts=6, top_k=2, shared=1, d_expert=20, dense_layers=1)
    expert = 3 * 48 * 20
    attention = 2 * 48 * (48 + 24)
    sparse = attention + 2 * 48 + 6 * 48 + 7 * expert
    dense = attention + 2 * 48 + 3 * 48 * 80
    outside = 2 * 210 * 48 + 48
    assert num_parameters(shape) == outside + dense + 3 * sparse
    assert active_parameters(shape) == outside + dense + 3 * (sparse - 4 * expert)
    assert active_parameters(shape, False) == active_parameters(shape) - 2 * 210 * 48
    matrices = attention + 3 * 48 * 80 + 3 * (attention + 6 * 48 + 3 * expert) + 210 * 48
    assert flops_per_token(shape, LENGTH) == 6 * matrices + 12 * 4 * 48 * LENGTH
    # An expert of the default width: a token costs as much as in the transformer, and the router a little more.
    equal = flops_per_token(shape_of(experts=8, top_k=2), LENGTH) - flops_per_token(SHAPE, LENGTH)
    assert equal == 6 * 4 * 8 * 48


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 8), ("lamb", 8)])
def test_an_average_of_the_weights_takes_four_bytes_a_parameter(optimizer: str, states: int) -> None:
    shape = shape_of(experts=4)
    for ema, bytes_each in ((None, states), (0.9, states + 4)):
        settings = Settings.model_validate({"optim": {"optimizer": optimizer, "ema": ema}})
        memory = memory_of_any(shape, settings, 1, (LENGTH, 2))
        assert memory.moments["update"]["states"] == bytes_each * num_parameters(shape)
        assert checkpoint_bytes_of_any(shape, settings) == (4 + bytes_each) * num_parameters(shape)


def test_the_number_of_positions_that_were_counted_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"expected FLOPs of train\.model\.moe:build for 9 positions"):
        flops_per_token(shape_of(), 9)


def test_every_parameter_learns_and_experts_start_differently() -> None:
    shape = shape_of(experts=4, top_k=2)
    model = build_any(shape, None, True).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_weight(name, parameter.shape, 0))
    up = dict(model.named_parameters())["blocks.0.ffn.experts.up"]
    assert up.shape == (4, 40, 48)
    assert up.std().item() == pytest.approx((2 / (5 * 48)) ** 0.5, rel=0.05)
    assert not torch.equal(up[0], up[1])
    ids = torch.randint(0, 210, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    model(ids, None, ids.roll(-1, 1)).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 1}, "experts: Input should be greater than or equal to 2"),
        ({"top": 2}, "top: Extra inputs are not permitted"),
        ({"experts": 2, "top_k": 3}, "expected top_k of at most experts = 2, got 3"),
        ({"dense_layers": 4}, "got 4"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    values = SHAPE.model_dump() | {"model": "train.model.moe:build", "max_positions": LENGTH, "options": options}
    with pytest.raises(ConfigError, match=message):
        build(OwnShape.model_validate(values), True)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"activation": "relu2"}, r"plan\.activation = relu2"),
        ({"activation": "gelu_tanh"}, r"plan\.activation = gelu_tanh"),
        ({"norm": "layernorm", "bias": True}, r"plan\.bias = true, plan\.norm = layernorm"),
        ({"norm_position": "post"}, r"plan\.norm_position = post"),
        ({"positions": "learned"}, r"plan\.positions = learned"),
        ({"num_token_types": 2, "head_transform": True}, r"plan\.num_token_types = 2, plan\.head_transform = true"),
    ],
)
def test_parts_that_the_mixture_lacks_are_refused(changes: dict[str, Any], got: str) -> None:
    values = SHAPE.model_dump() | {"model": "train.model.moe:build", "max_positions": LENGTH} | changes
    with pytest.raises(ConfigError, match=f"plan.model = moe: expected .* got {got}"):
        build(OwnShape.model_validate(values), True)


def test_relative_positions_cost_as_much_as_in_the_transformer() -> None:
    relative = SHAPE.model_copy(update={"positions": "relative"})
    added = flops_per_token(relative, LENGTH) - flops_per_token(SHAPE, LENGTH)
    values = relative.model_dump() | {"model": "train.model.moe:build", "max_positions": LENGTH}
    own = count_model(OwnShape.model_validate(values | {"options": {"experts": 4}}), [LENGTH], True)
    assert flops_per_token(own, LENGTH) - flops_per_token(shape_of(experts=4), LENGTH) == added
    width = SHAPE.query_width
    assert added == SHAPE.num_layers * (4 * SHAPE.d_model * width + 6 * width * LENGTH)
