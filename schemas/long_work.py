"""The progress line of long work, with the time left."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from schemas.logs import LOGGER, logs_json
from schemas.text import CLEAR, FIRST_SECONDS, LINE_SECONDS, format_bytes, format_clock, printable, raw_stream


def time_left(done: float, total: float, seconds: float) -> str:
    """Return the estimated time until `total` is done, such as `0:00:50 left`; `seconds` is the elapsed time.

    Before any work is done, and after all work, return the elapsed time instead, such as `in 0:04:10`.
    """
    if 0 < done < total:
        return f"{format_clock(seconds / done * (total - done))} left"
    return f"in {format_clock(seconds)}"


class ProgressLine:
    """A context manager that prints `describe(elapsed seconds)` every few seconds; short work prints nothing.

    With JSON lines, it logs them.
    """

    def __init__(self, describe: Callable[[float], str], stream: TextIO | None = None):
        """`stream`: None = standard error."""
        self._describe, self._stream, self._printed = describe, raw_stream(stream or sys.stderr), False
        self._as_json = logs_json()
        self._started, self._stop = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._printed:
            self._print("\n")

    def _loop(self) -> None:
        is_terminal = self._stream.isatty() and not self._as_json
        pause = FIRST_SECONDS
        while not self._stop.wait(pause):
            self._print("" if is_terminal else "\n")
            pause = 1.0 if is_terminal else LINE_SECONDS

    def _print(self, end: str) -> None:
        seconds = time.monotonic() - self._started
        line, self._printed = printable(self._describe(seconds)), True
        if self._as_json:
            LOGGER.info(line, extra=self._fields(seconds))
            return
        start = CLEAR if self._stream.isatty() else ""
        print(f"{start}{line}", end=end, file=self._stream, flush=True)

    def _fields(self, seconds: float) -> dict[str, Any]:
        """Return the fields of the record of a line."""
        return {"seconds": round(seconds, 3)}


class LongWork(ProgressLine):
    """A progress line for a known amount of work; any thread may call `add`."""

    def __init__(self, label: str, total: int, unit: str, stream: TextIO | None = None):
        super().__init__(lambda seconds: work_line(label, self.done, total, unit, seconds), stream)
        self.done, self._lock = 0, threading.Lock()
        self._total, self._unit = total, unit

    def add(self, number: int) -> None:
        """Count `number` more units of work as done."""
        with self._lock:
            self.done += number

    def _fields(self, seconds: float) -> dict[str, Any]:
        return {"done": self.done, "total": self._total, "unit": self._unit, **super()._fields(seconds)}


def work_line(label: str, done: int, total: int, unit: str, seconds: float) -> str:
    """Return a line such as `verify  1.2 GB of 4.8 GB  25 %  1.1 GB/s  0:00:03 left`."""

    def amount(number: float) -> str:
        return format_bytes(number) if unit == "bytes" else f"{number:,.0f} {unit}"

    share = f"{100 * done / total:.0f} %" if total else "100 %"
    rate = amount(done / seconds if seconds > 0 else 0.0)
    return f"{label}  {amount(done)} of {amount(total)}  {share}  {rate}/s  {time_left(done, total, seconds)}"
