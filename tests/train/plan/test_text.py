"""Tests of train/plan/text.py: nothing of a plan is lost in print, and no line is too long for a terminal."""

import re
from pathlib import Path

import pytest

from jobs.cli import main
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import make_run
from train.config.settings import load_settings
from train.plan.make_plan import make_plan
from train.plan.plan import Plan
from train.plan.rules import SourcedFigure
from train.plan.text import WIDTH, format_value, print_plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("printed")
    make_tiny_dataset(folder)
    run = Store(str(folder))
    raw = {"plan": {"world_sizes": [1, 4]}, "train": {"seq_len": 32, "peak_flops": 1e12}}
    made = make_plan(run, open_dataset(run), load_settings(raw, [], "test"))
    return made.model_copy(update={"advice": ("word " * 60,)})


def test_every_figure_is_printed_with_its_formula_and_source(plan: Plan) -> None:
    text = print_plan(plan)
    plain = " ".join(text.split())
    for figure in plan.figures:
        last = figure.name.split(".")[1 if figure.name.startswith("size.") else -1]
        assert figure.name in plain or last in plain or figure.name in ("memory.1", "memory.4"), figure.name
        assert not figure.name.startswith(("tokens.", "epochs.", "learning_rate")) or figure.name in plain
        counted = figure.source in ("count", "dataset", "recipe", "estimate")
        assert counted or len(re.findall(rf"\[\d+\] {re.escape(figure.source)}(?= \[|  ADVICE| ADVICE)", plain)) == 1
    for figure in plan.figures:
        if not figure.name.startswith(("memory.", "size.")):
            assert f"{format_value(figure)} {figure.unit} {figure.formula}".replace("  ", " ") in plain, figure.name


def test_no_line_is_wider_than_a_terminal(plan: Plan) -> None:
    lines = print_plan(plan).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1].startswith("    word")


def test_numbers_are_printed_as_people_read_them() -> None:
    def one(value: float, unit: str = "") -> str:
        return format_value(SourcedFigure(name="x", value=value, unit=unit, formula="f", source="s"))

    assert [one(1234567), one(80437.2), one(999.4), one(0.0099912)] == ["1,234,567", "80,437", "999", "0.00999"]
    assert one(4.25e11, "FLOPs") == "4.25e+11"


def test_a_dry_run_of_a_plan_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", {"source": {"paths": ["crawl/*.warc.gz"]}})
    before = sorted(run.rglob("*"))
    settings = ["train.packing=best_fit"]
    given = [word for setting in settings for word in ("--set", setting)]
    assert main(["plan", str(run), "--dry-run", *given]) == 0
    assert sorted(run.rglob("*")) == before
    assert "padding.web" in capsys.readouterr().out
    assert main(["plan", str(run), *given]) == 0
    assert (run / PLAN_NAME).exists()
