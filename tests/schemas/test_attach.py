"""Tests of runs that are attached to the tables of other runs: `attach_run`, and parent folders of a store."""

from pathlib import Path

import pytest

from jobs.cli import main
from schemas.errors import ConfigError
from schemas.manifest import RunFile, read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import attach_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import make_run
from train.plan.plan import read_plan


def test_an_attached_run_reads_the_other_dataset_after_both_are_moved(tmp_path: Path) -> None:
    run = Store(str(tmp_path / "run"))
    make_tiny_dataset(tmp_path / "run")
    new = run.child("ladder/small")
    attach_run(new, run)
    assert open_dataset(new).digest == open_dataset(run).digest
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = Store(str(tmp_path / "moved/ladder/small"))
    assert open_dataset(moved).digest == open_dataset(Store(str(tmp_path / "moved"))).digest


def test_an_existing_run_is_not_attached_again(tmp_path: Path) -> None:
    run, new = Store(str(tmp_path / "run")), Store(str(tmp_path / "new"))
    write_run(run, RunFile(tables={"clean": "v-1", "tokens": "v-2"}, recipe={"train": {"seq_len": 8}}))
    attach_run(new, run, ["tokens"])
    assert read_run(new) == RunFile(tables={"tokens": "../../run/tokens/v-2"}, recipe={"train": {"seq_len": 8}})
    with pytest.raises(ConfigError, match=r"expected a new run folder, got an existing run\. Name another folder\."):
        attach_run(new, run)


def test_a_store_reaches_parent_folders_on_object_stores_too(tmp_path: Path) -> None:
    here = Store(f"file://{tmp_path}/run/tokens")
    assert here.child("../../other/v-1").uri == f"file://{tmp_path}/other/v-1"
    assert here.path("v-2/../../x.json") == f"{tmp_path}/run/x.json"
    assert Store("mock:///bucket/run/tokens").child("../clean/v-1").uri == "mock:///bucket/run/clean/v-1"


def test_a_plan_on_the_dataset_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = make_run(tmp_path / "run", {"source": {"paths": ["x"]}}), tmp_path / "other"
    make_tiny_dataset(other, seed=1)
    new = tmp_path / "trained/next"
    assert main(["plan", str(new), "--dataset", str(run), "--dry-run"]) == 0
    assert not new.exists()
    assert main(["plan", str(new), "--dataset", str(run), "--set", "train.steps=7"]) == 0
    plan = read_plan(Store(str(new)))
    assert (plan.dataset, plan.steps) == (open_dataset(Store(str(run))).digest, 7)
    assert main(["plan", str(new), "--dataset", str(run), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["plan", str(new), "--dataset", str(other)]) == 2
    assert "Name another run folder." in capsys.readouterr().err
    assert not (run / "train").exists()
