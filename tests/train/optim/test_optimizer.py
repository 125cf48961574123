"""Every optimizer against float64 loops in NumPy and torch's own; weight decay, state, and the gradient norm."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from schemas.errors import ContractError
from train.config.optim import OPTIMIZERS, OptimConfig
from train.config.settings import Settings, load_settings
from train.model.shape import ModelShape, num_parameters
from train.model.transformer import build_model
from train.optim.muon import COEFFICIENTS, QUINTIC, orthogonalize
from train.optim.optimizer import Optimizer, clear_gradients, make_optimizer, set_step, state_tensors, update
from train.optim.parameter import Gradients, gradient_norm, squared_norms
from train.parallel.devices import device_of
from train.parallel.memory import checkpoint_bytes, memory_of_rank
from train.plan.search.compute import Compute

SHAPES = {
    "embedding.weight": (30, 8),
    "blocks.0.up.weight": (24, 8),
    "blocks.0.up.bias": (24,),
    "blocks.0.attention.bias": (2, 4),
    "blocks.1.down.weight": (8, 24),
    "norm.weight": (8,),
    "head.weight": (30, 8),
}
DECAYING = {"blocks.0.up.weight", "blocks.1.down.weight", "head.weight"}
RATES = (1e-2, 3e-2, 2e-2, 1e-2)
Array = np.ndarray[Any, np.dtype[np.float64]]
Rule = Callable[[str, Array, Array, dict[str, Any], float, int], Array]


def make(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for name, shape in SHAPES.items()}


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    """Gradients whose norms differ by step and by row; one row is zero."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3)
        gradient.mul_(torch.linspace(0, 2, len(gradient)).view(-1, *[1] * (gradient.ndim - 1)))
        parameter.grad = gradient


def decay_of(name: str, config: OptimConfig) -> float:
    return config.weight_decay if name in DECAYING | ({"embedding.weight"} if config.decay_embeddings else set()) else 0


def adam_direction(g: Array, state: dict[str, Any], step: int) -> Array:
    state["m"] = 0.8 * state.get("m", 0) + 0.2 * g
    state["v"] = 0.9 * state.get("v", 0) + 0.1 * g**2
    return state["m"] / (1 - 0.8**step) / (np.sqrt(state["v"] / (1 - 0.9**step)) + 1e-6)


def adamw(name: str, x: Array, g: Array, state: dict[str, Any], decay: float, step: int) -> Array:
    return adam_direction(g, state, step) + decay * x


def lamb(name: str, x: Array, g: Array, state: dict[str, Any], decay: float, step: int) -> Array:
    direction = adam_direction(g, state, step) + decay * x
    matrix = x.ndim == 2 and "bias" not in name
    return direction * (np.linalg.norm(x) / np.linalg.norm(direction) if matrix else 1)


def adafactor(name: str, x: Array, g: Array, state: dict[str, Any], decay: float, step: int) -> Array:
    beta, squares = 1 - step**-0.8, g**2 + 1e-30
    if x.ndim == 2 and "bias" not in name:
        state["r"] = beta * state.get("r", 0) + (1 - beta) * squares.sum(1)
        state["c"] = beta * state.get("c", 0) + (1 - beta) * squares.sum(0)
        moment = np.outer(state["r"], state["c"]) / state["r"].sum()
    else:
        moment = state["v"] = beta * state.get("v", 0) + (1 - beta) * squares
    direction = g / np.sqrt(moment)
    return direction / max(1, np.sqrt((direction**2).mean())) + decay * x


def muon(name: str, x: Array, g: Array, state: dict[str, Any], decay: float, step: int) -> Array:
    if not name.startswith("blocks.") or x.ndim != 2 or "bias" in name:
        return adamw(name, x, g, state, decay, step)
    state["b"] = 0.7 * state.get("b", 0) + 0.3 * g
    left, values, right = np.linalg.svd(0.3 * g + 0.7 * state["b"], full_matrices=False)
    values /= np.sqrt((values**2).sum())
    for _ in range(5):
        values = QUINTIC[0] * values + QUINTIC[1] * values**3 + QUINTIC[2] * values**5
    return 0.2 * math.sqrt(max(x.shape)) * left @ np.diag(values) @ right + decay * x


ORACLES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "adamw": (adamw, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}),
    "lamb": (lamb, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}),
    "adafactor": (adafactor, {}),
    "muon": (muon, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "momentum": 0.7}),
}


@pytest.mark.parametrize("decay_embeddings", [False, True])
@pytest.mark.parametrize("name", ORACLES)
def test_updates_equal_numpy(name: str, decay_embeddings: bool) -> None:
    rule, settings = ORACLES[name]
    config = OptimConfig(optimizer=name, weight_decay=0.2, decay_embeddings=decay_embeddings, **settings)
    parameters = make()
    expected = {key: p.detach().double().numpy().copy() for key, p in parameters.items()}
    states: dict[str, dict[str, Any]] = {key: {} for key in parameters}
    optimizer = make_optimizer(parameters, config)
    for step, rate in enumerate(RATES, start=1):
        set_gradients(parameters, step)
        for key, parameter in parameters.items():
            g, x = parameter.grad.double().numpy(), expected[key]
            expected[key] = x - rate * rule(key, x, g, states[key], decay_of(key, config), step)
        update(optimizer, rate)
        assert all(parameter.grad is None for parameter in parameters.values())
    for key, parameter in parameters.items():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[key], rtol=0, atol=1e-6, err_msg=key)


TORCHS: dict[str, tuple[Callable[[list[Tensor]], torch.optim.Optimizer], dict[str, Any], float]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), weight_decay=0.1, fused=True), {}, 0.0),
    # With a floor of 1 under the size of the weights, and rates under 1/√t, torch's rate is absolute too.
    "adafactor": (lambda p: torch.optim.Adafactor(p, eps=(1e-15, 1.0), weight_decay=0.1), {}, 2e-6),
    "muon": (
        lambda p: torch.optim.Muon(p, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        {"muon_precision": "bf16"},
        1e-3,
    ),
}


@pytest.mark.parametrize("shape", [(40, 64), (64, 40)])
@pytest.mark.parametrize("name", TORCHS)
def test_updates_equal_torchs_own(name: str, shape: tuple[int, int]) -> None:
    """The gradients are transposed in memory, which torch's fused kernel misreads on a CPU."""
    kind, settings, tolerance = TORCHS[name]
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = make_optimizer({"blocks.0.weight": ours}, OptimConfig(optimizer=name, **settings))
    reference = kind([theirs])
    for step, rate in enumerate(RATES, start=1):
        gradient = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(step)).T
        ours.grad, theirs.grad = gradient.clone(memory_format=torch.preserve_format), gradient.contiguous()
        update(optimizer, rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
    distance = (ours - theirs).norm() / (theirs - start).norm()
    assert distance.item() <= tolerance


@pytest.mark.parametrize("shape", [(3, 16, 40), (1, 40, 16), (2, 24, 24)])
def test_orthogonal_keeps_the_directions(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for matrix, actual in zip(matrices, orthogonalize(matrices), strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        core = left.T @ actual @ right.T
        assert (core - core.diag().diag()).abs().max() < 1e-4
        assert core.diag().max() < 1.25
        assert core.diag()[:8].min() > 0.6
    assert orthogonalize(torch.zeros(1, 4, 6)).abs().max() == 0


def test_polar_express_comes_closer_to_orthogonal() -> None:
    """Singular values of 1e-3 of the norm and more reach the bounds that its polynomials have on [1e-3, 1]."""
    values = torch.logspace(-2.7, 0, 12, dtype=torch.double)
    values /= values.norm()
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.double))[0] for _ in "lr")
    reached = {
        name: torch.linalg.svdvals(orthogonalize((left * values @ right)[None], steps)[0])
        for name, steps in COEFFICIENTS.items()
    }
    assert 0.84 < reached["polar_express"].min() < reached["polar_express"].max() < 1.13
    assert reached["jordan"].min() < 0.75
    assert (reached["polar_express"] - 1).abs().mean() < 0.7 * (reached["jordan"] - 1).abs().mean()


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_a_stack_is_updated_matrix_by_matrix(name: str) -> None:
    """The experts of a layer, of very different sizes; the update of one is zero."""
    sizes = torch.tensor([0.01, 1.0, 0.0, 10.0])[:, None, None]
    stack = sizes * torch.randn(4, 24, 8, generator=torch.Generator().manual_seed(1))
    gradients = [torch.randn(4, 24, 8, generator=torch.Generator().manual_seed(step)) for step in (2, 3)]
    config = OptimConfig(optimizer=name, weight_decay=0.2)
    whole = nn.Parameter(stack.clone())
    parts = {f"blocks.0.{number}.weight": nn.Parameter(own.clone()) for number, own in enumerate(stack)}
    together, apart = make_optimizer({"blocks.0.experts.up": whole}, config), make_optimizer(parts, config)
    for gradient in gradients:
        gradient[1] = 0
        whole.grad = gradient.clone()
        for part, own in zip(parts.values(), gradient, strict=True):
            part.grad = own.clone()
        update(together, 1e-2)
        update(apart, 1e-2)
    torch.testing.assert_close(whole.detach(), torch.stack([*parts.values()]).detach(), rtol=1e-5, atol=1e-8)


def test_normuon_by_its_formula() -> None:
    """Two updates against algorithm 1: rows by the root of their running mean square, then the size of Muon."""
    parameter = nn.Parameter(torch.zeros(6, 10))
    config = OptimConfig(optimizer="normuon", weight_decay=0.0)
    optimizer = make_optimizer({"blocks.0.up.weight": parameter}, config)
    momentum, squares, expected = torch.zeros(6, 10), torch.zeros(6), torch.zeros(6, 10)
    for step in (1, 2):
        gradient = torch.randn(6, 10, generator=torch.Generator().manual_seed(step)) * torch.arange(1.0, 7.0)[:, None]
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = orthogonalize((0.05 * gradient + 0.95 * momentum)[None])[0]
        squares = 0.95 * squares + 0.05 * direction.square().mean(1)
        direction = direction / squares.sqrt()[:, None]
        expected -= 1e-2 * 0.2 * 60**0.5 * direction / direction.norm()
        parameter.grad = gradient.clone()
        update(optimizer, 1e-2)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-7)
    assert optimizer.members[0].state["row_square"].tolist() == pytest.approx(squares.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", {"exp_avg", "exp_avg_sq"}),
        ("lamb", {"exp_avg", "exp_avg_sq"}),
        ("adafactor", {"row_mean", "column_mean"}),
        ("muon", {"momentum"}),
        ("normuon", {"momentum", "row_square"}),
    ],
)
def test_state_exists_from_the_beginning(name: str, expected: set[str]) -> None:
    state = state_tensors(make_optimizer(make(), OptimConfig(optimizer=name)))
    assert {key.removesuffix(".blocks.0.up.weight") for key in state if "up.weight" in key} == expected
    vector = {key.removesuffix(".norm.weight") for key in state if key.endswith(".norm.weight") and "blocks" not in key}
    assert vector == ({"exp_avg_sq"} if name == "adafactor" else {"exp_avg", "exp_avg_sq"})
    assert all(not value.any() for value in state.values())
    if name == "adafactor":
        assert sum(value.numel() for value in state.values()) == (38 + 32 + 24 + 8 + 32 + 8 + 38)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_state_continues_bit_for_bit(name: str) -> None:
    left, right = make(), make(seed=1)
    first, second = (make_optimizer(parameters, OptimConfig(optimizer=name)) for parameters in (left, right))
    for step, rate in enumerate(RATES, start=1):
        set_gradients(left, step)
        update(first, rate)
        if step == 2:
            for key, value in state_tensors(second).items():
                value.copy_(state_tensors(first)[key])
            for key, parameter in right.items():
                parameter.data.copy_(left[key])
            set_step(second, 2)
        if step > 2:
            set_gradients(right, step)
            update(second, rate)
    assert first.step == second.step == 4
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_parameter_without_a_gradient_stops_the_update_before_any_change() -> None:
    parameters = make()
    optimizer = make_optimizer(parameters, OptimConfig())
    set_gradients(parameters, 1)
    parameters["head.weight"].grad = None
    with pytest.raises(ContractError, match=r"expected a gradient for head\.weight, got none"):
        update(optimizer, 1.0)
    assert optimizer.step == 0
    assert all(torch.equal(parameters[key], value) for key, value in make().items())
    clear_gradients(optimizer)
    assert all(parameter.grad is None for parameter in parameters.values())


def fit(optimizer: Optimizer, parameters: dict[str, nn.Parameter], rate: float) -> tuple[float, float]:
    """Return the mean square error of a two-layer regression, before and after 300 updates with linear decay."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(256, 8, generator=generator)
    y = (x @ torch.randn(8, 24, generator=generator)).relu() @ torch.randn(24, 8, generator=generator) / 8
    losses = []
    for step in range(301):
        hidden = nn.functional.linear(x, parameters["blocks.0.up.weight"], parameters["blocks.0.up.bias"]).relu()
        actual = nn.functional.linear(hidden, parameters["blocks.1.down.weight"]) * parameters["norm.weight"]
        loss = (actual - y).square().mean()
        losses.append(loss.item())
        loss.backward()
        update(optimizer, rate * (1 - step / 301))
    return losses[0], losses[-1]


@pytest.mark.parametrize(("name", "rate"), [("adamw", 0.02), ("adafactor", 0.02), ("lamb", 0.05), ("muon", 0.02)])
def test_a_regression_is_learned(name: str, rate: float) -> None:
    parameters = {key: p for key, p in make().items() if key.startswith(("blocks", "norm")) and "attention" not in key}
    with torch.no_grad():
        parameters["norm.weight"].fill_(1.0)
        parameters["blocks.0.up.bias"].zero_()
    optimizer = make_optimizer(parameters, OptimConfig(optimizer=name, weight_decay=0.0))
    before, after = fit(optimizer, parameters, rate)
    assert after < before / 50


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_scale_of_gradients_is_a_tensor(name: str) -> None:
    """Division by the optimizer, or before it, results in the same bits."""
    left, right = make(), make()
    first, second = (make_optimizer(parameters, OptimConfig(optimizer=name)) for parameters in (left, right))
    for step, rate in enumerate(RATES, start=1):
        scale = torch.tensor(1.0 + 2 * step)
        for parameters in (left, right):
            set_gradients(parameters, step)
        for parameter in right.values():
            parameter.grad.div_(scale)
        update(first, rate, Gradients(left).take(), scale)
        update(second, rate)
    assert all(torch.equal(left[key], right[key]) for key in left)


def bits(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return weights and states with their bits as integers, so that -0.0 differs from 0.0."""
    tensors = {key: value.detach() for key, value in parameters.items()} | state_tensors(optimizer)
    return {key: value.clone().view(torch.int32) for key, value in tensors.items()}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False], ids=["first update", "later update"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_update_changes_no_bit_and_is_not_counted(name: str, first: bool, bad: float) -> None:
    parameters, twin = make(), make()
    for these in (parameters, twin):
        with torch.no_grad():
            these["blocks.0.up.weight"][0, :2] = -0.0
    optimizer, reference = (make_optimizer(p, OptimConfig(optimizer=name)) for p in (parameters, twin))
    for step in () if first else (1, 2):
        for these, its in ((parameters, optimizer), (twin, reference)):
            set_gradients(these, step)
            update(its, 1e-2, Gradients(these).take())
    before = bits(optimizer, parameters)
    set_gradients(parameters, 3)
    for parameter in parameters.values():
        parameter.grad.view(-1)[::2] = bad
    gradients = Gradients(parameters)
    gradients.take()
    norm = gradients.norm()
    update(optimizer, 1e-2, gradients.taken, norm.float(), (~norm.isfinite()).float())
    after = bits(optimizer, parameters)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    assert optimizer.step == (0 if first else 2)
    assert all(parameter.grad is None for parameter in parameters.values())
    # The next update is the same as without the skipped update.
    for these, its in ((parameters, optimizer), (twin, reference)):
        set_gradients(these, 4)
        update(its, 1e-2, Gradients(these).take(), None, torch.zeros(()))
    actual, expected = bits(optimizer, parameters), bits(reference, twin)
    assert [key for key in actual if not torch.equal(actual[key], expected[key])] == []
    assert optimizer.step == reference.step


def test_a_gradient_that_is_not_finite_spreads_unless_it_is_skipped() -> None:
    """Without the flag every rule writes NaN, so that the test before is meaningful."""
    for name in OPTIMIZERS:
        parameters = make()
        optimizer = make_optimizer(parameters, OptimConfig(optimizer=name))
        set_gradients(parameters, 1)
        for parameter in parameters.values():
            parameter.grad.view(-1)[::2] = math.nan
        update(optimizer, 1e-2)
        assert not all(parameter.isfinite().all() for parameter in parameters.values()), name


# ------------------------------------------------------------------------------------------------------- the registry

MODEL = ModelShape(
    vocab_size=30,
    num_layers=2,
    d_model=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ffw=24,
    bias=True,
    tie_embeddings=False,
)


def settings_of(name: str) -> Settings:
    return load_settings({"optim": {"optimizer": name}}, [], "test").for_device("cpu")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_row_has_the_bytes_of_the_state(name: str) -> None:
    """Of every parameter of a model after two updates; the sum is what the memory estimate and a checkpoint count."""
    parameters, row = dict(build_model(MODEL).to_empty(device="cpu").named_parameters()), OPTIMIZERS[name]
    for number, parameter in enumerate(parameters.values()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    optimizer, total = make_optimizer(parameters, settings_of(name).optim), 0
    for step in (1, 2):
        set_gradients(parameters, step)
        update(optimizer, 1e-2)
    assert not [key for key, parameter in parameters.items() if torch.equal(parameter, before[key])]
    for member in optimizer.members:
        numbers = member.parameter.numel()
        state = (row if member.name.startswith("blocks.") and member.is_matrix else row.of_others).state
        sides = state.side * sum(member.parameter.shape) + state.row * member.parameter.shape[0]
        expected = state.matrix * numbers + sides if member.is_matrix else state.vector * numbers
        assert sum(value.nbytes for value in member.state.values()) == expected, member.name
        total += expected
    assert memory_of_rank(MODEL, settings_of(name), 1, 64, 8).moments["update"]["states"] == total
    assert checkpoint_bytes(MODEL, settings_of(name)) == 4 * num_parameters(MODEL) + total


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_and_cost_follow_the_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, device = OPTIMIZERS[name], device_of("cpu")

    def estimates() -> tuple[int, int, float]:
        need = memory_of_rank(MODEL, settings_of(name), 1, 64, 8).moments["update"]
        return need["states"], need["update"], compute.update(1e6, 1)

    compute = Compute(MODEL, settings_of(name), device, 64)
    states, workspace, seconds = estimates()
    larger = replace(
        row,
        state=row.state._replace(matrix=row.state.matrix + 4),
        update_bytes=row.update_bytes + 4,
        workspace=lambda *given: row.workspace(*given) + 12,
    )
    monkeypatch.setitem(OPTIMIZERS, name, larger)  # type: ignore[arg-type]
    matrices = {
        key: p.numel() for key, p in build_model(MODEL).named_parameters() if key.endswith("weight") and p.ndim == 2
    }
    numbers = sum(size for key, size in matrices.items() if row.others is None or key.startswith("blocks."))
    assert estimates() == (states + 4 * numbers, workspace + 12, pytest.approx(seconds + compute.traffic(4e6)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_reach_the_update_rule_that_names_them_and_no_other(name: str) -> None:
    row = OPTIMIZERS[name]
    for setting in {setting for other in OPTIMIZERS.values() for setting in other.settings}:
        info = OptimConfig.model_fields[setting]
        value = 0.25 if isinstance(info.default, float) else get_args(info.annotation)[-1]
        if setting in (*row.settings, *row.of_others.settings):
            rules = make_optimizer(make(), OptimConfig(optimizer=name, **{setting: value})).rules
            assert [getattr(rule, setting, None) for rule in rules].count(value) == 1
        else:
            users = " or ".join(user for user, other in OPTIMIZERS.items() if setting in other.all_settings)
            message = f"{setting}: expected optimizer = {users}, got {name}. Remove {setting}, or set optimizer."
            with pytest.raises(ValidationError, match=message):
                OptimConfig(optimizer=name, **{setting: value})


# ----------------------------------------------------------------------------------------------------------- the norm


def test_gradient_norm() -> None:
    parameters = make()
    set_gradients(parameters, 1)
    parameters["norm.weight"].grad = None
    whole = np.concatenate([p.grad.double().numpy().ravel() for p in parameters.values() if p.grad is not None])
    norm = gradient_norm(parameters)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(np.linalg.norm(whole), rel=1e-7)
    clear_gradients(make_optimizer(parameters, OptimConfig()))
    assert gradient_norm(parameters).item() == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_of_non_finite_values_is_not_finite(bad: float) -> None:
    parameters = make()
    set_gradients(parameters, 1)
    parameters["norm.weight"].grad[3] = bad
    assert not math.isfinite(gradient_norm(parameters).item())


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 3_000_000])
def test_squared_norms_of_any_size(size: int) -> None:
    """Three million numbers around 3: torch's own float32 norm has an error of about 1e-5."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)) + 3
    expected = values.double().square().sum().item()
    assert squared_norms([values]).item() == pytest.approx(expected, rel=2e-7)
    assert squared_norms([values.view(-1, 1), values[:5]])[0].item() == pytest.approx(expected, rel=2e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gpu_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Muon's products are in bf16 on a GPU by default, and a learner of this process may have chosen TF32.
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    config = OptimConfig(optimizer=name, **({"muon_precision": "fp32"} if name == "muon" else {}))
    host = make()
    device = {key: nn.Parameter(value.detach().cuda()) for key, value in host.items()}
    for parameters in (host, device):
        optimizer = make_optimizer(parameters, config)
        for step, rate in enumerate(RATES, start=1):
            set_gradients(host, step)
            if parameters is device:
                for key, value in device.items():
                    value.grad = host[key].grad.cuda()
            gradients = Gradients(parameters)
            gradients.take()
            update(optimizer, rate, gradients.taken, gradients.norm().float())
    for key, value in host.items():
        assert torch.allclose(device[key].cpu(), value, rtol=0, atol=1e-5), key
