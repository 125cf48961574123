"""Saving checkpoints in one process: what is written when, and failures of disk and memory, and kills."""

import errno
import gc
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from schemas.errors import ContractError
from schemas.storage import Store
from tests.support.paths import ROOT
from tests.train.checkpoint.test_state import note, path_of, ranks_of_world, same_bits, tensors
from train.checkpoint import save as saving
from train.checkpoint import save as writing
from train.checkpoint.folder import keep_newest, list_checkpoints, remove_incomplete
from train.checkpoint.save import HostCopies, Saved, SaveFailed, SaveOutcome, Saver
from train.checkpoint.state import State, read_state, verify_files
from train.config.train import CheckpointConfig
from train.parallel.ranks import Ranks
from train.remote import work
from train.remote.work import WorkFolder

MODES = ("sync", "async")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ranks_of_world()
    dist.destroy_process_group()


@pytest.fixture(params=MODES)
def saver(request: pytest.FixtureRequest, tmp_path: Path, ranks: Ranks) -> Iterator[Saver]:
    saver = Saver(Store(str(tmp_path)), CheckpointConfig(mode=request.param, keep=2), ranks)
    yield saver
    saver.close()


def known(saver: Saver, pending: list[SaveOutcome]) -> list[SaveOutcome]:
    """Return the outcomes of a save, in either mode."""
    actual = list(pending)
    for _ in range(1000):
        if actual or saver._job is None:
            break
        time.sleep(0.01)
        actual = saver.poll()
    return actual


def steps_standing(run: Store) -> list[int]:
    return [kept.step for kept in list_checkpoints(run)]


# --------------------------------------------------------------------------------------------------- what is written


def test_what_is_written_is_the_state_at_the_call(tmp_path: Path, saver: Saver) -> None:
    run, state = Store(str(tmp_path)), tensors()
    saver.prepare(tensors(3))
    for step in (1, 2, 3):
        pending = saver.save(note(step), state)
        for name, value in tensors(step).items():
            state[name].copy_(value)
        (outcome,) = known(saver, pending)
        assert isinstance(outcome, Saved)
        assert outcome.stalled > 0
        assert outcome.seconds > 0
        actual = tensors(9)
        read_state(run, outcome.checkpoint, actual)
        assert same_bits(actual, tensors(step - 1))
    assert steps_standing(run) == [2, 3]
    assert saver.poll() == saver.finish() == []
    assert saver.failures == 0


def test_the_next_save_waits_and_brings_the_outcome(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, gate, threads = Store(str(tmp_path)), threading.Event(), []
    write = saving.write_checkpoint

    def gated(*given):
        threads.append(threading.current_thread().name)
        gate.wait(30)
        return write(*given)

    monkeypatch.setattr(saving, "write_checkpoint", gated)
    saver = Saver(run, CheckpointConfig(mode="async"), ranks)
    assert saver.save(note(1), tensors()) == []
    assert saver.poll() == []
    assert steps_standing(run) == []
    threading.Timer(0.2, gate.set).start()
    (first,) = saver.save(note(2), tensors())
    assert isinstance(first, Saved)
    assert first.checkpoint == list_checkpoints(run)[0]
    (second,) = saver.finish()
    assert isinstance(second, Saved)
    assert second.stalled > 0.1  # it waited for the first
    assert first.stalled < 0.1 < first.seconds
    assert threads == ["checkpoint_0", "checkpoint_0"]
    saver.close()
    assert steps_standing(run) == [1, 2]


def test_retention_and_the_seed(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    saver = Saver(run, CheckpointConfig(every=10, keep=1, keep_every=20, first=True), ranks)
    for step in (0, 10, 20, 30, 40, 50):
        saver.save(note(step), {"model.a": torch.ones(3)})
    saver.finish()
    saver.close()
    assert steps_standing(run) == [0, 20, 40, 50]
    assert remove_incomplete(run) == []


def test_an_old_checkpoint_that_cannot_be_removed_is_reported_and_kept(
    tmp_path: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given):
        raise PermissionError(13, "Permission denied", "step-000001")

    monkeypatch.setattr(saving, "keep_newest", fails)
    (outcome,) = known(saver, saver.save(note(4), tensors()))
    assert isinstance(outcome, Saved)
    assert "penstock: an old checkpoint cannot be removed: [Errno 13] Permission denied" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk(small_disk: Path, ranks: Ranks, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With keep = 1: if the older checkpoint were removed before the save that fails, none would remain."""
    run = Store(str(small_disk))
    saver = Saver(run, CheckpointConfig.model_validate({"mode": mode, "keep": 1}), ranks)
    state = {"model.a": torch.ones(200_000)}  # 0.8 MB
    (first,) = known(saver, saver.save(note(1), state))
    (small_disk / "other").write_bytes(bytes(900_000))
    (failed,) = known(saver, saver.save(note(2), state))
    assert isinstance(failed, SaveFailed)
    assert failed.step == 2
    assert (
        "step-000002: expected a checkpoint, got [Errno 28] No space left on device. Free disk space" in failed.reason
    )
    printed = f"penstock: training continues without a checkpoint of step 2, failure 1: {failed.reason}\n"
    assert capsys.readouterr().err.endswith(printed)
    assert [path.name for path in (small_disk / "train/checkpoints").iterdir()] == ["step-000001"]
    assert isinstance(first, Saved)
    read_state(run, first.checkpoint, {"model.a": torch.zeros(200_000)})
    with pytest.raises(ContractError, match=r"step-000002: expected a checkpoint, got \[Errno 28\]"):
        saver.finish()

    (small_disk / "other").unlink()
    (third,) = known(saver, saver.save(note(3), state))
    assert isinstance(third, Saved)
    assert (saver.finish(), saver.failures, steps_standing(run)) == ([], 1, [3])
    saver.close()


@pytest.mark.parametrize("size", [4096, 200_000])
def test_a_file_that_may_not_grow(tmp_path: Path, saver: Saver, size: int) -> None:
    """The same without a disk of its own; a small tensor fails when the file is closed, a large one when written."""
    state = {"model.a": torch.ones(size)}
    known(saver, saver.save(note(1), state))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
        (failed,) = known(saver, saver.save(note(2), state))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(failed, SaveFailed)
    assert "got [Errno 27] File too large" in failed.reason
    assert steps_standing(Store(str(tmp_path))) == [1]
    assert remove_incomplete(Store(str(tmp_path))) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, saver: Saver) -> None:
    (tmp_path / "train").write_text("a file")
    (failed,) = known(saver, saver.save(note(1), tensors()))
    assert isinstance(failed, SaveFailed)
    assert "expected a checkpoint, got [Errno 20] Not a directory" in failed.reason


def test_a_note_that_cannot_be_written(tmp_path: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given):
        raise OSError(5, "Input/output error", "checkpoint.json")

    monkeypatch.setattr(Store, "write_atomic", fails)
    (failed,) = known(saver, saver.save(note(1), tensors()))
    assert isinstance(failed, SaveFailed)
    assert "got [Errno 5] Input/output error: 'checkpoint.json'" in failed.reason
    assert list((tmp_path / "train/checkpoints").iterdir()) == []


def test_an_incomplete_folder_that_cannot_be_removed_is_reported(
    tmp_path: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails(run, step):
        calls.append(step)
        if len(calls) == 2:
            raise PermissionError(13, "Permission denied")

    def broken(*given):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writing, "remove_checkpoint", fails)
    monkeypatch.setattr(Store, "write_atomic", broken)
    (failed,) = known(saver, saver.save(note(1), tensors()))
    assert isinstance(failed, SaveFailed)
    assert "Input/output error (and a half-written folder, which cannot be removed: [Errno 13] Perm" in failed.reason
    assert remove_incomplete(Store(str(tmp_path))) == ["step-000001"]


@pytest.mark.parametrize("fails", ["upload", "disk"])
def test_a_checkpoint_that_is_not_saved_leaves_nothing_in_the_local_folder(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """With each failure, the disk of a run on an object store would lose the size of a checkpoint."""
    run, local = Store(str(tmp_path / "run")), Store(str(tmp_path / "local"))
    monkeypatch.setattr(WorkFolder, "is_apart", True)
    leader = replace(ranks, leads_node=True)
    saver = Saver(run, CheckpointConfig(mode="sync", keep=2), leader, WorkFolder(run, local))
    with monkeypatch.context() as broken:
        if fails == "upload":
            broken.setattr(work, "upload", mock.Mock(side_effect=ContractError("the store is gone")))
        else:
            broken.setattr(writing.os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        (outcome,) = saver.save(note(1), tensors())
    assert isinstance(outcome, SaveFailed)
    assert [path for path in Path(local.root).rglob("*") if path.is_file()] == []
    (outcome,) = saver.save(note(2), tensors())
    assert isinstance(outcome, Saved)
    assert steps_standing(run) == [2]


def test_any_other_error_in_the_background_is_an_outcome_too(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(saving, "write_checkpoint", fails)
    (failed,) = known(saver, saver.save(note(6), tensors()))
    assert failed == SaveFailed(6, "step 6: RuntimeError('connection closed by peer')")
    with pytest.raises(ContractError, match="connection closed by peer"):
        saver.finish()


def test_no_memory_for_copies(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(Store(str(tmp_path)), CheckpointConfig(mode="async"), ranks)

    def fails(*given):
        raise RuntimeError("not enough memory: you tried to allocate 9 bytes")

    with monkeypatch.context() as patched:
        patched.setattr(HostCopies, "_buffer", fails)
        (failed,) = known(saver, saver.save(note(1), tensors()))
    assert isinstance(failed, SaveFailed)
    assert "expected a checkpoint, got not enough memory: you tried to allocate 9 bytes" in failed.reason
    (saved,) = known(saver, saver.save(note(2), tensors()))
    assert isinstance(saved, Saved)
    saver.close()


def test_a_state_that_has_changed_is_copied_anew(tmp_path: Path, ranks: Ranks) -> None:
    run = Store(str(tmp_path))
    saver = Saver(run, CheckpointConfig(mode="async"), ranks)
    for step, state in enumerate(({"model.a": torch.ones(3)}, {"model.a": torch.ones(4)}, tensors()), start=1):
        (saved,) = known(saver, saver.save(note(step), state))
        assert isinstance(saved, Saved)
        actual = {name: torch.zeros_like(value) for name, value in state.items()}
        read_state(run, saved.checkpoint, actual)
        assert same_bits(actual, state)
    saver.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_state_on_a_device(tmp_path: Path, saver: Saver) -> None:
    run = Store(str(tmp_path))
    state = {name: value.cuda() for name, value in tensors().items()}
    for step in (1, 2):
        pending = saver.save(note(step), state)
        for name, value in tensors(step).items():
            state[name].copy_(value)
        (outcome,) = known(saver, pending)
        assert isinstance(outcome, Saved)
        actual = {name: torch.zeros_like(value) for name, value in state.items()}
        read_state(run, outcome.checkpoint, actual)
        assert same_bits({name: value.cpu() for name, value in actual.items()}, tensors(step - 1))
    assert saver._copies is None or all(value.is_pinned() for value in saver._copies.values.values() if value.numel())


# ---------------------------------------------------------------------------------------------------- memory and kills


def resident() -> int:
    """Return the memory of this process [bytes]."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc")
def test_memory_stays_flat_over_twenty_saves(tmp_path: Path, ranks: Ranks) -> None:
    """One state is 8 MB; a copy that is lost with every save would be 160 MB."""
    saver = Saver(Store(str(tmp_path)), CheckpointConfig(mode="async", keep=1), ranks)
    state: State = {f"model.{number}": torch.ones(128, 1024) for number in range(16)}
    for step in range(1, 24):
        saver.save(note(step), state)
        if step == 3:
            saver.finish()
            before = resident()
            buffers = {name: value.data_ptr() for name, value in saver._copies.values.items()}
    saver.finish()
    assert {name: value.data_ptr() for name, value in saver._copies.values.items()} == buffers
    assert resident() - before < 8 << 20
    saver.close()


NUM_KILLS = 24
ITSELF = [sys.executable, "-m", "tests.train.checkpoint.test_save"]


@pytest.mark.slow
def test_killed_anywhere_a_checkpoint_is_complete_or_absent(tmp_path: Path) -> None:
    """A parent process has torch loaded; its children save repeatedly until they are killed."""
    done = subprocess.run(
        [*ITSELF, str(tmp_path), str(NUM_KILLS)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == NUM_KILLS
    halves = sum(int(line.split()[1]) for line in lines)
    kept = [int(line.split()[0]) for line in lines]
    assert min(kept) >= 1
    assert halves >= 1, "no kill fell into a save"


@pytest.mark.slow
def test_when_a_rank_is_killed_in_a_save_the_others_do_not_wait_and_no_note_is_written(tmp_path: Path) -> None:
    done = subprocess.run([*ITSELF, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["killed by signal 9", "noticed it"]
    assert steps_standing(Store(str(tmp_path))) == [1]
    remove_incomplete(Store(str(tmp_path)))
    assert [path.name for path in (tmp_path / "train/checkpoints").iterdir()] == ["step-000001"]


def save_until_killed(run: Store, mode: str, started: int) -> None:
    """Save step after step, and signal when the first checkpoint is complete."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = CheckpointConfig.model_validate({"mode": mode, "keep": 2, "every": 1, "keep_every": 10})
    saver = Saver(run, config, ranks_of_world())
    first = max(steps_standing(run), default=0) + 1
    for step in range(first, first + 100_000):
        saver.save(note(step), {f"model.{number}": torch.full((64, 256), float(step)) for number in range(8)})
        if step == first + 1:
            os.write(started, b"1")


def nursery(folder: str, num_kills: int) -> None:
    """Kill children at random moments; after each, check which checkpoints are complete and resume from there."""
    chance, run = random.Random(0), Store(folder)
    for number in range(num_kills):
        results, telling = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(run, MODES[number % 2], telling)
            finally:
                os._exit(1)
        os.close(telling)
        if os.read(results, 1) != b"1":
            sys.exit("a child ended by itself")
        os.close(results)
        time.sleep(chance.uniform(0, 0.15))
        os.kill(child, 9)
        os.waitpid(child, 0)
        notes = list_checkpoints(run)
        for kept in notes:
            verify_files(run.child(kept.name), kept.files)
            state = {f"model.{part}": torch.zeros(64, 256) for part in range(8)}
            read_state(run, kept, state)
            if any(not value.eq(kept.step).all() for value in state.values()):
                sys.exit(f"the state of step {kept.step} is of another step")
        halves = remove_incomplete(run)
        if list_checkpoints(run) != notes or any(path_of(run, 0).parents[1].glob("*/*.partial")):
            sys.exit("remove_halves took too much or too little")
        keep_newest(run, CheckpointConfig(every=1, keep=2, keep_every=10))
        print(len(notes), len(halves), flush=True)


def rank_of_two(folder: str, rank: int) -> int:
    """Write a checkpoint, and a second in which rank 1 is killed after 100,000 bytes; check that rank 0 notices."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    saver = Saver(Store(folder), CheckpointConfig(mode="async"), ranks_of_world())
    state = {f"model.{number}": torch.ones(64, 256) for number in range(8)}
    saver.save(note(1), state)
    saver.finish()
    write = writing._Digested.write

    def killed(file, data):
        if file.size > 100_000:
            os.kill(os.getpid(), 9)
        return write(file, data)

    if rank == 1:
        writing._Digested.write = killed
    try:
        (outcome,) = known(saver, saver.save(note(2), state))
    except RuntimeError:  # by the collective of `poll`
        return 0
    return 0 if isinstance(outcome, SaveFailed) else 1


def pair(folder: str) -> None:
    """Start two ranks and return how they ended."""
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            os._exit(rank_of_two(folder, rank))
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in reversed(children)]
    print(f"killed by signal {os.WTERMSIG(ended[0])}")
    print("noticed it" if ended[1] == 0 else f"ended with {ended[1]}")


if __name__ == "__main__":
    nursery(sys.argv[1], int(sys.argv[2])) if sys.argv[2:] else pair(sys.argv[1])


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_checkpoint_is_named_and_kept(tmp_path: Path, kind: str) -> None:
    run, name = Store(str(tmp_path)), "train/checkpoints/step-000099"
    (tmp_path / "train/checkpoints").mkdir(parents=True)
    (tmp_path / "train/own.partial").mkdir()
    (tmp_path / "train/plan.json.partial").touch()
    if kind == "file":
        (tmp_path / name).touch()
    else:
        (tmp_path / "other").mkdir()
        (tmp_path / name).symlink_to(tmp_path / "other")
    with pytest.raises(ContractError, match=rf"{name}: expected the folder of a checkpoint, got a file or a link"):
        remove_incomplete(run)
    assert (tmp_path / name).exists()
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["checkpoints", "own.partial"]
