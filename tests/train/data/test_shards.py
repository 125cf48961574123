"""Damage to shards that the check before training does not see: each machine refuses it when it reads the batch."""

import dataclasses
import hashlib
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas.blocks import parse_blocks
from schemas.errors import ContractError
from schemas.storage import CheckedPath, Store
from schemas.tokens import Dataset, Shard, open_dataset
from tests.support.tiny_dataset import flip_byte, make_tiny_dataset
from train.data import shards
from train.data.shards import OpenShard, StreamReader
from train.data.verify import VERIFIED_NAME, verify_dataset

STREAM = "web/train"


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return open_dataset(make_tiny_dataset(tmp_path / "run", {"web": 60}))


def read_all(dataset: Dataset) -> np.ndarray:
    """The tokens of a stream, through the reader of training."""
    length = sum(shard.num_tokens for shard in dataset.streams[STREAM])
    out = np.empty(length, dataset.tokenizer.dtype)
    reader = StreamReader(dataset.folder, dataset.streams[STREAM], dataset.tokenizer.dtype)
    reader.read(out, np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([length]))
    return out


def test_a_bit_that_changes_after_a_forged_mark_is_refused_when_it_is_read(dataset: Dataset) -> None:
    run, shard = dataset.folder.child("../.."), dataset.streams[STREAM][1]
    path = dataset.folder.path(shard.path)
    flip_byte(path, -1500)
    status = os.stat(path)
    marks = {path: [status.st_size, status.st_mtime_ns, shard.sha256, status.st_ino, status.st_ctime_ns]}
    run.make_parent(VERIFIED_NAME)
    run.write_atomic(VERIFIED_NAME, repr(marks).replace("'", '"').encode())
    verify_dataset(run, dataset)
    expected = parse_blocks(shard.blocks, "")[0][1]
    with pytest.raises(
        ContractError,
        match=rf"^{path}: expected checksum {expected:08x} of record batch 0, got \w{{8}}\. "
        rf"Run `penstock repair {run.uri}`, which builds damaged files again\.$",
    ):
        read_all(dataset)


def test_a_pipe_in_the_place_of_a_shard_is_refused(dataset: Dataset) -> None:
    path = dataset.folder.path(dataset.streams[STREAM][0].path)
    os.unlink(path)
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # so that code which opens the pipe does not block the tests
    with pytest.raises(ContractError, match=r"shard-00000.arrow: expected a regular file, got a folder, pipe or devic"):
        read_all(dataset)
    os.close(writer)


def test_a_machine_that_has_a_damaged_copy_of_its_own_refuses_it(dataset: Dataset, tmp_path: Path) -> None:
    run = dataset.folder.child("../..")
    verify_dataset(run, dataset)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = open_dataset(Store(str(tmp_path / "copy")))
    assert (read_all(copy) == read_all(dataset)).all()
    flip_byte(copy.folder.path(copy.streams[STREAM][0].path), -1500)
    with pytest.raises(ContractError, match=f"^{tmp_path}/copy/tokens/v-0000000071a9/.*expected checksum"):
        read_all(copy)


@pytest.mark.parametrize("has_blocks", [True, False], ids=["blocks", "earlier version"])
def test_a_shard_of_an_earlier_version_is_compared_by_its_sha256(dataset: Dataset, has_blocks: bool) -> None:
    older = {
        name: [dataclasses.replace(shard, blocks=shard.blocks if has_blocks else "") for shard in own]
        for name, own in dataset.streams.items()
    }
    dataset = dataclasses.replace(dataset, streams=older)
    whole = read_all(dataset)
    flip_byte(dataset.folder.path(dataset.streams[STREAM][0].path), -1500)
    with pytest.raises(ContractError, match="expected checksum" if has_blocks else "expected SHA-256"):
        read_all(dataset)
    flip_byte(dataset.folder.path(dataset.streams[STREAM][0].path), -1500)
    assert (read_all(dataset) == whole).all()


def test_no_changed_byte_ends_the_process_or_is_read(dataset: Dataset) -> None:
    shard = dataset.streams[STREAM][0]
    path = Path(dataset.folder.path(shard.path))
    data, end = path.read_bytes(), parse_blocks(shard.blocks, "")[0][0]
    whole = OpenShard(dataset.folder, shard, dataset.tokenizer.dtype).view(0).copy()
    for position in [*range(0, end, 97), *range(end, len(data), 7)]:
        flip_byte(path, position)
        if position < end:
            with pytest.raises(ContractError, match="checksum"):
                OpenShard(dataset.folder, shard, dataset.tokenizer.dtype).view(0)
        else:
            assert (OpenShard(dataset.folder, shard, dataset.tokenizer.dtype).view(0) == whole).all()
        path.write_bytes(data)


def test_a_batch_is_compared_once_though_its_shard_is_opened_again(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    compare = shards.BlockFile._compare

    def counted(self: shards.BlockFile, block: int, data: object) -> None:
        compared.append(block not in self._compared)
        compare(self, block, data)

    monkeypatch.setattr(shards.BlockFile, "_compare", counted)
    monkeypatch.setattr(shards, "OPEN_SHARDS", 1)
    reader = StreamReader(dataset.folder, dataset.streams[STREAM], dataset.tokenizer.dtype)
    numbers = dataset.streams[STREAM]
    begins = np.cumsum([0, *(shard.num_tokens for shard in numbers)])[:-1]
    for _ in range(3):
        out = np.empty(len(numbers), dataset.tokenizer.dtype)
        reader.read(out, np.arange(len(numbers)), begins, np.ones(len(numbers), np.int64))
    assert sum(compared) == len(numbers)
    assert len(compared) > len(numbers)


@pytest.mark.parametrize("harm", ["first", "last", "null list", "null token", "type"])
def test_lists_that_do_not_have_all_tokens_one_after_another_are_refused(tmp_path: Path, harm: str) -> None:
    """A stranger's shard, whose digests are fitted: its number of tokens is right."""
    values = pa.array([1, 2, 3, None if harm == "null token" else 4, 5, 6, 7, 8, 9], pa.uint16())
    mask = pa.array([False, True, False]) if harm == "null list" else None
    tokens = pa.ListArray.from_arrays(pa.array([0, 3, 5, 9], pa.int32()), values, mask=mask)
    if harm == "type":
        tokens = pa.array([3, 2, 4])
    batch = pa.record_batch({"doc_id": pa.array([b"x" * 16] * 3, pa.binary(16)), "tokens": tokens})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), batch.schema) as writer:
        writer.write_batch(batch)
    changed = {"first": (1, 3, 5, 9), "last": (0, 3, 5, 8)}.get(harm, (0, 3, 5, 9))
    data = (tmp_path / "a.arrow").read_bytes().replace(struct.pack("<4i", 0, 3, 5, 9), struct.pack("<4i", *changed))
    (tmp_path / "a.arrow").write_bytes(data)
    path = CheckedPath("a.arrow", len(data), hashlib.sha256(data).hexdigest())
    shard = Shard("web/train", 0, path, path, 9, 3, path.sha256, path.sha256)
    with pytest.raises(ContractError, match=r"expected (documents that have the tokens|a readable token shard)"):
        OpenShard(Store(str(tmp_path)), shard, "uint16").view(0)


@pytest.mark.parametrize(("start", "length"), [(-9, 20), (1 << 40, 5), (0, 1 << 30)])
def test_places_outside_of_a_stream_are_refused(dataset: Dataset, start: int, length: int) -> None:
    """As a stranger's document index may name them."""
    reader = StreamReader(dataset.folder, dataset.streams[STREAM], dataset.tokenizer.dtype)
    with pytest.raises(
        ContractError, match=rf"expected tokens 0 to \d+ of a stream, got {start} to {start + length} by"
    ):
        reader.read(np.empty(9, np.uint16), np.zeros(1, np.int64), np.array([start]), np.array([length]))
