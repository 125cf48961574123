"""Tests of locks on run folders, with real processes: exclusion, messages, and release when a process is killed."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from schemas.errors import ContractError
from schemas.exports import exported_files
from schemas.lock_files import EXPORT_LOCK, TABLES_LOCK, TRAIN_LOCK, describe_holders
from schemas.locks import lock_export, lock_tables, lock_training
from schemas.manifest import MANIFEST_NAME, open_table, read_run
from schemas.storage import Store
from schemas.takedown import PENDING_NAME
from schemas.union import write_union
from schemas.versions import attach_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import all_bytes, documents_of, opened, take_down
from train.takedown_replay import begin_replay

LOCKS = {"training": lock_training, "writing_tables": lock_tables, "exporting": lock_export}
HOLDER = """
import sys, time
from schemas import locks
from schemas.storage import Store

with getattr(locks, sys.argv[1])(Store(sys.argv[2]), sys.argv[3]):
    print("held", flush=True)
    sys.stdin.read()
"""


class Holders:
    """Processes that hold locks until they are ended."""

    def __init__(self, stack: ExitStack):
        self._stack = stack

    def hold(self, what: str, folder: Path) -> subprocess.Popen[str]:
        """Start a process inside `with locks.<function>(folder)`; returns it."""
        command = [sys.executable, "-c", HOLDER, LOCKS[what].__name__, str(folder), f"penstock {what}"]
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
    """A run that is attached to the tables of the other run."""
    attach_run(Store(str(run / "ladder/small")), Store(str(run)))
    return run / "ladder/small"


def refused(what: str, folder: Path) -> str:
    """Return the error message if a lock is held; empty if it is free."""
    try:
        with LOCKS[what](Store(str(folder)), "penstock that"):
            return ""
    except ContractError as error:
        return str(error)


@pytest.mark.parametrize(
    ("holds", "takes", "lock"),
    [
        ("training", "training", TRAIN_LOCK),
        ("training", "writing_tables", TABLES_LOCK),
        ("writing_tables", "training", TABLES_LOCK),
        ("writing_tables", "writing_tables", TABLES_LOCK),
        ("exporting", "exporting", EXPORT_LOCK),
    ],
)
def test_a_held_lock_excludes_other_processes(run: Path, holders: Holders, holds: str, takes: str, lock: str) -> None:
    process = holders.hold(holds, run)
    message = refused(takes, run)
    assert message.startswith(f"{run}/{lock}: expected a free lock for `penstock that`, got one held by ")
    assert f"held by `penstock {holds}` (process {process.pid} on {socket.gethostname()}, since 20" in message
    assert message.endswith(". Wait until that process ends, or stop it.")
    process.communicate("", timeout=60)
    assert refused(takes, run) == ""
    assert not [path for path in run.iterdir() if path.suffix == ".lock"]


@pytest.mark.parametrize(
    ("holds", "first", "takes", "second", "free"),
    [
        ("exporting", "run", "writing_tables", "run", True),  # into a folder of the run
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
    run: Path, proxy: Path, holders: Holders, holds: str, first: str, takes: str, second: str, free: bool
) -> None:
    folders = {"run": run, "proxy": proxy}
    process = holders.hold(holds, folders[first])
    message = refused(takes, folders[second])
    assert (message == "") == free
    assert free or f"{run}/{TABLES_LOCK}" in message
    assert free or f"process {process.pid} " in message


def test_the_folder_of_an_export_is_made_and_stays_only_with_files(tmp_path: Path) -> None:
    out = Store(str(tmp_path / "new/out"))
    with lock_export(out, "penstock export"):
        assert out.exists(EXPORT_LOCK)
        assert [*exported_files(out)] == []
    assert not (tmp_path / "new/out").exists()
    with lock_export(out, "penstock export"):
        out.write_atomic("export.json", b"{}")
    assert [*out.walk()] == ["export.json"]
    with lock_export(out.child("export.json"), "penstock export"):
        pass  # the export says that it expected a folder


@pytest.fixture
def union(run: Path, proxy: Path) -> Path:
    """A run on the union of three datasets; it names the first by its tokenizer and the others in a manifest."""
    members = [make_tiny_dataset(run.parent / name, {"web": 20}, suffix=name) for name in ("first", "second")]
    write_union(Store(str(run.parent / "union")), [*members, Store(str(proxy))])
    return run.parent / "union"


@pytest.mark.parametrize("member", ["first", "second", "run"])
@pytest.mark.parametrize("reader", ["union", "attached"])
def test_training_on_a_union_locks_all_its_members(union: Path, holders: Holders, member: str, reader: str) -> None:
    """Without the lock, a takedown of a member deletes the files that the training reads, and certifies too little."""
    folder = union.parent / member
    attach_run(Store(str(union.parent / "attached")), Store(str(union)))
    process = holders.hold("training", union.parent / reader)
    before, document = all_bytes(folder), documents_of(opened(folder))[8]["doc_id"].hex()
    with pytest.raises(ContractError, match=rf"/{member}/{TABLES_LOCK}: .* \(process {process.pid} on "):
        take_down(folder, doc=[document])
    assert all_bytes(folder) == before
    process.communicate("", timeout=60)
    Store(str(folder)).write_atomic(PENDING_NAME, b"{}")
    assert f"{folder}/{PENDING_NAME}: expected no unfinished takedown" in refused("training", union.parent / reader)


def test_a_run_that_reads_a_union_locks_its_members(union: Path, tmp_path: Path, holders: Holders) -> None:
    (tmp_path / "new").mkdir()
    with lock_tables(Store(str(tmp_path / "new")), "penstock run", [Store(str(union))]):
        for name in ("union", "first", "second", "run"):
            assert (union.parent / name / TABLES_LOCK).exists()
    process = holders.hold("writing_tables", union.parent / "second")
    assert f"process {process.pid} " in refused("writing_tables", union)


def test_a_damaged_manifest_locks_what_run_json_names(union: Path) -> None:
    """The command that holds the lock says what is wrong with the manifest, or mends it."""
    (union / "tokens" / read_run(Store(str(union))).tables["tokens"] / MANIFEST_NAME).write_text("{")
    with lock_tables(Store(str(union)), "penstock repair"):
        assert (union.parent / "first" / TABLES_LOCK).exists()
        assert not (union.parent / "second" / TABLES_LOCK).exists()


def test_all_living_holders_are_named(run: Path, proxy: Path, holders: Holders) -> None:
    first, second = holders.hold("training", run), holders.hold("training", proxy)
    message = refused("writing_tables", run)
    assert f"process {first.pid} " in message
    assert f") and `penstock training` (process {second.pid} " in message
    first.kill()
    first.wait(timeout=60)
    message = refused("writing_tables", run)
    assert f"process {first.pid} " not in message
    assert f"process {second.pid} " in message


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
    """Between opening and locking the file, its last holder may remove it, and another file replaces it."""
    flock, calls = __import__("fcntl").flock, []

    def late(file: int, operation: int) -> None:
        if not calls:
            calls.append(file)
            (run / TABLES_LOCK).unlink()
        flock(file, operation)

    with mock.patch("schemas.locks.fcntl.flock", late), lock_tables(Store(str(run)), "penstock run"):
        holder = json.loads((run / TABLES_LOCK).read_text())
        assert holder["pid"] == os.getpid()
        assert "penstock run" in refused("writing_tables", run)


def test_without_lock_support_nothing_is_locked(run: Path, tmp_path: Path) -> None:
    with mock.patch("schemas.locks.fcntl.flock", side_effect=OSError(38, "no locks here")):
        assert refused("writing_tables", run) == ""
    assert refused("training", tmp_path / "nothing") == ""
    assert not (tmp_path / "nothing").exists()


def test_a_lock_is_held_on_a_full_disk(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the line about its holder is missing: `penstock gc` could not free the disk otherwise."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.write", side_effect=full), lock_tables(Store(str(run)), "penstock gc"):
        monkeypatch.undo()
        with pytest.raises(ContractError, match="got one held by a process that has not written its id"):
            lock_tables(Store(str(run)), "penstock run").__enter__()
    assert not (run / TABLES_LOCK).exists()


def test_no_takedown_during_training_or_writing(run: Path, proxy: Path, holders: Holders) -> None:
    document = documents_of(opened(run))[8]["doc_id"].hex()
    process = holders.hold("training", proxy)
    before = all_bytes(run)
    with pytest.raises(
        ContractError, match=rf"`penstock takedown`, .* `penstock training` \(process {process.pid} on "
    ):
        take_down(run, doc=[document])
    with pytest.raises(ContractError, match="penstock takedown"):
        take_down(run, drop_old=True)
    assert all_bytes(run) == before
    assert take_down(run, doc=[document], dry_run=True) == 0  # it only reads
    process.communicate("", timeout=60)
    assert take_down(run, doc=[document]) == 0


def test_an_interrupted_takedown_blocks_training(run: Path, proxy: Path) -> None:
    """Its certificate names the checkpoints at its start, so none may be written before it is finished."""
    Store(str(run)).write_atomic(PENDING_NAME, b"{}")
    for folder in (run, proxy):
        assert f"{run}/{PENDING_NAME}: expected no unfinished takedown" in refused("training", folder)
    assert refused("writing_tables", run) == ""  # as the takedown itself requires it


def test_a_replay_moves_no_checkpoint_of_a_run_that_trains(run: Path, holders: Holders) -> None:
    process = holders.hold("training", run)
    with pytest.raises(ContractError, match=rf"`penstock train --replay-from`, .*\(process {process.pid} on"):
        begin_replay(Store(str(run)), "clean")


def test_a_second_trainer_is_rejected_before_it_changes_anything(run: Path, holders: Holders) -> None:
    process = holders.hold("training", run)
    before = all_bytes(run)
    command = [sys.executable, "-m", "train.pretrain", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert f"penstock: {run}/{TRAIN_LOCK}: expected a free lock for `penstock train`" in done.stderr
    assert f"(process {process.pid} on" in done.stderr
    assert all_bytes(run) == before


def test_a_table_that_is_still_written_is_not_missing(tmp_path: Path, holders: Holders) -> None:
    run = Store(str(tmp_path))
    process = holders.hold("writing_tables", tmp_path)
    with pytest.raises(ContractError) as caught:
        open_table(run, "tokens")
    assert "expected a table 'tokens', got a run that is being written by `penstock writing_tables` " in str(
        caught.value
    )
    assert f"(process {process.pid} on " in str(caught.value)
    process.communicate(timeout=60)
    for own in (False, True):  # the process that writes the run finds no table either, and need not wait for itself
        lock = lock_tables(run, "penstock that") if own else ExitStack()
        with lock, pytest.raises(ContractError, match="got an empty run"):
            open_table(run, "tokens")


@pytest.mark.parametrize("name", [TABLES_LOCK, TRAIN_LOCK])
@pytest.mark.parametrize("kind", ["symbolic link", "dangling link", "hard link", "pipe", "folder"])
def test_a_lock_file_of_a_foreign_run_is_no_way_to_another_file(tmp_path: Path, name: str, kind: str) -> None:
    """A lock file is truncated and written to, so a link in its place would destroy a file of the user."""
    victim, run = tmp_path / "victim.txt", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    lock = run / name
    {
        "symbolic link": lambda: lock.symlink_to(victim),
        "dangling link": lambda: lock.symlink_to(tmp_path / "new.txt"),
        "hard link": lambda: lock.hardlink_to(victim),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[kind]()
    take = lock_tables if name == TABLES_LOCK else lock_training
    with (
        pytest.raises(ContractError, match=f"{name}: expected a file of the run to write to, got"),
        take(Store(str(run)), "penstock test"),
    ):
        pass
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new.txt").exists()
    assert os.path.lexists(lock)


def test_a_store_without_locks_is_named_once_for_each_writer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is on this disk; the addresses `gs://` and `hdfs://` lead to stores for which nothing is locked."""
    store = Store(str(run))
    store.uri, store.is_local = "gs://corpus/run", False
    with lock_tables(store, "penstock run"):
        assert capsys.readouterr().err == (
            "penstock: gs://corpus/run: this store has no locks, so nothing keeps two processes from writing this run "
            "folder. Run one at a time.\n"
        )


@pytest.mark.parametrize(
    "line", ["[1,2]", '{"pid":1}', '{"what":"x","pid":"y","host":"z","since":""}', "[" * 100_000, "x"]
)
def test_a_lock_file_with_other_lines_names_nobody(tmp_path: Path, line: str) -> None:
    (tmp_path / TABLES_LOCK).write_text(f"{line}\n")
    assert describe_holders(tmp_path / TABLES_LOCK) == "a process that has not written its id to this file yet"
    with (tmp_path / TABLES_LOCK).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ContractError, match="expected a free lock"), lock_tables(Store(str(tmp_path)), "x"):
            pass


def test_a_process_id_of_any_size_is_that_of_no_process(tmp_path: Path) -> None:
    line = {"what": "penstock run", "pid": 10**20, "host": socket.gethostname(), "since": "now"}
    (tmp_path / TABLES_LOCK).write_text(json.dumps(line))
    assert "process 100000000000000000000" in describe_holders(tmp_path / TABLES_LOCK)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_lock_of_another_user_is_held_too(holders: Holders) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        holders.hold("writing_tables", Path(folder))
        os.chmod(f"{folder}/{TABLES_LOCK}", 0o644)
        call = "import os; from schemas.locks import *; os.setgid(65534); os.setuid(65534); "
        call += f"lock_tables(Store({folder!r}), 'b').__enter__()"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False)
    assert "expected a free lock for `b`, got one held by `penstock writing_tables`" in done.stderr
