"""Random kills of every process of a run, at random moments in all steps: the end is that of an undisturbed run.

After the last kill every table has the digest of the undisturbed run, every file the SHA-256 of its manifest, and each
training the same losses and checkpoints, bit for bit. `penstock gc` removes what the kills left. `make test` makes 50
kills; `KILLS=1000 KILLS_SEED=1 pytest -m slow tests/integration/test_kills.py -s` more, on the demo crawl at 400 pages,
and prints them as a table.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.recipe import read_recipe
from jobs.scratch import remove_abandoned
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.storage import Store
from tests.fixtures.make_run import RECIPE
from tests.support import rank_pool
from tests.support.kills import (
    DAEMON,
    DRIVER,
    EXECUTOR,
    LAUNCHER,
    RANK,
    STARTING,
    WORKER,
    Kill,
    Series,
    digests,
    files_of,
    named_files,
    step_of,
    table,
    various_pages,
)
from tests.support.paths import ROOT
from tests.support.tiny_runs import assert_same_bits, make_run, notes, train, trained

KILLS, SEED = int(os.environ.get("KILLS", "1000")), int(os.environ.get("KILLS_SEED", "1"))
"""Number of kills of the long test, and the seed of all kills."""
DATA_MEANS = {WORKER: 1.4, DAEMON: 12.0, DRIVER: 90.0, EXECUTOR: 90.0}
"""Mean time between two kills of each kind of process in a data run [s]."""
TRAIN_MEANS = {RANK: 6.0, LAUNCHER: 20.0}
"""The same in a training [s]."""
ATTEMPTS = 20
"""Attempts of a task of Spark: so many kills in a short run meet one task more often than its usual four attempts."""
OWN_FILES = {"run.json", "progress.json"}
"""Files of a run that belong to no table."""


def cli(*words: str | Path) -> list[str]:
    """Return the command line of a verb."""
    return [sys.executable, "-m", "jobs.cli", *map(str, words)]


def check_leftovers(run: Path) -> int:
    """Return the number of files that nothing names; assert that `penstock gc` removes them and nothing else."""
    trained_files = {name for name in files_of(run) if name.startswith("train/")}
    unnamed = files_of(run) - named_files(run) - OWN_FILES - trained_files
    assert main(["gc", str(run)]) == 0
    assert files_of(run) - trained_files == named_files(run) | OWN_FILES
    return len(unnamed)


def check_temporary(folder: Path) -> None:
    """Assert that the next session would remove all temporary files of killed ones, whose JVMs may end after them."""
    left, until = True, time.monotonic() + 60
    while left and time.monotonic() < until:
        remove_abandoned(folder)
        left = any((path / "local").exists() for path in folder.glob("penstock-spark-*"))
        time.sleep(0.1 * left)
    assert not left, [*folder.glob("penstock-spark-*/*")]


# ---------------------------------------------------------------------------------------------------------------- data


@pytest.mark.spark
def test_34_kills_of_a_data_run_end_in_the_same_bytes(spark: Any, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"pages-{number}.jsonl").write_text(various_pages(20, number))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=tmp_path).replace("pages.jsonl", "pages-*.jsonl"))
    run_steps(spark, prepare(read_recipe(str(recipe), []), None), Store(str(tmp_path / "whole")), 2)
    expected = digests(tmp_path / "whole")
    (tmp_path / "tmp").mkdir()
    kills: list[Kill] = []
    number = 0
    while len(kills) < 34:  # a run that ends before its last kill is followed by another one
        run, number = tmp_path / f"run-{number}", number + 1
        words = cli("run", recipe, "--out", run, "--set", f'spark.master="local[2,{ATTEMPTS}]"')
        series = Series(words, ROOT, DATA_MEANS, partial(step_of, run), random.Random(f"data {SEED} {number}"))
        series.environment, series.log = os.environ | {"TMPDIR": str(tmp_path / "tmp")}, tmp_path / "log"
        series.run(34 - len(kills))
        kills += series.kills
        assert digests(run) == expected
        check_leftovers(run)
        check_temporary(tmp_path / "tmp")
    print(f"{table(kills)}\n{number} runs")
    assert "Traceback" not in (tmp_path / "log").read_text(errors="replace")


# ------------------------------------------------------------------------------------------------------------ training

TRAINING = {
    "train": {"steps": 24, "global_batch": 12, "eval_every": 12},
    "layout": {"data": "ddp", "micro_batch": 1, "activation_checkpointing": "full"},
    "checkpoint": {"every": 3},
}


@dataclass
class Attempt:
    """A training on two ranks of the pool, one of which is killed after a time."""

    seconds: float
    rank: int
    killed: bool = False

    def run(self, folder: Path) -> bool:
        """Return True if the training ended before the kill."""
        pool, ended = rank_pool.shared_pool(), threading.Event()
        thread = threading.Thread(target=self._kill, args=(pool, ended))
        thread.start()
        try:
            complete = all(result.code == 0 for result in train(folder, 2))
        except rank_pool.RankFailed:
            assert self.killed
            complete = False
        finally:
            ended.set()
            thread.join()
            if self.killed:
                pool.close()
        return complete

    def _kill(self, pool: rank_pool.RankPool, ended: threading.Event) -> None:
        if not ended.wait(self.seconds) and len(pool.pids) > self.rank:
            self.killed = True
            os.kill(pool.pids[self.rank], signal.SIGKILL)


@pytest.mark.dist
def test_16_kills_of_ranks_end_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "SECONDS_AFTER_FAILURE", 0.5)  # the other rank has that long, then it is killed too
    trained(make_run(tmp_path / "warm", TRAINING), 2)  # starts the ranks
    began = time.monotonic()
    whole = trained(make_run(tmp_path / "whole", TRAINING), 2)
    seconds = time.monotonic() - began
    choose, kills, number = random.Random(f"ranks {SEED}"), 0, 0
    while kills < 16:
        run = make_run(tmp_path / f"run-{number}", TRAINING)
        number += 1
        done = False
        while not done and kills < 16:
            attempt = Attempt(choose.uniform(0, seconds), choose.randrange(2))
            done = attempt.run(run)
            kills += attempt.killed
        trained(run, 2)
        assert_same_training(run, whole)
    print(f"{kills} kills of ranks in {number} trainings, each of {seconds:.1f} s when undisturbed")


def assert_same_training(run: Path, whole: Path) -> None:
    """Assert the same losses and norms at every step, and a last checkpoint with the same files, bit for bit."""
    assert_same_bits(run, whole)
    files = [
        {name: file for name, file in notes(each)[-1].files.items() if name.endswith(".distcp")}
        for each in (run, whole)
    ]  # torch's index beside them holds the path of the run and a random id of the save
    assert files[0] == files[1] != {}


# -------------------------------------------------------------------------------------------------------- the long test

PLAN = """
[plan]
num_layers = 1
d_model = 32
num_heads = 2
num_kv_heads = 1
d_ffw = 64

[train]
seq_len = 256
global_batch = 8
steps = 40
eval_every = 10

[checkpoint]
every = 4
"""
KILLS_OF_A_RUN = {"data": 60, "training": 10}
"""Maximum number of kills in one folder."""


@pytest.mark.spark
@pytest.mark.dist
@pytest.mark.slow
def test_kills_of_whole_runs_of_the_demo_crawl_end_in_the_same_bytes(tmp_path: Path) -> None:
    build_demo_crawl(tmp_path / "crawl", pages=400, seed=SEED)
    recipe = tmp_path / "recipe.toml"
    demo = (ROOT / "jobs/recipes/demo.toml").read_text().partition("[train]")[0]
    recipe.write_text(demo.replace("demo/crawl", str(tmp_path / "crawl")) + PLAN)
    log, whole = tmp_path / "log", tmp_path / "whole"
    (tmp_path / "tmp").mkdir()

    def data(run: Path) -> list[str]:
        return cli("run", recipe, "--out", run, "--set", f'spark.master="local[2,{ATTEMPTS}]"')

    def training(run: Path) -> list[str]:
        return cli("train", run, "--ranks", "2")

    def step_of_training(run: Path, pid: int) -> str:
        return "train" if (run / "train/metrics.jsonl").exists() else STARTING

    for words in (data(whole), training(whole)):
        subprocess.run(words, cwd=ROOT, check=True)
    expected = digests(whole)
    kills: list[Kill] = []
    number = left = 0
    while len(kills) < KILLS:
        run, number = tmp_path / f"run-{number}", number + 1
        for words, means, step, most in (
            (data(run), DATA_MEANS, partial(step_of, run), KILLS_OF_A_RUN["data"]),
            (training(run), TRAIN_MEANS, partial(step_of_training, run), KILLS_OF_A_RUN["training"]),
        ):
            series = Series(words, ROOT, means, step, random.Random(f"{words[3]} {SEED} {number}"), log=log)
            series.environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
            series.run(min(most, KILLS - len(kills)))
            kills += series.kills
        assert digests(run) == expected
        assert_same_training(run, whole)
        left += check_leftovers(run)
        check_temporary(tmp_path / "tmp")
        shutil.rmtree(run)
        print(f"{table(kills)}\n{number} runs, {left} files that nothing named, all removed by gc", flush=True)
    assert any(kill.kind == WORKER and kill.had_child for kill in kills)
