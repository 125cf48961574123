"""Tests of runs that stand on the tables of other runs: `attach`, and the way up that a store takes."""

from pathlib import Path

import pytest
from tiny_dataset import make_tiny_dataset

from schemas.errors import ConfigError
from schemas.manifest import RunFile, read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import attach


def test_an_attached_run_reads_the_other_ones_dataset_wherever_both_are_moved(tmp_path: Path) -> None:
    run = Store(str(tmp_path / "run"))
    make_tiny_dataset(tmp_path / "run")
    new = run.child("ladder/small")
    attach(new, run)
    assert open_dataset(new).digest == open_dataset(run).digest
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = Store(str(tmp_path / "moved/ladder/small"))
    assert open_dataset(moved).digest == open_dataset(Store(str(tmp_path / "moved"))).digest


def test_what_stands_is_not_attached_over(tmp_path: Path) -> None:
    run, new = Store(str(tmp_path / "run")), Store(str(tmp_path / "new"))
    write_run(run, RunFile(tables={"clean": "v-1", "tokens": "v-2"}, recipe={"train": {"seq_len": 8}}))
    attach(new, run, ["tokens"])
    assert read_run(new) == RunFile(tables={"tokens": "../../run/tokens/v-2"}, recipe={"train": {"seq_len": 8}})
    with pytest.raises(ConfigError, match="found a run"):
        attach(new, run)


def test_a_store_goes_up_on_object_stores_too(tmp_path: Path) -> None:
    here = Store(f"file://{tmp_path}/run/tokens")
    assert here.child("../../other/v-1").uri == f"file://{tmp_path}/other/v-1"
    assert here.path("v-2/../../x.json") == f"{tmp_path}/run/x.json"
    assert Store("mock:///bucket/run/tokens").child("../clean/v-1").uri == "mock:///bucket/run/clean/v-1"
