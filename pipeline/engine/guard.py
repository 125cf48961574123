"""The guard of records: a limit on each record, and a note on the one on which a worker ends.

Before each record, the worker writes the record's number into memory that it shares with a watcher, and sets a limit of
CPU time. If the worker ends on a record, the watcher writes a note, a small file beside the results of parts. Whichever
process does the part again runs the records with a note in a child process, and all others as before.

The reading of the next record has the same limits, counted anew whenever the reader has read more bytes of its file: to
pass over a large archive may take hours. It cannot be tried alone, so if several workers end at the same place of a
file, after the same number of reads, the rest of the file is a gap. Signals from outside end workers at other places.
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
)
from pipeline.engine.stage import Row, RowStep
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
READING = 1 << 62
"""The bit that marks the number of a record that was being read. Below it are the number of earlier notes on it (6
bits) and its place (56 bits): the number of the record, and a count of the reads of its file (20 bits), by which the
watcher sees progress too."""
READS_BITS, PLACE_BITS = 20, 56
MAX_READINGS = 2
"""Number of workers that end at one place, from which the rest of the file is not read."""
WAIT_SECONDS = 5.0
"""Longest time that a retry waits for the note that a watcher may be writing [s]; it takes .3 s on an idle machine."""


def note_folder(key: str) -> str:
    """Return the folder of the notes on the records of a part."""
    return f"{NOTES}/{key}"


def noted_records(store: Store, key: str, retried: bool) -> tuple[set[int], Counter[int]]:
    """Return the numbers of the records of a part that have a note, and the number of notes by place that was read.

    In a retry, wait for the first note.
    """
    folder = store.child(note_folder(key))
    deadline = time.monotonic() + (WAIT_SECONDS if retried else 0.0)
    while True:
        noted = {int(name.partition(".")[0]) for name in folder.walk() if name.endswith(".json")}
        if noted or time.monotonic() >= deadline:
            readings = Counter(number & (1 << PLACE_BITS) - 1 for number in noted if number & READING)
            return {number for number in noted if not number & READING}, readings
        time.sleep(WAIT_SECONDS / 10)


def delete_notes(store: Store) -> None:
    """Delete the notes on the records of all parts. Raises ContractError if a symbolic link leads to them."""
    check_deletable(store, f"{NOTES}/x", levels=2)
    for name in [*store.child(NOTES).walk()]:
        store.delete(f"{NOTES}/{name}")


class StuckReaderError(Exception):
    """The reader of a file has ended several workers at one place, such as by its limit of CPU time."""


def record_at(place: int) -> int:
    """Return the number of the record that is read at a place."""
    return place >> READS_BITS


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
        self._noted, self._readings = noted_records(*place, retried)
        self._all = len(self._noted) >= MANY_NOTES or (retried and not self._noted and not self._readings)
        self._place = place
        self._watch = _watch_of_this_process(limits)
        self._watch.begin_part(*place)
        for number in sorted(self._noted | {*map(record_at, self._readings)}):
            WORKER_LOGGER.warning(f"record {number}: an earlier process has ended on it", extra={"record": number})
        self._number = self._num_read = 0
        limit_memory(limits.memory_bytes)

    def __call__(self, row: Row) -> Row:
        """Return the function's result for the next record of the part.

        Raises Crashed if the record ends its processes; see `Sandbox`.
        """
        self._number += 1
        if self._all or self._number in self._noted:
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
        MAX_READINGS workers at one place in the next record.
        """
        source, end = iter(rows), object()
        while True:
            self._num_read += 1
            ended = [number for place, number in self._readings.items() if record_at(place) == self._num_read]
            if max(ended, default=0) >= MAX_READINGS:
                raise StuckReaderError(f"expected a record, got {max(ended)} workers that ended while they read it")
            mark = READING | (sum(ended) & 63) << PLACE_BITS | self._num_read << READS_BITS
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
        self._watch.begin_record(mark | next(reads) & (1 << READS_BITS) - 1)
        limit_cpu(self._limits.cpu_seconds)

    @property
    def ends(self) -> Counter[str]:
        """How often a process ended on a record of the part: workers by their notes, and child processes by cause."""
        return self._sandbox.ends + Counter(worker=len(self._noted), reader=self._readings.total())

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
            call = f"from {watcher.__name__} import main; main({self.owner}, {file.fileno()}, {limits.seconds!r})"
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                _python(call), stdin=subprocess.PIPE, pass_fds=[file.fileno()]
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
            self._process.wait()


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
