"""Real runs whose log is JSON lines: of the driver and of workers, of failed parts and records, and of an error."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.demo_crawl.build import build_demo_crawl
from schemas.manifest import open_table, read_run
from schemas.storage import Store
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


PROGRAM = """
import sys
from pipeline.engine import progress
from jobs.cli import main

progress.FIRST_SECONDS = progress.LINE_SECONDS = progress.REDRAW_SECONDS = 0.1
sys.exit(main(sys.argv[1:]))
"""
"""The command, with a record about a running step ten times a second."""
RUNNING = ("rows", "rate", "seconds", "parts", "bytes")
"""Figures of a running step."""


def penstock(folder: Path, *words: str) -> tuple[int, list[str], str]:
    """Run a command; return its exit code, the lines of its standard error, and its standard output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=folder, env=environment, capture_output=True, timeout=300
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
    running = [each for each in every if "rate" in each]
    assert {each["step"] for each in running} == {"documents"}
    assert all(isinstance(each[name], int | float) for each in running for name in RUNNING)
    (step,) = [each for each in every if "reasons" in each]
    assert (step["step"], step["rows"], step["kept"], step["dropped"]) == ("documents", 9, 7, 2)
    assert step["reasons"] == {"extract/crashed": 1, "mine/failed": 1}
    (summary,) = [each for each in every if each["message"].startswith("documents: stage mine failed on 1 of ")]
    assert (summary["level"], summary["logger"]) == ("WARNING", "penstock")


def test_an_explained_error_is_one_json_line_and_its_exit_code(recipe: Path) -> None:
    name = f"{HOSTILE}.warc.gz"
    words = ["stage", "documents", str(recipe), "--out", "run", "--set", f"source.paths={json.dumps([name])}"]
    code, (line,), out = penstock(recipe.parent, *words, "--log-format", "json")
    (error,) = records([line])
    assert (code, out, error["level"], error["error"]) == (2, "", "ERROR", "ConfigError")
    assert error["run"] == str(recipe.parent / "run")
    assert error["message"].startswith("source.paths: 1 problem(s); nothing was started\n  expected ")
    assert r"run \x1b]0;PWNED\x07\u202e\u2028" in error["message"]


def test_an_unknown_error_is_one_json_line_with_its_traceback(recipe: Path) -> None:
    program = PROGRAM.replace("sys.exit(main", "from jobs import run_all\nrun_all.prepare = None\nsys.exit(main")
    words = ["stage", "documents", str(recipe), "--out", "run"]
    done = {}
    for form in ("text", "json"):
        command = [sys.executable, "-c", program, *words, "--log-format", form]
        done[form] = subprocess.run(command, cwd=recipe.parent, capture_output=True, text=True, check=False)
    (error,) = records(done["json"].stderr.splitlines())
    assert (done["json"].returncode, error["level"], error["error"]) == (1, "ERROR", "TypeError")
    assert error["message"] == "TypeError: 'NoneType' object is not callable"
    assert error["traceback"].startswith("Traceback (most recent call last):\n")
    assert done["text"].returncode == 1
    assert done["text"].stderr.endswith("TypeError: 'NoneType' object is not callable\n")


def test_text_has_no_line_of_a_worker_unless_it_is_asked_for(recipe: Path) -> None:
    words = ["stage", "documents", str(recipe), "--out"]
    code, lines, _ = penstock(recipe.parent, *words, "quiet")
    assert code == 0
    running = re.compile(r"documents   (?:.*  )?(?:in [\d:]+|[\d:]+ left)")
    failed, finished = (line for line in lines if not running.fullmatch(line))
    assert failed.startswith("documents: stage mine failed on 1 of 8 document(s): ValueError: ")
    assert finished.startswith("documents  9 rows, 7 kept, 2 dropped: extract/crashed 1, mine/failed 1  (")
    code, lines, _ = penstock(recipe.parent, *words, "verbose", "--verbose")
    assert code == 0
    begins = re.compile(rf"\S+Z INFO {re.escape(str(recipe.parent))}/verbose documents part-00000: part begins")
    assert any(begins.fullmatch(line) for line in lines)


@pytest.mark.slow
def test_every_line_of_a_whole_run_is_json_and_its_tables_are_those_of_a_run_with_text(tmp_path: Path) -> None:
    build_demo_crawl(tmp_path / "crawl", pages=100, seed=3)
    source = [
        *("--set", 'source.paths=["crawl/*.warc.gz"]'),
        *("--set", "tokenizer.vocab_size=600"),
        *("--set", "tokens.chunk_tokens=512"),
    ]
    outputs = []
    for form in ("json", "text"):
        code, lines, out = penstock(tmp_path, "run", "demo", "--out", f"run-{form}", *source, "--log-format", form)
        assert code == 0, lines[-1]
        outputs.append(out.replace(f"run-{form}", "RUN"))
        if form == "json":
            every = records(lines)
    steps = [each["step"] for each in every if "reasons" in each]
    assert steps == ["documents", "verdicts", "clusters", "dedup", "audit", "clean", "tokenizer", "tokens"]
    ended = [each for each in every if each["message"].startswith("part ends: ")]
    assert {(each["logger"], each["run"]) for each in ended} == {("penstock.worker", str(tmp_path / "run-json"))}
    documents = [each for each in ended if each["step"] == "documents"]
    (step,) = [each for each in every if each["step"] == "documents" and "reasons" in each]
    assert sum(each["rows"] for each in documents) == step["rows"]
    assert sum(each["kept"] for each in documents) == step["kept"]
    assert re.sub(r"[\d.]+ (s|kB|MB)\b", "", outputs[0]) == re.sub(r"[\d.]+ (s|kB|MB)\b", "", outputs[1])
    stores = [Store(str(tmp_path / f"run-{form}")) for form in ("json", "text")]
    assert read_run(stores[0]).tables.keys() == read_run(stores[1]).tables.keys()
    for table in read_run(stores[0]).tables:
        assert open_table(stores[0], table)[1].digest == open_table(stores[1], table)[1].digest, table
