"""Locks on run folders: who is refused beside whom, what is said, and that a killed process leaves none; real ones."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from schemas.errors import ContractError
from schemas.locks import TABLES_LOCK, TRAIN_LOCK, lock_tables, lock_training
from schemas.storage import Store
from schemas.takedown import PENDING_NAME
from schemas.versions import attach_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import all_bytes, documents_of, opened, take_down
from train.takedown_replay import begin_replay

HOLDER = """
import sys, time
from schemas import locks
from schemas.storage import Store

with getattr(locks, sys.argv[1])(Store(sys.argv[2]), f"penstock {sys.argv[1]}"):
    print("held", flush=True)
    sys.stdin.read()
"""


class Holders:
    """Processes that hold locks until they are told to go."""

    def __init__(self, stack: ExitStack):
        self._stack = stack

    def hold(self, what: str, folder: Path) -> subprocess.Popen[str]:
        """A process inside `with locks.<what>(folder)`."""
        command = [sys.executable, "-c", HOLDER, what, str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stack.callback(self._end, process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def holders() -> Iterator[Holders]:
    with ExitStack() as stack:
        yield Holders(stack)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_tiny_dataset(tmp_path / "run", {"web": 30, "books": 10})
    return tmp_path / "run"


@pytest.fixture
def proxy(run: Path) -> Path:
    """A run that stands on the tables of the other one."""
    attach_run(Store(str(run / "ladder/small")), Store(str(run)))
    return run / "ladder/small"


def refused(what: str, folder: Path) -> str:
    """What is said if a lock is not to be had; empty if it is."""
    try:
        with {"training": lock_training, "writing_tables": lock_tables}[what](Store(str(folder)), "penstock that"):
            return ""
    except ContractError as error:
        return str(error)


@pytest.mark.parametrize(
    ("holds", "asks", "lock"),
    [
        ("training", "training", TRAIN_LOCK),
        ("training", "writing_tables", TABLES_LOCK),
        ("writing_tables", "training", TABLES_LOCK),
        ("writing_tables", "writing_tables", TABLES_LOCK),
    ],
)
def test_one_run_is_worked_on_by_one(run: Path, holders: Holders, holds: str, asks: str, lock: str) -> None:
    process = holders.hold(holds, run)
    said = refused(asks, run)
    assert said.startswith(f"{run}/{lock}: expected to `penstock that` a run that nobody else works on, got ")
    assert f"found `penstock {holds}` (process {process.pid} on {socket.gethostname()}, since 20" in said
    assert said.endswith("; wait for its end, or stop it")
    process.communicate("", timeout=60)
    assert refused(asks, run) == ""
    assert not [path for path in run.iterdir() if path.suffix == ".lock"]


@pytest.mark.parametrize(
    ("holds", "first", "asks", "second", "free"),
    [
        ("training", "proxy", "training", "run", True),
        ("training", "run", "writing_tables", "proxy", True),
        ("writing_tables", "proxy", "training", "run", True),
        ("writing_tables", "proxy", "writing_tables", "run", False),
        ("training", "proxy", "writing_tables", "run", False),
        ("writing_tables", "run", "training", "proxy", False),
        ("writing_tables", "run", "writing_tables", "proxy", False),
    ],
)
def test_runs_on_the_same_tables(
    run: Path, proxy: Path, holders: Holders, holds: str, first: str, asks: str, second: str, free: bool
) -> None:
    places = {"run": run, "proxy": proxy}
    process = holders.hold(holds, places[first])
    said = refused(asks, places[second])
    assert (said == "") == free
    assert free or f"{run}/{TABLES_LOCK}" in said
    assert free or f"process {process.pid} " in said


def test_all_holders_are_named_and_dead_ones_are_not(run: Path, proxy: Path, holders: Holders) -> None:
    one, other = holders.hold("training", run), holders.hold("training", proxy)
    said = refused("writing_tables", run)
    assert f"process {one.pid} " in said
    assert f") and `penstock training` (process {other.pid} " in said
    one.kill()
    one.wait(timeout=60)
    said = refused("writing_tables", run)
    assert f"process {one.pid} " not in said
    assert f"process {other.pid} " in said


def test_a_killed_process_holds_nothing(run: Path, holders: Holders) -> None:
    process = holders.hold("writing_tables", run)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert str(process.pid) in (run / TABLES_LOCK).read_text()  # the file stays, the lock does not
    with lock_training(Store(str(run)), "penstock train"):
        pass
    assert not (run / TABLES_LOCK).exists()


def test_a_child_of_the_holder_holds_nothing(run: Path) -> None:
    with lock_tables(Store(str(run)), "penstock run"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        assert refused("writing_tables", run) == ""
    finally:
        child.kill()
        child.wait(timeout=60)


def test_a_lock_file_that_its_holder_removes_meanwhile_is_opened_again(run: Path) -> None:
    """Between opening the file and locking it, the last holder may have removed it: another one stands in its place."""
    real, asked = __import__("fcntl").flock, []

    def late(file: int, how: int) -> None:
        if not asked:
            asked.append(file)
            (run / TABLES_LOCK).unlink()
        real(file, how)

    with mock.patch("schemas.locks.fcntl.flock", late), lock_tables(Store(str(run)), "penstock run"):
        said = json.loads((run / TABLES_LOCK).read_text())
        assert said["pid"] == os.getpid()
        assert "penstock run" in refused("writing_tables", run)


def test_where_there_are_no_locks_work_goes_on(run: Path, tmp_path: Path) -> None:
    with mock.patch("schemas.locks.fcntl.flock", side_effect=OSError(38, "no locks here")):
        assert refused("writing_tables", run) == ""
    assert refused("training", tmp_path / "nothing") == ""
    assert not (tmp_path / "nothing").exists()


def test_no_takedown_while_somebody_trains_or_writes(run: Path, proxy: Path, holders: Holders) -> None:
    document = documents_of(opened(run))[8]["doc_id"].hex()
    process = holders.hold("training", proxy)
    before = all_bytes(run)
    with pytest.raises(ContractError, match=rf"`penstock takedown` .* `penstock training` \(process {process.pid} on "):
        take_down(run, doc=[document])
    with pytest.raises(ContractError, match="penstock takedown"):
        take_down(run, drop_old=True)
    assert all_bytes(run) == before
    assert take_down(run, doc=[document], dry_run=True) == 0  # which only looks
    process.communicate("", timeout=60)
    assert take_down(run, doc=[document]) == 0


def test_nobody_trains_behind_a_takedown_that_was_broken_off(run: Path, proxy: Path) -> None:
    """Its certificate names the checkpoints that stood when it began: none may come before its end."""
    Store(str(run)).write_atomic(PENDING_NAME, b"{}")
    for folder in (run, proxy):
        assert f"{run}/{PENDING_NAME}: expected no takedown under way" in refused("training", folder)
    assert refused("writing_tables", run) == ""  # for the takedown itself


def test_a_replay_moves_no_checkpoint_of_a_run_that_trains(run: Path, holders: Holders) -> None:
    process = holders.hold("training", run)
    with pytest.raises(ContractError, match=rf"`penstock train --replay-from` .*\(process {process.pid} on"):
        begin_replay(Store(str(run)), "clean")


def test_a_second_trainer_is_refused_before_it_changes_anything(run: Path, holders: Holders) -> None:
    process = holders.hold("training", run)
    before = all_bytes(run)
    command = [sys.executable, "-m", "train.pretrain", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert f"penstock: {run}/{TRAIN_LOCK}: expected to `penstock train` a run" in done.stderr
    assert f"(process {process.pid} on" in done.stderr
    assert all_bytes(run) == before
