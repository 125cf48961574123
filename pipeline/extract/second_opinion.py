"""A second opinion on a page: trafilatura in a process of its own, which a limit of CPU time ends.

A library can need very long on a strange page, and native code cannot be interrupted from inside. The process has a
limit of CPU time for each page that the operating system enforces, so it holds at any load of the machine. A page that
reaches it ends the process, and the next page starts another one.
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
from typing import IO

MAX_PAGE_CHARS = 2_000_000
"""Maximum length of a page that gets a second opinion [code points]."""
MAX_PAGE_TAGS = 30_000
"""Maximum number of tags of a page that gets one."""
MAX_CPU_SECONDS = 2
"""Maximum CPU time for a page [s]. trafilatura takes 0.04 s on average, and 0.5 s on the largest of 2,367 pages."""
MAX_SECONDS = 60.0
"""Maximum wall-clock time for a page [s], for a process that waits without using CPU time."""

_HEADER = struct.Struct("<q")
_FAILED = -1


class SecondOpinionError(Exception):
    """There is no second opinion; the message is the cause: `too_large`, `stopped`, `failed`, or `limit` of pages."""


class SecondOpinion:
    """Gets the main text of pages from trafilatura; the process starts at the first page."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __call__(self, page: str) -> str:
        """Return the main text of a decoded page, without comments. Raises SecondOpinionError if there is none."""
        if len(page) > MAX_PAGE_CHARS or page.count("<") - page.count("</") > MAX_PAGE_TAGS:
            raise SecondOpinionError("too_large")
        process = self._running()
        try:
            _send(process.stdin, page.encode("utf-8", "replace"))
            answer = _receive(process.stdout, time.monotonic() + MAX_SECONDS)
        except (OSError, EOFError) as error:
            self.close()
            raise SecondOpinionError("stopped") from error
        if answer is None:
            raise SecondOpinionError("failed")
        return answer.decode()

    def _running(self) -> "subprocess.Popen[bytes]":
        # A forked worker has the parent's pipes, which it must not use.
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self._process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owner = os.getpid()
        atexit.register(self.close)
        return self._process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _send(pipe: IO[bytes] | None, data: bytes | None) -> None:
    if pipe is None:
        raise EOFError("the pipe is closed")
    pipe.write(_HEADER.pack(_FAILED if data is None else len(data)) + (data or b""))
    pipe.flush()


def _receive(pipe: IO[bytes] | None, deadline: float | None = None) -> bytes | None:
    """Return the next message, None for a failure. Raises EOFError if the other end is closed or at the deadline."""
    if pipe is None:
        raise EOFError("the pipe is closed")
    size = _HEADER.unpack(_read(pipe, _HEADER.size, deadline))[0]
    return None if size == _FAILED else _read(pipe, size, deadline)


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


def serve() -> None:
    """Answer pages from standard input until it is closed."""
    import trafilatura

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What the library prints must not mix with the answers.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            page = _receive(sys.stdin.buffer)
        except EOFError:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + MAX_CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            text = trafilatura.extract((page or b"").decode(), include_comments=False) or ""
            _send(answers, text.encode("utf-8", "replace"))
        except Exception:
            _send(answers, None)
