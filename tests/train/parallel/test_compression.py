"""Compressed sums of gradients against a numpy oracle, at two and four ranks, under DDP and under HSDP 2×2.

Four processes play every scenario in a row; pairs of them play those for two ranks. A model whose loss is the product
of its weights with given numbers has these numbers for gradients, exactly.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from schemas.errors import ContractError
from tests.support.rank_pool import shared_pool
from train.config.layout import LayoutConfig
from train.parallel.compression import (
    BufferEntry,
    Compressor,
    compress_ddp,
    compress_fsdp,
    largest_indices,
    method_of,
    num_kept,
    random_indices,
    random_key,
)
from train.parallel.ranks import Ranks

SEED, STEPS, SHARE, RANK = 7, 5, 0.07, 2
TRAINED = 150
"""Steps of a training."""
METHODS = ("none", "fp16", "bf16", "powersgd", "topk", "randomk")
REMEMBERING = ("powersgd", "topk", "randomk")
SHAPES = {"inner.tail": (5, 4, 2), "inner.gain": (3,), "wide": (7, 30), "bias": (11,), "tall": (29, 6), "thin": (9, 1)}
"""No dimension divides by the ranks; the module's own weights come first by name, its children's first for FSDP2."""


def settings(method: str) -> LayoutConfig:
    extra = {
        "powersgd": {"compress_rank": RANK},
        "topk": {"compress_share": SHARE},
        "randomk": {"compress_share": SHARE},
    }
    return LayoutConfig(data="ddp", compress=method, **extra.get(method, {}))


def gradient(name: str, rank: int, step: int) -> np.ndarray:
    """The gradient of one rank in one step: of another size on every rank, with equals among its magnitudes."""
    random = np.random.default_rng([len(name), ord(name[0]), rank, step])
    values = random.standard_normal(SHAPES[name]) * 2.0 ** random.integers(-3, 2, SHAPES[name]) * (1 + rank)
    return np.where(random.random(SHAPES[name]) < 0.3, np.sign(values) * 0.5, values).astype(np.float32)


# ------------------------------------------------------------------------------------------- scenarios, played by ranks


class Given(nn.Module):
    """Weights whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bias = nn.Parameter(torch.ones(SHAPES["wide"])), nn.Parameter(torch.ones(SHAPES["bias"]))
        self.tall, self.thin = nn.Parameter(torch.ones(SHAPES["tall"])), nn.Parameter(torch.ones(SHAPES["thin"]))
        self.inner = nn.Module()
        self.inner.tail = nn.Parameter(torch.ones(SHAPES["inner.tail"]))
        self.inner.gain = nn.Parameter(torch.ones(SHAPES["inner.gain"]))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((weight * gradients[name]).sum() for name, weight in self.named_parameters())


class Scene:
    """A model, its compressor, and the results of a step."""

    def __init__(self, method: str, mesh, over: str) -> None:
        self.weights, self.over = Given(), over
        self.model: nn.Module = self.weights
        group = {"ddp2": mesh.get_group("shard"), "ddp4": dist.group.WORLD, "hsdp": mesh.get_group("replicate")}[over]
        self.compressor = Compressor(method_of(settings(method), SEED), group, torch.device("cpu"))
        if over == "hsdp":
            sharded(self.weights, mesh["shard"])
            compress_fsdp([self.weights], self.weights.named_parameters(), self.compressor)
        else:
            # Small buckets, so that DDP rebuilds them after the first step.
            self.model = DistributedDataParallel(self.weights, process_group=group, bucket_cap_mb=0.0005)
            compress_ddp(self.model, self.weights.named_parameters(), self.compressor)

    def step(self, step: int, spoiled: str | None = None) -> dict:
        rank = dist.get_rank()
        given = {name: torch.from_numpy(gradient(name, rank, step)) for name in SHAPES}
        if spoiled and rank == 1:
            given[spoiled].view(-1)[-1] = torch.inf
        self.compressor.start(step)
        self.model(given).backward()
        sums = {name: weight.grad for name, weight in self.weights.named_parameters()}
        if self.over == "hsdp":
            sums = {name: value.full_tensor() for name, value in sums.items()}
        if not spoiled:
            self.compressor.keep()
        results = {"sums": numpy_of(sums), "states": numpy_of(self.compressor.state_tensors())}
        self.model.zero_grad()
        return results | {"sent": self.compressor.bytes_sent, "plain": self.compressor.bytes_plain}


def sharded(model: nn.Module, mesh) -> None:
    fully_shard(model, mesh=mesh)
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)


def numpy_of(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().clone().numpy() for name, tensor in tensors.items()}


def play_steps(method: str, mesh, over: str) -> dict:
    """Run consecutive steps, and repeat the last of them with a second model that loads the state of the first."""
    scene = Scene(method, mesh, over)
    results = {"fresh": numpy_of(scene.compressor.state_tensors()), "steps": []}
    for step in range(STEPS):
        if step == 2:
            saved = {name: value.clone() for name, value in scene.compressor.state_tensors().items()}
        results["steps"].append(scene.step(step))
    again = Scene(method, mesh, over)
    for name, value in again.compressor.state_tensors().items():
        value.copy_(saved[name])
    results["resumed"] = [again.step(step) for step in range(2, STEPS)]
    return results


def play_spoiled(method: str, mesh, over: str) -> dict:
    """Run a step in which the last number of one rank is not finite, and a step after it."""
    scene = Scene(method, mesh, over)
    return {"steps": [scene.step(0), scene.step(1, "wide"), scene.step(2)]}


def play_hook_of_native_hsdp(mesh) -> dict:
    """Return the input of FSDP2's hook, and whether its result is used, with and without a replicate axis."""
    results = {}
    for name, axes in (("native", mesh), ("own", mesh["shard"])):
        model, seen = nn.Linear(2, 2, bias=False), []
        sharded(model, axes)
        model.set_all_reduce_hook(lambda values, seen=seen: (seen.append(values.tolist()), values.mul_(10)))
        model(torch.full((1, 2), 10.0 ** dist.get_rank())).sum().backward()
        results[name] = (seen, model.weight.grad.to_local().flatten().tolist())
        if name == "native":
            compressor = Compressor(method_of(settings("topk"), SEED), mesh.get_group("replicate"), torch.device("cpu"))
            with pytest.raises(ContractError) as error:
                compress_fsdp([model], model.named_parameters(), compressor)
            results["refusal"] = str(error.value)
    return results


def play_training(method: str, feedback: bool = True) -> list[float]:
    """First and last loss of a small network whose ranks see the same samples with targets shifted apart.

    The shifts cancel in the sum of the gradients, and never become small in the gradient of a rank.
    """
    random = torch.Generator().manual_seed(1)
    teacher = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    student = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    for weight in (*teacher.parameters(), *student.parameters()):
        weight.data = torch.randn(weight.shape, generator=random) / weight.shape[-1] ** 0.5
    inputs = torch.randn(256, 12, generator=random)
    targets = teacher(inputs).detach()
    shifted = targets + (10.0, -10.0, 7.0, -7.0)[dist.get_rank()]
    model = DistributedDataParallel(student)
    compressor = Compressor(method_of(settings(method), SEED), dist.group.WORLD, torch.device("cpu"))
    compress_ddp(model, student.named_parameters(), compressor)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.4)
    losses = []
    for step in range(TRAINED):
        # Errors add noise proportional to the rate: with a decaying rate it vanishes.
        optimizer.param_groups[0]["lr"] = 0.4 * (1 - step / TRAINED)
        if step in (0, TRAINED - 1):
            with torch.no_grad():
                losses.append(((student(inputs) - targets) ** 2).mean().item())
        compressor.start(step)
        optimizer.zero_grad()
        ((model(inputs) - shifted) ** 2).mean().div(4).backward()
        optimizer.step()
        compressor.keep()
        if not feedback:
            for value in compressor.state_tensors().values():
                value.zero_()
    return losses


def play(mesh) -> dict:
    with pytest.raises(ContractError) as error:
        Compressor(method_of(settings("none"), SEED), dist.group.WORLD, torch.device("cpu")).sum(torch.ones(1), [])
    results = {"unstarted": str(error.value), "native": play_hook_of_native_hsdp(mesh)}
    for method in METHODS:
        for over in ("ddp2", "ddp4", "hsdp"):
            results[method, over] = play_steps(method, mesh, over)
        results |= {(method, "spoiled", over): play_spoiled(method, mesh, over) for over in ("ddp2", "hsdp")}
        results[method, "training"] = play_training(method)
    results["forgetful", "training"] = play_training("topk", feedback=False)
    return results


def play_on_mesh(ranks: Ranks) -> dict:
    return play(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


@pytest.fixture(scope="module")
def played() -> list[dict]:
    """What each of four ranks tells of every scenario."""
    return shared_pool().play(4, play_on_mesh)


# ---------------------------------------------------------------------------------------------------------- the oracle


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, to nearest, ties to even, and back."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


ROUNDED = {
    "none": lambda values: values,
    "fp16": lambda values: values.astype(np.float16).astype(np.float32),
    "bf16": to_bf16,
}


def total_of(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def splitmix(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor % 2**64
    return x ^ x >> 31


def oracle_places(name: str, size: int, step: int) -> list[int]:
    count, key = num_kept(SHARE, size), random_key(SEED, step, name)
    edges = [number * size // count for number in range(count + 1)]
    noise = [splitmix((number * 0x9E3779B97F4A7C15 + key) % 2**64) % 2**63 for number in range(count)]
    return [edges[n] + noise[n] % (edges[n + 1] - edges[n]) for n in range(count)]


def oracle(method: str, name: str, parts: list[np.ndarray], memory: dict, step: int) -> np.ndarray:
    """The sum of one parameter's gradients over the ranks; `memory` holds the errors and the right factor."""
    if method in ROUNDED:
        return ROUNDED[method](total_of([ROUNDED[method](part) for part in parts]))
    rows, columns = len(parts[0]), parts[0].size // len(parts[0])
    rank = min(RANK, rows, columns)
    if method == "powersgd" and (parts[0].ndim < 2 or rank * (rows + columns) >= rows * columns):
        return total_of(parts)
    expected_value = [part + error for part, error in zip(parts, memory["errors"], strict=True)]
    if method == "powersgd":
        matrices = [part.astype(np.float64).reshape(rows, columns) for part in expected_value]
        left = np.linalg.qr(sum(matrix @ memory["right"] for matrix in matrices))[0]
        sent = [left @ (left.T @ matrix) for matrix in matrices]
        # torch may take this basis with other signs; no projection shows them.
        memory["right"] = sum(matrix.T @ left for matrix in matrices)
        sent = [part.reshape(parts[0].shape) for part in sent]
    else:
        sent = []
        for part in expected_value:
            count = num_kept(SHARE, part.size)
            order = np.lexsort((np.arange(part.size), -np.abs(part.ravel())))
            chosen = order[:count] if method == "topk" else oracle_places(name, part.size, step)
            sent.append(np.zeros_like(part))
            sent[-1].ravel()[chosen] = part.ravel()[chosen]
    memory["errors"] = [part - sent_part for part, sent_part in zip(expected_value, sent, strict=True)]
    return total_of(sent)


def pieces_of(name: str, over: str, step: int, ranks: list[int]) -> list[np.ndarray]:
    """The gradients that the ranks of one group have to sum; under HSDP, rows of sums, padded."""
    if over != "hsdp":
        return [gradient(name, rank, step) for rank in ranks]
    shard, share = ranks[0] % 2, -(-SHAPES[name][0] // 2)
    sums = [gradient(name, 2 * replica, step) + gradient(name, 2 * replica + 1, step) for replica in (0, 1)]
    padded = [np.pad(part, [(0, 2 * share - len(part))] + [(0, 0)] * (part.ndim - 1)) for part in sums]
    return [part[share * shard : share * (shard + 1)] for part in padded]


EXACTNESS = dict.fromkeys(METHODS, 0.0) | {"powersgd": 1e-5}
"""Deviation from the oracle, as a share of the largest number; the oracle of powersgd computes in float64."""


GROUPS = {"ddp2": [[0, 1], [2, 3]], "ddp4": [[0, 1, 2, 3]], "hsdp": [[0, 2], [1, 3]]}


# ----------------------------------------------------------------------------------------------------------- the parts


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    values = torch.tensor([0.5, -2.0, 2.0, 0.0, -0.5, 2.0, torch.nan, -torch.inf])
    kept = [sorted(largest_indices(values, count).tolist()) for count in range(1, 9)]
    assert kept[:4] == [[6], [6, 7], [1, 6, 7], [1, 2, 6, 7]]
    assert kept[4:] == [[1, 2, 5, 6, 7], [0, 1, 2, 5, 6, 7], [0, 1, 2, 4, 5, 6, 7], list(range(8))]
    assert sorted(largest_indices(torch.zeros(1000), 10).tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("share", "size", "kept"), [(0.07, 100, 7), (0.07, 101, 8), (0.01, 1, 1), (1.0, 9, 9), (0.1, 30, 3), (1e-3, 0, 0)]
)
def test_numbers_kept(share: float, size: int, kept: int) -> None:
    """0.07 · 100 is 7.000000000000001 in binary, and 0.1 · 30 is 3.0000000000000004 by its exact value."""
    assert num_kept(share, size) == kept


def test_random_indices_are_distinct_and_uniform() -> None:
    counts = np.zeros(103)
    for step in range(2000):
        places = random_indices(103, 10, random_key(SEED, step, "w"), torch.device("cpu"))
        assert len(set(places.tolist())) == 10
        counts[places.numpy()] += 1
    # Stretches of 10 or 11: 2000/10 = 200 or 2000/11 = 182 hits; 6 standard deviations of 13.4 around them.
    assert 100 < counts.min() < counts.max() < 282
    assert random_indices(4, 4, 5, torch.device("cpu")).tolist() == [0, 1, 2, 3]


def test_places_follow_seed_step_and_name() -> None:
    keys = {random_key(seed, step, name) for seed in (0, 1) for step in (0, 1) for name in ("a", "b")}
    assert len(keys) == 8
    assert max(keys) < 2**63


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_parameter_whose_gradient_was_zero_comes_back_to_life(alone) -> None:
    """A product of zeros does not determine a left factor; the next gradient is compressed correctly anyway."""
    pieces = [BufferEntry("w", (8, 8))]
    compressor = Compressor(method_of(settings("powersgd"), SEED), alone, torch.device("cpu"))
    compressor.remember(pieces)
    first, second = torch.randn(8, 1), torch.randn(1, 8)
    sums = []
    for step, gradient in enumerate([torch.zeros(64), (first @ second).flatten(), torch.zeros(64)]):
        compressor.start(step)
        sums.append(gradient.clone())
        compressor.sum(sums[-1], pieces)
    assert sums[0].abs().max() == 0
    torch.testing.assert_close(sums[1] + sums[2], (first @ second).flatten(), rtol=1e-5, atol=1e-5)


def test_the_loss_scale_and_what_was_held_back(alone) -> None:
    pieces = [BufferEntry("w", (4,))]
    compressor = Compressor(method_of(settings("topk"), SEED), alone, torch.device("cpu"))
    compressor.remember(pieces)
    compressor.start(0)
    compressor.sum(torch.tensor([1.0, 8.0, 2.0, 3.0]), pieces)
    compressor.keep()
    compressor.rescale(0.5)
    assert {name: value.tolist() for name, value in compressor.state_tensors().items()} == {
        "compress.rank-0.w.error": [0.5, 0.0, 1.0, 1.5]
    }
    assert (compressor.bytes_sent, compressor.bytes_plain) == (0, 0)


def test_a_missing_gradient_is_refused(alone) -> None:
    compressor = Compressor(method_of(settings("topk"), SEED), alone, torch.device("cpu"))
    compressor.start(0)
    with pytest.raises(ContractError, match=r"expected 7 gradient elements for a to b, got 4. Compute a gradient"):
        compressor.sum(torch.ones(4), [BufferEntry("a", (4,)), BufferEntry("b", (3,))])


# ---------------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.dist
@pytest.mark.parametrize("over", GROUPS)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_oracle_after_every_step(played: list[dict], method: str, over: str) -> None:
    checked = 0
    for ranks in GROUPS[over]:
        for name in SHAPES:
            first = played[ranks[0]][method, over]["fresh"]
            shape = pieces_of(name, over, 0, ranks)[0].shape
            right = first.get(f"compress.rank-{ranks[0]}.{name}.right")
            memory = {"errors": [np.zeros(shape, np.float32) for _ in ranks], "right": right}
            for step in range(STEPS):
                given = pieces_of(name, over, step, ranks)
                near = EXACTNESS[method] * np.abs([*given, *memory["errors"]]).max()
                expected = oracle(method, name, given, memory, step)
                for place, rank in enumerate(ranks):
                    results = played[rank][method, over]["steps"][step]
                    actual, share = results["sums"][name], len(expected)
                    if over == "hsdp":
                        actual = actual[share * (rank % 2) : share * (rank % 2 + 1)]
                    np.testing.assert_allclose(actual, expected[: len(actual)], rtol=0, atol=near)
                    if (key := f"compress.rank-{rank}.{name}.error") in results["states"]:
                        np.testing.assert_allclose(results["states"][key], memory["errors"][place], rtol=0, atol=near)
                        checked += 1
    remembered = {"powersgd": ("wide", "tall", "inner.tail"), "topk": SHAPES, "randomk": SHAPES}.get(method, ())
    assert checked == 4 * STEPS * len(remembered)


@pytest.mark.dist
@pytest.mark.parametrize("over", GROUPS)
@pytest.mark.parametrize("method", METHODS)
def test_every_rank_holds_the_same_bits(played: list[dict], method: str, over: str) -> None:
    for ranks in GROUPS[over]:
        steps = [played[rank][method, over]["steps"] for rank in ranks]
        for results in zip(*steps, strict=True):
            for name in SHAPES:
                assert len({item["sums"][name].tobytes() for item in results}) == 1


@pytest.mark.dist
@pytest.mark.parametrize("over", GROUPS)
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_has_the_same_bits(played: list[dict], method: str, over: str) -> None:
    """Resumes are exact although DDP has one bucket in the first step of a process, and others from the second on."""
    for results in played:
        steps = [*zip(results[method, over]["steps"][2:], results[method, over]["resumed"], strict=True)]
        assert len(steps) == 3
        for whole, resumed in steps:
            for kind in ("sums", "states"):
                assert whole[kind].keys() == resumed[kind].keys()
                assert all(whole[kind][name].tobytes() == resumed[kind][name].tobytes() for name in whole[kind])


@pytest.mark.dist
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("over", ["ddp2", "hsdp"])
def test_a_skipped_step_changes_no_compression_state(played: list[dict], method: str, over: str) -> None:
    """This holds for the non-finite matrix and for the finite ones, in other buffers too."""
    for results in played[:2]:
        before, spoiled, after = results[method, "spoiled", over]["steps"]
        assert not np.isfinite(spoiled["sums"]["wide"]).all()
        assert all(np.isfinite(value).all() for value in after["sums"].values())
        assert before["states"].keys() == spoiled["states"].keys()
        for name, value in before["states"].items():
            np.testing.assert_array_equal(spoiled["states"][name], value)
    elsewhere = played[2][method, "spoiled", "ddp2"]["steps"][1]
    assert np.isfinite(elsewhere["sums"]["wide"]).all()


@pytest.mark.dist
def test_bytes_of_a_step(played: list[dict]) -> None:
    """In DDP's first step all 447 numbers lie in one bucket: 40, 3, 210, 11, 174 and 9."""
    plain = {"ddp2": 2 * 1 * 224 * 4, "ddp4": 2 * 3 * 112 * 4}
    # 7% rounded up: 3, 1, 15, 1, 13 and 1 numbers.
    kept = 34
    # Factors of rank 2: 2·(5+8), 2·(7+30), 2·(29+6), left ones (82) with 23 whole numbers, right ones (88) apart.
    sent = {
        ("none", "ddp2"): plain["ddp2"],
        ("none", "ddp4"): plain["ddp4"],
        ("fp16", "ddp2"): plain["ddp2"] // 2,
        ("bf16", "ddp4"): plain["ddp4"] // 2,
        ("topk", "ddp2"): 1 * kept * 8,
        ("topk", "ddp4"): 3 * kept * 8,
        ("randomk", "ddp2"): 2 * 1 * 17 * 4,
        ("randomk", "ddp4"): 2 * 3 * 9 * 4,
        ("powersgd", "ddp2"): 2 * 1 * (53 + 44) * 4,
        ("powersgd", "ddp4"): 2 * 3 * (27 + 22) * 4,
    }
    for (method, over), expected in sent.items():
        results = played[0][method, over]["steps"][0]
        assert (results["sent"], results["plain"]) == (expected, plain[over])


@pytest.mark.dist
def test_torch_sums_before_its_hook_if_the_mesh_has_replicas(played: list[dict]) -> None:
    """Why the model is sharded over one axis: there the hook is given the sum of its own replica, 1+10 or 100+1000."""
    for rank, results in enumerate(played):
        own = 11.0 if rank < 2 else 1100.0
        assert results["native"]["native"] == ([[1111.0, 1111.0]], [11110.0, 11110.0])
        assert results["native"]["own"] == ([[own, own]], [own * 10, own * 10])
        assert "expected a mesh without a replicate axis, got one with it" in results["native"]["refusal"]
        assert "got a gradient before the first step. Call Compressor.start(step)." in results["unstarted"]


@pytest.mark.dist
def test_training_converges_with_feedback_only(played: list[dict]) -> None:
    losses = {name: played[0][name, "training"] for name in (*METHODS, "forgetful")}
    end = {name: values[-1] for name, values in losses.items()}
    assert end["none"] < 0.1 * losses["none"][0]
    assert end["fp16"] == pytest.approx(end["none"], rel=0.01)
    assert end["bf16"] == pytest.approx(end["none"], rel=0.05)
    for method in REMEMBERING:
        assert end[method] < 1.25 * end["none"], end
    assert end["forgetful"] > 3 * end["none"], end
