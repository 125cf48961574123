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
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO, Any, NamedTuple

from pipeline.engine.isolation import MAX_SIGNALS, PAUSE_SECONDS

MAX_PAGE_CHARS = 1_000_000
"""Maximum length of a page that gets a second opinion [code points]."""
MAX_PAGE_TAGS = 8_000
"""Maximum number of start tags of a page that gets one. trafilatura takes 0.1 to 0.14 ms for each, in the worst of
seven kinds of synthetic pages, so at most 1.1 s at this limit; 0.12 s for the text of MAX_PAGE_CHARS."""
MAX_CPU_SECONDS = 3
"""CPU time that a page may take at least before its process is ended [s]; the operating system counts whole seconds."""
MAX_SECONDS = 60.0
"""Maximum wall-clock time for a page [s], for a process that waits without using CPU time."""

EXIT_SECONDS = 1.0
"""Maximum time in which a process ends after it has closed its pipes [s]."""

_HEADER = struct.Struct("<?qd")
"""Whether a message is the name of an error, its size [bytes], and CPU time of the process since its start [s]."""
_NAMED_ERRORS = frozenset(("builtins", "lxml.etree", "resiliparse.parse.html.exception"))
"""Modules whose types of errors are counted by their names."""


class LibrarySettings(NamedTuple):
    """The settings of a recipe that trafilatura takes."""

    favor_precision: bool = False
    """True to leave out text that is less certain."""
    markdown: bool = False
    links: bool = False
    images: bool = False


DEFAULTS = LibrarySettings()


def library_text(page: str, url: str | None, settings: LibrarySettings) -> str:
    """Return the main text of a decoded page by trafilatura, without comments of readers; empty if it finds none.

    The URL of the page resolves those of links and images.
    """
    import trafilatura

    options: dict[str, Any] = {"favor_precision": settings.favor_precision, "include_comments": False}
    source: Any = page
    if settings.markdown:
        options["output_format"] = "markdown"
    if settings.links or settings.images:
        options |= {"include_links": settings.links, "include_images": settings.images}
        # trafilatura 2.3.1 resolves relative URLs against the host alone.
        tree = trafilatura.load_html(page) if url else None
        if tree is not None:
            tree.make_links_absolute(url, resolve_base_href=False, handle_failures="ignore")
            source = tree
    return trafilatura.extract(source, **options) or ""


def error_name(error: BaseException) -> str:
    """Return the name of the nearest type of an error that is counted by its name, so that there are few names."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ in _NAMED_ERRORS)


class SecondOpinionError(Exception):
    """There is no second opinion; `cause` is `too_large`, `stopped`, `failed`, or `limit`, the share of the pages."""

    def __init__(self, cause: str, cpu_seconds: float = 0.0, error: str | None = None):
        super().__init__(cause)
        self.cause = cause
        self.cpu_seconds = cpu_seconds
        """CPU time that was spent in vain [s]."""
        self.error = error
        """Name of the type of the library's error, as `error_name` returns it, if the cause is `failed`."""


class Opinion(NamedTuple):
    """The answer on a page."""

    text: str
    """The main text without comments; empty if trafilatura finds none."""
    cpu_seconds: float
    """CPU time that it took [s]; with the start of the process, if this page started it."""


class SecondOpinion:
    """Gets the main text of pages from trafilatura; the process starts at the first page."""

    def __init__(self, settings: LibrarySettings = DEFAULTS) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._counted = 0.0

    def __call__(self, page: str, url: str | None = None) -> Opinion:
        """Return the main text of a decoded page with this URL. Raises SecondOpinionError if there is no answer."""
        if len(page) > MAX_PAGE_CHARS or page.count("<") - page.count("</") > MAX_PAGE_TAGS:
            raise SecondOpinionError("too_large")
        message = f"{' '.join((url or '').split())}\n{page}".encode("utf-8", "replace")
        is_error, answer, spent = self._answer(message)
        if is_error:
            raise SecondOpinionError("failed", spent, answer)
        return Opinion(answer, spent)

    def _answer(self, message: bytes) -> tuple[bool, str, float]:
        """Return whether the answer to a message is the name of an error, the answer, and its CPU time [s].

        A process that something else ends, such as the system when memory is short, is no fault of the page.
        """
        vain = 0.0
        for number in range(MAX_SIGNALS):
            process = self._running()
            try:
                _send(process.stdin, message)
                is_error, answer, cpu = _receive(process.stdout, time.monotonic() + MAX_SECONDS)
            except (OSError, EOFError) as error:
                code, spent = self._end(EXIT_SECONDS)
                vain += spent
                if code not in (-signal.SIGKILL, -signal.SIGTERM) or number == MAX_SIGNALS - 1:
                    raise SecondOpinionError("stopped", vain) from error
                time.sleep(PAUSE_SECONDS * 2**number)
            except BaseException:  # Such as a timeout of the caller: the next page would get the answer on this one.
                self.close()
                raise
            else:
                break
        spent, self._counted = vain + cpu - self._counted, cpu
        return is_error, answer, spent

    def _running(self) -> "subprocess.Popen[bytes]":
        # A forked worker has the parent's pipes, which it must not use.
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        call = f"from {__name__} import LibrarySettings, serve; serve({self._settings!r})"
        program = f"import sys; sys.path[:] = {sys.path!r}; {call}"
        self._process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owner, self._counted = os.getpid(), 0.0
        atexit.register(self.close)
        return self._process

    def close(self) -> float:
        """End the process, and return its CPU time that no answer has counted [s]."""
        return self._end(0.0)[1]

    def _end(self, patience: float) -> tuple[int | None, float]:
        """End the process, after a time in which it may end by itself [s].

        Return its exit code, None if it did not, and its CPU time that no answer has counted [s].
        """
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return None, 0.0
        before, code = _cpu_seconds(resource.RUSAGE_CHILDREN), None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(patience)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return code, max(0.0, _cpu_seconds(resource.RUSAGE_CHILDREN) - before - self._counted)


def _cpu_seconds(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def _send(pipe: IO[bytes] | None, data: bytes, is_error: bool = False) -> None:
    if pipe is None:
        raise EOFError("the pipe is closed")
    pipe.write(_HEADER.pack(is_error, len(data), _cpu_seconds(resource.RUSAGE_SELF)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes] | None, deadline: float | None = None) -> tuple[bool, str, float]:
    """Return whether the next message is the name of an error, the message, and the CPU time of the other process.

    Raises EOFError if the other end is closed or at the deadline.
    """
    if pipe is None:
        raise EOFError("the pipe is closed")
    is_error, size, cpu = _HEADER.unpack(_read(pipe, _HEADER.size, deadline))
    return is_error, _read(pipe, size, deadline).decode(), cpu


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


def serve(settings: LibrarySettings = DEFAULTS) -> None:
    """Answer pages from standard input until it is closed. The first line of a message is the URL of the page."""
    import trafilatura  # noqa: F401  the first page pays for it, before its limit begins

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What the library prints must not mix with the answers.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            _, message, _ = _receive(sys.stdin.buffer)
        except EOFError:
            return
        limit = int(_cpu_seconds(resource.RUSAGE_SELF)) + 1 + MAX_CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        url, _, page = message.partition("\n")
        try:
            _send(answers, library_text(page, url, settings).encode("utf-8", "replace"))
        except Exception as error:
            _send(answers, error_name(error).encode(), is_error=True)
