"""The progress of a run: its lines on a terminal and in a log, its figures, and the status file at every end."""

import io
import itertools
import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine import progress as module
from pipeline.engine.live_counts import WorkCounts
from pipeline.engine.progress import (
    PROGRESS_NAME,
    CountSources,
    LogView,
    Progress,
    StatusFile,
    StepStatus,
    TerminalView,
    WorkTotal,
    current_progress,
    doing,
    open_view,
    progress_line,
    reasons_text,
    seconds_left,
    step_fields,
    step_line,
)
from schemas.errors import ConfigError
from schemas.logs import LOGGER, TEXT, set_log
from schemas.manifest import Counts
from schemas.storage import Store

COUNTS = Counts(
    rows_in=100,
    rows_kept=60,
    dropped={
        "source/not_html": 10,
        "extract/no_text": 4,
        "language/other": 12,
        "source/bad_http": 0,
        "a/b": 3,
        "a/c": 11,
    },
)


def test_line_with_bytes_rows_and_time_left() -> None:
    step = StepStatus("documents", "running", "", 1203, 3_100_000, 8_000_000, 3, 8, 31.0, 40.1, 50.0)
    assert progress_line(step) == ("documents   3.1 MB of 8 MB  39 %  3/8 parts  1,203 rows  40 rows/s  0:00:50 left")


def test_line_of_spark_tasks_without_rows() -> None:
    step = StepStatus("clusters", "running", "join clusters, round 2", 0, 0, None, 5, 1200, 70.0)
    assert progress_line(step, "tasks") == "clusters    join clusters, round 2  5/1,200 tasks  in 0:01:10"


def test_line_before_the_first_row() -> None:
    step = StepStatus("clean", "running", total_parts=4, seconds=3.0)
    assert progress_line(step) == "clean       0/4 parts  workers start  in 0:00:03"


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            COUNTS,
            "documents  100 rows, 60 kept, 40 dropped: language/other 12, a/c 11, source/not_html 10 "
            "and 2 other reasons 7  (4.2 s)",
        ),
        (Counts(rows_in=9, rows_kept=9), "documents  9 rows  (4.2 s)"),
        (Counts(rows_in=9, rows_kept=9, dropped={"a/b": 0}), "documents  9 rows, 9 kept, none dropped  (4.2 s)"),
        (
            Counts(rows_in=9, rows_kept=5, dropped={"dedup/exact_duplicate": 1, "dedup/dropped_before": 3}),
            "documents  6 rows, 5 kept, 1 dropped: dedup/exact_duplicate 1  (4.2 s)",
        ),
    ],
)
def test_line_of_a_finished_step(counts: Counts, expected: str) -> None:
    assert step_line("documents", counts, 4.2) == expected


def test_reasons_are_ranked_with_shares() -> None:
    dropped = {"a/x": 5, "b/y": 20, "c/z": 5, "d/w": 1, "e/v": 0}
    assert reasons_text(dropped, 200) == "b/y 20 (10.0 %), a/x 5 (2.5 %), c/z 5 (2.5 %) and 1 other reason 1 (0.5 %)"
    assert reasons_text({"a/x": 5}) == "a/x 5"
    assert reasons_text({"a/x": 0}) == ""


# ------------------------------------------------------------------------------------------------------- the displays


def test_a_log_gets_a_line_after_two_seconds_and_then_every_ten(capsys: pytest.CaptureFixture[str]) -> None:
    view = LogView()
    for seconds in range(25):
        view.show(f"at {seconds}", None, {"seconds": float(seconds)})
    view.hide()
    view.show("next step", None, {"seconds": 1.0})
    view.say("done", logging.INFO, {})
    assert capsys.readouterr() == ("", "at 2\nat 12\nat 22\ndone\n")


def test_the_figures_of_a_running_and_of_a_finished_step_are_fields_of_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    for name in ("FIRST_SECONDS", "REDRAW_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)
    steps = ["documents"]
    with Progress("penstock run", steps, CountSources(), Store(str(tmp_path))) as progress:
        with progress.step("documents"):
            LOGGER.warning("a warning")
            progress.begin_work("read", WorkTotal(4, bytes=100), lambda: WorkCounts(50, 25, 1))
            time.sleep(0.1)
        progress.say(step_line("documents", COUNTS, 4.2), **step_fields("documents", COUNTS, 4.2))
    warning, *_, running, finished = json_lines()
    names = ("run", "step", "part", "message")
    assert [warning[name] for name in names] == [str(tmp_path), "documents", None, "a warning"]
    assert (running["run"], running["step"], running["what"]) == (str(tmp_path), "documents", "read")
    assert (running["rows"], running["bytes"], running["total_bytes"]) == (50, 25, 100)
    assert (running["parts"], running["total_parts"], running["share"]) == (1, 4, 0.25)
    assert running["rate"] > 0 < running["seconds"]
    assert (finished["run"], finished["step"], finished["seconds"]) == (str(tmp_path), "documents", 4.2)
    assert (finished["rows"], finished["kept"], finished["dropped"]) == (100, 60, 40)
    assert finished["reasons"]["language/other"] == 12


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", **environment}.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    view = open_view(stream)
    assert isinstance(view, TerminalView)
    view.show("documents  1/2 parts", 0.5, {"seconds": 3.0})
    time.sleep(0.3)
    view.say("documents  9 rows, 8 kept, 1 dropped: source/not_html 1  (1.0 s)", logging.INFO, {})
    view.close()
    return stream.getvalue()


def test_a_terminal_gets_a_bar_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(monkeypatch)
    assert "\x1b[33msource/not_html\x1b[0m 1  (1.0 s)" in shown
    assert "━" in shown
    assert "documents  1/2 parts" in shown


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(monkeypatch, NO_COLOR="1")
    assert "1 dropped: source/not_html 1  (1.0 s)" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown)


def test_a_pipe_gets_records_and_so_does_a_terminal_with_json(json_lines: object) -> None:
    assert isinstance(open_view(Terminal()), LogView)
    set_log(TEXT)
    assert isinstance(open_view(io.StringIO()), LogView)


# ------------------------------------------------------------------------------------------------- figures and file


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PROGRESS_NAME).read_text())


def test_the_status_file_of_a_run_that_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REDRAW_SECONDS", 0.01)
    monkeypatch.setitem(module.FILE_SECONDS, True, 0.01)
    tasks = CountSources(tasks=lambda: (3, 10))
    with Progress("penstock run", ["documents", "clusters", "clean"], tasks, Store(str(tmp_path))) as progress:
        assert current_progress() is progress
        progress.finish("documents", "complete", COUNTS, 12.0)
        with progress.step("clusters"):
            doing("join clusters, round 1")
            seen = waited(tmp_path, "parts", 3)
            assert (seen["what"], seen["total_parts"], seen["state"]) == ("join clusters, round 1", 10, "running")
            progress.begin_work("write", WorkTotal(parts=4, rows=200), lambda: WorkCounts(50, 0, 1))
            seen = waited(tmp_path, "rows", 50)
            assert (seen["parts"], seen["total_parts"]) == (1, 4)
            assert seen["rate"] > 0
            assert seen["seconds_left"] is None  # no basis yet
        progress.finish("clusters", "done", Counts(rows_in=60, rows_kept=60), 2.0)
    assert current_progress() is None
    status = read(tmp_path)
    assert (status["format"], status["command"], status["state"], status["message"]) == (
        1,
        "penstock run",
        "finished",
        None,
    )
    documents, clusters, clean = status["steps"]
    assert (documents["state"], documents["rows"], documents["kept"], documents["seconds"]) == ("complete", 100, 60, 12)
    assert documents["dropped"] == {
        "language/other": 12,
        "a/c": 11,
        "source/not_html": 10,
        "extract/no_text": 4,
        "a/b": 3,
    }
    assert (clusters["state"], clusters["rate"], clusters["what"], clusters["seconds_left"]) == ("done", 30, "", None)
    assert (clean["state"], clean["kept"], clean["dropped"]) == ("waiting", None, None)


@pytest.mark.parametrize(
    ("fraction", "seconds", "expected"),
    [
        (None, 90.0, None),
        (0.5, 4.9, None),
        (0.5, 5.0, 5.0),
        (0.019, 59.9, None),
        (0.02, 5.0, 245.0),
        (0.001, 60.0, 59940.0),
        (1.0, 90.0, None),
    ],
)
def test_the_time_left_needs_a_basis(fraction: float | None, seconds: float, expected: float | None) -> None:
    assert seconds_left(fraction, seconds) == expected


def test_a_line_without_a_basis_has_no_rate_and_no_time_left() -> None:
    step = StepStatus("clean", "running", "", 1, 0, None, 0, 1, 5.0, 0.2)
    assert progress_line(step) == "clean       0/1 parts  1 rows  in 0:00:05"


def test_reasons_of_the_user_are_always_named() -> None:
    dropped = {"a/1": 9, "a/2": 8, "a/3": 7, "a/4": 6, "quality/mine": 2, "a/5": 1}
    text = "a/1 9, a/2 8, a/3 7, quality/mine 2 and 2 other reasons 7"
    assert reasons_text(dropped, None, {"quality/mine", "long/failed"}) == text
    line = step_line("verdicts", Counts(rows_in=40, rows_kept=7, dropped=dropped), 1.0, {"quality/mine"})
    assert line == f"verdicts   40 rows, 7 kept, 33 dropped: {text}  (1.0 s)"


def waited(folder: Path, key: str, value: object) -> dict[str, Any]:
    """The second step of the status file, once it has this value."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if (folder / PROGRESS_NAME).exists() and read(folder)["steps"][1][key] == value:
            break
        time.sleep(0.01)
    return dict(read(folder)["steps"][1])


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (ConfigError("x: expected 1, got 2. Set x=1."), "failed", "x: expected 1, got 2. Set x=1."),
        (KeyboardInterrupt(), "interrupted", None),
        (ValueError(), "failed", "ValueError"),
    ],
)
def test_the_status_file_of_a_run_that_fails(
    tmp_path: Path, error: BaseException, state: str, message: str | None
) -> None:
    with (
        pytest.raises(type(error)),
        Progress("penstock run", ["documents", "clean"], CountSources(), Store(str(tmp_path))) as progress,
        progress.step("documents"),
    ):
        raise error
    status = read(tmp_path)
    assert (status["state"], status["message"]) == (state, message)
    assert [step["state"] for step in status["steps"]] == ["failed", "waiting"]


def test_a_status_file_that_cannot_be_written_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.FILE_SECONDS, True, 0.0)
    (tmp_path / "run").write_text("a file where the folder should be")
    reports: list[str] = []
    file = StatusFile(Store(str(tmp_path / "run")), reports.append)
    status = module.RunStatus(1, "penstock run", 1, "host", "then", "now")
    for _ in range(3):
        file.write(status)
        time.sleep(0.05)
    file.close()
    assert len(reports) == 1
    assert reports[0].startswith("progress.json cannot be written, so no live page shows this run: ")


def test_writes_of_the_status_file_keep_their_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.FILE_SECONDS, True, 0.2)
    store, times = Store(str(tmp_path)), list[float]()
    write = store.write_atomic
    monkeypatch.setattr(store, "write_atomic", lambda *call: (times.append(time.monotonic()), write(*call)))
    file = StatusFile(store, pytest.fail)
    status = module.RunStatus(1, "penstock run", 1, "host", "then", "now")
    for number in range(50):
        status.pid = number
        file.write(status)
        time.sleep(0.01)
    status.pid = 99
    file.write(status)
    file.close()
    assert 2 <= len(times) <= 5
    assert all(later - earlier >= 0.19 for earlier, later in itertools.pairwise(times[:-1]))
    assert read(tmp_path)["pid"] == 99


def test_parts_are_never_shown_complete_while_some_are_not() -> None:
    with Progress("x", ["documents"], CountSources()) as progress, progress.step("documents") as status:
        progress.begin_work("documents", WorkTotal(parts=2, bytes=10), lambda: WorkCounts(5, 10, 1))
        time.sleep(0.01)
        progress._update()
        assert status.seconds_left is None  # no basis yet
        assert progress._fraction() == 0.99
        assert progress.last_line().startswith("documents   10 bytes of 10 bytes  100 %  1/2 parts  5 rows  ")
