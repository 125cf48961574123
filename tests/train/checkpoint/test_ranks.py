"""Checkpoints of several ranks: every layout is written and read in every other, bit for bit; failures reach all ranks.

Worlds of 1, 2 and 4 ranks follow one another in the processes of the shared pool.
"""

import resource
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from schemas.errors import ContractError, PenstockError
from schemas.storage import Store
from tests.support.rank_pool import shared_pool
from tests.train.checkpoint.test_state import note
from train.checkpoint import save as saving
from train.checkpoint.folder import list_checkpoints
from train.checkpoint.save import HostCopies, SaveFailed, SaveOutcome, Saver, write_checkpoint
from train.checkpoint.state import State, read_state
from train.config.train import CheckpointConfig
from train.parallel.ranks import FirstRankFailed, Ranks

pytestmark = pytest.mark.dist

NUM_LAYERS = 4


class Parts(nn.Module):
    """Named parts of a model, as a module that can be sharded; torch 2.11 refuses to shard a ModuleDict."""

    def __init__(self, parts: Mapping[str, nn.Module]):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return x


def build() -> Parts:
    """Layers whose sizes 4 ranks do not divide: some shards are smaller than others, some are empty."""
    layers = [Parts({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6, bias=False)}) for _ in range(NUM_LAYERS)]
    blocks = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
    return Parts({"embedding": nn.Embedding(7, 6), "blocks": blocks, "norm": nn.LayerNorm(3, bias=False)})


def with_moments(model: nn.Module) -> State:
    """Return the state of a model and its optimizer, with values of no checkpoint."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter), "step": torch.zeros(())}
        parameter.data.zero_()
    state = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter].items()
        state |= {f"{key}.{name}": value for key, value in moments if isinstance(value, torch.Tensor)}
    return state


def whole() -> State:
    """Return the values of every checkpoint of these tests, as plain tensors."""
    random = torch.Generator().manual_seed(5)
    return {name: torch.randn(value.shape, generator=random) for name, value in with_moments(build()).items()}


def plain() -> State:
    return with_moments(build())


def sharded(dim: int = 0) -> State:
    """Shard over all ranks by one dim; tensors without that dim are replicated DTensors, and steps stay plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: value
        if name.startswith("step.")
        else distribute_tensor(value, mesh, [Shard(dim) if value.ndim > dim else Replicate()])
        for name, value in plain().items()
    }


def fsdp() -> State:
    model = build()
    return with_moments(fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


def hsdp() -> State:
    return with_moments(fully_shard(build(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))))


def tensor_and_fsdp() -> State:
    """Tensor parallel by 2, then FSDP by 2 of the same dims: strided shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = build()
    plans = {f"blocks.{n}.{name}": style() for n in range(NUM_LAYERS) for name, style in STYLES.items()}
    parallelize_module(model, mesh["tensor"], plans | {"embedding": RowwiseParallel()})
    for layer in model.blocks.values():
        fully_shard(layer, mesh=mesh["shard"])
    state = with_moments(fully_shard(model, mesh=mesh["shard"]))
    kinds = {type(p).__name__ for value in state.values() if isinstance(value, DTensor) for p in value.placements}
    if "_StridedShard" not in kinds:
        raise AssertionError(f"no strided shard in {kinds}")
    return state


STYLES = {"up": ColwiseParallel, "down": RowwiseParallel}


def pipeline() -> State:
    """Each rank has the names of its own layers, plain; the ends of the model are on the first and the last."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = {"embedding": 0, "norm": world_size - 1}
    mine |= {f"blocks.{n}": n * world_size // NUM_LAYERS for n in range(NUM_LAYERS)}
    return {
        name: value
        for name, value in plain().items()
        if any(f".{part}." in f".{name}" and stage == rank for part, stage in mine.items())
    }


def pipeline_of_fsdp() -> State:
    """Two stages of two ranks each, which shard the layers of their stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    stage = mesh.get_local_rank("pipeline")
    model = build()
    for number in range(NUM_LAYERS):
        if number % 2 != stage:
            del model.blocks[str(number)]
    delattr(model, "norm" if stage == 0 else "embedding")
    return with_moments(fully_shard(model, mesh=mesh["shard"]))


LAYOUTS: dict[str, tuple[int, Callable[[], State]]] = {
    "1 plain": (1, plain),
    "1 fsdp": (1, fsdp),
    "2 plain": (2, plain),
    "2 fsdp": (2, fsdp),
    "2 columns": (2, partial(sharded, 1)),
    "2 pipeline": (2, pipeline),
    "4 plain": (4, plain),
    "4 fsdp": (4, fsdp),
    "4 hsdp": (4, hsdp),
    "4 tensor x fsdp": (4, tensor_and_fsdp),
    "4 pipeline": (4, pipeline),
    "4 pipeline x fsdp": (4, pipeline_of_fsdp),
}
LONG = ("4 plain", "4 fsdp", "4 hsdp")
"""Layouts that only the long tests read in: each of them is part of another layout. Every test run writes in all."""


# ------------------------------------------------------------------------------------------- what the processes play


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


STEP_OF = {name: step for step, name in enumerate(LAYOUTS, start=1)}


def play_write(ranks: Ranks, folder: str, name: str) -> None:
    """Write in a layout. The first layout writes the values; the others read them and write them again."""
    run, state = Store(folder), LAYOUTS[name][1]()
    if name == "1 plain":
        state = whole()
    else:
        read_state(run, list_checkpoints(run)[0], state, ranks)
    write_checkpoint(run, note(STEP_OF[name]), state, ranks)


def play_read(ranks: Ranks, folder: str, name: str) -> dict[str, bool]:
    """Read every layout's checkpoint in a layout; return whether every tensor is equal bit for bit."""
    run, values, actual = Store(folder), whole(), {}
    for written in list_checkpoints(run):
        state = LAYOUTS[name][1]()
        read_state(run, written, state, ranks)
        equal = torch.tensor(int(all(torch.equal(full(value), values[key]) for key, value in state.items())))
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        names = [None] * ranks.world_size
        dist.all_gather_object(names, sorted(state))
        complete = {key for part in names for key in part} == {*values}
        actual[f"{list(LAYOUTS)[written.step - 1]} -> {name}"] = bool(equal) and complete
    return actual


def until_known(saver: Saver) -> tuple[list[SaveOutcome], int]:
    """Poll until an outcome is known; return it and the number of polls without one."""
    for number in range(1000):
        if known := saver.poll():
            return known, number
        time.sleep(0.01)
    return [], 1000


def error_of(call: Callable[[], object]) -> list[str]:
    """Return type and text of the error of a call."""
    try:
        call()
    except PenstockError as error:
        return [type(error).__name__, str(error)]
    return []


def results(known: list[SaveOutcome]) -> list[Any]:
    return [["failed", o.step, o.reason] if isinstance(o, SaveFailed) else ["saved", o.checkpoint.step] for o in known]


def play_savers(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Save in the background on two ranks, of which the second is slow, then fails, then recovers."""
    run, actual = Store(str(folder)), {}
    saver = Saver(run, CheckpointConfig(keep=2), ranks)
    state = with_moments(fully_shard(build(), mesh=init_device_mesh("cpu", (2,)))) | {"model.more": torch.randn(5000)}
    write = saving.write_checkpoint

    def slow(*given: Any) -> Any:
        time.sleep(0.4 * ranks.rank)
        return write(*given)

    saving.write_checkpoint = slow
    actual["begun"] = results(saver.save(note(1), state))
    actual["slow"], actual["asked in vain"] = (lambda known, number: [results(known), number])(*until_known(saver))
    saving.write_checkpoint = write
    actual["copies"] = len(saver._copies.values)
    saver.save(note(2), state)
    actual["taken again"] = sorted(saver._copies.values)
    until_known(saver)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    saver.save(note(3), state)
    actual["full on rank 1"] = results(until_known(saver)[0])
    actual["left"] = sorted(path.name for path in (folder / "train/checkpoints").iterdir())
    actual["finish"] = error_of(saver.finish)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    buffer = HostCopies._buffer
    if ranks.rank == 1:
        HostCopies._buffer = lambda self, name, value: (_ for _ in ()).throw(MemoryError("no memory for copies"))
    saver.save(note(4), state)
    HostCopies._buffer = buffer
    actual["no memory on rank 1"] = results(until_known(saver)[0])
    actual["well again"] = results([*saver.save(note(5), state), *saver.finish()])
    actual["failures"] = saver.failures
    saver.close()
    actual["standing"] = [kept.step for kept in list_checkpoints(run)]
    dist.barrier()

    newest = list_checkpoints(run)[-1]
    actual["sizes"] = {name: file.size for name, file in newest.files.items()}
    if ranks.rank == 0:
        path = folder / newest.name / "__1_0.distcp"
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    dist.barrier()
    actual["changed byte"] = error_of(lambda: read_state(run, newest, state, ranks))
    return actual


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a run with a checkpoint of every layout."""
    folder = str(tmp_path_factory.mktemp("layouts"))
    for name, (world_size, _) in LAYOUTS.items():
        shared_pool().play(world_size, play_write, folder, name)
    return folder


@pytest.fixture(scope="module")
def savers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the observations of the savers on two ranks."""
    return shared_pool().play(2, play_savers, tmp_path_factory.mktemp("savers"))


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in LAYOUTS]
)
def test_a_layout_reads_what_every_layout_wrote(layouts: str, layout: str) -> None:
    for actual in shared_pool().play(LAYOUTS[layout][0], play_read, layouts, layout):
        assert actual == dict.fromkeys((f"{written} -> {layout}" for written in LAYOUTS), True)


@pytest.mark.parametrize("layout", ["1 plain", "2 plain", "4 plain", "4 hsdp", "4 fsdp", "4 tensor x fsdp"])
def test_every_tensor_is_written_once(layouts: str, layout: str) -> None:
    run = Store(layouts)
    written = list_checkpoints(run)[list(LAYOUTS).index(layout)]
    metadata = FileSystemReader(run.path(written.name)).read_metadata()
    volumes = {
        name: sum(chunk.sizes.numel() for chunk in tensor.chunks)
        for name, tensor in metadata.state_dict_metadata.items()
    }
    assert volumes == {name: value.numel() for name, value in whole().items()}
    places = {(place.relative_path, place.offset) for place in metadata.storage_data.values()}
    assert len(places) == len(metadata.storage_data)
    states = {name for name in written.files if name != ".metadata"}
    assert states == {f"__{rank}_0.distcp" for rank in range(int(layout[0]))}


def test_ranks_hear_of_a_save_together(savers: list[dict[str, Any]]) -> None:
    first, second = savers
    for actual in savers:
        assert actual["begun"] == []
        assert actual["slow"] == [["saved", 1]]
    assert first["asked in vain"] == second["asked in vain"] > 5


def test_what_another_rank_writes_is_copied_once(savers: list[dict[str, Any]]) -> None:
    first, second = savers
    assert first["copies"] == second["copies"] == len(whole()) + 1
    steps = {name for name in whole() if name.startswith("step.")} | {"model.more"}
    shared = [steps & {*actual["taken again"]} for actual in savers]
    assert shared[0] | shared[1] == steps
    assert not shared[0] & shared[1]


def test_the_failure_of_one_rank_is_everyones(savers: list[dict[str, Any]]) -> None:
    for rank, actual in enumerate(savers):
        ((kind, step, reason),) = actual["full on rank 1"]
        assert (kind, step) == ("failed", 3)
        assert "step-000003: expected a checkpoint, got [Errno 27] File too large. Free disk space" in reason
        assert actual["left"] == ["step-000001", "step-000002"]
        assert actual["finish"] == [(ContractError, FirstRankFailed)[rank].__name__, reason]
        ((kind, step, reason),) = actual["no memory on rank 1"]
        assert (kind, step) == ("failed", 4)
        assert "expected a checkpoint, got no memory for copies" in reason
        assert actual["well again"] == [["saved", 5]]
        assert actual["failures"] == 2
        assert actual["standing"] == [2, 5]


def test_a_changed_byte_stops_every_rank(savers: list[dict[str, Any]]) -> None:
    for rank, actual in enumerate(savers):
        kind, text = actual["changed byte"]
        assert kind == ("ContractError", "FirstRankFailed")[rank]
        assert "\n  __1_0.distcp: expected SHA-256 " in text
        assert sorted(actual["sizes"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


# ---------------------------------------------------------------------------------------- asked for without waiting


def poll_in_turn(ranks: Ranks, folder: str) -> tuple[float, float]:
    """Return the start and end of the first poll of a save on this rank; the second rank polls late."""
    saver = Saver(Store(folder), CheckpointConfig(mode="async"), ranks)
    state: State = {"model.weight": torch.ones(4)}
    saver.save(note(1), state)
    if ranks.rank == 1:
        time.sleep(0.5)
    began = time.monotonic()
    first = saver.poll()
    ended = time.monotonic()
    known, _ = until_known(saver)
    saver.close()
    return (began, ended) if not first and results(known) else (0.0, 0.0)


def test_a_poll_waits_for_no_rank(tmp_path: Path) -> None:
    (_, ended), (began, _) = shared_pool().play(2, poll_in_turn, str(tmp_path))
    assert 0 < ended < began
