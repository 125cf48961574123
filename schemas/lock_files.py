"""The lock files of a run folder and what they say about their holders; `schemas/locks.py` takes and releases them.

A holder is a line of JSON with its command, process id and machine. The lines of killed processes stay in the file.
"""

import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

TABLES_LOCK = "tables.lock"
"""The lock file that is held exclusively to write or remove tables, and shared to read them for a long time."""
EXPORT_LOCK = "export.lock"
"""The lock file of a folder that an export is written to."""
FIELDS = frozenset(("what", "pid", "host", "since"))
"""The fields of the line of a holder."""
MAX_BYTES = 16 << 20
"""Maximum size of a lock file that is read [bytes]; a line has about 100."""
TRAIN_LOCK = "train.lock"
"""The lock file that is held exclusively to train or to move checkpoints."""


def describe_holders(lock: Path) -> str:
    """Return a text that names the processes that hold a lock file."""
    lines = _lines(lock)
    # Lines of processes that have ended are omitted, unless there are only such lines.
    alive = [line for line in lines if line["host"] != socket.gethostname() or _is_alive(line["pid"])]
    holders = [
        f"`{line['what']}` (process {line['pid']} on {line['host']}, since {line['since']})" for line in alive or lines
    ]
    return " and ".join(holders) or "a process that has not written its id to this file yet"


def is_written_elsewhere(folder: Path) -> bool:
    """Return True if another process writes the tables of a local run; False where locks are not supported."""
    lock = folder / TABLES_LOCK
    with suppress(OSError):  # no such file, no permission, or no locks
        file = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.getpid() not in {line["pid"] for line in _lines(lock)}
        finally:
            os.close(file)  # releases the shared lock too
    return False


def _lines(lock: Path) -> list[dict[str, Any]]:
    """Return the lines of a lock file that name a holder; a foreign run may have any other ones."""
    try:
        with lock.open("rb") as file:
            lines = [json.loads(line) for line in file.read(MAX_BYTES).splitlines()]
    except (OSError, ValueError, RecursionError):
        return []
    return [line for line in lines if isinstance(line, dict) and line.keys() >= FIELDS and type(line["pid"]) is int]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
