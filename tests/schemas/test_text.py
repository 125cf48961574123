"""Tests of text for readers: aligned tables, durations and sizes."""

import json
import re
from collections.abc import Callable

import pytest

from schemas import text
from schemas.ids import canonical_json
from schemas.text import (
    format_bytes,
    format_clock,
    format_duration,
    format_short,
    printable,
    printable_block,
    printable_json,
    printable_json_bytes,
    printable_line,
    printable_lines,
    printable_value,
    text_table,
)
from tests.support.paths import ROOT


def test_a_table_aligns_each_column_by_its_widest_cell() -> None:
    rows = [("name", "rows", "size"), ("a", "7", "12"), ("longer", "1,203", "")]
    assert text_table(rows, "<>") == ["name     rows  size", "a           7    12", "longer  1,203"]
    assert text_table(rows, "><", "  ") == ["    name  rows   size", "       a  7      12", "  longer  1,203"]
    assert text_table(rows) == ["name    rows   size", "a       7      12", "longer  1,203"]
    assert text_table(rows, "<><") == ["name     rows  size", "a           7  12", "longer  1,203"]
    assert text_table([]) == []
    with pytest.raises(ValueError, match="shorter"):
        text_table([("a", "b"), ("c",)])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0:00:00"), (59.4, "0:00:59"), (59.6, "0:01:00"), (2530, "0:42:10"), (360_000, "100:00:00")],
)
def test_clock(seconds: float, expected: str) -> None:
    assert format_clock(seconds) == expected


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (format_duration, 8.04, "8.0 s"),
        (format_duration, 99.94, "99.9 s"),
        (format_duration, 99.96, "2 min"),
        (format_duration, 150, "2 min"),
        (format_duration, 3569, "59 min"),
        (format_duration, 3590, "1 h 00 min"),
        (format_duration, 3780, "1 h 03 min"),
        (format_short, 999.4, "999"),
        (format_short, 999.6, "1 k"),
        (format_short, 4.67e11, "467 G"),
        (format_short, -1500, "-1.5 k"),
        (format_bytes, 0, "0 bytes"),
        (format_bytes, 999, "999 bytes"),
        (format_bytes, 999.6, "1 kB"),
        (format_bytes, 1_969_604, "1.97 MB"),
        (format_bytes, 8e10, "80 GB"),
    ],
)
def test_numbers_are_formatted_for_readers(function: Callable[[float], str], value: float, expected: str) -> None:
    assert function(value) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [(950, "950"), (999.6, "1k"), (1500, "1.5k"), (1_263_616, "1.26M"), (2e9, "2G"), (3e12, "3T")],
)
def test_numbers_in_names_have_no_space(number: float, expected: str) -> None:
    assert format_short(number, "") == expected


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain é中🙂 \u00a0\u3000\u200d", "plain é中🙂 \u00a0\u3000\u200d"),
        ("\x1b]0;t\x07", "\\x1b]0;t\\x07"),
        ("\x9b31m\x7f\0", "\\x9b31m\\x7f\\x00"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("a\tb\nc\rd", "a\\tb\\nc\\rd"),
        ("\u2028\ufeff\u200b\ud800", "\\u2028\\ufeff\\u200b\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_control_characters_become_escapes(raw: str, shown: str) -> None:
    assert printable(raw) == shown
    value = {"a": [raw, b"\x01", float("nan")]}
    assert json.loads(printable_json(value)) == {"a": [raw, "01", None]}
    assert text.CONTROL_CHARACTERS.findall(printable_json(value)) == []


def test_lines_end_at_line_feeds_only() -> None:
    assert printable_lines("a\r\n\tb\x0bc\u2028d\n") == ["a", "    b\\x0bc\\u2028d"]


HOSTILE = "\x1b]0;PWNED\x07\x9b\u202e\u2066\u200f\u061c\u2028\u2029\ud800\r\x08"


def test_a_block_keeps_its_lines_and_a_line_is_one() -> None:
    shown = r"\x1b]0;PWNED\x07\x9b\u202e\u2066\u200f\u061c\u2028\u2029\ud800\r\x08"
    assert printable_block(f"a\tb\n{HOSTILE}\n") == f"a\tb\n{shown}\n"
    assert printable_line(f"a\t \n{HOSTILE}\n") == r"a \x1b]0;PWNED\x07\x9b\u202e\u2066\u200f\u061c \ud800 \x08"
    assert text_table([[HOSTILE, "a\nb"]]) == [rf"{shown}  a\nb"]


def test_values_of_json_are_safe_to_show_and_stay_the_same_as_json() -> None:
    value = {"a\x1b": ["\u202e\n", 1, None, True, {"b": 0.5}]}
    assert printable_value(value) == {r"a\x1b": ["\\u202e\n", 1, None, True, {"b": 0.5}]}
    written = printable_json_bytes(canonical_json(value))
    assert json.loads(written) == value
    assert written.decode().isprintable()


def test_nothing_writes_csv() -> None:
    """A cell that begins with `=` would be a formula of a spreadsheet; there is no such file."""
    writers = re.compile(r"csv\.(Dict)?[wW]riter|\.to_csv\(|\bwrite_csv\b")
    rooms = ("schemas", "pipeline", "train", "jobs", "penstock")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert [path for path in sources if writers.search(path.read_text())] == []
