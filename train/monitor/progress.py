"""The progress line of a training run, with loss, speed, data waiting and time left, and that of other long work.

Speed is that of the steps since the last line, without evaluation and checkpoints. The time left follows from the wall
time of the last hundred steps, evaluation and checkpoints included. A terminal also shows a line that is overwritten
about once a second.
"""

import os
import sys
import threading
import time
from collections import deque
from typing import TextIO

from train.monitor.metrics import StepMetrics

# Long work prints a line on standard error with the completed share, rate and time left. Short work prints nothing.

FIRST_SECONDS = 2.0
"""Time before the first line [s]."""
LINE_SECONDS = 10.0
"""Time between lines in a log file [s]; on a terminal the line is overwritten once a second."""
CLEAR = "\r\x1b[K"
"""Control sequence that clears the current line."""
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class LongWork:
    """The progress line of a long operation, as a context manager; call `add` from any thread."""

    def __init__(self, label: str, total: int, unit: str, stream: TextIO | None = None):
        """`total`: amount of work in `unit`; `stream`: None = standard error."""
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
        """Return the completed amount of work."""
        return self._done

    def add(self, number: int) -> None:
        """Add to the completed amount of work."""
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
    """Return a line such as `verify  1.2 GB of 4.8 GB  25 %  1.1 GB/s  0:00:03 left`."""
    rate = done / seconds if seconds > 0 else 0.0
    share = f"{100 * done / total:.0f} %" if total else "100 %"
    left = f"{clock((total - done) / rate)} left" if 0 < done < total else f"in {clock(seconds)}"
    return f"{label}  {scaled(done, unit)} of {scaled(total, unit)}  {share}  {scaled(rate, unit)}/s  {left}"


def clock(seconds: float) -> str:
    """Return a duration [s] as hours, minutes and seconds, such as 0:42:10."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def scaled(number: float, unit: str) -> str:
    """Return a number with its unit, such as `1.2 GB` or `950 rows`."""
    for size, prefix in UNITS:
        if unit == "B" and number >= size:
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number:,.0f} {unit}"


RECENT_STEPS = 100
"""Number of steps from which the time left is estimated."""
REDRAW_SECONDS = 1.0
"""Time between redraws of the temporary line on a terminal [s]."""


class ProgressPrinter:
    """The progress lines of a run; `close` after use."""

    def __init__(self, steps: int, log_every: int, stream: TextIO | None = None):
        """`stream`: None = standard output."""
        self._steps, self._log_every = steps, log_every
        self._stream = stream or sys.stdout
        self._columns = _columns(self._stream)
        self._since: list[StepMetrics] = []
        self._ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        self._started = self._drawn = time.monotonic()
        self._temporary = False

    def show(self, record: StepMetrics, mark: str = "") -> None:
        """Print the line of this step if it is due; call it once for every step.

        A line is due every `log_every` steps, at the last step, and with a held-out loss, a skipped step or a `mark`
        ("spike").
        """
        now = time.monotonic()
        self._since.append(record)
        self._ends.append(now)
        mark = ", ".join(filter(None, ("skipped" if record.skipped else "", mark)))
        due = record.step == self._steps or record.step % self._log_every == 0
        if due or mark or record.heldout_loss is not None:
            self.print_line(self._line(record, mark))
            self._since = []
        elif self._columns and now - self._drawn >= REDRAW_SECONDS:
            print(f"{CLEAR}{self._line(record, mark)[: self._columns - 1]}", end="", file=self._stream, flush=True)
            self._temporary, self._drawn = True, now

    def print_line(self, text: str) -> None:
        """Print a permanent line of text; all other output of a run goes through this method."""
        print(f"{CLEAR if self._temporary else ''}{text}", file=self._stream, flush=True)
        self._temporary, self._drawn = False, time.monotonic()

    def close(self) -> None:
        """Clear the temporary line."""
        if self._temporary:
            print(CLEAR, end="", file=self._stream, flush=True)
        self._temporary = False

    def _line(self, record: StepMetrics, mark: str) -> str:
        seconds = max(sum(step.step_seconds for step in self._since), 1e-9)
        tokens = sum(step.tokens for step in self._since)
        waited = sum(step.data_seconds for step in self._since)
        loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
        parts = [f"step {record.step:,}/{self._steps:,}", f"loss {loss}"]
        if record.heldout_loss is not None:
            parts.append(f"held-out {record.heldout_loss:.4f}")
        parts.append(f"{tokens / seconds:,.0f} tokens/s")
        if record.mfu is not None:
            mfu = sum((step.mfu or 0.0) * step.step_seconds for step in self._since) / seconds
            parts.append(f"MFU {100 * mfu:.1f} %")
        parts.append(f"data {100 * waited / seconds:.1f} %")
        parts.append(f"{clock(self._seconds_of_step() * (self._steps - record.step))} left")
        return "  ".join(parts) + (f"  <- {mark}" if mark else "")

    def _seconds_of_step(self) -> float:
        """Return the wall time per step [s]; the first step, which includes setup, counts only until another ends."""
        if len(self._ends) == 1:
            return self._ends[0] - self._started
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)


def _columns(stream: TextIO) -> int:
    """Return the width of the terminal of a stream; 0 if it is not a terminal."""
    if not stream.isatty():
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
