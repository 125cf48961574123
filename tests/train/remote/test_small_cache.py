"""Training through the smallest cache that is accepted: what is read besides the rows of a step finds room too."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import poisoned_runs, tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import assert_same_bits, events, make_run, opened, train, trained
from train.remote.ahead import check_bound

pytestmark = pytest.mark.dist


@contextlib.contextmanager
def little_patience() -> Iterator[None]:
    """Give up after seconds, not minutes, if the cache has no room."""
    with mock.patch("train.remote.cache.ROOM_SECONDS", 4.0):
        yield


def through_smallest_cache(run: Path, cache: Path) -> Path:
    """Train a run to its end with the smallest `train.cache_bytes` that is accepted, which an error names."""
    folder = f'train.cache_dir="{cache}"'
    error = train(run, 1, folder, "train.cache_bytes=1")[0].error
    found = re.search(r"expected at least ([\d,]+) bytes, which the largest windows", error)
    assert found, error
    return trained(run, 1, folder, f"train.cache_bytes={found[1].replace(',', '')}", during=[(little_patience, ())])


def test_held_out_shards_are_more_than_the_cache_holds(tmp_path: Path) -> None:
    make_tiny_dataset(tmp_path / "data", {"web": 150, "books": 150}, shard_tokens=700)
    changes = {"train": {"window_shards": 1, "steps": 4, "eval_sequences": 64, "eval_every": 2}}
    with mock.patch.object(tiny_runs, "_dataset", return_value=tmp_path / "data"):
        plain, run = (make_run(tmp_path / name, changes) for name in ("plain", "run"))
    assert_same_bits(through_smallest_cache(run, tmp_path / "cache"), trained(plain, 1))


def test_documents_to_compare_with_and_rewinds_need_no_more_room(tmp_path: Path) -> None:
    documents: Any = poisoned_runs._documents
    make_tiny_dataset(tmp_path / "data", {"web": 24, "books": 8}, shard_tokens=300, documents=documents)
    guard = {"grad_sigmas": 2.0, "spike_window": 8, "quarantine": True, "max_rewinds": 50}
    with mock.patch.object(poisoned_runs, "_dataset", return_value=tmp_path / "data"):
        plain, run = (
            poisoned_runs.make_run(tmp_path / name, guard, train={"window_shards": 1}) for name in ("plain", "run")
        )
    through_smallest_cache(run, tmp_path / "cache")
    assert len(events(run, "rewound")) > 5
    assert_same_bits(run, trained(plain, 1))


def test_a_held_out_shard_that_is_larger_than_the_windows_has_room(tmp_path: Path) -> None:
    run = trained(make_run(tmp_path / "run", {"train": {"steps": 2, "weights": {"books": 1, "web": 0}}}), 1)
    dataset, order = open_dataset(Store(str(run))), opened(run).order
    (shard,) = dataset.streams["web/heldout"]
    with mock.patch("train.remote.ahead.window_bytes", return_value=shard.path.num_bytes - 2):
        check_bound(dataset, order, shard.path.num_bytes - 1)
        with pytest.raises(ConfigError, match=f"at least {shard.path.num_bytes:,} bytes, the size of the largest held"):
            check_bound(dataset, order, shard.path.num_bytes - 1, evaluates=True)
        check_bound(dataset, order, shard.path.num_bytes, evaluates=True)
