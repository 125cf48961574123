"""The guard of records: a limit on each record, and a note on the one on which a worker ends.

Before each record, the worker writes the record's number into memory that it shares with a watcher, and sets a limit of
CPU time. If the worker ends on a record, the watcher writes a note, a small file beside the results of parts. Whichever
process does the part again runs the records with a note in a child process, and all others as before.

The reading of the next record has the same limits, counted anew whenever the reader has read more bytes of its file: to
pass over a large archive may take hours. It cannot be tried alone, so if the reader of a file ends several workers on
one record, the rest of the file is a gap. A worker that another process ends is not counted: only fatal signals that a
worker raises itself, such as by its limit of CPU time, leave a mark in the memory of the watcher.
"""

import atexit
import itertools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pipeline.engine import watcher
from pipeline.engine.isolation import (
    LIMITS,
    MEMORY_LIMIT,
    Crashed,
    RecordLimits,
    Sandbox,
    lift_cpu_limit,
    lift_memory_limit,
    limit_cpu,
    limit_memory,
    mark_faults,
    unmark_faults,
)
from pipeline.engine.stage import Row, RowStep
from pipeline.engine.watcher import KILLED, READING
from schemas.logs import WORKER_LOGGER
from schemas.paths import check_deletable
from schemas.storage import Store

Item = TypeVar("Item")

PARTS = "parts"
"""Folder of the results of parts, and of the notes on their records."""
NOTES = f"{PARTS}/suspects"
WRITE_NOTE = (
    "from schemas.storage import Store; Store(sys.argv[1]).write_atomic(f'{sys.argv[2]}/{sys.argv[3]}.json', b'{}')"
)
"""Program that writes a note: an empty object whose name is the number of the record. It imports little else, so that a
retry finds the note."""
MANY_NOTES = 2
"""Number of notes on a part from which all its records run in a child process: its attempts are limited."""
MAX_READINGS = 2
"""Number of workers that a reader ends while it reads one record, from which the rest of the file is not read."""
WAIT_SECONDS = 5.0
"""Longest time that a retry waits for the note that a watcher may be writing [s]; it takes .3 s on an idle machine."""


def note_folder(key: str) -> str:
    """Return the folder of the notes on the records of a part."""
    return f"{NOTES}/{key}"


@dataclass(frozen=True)
class Notes:
    """The notes on the records of a part."""

    records: frozenset[int]
    """Numbers of the records on which workers ended."""
    readings: Counter[int]
    """Number of workers that ended by themselves while they read a record, by its number."""
    killed: Counter[int]
    """Number of workers that another process ended while they read a record, by its number."""

    def __len__(self) -> int:
        return len(self.records) + self.readings.total() + self.killed.total()


def read_notes(store: Store, key: str, retried: bool) -> Notes:
    """Return the notes on the records of a part.

    In a retry, wait for the first note.
    """
    folder = store.child(note_folder(key))
    deadline = time.monotonic() + (WAIT_SECONDS if retried else 0.0)
    while True:
        noted = {int(name.partition(".")[0]) for name in folder.walk() if name.endswith(".json")}
        if noted or time.monotonic() >= deadline:
            readings = {number for number in noted if number & READING}
            killed = {number for number in readings if number & KILLED}
            by_record = (
                Counter(number >> 20 & (1 << 36) - 1 for number in each) for each in (readings - killed, killed)
            )
            return Notes(frozenset(noted - readings), *by_record)
        time.sleep(WAIT_SECONDS / 10)


def delete_notes(store: Store) -> None:
    """Delete the notes on the records of all parts. Raises ContractError if a symbolic link leads to them."""
    check_deletable(store, f"{NOTES}/x", levels=2)
    for name in [*store.child(NOTES).walk()]:
        store.delete(f"{NOTES}/{name}")


class StuckReaderError(Exception):
    """The reader of a file has ended several workers while it read one record, by its limit of CPU time or a crash."""


class RecordGuard:
    """Calls a function on one record of a part at a time, each within the limits; `close` after use.

    Records with a note run in a child process. All do in a retry without a note, such as after the loss of a machine,
    and from MANY_NOTES on.
    """

    def __init__(
        self,
        function: RowStep,
        place: tuple[Store, str],
        retried: bool,
        limits: RecordLimits = LIMITS,
    ):
        """`place` is the folder with the results of parts, and the key of the part.

        `retried` is True if an earlier attempt at the part failed.
        """
        self._function, self._limits = function, limits
        self._sandbox = Sandbox(function, limits)
        self._notes = read_notes(*place, retried)
        self._all = len(self._notes.records) >= MANY_NOTES or (retried and not len(self._notes))
        self._place = place
        self._watch = _watch_of_this_process(limits)
        self._watch.begin_part(*place)
        for number in sorted({*self._notes.records, *self._notes.readings, *self._notes.killed}):
            WORKER_LOGGER.warning(f"record {number}: an earlier process has ended on it", extra={"record": number})
        self._number = self._num_read = 0
        limit_memory(limits.memory_bytes)

    def __call__(self, row: Row) -> Row:
        """Return the function's result for the next record of the part.

        Raises Crashed if the record ends its processes; see `Sandbox`.
        """
        self._number += 1
        if self._all or self._number in self._notes.records:
            return self._alone(row)
        self._watch.begin_record(self._number)
        limit_cpu(self._limits.cpu_seconds)
        try:
            return self._function(dict(row))
        except MemoryError:
            self._sandbox.ends[MEMORY_LIMIT] += 1
        finally:
            lift_cpu_limit()
            self._watch.begin_record(0)
        self._warn("got no memory, and is tried alone", MEMORY_LIMIT)
        return self._alone(row)  # other records of the part may have taken the memory

    def _alone(self, row: Row) -> Row:
        """Return the function's result for a record that runs in a child process, and log the children that it ends."""
        before = self._sandbox.ends.copy()
        try:
            return self._sandbox(row)
        except Crashed as error:
            self._warn("is dropped as crashed", str(error))
            raise
        finally:
            for cause, number in (self._sandbox.ends - before).items():
                self._warn(f"has ended {number} process(es) in which it ran alone", cause)

    def _warn(self, what: str, cause: str) -> None:
        WORKER_LOGGER.warning(f"record {self._number} {what}: {cause}", extra={"record": self._number, "cause": cause})

    def read(self, rows: Iterable[Item], stream: Any) -> Iterator[Item]:
        """Yield what a reader yields, with the limits of a record on each step of it.

        `stream` calls its `on_read` when bytes of the file were read. Raises StuckReaderError if the reader has ended
        MAX_READINGS workers on the next record.
        """
        source, end = iter(rows), object()
        while True:
            self._num_read += 1
            ended = self._notes.readings[self._num_read]
            if ended >= MAX_READINGS:
                raise StuckReaderError(f"expected a record, got {ended} workers that ended while they read it")
            earlier = ended + self._notes.killed[self._num_read]
            mark = READING | (earlier & 31) << 56 | self._num_read << 20
            stream.on_read = partial(self._has_read, mark, itertools.count())
            stream.on_read()
            try:
                item: Any = next(source, end)
            finally:
                stream.on_read = None
                lift_cpu_limit()
                self._watch.begin_record(0)
            if item is end:
                return
            yield item

    def _has_read(self, mark: int, reads: Iterator[int]) -> None:
        self._watch.begin_record(mark | next(reads) & (1 << 20) - 1)
        limit_cpu(self._limits.cpu_seconds)

    @property
    def ends(self) -> Counter[str]:
        """How often a process ended on a record of the part: workers by their notes, and child processes by cause."""
        read = self._notes.readings + self._notes.killed
        return self._sandbox.ends + Counter(worker=len(self._notes.records), reader=read.total())

    def close(self) -> None:
        """End the child process, and lift the limit of memory."""
        lift_memory_limit()
        self._sandbox.close()


def _python(call: str) -> list[str]:
    """Return the command that runs a line of Python where this process finds its modules."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"]


class _Watch:
    """The watcher of this process, and the memory that it shares with it."""

    def __init__(self, limits: RecordLimits):
        self.owner, self.limits = os.getpid(), limits
        with tempfile.TemporaryFile() as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            self._record = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
            self._fault = mark_faults()
            shared = file.fileno(), self._fault
            call = f"from {watcher.__name__} import main; main({self.owner}, {shared}, {limits.seconds!r})"
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                _python(call), stdin=subprocess.PIPE, pass_fds=shared
            )

    def begin_part(self, store: Store, key: str) -> None:
        """Let notes name this part from now on."""
        command = [*_python(WRITE_NOTE), store.address, note_folder(key)]
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def begin_record(self, number: int) -> None:
        """Set the number of the record that this process is processing; 0: none."""
        self._record[0] = number

    def is_of(self, process: int, limits: RecordLimits) -> bool:
        """Return True if the watcher runs, watches this process and has these limits."""
        return self.owner == process and self.limits == limits and self._process.poll() is None

    def close(self) -> None:
        """End the watcher."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self.owner == os.getpid():
            unmark_faults()
            self._process.wait()
        os.close(self._fault)


_WATCH: dict[str, Any] = {}


def _watch_of_this_process(limits: RecordLimits) -> _Watch:
    """Return the watcher of this process; a forked process gets its own."""
    watch: _Watch | None = _WATCH.get("watch")
    if watch is None or not watch.is_of(os.getpid(), limits):
        if watch is not None:
            watch.close()
        else:
            atexit.register(lambda: _WATCH["watch"].close())
        _WATCH["watch"] = watch = _Watch(limits)
    return watch
