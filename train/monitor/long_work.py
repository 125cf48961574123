"""The line of long work on standard error: how much is done of how much, rate, time left.

Work that is over soon says nothing.
"""

import sys
import threading
import time
from typing import TextIO

FIRST_SECONDS = 2.0
"""Time before the first line."""
LINE_SECONDS = 10.0
"""Time between lines where they are kept; a terminal's is written over once a second."""
CLEAR = "\r\x1b[K"
"""Back to the beginning of the line, and nothing on it."""
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class LongWork:
    """The line of one piece of work, as a context; `add` from any thread."""

    def __init__(self, label: str, total: int, unit: str, stream: TextIO | None = None):
        """`total`: what there is to do, in `unit`; `stream`: None = standard error."""
        self._label, self._total, self._unit = label, total, unit
        self._stream = stream or sys.stderr
        self._done, self._lock, self._stop = 0, threading.Lock(), threading.Event()
        self._started, self._printed = time.monotonic(), False
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "LongWork":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._printed:
            self._print("\n")

    @property
    def done(self) -> int:
        """What is done."""
        return self._done

    def add(self, number: int) -> None:
        """So much more is done."""
        with self._lock:
            self._done += number

    def _loop(self) -> None:
        terminal = self._stream.isatty()
        pause = FIRST_SECONDS
        while not self._stop.wait(pause):
            self._print("" if terminal else "\n")
            pause = 1.0 if terminal else LINE_SECONDS

    def _print(self, end: str) -> None:
        line = work_line(self._label, self._done, self._total, self._unit, time.monotonic() - self._started)
        start = CLEAR if self._stream.isatty() else ""
        print(f"{start}{line}", end=end, file=self._stream, flush=True)
        self._printed = True


def work_line(label: str, done: int, total: int, unit: str, seconds: float) -> str:
    """One line such as `verify  1.2 GB of 4.8 GB  25 %  1.1 GB/s  0:00:03 left`."""
    rate = done / seconds if seconds > 0 else 0.0
    share = f"{100 * done / total:.0f} %" if total else "100 %"
    left = f"{clock((total - done) / rate)} left" if 0 < done < total else f"in {clock(seconds)}"
    return f"{label}  {scaled(done, unit)} of {scaled(total, unit)}  {share}  {scaled(rate, unit)}/s  {left}"


def clock(seconds: float) -> str:
    """A duration as hours, minutes and seconds, such as 0:42:10."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def scaled(number: float, unit: str) -> str:
    """A number with its unit, such as `1.2 GB` or `950 rows`."""
    for size, prefix in UNITS:
        if unit == "B" and number >= size:
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number:,.0f} {unit}"
