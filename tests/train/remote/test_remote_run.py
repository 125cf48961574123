"""A training run on a real S3 server of this machine: data through the cache, checkpoints and logs back to it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.rank_pool import RankFailed, shared_pool
from tests.support.s3_server import environment, server
from tests.support.tiny_runs import TIMES, make_run, signalled, train, trained
from train.checkpoint.folder import CheckpointMetadata, list_checkpoints
from train.checkpoint.state import read_state, stored_shapes
from train.monitor.metrics import read_metrics
from train.remote.cache import FILES

__all__ = ["server"]  # a fixture

pytestmark = pytest.mark.dist


@contextlib.contextmanager
def store_at(port: int) -> Iterator[None]:
    """The environment of a rank, by which it reaches the server."""
    with mock.patch.dict(os.environ, environment(port)):
        yield


@contextlib.contextmanager
def measured_cache(folder: str, out: str) -> Iterator[None]:
    """Write the largest size of the files of the cache, after each download, to a file."""
    from train.remote import cache

    reserve, largest = cache.ShardCache._reserve, 0

    def reserving(self: cache.ShardCache, *arguments: object) -> bool:
        nonlocal largest
        done = reserve(self, *arguments)  # type: ignore[arg-type]
        largest = max(largest, self._used())
        Path(f"{out}.{os.getpid()}").write_text(f"{largest} {self.num_bytes}")
        return done

    with mock.patch.object(cache.ShardCache, "_reserve", reserving):
        yield


def upload(folder: Path, uri: str) -> Store:
    """Copy a run folder to the store."""
    run = Store(uri)
    for name in Store(str(folder)).walk():
        run.write_atomic(name, (folder / name).read_bytes())
    return run


def state_of(run: Store, checkpoint: CheckpointMetadata) -> dict[str, torch.Tensor]:
    """Return the whole state of a checkpoint."""
    state = {name: torch.empty(shape) for name, shape in stored_shapes(run, checkpoint).items()}
    read_state(run, checkpoint, state)
    return state


def computed(run: Store) -> list[dict[str, object]]:
    """Return the computed figures of a run's steps, without times."""
    return [record.model_dump(exclude={*TIMES}) for record in read_metrics(run)]


def test_a_run_on_s3_is_bit_equal_to_a_local_one_through_a_smaller_cache_and_a_kill(tmp_path, server):
    changes = {"train": {"window_shards": 1, "steps": 12}, "checkpoint": {"every": 4, "keep": 2}}
    local = make_run(tmp_path / "local", changes)
    remote = upload(local, "s3://bucket/runs/one")
    trained(local, 2)
    dataset = open_dataset(remote)
    sizes = [shard.path.num_bytes for shards in dataset.streams.values() for shard in shards]
    bound, cache = 4 * max(sizes), tmp_path / "cache"
    assert bound < sum(sizes)
    settings = (f'train.cache_dir="{cache}"', f"train.cache_bytes={bound}")
    reach = [(store_at, (server,)), (measured_cache, (str(cache), str(tmp_path / "largest")))]
    with pytest.raises(RankFailed, match="died"):
        train(remote.uri, 2, *settings, 'checkpoint.mode="sync"', during=[*reach, (signalled, (7, signal.SIGKILL, 1))])
    shared_pool().close()  # with the rank that is left
    assert [own.step for own in list_checkpoints(remote)] == [4]
    trained(remote.uri, 2, 'checkpoint.mode="async"', during=reach)
    ours, theirs = list_checkpoints(Store(str(local))), list_checkpoints(remote)
    assert [own.step for own in theirs] == [own.step for own in ours] == [8, 12]
    state, expected = state_of(remote, theirs[-1]), state_of(Store(str(local)), ours[-1])
    assert state.keys() == expected.keys()
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []
    assert theirs[-1].progress == ours[-1].progress
    assert computed(remote) == computed(Store(str(local)))
    largest = [int(path.read_text().split()[0]) for path in tmp_path.glob("largest.*")]
    assert 0 < max(largest) <= bound
    assert {path.suffix for path in (cache / FILES).rglob("*") if path.is_file()} <= {"", ".lock"}
