"""The estimate of a run: what it would build, and the cost of an earlier run times the ratio of their inputs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline.engine.stage import Split
from pipeline.forecast import (
    COMPLETE,
    TO_BUILD,
    BuildCost,
    EarlierRun,
    Prices,
    StepPlan,
    describe_run,
    earlier_run,
    plan_steps,
    step_costs,
)
from pipeline.prepare import Prepared, prepare
from schemas.config import build_recipe
from schemas.errors import ConfigError
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.demo_run import RECIPE, SMALL

PRICES = Prices(0.05, 0.02)
DOCUMENTS = BuildCost(rows=10, cpu_seconds=3, task_seconds=4, shuffled_bytes=5, written_bytes=100)
TEXT = BuildCost(rows=10, cpu_seconds=0, task_seconds=0, shuffled_bytes=0, written_bytes=900)
DEDUP = BuildCost(rows=8, cpu_seconds=1, task_seconds=2, shuffled_bytes=50, written_bytes=10)


def prepared(*sizes: int, is_crawl: bool = False) -> Prepared:
    splits = [
        Split(at, f"f{at}", f"/f{at}", size, "", "web", "warc", key=f"f{at}", is_crawl=is_crawl)
        for at, size in enumerate(sizes)
    ]
    return Prepared(build_recipe({}, {}, "test"), (), splits, {})


def test_a_step_costs_as_many_times_as_the_input_is_larger() -> None:
    measured = EarlierRun("small", {"documents": DOCUMENTS, "text": TEXT, "dedup": DEDUP}, 2, 100, False)
    plans = [
        StepPlan("documents", ("documents", "text"), TO_BUILD),
        StepPlan("dedup", ("dedup", "representatives"), COMPLETE),
        StepPlan("repeats", ("repeats",), TO_BUILD),
    ]
    factor = measured.factor(prepared(500, 300))
    assert factor == 8
    costs = step_costs(plans, [measured], [factor])
    assert costs == {"documents": BuildCost(80, 24, 32, 40, 8000)}


def test_pages_of_archives_are_little_work_for_the_jvm() -> None:
    run = prepared(1600, 3200)
    lines = replace(run.splits[1], format="jsonl")
    assert (run.input_bytes, run.jvm_bytes) == (4800, 300)
    assert replace(run, splits=[run.splits[0], lines]).jvm_bytes == 3300


def test_two_runs_show_what_does_not_grow_with_the_input() -> None:
    def run(size: int, **cost: float) -> EarlierRun:
        return EarlierRun(f"of {size}", {"documents": BuildCost(**cost)}, 1, size, False)

    plans = [StepPlan("documents", ("documents", "text"), TO_BUILD), StepPlan("dedup", ("dedup",), TO_BUILD)]
    small = run(100, rows=10, cpu_seconds=13, task_seconds=20, shuffled_bytes=5, written_bytes=30)
    large = run(200, rows=20, cpu_seconds=16, task_seconds=18, shuffled_bytes=20, written_bytes=60)
    factors = [one.factor(prepared(500, 300)) for one in (small, large)]
    expected = BuildCost(rows=80, cpu_seconds=10 + 3 * 8, task_seconds=18 * 4, shuffled_bytes=20 * 4, written_bytes=240)
    assert step_costs(plans, [small, large], factors) == {"documents": expected}
    assert step_costs(plans, [large, small], factors[::-1]) == {"documents": expected}
    assert step_costs(plans, [small, EarlierRun("b", {}, 1, 200, False)], factors) == {}


def test_files_of_a_crawl_count_by_their_number() -> None:
    measured = EarlierRun("small", {}, 3, 2_500_000_000, True)
    assert measured.factor(prepared(*[10**9] * 90, is_crawl=True)) == 30
    other = EarlierRun("small", {}, 3, 2_500_000_000, False)
    assert other.factor(prepared(*[10**9] * 90, is_crawl=True)) == 36


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"text": "Some words of a text."}\n')
    path = tmp_path / "recipe.toml"
    path.write_text(f'[source]\npaths = ["{tmp_path}/a.jsonl"]\n[tokenizer]\nvocab_size = 400\n')
    return path


def test_a_run_without_an_earlier_one_has_no_known_cost(tmp_path: Path, recipe_path: Path) -> None:
    run = prepare(read_recipe(str(recipe_path), []), None)
    text = describe_run(run, Store(str(tmp_path / "run")), (), PRICES)
    assert "documents  to build" in text
    assert "cost: not known. Build a part of the input" in text
    assert "input: 1 file(s), 34 bytes" in text
    assert {plan.state for plan in plan_steps(run, Store(str(tmp_path / "run")))} == {TO_BUILD}
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--like .*none: expected a run with a table documents"):
        earlier_run(Store(str(tmp_path / "none")))


@pytest.mark.spark
def test_a_dry_run_says_what_would_be_built_and_changes_nothing(
    finished: Store, crawl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(finished.root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    words = [f'source.paths=["{crawl}/*.warc.gz"]', *SMALL]
    command = ["run", str(RECIPE), "--out", str(root), "--dry-run", *(f"--set={word}" for word in words)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert TO_BUILD not in text
    assert "why:" not in text
    assert main([*command, "--set=quality.min_words=60", "--core-hour-usd=1000"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^documents +complete$", text, re.MULTILINE)
    assert re.search(r"^verdicts +to build +\d", text, re.MULTILINE)
    assert re.search(r"^  verdicts +quality.min_words: nothing → 60$", text, re.MULTILINE)
    assert re.search(r"^  tokens +it reads verdicts, clean, tokenizer$", text, re.MULTILINE)
    assert re.search(r"^tokens +to build, unless its inputs stay equal +\d", text, re.MULTILINE)
    assert re.search(r"US\$ [\d.]*[1-9]\d* at US\$ 1000 for a core hour", text)
    assert text.endswith(f"estimated from {root}, times 1\n")
    assert main([*command, f"--like={root}", f"--like={root}"]) == 2
    assert "expected two runs on inputs of different sizes" in capsys.readouterr().err
    assert main([*command, *[f"--like={root}"] * 3]) == 2
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    notes = open_table(finished, "clusters")[1].run.notes
    assert notes["shuffled_bytes"] > 0
    assert notes["task_seconds"] > 0
