"""The child process: a record is blamed if it ends fresh children itself, never for what another process does."""

import ctypes
import faulthandler
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.engine import isolation
from pipeline.engine.isolation import MAX_SIGNALS, OWN_DEATHS, Crashed, RecordLimits, Sandbox


def work(row):
    """Do what a row asks for."""
    match row["do"]:
        case "fault":
            faulthandler.disable()
            ctypes.string_at(0)
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            try:
                bytearray(2 << 30)
            except MemoryError:
                os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory has no such limit
        case "compute":
            while True:
                pass
        case "wait":
            time.sleep(row["seconds"])
        case "raise":
            raise ValueError("bad row")
        case "once" if not os.path.exists(row["file"]):
            open(row["file"], "w").close()
            os._exit(1)
    return row | {"pid": os.getpid()}


@pytest.fixture
def sandbox(monkeypatch):
    monkeypatch.setattr(isolation, "PAUSE_SECONDS", 0.01)
    made = Sandbox(work, RecordLimits(cpu_seconds=1, seconds=120))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("do", "cause", "ends"),
    [
        ("fault", "died", OWN_DEATHS),
        ("exit", "died", OWN_DEATHS),
        ("kill", "signal", MAX_SIGNALS),
        ("memory", "signal", MAX_SIGNALS),
        ("compute", "cpu_limit", OWN_DEATHS),
    ],
)
def test_a_record_that_ends_its_process_is_crashed_and_only_it(sandbox, do, cause, ends):
    assert sandbox({"do": "ok", "blob": b"x" * 3_000_000})["blob"] == b"x" * 3_000_000
    with pytest.raises(Crashed, match=cause):
        sandbox({"do": do})
    assert sandbox.ends == {cause: ends + 1}  # the first child had processed another record, so it does not count
    assert sandbox({"do": "ok"})["pid"] != os.getpid()


def test_a_record_that_dies_once_alone_is_kept(sandbox, tmp_path):
    assert sandbox({"do": "once", "file": str(tmp_path / "died")})["pid"] != os.getpid()
    assert sandbox.ends == {"died": 1}


def test_time_without_cpu_time_is_no_fault_up_to_the_limit_for_stuck_processes(sandbox):
    assert sandbox({"do": "wait", "seconds": 3})["seconds"] == 3
    assert not sandbox.ends
    stuck = Sandbox(work, RecordLimits(cpu_seconds=1, seconds=0.3))
    with pytest.raises(Crashed, match="stuck"):
        stuck({"do": "wait", "seconds": 60})
    stuck.close()


def test_an_error_of_the_function_is_raised_and_the_child_stays(sandbox):
    first = sandbox({"do": "ok"})["pid"]
    with pytest.raises(ValueError, match="bad row"):
        sandbox({"do": "raise"})
    assert sandbox({"do": "ok"})["pid"] == first


def test_a_child_that_is_killed_from_outside_at_any_time_costs_no_record(sandbox):
    stop, answers, kills = threading.Event(), [], Counter()

    def kill_at_random() -> None:
        moments = random.Random(5)
        while not stop.wait(moments.uniform(0.01, 0.15)):
            child = sandbox._child
            if child is not None and child.pid and kills[len(answers)] < MAX_SIGNALS - 1:
                kills[len(answers)] += 1
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(child.pid, moments.choice((signal.SIGKILL, signal.SIGTERM)))

    killer = threading.Thread(target=kill_at_random)
    killer.start()
    try:
        for n in range(60):
            answers.append(sandbox({"do": "wait", "seconds": 0.02, "n": n})["n"])
    finally:
        stop.set()
        killer.join()
    assert answers == [*range(60)]
    assert sandbox.ends["signal"] > 0
    assert {*sandbox.ends} == {"signal"}


def test_the_child_ends_with_its_parent(tmp_path):
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.write(writer, str(Sandbox(work)({"do": "ok"})["pid"]).encode())
        os._exit(0)
    os.waitpid(parent, 0)
    child = int(os.read(reader, 20))
    deadline = time.monotonic() + 20
    while (runs := is_running(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs


def is_running(process: int) -> bool:
    """Whether a process exists and has not ended; where nothing waits for it, one that has ended stays in the list."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
