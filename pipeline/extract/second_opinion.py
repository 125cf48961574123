"""A second opinion on a page: trafilatura in a process of its own, which a limit of CPU time ends.

A library can need very long on a strange page, and native code cannot be interrupted from inside. The process has a
limit of CPU time for each page that the operating system enforces, so it holds at any load of the machine. A page that
reaches it ends the process, and the next page starts another one. Pages have a limit of size that they reach long
before, so which pages get an opinion does not depend on the speed of the machine.
"""

import atexit
import os
import resource
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO, NamedTuple

MAX_PAGE_CHARS = 1_000_000
"""Maximum length of a page that gets a second opinion [code points]."""
MAX_PAGE_TAGS = 8_000
"""Maximum number of start tags of a page that gets one. trafilatura takes 0.1 to 0.14 ms for each, in the worst of
seven kinds of synthetic pages, so at most 1.1 s at this limit; 0.12 s for the text of MAX_PAGE_CHARS."""
MAX_CPU_SECONDS = 3
"""CPU time that a page may take at least before its process is ended [s]; the operating system counts whole seconds."""
MAX_SECONDS = 60.0
"""Maximum wall-clock time for a page [s], for a process that waits without using CPU time."""

_HEADER = struct.Struct("<qd")
"""Size of a message [bytes], and CPU time of the process since its start [s]."""
_FAILED = -1


class SecondOpinionError(Exception):
    """There is no second opinion; `cause` is `too_large`, `stopped`, `failed`, or `limit`, the share of the pages."""

    def __init__(self, cause: str, cpu_seconds: float = 0.0):
        super().__init__(cause)
        self.cause = cause
        self.cpu_seconds = cpu_seconds
        """CPU time that was spent in vain [s]."""


class Opinion(NamedTuple):
    """The answer on a page."""

    text: str
    """The main text without comments; empty if trafilatura finds none."""
    cpu_seconds: float
    """CPU time that it took [s]; with the start of the process, if this page started it."""


class SecondOpinion:
    """Gets the main text of pages from trafilatura; the process starts at the first page."""

    def __init__(self, favor_precision: bool = False) -> None:
        self._favor_precision = favor_precision
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._counted = 0.0

    def __call__(self, page: str) -> Opinion:
        """Return the main text of a decoded page. Raises SecondOpinionError if there is no answer."""
        if len(page) > MAX_PAGE_CHARS or page.count("<") - page.count("</") > MAX_PAGE_TAGS:
            raise SecondOpinionError("too_large")
        process = self._running()
        try:
            _send(process.stdin, page.encode("utf-8", "replace"))
            answer, cpu = _receive(process.stdout, time.monotonic() + MAX_SECONDS)
        except (OSError, EOFError) as error:
            raise SecondOpinionError("stopped", self.close()) from error
        spent, self._counted = cpu - self._counted, cpu
        if answer is None:
            raise SecondOpinionError("failed", spent)
        return Opinion(answer.decode(), spent)

    def _running(self) -> "subprocess.Popen[bytes]":
        # A forked worker has the parent's pipes, which it must not use.
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        call = f"serve({self._favor_precision})"
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; {call}"
        self._process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owner, self._counted = os.getpid(), 0.0
        atexit.register(self.close)
        return self._process

    def close(self) -> float:
        """End the process, and return its CPU time that no answer has counted [s]."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return 0.0
        before = _cpu_seconds(resource.RUSAGE_CHILDREN)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return max(0.0, _cpu_seconds(resource.RUSAGE_CHILDREN) - before - self._counted)


def _cpu_seconds(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def _send(pipe: IO[bytes] | None, data: bytes | None) -> None:
    if pipe is None:
        raise EOFError("the pipe is closed")
    cpu = _cpu_seconds(resource.RUSAGE_SELF)
    pipe.write(_HEADER.pack(_FAILED if data is None else len(data), cpu) + (data or b""))
    pipe.flush()


def _receive(pipe: IO[bytes] | None, deadline: float | None = None) -> tuple[bytes | None, float]:
    """Return the next message, None for a failure, and the CPU time of the other process.

    Raises EOFError if the other end is closed or at the deadline.
    """
    if pipe is None:
        raise EOFError("the pipe is closed")
    size, cpu = _HEADER.unpack(_read(pipe, _HEADER.size, deadline))
    return None if size == _FAILED else _read(pipe, size, deadline), cpu


def _read(pipe: IO[bytes], size: int, deadline: float | None) -> bytes:
    data = b""
    while len(data) < size:
        if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise EOFError("no answer in time")
        part = os.read(pipe.fileno(), size - len(data))
        if not part:
            raise EOFError("the process has ended")
        data += part
    return data


def serve(favor_precision: bool = False) -> None:
    """Answer pages from standard input until it is closed."""
    import trafilatura

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What the library prints must not mix with the answers.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            page, _ = _receive(sys.stdin.buffer)
        except EOFError:
            return
        limit = int(_cpu_seconds(resource.RUSAGE_SELF)) + 1 + MAX_CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            html = (page or b"").decode()
            text = trafilatura.extract(html, favor_precision=favor_precision, include_comments=False) or ""
            _send(answers, text.encode("utf-8", "replace"))
        except Exception:
            _send(answers, None)
