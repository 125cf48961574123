"""The progress line of a long step: parts, rows, rate and time left."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO


def progress_line(label: str, done: int, total: int, rows: int, seconds: float) -> str:
    """One line such as `documents  3/8 parts  1,203 rows  240 rows/s  0:12 left`."""
    rate = rows / seconds if seconds > 0 else 0.0
    left = f"{_clock(seconds / done * (total - done))} left" if 0 < done < total else f"{_clock(seconds)}"
    return f"{label:<10} {done}/{total} parts  {rows:,} rows  {rate:,.0f} rows/s  {left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class Progress:
    """Prints `read()` = (parts done, rows done) every few seconds while it is open, and once at the end."""

    def __init__(self, label: str, total: int, read: Callable[[], tuple[int, int]], stream: TextIO | None = None):
        self._label, self._total, self._read = label, total, read
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._print(end="\n")

    def _loop(self) -> None:
        is_terminal = self._stream.isatty()
        while not self._stop.wait(1.0 if is_terminal else 10.0):
            self._print(end="\r" if is_terminal else "\n")

    def _print(self, end: str) -> None:
        done, rows = self._read()
        line = progress_line(self._label, done, self._total, rows, time.monotonic() - self._started)
        print(f"{line:<78}", end=end, file=self._stream, flush=True)
