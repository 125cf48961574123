"""Guarded records: whatever ends a worker, a note names the record, and the next attempt isolates that one alone."""

import os
import resource
import signal
import subprocess
import sys
import time
import unicodedata

import pytest

from pipeline.engine import guard as guards
from pipeline.engine.guard import MANY_NOTES, RecordGuard, delete_notes, note_folder, noted_records
from pipeline.engine.isolation import Crashed, RecordLimits
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
    while not (found := noted_records(Store(str(folder)), KEY, False)) and time.monotonic() < deadline:
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
    assert 600 <= limit - time.process_time() <= 602
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] == before[1]
    guard.close()
