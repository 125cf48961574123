"""AdamW against a NumPy loop, the learning rate against values worked out by hand, clipping and the stop on NaN."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from train.config import TrainConfig
from train.model import Transformer, build_model
from train.optim import gradient_norm, learning_rate, make_optimizer, non_finite, set_step, update
from train.parallel import set_initial_weights
from train.shape import ModelShape

TINY = ModelShape(vocab_size=50, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, d_ffw=24, tie_embeddings=False)


def make(shape: ModelShape = TINY) -> Transformer:
    model = build_model(shape).to_empty(device="cpu")
    set_initial_weights(model, 0)
    return model


def set_gradients(model: Transformer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.25), (2, 0.5), (4, 1.0), (5, 0.1 + 0.9 * (1 + math.cos(math.pi / 8)) / 2), (8, 0.55), (12, 0.1)],
)
def test_learning_rate(step: int, expected: float) -> None:
    plan = SimpleNamespace(steps=12, warmup_steps=4, learning_rate=2e-3)
    assert learning_rate(step, plan, 0.1) == pytest.approx(2e-3 * expected, rel=1e-12)


@pytest.mark.parametrize(
    ("warmup", "steps", "step", "expected"), [(0, 2, 1, 0.5), (0, 2, 2, 0.0), (0, 1, 1, 0.0), (3, 3, 3, 1.0)]
)
def test_learning_rate_without_room(warmup: int, steps: int, step: int, expected: float) -> None:
    plan = SimpleNamespace(steps=steps, warmup_steps=warmup, learning_rate=1.0)
    assert learning_rate(step, plan, 0.0) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_updates_equal_adamw_in_numpy(tied: bool) -> None:
    config = TrainConfig(weight_decay=0.2, beta1=0.8, beta2=0.9, adam_eps=1e-6)
    model = make(TINY.model_copy(update={"tie_embeddings": tied}))
    optimizer = make_optimizer(model, config)
    expected = {name: value.detach().double().numpy().copy() for name, value in model.named_parameters()}
    first, second = ({name: np.zeros_like(value) for name, value in expected.items()} for _ in range(2))
    for step, rate in enumerate((1e-2, 3e-2, 2e-2), start=1):
        set_gradients(model, step)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.double().numpy()
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            decay = 0.2 if parameter.ndim == 2 and name != "embedding.weight" else 0.0
            hat = first[name] / (1 - 0.8**step), second[name] / (1 - 0.9**step)
            expected[name] = expected[name] * (1 - rate * decay) - rate * hat[0] / (np.sqrt(hat[1]) + 1e-6)
        update(model, optimizer, gradient_norm(model), math.inf, rate)
        assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_set_step_sets_the_bias_correction() -> None:
    """A second update from given moments, with the step set, equals the second of two."""
    models, optimizers = [make(), make()], []
    for model in models:
        optimizers.append(make_optimizer(model, TrainConfig()))
    for seed in (1, 2):
        set_gradients(models[0], seed)
        update(models[0], optimizers[0], gradient_norm(models[0]), math.inf, 1e-2)
        if seed == 1:
            models[1].load_state_dict(models[0].state_dict())
            for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                for moment in ("exp_avg", "exp_avg_sq"):
                    optimizers[1].state[other][moment].copy_(optimizers[0].state[one][moment])
    set_step(optimizers[1], 1)
    set_gradients(models[1], 2)
    update(models[1], optimizers[1], gradient_norm(models[1]), math.inf, 1e-2)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradient_norm_and_clipping() -> None:
    model = make()
    set_gradients(model, 1)
    gradients = np.concatenate([parameter.grad.double().numpy().ravel() for parameter in model.parameters()])
    norm = gradient_norm(model)
    assert norm.item() == pytest.approx(np.linalg.norm(gradients), rel=1e-6)
    seen = []
    optimizer = make_optimizer(model, TrainConfig())
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradient_norm(model).item()))
    update(model, optimizer, norm, 2 * norm.item(), 0.0)
    set_gradients(model, 1)
    update(model, optimizer, norm, norm.item() / 4, 0.0)
    assert seen == pytest.approx([norm.item(), norm.item() / 4], rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": math.nan, "gradient_norm": 1.0}, "step 17: promised a finite loss, found nan"),
        ({"loss": 2.0, "gradient_norm": math.inf}, "step 17: promised a finite gradient_norm, found inf"),
        ({"heldout_loss": -math.inf}, "step 17: promised a finite heldout_loss, found -inf"),
    ],
)
def test_non_finite(values: dict[str, float], message: str) -> None:
    assert message in str(non_finite(17, **values))


def test_finite_values_pass() -> None:
    assert non_finite(17, loss=2.0, gradient_norm=1e30, heldout_loss=None) is None
