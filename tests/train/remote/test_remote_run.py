"""A training run on a real S3 server of this machine: data through the cache, checkpoints and logs back to it."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from jobs.cli import main
from pipeline.garbage import HALF_CHECKPOINT, find_garbage
from schemas.checkpoints import METADATA_NAME
from schemas.errors import ContractError
from schemas.locks import lock_training
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import poisoned_runs
from tests.support.rank_pool import RankFailed, shared_pool
from tests.support.s3_server import environment, server
from tests.support.tiny_runs import TIMES, make_run, signalled, train, trained
from train.checkpoint.folder import CheckpointMetadata, list_checkpoints, move_checkpoint, remove_incomplete
from train.checkpoint.state import read_state, stored_shapes
from train.eval.generate import main as generate
from train.monitor.events import read_events
from train.monitor.metrics import read_metrics, read_train_manifest
from train.monitor.quarantine import read_quarantine
from train.pretrain import __main__ as starting
from train.remote.cache import FILES
from train.takedown_replay import notes_aside
from train.trace.trace import checkpoint_steps

__all__ = ["server"]  # a fixture

pytestmark = pytest.mark.dist


@contextlib.contextmanager
def store_at(port: int) -> Iterator[None]:
    """The environment of a rank, by which it reaches the server."""
    with mock.patch.dict(os.environ, environment(port)):
        yield


@contextlib.contextmanager
def measured_cache(out: str) -> Iterator[None]:
    """Write the largest size of the files of the cache, after each download, to a file."""
    from train.remote import cache

    reserve, largest = cache.ShardCache._reserve, 0

    def reserving(self: cache.ShardCache, *arguments: object) -> bool:
        nonlocal largest
        done = reserve(self, *arguments)  # type: ignore[arg-type]
        largest = max(largest, self._used())
        Path(f"{out}.{os.getpid()}").write_text(str(largest))
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


@dataclass(frozen=True)
class RunPair:
    """The same training on the local disk and on the store."""

    local: Store
    remote: Store
    cache: Path
    bound: int
    """Maximum size of the cache [bytes]."""
    largest: int
    """Largest size that it had [bytes]."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory, server) -> RunPair:
    """Train on two ranks, locally and on the store, where a rank is killed in step 7 and the run is resumed."""
    folder = tmp_path_factory.mktemp("remote")
    changes = {"train": {"window_shards": 1, "steps": 12}, "checkpoint": {"every": 4, "keep": 2}}
    local = make_run(folder / "local", changes)
    remote = upload(local, "s3://bucket/runs/one")
    trained(local, 2)
    sizes = [shard.path.num_bytes for shards in open_dataset(remote).streams.values() for shard in shards]
    bound, cache = 4 * max(sizes), folder / "cache"
    assert bound < sum(sizes)
    settings = (f'train.cache_dir="{cache}"', f"train.cache_bytes={bound}")
    reach = [(store_at, (server,)), (measured_cache, (str(folder / "largest"),))]
    killed = (signalled, (7, signal.SIGKILL, 1))
    with pytest.raises(RankFailed, match="died"):
        train(remote.uri, 2, *settings, 'checkpoint.mode="sync"', during=[*reach, killed])
    shared_pool().close()  # with the rank that is left
    assert [own.step for own in list_checkpoints(remote)] == [4]
    trained(remote.uri, 2, 'checkpoint.mode="async"', during=reach)
    largest = max(int(path.read_text()) for path in folder.glob("largest.*"))
    return RunPair(Store(str(local)), remote, cache, bound, largest)


def test_a_run_on_s3_is_bit_equal_to_a_local_one_through_a_smaller_cache_and_a_kill(pair):
    ours, theirs = list_checkpoints(pair.local), list_checkpoints(pair.remote)
    assert [own.step for own in theirs] == [own.step for own in ours] == [8, 12]
    state, expected = state_of(pair.remote, theirs[-1]), state_of(pair.local, ours[-1])
    assert state.keys() == expected.keys()
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []
    assert theirs[-1].progress == ours[-1].progress
    assert computed(pair.remote) == computed(pair.local)
    assert [event.kind for event in read_events(pair.remote)] == ["begun", "resumed"]
    assert read_train_manifest(pair.remote).checkpoint == theirs[-1].name
    assert 0 < pair.largest <= pair.bound
    assert {path.suffix for path in (pair.cache / FILES).rglob("*") if path.is_file()} <= {"", ".lock"}
    assert [*(pair.cache / "runs").rglob("*.distcp")] == []  # uploaded, then removed


def test_traces_and_samples_read_the_run_on_the_store(pair, capsys):
    assert checkpoint_steps(pair.remote) == [8, 12]
    assert generate([pair.remote.uri, "--tokens", "3"]) == 0
    sampled = capsys.readouterr().out
    assert generate([pair.local.uri, "--tokens", "3"]) == 0
    assert sampled == capsys.readouterr().out


def test_checkpoints_of_a_store_are_removed_moved_and_damaged_like_local_ones(pair):
    run = Store("s3://bucket/runs/two")
    for name in [name for name in pair.remote.walk() if not name.startswith("train/tensorboard")]:
        run.fs.copy_file(pair.remote.path(name), run.path(name))
    first, last = list_checkpoints(run)
    part = f"{first.name}/__1_0.distcp"
    run.write_atomic(part, run.read_bytes(part)[:-1] + b"x")
    with pytest.raises(ContractError, match=f"{first.name}: expected files .*\n  __1_0.distcp: expected SHA-256"):
        state_of(run, first)
    move_checkpoint(run, last.name, "train/replaced/0123456789ab/step-000012")
    assert [name for name, _ in notes_aside(run)] == ["train/replaced/0123456789ab/step-000012"]
    assert list_checkpoints(run) == [first]
    run.delete(f"{first.name}/{METADATA_NAME}")
    assert {own.path for own in find_garbage(run) if own.why == HALF_CHECKPOINT} >= {part}
    assert remove_incomplete(run) == ["step-000008"]
    assert [name for name in run.walk() if name.startswith("train/checkpoints")] == []


def test_spikes_and_rewinds_read_documents_from_the_store(tmp_path, server):
    guard = poisoned_runs.WATCHING | {"quarantine": True, "max_rewinds": 10}
    folder = poisoned_runs.make_run(tmp_path / "local", guard)
    remote = upload(folder, "s3://bucket/runs/spikes")
    local = Store(str(trained(folder, 1)))
    trained(remote.uri, 1, f'train.cache_dir="{tmp_path / "cache"}"', during=[(store_at, (server,))])
    events, expected = ([*read_events(run)] for run in (remote, local))
    assert [event.kind for event in events] == [event.kind for event in expected]
    assert "rewound" in [event.kind for event in events]
    listed, of_local = ([own.model_dump(exclude={"at"}) for own in read_quarantine(run)] for run in (remote, local))
    assert listed == of_local != []
    ours, theirs = (list_checkpoints(run)[-1] for run in (local, remote))
    state, expected_state = state_of(remote, theirs), state_of(local, ours)
    assert [name for name in state if not torch.equal(state[name], expected_state[name])] == []


def test_two_trainers_in_a_run_are_refused_and_a_run_without_a_cache_too(pair, capsys):
    with lock_training(pair.remote, "penstock train"):
        assert main(["train", pair.remote.uri]) == 2
    assert "expected a free lock for `penstock train`, got one held by `penstock train`" in capsys.readouterr().err
    plain = upload(make_run(pair.cache.parent / "plain"), "s3://bucket/runs/three")
    assert main(["train", plain.uri]) == 2
    assert f"train.cache_dir: expected a folder on a local disk, because {plain.uri} is on" in capsys.readouterr().err


def test_a_restarted_rank_waits_for_the_lease_of_the_killed_one(pair, monkeypatch):
    monkeypatch.setattr(starting, "RETRY_SECONDS", 0.2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = contextlib.ExitStack()
    before.enter_context(lock_training(pair.remote, "penstock train"))
    ends = threading.Timer(1.0, before.close)
    ends.start()
    with contextlib.ExitStack() as held:
        starting.hold_lock(held, pair.remote)
        assert pair.remote.exists("train.lock")
    ends.join()
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    with (
        lock_training(pair.remote, "penstock train"),
        contextlib.ExitStack() as held,
        pytest.raises(ContractError, match="expected a free lock"),
    ):
        starting.hold_lock(held, pair.remote)
