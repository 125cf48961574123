"""A run of 70 B parameters and 10^13 tokens on 1,000 GPUs, by arithmetic on the code's own structures.

Every figure is computed here from what the code builds: the sharded model, the routes of sums, the objects of a
manifest, the metadata that torch writes. docs/scale.md has the same table. Print it with `pytest -s`.
"""

import gc
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from schemas.manifest import make_manifest
from schemas.storage import Store
from schemas.tokens import RESERVED, Dataset, read_shards
from tests.support.paths import ROOT
from train.config.settings import Settings, load_settings
from train.data.mapped import MappedDataset, map_dataset, write_mapped
from train.model.draw import num_drawn
from train.model.shape import ModelShape, num_parameters
from train.model.transformer import Constant, build_model, initial_deviation
from train.optim.optimizer import make_optimizer
from train.optim.parameter import region_of
from train.parallel.data_parallel import shard
from train.parallel.metadata import (
    ENTRY_BYTES,
    MAX_METADATA_BYTES,
    metadata_advice,
    metadata_bytes,
    num_entries,
    num_tensors,
)
from train.parallel.ranks import build_mesh
from train.parallel.totals import num_hops, sum_route

pytestmark = pytest.mark.dist

GPUS, GPUS_PER_NODE = 1000, 8
SHAPE = ModelShape(
    vocab_size=128_256,
    num_layers=80,
    d_model=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    d_ffw=28_672,
    tie_embeddings=False,
)
"""The shape of Llama 3 70B."""
SHARDS_OF_STREAM, STREAMS = 20_000, 5
"""10^13 tokens in shards of 10^8, in five sources."""
BLOCKS_OF_SHARD = 98
"""Record batches of a shard of 10^8 tokens in documents of 1,000."""
SAMPLE = 200
"""Shards of a stream in the manifest that is measured; memory is proportional to them."""
Figure = tuple[str, float, str, float]
"""What, its value, its unit, and its bound."""


def settings_of(**layout: object) -> Settings:
    return load_settings({"layout": layout, "train": {"precision": "bf16"}}, [], "test").for_device("cuda")


# ------------------------------------------------------------------------------------------------------ initial weights


@cache
def drawn_by_a_rank(replicate: int) -> tuple[int, int]:
    """Return the numbers that the rank with the largest shard draws, and its elements of weights."""
    layout = settings_of(replicate=replicate).layout
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)
    try:
        model, mesh = build_model(SHAPE), build_mesh(layout, GPUS, "cpu")
        shard(model, mesh, layout, "bf16")
        regions = {name: (weight.shape, region_of(name, weight)) for name, weight in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    held = sum(prod(part.stop - part.start for part in region) for _, region in regions.values())
    return sum(
        num_drawn(size, region)
        for name, (size, region) in regions.items()
        if not isinstance(initial_deviation(name, size, SHAPE), Constant)
    ), held


def weights() -> Iterator[Figure]:
    """Initial weights: every rank drew all of them before."""
    drawn, held = drawn_by_a_rank(25)
    yield "numbers drawn by a rank, 25 replicas of 40 shards", drawn / 1e6, "million", 1.01 * held / 1e6
    yield "the same, 1,000 shards", drawn_by_a_rank(1)[0] / 1e6, "million", 1.3 * num_parameters(SHAPE) / GPUS / 1e6


# ------------------------------------------------------------------------------------------------------------- manifest


def dataset_of(number: int, folder: Path) -> Dataset:
    """Return a dataset with `number` shards in each stream, as objects of a manifest."""
    files, paths, blocks = [], {}, {}
    for stream in range(STREAMS):
        for place in range(number):
            for kind in ("tokens", "docs"):
                key = f"source-{stream}/train/{place:05d}.{kind}"
                sha256 = f"{stream * number + place:064x}"
                files.append({"key": key, "rows": 100_000, "bytes": 200_000_000, "sha256": sha256})
                paths[key] = f"source-{stream}/train/shard-{place:05d}-{place:012x}.{kind}.arrow"
            blocks[f"source-{stream}/train/{place:05d}.tokens"] = " ".join(
                f"{2_000_000 + place:x}:{place * 1000 + block:08x}" for block in range(BLOCKS_OF_SHARD)
            )
    contract = {"kind": "sentencepiece", "sha256": "0" * 64, "vocab_size": 65_000, "before": [], "after": ["eos"]}
    contract["reserved"] = {name: place for place, name in enumerate(RESERVED)}
    streams = {f"source-{stream}/train": [10**8] * number for stream in range(STREAMS)}
    content = {"table": "tokens", "stages": {}, "config": {}, "inputs": [], "files": files}
    content |= {"counts": {"rows_in": 1, "rows_kept": 1}}
    content["figures"] = {"chunk_tokens": 65_536, "tokenizer": contract, "streams": streams}
    run = {"paths": paths, "blocks": blocks, "started": "", "wall_seconds": 0, "cpu_seconds": 0, "code_version": ""}
    manifest, store = make_manifest(content, run, "test"), Store(str(folder))
    tokenizer, shards = read_shards(store, manifest)
    path = manifest.paths["source-0/train/00000.tokens"]
    return Dataset(store, manifest, tokenizer, store, path, 65_536, shards, [], ())


def traced(function: Callable[[], object]) -> int:
    """Return the bytes of Python objects and Arrow buffers that the result of a function holds."""
    gc.collect()
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        held = function()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before + 0 * id(held)
    finally:
        tracemalloc.stop()


@cache
def manifest_memory(folder: Path) -> tuple[float, float, float]:
    """Return the bytes a shard takes on a leader, on another rank of its node, and in the mapped file."""
    number = SAMPLE * STREAMS
    whole = traced(lambda: dataset_of(SAMPLE, folder))
    path = folder / "mapped"
    write_mapped(dataset_of(SAMPLE, folder), path)

    def mapped() -> MappedDataset:
        dataset = map_dataset(path)
        assert sum(dataset.num_tokens().values()) == number * 10**8
        return dataset

    return whole / number, traced(mapped) / number, path.stat().st_size / number


def manifest(folder: Path) -> Iterator[Figure]:
    """Memory of the manifest of 10^13 tokens."""
    number = SHARDS_OF_STREAM * STREAMS
    whole, mapped, file = (size * number / 1e6 for size in manifest_memory(folder))
    yield "manifest as objects, on one rank a node", whole, "MB", 1000
    yield "manifest on each other rank, mapped", mapped, "MB", 20
    yield "file that the ranks of a node share", file, "MB", 300


# ----------------------------------------------------------------------------------------------------------- a step sum


def step_sum() -> Iterator[Figure]:
    """Hops of the sum of targets and stop signals, which each step needs."""
    routes = [sum_route(rank, GPUS) for rank in range(GPUS)]
    messages = sum(2 * (route.folded is not None) + len(route.partners) for route in routes)
    yield "hops of the sum over all ranks in a step", num_hops(GPUS), "hops", 12
    yield "the same, as a ring", 2 * (GPUS - 1), "hops", 2 * GPUS
    yield "messages of a rank in a sum", messages / GPUS, "messages", 12


# ----------------------------------------------------------------------------------------------- checkpoint metadata


def stored_metadata(shards: int, layers: int) -> tuple[int, int]:
    """Return the bytes of the metadata that torch pickles for a model with AdamW states, and its entries."""
    shape, tensors, storage = SHAPE.model_copy(update={"num_layers": layers}), {}, {}
    named = dict(build_model(shape).named_parameters())
    config = load_settings({}, [], "test").optim
    states = [key for member in make_optimizer(named, config).members for key in member.state]
    kinds, files = ["model", *dict.fromkeys(states)], [f"__{rank}_0.distcp" for rank in range(shards)]
    assert len(states) == 2 * len(named) == 2 * num_tensors(shape)
    for kind in kinds:
        for name, parameter in named.items():
            rows, *rest = parameter.shape
            share = -(-rows // shards)
            bounds = [(first, min(share, rows - first)) for first in range(0, rows, share)]
            chunks = [
                ChunkStorageMetadata(torch.Size((first, *[0] * len(rest))), torch.Size((size, *rest)))
                for first, size in bounds
            ]
            fqn = f"{kind}.{name}"
            tensors[fqn] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), parameter.shape, chunks)
            for rank, chunk in enumerate(chunks):
                # Rank 0 has gathered the entries of a rank: the name of its file once, and the tensor's in each.
                own = MetadataIndex(f"{kind}.{name}", chunk.offsets, rank)
                storage[own] = _StorageInfo(files[rank], 10**9 + rank, 10**7)
    return len(pickle.dumps(Metadata(tensors, storage_data=storage))), len(storage)


def test_an_entry_of_the_metadata_has_the_bytes_that_a_plan_counts() -> None:
    (small, few), (large, many) = stored_metadata(8, 2), stored_metadata(64, 2)
    assert (large - small) / (many - few) == pytest.approx(ENTRY_BYTES, rel=0.1)
    shape = SHAPE.model_copy(update={"num_layers": 2})
    assert many == num_entries(shape, settings_of(), 64)


def checkpoints() -> Iterator[Figure]:
    """Metadata of a checkpoint."""
    limit = MAX_METADATA_BYTES / 1e6
    yield "checkpoint metadata, 1,000 shards", metadata_bytes(SHAPE, settings_of(), GPUS) / 1e6, "MB", 600
    yield (
        "checkpoint metadata, 25 replicas of 40",
        metadata_bytes(SHAPE, settings_of(replicate=25), GPUS) / 1e6,
        "MB",
        limit,
    )


def test_a_plan_advises_replicas_where_the_metadata_is_large() -> None:
    (sentence,) = metadata_advice(SHAPE, settings_of(), GPUS)
    assert "has 347 MB, which every rank parses at a resume: layout.replicate = 8 makes it 43 MB." in sentence
    assert [*metadata_advice(SHAPE, settings_of(replicate=25), GPUS)] == []
    (alone,) = metadata_advice(SHAPE, settings_of(data="zero1"), GPUS)
    assert "no number of replicas" in alone


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"positions": "relative", "bias": True},
        {"activation": "gelu", "qk_norm": True, "residual_mixing": True, "value_embeddings": 2},
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_of_a_shape_are_counted(change: dict, tied: bool) -> None:
    shape = ModelShape.model_validate(SHAPE.model_dump() | {"num_layers": 3, "tie_embeddings": tied} | change)
    assert num_tensors(shape) == sum(1 for _ in build_model(shape).parameters())


# ---------------------------------------------------------------------------------------------------------------- table


def shown(value: float) -> str:
    """Return a figure with two digits, which small changes of the code and of Python do not change."""
    return f"{float(f'{value:.2g}'):,g}"


def test_every_figure_is_within_its_bound_and_in_the_docs(tmp_path: Path) -> None:
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    rows = [*weights(), *manifest(tmp_path), *step_sum(), *checkpoints()]
    lines = [f"| {what} | {shown(value)} {unit} | {shown(bound)} |" for what, value, unit, bound in rows]
    print("\n".join(lines))
    assert [what for what, value, _, bound in rows if value > bound] == []
    cells = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    written = {cell[0].strip(): float(cell[1].split()[0].replace(",", "")) for cell in cells[1:]}
    # Versions of Python differ in the bytes of their objects.
    assert written == {what: pytest.approx(value, rel=0.2) for what, value, *_ in rows}
