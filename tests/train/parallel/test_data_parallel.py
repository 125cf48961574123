"""Sharded optimizer states: the same bits as the whole optimizer, an n-th of its memory, and resharding.

Four processes play every scenario in a row; pairs of them play those for two ranks.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from schemas.errors import ContractError
from tests.support.rank_pool import shared_pool
from train.config.layout import LayoutConfig
from train.config.optim import OPTIMIZERS, OptimConfig
from train.optim.optimizer import make_optimizer, update
from train.parallel import data_parallel as zero1
from train.parallel.compression import Compressor, compress_ddp, method_of
from train.parallel.data_parallel import ShardedStates
from train.parallel.ranks import Ranks

STEPS = 10
SHAPES = {
    "even": (64, 33),
    "uneven": (7, 5),
    "two": (2, 4),
    "one": (1, 6),
    "gain": (5,),
    "deep": (9, 2, 3),
    "number": (),
}
"""At 4 ranks the rows fall 16·4, 2 2 2 1, 1 1 0 0, 1 0 0 0, 2 2 1 0, 3 3 3 0, and a number to all."""


class Weights(nn.Module):
    """Weights whose gradients are given numbers."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=random)))

    def forward(self, step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        given = [torch.randn(weight.shape, generator=random) for weight in self.parameters()]
        return sum((weight * value).sum() for weight, value in zip(self.parameters(), given, strict=True))


def adamw(parameters, **kind) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, **kind)


class Scene:
    """A model under DDP with a summing hook, and its optimizer over sharded states."""

    def __init__(self, mesh, make) -> None:
        self.weights = Weights()
        self.model = DistributedDataParallel(
            self.weights, process_group=mesh.get_group(), gradient_as_bucket_view=True, bucket_cap_mb=0.001
        )
        plain = Compressor(method_of(LayoutConfig(data="ddp"), 0), mesh.get_group(), torch.device("cpu"))
        compress_ddp(self.model, self.weights.named_parameters(), plain)
        plain.start(0)
        self.states = ShardedStates(self.weights.named_parameters(), mesh)
        self.optimizer = make(self.states.shards.values())

    def backward(self, step: int) -> None:
        self.weights.zero_grad()
        self.model(step).backward()

    def update(self) -> None:
        self.states.view_gradients()
        self.optimizer.step()
        self.states.gather()

    def state(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the optimizer, by name."""
        return {
            f"{key}.{name}": value
            for name, shard in self.states.shards.items()
            for key, value in self.optimizer.state[shard].items()
        }


def play_equality(mesh, make) -> dict:
    """Run ten steps beside an optimizer of whole states; return differences, and the bytes of both states."""
    scene, reference = Scene(mesh, make), Weights()
    whole = make(reference.parameters())
    differing = []
    for step in range(STEPS):
        scene.backward(step)
        for weight, mine in zip(reference.parameters(), scene.weights.parameters(), strict=True):
            weight.grad = mine.grad.clone()
        scene.update()
        whole.step()
        pairs = zip(SHAPES, scene.weights.parameters(), reference.parameters(), strict=True)
        differing += [(step, name) for name, mine, weight in pairs if not torch.equal(mine, weight)]
    moments = {name: value for name, value in scene.state().items() if not name.startswith("step.")}
    wholes = {f"{key}.{name}": v for name, w in reference.named_parameters() for key, v in whole.state[w].items()}
    differing += [name for name, value in moments.items() if not torch.equal(value.full_tensor(), wholes[name])]
    return {
        "differing": differing,
        "apart": max(float((scene.weights.get_parameter(n) - w).abs().max()) for n, w in reference.named_parameters()),
        "moved": [name for name in SHAPES if torch.equal(getattr(reference, name), getattr(Weights(), name))],
        "kinds": {name: (type(value), tuple(value.shape), value.placements) for name, value in moments.items()},
        "rows": {name: len(value.to_local()) for name, value in moments.items() if value.ndim},
        "bytes": sum(value.to_local().nbytes for value in moments.values()),
        "whole_bytes": sum(wholes[name].nbytes for name in moments),
    }


def play_optimizer(mesh, kind: str) -> float:
    """Return the largest weight difference between an optimizer of train.optim with sharded and with whole states."""
    names = {
        "even": "embedding.weight",
        "uneven": "blocks.0.up.weight",
        "two": "blocks.0.key.weight",
        "gain": "norm.weight",
    }
    mine, whole = Weights(), Weights()
    states = ShardedStates(((names[n], w) for n, w in mine.named_parameters() if n in names), mesh)
    sharded = make_optimizer(states.shards, OptimConfig(optimizer=kind))
    reference = make_optimizer(
        {names[n]: w for n, w in whole.named_parameters() if n in names}, OptimConfig(optimizer=kind)
    )
    pairs = [(mine.get_parameter(name), whole.get_parameter(name)) for name in names]
    random, apart = torch.Generator().manual_seed(1), 0.0
    for _ in range(STEPS):
        for weight, other in pairs:
            weight.grad = torch.randn(weight.shape, generator=random)
            other.grad = weight.grad.clone()
        states.view_gradients()
        update(sharded, 0.01)
        states.gather()
        update(reference, 0.01)
        apart = max(apart, *((weight - other).detach().abs().max().item() for weight, other in pairs))
    return apart


def play_moving(meshes: dict, folder: Path) -> dict:
    """Four ranks save in the middle; the first two load, and continue with the gradients of four ranks."""
    four, results = Scene(meshes[4], adamw), {}
    for step in range(5):
        four.backward(step)
        four.update()
    saved = {name: weight.detach().clone() for name, weight in four.weights.named_parameters()}
    checkpoint.save(four.state(), checkpoint_id=folder / "states")
    sums = []
    for step in range(5, STEPS):
        four.backward(step)
        sums.append([weight.grad.clone() for weight in four.weights.parameters()])
        four.update()
    two = Scene(meshes[2], adamw)
    if dist.get_rank() < 2:
        two.states.view_gradients()
        for shard in two.states.shards.values():
            shard.grad = torch.zeros_like(shard)
        two.optimizer.step()
        state = two.state()
        checkpoint.load(state, checkpoint_id=folder / "states", process_group=meshes[2].get_group())
        with torch.no_grad():
            for name, weight in two.weights.named_parameters():
                weight.copy_(saved[name])
        for given in sums:
            for weight, gradient in zip(two.weights.parameters(), given, strict=True):
                weight.grad = gradient
            two.update()
        pairs = zip(SHAPES, two.weights.parameters(), four.weights.parameters(), strict=True)
        results["differing"] = [name for name, mine, weight in pairs if not torch.equal(mine, weight)]
        results["rows"] = len(state["exp_avg.uneven"].to_local())
    return results


def play_sharing(mesh) -> dict:
    """Check the memory of the shards, and a parameter without a gradient."""
    weights = Weights()
    states = ShardedStates(weights.named_parameters(), mesh)
    before = weights.even.detach().clone()
    weights.even.grad = torch.ones_like(weights.even)
    states.view_gradients()
    weights.even.grad.mul_(3)
    torch.optim.SGD(states.shards.values(), lr=1.0).step()
    rank = mesh.get_local_rank()
    changed = (weights.even != before).any(dim=1)
    states.gather()
    with pytest.raises(ContractError) as error:
        ShardedStates([("w", nn.Parameter(torch.ones(3, 2).T))], mesh)
    return {
        "own": changed.nonzero().flatten().tolist() == list(range(16 * rank, 16 * rank + 16)),
        "all": torch.equal(weights.even, before - 3),
        "others": all(states.shards[name].grad is None for name in SHAPES if name != "even"),
        "refusal": str(error.value),
    }


def play(ranks: Ranks, folder: Path) -> dict:
    meshes = {
        4: init_device_mesh("cpu", (4,)),
        2: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))["rank"],
    }
    results: dict = {"sharing": play_sharing(meshes[4])}
    kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
    for size, mesh in meshes.items():
        for name, kind in kinds.items():
            results[name, size] = play_equality(mesh, lambda parameters, kind=kind: adamw(parameters, **kind))
        results["buckets", size] = len(Scene(mesh, adamw).states._buckets)
        zero1.GATHERED_BYTES, before = 300, zero1.GATHERED_BYTES
        results["small buckets", size] = len(Scene(mesh, adamw).states._buckets)
        results["small", size] = play_equality(mesh, adamw)
        zero1.GATHERED_BYTES = before
    for kind in OPTIMIZERS:
        results[kind] = play_optimizer(meshes[4], kind)
    return results | {"moved": play_moving(meshes, folder)}


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> list[dict]:
    """What each of four ranks tells of every scenario."""
    return shared_pool().play(4, play, tmp_path_factory.mktemp("ranks"))


pytestmark = pytest.mark.dist


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["foreach", "loop", "small"])
def test_the_same_bits_as_whole_states(played: list[dict], kind: str, size: int) -> None:
    """Weights after each of ten steps, and both moments after the last."""
    for results in played:
        assert results[kind, size]["differing"] == []
        assert results[kind, size]["moved"] == []


@pytest.mark.parametrize("size", [2, 4])
def test_torchs_fused_loop_rounds_the_end_of_a_tensor_otherwise(played: list[dict], size: int) -> None:
    """On CPUs, numbers that fill no vector: the rows of `even` are whole vectors, 528 or 1056 numbers."""
    for results in played:
        assert not [at for at in results["fused", size]["differing"] if "even" in str(at).replace("uneven", "")]
        assert results["fused", size]["apart"] < 1e-6


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_takes_shards(played: list[dict], kind: str) -> None:
    """Norms and means over a parameter whose rows lie on several ranks, or on fewer than there are."""
    assert {"adamw", "adafactor", "lamb", "muon"} <= set(OPTIMIZERS)
    assert all(results[kind] < 5e-7 for results in played)


@pytest.mark.parametrize("size", [2, 4])
def test_memory_of_the_states(played: list[dict], size: int) -> None:
    """2 moments of 4 bytes: 2221 numbers in all; on the first of 4 ranks 528+10+4+6+2+18+1, on the last 528+5+1."""
    numbers = {4: [569, 563, 558, 534], 2: [1120, 1102, 1120, 1102]}[size]
    assert [results["fused", size]["bytes"] for results in played] == [8 * number for number in numbers]
    assert {results["fused", size]["whole_bytes"] for results in played} == {8 * 2221}


def test_the_rows_of_every_rank(played: list[dict]) -> None:
    rows = {
        name: [results["fused", 4]["rows"][f"exp_avg.{name}"] for results in played] for name in SHAPES if SHAPES[name]
    }
    assert rows == {
        "even": [16, 16, 16, 16],
        "uneven": [2, 2, 2, 1],
        "two": [1, 1, 0, 0],
        "one": [1, 0, 0, 0],
        "gain": [2, 2, 1, 0],
        "deep": [3, 3, 3, 0],
    }


def test_states_are_dtensors_of_the_parameters_shapes(played: list[dict]) -> None:
    kinds = played[0]["fused", 4]["kinds"]
    for name, shape in SHAPES.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert kinds[f"{moment}.{name}"] == (DTensor, shape, (Shard(0) if shape else Replicate(),))


def test_states_of_four_ranks_resume_on_two(played: list[dict]) -> None:
    assert [results["moved"].get("differing") for results in played] == [[], [], None, None]
    assert [results["moved"].get("rows") for results in played] == [4, 3, None, None]


def test_shards_share_the_parameters_memory(played: list[dict]) -> None:
    for results in played:
        sharing = results["sharing"]
        assert (sharing["own"], sharing["all"], sharing["others"]) == (True, True, True)
        assert "expected contiguous parameters, got w with strides (1, 2). Set parameter.data = " in sharing["refusal"]


def test_few_collectives(played: list[dict]) -> None:
    """One for all six parameters with rows; at most 300 bytes: the large one, 140 + 32 + 24 + 20, 216."""
    assert [(results["buckets", size], results["small buckets", size]) for results in played for size in (2, 4)] == [
        (1, 3)
    ] * 8
