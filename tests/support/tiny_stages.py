"""Stages, orders and batches for the tests of train/, without a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.manifest import Manifest, make_manifest
from schemas.storage import Store
from schemas.tokens import RESERVED, Dataset, Member, Shard, TokenizerContract
from train.config.train import TrainConfig
from train.data.batches import Batches, open_batches
from train.data.order import SampleOrder, make_order, open_streams, stage_counts
from train.data.packed_rows import PackedIndex
from train.data.packing import open_packings
from train.data.stages import NO_SKIPS, SkipList, StagePlan, resolve_stages

Packings = Mapping[str, PackedIndex] | None


def stages_of(
    dataset: Dataset, config: TrainConfig, global_batch: int = 8, steps: int = 100, packings: Packings = None
) -> tuple[StagePlan, ...]:
    """Return the stages of the settings; without `train.stages`, a single stage with `steps` of `global_batch`."""
    counts = stage_counts(open_streams(dataset, config, packings), config, dataset.copies)
    return resolve_stages(config, counts, global_batch, steps * global_batch * config.seq_len)


def order_of(dataset: Dataset, config: TrainConfig, skip: SkipList = NO_SKIPS, **size: int) -> SampleOrder:
    """Return the order under these settings."""
    return make_order(dataset, config, stages_of(dataset, config, **size), skip)


def batches_of(
    dataset: Dataset,
    config: TrainConfig,
    global_batch: int = 8,
    skip: SkipList = NO_SKIPS,
    run: Store | None = None,
) -> Batches:
    """Return the batches under these settings; `run` contains the packed rows."""
    packings = None if run is None else open_packings(run, dataset, config)
    stages = stages_of(dataset, config, global_batch, packings=packings)
    return open_batches(dataset, config, stages, skip, packings)


def staged(stages: Sequence[dict[str, Any]], **settings: Any) -> TrainConfig:
    """Return settings with these stages."""
    return TrainConfig.model_validate({"seq_len": 64, "stages": list(stages)} | settings)


def bare_dataset(store: Store, streams: dict[str, list[Shard]], chunk_tokens: int, vocab_size: int) -> Dataset:
    """Return a dataset of the shards in a folder, with an empty manifest."""
    reserved = {name: i for i, name in enumerate(RESERVED)}
    contract = TokenizerContract(
        kind="huggingface", sha256="", vocab_size=vocab_size, reserved=reserved, before=[], after=["eos"]
    )
    shards = {name: range(len(numbers)) for name, numbers in streams.items()}
    manifest = _empty_manifest()
    members = (Member(store, manifest.digest, {}, shards, range(0)),)
    return Dataset(store, manifest, contract, store, "", chunk_tokens, streams, [], members)


def _empty_manifest() -> Manifest:
    content = {"table": "tokens", "stages": {}, "config": {}, "inputs": [], "files": [], "figures": {}}
    run = {"paths": {}, "started": "", "wall_seconds": 0.0, "cpu_seconds": 0.0, "code_version": "test"}
    return make_manifest(content | {"counts": {"rows_in": 0, "rows_kept": 0}}, run, "tokens")
