"""A function in a child process: if a record kills the child, the record is named and a new child goes on.

Used only when a task is retried, so that the first attempt pays nothing.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

from pipeline.engine.stage import Row

SECONDS_PER_RECORD = 120.0


class Crashed(Exception):
    """The child died, or did not answer in time, on the record it was given."""


class Isolated:
    """`function` over rows, each call made in a forked child that is replaced when it dies. Raises Crashed."""

    def __init__(self, function: Callable[[Row], Row], seconds: float = SECONDS_PER_RECORD):
        self._function, self._seconds = function, seconds
        self._context = multiprocessing.get_context("fork")
        self._child: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def __call__(self, row: Row) -> Row:
        """The function's result. Raises Crashed if the child dies or is silent for too long."""
        pipe = self._pipe or self._start()
        try:
            pipe.send(row)
            if not pipe.poll(self._seconds):
                raise Crashed(f"no answer in {self._seconds:.0f} s")
            answer = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError, Crashed) as error:
            self.close()
            raise Crashed(str(error) or type(error).__name__) from error
        if isinstance(answer, BaseException):
            raise answer
        return dict(answer)

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        self._child = self._context.Process(target=_serve, args=(theirs, self._function), daemon=True)
        self._child.start()
        theirs.close()
        self._pipe = ours
        return ours

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = None


def _serve(pipe: Connection, function: Callable[[Row], Row]) -> None:
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        try:
            answer: Row | Exception = function(row)
        except Exception as error:
            answer = error
        pipe.send(answer)
