"""Tests of the reader: every row is the promised slice of its stream, whoever asks for it."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tiny_dataset
import torch
from tiny_dataset import make_tiny_dataset

from schemas.errors import ConfigError, ContractError
from schemas.tokens import Dataset, Shard, open_dataset, shard_schema
from train import data
from train.config import TrainConfig
from train.data import Batches, open_batches
from train.skips import SkipList

CONFIG = TrainConfig(seq_len=64)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two sources of several shards, each shard of several record batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_dataset, "BATCH_DOCUMENTS", 5)
        return open_dataset(make_tiny_dataset(tmp_path_factory.mktemp("run")))


def stream_of(dataset: Dataset, stream: str) -> np.ndarray:
    """All tokens of a stream, read without the reader."""
    documents: list[list[int]] = []
    for shard in dataset.streams[stream]:
        with pa.ipc.open_file(dataset.folder.path(shard.path)) as reader:
            documents += reader.read_all().column("tokens").to_pylist()
    return np.concatenate(documents)


def expected(dataset: Dataset, batches: Batches, step: int) -> list[list[int]]:
    found = batches.samples(step)
    streams = {source: stream_of(dataset, f"{source}/train") for source in batches.order.sources}
    return [
        streams[batches.order.sources[source]][start : start + batches.order.seq_len + 1].tolist()
        for source, start in zip(found.source, found.start, strict=True)
    ]


@pytest.mark.parametrize("seq_len", [32, 256])
def test_rows_are_slices_of_their_streams_over_batches_and_shards(dataset: Dataset, seq_len: int) -> None:
    """Two whole epochs, so every border between documents, record batches and shards is crossed."""
    batches = open_batches(dataset, TrainConfig(seq_len=seq_len), global_batch=21)
    samples = sum(stream.num_samples for stream in batches.order.streams)
    for step in range(-(-2 * samples // 21)):
        rows = batches.batch(step)
        assert (rows.dtype, rows.shape) == (torch.int64, (21, seq_len + 1))
        assert rows.tolist() == expected(dataset, batches, step)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_the_global_batch_does_not_depend_on_who_reads_it(dataset: Dataset, ranks: int) -> None:
    whole = open_batches(dataset, CONFIG, 7, SkipList((4, 30))).batch(5)
    bounds = [7 * rank // ranks for rank in range(ranks + 1)]
    readers = [open_batches(dataset, CONFIG, 7, SkipList((4, 30))) for _ in range(ranks)]
    parts = [readers[r].batch(5, range(bounds[r], bounds[r + 1])) for r in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)


def test_any_step_is_reached_directly(dataset: Dataset) -> None:
    batches = open_batches(dataset, CONFIG, 8)
    late = batches.batch(1000)
    for step in (0, 3, 1):
        batches.batch(step)
    assert torch.equal(batches.batch(1000), late)
    # A different batch size cuts the same samples.
    assert torch.equal(open_batches(dataset, CONFIG, 16).batch(500)[:8], late)


def test_rows_outside_the_batch_are_refused(dataset: Dataset) -> None:
    batches = open_batches(dataset, CONFIG, 8)
    assert batches.batch(0, range(8, 8)).shape == (0, 65)
    for rows in (range(0, 9), range(0, 8, 2)):
        with pytest.raises(ValueError, match="not a contiguous part of a global batch of 8"):
            batches.batch(0, rows)


def test_few_open_shards_give_the_same_rows(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [open_batches(dataset, CONFIG, 32).batch(step) for step in range(4)]
    monkeypatch.setattr(data, "OPEN_SHARDS", 1)
    few = open_batches(dataset, CONFIG, 32)
    assert all(torch.equal(few.batch(step), many[step]) for step in range(4))


def test_heldout_is_fixed_disjoint_from_training_and_no_longer_than_it_is(dataset: Dataset) -> None:
    batches = open_batches(dataset, CONFIG, 8)
    rows = batches.heldout(10**6)
    tokens = dataset.num_tokens("heldout")
    assert len(rows) == sum((count - 1) // 64 for count in tokens.values())
    assert torch.equal(batches.heldout(5), rows[:5])
    assert torch.equal(open_batches(dataset, TrainConfig(seq_len=64, seed=9), 3).heldout(5), rows[:5])
    streams = {source: stream_of(dataset, f"{source}/heldout").tolist() for source in tokens}
    slices = {tuple(s[i : i + 65]) for s in streams.values() for i in range(0, len(s) - 64, 64)}
    assert {tuple(row) for row in rows.tolist()} == slices


def test_no_heldout_sample_gives_no_rows(dataset: Dataset) -> None:
    streams = {name: shards for name, shards in dataset.streams.items() if name.endswith("/train")}
    batches = open_batches(dataclasses.replace(dataset, streams=streams), CONFIG, 8)
    assert batches.heldout(4).shape == (0, 65)


def test_wide_vocabularies_are_read_from_uint32(tmp_path: Path) -> None:
    dataset = open_dataset(make_tiny_dataset(tmp_path, {"web": 20}, vocab_size=70_000))
    batches = open_batches(dataset, CONFIG, 16)
    assert dataset.tokenizer.dtype == "uint32"
    assert int(batches.batch(0).max()) >= 1 << 16
    assert batches.batch(0).tolist() == expected(dataset, batches, 0)


def test_a_dataset_too_small_for_one_sample_is_refused(tmp_path: Path) -> None:
    dataset = open_dataset(make_tiny_dataset(tmp_path, {"web": 3}, chunk_tokens=8192))
    with pytest.raises(
        ConfigError, match=rf"at least 8193 training tokens .* web has {dataset.num_tokens()['web']} tokens"
    ):
        open_batches(dataset, CONFIG, 1)


def with_shard(dataset: Dataset, **changes: object) -> Dataset:
    """The dataset with the books' first shard promised differently."""
    first, *rest = dataset.streams["books/train"]
    changed = Shard(**(dataclasses.asdict(first) | changes))
    return dataclasses.replace(dataset, streams={"books/train": [changed, *rest]})


def test_a_shard_that_does_not_hold_what_it_promised_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    tokens = dataset.streams["books/train"][0].num_tokens
    with pytest.raises(ContractError, match=rf"promised {tokens + 1} tokens of uint16, found {tokens} of uint16"):
        open_batches(with_shard(dataset, num_tokens=tokens + 1), CONFIG, 32).batch(0)
    with pytest.raises(ContractError, match=r"gone.arrow: promised a token shard, found .*No such file"):
        open_batches(with_shard(dataset, path="gone.arrow"), CONFIG, 32).batch(0)
    first = dataset.folder.path(dataset.streams["books/train"][0].path)
    (tmp_path / "half.arrow").write_bytes(Path(first).read_bytes()[:1000])
    half = dataclasses.replace(with_shard(dataset, path="half.arrow"), folder=tiny_dataset.Store(str(tmp_path)))
    with pytest.raises(ContractError, match=r"half.arrow: promised a token shard, found "):
        open_batches(half, CONFIG, 32).batch(0)


def test_an_id_outside_the_vocabulary_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    schema = shard_schema("uint16")
    with pa.ipc.new_file(str(tmp_path / "wide.arrow"), schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([{"doc_id": b"x" * 16, "tokens": [*[5] * 299, 512]}], schema))
    changed = dataclasses.replace(
        with_shard(dataset, path="wide.arrow", num_tokens=300), folder=tiny_dataset.Store(str(tmp_path))
    )
    changed.streams["books/train"][1:] = []
    batches = open_batches(changed, TrainConfig(seq_len=256), 1)
    assert batches.batch(0).max() == 5
    changed.streams["books/train"][0] = dataclasses.replace(changed.streams["books/train"][0], num_tokens=300)
    wide = dataclasses.replace(changed, chunk_tokens=299)
    with pytest.raises(ContractError, match=r"ids below the vocabulary of 512, found 512"):
        open_batches(wide, TrainConfig(seq_len=299), 1).batch(0)
