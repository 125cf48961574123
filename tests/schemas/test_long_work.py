"""Tests of the progress line of long work."""

import io
import time
from typing import Any

import pytest

from schemas import long_work
from schemas.long_work import LongWork, ProgressLine, time_left, work_line
from schemas.text import CLEAR


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 4_800_000_000, "bytes", 0.0), "x  0 bytes of 4.8 GB  0 %  0 bytes/s  in 0:00:00"),
        ((1_200_000_000, 4_800_000_000, "bytes", 1.0), "x  1.2 GB of 4.8 GB  25 %  1.2 GB/s  0:00:03 left"),
        ((4_800_000_000, 4_800_000_000, "bytes", 4.0), "x  4.8 GB of 4.8 GB  100 %  1.2 GB/s  in 0:00:04"),
        ((300, 4200, "rows", 2.0), "x  300 rows of 4,200 rows  7 %  150 rows/s  0:00:26 left"),
        ((0, 0, "bytes", 0.0), "x  0 bytes of 0 bytes  100 %  0 bytes/s  in 0:00:00"),
    ],
)
def test_the_line_of_long_work(numbers: tuple[Any, ...], expected: str) -> None:
    assert work_line("x", *numbers) == expected


def test_the_time_left_is_that_of_the_rest_at_the_same_rate() -> None:
    assert time_left(3, 8, 30.0) == "0:00:50 left"
    assert (time_left(0, 8, 30.0), time_left(8, 8, 30.0)) == ("in 0:00:30", "in 0:00:30")


def test_long_work_is_shown_and_short_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = io.StringIO(), io.StringIO()
    with LongWork("verify", 10, "bytes", short) as work:
        work.add(10)
    assert (short.getvalue(), work.done) == ("", 10)
    monkeypatch.setattr(long_work, "FIRST_SECONDS", 0.01)
    with LongWork("verify", 10, "bytes", long) as work:
        work.add(4)
        while not long.getvalue():
            time.sleep(0.01)
        work.add(6)
    lines = long.getvalue().splitlines()
    assert lines[0].startswith("verify  4 bytes of 10 bytes  40 %  ")
    assert lines[-1].startswith("verify  10 bytes of 10 bytes  100 %  ")


def test_a_terminal_sees_a_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(long_work, "FIRST_SECONDS", 0.01)
    with ProgressLine(lambda seconds: "work", stream):
        while not stream.getvalue():
            time.sleep(0.01)
    assert stream.getvalue() == f"{CLEAR}work{CLEAR}work\n"
