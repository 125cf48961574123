"""Real runs whose log is JSON lines: of the driver and of workers, of failed parts and records, and of an error."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.spark

HOSTILE = "run \x1b]0;PWNED\x07\u202e\u2028\n{}"
SECRET_TEXT = "kryptonite"
STAGE = """
import os, signal


def measure(text, row):
    if "number 3 " in text:
        raise ValueError(text)
    if "number 5 " in text:
        os.kill(os.getpid(), signal.SIGKILL)
"""
RECIPE = """
[source]
paths = ["{folder}/texts.jsonl"]

[[stage]]
name = "mine"
function = "mine.py:measure"
reasons = {{never = "No text has this reason."}}
max_failed_share = 1.0
"""


def penstock(folder: Path, *words: str) -> tuple[int, list[str], str]:
    """Run a command; return its exit code, the lines of its standard error, and its standard output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *words], cwd=folder, env=environment, capture_output=True, timeout=300
    )
    # Only line feeds end a line: `splitlines` of a text would also divide at the separators of a hostile name.
    return done.returncode, done.stderr.decode().removesuffix("\n").split("\n"), done.stdout.decode()


def records(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of JSON lines, each with the fields of every line."""
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "run", "step", "part", "message", "logger"} <= each.keys() for each in found)
    assert "".join(lines).isprintable()
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with a stage that fails on one text and ends its process on another."""
    texts = (f"A text with the number {number} and the word {SECRET_TEXT}." for number in range(9))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "mine.py").write_text(STAGE)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))
    return tmp_path / "recipe.toml"


def test_a_run_with_failing_records_logs_json_lines_and_no_text(recipe: Path) -> None:
    run = str(recipe.parent / HOSTILE)
    code, lines, out = penstock(recipe.parent, "stage", "documents", str(recipe), "--out", run, "--log-format", "json")
    assert code == 0, lines[-1]
    assert out.startswith("stage documents complete")
    every = records(lines)
    assert {each["run"] for each in every} == {run}
    assert not any(SECRET_TEXT in line for line in lines)
    workers = [each for each in every if each["logger"] == "penstock.worker"]
    assert {(each["step"], each["part"]) for each in workers} == {("documents", "part-00000")}
    begins, ends = (
        next(each for each in workers if each["message"].startswith(f"part {what}")) for what in ("begins", "ends")
    )
    assert begins["level"] == ends["level"] == "INFO"
    assert (ends["rows"], ends["kept"]) == (9, 7)
    assert ends["seconds"] > 0 < ends["cpu_seconds"]
    warnings = [each for each in workers if each["level"] == "WARNING"]
    assert {each.get("attempt") for each in warnings} - {None} == {2}
    by_record = [(each["record"], each.get("cause")) for each in warnings if "record" in each]
    assert set(by_record) == {(6, None), (6, "signal")}
    assert [(each["cause"], each["records"]) for each in warnings if "records" in each] == [
        ("mine: ValueError at mine.py:7", 1)
    ]
    (step,) = [each for each in every if "reasons" in each]
    assert (step["step"], step["rows"], step["kept"], step["dropped"]) == ("documents", 9, 7, 2)
    assert step["reasons"] == {"extract/crashed": 1, "mine/failed": 1}
    (summary,) = [each for each in every if each["message"].startswith("documents: stage mine failed on 1 of ")]
    assert (summary["level"], summary["logger"]) == ("WARNING", "penstock")
