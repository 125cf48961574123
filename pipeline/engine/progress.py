"""The progress of a run: a live line, one line for each finished step, and the file `progress.json` in the run folder.

The figures of a step that is under way are for display: they come from datagrams, accumulators and Spark's status. The
figures of a finished step are those of its manifest. A terminal gets a line with a bar that is redrawn; the log gets a
record every ten seconds, with the figures as fields. Both go to standard error.
"""

import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Protocol, Self, TextIO

import pyarrow as pa

from pipeline.engine.live_counts import CountsAddress, CountsListener, WorkCounts
from schemas.logs import LOGGER, log_fields, logs_json, uri_of
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.tables import DROPPED_BEFORE
from schemas.text import (
    FIRST_SECONDS,
    LINE_SECONDS,
    format_bytes,
    format_clock,
    format_duration,
    printable,
    printable_block,
    raw_stream,
)

PROGRESS_NAME = "progress.json"
"""Name of the status file in a run folder. It is no table: it has no manifest, and no command but a viewer reads it."""
FORMAT = 1
"""Version of the format of the status file."""
FILE_SECONDS = {True: 2.0, False: 10.0}
"""Least time between two writes of the status file [s], by whether the run folder is on a local disk."""
CLOSE_SECONDS = 20.0
"""Longest time that the end of a run waits for the status file to be written [s]."""
REDRAW_SECONDS = 1.0
"""Time between two updates of the live line on a terminal and of the figures in the status file [s]."""
MIN_ROWS = 20
"""Number of rows, in place of a complete part, after which the time left is estimated."""
MIN_BASIS = 0.02
MIN_SECONDS, ENOUGH_SECONDS = 5.0, 60.0
"""The time left is estimated after MIN_SECONDS [s], if the completed share is MIN_BASIS or more or if ENOUGH_SECONDS
have passed. Before that, the start of the workers dominates: a step of 3 s once had "32 minutes left" after its first
row."""
MAX_FRACTION = 0.99
"""Largest completed share that is shown while parts are incomplete."""
LOGGED_FIGURES = ("rows", "bytes", "total_bytes", "parts", "total_parts", "seconds", "rate", "seconds_left")
"""Figures of a running step that are fields of its records in the log."""
SHOWN_REASONS = 3
"""Number of reasons that the line of a finished step names, besides those of the recipe's own rules and stages."""
MAX_MESSAGE = 2000
"""Maximum length of the message in the status file [characters]."""
REASON = re.compile(r"\b[a-z_0-9]+/[A-Za-z_0-9]+(?= [\d,]+)")

StepState = Literal["complete", "running", "done", "waiting", "failed"]
RunState = Literal["running", "finished", "failed", "interrupted"]


@dataclass
class StepStatus:
    """One step in the status file."""

    name: str
    state: StepState = "waiting"
    """`complete`: its tables existed before; `done`: this command built them."""
    what: str = ""
    """What a running step does now, such as `write shards`; empty if its name says it."""
    rows: int = 0
    """Rows processed so far by the current piece of work; of a finished step, the rows that entered it."""
    bytes: int = 0
    """Bytes of the input files read so far; 0 if the step reads tables."""
    total_bytes: int | None = None
    """Size of all input files [bytes]; None if the step reads tables."""
    parts: int = 0
    """Complete parts of the current piece of work; of work without parts, the complete tasks of its Spark stages."""
    total_parts: int | None = None
    """Number of all these parts or tasks; None if it is not known."""
    seconds: float = 0.0
    """Time since the step started, or its duration; of a complete step, the duration in its manifest [s]."""
    rate: float = 0.0
    """Average speed of the current piece of work [rows/s]; of a finished step, that of the whole step."""
    seconds_left: float | None = None
    """Estimated time until the current piece of work is complete [s]; None if it cannot be estimated."""
    kept: int | None = None
    """Rows that a finished step kept; None before its end."""
    dropped: dict[str, int] | None = None
    """Rows that a finished step dropped, by `stage/rule`, without zeros, the largest first; None before its end."""


@dataclass
class RunStatus:
    """The content of the status file."""

    format: int
    command: str
    pid: int
    host: str
    started: str
    """ISO 8601, UTC."""
    updated: str
    """Time at which the content was made, ISO 8601, UTC. A file that is not updated is that of a killed process."""
    state: RunState = "running"
    message: str | None = None
    """The error that ended the run; None if there is none."""
    steps: list[StepStatus] = field(default_factory=list)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class StatusFile:
    """Writes the status file in a thread of its own, so that slow storage delays no other work.

    A problem of the storage is reported once and fails nothing.
    """

    def __init__(self, folder: Store, report: Callable[[str], None]):
        """`report` is called with the text of the first problem."""
        self._folder, self._report = folder, report
        self._content: bytes | None = None
        self._has_failed = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="status file", daemon=True)
        self._thread.start()

    def write(self, status: RunStatus) -> None:
        """Write the status soon; of several within the least time between two writes, only the last is written."""
        content = json.dumps(asdict(status), ensure_ascii=False, indent=1).encode()
        with self._changed:
            self._content = content
            self._changed.notify()

    def close(self) -> None:
        """Write the last status at once, and end the thread. Wait at most CLOSE_SECONDS."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    def _loop(self) -> None:
        pause = FILE_SECONDS[self._folder.is_local]
        next_write = 0.0
        while True:
            with self._changed:
                while not self._closed and (self._content is None or time.monotonic() < next_write):
                    self._changed.wait(None if self._content is None else max(0.0, next_write - time.monotonic()))
                content, self._content = self._content, None
                closed = self._closed
            if content is not None:
                self._store(content)
                next_write = time.monotonic() + pause
            if closed:
                return

    def _store(self, content: bytes) -> None:
        try:
            self._folder.write_atomic(PROGRESS_NAME, content)
        except (OSError, pa.ArrowException) as error:
            if not self._has_failed:
                self._report(f"{PROGRESS_NAME} cannot be written, so no live page shows this run: {error}")
            self._has_failed = True


class LiveView(Protocol):
    """The display of a run: a line that changes, and lines that remain."""

    def show(self, text: str, fraction: float | None, figures: Mapping[str, Any]) -> None:
        """Show what is under way; `fraction`: None = not known; `figures`: fields of a record about it."""

    def say(self, text: str, level: int, fields: Mapping[str, Any]) -> None:
        """Print lines that remain. `fields`: those of a record about them."""

    def hide(self) -> None:
        """End the line that changes."""

    def close(self) -> None:
        """End the display."""


class LogView:
    """Records of the log, for a log file or a pipe."""

    def __init__(self) -> None:
        self._due = FIRST_SECONDS

    def show(self, text: str, fraction: float | None, figures: Mapping[str, Any]) -> None:
        """Log the line if ten seconds have passed since the last one."""
        if figures["seconds"] >= self._due:
            self.say(text, logging.INFO, {**figures, "share": fraction})
            self._due = figures["seconds"] + LINE_SECONDS

    def say(self, text: str, level: int, fields: Mapping[str, Any]) -> None:
        """Log lines as one record."""
        LOGGER.log(level, text, extra=fields)

    def hide(self) -> None:
        """Start anew, with the next line after FIRST_SECONDS."""
        self._due = FIRST_SECONDS

    def close(self) -> None:
        """Do nothing: a plain line needs no end."""


class TerminalView:
    """A bar and a line at the bottom of a terminal, in colours unless NO_COLOR is set."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._console = Console(file=stream)
        columns = SpinnerColumn(), BarColumn(24), TextColumn("{task.description}", markup=False)
        # Text on standard output, such as a table that is piped to a file, is not for this display.
        self._live = Progress(
            *columns, console=self._console, transient=True, redirect_stdout=False, refresh_per_second=4, expand=False
        )
        self._task = self._live.add_task("", total=None, visible=False)
        self._live.start()

    def show(self, text: str, fraction: float | None, figures: Mapping[str, Any]) -> None:
        """Redraw the bar and the line."""
        total = None if fraction is None else 1.0
        self._live.update(self._task, description=printable(text), total=total, completed=fraction or 0.0, visible=True)

    def say(self, text: str, level: int, fields: Mapping[str, Any]) -> None:
        """Print lines above the bar, with the first word and the reasons of drops in colour."""
        from rich.text import Text

        shown = Text(printable_block(text))
        shown.highlight_regex(r"^\S+", "bold")
        shown.highlight_regex(REASON, "yellow")
        self._console.print(shown, soft_wrap=True)

    def hide(self) -> None:
        """Remove the bar until the next call of `show`."""
        self._live.update(self._task, visible=False)

    def close(self) -> None:
        """Remove the bar and release the terminal."""
        self._live.stop()


def open_view(stream: TextIO | None = None) -> LiveView:
    """Return the display for a stream (None: standard error): TerminalView for text on a terminal, else LogView."""
    stream = raw_stream(stream or sys.stderr)
    return TerminalView(stream) if stream.isatty() and not logs_json() else LogView()


@dataclass(frozen=True)
class WorkTotal:
    """The size of a piece of work; None where it is not known beforehand."""

    parts: int | None = None
    rows: int | None = None
    bytes: int | None = None


def _nothing() -> WorkCounts:
    return WorkCounts()


def _no_tasks() -> tuple[int, int]:
    return 0, 0


def _ignore(description: str) -> None:
    pass


@dataclass(frozen=True)
class CountSources:
    """Where the figures of work under way come from."""

    listener: CountsListener | None = None
    """None: no port could be opened, so figures advance when a part is complete."""
    tasks: Callable[[], tuple[int, int]] = _no_tasks
    """Returns the numbers of complete and of all tasks of Spark's active stages."""
    describe: Callable[[str], None] = _ignore
    """Gives the jobs that start from now on a description, such as `clusters: compare candidate pairs, round 1`."""


@dataclass
class _Work:
    """The piece of work that is under way."""

    total: WorkTotal
    poll: Callable[[], WorkCounts]
    started: float


_CURRENT: ContextVar["Progress | None"] = ContextVar("progress", default=None)


def current_progress() -> "Progress | None":
    """Return the progress of the run that this process executes now; None if it executes none."""
    return _CURRENT.get()


def doing(what: str) -> None:
    """Show what the current step does from now on, such as `compare candidate pairs`; outside of a run, do nothing."""
    progress = _CURRENT.get()
    if progress is not None:
        progress.begin_work(what)


class Progress:
    """The progress of a run, shown while its `with` block runs."""

    def __init__(self, command: str, steps: Sequence[str], sources: CountSources, folder: Store | None = None):
        """`folder`: the run folder, which gets the status file; None = no file is written."""
        self._view = open_view()
        self._fields = {} if folder is None else {"run": uri_of(folder.uri)}
        self._sources = sources
        self._steps = {name: StepStatus(name) for name in steps}
        self._status = RunStatus(
            FORMAT, command, os.getpid(), socket.gethostname(), _now(), _now(), steps=[*self._steps.values()]
        )
        self._file = StatusFile(folder, partial(self.say, level=logging.WARNING)) if folder is not None else None
        self._step: StepStatus | None = None
        self._step_started = 0.0
        self._work = _Work(WorkTotal(), _nothing, 0.0)
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)
        self._token: Token[Progress | None] | None = None

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._view.close()
            self._status.state = "finished"
            if error is not None:
                is_interrupt = isinstance(error, KeyboardInterrupt)
                self._status.state = "interrupted" if is_interrupt else "failed"
                self._status.message = None if is_interrupt else str(error)[:MAX_MESSAGE] or type(error).__name__
                if self._step is not None:
                    self._step.state = "failed"
            self._write()
        if self._file is not None:
            self._file.close()

    def say(self, text: str, level: int = logging.INFO, **fields: Any) -> None:
        """Log lines that remain, above the live line. `fields`: further ones of their record, such as `step`."""
        with self._lock:
            self._view.say(text, level, {**self._fields, **fields})

    @contextmanager
    def step(self, name: str) -> Iterator[StepStatus]:
        """Show the step `name` as running in the `with` block. `finish` then sets its final figures."""
        with self._lock:
            self._step = status = self._steps[name]
            status.state, self._step_started = "running", time.monotonic()
        self.begin_work("")
        with log_fields(**self._fields, step=name):
            yield status
        with self._lock:
            self._update()
            self._step = None
            self._view.hide()

    def begin_work(
        self, what: str, total: WorkTotal | None = None, poll: Callable[[], WorkCounts] = _nothing
    ) -> CountsAddress | None:
        """Show a new piece of work of the current step, and return the address for the counts of its parts.

        `poll` returns the counts of parts whose task has ended; it is called about once a second.
        """
        with self._lock:
            self._work = _Work(total or WorkTotal(), poll, time.monotonic())
            if self._step is not None:
                self._step.what = "" if what == self._step.name else what
                self._sources.describe(": ".join(filter(None, (self._step.name, self._step.what))))
            listener = self._sources.listener
            return listener.begin_work() if listener is not None else None

    def address(self) -> CountsAddress | None:
        """Return the address for the counts of parts that run during whatever piece of work needs them."""
        listener = self._sources.listener
        return listener.address() if listener is not None else None

    def finish(self, name: str, state: StepState, counts: Counts, seconds: float) -> None:
        """Set the figures of a finished step, as its manifest has them."""
        with self._lock:
            status = self._steps[name]
            status.state, status.what, status.seconds_left = state, "", None
            counts = without_earlier_drops(counts)
            status.rows, status.kept = counts.rows_in, counts.rows_kept
            status.dropped = largest(counts.dropped)
            status.seconds = round(seconds, 3)
            status.rate = round(counts.rows_in / seconds, 3) if seconds > 0 else 0.0
            if status.total_bytes is not None:
                status.bytes = status.total_bytes
            status.parts = status.total_parts or status.parts
            self._write()

    def last_line(self) -> str:
        """Return the line with the current figures."""
        with self._lock:
            return "" if self._step is None else self._line(self._step)

    def _loop(self) -> None:
        while not self._stop.wait(REDRAW_SECONDS):
            with self._lock:
                if self._step is not None:
                    self._update()
                    self._view.show(self._line(self._step), self._fraction(), self._logged(self._step))
                self._write()

    def _update(self) -> None:
        """Set the figures of the running step."""
        step, work, now = self._step, self._work, time.monotonic()
        if step is None:
            return
        listener = self._sources.listener
        # Datagrams may be lost and accumulators come late, so both are too low at most.
        sent, ended = listener.counts() if listener is not None else WorkCounts(), work.poll()
        step.rows, step.bytes = max(sent.rows, ended.rows), max(sent.bytes, ended.bytes)
        done, total = max(sent.done, ended.done), work.total.parts
        if total is None:
            done, total = self._sources.tasks()
        step.total_bytes, step.parts, step.total_parts = work.total.bytes, min(done, total), total
        step.seconds, seconds = round(now - self._step_started, 3), now - work.started
        step.rate = round(step.rows / seconds, 3) if seconds > 0 else 0.0
        fraction = self._fraction() if work.total != WorkTotal() else None
        has_basis = step.rows >= MIN_ROWS or step.parts > 0  # files are read ahead of their rows
        step.seconds_left = seconds_left(fraction, seconds) if has_basis else None

    def _fraction(self) -> float | None:
        """Return the completed share of the current piece of work, 0..1; None if it is not known."""
        step, total = self._step, self._work.total
        if step is None:
            return None
        for done, whole in ((step.bytes, total.bytes), (step.rows, total.rows), (step.parts, step.total_parts)):
            if whole:
                # Files are read ahead, so all bytes may have been read before the last part is complete.
                is_complete = step.total_parts is None or step.parts >= step.total_parts
                return min(1.0 if is_complete else MAX_FRACTION, done / whole)
        return None

    def _logged(self, step: StepStatus) -> dict[str, Any]:
        """Return the fields of a record about a running step."""
        return {
            **self._fields,
            "step": step.name,
            **{name: getattr(step, name) for name in LOGGED_FIGURES},
            "what": step.what or None,
        }

    def _line(self, step: StepStatus) -> str:
        return progress_line(step, "tasks" if self._work.total.parts is None else "parts")

    def _write(self) -> None:
        if self._file is not None:
            self._status.updated = _now()
            self._file.write(self._status)


def seconds_left(fraction: float | None, seconds: float) -> float | None:
    """Return the estimated rest of a piece of work of which `fraction` (0..1) took `seconds` [s].

    None if too little of it is complete for an estimate, or all of it.
    """
    if not fraction or fraction >= 1 or seconds < MIN_SECONDS or (fraction < MIN_BASIS and seconds < ENOUGH_SECONDS):
        return None
    return round(seconds / fraction * (1 - fraction), 1)


def progress_line(step: StepStatus, unit: str = "parts") -> str:
    """Return a line such as `documents  3.1 MB of 8 MB  39 %  3/8 parts  1,203 rows  240 rows/s  0:00:12 left`.

    Figures that are not known are left out. Without an estimate, the line ends with the elapsed time.
    """
    items = [f"{step.name:<10}", *([step.what] if step.what else [])]
    if step.total_bytes:
        share = f"{100 * min(1.0, step.bytes / step.total_bytes):.0f} %"
        items += [f"{format_bytes(step.bytes)} of {format_bytes(step.total_bytes)}", share]
    if step.total_parts:
        items.append(f"{step.parts:,}/{step.total_parts:,} {unit}")
    if step.state == "running" and step.total_parts and not step.rows and not step.parts and not step.bytes:
        items.append("workers start")
    if step.rows:
        items.append(f"{step.rows:,} rows")
    if step.rows and step.rate >= 1:
        items.append(f"{step.rate:,.0f} rows/s")
    left = step.seconds_left
    return "  ".join([*items, f"in {format_clock(step.seconds)}" if left is None else f"{format_clock(left)} left"])


def without_earlier_drops(counts: Counts) -> Counts:
    """Return the row counts of a table without the rows that an earlier step had dropped, which it only lists."""
    own = {name: count for name, count in counts.dropped.items() if not name.endswith(f"/{DROPPED_BEFORE}")}
    return Counts(rows_in=counts.rows_kept + sum(own.values()), rows_kept=counts.rows_kept, dropped=own)


def largest(dropped: Mapping[str, int]) -> dict[str, int]:
    """Return the reasons with a count above 0, the largest count first."""
    return {name: count for name, count in sorted(dropped.items(), key=lambda item: (-item[1], item[0])) if count}


def reasons_text(dropped: Mapping[str, int], whole: int | None = None, named: Collection[str] = ()) -> str:
    """Return the largest reasons with their counts, such as `source/not_html 36, language/no_text 8 and 3 others 5`.

    `whole`: also print each count's share of this number. `named`: reasons that are printed with any count, such as
    those of the user's own rules. Return an empty text if nothing was dropped.
    """
    ranked = [*largest(dropped).items()]
    chosen = [*ranked[:SHOWN_REASONS], *(item for item in ranked[SHOWN_REASONS:] if item[0] in named)]

    def amount(count: int) -> str:
        return f"{count:,}" if not whole else f"{count:,} ({100 * count / whole:.1f} %)"

    texts = [f"{name} {amount(count)}" for name, count in chosen]
    rest = [item for item in ranked if item not in chosen]
    if not rest:
        return ", ".join(texts)
    others = "1 other reason" if len(rest) == 1 else f"{len(rest)} other reasons"
    return f"{', '.join(texts)} and {others} {amount(sum(count for _, count in rest))}"


def step_fields(name: str, counts: Counts, seconds: float) -> dict[str, Any]:
    """Return the fields of the record of a finished step, with the figures of its line."""
    counts = without_earlier_drops(counts)
    rows, kept = counts.rows_in, counts.rows_kept
    figures = {"rows": rows, "kept": kept, "dropped": rows - kept, "reasons": largest(counts.dropped)}
    return {"step": name, **figures, "seconds": seconds}


def step_line(name: str, counts: Counts, seconds: float, named: Collection[str] = ()) -> str:
    """Return the line of a finished step: its rows, those that it kept, why it dropped the others, and its time.

    `named`: reasons that are printed with any count.
    """
    counts = without_earlier_drops(counts)
    line = f"{name:<10} {counts.rows_in:,} rows"
    if counts.dropped:
        lost = counts.rows_in - counts.rows_kept
        line += f", {counts.rows_kept:,} kept"
        line += f", {lost:,} dropped: {reasons_text(counts.dropped, None, named)}" if lost else ", none dropped"
    return f"{line}  ({format_duration(seconds)})"
