"""The reader of batches: every row consists of the expected pieces of its stream, on any rank."""

import dataclasses
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, ContractError
from schemas.tokens import Dataset, Shard, open_dataset, shard_schema
from tests.support import tiny_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_stages import batches_of, staged
from tests.support.tiny_takedown import documents_of, take_down
from train.config.train import TrainConfig
from train.data import shards as reader
from train.data.batches import Batches
from train.data.rows import IGNORED, Rows, concatenate_rows
from train.data.shards import StreamReader
from train.data.stages import SkipList

CONFIG = TrainConfig(seq_len=64)
STAGES = staged(
    [
        {"tokens": 64 * 21},
        {"tokens": 128 * 5 * 7, "seq_len": 128, "global_batch": 5, "weights": {"web": 1, "books": 2}},
        {"tokens": 32 * 9 * 50, "seq_len": 32, "global_batch": 9},
        {"seq_len": 256, "weights": {"web": 5, "books": 1}},
    ],
    global_batch=3,
    steps=100,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two sources of several shards, each shard of several record batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_dataset, "BATCH_DOCUMENTS", 5)
        return open_dataset(make_tiny_dataset(tmp_path_factory.mktemp("run")))


def stream_of(dataset: Dataset, stream: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens of a stream and the document number of each, read without the reader."""
    documents: list[list[int]] = []
    for shard in dataset.streams[stream]:
        with pa.ipc.open_file(dataset.folder.path(shard.path)) as file:
            documents += file.read_all().column("tokens").to_pylist()
    return np.concatenate(documents), np.repeat(np.arange(len(documents)), [len(left) for left in documents])


def expected(dataset: Dataset, batches: Batches, step: int) -> tuple[list, list, list]:
    """Return inputs, targets and documents of a step, token by token."""
    samples = batches.samples(step)
    pieces = samples.pieces
    streams = [stream_of(dataset, f"{source}/train") for source in batches.order.sources]
    inputs, targets, documents = ([[] for _ in samples.index] for _ in range(3))
    for row, start, length in zip(pieces.row, pieces.start, pieces.length, strict=True):
        tokens, numbers = streams[samples.source[row]]
        inputs[row] += tokens[start : start + length].tolist()
        targets[row] += tokens[start + 1 : start + length + 1].tolist()
        own, before = numbers[start : start + length], documents[row][-1] + 1 if documents[row] else 0
        documents[row] += (own - own[0] + before).tolist()
    return inputs, targets, documents


def same(left: Rows, right: Rows) -> bool:
    """Return True if all tensors are equal."""
    pairs = [(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(Rows)]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("seq_len", [32, 256])
def test_rows_are_slices_of_their_streams_over_batches_and_shards(dataset: Dataset, seq_len: int) -> None:
    """Two whole epochs, so every border between documents, record batches and shards is crossed."""
    batches = batches_of(dataset, TrainConfig(seq_len=seq_len), global_batch=21)
    samples = sum(stream.num_units // seq_len for stream in batches.order.streams)
    for step in range(-(-2 * samples // 21)):
        rows = batches.batch(step)
        assert [(t.dtype, t.shape) for t in (rows.inputs_BT, rows.targets_BT)] == [(torch.int64, (21, seq_len))] * 2
        assert (rows.documents_BT.dtype, rows.sources_B.dtype) == (torch.int32, torch.int64)
        actual = rows.inputs_BT.tolist(), rows.targets_BT.tolist(), rows.documents_BT.tolist()
        assert actual == expected(dataset, batches, step)
        assert rows.sources_B.tolist() == batches.samples(step).source.tolist()


def test_rows_of_stages_are_pieces(dataset: Dataset) -> None:
    """Stages of 64, 128, 32 and 256 tokens per row: some rows cross a chunk boundary, where documents end."""
    batches, straddling = batches_of(dataset, STAGES), 0
    for step in range(100):
        rows, samples = batches.batch(step), batches.samples(step)
        actual = rows.inputs_BT.tolist(), rows.targets_BT.tolist(), rows.documents_BT.tolist()
        assert actual == expected(dataset, batches, step)
        assert rows.inputs_BT.shape == (len(samples.index), samples.seq_len)
        straddling += len(samples.pieces) - len(samples.index)
    assert straddling > 20


def test_documents_are_numbered_only_when_they_are_masked(dataset: Dataset) -> None:
    plain = batches_of(dataset, TrainConfig(seq_len=64, document_mask=False))
    assert plain.batch(0).documents_BT is None
    assert torch.equal(plain.batch(3).inputs_BT, batches_of(dataset, CONFIG).batch(3).inputs_BT)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("step", [5, 60])
def test_the_global_batch_does_not_depend_on_the_reading_ranks(dataset: Dataset, ranks: int, step: int) -> None:
    def opened() -> Batches:
        return batches_of(dataset, STAGES, skip=SkipList((4, 30, (1 << 40) + 3)))

    whole = opened().batch(step)
    bounds = [len(whole) * rank // ranks for rank in range(ranks + 1)]
    parts = [opened().batch(step, range(a, b)) for a, b in pairwise(bounds)]
    assert concatenate_rows(parts).num_targets == whole.num_targets == sum(part.num_targets for part in parts)
    for name in ("inputs_BT", "targets_BT", "documents_BT", "sources_B"):
        assert torch.equal(getattr(concatenate_rows(parts), name), getattr(whole, name))


def test_any_step_is_reached_directly(dataset: Dataset) -> None:
    batches = batches_of(dataset, CONFIG)
    late = batches.batch(1000)
    for step in (0, 3, 1):
        batches.batch(step)
    assert same(batches.batch(1000), late)
    # A different batch size cuts the same samples.
    assert same(batches_of(dataset, CONFIG, 16).batch(500).part(0, 8), late)


def test_rows_outside_the_batch_are_rejected(dataset: Dataset) -> None:
    batches = batches_of(dataset, CONFIG)
    empty = batches.batch(0, range(8, 8))
    assert (empty.inputs_BT.shape, empty.documents_BT.shape, len(empty.sources_B)) == ((0, 64), (0, 64), 0)
    for rows in (range(0, 9), range(0, 8, 2)):
        with pytest.raises(ValueError, match="expected contiguous rows of a global batch of 8, got range"):
            batches.batch(0, rows)


def test_few_open_shards_return_the_same_rows(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [batches_of(dataset, CONFIG, 32).batch(step) for step in range(4)]
    monkeypatch.setattr(reader, "OPEN_SHARDS", 1)
    few = batches_of(dataset, CONFIG, 32)
    assert all(same(few.batch(step), many[step]) for step in range(4))


# --------------------------------------------------------------------------------------------------- hand-made shards


def written(folder: Path, dataset: Dataset, shards: list[list[list[list[int]]]], **changes: Any) -> Dataset:
    """Return the dataset with a source of these shards, each a list of record batches of documents of token ids."""
    schema, made = shard_schema("uint16"), []
    for number, batches in enumerate(shards):
        rows = [[{"doc_id": bytes(16), "tokens": tokens} for tokens in documents] for documents in batches]
        blocks = tiny_dataset.write_blocks(str(folder / f"{number}.arrow"), schema, rows)
        total = sum(len(tokens) for documents in batches for tokens in documents)
        made.append(Shard("web/train", number, f"{number}.arrow", "", total, 0, "", "", blocks))
    fields = {"folder": tiny_dataset.Store(str(folder)), "streams": {"web/train": made}, "chunk_tokens": 8}
    return dataclasses.replace(dataset, **(fields | changes))


def test_documents_of_a_row_by_hand(dataset: Dataset, tmp_path: Path) -> None:
    """Documents of 3, 0, 2, 6, 1 and 5 tokens over batches and shards, and one token that is only a target."""
    word = 200
    shards = [[[[word] * 3, []], [[word + 1] * 2]], [], [[[word + 2] * 6, [word + 3], [word + 4] * 5]]]
    made = written(tmp_path, dataset, shards)
    batches = batches_of(made, TrainConfig(seq_len=8, window_shards=9), global_batch=2)
    rows, starts = batches.batch(0), batches.samples(0).pieces.start.tolist()
    by_start = dict(zip(starts, zip(rows.inputs_BT.tolist(), rows.documents_BT.tolist()), strict=True))
    assert by_start == {
        0: ([200, 200, 200, 201, 201, 202, 202, 202], [0, 0, 0, 1, 1, 2, 2, 2]),
        8: ([202, 202, 202, 203, 204, 204, 204, 204], [0, 0, 0, 1, 2, 2, 2, 2]),
    }
    assert rows.targets_BT[starts.index(8)].tolist() == [202, 202, 203, 204, 204, 204, 204, 204]


def test_padding_and_tombstones_are_never_targets(dataset: Dataset, tmp_path: Path) -> None:
    pad, tombstone = dataset.tokenizer.reserved["pad"], dataset.tokenizer.reserved["tombstone"]
    made = written(tmp_path, dataset, [[[[300, tombstone, 301, pad, 302, 303, 304, 305, 306]]]])
    rows = batches_of(made, TrainConfig(seq_len=4), global_batch=2).batch(0)
    assert sorted(rows.inputs_BT.tolist()) == [[300, tombstone, 301, pad], [302, 303, 304, 305]]
    assert sorted(rows.targets_BT.tolist()) == [[IGNORED, 301, IGNORED, 302], [303, 304, 305, 306]]
    assert rows.num_targets == 6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=4), min_size=1, max_size=4), st.data())
def test_any_piece_of_any_shards(dataset: Dataset, shards: list[list[list[int]]], data: st.DataObject) -> None:
    """Shards of record batches of documents of these numbers of tokens, including empty documents."""
    lengths = [length for batches in shards for documents in batches for length in documents]
    assume(sum(lengths))
    begins = (np.cumsum(lengths) - lengths)[np.array(lengths) > 0].tolist()
    tokens = iter(range(10**4))
    named = [[[[next(tokens) for _ in range(n)] for n in documents] for documents in batches] for batches in shards]
    stream = np.arange(next(tokens))
    with tempfile.TemporaryDirectory() as folder:
        opened = written(Path(folder), dataset, named)
        read = StreamReader(opened.folder, opened.streams["web/train"], "uint16")
        start = np.array(data.draw(st.lists(st.integers(0, len(stream) - 1), max_size=5)), np.int64)
        length = np.array([data.draw(st.integers(0, len(stream) - first)) for first in start.tolist()], np.int64)
        out = np.zeros(int(length.sum()), np.uint16)
        read.read(out, np.cumsum(length) - length, start, length)
        piece, place = read.documents(start, length)
    pairs = list(zip(start.tolist(), length.tolist(), strict=True))
    assert out.tolist() == [token for first, n in pairs for token in range(first, first + n)]
    inside = [(i, begin - a) for i, (a, n) in enumerate(pairs) for begin in begins if a <= begin < a + n]
    assert sorted(zip(piece.tolist(), place.tolist(), strict=True)) == sorted(inside)


# ------------------------------------------------------------------------------------------------------ held-out rows


def test_heldout_is_fixed_disjoint_from_training_and_no_longer_than_it_is(dataset: Dataset) -> None:
    batches = batches_of(dataset, CONFIG)
    whole = batches.heldout(10**6)
    tokens = dataset.num_tokens("heldout")
    assert whole.sources == ("books", "web")
    assert np.bincount(whole.rows.sources_B).tolist() == [(tokens[source] - 1) // 64 for source in whole.sources]
    few = batches.heldout(2)
    assert few.rows.sources_B.tolist() == [0, 0, 1, 1]
    for source in (0, 1):
        own = (whole.rows.sources_B == source).nonzero()[:2, 0]
        assert torch.equal(whole.rows.inputs_BT[own], few.rows.inputs_BT[2 * source : 2 * source + 2])
    other = batches_of(dataset, STAGES.model_copy(update={"seed": 9}), 3)
    assert same(other.heldout(2).rows, few.rows)
    assert len(batches_of(dataset, TrainConfig(seq_len=64, eval_sequences=3)).heldout().rows) == 6
    for number, source in enumerate(whole.sources):
        stream = stream_of(dataset, f"{source}/heldout")[0].tolist()
        slices = {tuple(stream[i : i + 65]) for i in range(0, len(stream) - 64, 64)}
        own = whole.rows.sources_B == number
        pairs = zip(whole.rows.inputs_BT[own].tolist(), whole.rows.targets_BT[own].tolist())
        assert {(*inputs, targets[-1]) for inputs, targets in pairs} == slices


def test_bytes_per_token_are_those_of_the_document_index(dataset: Dataset) -> None:
    actual = batches_of(dataset, CONFIG).bytes_per_token
    for source, value in actual.items():
        size = tokens = 0
        for shard in dataset.streams[f"{source}/heldout"]:
            with pa.ipc.open_file(dataset.folder.path(shard.docs_path)) as file:
                rows = file.read_all().to_pylist()
            size, tokens = size + sum(r["num_bytes"] for r in rows), tokens + sum(r["num_tokens"] for r in rows)
        assert value == size / tokens
    assert sorted(actual) == ["books", "web"]


def test_without_heldout_samples_there_are_no_rows(dataset: Dataset) -> None:
    streams = {name: shards for name, shards in dataset.streams.items() if name.endswith("/train")}
    batches = batches_of(dataclasses.replace(dataset, streams=streams), CONFIG)
    actual = batches.heldout(4)
    assert (actual.sources, actual.rows.inputs_BT.shape, batches.bytes_per_token) == ((), (0, 64), {})


# ---------------------------------------------------------------------------------------------------------- errors


def test_wide_vocabularies_are_read_from_uint32(tmp_path: Path) -> None:
    dataset = open_dataset(make_tiny_dataset(tmp_path, {"web": 20}, vocab_size=70_000))
    batches = batches_of(dataset, CONFIG, 16)
    assert dataset.tokenizer.dtype == "uint32"
    assert int(batches.batch(0).inputs_BT.max()) >= 1 << 16
    assert batches.batch(0).inputs_BT.tolist() == expected(dataset, batches, 0)[0]


def test_a_dataset_too_small_for_one_sample_is_rejected(tmp_path: Path) -> None:
    dataset = open_dataset(make_tiny_dataset(tmp_path, {"web": 3}, chunk_tokens=8192))
    with pytest.raises(
        ConfigError, match=rf"at least 8193 training tokens .* web has {dataset.num_tokens()['web']} tokens"
    ):
        batches_of(dataset, CONFIG, 1)


def with_shard(dataset: Dataset, **changes: object) -> Dataset:
    """Return the dataset with other expectations of the books' first shard."""
    first, *rest = dataset.streams["books/train"]
    changed = Shard(**(dataclasses.asdict(first) | changes))
    return dataclasses.replace(dataset, streams={"books/train": [changed, *rest]})


def test_a_shard_that_differs_from_the_manifest_is_rejected(dataset: Dataset, tmp_path: Path) -> None:
    tokens = dataset.streams["books/train"][0].num_tokens
    with pytest.raises(ContractError, match=rf"expected {tokens + 1} tokens of uint16, got {tokens} of uint16"):
        batches_of(with_shard(dataset, num_tokens=tokens + 1), CONFIG, 32).batch(0)
    with pytest.raises(ContractError, match=r"gone.arrow: expected a readable token shard, got .*No such file"):
        batches_of(with_shard(dataset, path="gone.arrow"), CONFIG, 32).batch(0)
    first = dataset.folder.path(dataset.streams["books/train"][0].path)
    (tmp_path / "half.arrow").write_bytes(Path(first).read_bytes()[:1000])
    half = dataclasses.replace(with_shard(dataset, path="half.arrow"), folder=tiny_dataset.Store(str(tmp_path)))
    with pytest.raises(
        ContractError, match=r"half.arrow: expected a file of \d+ bytes, got 1000\. Run `penstock repair"
    ):
        batches_of(half, CONFIG, 32).batch(0)


def test_an_id_outside_the_vocabulary_is_rejected(dataset: Dataset, tmp_path: Path) -> None:
    made = written(tmp_path, dataset, [[[[300] * 8, [511]]]])
    assert batches_of(made, TrainConfig(seq_len=8), 1).batch(0).targets_BT.max() == 511
    wide = written(tmp_path, dataset, [[[[300] * 8, [512]]]])
    with pytest.raises(ContractError, match=r"ids below the vocabulary size of 512, got 512\. Run the step `tokens`"):
        batches_of(wide, TrainConfig(seq_len=8), 1).batch(0)


def test_bytes_per_token_leave_out_removed_documents(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    rows = [row for row in documents_of(open_dataset(run)) if row["stream"] == "web/heldout"]
    assert take_down(run.uri, doc=[row["doc_id"].hex() for row in rows[::2]]) == 0
    left = rows[1::2]
    expected = sum(row["num_bytes"] for row in left) / sum(row["num_tokens"] for row in left)
    assert batches_of(open_dataset(run), CONFIG).bytes_per_token["web"] == expected
