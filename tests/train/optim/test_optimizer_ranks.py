"""Every optimizer on four ranks in every layout, with uneven and empty shards, equals itself on a single rank.

A negative control sums over no other ranks, and must be detected.
"""

import zlib
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from schemas.errors import ContractError
from tests.support.rank_pool import shared_pool
from train.config.optim import OPTIMIZERS, OptimConfig
from train.optim import adam
from train.optim.optimizer import Optimizer, make_optimizer, state_tensors, update
from train.optim.parameter import Gradients, gradient_norm, local_tensor, region_at, region_of
from train.parallel.ranks import Ranks

STEPS = 5
SHAPES = {
    "embedding.weight": (45, 20),
    "blocks.0.up.weight": (47, 20),
    "blocks.0.up.bias": (47,),
    "blocks.0.down.weight": (21, 47),
    "blocks.1.up.weight": (47, 20),
    "blocks.1.up.bias": (47,),
    "blocks.1.down.weight": (21, 47),
    "blocks.1.small.weight": (3, 5),
    "norm.weight": (2,),
}
"""Over four ranks 45, 47 and 21 rows are uneven, in both splits of a 2 x 2 mesh too; 3 and 2 leave ranks empty."""
LAYOUTS = ("plain", "shard", "replicate_shard", "shard_tensor", "replicate_tensor", "shard_columns")
Numbers = dict[str, Tensor]


def numbers(name: str, step: int) -> Tensor:
    """Return the gradient of a parameter at a step; step 0 is its initial value."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(SHAPES[name], generator=generator) * (0.05 if step == 0 else 1 + step)


def build(layout: str) -> dict[str, nn.Parameter]:
    """Return the parameters, placed on the ranks, with their initial values."""
    model = nn.Module()
    model.embedding, model.norm = nn.Embedding(*SHAPES["embedding.weight"]), nn.RMSNorm(2)
    model.blocks = nn.ModuleList([nn.ModuleDict(), nn.ModuleDict()])
    for block in model.blocks:
        block["up"], block["down"] = nn.Linear(20, 47), nn.Linear(47, 21, bias=False)
    model.blocks[1]["small"] = nn.Linear(5, 3, bias=False)
    styles = (("up", ColwiseParallel()), ("down", RowwiseParallel()))
    tensor_plan = {f"blocks.{i}.{k}": p for i in (0, 1) for k, p in styles}
    if layout == "shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif layout == "replicate_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "shard_tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], tensor_plan)
        fully_shard(model, mesh=mesh["shard"])
    elif layout == "replicate_tensor":
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        parallelize_module(model, mesh["tensor"], tensor_plan)
        fully_shard(model, mesh=mesh["replicate", "shard"])
    parameters = dict(model.named_parameters())
    assert {name: tuple(p.shape) for name, p in parameters.items()} == SHAPES
    if layout == "shard_columns":
        mesh = init_device_mesh("cpu", (4,))
        split = {name: distribute_tensor(p.data, mesh, [Shard(p.ndim - 1)]) for name, p in parameters.items()}
        parameters = {name: nn.Parameter(tensor) for name, tensor in split.items()}
    for name, parameter in parameters.items():
        local_tensor(parameter).copy_(numbers(name, 0)[region_of(name, parameter)])
        assert torch.equal(full(parameter), numbers(name, 0)), (layout, name)
    return parameters


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values of the whole parameter, placed like the parameter."""
    if not isinstance(parameter, DTensor):
        return values.clone()
    mine = values[region_of("it", parameter)].clone(memory_format=torch.contiguous_format)
    place = parameter.device_mesh, parameter.placements
    return DTensor.from_local(mine, *place, run_check=False, shape=parameter.shape, stride=parameter.stride())


def train(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, clip: float) -> list[float]:
    """Make five clipped updates; return the norms."""
    norms = []
    for step in range(1, STEPS + 1):
        for name, parameter in parameters.items():
            parameter.grad = like(parameter, numbers(name, step))
        gradients = Gradients(parameters)
        gradients.take()
        norm = gradients.norm()
        norms.append(norm.item())
        update(optimizer, 1e-3 / step, gradients.taken, (norm / clip).clamp(min=1.0).float())
        assert all(parameter.grad is None for parameter in parameters.values())
    return norms


def trained(layout: str, name: str) -> tuple[dict[str, nn.Parameter], Optimizer, list[float]]:
    """Return the parameters after five updates, their optimizer and the norms."""
    parameters = build(layout)
    optimizer = make_optimizer(parameters, OptimConfig(optimizer=name, weight_decay=0.3))
    return parameters, optimizer, train(parameters, optimizer, clip=100.0)


def result(parameters: dict[str, nn.Parameter], optimizer: Optimizer, norms: list[float]) -> dict[str, Any]:
    state = state_tensors(optimizer)
    for value in state.values():
        if not isinstance(value, DTensor) and dist.is_initialized():
            first = value.clone()
            dist.broadcast(first, src=0)
            assert torch.equal(first, value), "a plain state is the same on every rank"
    return {
        "norms": norms,
        "values": {key: full(value) for key, value in parameters.items()},
        "state": {key: full(value) for key, value in state.items()},
    }


@cache
def alone_on_one_rank(name: str) -> dict[str, Any]:
    """Return the result of an optimizer in this process alone."""
    return result(*trained("plain", name))


def changed_by_a_skipped_update(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> list[str]:
    """Return the weights and states of which a skipped update changed a bit; a single rank has all NaNs."""
    tensors = {**parameters, **state_tensors(optimizer)}
    before = {key: local_tensor(value).clone().view(torch.int32) for key, value in tensors.items()}
    for key, parameter in parameters.items():
        parameter.grad = like(parameter, numbers(key, 9))
        if dist.get_rank() == 0:
            local_tensor(parameter.grad).fill_(float("nan"))
    gradients = Gradients(parameters)
    gradients.take()
    norm = gradients.norm()
    update(optimizer, 1e-3, gradients.taken, norm.float(), (~norm.isfinite()).float())
    actual = [
        key for key, value in tensors.items() if not torch.equal(local_tensor(value).view(torch.int32), before[key])
    ]
    return actual if optimizer.step == STEPS else [*actual, "count"]


def pipeline_norms() -> list[float]:
    """Return the norm over two pipeline stages of two ranks with the embedding: correct, then with `copies` missing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    held = ["embedding.weight", f"blocks.{mesh.get_local_rank('pipeline')}.down.weight"]
    parameters = {n: nn.Parameter(distribute_tensor(numbers(n, 0), mesh["shard"], [Shard(0)])) for n in held}
    if mesh.get_local_rank("pipeline"):
        parameters["norm.weight"] = nn.Parameter(numbers("norm.weight", 0))
    for name, parameter in parameters.items():
        parameter.grad = like(parameter, numbers(name, 1))
    right = gradient_norm(parameters, 2, {"embedding.weight": 2})
    return [right.item(), gradient_norm(parameters, 2).item()]


def owners() -> dict[str, list[int]]:
    """Return the number of the five matrices that each rank orthogonalizes, by layout."""
    actual = {}
    for layout in LAYOUTS:
        muon = make_optimizer(build(layout), OptimConfig(optimizer="muon")).rules[0]
        counts: list[Any] = [None] * 4
        dist.all_gather_object(counts, sum(len(exchange.owned) for exchange in muon.exchanges))
        actual[layout] = counts
    return actual


def misplaced_message() -> str:
    mesh = init_device_mesh("cpu", (4,))
    parameter = nn.Parameter(distribute_tensor(numbers("embedding.weight", 0), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(numbers("embedding.weight", 1), mesh, [Shard(1)])
    with pytest.raises(ContractError) as caught:
        gradient_norm({"embedding.weight": parameter})
    return str(caught.value)


def alone(unused: Any, parts: Any) -> list[Tensor]:
    """Return the local parts without any communication."""
    return list(parts)


def work(ranks: Ranks, folder: str) -> None:
    results: dict[Any, Any] = {"pipeline": pipeline_norms(), "misplaced": misplaced_message(), "owners": owners()}
    changed = {}
    for layout, name in product(LAYOUTS, OPTIMIZERS):
        parameters, optimizer, norms = trained(layout, name)
        results[layout, name] = result(parameters, optimizer, norms)
        changed[layout, name] = changed_by_a_skipped_update(parameters, optimizer)
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, changed)
    results["changed"] = everywhere
    for name in ("adafactor", "lamb"):
        honest, adam.total_over_shards = adam.total_over_shards, alone
        results["alone", name] = separately(name)
        adam.total_over_shards = honest
    if ranks.rank == 0:
        torch.save(results, f"{folder}/results.pt")


def separately(name: str) -> Numbers:
    parameters = build("shard")
    train(parameters, make_optimizer(parameters, OptimConfig(optimizer=name, weight_decay=0.3)), clip=100.0)
    return {key: full(value) for key, value in parameters.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    shared_pool().play(4, work, str(folder))
    return torch.load(Path(folder) / "results.pt")


def farthest(actual: Numbers, expected: Numbers) -> float:
    """Return the maximum distance of a tensor from its expected value, relative to its norm."""
    assert actual.keys() == expected.keys()
    return max(((actual[key] - expected[key]).norm() / expected[key].norm()).item() for key in expected)


@pytest.mark.dist
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(results: dict[Any, Any], layout: str, name: str) -> None:
    actual, expected = results[layout, name], alone_on_one_rank(name)
    assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-7)
    assert farthest(actual["values"], expected["values"]) <= 1e-6
    assert farthest(actual["state"], expected["state"]) <= 1e-6
    moved = {key: value - numbers(key, 0) for key, value in actual["values"].items()}
    assert farthest(moved, {key: value - numbers(key, 0) for key, value in expected["values"].items()}) <= 1e-4


@pytest.mark.dist
def test_a_skipped_update_changes_no_bit_on_any_rank(results: dict[Any, Any]) -> None:
    expected = {(layout, name): [] for layout in LAYOUTS for name in OPTIMIZERS}
    assert results["changed"] == [expected] * 4


@pytest.mark.dist
@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_a_rank_that_does_not_communicate_is_detected(results: dict[Any, Any], name: str) -> None:
    assert farthest(results["alone", name], alone_on_one_rank(name)["values"]) > 1e-5


@pytest.mark.dist
def test_each_matrix_is_orthogonalized_once_per_copy(results: dict[Any, Any]) -> None:
    """Two meshes assign matrices independently: the small matrix is on the two ranks that do not split by tensor."""
    assert results["owners"] == {
        "plain": [5, 5, 5, 5],
        "shard": [2, 1, 1, 1],
        "replicate_shard": [3, 2, 3, 2],
        "shard_tensor": [2, 2, 1, 1],
        "replicate_tensor": [3, 3, 3, 3],
        "shard_columns": [2, 1, 1, 1],
    }


@pytest.mark.dist
def test_norm_over_a_pipeline_counts_copies_once(results: dict[Any, Any]) -> None:
    names = ("embedding.weight", "blocks.0.down.weight", "blocks.1.down.weight", "norm.weight")
    squares = {name: numbers(name, 1).double().square().sum().item() for name in names}
    right, wrong = results["pipeline"]
    assert right == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-7)
    assert wrong == pytest.approx((sum(squares.values()) + squares["embedding.weight"]) ** 0.5, rel=1e-7)


@pytest.mark.dist
def test_a_gradient_with_another_placement_is_rejected(results: dict[Any, Any]) -> None:
    expected = "a gradient of embedding.weight placed like the parameter, (Shard(dim=0),), got (Shard(dim=1),)"
    assert expected in results["misplaced"]


@pytest.mark.parametrize(
    ("coordinate", "rows"),
    [((0, 0), (0, 2)), ((1, 0), (2, 4)), ((2, 0), (4, 5)), ((3, 0), (5, 5)), ((0, 1), (5, 6)), ((3, 1), (8, 9))],
)
def test_fsdp_splits_what_tensor_parallelism_has_left(coordinate: tuple[int, int], rows: tuple[int, int]) -> None:
    """Nine rows by tensor are 0-4 and 5-8; over four ranks the first five are 2, 2, 1, 0 and the rest 1 each."""
    mesh = SimpleNamespace(shape=(4, 2), size=lambda axis: (4, 2)[axis])
    tensor = MagicMock(spec=DTensor, shape=(9, 3), device_mesh=mesh)
    tensor.placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert region_at(tensor, coordinate) == (slice(*rows), slice(0, 3))
