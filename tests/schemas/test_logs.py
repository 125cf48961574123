"""Tests of the standard streams of a process: printable text, and its errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from schemas.logs import print_error, printable_output
from schemas.text import raw_stream
from tests.support.paths import ROOT

HOSTILE = "\x1b]0;PWNED\x07\x9b\u202e\u2066\u200f\u061c\u2028\u2029\ud800\r\x08"


def test_streams_are_printable_whatever_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with printable_output(), printable_output():
        print(f"{HOSTILE}\nnext\tcell")
        sys.stderr.writelines([HOSTILE, "\n"])
        assert raw_stream(sys.stdout) is before[0]
    assert (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    assert out == r"\x1b]0;PWNED\x07\x9b\u202e\u2066\u200f\u061c\u2028\u2029\ud800\r\x08" + "\nnext\tcell\n"
    assert err == out.partition("\n")[0] + "\n"


def test_only_the_first_line_of_an_error_begins_at_the_margin(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ValueError("a: expected b, got 'c\npenstock: all is well'.\n  d: e\x1b"))
    assert capsys.readouterr().err == "penstock: a: expected b, got 'c\n  penstock: all is well'.\n  d: e\\x1b\n"


def test_a_traceback_is_printable(tmp_path: Path) -> None:
    code = f"from schemas.logs import printable_output\nwith printable_output():\n    raise ValueError({HOSTILE!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert r"ValueError: \x1b]0;PWNED\x07" in done.stderr
    assert done.stderr.replace("\n", "").isprintable()
