"""`penstock gc` between the kills of a run and its resume: nothing that the run resumes from is lost."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.cli import main
from pipeline.engine.finished_parts import FOLDER
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from tests.fixtures.make_run import make_pages
from tests.support.kills import below, files_of, named_files, processes
from tests.support.paths import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.slow]
FILES = 6
KILLS = 3


def command(folder: Path, out: Path) -> list[str]:
    """A run up to `clean` of a file for each part, on one core."""
    settings = [f'source.paths=["{folder}/pages-*.jsonl"]', 'source.format="jsonl"', "audit.documents=0"]
    settings += ["spark.partitions=1", 'spark.master="local[1]"']
    words = ["stage", "clean", str(ROOT / "jobs" / "recipes" / "web.toml"), "--out", str(out)]
    return [sys.executable, "-m", "jobs.cli", *words, *(word for each in settings for word in ("--set", each))]


def results_of(run: Path) -> set[Path]:
    """Return the results of all completed parts."""
    return {*run.glob("*/v-*/parts/part-*.json"), *run.glob(f"{FOLDER}/*/*.json")}


def killed(words: list[str], run: Path, seconds: float) -> None:
    """Start a run, and kill its driver so many seconds after it has completed a further part of a step.

    Its other processes end by themselves. Until then they may complete further parts.
    """
    before = results_of(run)
    process = subprocess.Popen(words, cwd=ROOT)
    end = time.monotonic() + 1800
    while process.poll() is None and not results_of(run) - before:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(seconds)
    children = {*below(process.pid, processes()[0])}
    process.kill()
    process.wait(60)
    while any(map(processes()[1].get, children)):  # the command line of one that nothing waits for is empty
        assert time.monotonic() < end
        time.sleep(0.1)


def test_gc_between_kills_and_resumes_loses_nothing(tmp_path: Path) -> None:
    for number in range(FILES):
        (tmp_path / f"pages-{number}.jsonl").write_text(make_pages(12, number))
    run, words, choose = tmp_path / "run", command(tmp_path, tmp_path / "run"), random.Random()
    for _ in range(KILLS):
        killed(words, run, choose.uniform(0, 3))
        kept = {path: path.stat().st_mtime_ns for path in results_of(run)}
        assert main(["gc", str(run)]) == 0
        assert {path: path.stat().st_mtime_ns for path in results_of(run)} == kept
        files = files_of(run)
        frames = {name for name in files if "/scratch/" in name}
        assert files - frames - {"run.json", "progress.json"} <= named_files(run)
    subprocess.run(words, cwd=ROOT, check=True, timeout=1800)
    assert main(["gc", str(run)]) == 0
    files = files_of(run)
    assert files == named_files(run) | {"run.json", "progress.json"}
    subprocess.run(command(tmp_path, tmp_path / "other"), cwd=ROOT, check=True, timeout=1800)
    stores = [Store(str(run)), Store(str(tmp_path / "other"))]
    tables = [{name: open_table(store, name)[1].digest for name in read_run(store).tables} for store in stores]
    assert tables[0] == tables[1]
