"""Child processes for records that may kill a process, and the limits of one record.

The limit of CPU time is one that the operating system enforces, so it holds in native code and at any load of the
machine. A record is not blamed for a process that another one ends.
"""

import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.engine.stage import Row, RowStep

OWN_DEATHS = 2
"""Deaths of a fresh child on a record, after which the record is dropped."""
MAX_SIGNALS = 5
"""Times that a fresh child may be ended by SIGKILL or SIGTERM on one record, after which the record is dropped. A
record cannot be distinguished from the system's killer of processes if it kills its process each time that it runs."""
PAUSE_SECONDS = 0.25
"""Pause after the first such signal, doubled after each further one, in which memory may become free [s]."""

CPU_LIMIT, MEMORY_LIMIT, STUCK, SIGNAL, DIED = "cpu_limit", "memory_limit", "stuck", "signal", "died"
"""Causes for which a process ends on a record: its CPU time, its memory, its wall-clock time, SIGKILL or SIGTERM, or
anything else, such as a library that ends the process when it gets no memory."""
OUT_OF_MEMORY = 137
"""Exit code of a child whose record needs more memory than the limit."""
MEMORY_FACTOR = 128
"""Maximum memory of a record, as a multiple of the size of the largest record that is read. The worst input that was
measured, 5 million Chinese characters, takes 27 times that size."""


@dataclass(frozen=True)
class RecordLimits:
    """What one record may take, in a worker and in a child process alike."""

    cpu_seconds: int = 600
    """CPU time of the process on the record [s]. The slowest valid text that was measured, 5 million characters of
    telephone numbers, takes 150 s."""
    seconds: float = 3600.0
    """Wall-clock time [s], for a process that waits without using CPU time."""
    memory_bytes: int = MEMORY_FACTOR * (32 << 20)
    """Memory that a worker may take on a part beyond what it holds when it begins, with its models loaded [bytes].
    Only Linux can limit it."""


LIMITS = RecordLimits()


TICKS = ~0 << 3
"""The clock of this process that Linux compares with its limit of CPU time (CPUCLOCK_PROF). It counts in ticks, and may
differ from the usual clock by a sixth on a busy virtual machine, which adds up to minutes in a worker of hours."""


def counted_seconds() -> float:
    """Return the CPU time of this process as the system counts it for the limit [s]."""
    return time.clock_gettime(TICKS) if sys.platform == "linux" else time.process_time()


def limit_cpu(seconds: int) -> None:
    """Make the system end this process by SIGXCPU when it has used this many seconds of CPU time from now on.

    The system counts whole seconds, so that the process may use up to one more.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(counted_seconds()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def lift_cpu_limit() -> None:
    """Remove the limit that `limit_cpu` has set."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def limit_memory(more_bytes: int) -> None:
    """Make allocations fail once this process has this much more memory than now [bytes]. Linux only."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def lift_memory_limit() -> None:
    """Remove the limit that `limit_memory` has set."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def mark_faults() -> int:
    """Return the open file in which something is written when this process ends by a signal that it has raised itself.

    These are faults of native code, such as SIGSEGV and SIGABRT, and SIGXCPU of `limit_cpu`.
    """
    file, path = tempfile.mkstemp()
    os.unlink(path)
    faulthandler.enable(file=file, all_threads=False)
    faulthandler.register(signal.SIGXCPU, file=file, all_threads=False, chain=True)
    return file


def unmark_faults() -> None:
    """Undo `mark_faults`."""
    faulthandler.unregister(signal.SIGXCPU)
    faulthandler.disable()


class Crashed(Exception):
    """A record ended every process that it ran in alone; the message is the cause of the last end."""


class _EndedError(Exception):
    """The child process has ended without an answer."""


class Sandbox:
    """Calls a function on one row at a time in a forked child process. If the child ends, a new one is forked."""

    def __init__(self, function: RowStep, limits: RecordLimits = LIMITS):
        self._function, self._limits = function, limits
        self._context = multiprocessing.get_context("fork")
        self._child: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self.ends: Counter[str] = Counter()
        """How often a child ended on a record, by cause."""

    def __call__(self, row: Row) -> Row:
        """Return the function's result for a row.

        Raises Crashed if the row ends OWN_DEATHS fresh children, or if signals end MAX_SIGNALS of them on the row. A
        child that has processed other rows before is not counted: its memory is not that of the row alone.
        """
        blamed: Counter[str] = Counter()
        while True:
            is_fresh = self._child is None
            try:
                return self._ask(row)
            except _EndedError as error:
                cause = str(error)
                self.ends[cause] += 1
                if not is_fresh:
                    continue
                blamed[cause] += 1
                if blamed[SIGNAL] == MAX_SIGNALS or blamed.total() - blamed[SIGNAL] == OWN_DEATHS:
                    raise Crashed(cause) from error
                if cause == SIGNAL:
                    time.sleep(PAUSE_SECONDS * 2 ** (blamed[SIGNAL] - 1))

    def _ask(self, row: Row) -> Row:
        """Return the child's answer. Raises _EndedError with the cause if there is none."""
        pipe = self._pipe or self._start()
        answer: Any = None
        try:
            pipe.send(row)
            is_stuck = not pipe.poll(self._limits.seconds)
            if not is_stuck:
                answer = pipe.recv()
        except (EOFError, OSError) as error:
            raise _EndedError(self._end()) from error
        if is_stuck:
            self.close()
            raise _EndedError(STUCK)
        if isinstance(answer, BaseException):
            raise answer
        return dict(answer)

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, ours, self._function, self._limits)
        self._child = self._context.Process(target=_serve, args=arguments, daemon=True)
        self._child.start()
        theirs.close()
        self._pipe = ours
        return ours

    def _end(self) -> str:
        """Wait until the child, whose pipe is closed, has ended. Return the cause."""
        code = 0
        if self._child is not None:
            self._child.join()
            code = self._child.exitcode or 0
        self.close()
        causes = {-signal.SIGXCPU: CPU_LIMIT, OUT_OF_MEMORY: MEMORY_LIMIT}
        return causes.get(code, SIGNAL if code in (-signal.SIGKILL, -signal.SIGTERM) else DIED)

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = None


def _serve(pipe: Connection, parents: Connection, function: RowStep, limits: RecordLimits) -> None:
    parents.close()  # or else this process would not see that its parent has ended
    unmark_faults()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        limit_cpu(limits.cpu_seconds)
        limit_memory(limits.memory_bytes)
        try:
            answer: Row | Exception = function(row)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            answer = error
        lift_cpu_limit()
        lift_memory_limit()
        pipe.send(answer)
