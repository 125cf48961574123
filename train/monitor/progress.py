"""The progress line of a training run, with loss, speed, data waiting and time left.

Speed is that of the steps since the last line, without evaluation and checkpoints. The time left follows from the wall
time of the last hundred steps, evaluation and checkpoints included. A terminal also shows a line that is overwritten
about once a second. If the log is JSON, the lines are its records, with their figures as fields.
"""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

from schemas.logs import LOGGER, logs_json
from schemas.text import CLEAR, format_clock, printable, printable_block, raw_stream
from train.monitor.metrics import StepMetrics

RECENT_STEPS = 100
"""Number of steps from which the time left is estimated."""
REDRAW_SECONDS = 1.0
"""Time between redraws of the temporary line on a terminal [s]."""


class ProgressPrinter:
    """The progress lines of a run; `close` after use."""

    def __init__(self, steps: int, log_every: int, stream: TextIO | None = None):
        """`stream`: None = standard output."""
        self._steps, self._log_every = steps, log_every
        self._stream = raw_stream(stream or sys.stdout)
        self._columns = _columns(self._stream)
        self._since: list[StepMetrics] = []
        self._ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        self._started = self._drawn = time.monotonic()
        self._temporary = False

    def show(self, record: StepMetrics, mark: str = "") -> None:
        """Print the line of this step if it is due; call it once for every step.

        A line is due every `log_every` steps and at the last step. It is also due for a step that was skipped, has a
        held-out loss or has a `mark` such as "spike".
        """
        now = time.monotonic()
        self._since.append(record)
        self._ends.append(now)
        mark = ", ".join(filter(None, ("skipped" if record.skipped else "", mark)))
        due = record.step == self._steps or record.step % self._log_every == 0
        if due or mark or record.heldout_loss is not None:
            figures = self._figures(record)
            self.print_line(self._line(record, figures, mark), logging.INFO, **figures)
            self._since = []
        elif self._columns and not logs_json() and now - self._drawn >= REDRAW_SECONDS:
            self._print(
                f"{CLEAR}{printable(self._line(record, self._figures(record), mark))[: self._columns - 1]}", end=""
            )
            self._temporary, self._drawn = True, now

    def print_line(self, text: str, level: int = logging.INFO, **fields: Any) -> None:
        """Print a permanent line of text; all other output of a run goes through this method.

        `level` and `fields`: those of its record, if the log is JSON.
        """
        if logs_json():
            LOGGER.log(level, text, extra=fields)
            return
        self._print(f"{CLEAR if self._temporary else ''}{printable_block(text)}")
        self._temporary, self._drawn = False, time.monotonic()

    def close(self) -> None:
        """Clear the temporary line."""
        if self._temporary:
            self._print(CLEAR, end="")
        self._temporary = False

    def _print(self, text: str, end: str = "\n") -> None:
        """Print text. If its reader has ended, such as `head`, training continues without output."""
        try:
            print(text, end=end, file=self._stream, flush=True)
        except BrokenPipeError:
            # All later output of the process goes to the same place, and so does what Python writes at its end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def _figures(self, record: StepMetrics) -> dict[str, Any]:
        """Return the figures of the line of a step, under the names of their fields in a record."""
        seconds = max(sum(step.step_seconds for step in self._since), 1e-9)
        mfu = sum((step.mfu or 0.0) * step.step_seconds for step in self._since) / seconds
        return {
            "optimizer_step": record.step,
            "optimizer_steps": self._steps,
            "loss": record.loss,
            "heldout_loss": record.heldout_loss,
            "tokens_per_second": sum(step.tokens for step in self._since) / seconds,
            "mfu": None if record.mfu is None else mfu,
            "data_share": sum(step.data_seconds for step in self._since) / seconds,
            "seconds_left": self._seconds_of_step() * (self._steps - record.step),
        }

    def _line(self, record: StepMetrics, figures: Mapping[str, Any], mark: str) -> str:
        loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
        parts = [f"step {record.step:,}/{self._steps:,}", f"loss {loss}"]
        if record.heldout_loss is not None:
            parts.append(f"held-out {record.heldout_loss:.4f}")
        parts.append(f"{figures['tokens_per_second']:,.0f} tokens/s")
        if figures["mfu"] is not None:
            parts.append(f"MFU {100 * figures['mfu']:.1f} %")
        parts.append(f"data {100 * figures['data_share']:.1f} %")
        parts.append(f"{format_clock(figures['seconds_left'])} left")
        return "  ".join(parts) + (f"  <- {mark}" if mark else "")

    def _seconds_of_step(self) -> float:
        # The first step includes setup, so it counts only until the second step ends.
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
