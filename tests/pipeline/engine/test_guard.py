"""Guarded records: whatever ends a worker, a note names the record, and the next attempt isolates that one alone."""

import ctypes
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.engine import guard as guards
from pipeline.engine.guard import MANY_NOTES, RecordGuard, delete_notes, note_folder, read_notes
from pipeline.engine.isolation import Crashed, RecordLimits, counted_seconds, lift_cpu_limit, limit_cpu
from schemas.logs import WorkerLog, logging_as
from schemas.storage import Store
from tests.support.paths import ROOT

KEY = "part-00003"
QUICK = RecordLimits(cpu_seconds=1, seconds=60.0)


def work(row):
    match row["do"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "compute":  # native code that holds the interpreter: quadratic in the marks
            unicodedata.normalize("NFC", "a" + "\u0301" * 300_000 + "\u0327" * 300_000)
        case "stop":
            time.sleep(300)
    return row | {"pid": os.getpid()}


def attempt(folder, things, retried=False, limits=QUICK):
    """Process rows as an attempt at a part does; return for each what happened, and the guard."""
    guard = RecordGuard(work, (Store(str(folder)), KEY), retried, limits)
    seen = []
    for do in things:
        try:
            seen.append("here" if guard({"do": do})["pid"] == os.getpid() else "child")
        except Crashed:
            seen.append("crashed")
    guard.close()
    return seen, guard.ends


def worker(folder, things, limits=QUICK, then=""):
    """Process rows in a process of its own, as a worker of Spark; return its exit code."""
    call = f"from {__name__} import *; attempt({str(folder)!r}, {things!r}, limits={limits!r}); {then}"
    return subprocess.run([sys.executable, "-c", call], cwd=ROOT, check=False).returncode


def notes(folder, wait=30):
    """The records of the part that have a note, when a watcher has written one."""
    deadline = time.monotonic() + wait
    while not (found := read_notes(Store(str(folder)), KEY, False).records) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(("do", "code"), [("kill", -signal.SIGKILL), ("compute", -signal.SIGXCPU)])
def test_a_worker_that_ends_on_a_record_leaves_a_note_and_only_this_record_is_isolated(tmp_path, do, code):
    things = ["ok", "ok", do, "ok"]
    assert worker(tmp_path, things) == code
    assert notes(tmp_path) == {3}
    seen, ends = attempt(tmp_path, things, retried=True)
    assert seen == ["here", "here", "crashed", "here"]
    assert ends["worker"] == 1
    # a driver that starts anew, and a master that never retries, find the note at the first attempt
    assert attempt(tmp_path, ["ok", "ok", "ok", "ok"])[0] == ["here", "here", "child", "here"]
    delete_notes(Store(str(tmp_path)))
    assert [*tmp_path.rglob("*.json")] == []


def test_a_worker_that_waits_for_ever_is_ended(tmp_path):
    assert worker(tmp_path, ["ok", "stop"], RecordLimits(cpu_seconds=600, seconds=0.5)) == -signal.SIGKILL
    assert notes(tmp_path) == {2}


def test_a_worker_that_ends_between_records_leaves_no_note(tmp_path):
    assert worker(tmp_path, ["ok"], then="os.kill(os.getpid(), 9)") == -signal.SIGKILL
    assert notes(tmp_path, wait=1) == set()


def test_all_records_are_isolated_in_a_retry_without_a_note_and_after_many_notes(tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "WAIT_SECONDS", 0.1)
    assert attempt(tmp_path, ["ok", "ok"])[0] == ["here", "here"]
    assert attempt(tmp_path, ["ok", "kill", "ok"], retried=True)[0] == ["child", "crashed", "child"]
    for record in range(MANY_NOTES):
        Store(str(tmp_path)).write_atomic(f"{note_folder(KEY)}/{record + 7}.json", b"{}")
    assert attempt(tmp_path, ["ok", "ok"])[0] == ["child", "child"]


def test_the_limit_is_that_of_one_record_and_is_lifted_between_records(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_CPU)
    place = Store(str(tmp_path)), KEY
    guard = RecordGuard(lambda row: row | {"limit": resource.getrlimit(resource.RLIMIT_CPU)[0]}, place, False)
    limit = guard({})["limit"]
    assert 600 <= limit - counted_seconds() <= 602
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] == before[1]
    guard.close()


MANY = 4 << 30
"""More than the limit of memory of these tests [bytes]."""


def hungry(row):
    """Take memory as a row asks for."""
    match row["do"]:
        case "python":
            row["blob"] = len(bytearray(MANY))
        case "arrow":
            row["blob"] = pa.allocate_buffer(MANY).size
        case "native":
            # a library that ends the process without memory, as C++ code does on std::bad_alloc
            if not ctypes.CDLL(None, use_errno=True).malloc(ctypes.c_size_t(MANY)):
                os.abort()
    return row | {"pid": os.getpid()}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits mapped memory")
@pytest.mark.parametrize("do", ["python", "arrow"])
def test_a_record_that_needs_more_memory_than_the_limit_is_the_only_one_dropped(tmp_path, do, json_lines):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    guard = RecordGuard(hungry, (Store(str(tmp_path)), KEY), False, RecordLimits(memory_bytes=1 << 30))
    assert guard({"do": "ok"})["pid"] == os.getpid()
    with pytest.raises(Crashed, match="memory_limit"), logging_as(WorkerLog("json", {"step": "documents"})):
        guard({"do": do})
    logged = [(line["level"], line["step"], line["record"], line["cause"]) for line in json_lines()]
    assert logged == 3 * [("WARNING", "documents", 2, "memory_limit")]
    assert guard({"do": "ok"})["pid"] == os.getpid()
    assert guard.ends == {"memory_limit": 3}  # here, and twice alone
    guard.close()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert "blob" in hungry({"do": do})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits mapped memory")
def test_native_code_that_ends_the_worker_without_memory_costs_its_record_alone(tmp_path):
    call = f"from {__name__} import *; limited({str(tmp_path)!r}, False)"
    assert subprocess.run([sys.executable, "-c", call], cwd=ROOT, check=False).returncode == -signal.SIGABRT
    assert notes(tmp_path) == {2}
    assert limited(tmp_path, True) == ["here", "crashed", "here"]


def limited(folder, retried):
    """Process three rows with a limit of memory, of which the second asks for more."""
    faulthandler.disable()
    guard = RecordGuard(hungry, (Store(str(folder)), KEY), retried, RecordLimits(memory_bytes=1 << 30))
    seen = []
    for do in ("ok", "native", "ok"):
        try:
            seen.append("here" if guard({"do": do})["pid"] == os.getpid() else "child")
        except Crashed:
            seen.append("crashed")
    guard.close()
    return seen


def test_a_record_that_found_no_memory_beside_others_is_tried_alone(tmp_path):
    """The failed attempt has changed the row; the next one gets the row as it was."""
    here = os.getpid()

    def once(row):
        row["seen"] = row.get("seen", 0) + 1
        if os.getpid() == here:
            raise MemoryError
        return row

    guard = RecordGuard(once, (Store(str(tmp_path)), KEY), False)
    assert guard({"do": "ok"}) == {"do": "ok", "seen": 1}
    guard.close()


class Stream:
    """A file that a reader reads."""

    on_read = None


def read(folder, kind, retried=False, limits=QUICK):
    """Read four records with a reader that computes natively before the third, and return those that it yields."""
    stream = Stream()

    def reader():
        for number in range(4):
            if number == 2 and kind == "stuck":
                unicodedata.normalize("NFC", "a" + "\u0301" * 300_000 + "\u0327" * 300_000)
            if number == 2 and isinstance(kind, int):
                os.kill(os.getpid(), kind)
            if number == 2 and kind == "skips":
                for step in range(6):
                    Path(folder, f"{os.getpid()}-{step}").touch()
                    end = counted_seconds() + 0.7
                    while counted_seconds() < end:
                        pass
                    stream.on_read()
            yield number

    guard = RecordGuard(work, (Store(str(folder)), KEY), retried, limits)
    found = [*guard.read(reader(), stream)]
    guard.close()
    return found


def test_the_limit_is_counted_by_the_clock_of_the_system(tmp_path):
    """A process whose clocks differ is not ended early: each limit leaves at least its seconds."""
    call = "from tests.pipeline.engine.test_guard import *; repeat_limits()"
    assert subprocess.run([sys.executable, "-c", call], cwd=ROOT, check=False).returncode == 0


def repeat_limits():
    """Compute for less than the limit, again and again."""
    for _ in range(8):
        limit_cpu(1)
        end = counted_seconds() + 0.9
        while counted_seconds() < end:
            pass
    lift_cpu_limit()


def test_a_reader_that_reads_on_is_not_ended(tmp_path):
    """It passes over a large record: the time is counted anew with each read."""
    assert read(tmp_path, "skips") == [0, 1, 2, 3]
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] == resource.getrlimit(resource.RLIMIT_CPU)[1]


def wait_for_notes(folder, readings, killed):
    """Wait until a watcher has written the last of these notes on records that were read."""
    deadline = time.monotonic() + 60
    while ((noted := read_notes(Store(str(folder)), KEY, False)).readings, noted.killed) != (readings, killed):
        assert time.monotonic() < deadline, noted
        time.sleep(0.05)


def test_a_reader_that_computes_for_ever_ends_two_workers(tmp_path):
    call = f"from {__name__} import *; read({str(tmp_path)!r}, 'stuck', "
    for ended in range(guards.MAX_READINGS):
        words = [sys.executable, "-c", f"{call}retried={ended > 0})"]
        assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGXCPU
        wait_for_notes(tmp_path, Counter({3: ended + 1}), Counter())
    with pytest.raises(guards.StuckReaderError, match="2 workers"):
        read(tmp_path, "stuck", retried=True)
    guards.delete_notes(Store(str(tmp_path)))  # as when the table is complete
    assert read(tmp_path, "quick") == [0, 1, 2, 3]


def test_signals_from_outside_during_a_read_cost_no_record(tmp_path):
    """A worker that another process ends, at whatever place of the file, is not counted."""
    call = f"from {__name__} import *; read({str(tmp_path)!r}, 'skips', "
    for ended, sent in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL)):
        words = [sys.executable, "-c", f"{call}retried={ended > 0}, limits=RecordLimits(cpu_seconds=9))"]
        with subprocess.Popen(words, cwd=ROOT) as process:
            while not (tmp_path / f"{process.pid}-0").exists():
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(sent)
        wait_for_notes(tmp_path, Counter(), Counter({3: ended + 1}))
    assert read(tmp_path, "skips", retried=True) == [0, 1, 2, 3]


@pytest.mark.parametrize("end", [signal.SIGSEGV, signal.SIGABRT])
def test_a_reader_that_crashes_ends_two_workers(tmp_path, end):
    call = f"from {__name__} import *; read({str(tmp_path)!r}, {int(end)}, "
    for ended in range(guards.MAX_READINGS):
        words = [sys.executable, "-c", f"{call}retried={ended > 0})"]
        assert subprocess.run(words, cwd=ROOT, check=False).returncode == -end
        wait_for_notes(tmp_path, Counter({3: ended + 1}), Counter())
    with pytest.raises(guards.StuckReaderError, match="2 workers"):
        read(tmp_path, "quick", retried=True)
