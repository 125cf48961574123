"""The cache of shards: what it keeps, what it removes, and who waits for whom."""

import errno
import fcntl
import math
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from schemas.errors import ConfigError, ContractError
from schemas.storage import CheckedPath, Store
from schemas.tokens import Dataset, open_dataset
from tests.support.tiny_dataset import flip_byte, make_tiny_dataset
from train.config.settings import load_settings
from train.data.batches import Batches
from train.data.order import SampleOrder, make_order
from train.data.shards import OpenShard
from train.data.stages import StagePlan
from train.remote import cache as caching
from train.remote.ahead import ReadAhead, ShardUse, check_bound, window_bytes
from train.remote.cache import FILES, LOCK, ShardCache, cached
from train.remote.transfer import download

STEPS, BATCH, LENGTH = 160, 4, 32
CONFIG = load_settings({"train": {"seq_len": LENGTH, "window_shards": 2, "seed": 3}}, [], "test").train


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    """A dataset of a dozen shards in two sources."""
    return open_dataset(make_tiny_dataset(tmp_path_factory.mktemp("data") / "run", shard_tokens=1024))


@pytest.fixture(scope="module")
def order(dataset: Dataset) -> SampleOrder:
    """The order of a run over more than one epoch of both sources."""
    stage = StagePlan(first_step=0, num_steps=STEPS, seq_len=LENGTH, global_batch=BATCH, counts={"books": 1, "web": 2})
    return make_order(dataset, CONFIG, [stage])


@pytest.fixture
def downloads() -> Iterator[list[tuple[str, str]]]:
    """(SHA-256, name of the thread) of each download."""
    made: list[tuple[str, str]] = []

    def noted(origin: Store, path: CheckedPath, out: int) -> None:
        made.append((path.sha256, threading.current_thread().name))
        download(origin, path, out)

    with mock.patch.object(caching, "download", noted):
        yield made


def shards_of(dataset: Dataset) -> list[CheckedPath]:
    """Return the paths of all training shards."""
    return [shard.path for name in ("books/train", "web/train") for shard in dataset.streams[name]]


def files_in(folder: Path) -> set[str]:
    """Return the names of the files in a cache."""
    return {path.name for path in (folder / FILES).glob("*/*")}


def test_the_shards_of_a_step_and_the_next_use_of_a_shard_are_those_of_its_pieces(dataset, order):
    use, read = ShardUse(dataset, order), []
    for step in range(STEPS):
        samples, expected = order.samples(step), set()
        for row, start, length in zip(samples.pieces.row, samples.pieces.start, samples.pieces.length, strict=True):
            shards = dataset.streams[f"{order.sources[samples.source[row]]}/train"]
            ends = np.cumsum([shard.num_tokens for shard in shards])
            for token in range(start, start + length + 1):
                expected.add(shards[int(np.searchsorted(ends, token, side="right"))].sha256)
        assert {*use.of_step(step)} == expected
        read.append(expected)
    for path in shards_of(dataset):
        for step in (0, 7, STEPS - 1):
            later = [at for at in range(step, STEPS) if path.sha256 in read[at]]
            assert use.next_use(path.sha256, step) == (later[0] if later else math.inf)
    assert use.next_use("0" * 64, 0) == math.inf


def test_batches_through_a_small_cache_are_the_same_and_most_shards_come_ahead(dataset, order, tmp_path, downloads):
    bound = 6 * max(path.num_bytes for path in shards_of(dataset))
    assert bound < sum(path.num_bytes for path in shards_of(dataset))
    cache, largest = ShardCache(tmp_path, dataset, bound), 0
    batches, plain = Batches(cached(dataset, cache), CONFIG, order), Batches(dataset, CONFIG, order)
    with ReadAhead(cache, ShardUse(dataset, order), batches, STEPS, "run") as ahead:
        for step in range(STEPS):
            ahead.begin(step)
            rows, expected = batches.batch(step), plain.batch(step)
            ahead.end(step)
            assert rows.inputs_BT.equal(expected.inputs_BT)
            assert rows.targets_BT.equal(expected.targets_BT)
            with cache._locked():
                largest = max(largest, cache._used())
            ahead.wait()
    assert max(path.num_bytes for path in shards_of(dataset)) < largest <= bound
    late = [own for own, thread in downloads if not thread.startswith("download")]
    assert len(downloads) > len(shards_of(dataset))  # some came twice, so some were removed
    assert len(late) <= len(ShardUse(dataset, order).of_step(0))


def test_the_shard_with_the_latest_next_use_is_removed_and_none_in_use(dataset, tmp_path):
    paths = sorted(shards_of(dataset), key=lambda path: -path.num_bytes)[:4]
    bound = sum(path.num_bytes for path in paths[:3])
    cache = ShardCache(tmp_path, dataset, bound)
    uses = {path.sha256: float(number) for number, path in enumerate(paths)}
    cache.next_use = lambda sha256: uses[sha256]
    held = {path: cache.open(path) for path in paths[:3]}
    assert cache.fetch(paths[3], first_use=5) is False  # no shard has a later use
    uses[paths[2].sha256] = 9.0
    del held[paths[0]], held[paths[1]]
    assert cache.fetch(paths[3], first_use=5) is False  # the one with a later use is in use
    content = held.pop(paths[2]).read_buffer()
    assert cache.fetch(paths[3], first_use=5) is False  # a buffer holds the lock too
    assert content.to_pybytes() == dataset.folder.read_bytes(str(paths[2]))
    del content
    assert cache.fetch(paths[3], first_use=5) is True
    assert files_in(tmp_path) == {paths[number].sha256 for number in (0, 1, 3)}


def test_a_file_gets_its_name_while_no_one_counts_the_files(dataset, tmp_path):
    path = shards_of(dataset)[0]
    cache, counted = ShardCache(tmp_path, dataset, path.num_bytes), []
    rename = os.rename

    def counted_first(source: Path, target: Path) -> None:
        with pytest.raises(BlockingIOError), open(cache.root / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        counted.append(cache._used())
        rename(source, target)

    with mock.patch.object(caching.os, "rename", counted_first):
        assert cache.fetch(path, first_use=0)
    assert counted == [path.num_bytes] == [cache._used()]


def test_without_room_a_reader_gives_up_with_the_reason(dataset, tmp_path, monkeypatch):
    first, second = sorted(shards_of(dataset), key=lambda path: -path.num_bytes)[:2]
    cache = ShardCache(tmp_path, dataset, first.num_bytes)
    held = [cache.open(first)]
    monkeypatch.setattr(caching, "ROOM_SECONDS", 0.1)
    with pytest.raises(ContractError, match=rf"room for a shard of {second.num_bytes:,} bytes .* Raise train.cache_b"):
        cache.open(second)
    cache.on_full = held.clear
    assert cache.open(second).size() == second.num_bytes


def test_one_downloads_and_the_others_wait(dataset, tmp_path, downloads):
    path = shards_of(dataset)[0]
    with ThreadPoolExecutor(8) as pool:
        opened = [*pool.map(lambda _: ShardCache(tmp_path, dataset, 1 << 20).open(path).read(), range(8))]
    assert {*opened} == {dataset.folder.read_bytes(str(path))}
    assert len(downloads) == 1
    ShardCache(tmp_path, dataset, 1 << 20).open(path)  # as in a second run
    assert len(downloads) == 1


def test_a_cache_that_was_deleted_is_made_again(dataset, tmp_path):
    one, two = shards_of(dataset)[:2]
    cache = ShardCache(tmp_path / "cache", dataset, 1 << 20)
    held = cache.open(one)
    shutil.rmtree(tmp_path / "cache")
    assert cache.open(two).read() == dataset.folder.read_bytes(str(two))
    assert cache.fetch(one, first_use=5) is True
    assert held.read() == cache.open(one).read()
    assert files_in(tmp_path / "cache") == {one.sha256, two.sha256}
    assert stat.S_IMODE((tmp_path / "cache" / FILES).stat().st_mode) == 0o700


def test_what_a_killed_download_leaves_is_replaced_or_removed(dataset, tmp_path):
    one, two = sorted(shards_of(dataset), key=lambda path: path.num_bytes)[:2]
    cache = ShardCache(tmp_path, dataset, two.num_bytes)
    (cache.folder / f"{one.sha256}.partial").write_bytes(b"x" * one.num_bytes)
    assert cache.open(two).size() == two.num_bytes
    assert files_in(tmp_path) == {two.sha256}
    (cache.folder / f"{one.sha256}.partial").write_bytes(b"x" * one.num_bytes)
    assert cache.open(one).read() == dataset.folder.read_bytes(str(one))
    assert files_in(tmp_path) == {one.sha256}


def test_other_bytes_never_get_into_the_cache(dataset, tmp_path):
    path = shards_of(dataset)[0]
    other = CheckedPath(str(path), path.num_bytes, "0" * 64)
    cache = ShardCache(tmp_path, dataset, 1 << 20)
    with pytest.raises(ContractError, match=f"expected a file of {path.num_bytes} bytes with SHA-256 0000"):
        cache.open(other)
    with pytest.raises(ContractError, match="got no such file"):
        cache.open(CheckedPath("web/train/none.arrow", 5, "1" * 64))
    assert files_in(tmp_path) == set()


def test_a_full_disk_is_one_sentence(dataset, tmp_path):
    full = mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    path = shards_of(dataset)[0]
    with full, pytest.raises(ConfigError, match=f"{path.num_bytes:,} bytes of free disk space for a shard, got a full"):
        ShardCache(tmp_path, dataset, 1 << 20).open(path)
    assert files_in(tmp_path) == set()


def test_a_bound_below_a_window_is_refused_with_the_number(dataset, order):
    need = sum(
        window_bytes(dataset.streams[f"{source}/train"], stream.chunks)
        for source, stream in zip(order.sources, order.streams, strict=True)
    )
    assert 0 < need < sum(path.num_bytes for path in shards_of(dataset))
    check_bound(dataset, order, need)
    with pytest.raises(ConfigError, match=f"expected at least {need:,} bytes, .* got {need - 1:,}"):
        check_bound(dataset, order, need - 1)


def test_shards_of_another_version_of_the_dataset_are_removed(dataset, tmp_path):
    path = shards_of(dataset)[0]
    content = dataset.manifest.content.model_copy(update={"figures": {**dataset.manifest.content.figures, "x": 1}})
    older = replace(dataset, manifest=dataset.manifest.model_copy(update={"content": content}))
    before = ShardCache(tmp_path, older, 1 << 20)
    held = before.open(path)
    now = ShardCache(tmp_path, dataset, 1 << 20)
    assert before.folder != now.folder
    now.remove_older()
    assert files_in(tmp_path) == {path.sha256}  # in use
    del held
    now.remove_older()
    assert files_in(tmp_path) == set()
    assert not before.folder.exists()


def test_files_that_the_cache_did_not_make_stay(dataset, tmp_path):
    paths = shards_of(dataset)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / paths[0].sha256).write_text("mine")
    others = [tmp_path / FILES / "thesis/final.tex", tmp_path / "elsewhere" / paths[0].sha256]
    others[0].parent.mkdir(parents=True, mode=0o700)
    others[0].write_text("three years of work\n" * 100)
    (tmp_path / FILES).chmod(0o700)
    (tmp_path / FILES / f"{'0' * 16}-{'1' * 16}").symlink_to(tmp_path / "elsewhere")
    cache = ShardCache(tmp_path, dataset, 2 * max(path.num_bytes for path in paths))
    (cache.folder / "notes.txt").write_text("mine")
    cache.next_use = lambda sha256: 5.0
    for path in paths:
        assert cache.open(path).size() == path.num_bytes
    assert [path.read_text()[:4] for path in (*others, cache.folder / "notes.txt")] == ["thre", "mine", "mine"]


def test_a_folder_that_another_user_can_write_to_is_refused(dataset, tmp_path, monkeypatch):
    cache = ShardCache(tmp_path / "own", dataset, 1 << 20)
    assert [path.stat().st_mode & 0o777 for path in (cache.root, cache.folder)] == [0o700, 0o700]
    for path in (cache.folder, cache.root):
        path.chmod(0o770)
        with pytest.raises(
            ConfigError, match=r"that only user \d+ can write to, got mode 770 and user \d+ for .*/files"
        ):
            ShardCache(tmp_path / "own", dataset, 1 << 20)
        path.chmod(0o700)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILES).symlink_to(cache.root)
    with pytest.raises(ConfigError, match=r"got a link for .*/files\. Name another folder"):
        ShardCache(tmp_path / "other", dataset, 1 << 20)
    monkeypatch.setattr("os.geteuid", lambda: 4242)
    with pytest.raises(ConfigError, match="expected a folder that only user 4242 can write to"):
        ShardCache(tmp_path / "own", dataset, 1 << 20)


def test_a_damaged_copy_is_named_and_its_folder_is_filled_again(dataset, tmp_path):
    """The message of damage must not blame the dataset, of which no file is damaged."""
    cache = ShardCache(tmp_path, dataset, 1 << 24)
    shard = next(iter(dataset.streams.values()))[0]
    OpenShard(cached(dataset, cache).folder, shard, dataset.tokenizer.dtype).view(0)
    flip_byte(cache.folder / shard.path.sha256, 400)
    with pytest.raises(ContractError, match=f"expected checksum .*Delete the folder {cache.folder}, which is filled"):
        OpenShard(cached(dataset, cache).folder, shard, dataset.tokenizer.dtype).view(0)
