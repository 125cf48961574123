"""The folder in which `penstock repair` builds tables again: it is deleted only if a repair has written all of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.garbage import LEFT_PART, REPAIR, find_garbage
from pipeline.repair import delete_scratch, repair, steps_to_repair
from schemas.errors import ConfigError
from schemas.storage import Store
from tests.support.tiny_dataset import make_tiny_dataset

LEFT = "repair/clean/part-00000-0123456789ab.parquet"


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run with what a killed repair left."""
    run = make_tiny_dataset(tmp_path / "run", {"web": 20})
    run.write_atomic(LEFT, b"left")
    return run


@pytest.mark.parametrize(
    "other", ["run.json", "notes.txt", "tables/part-0.parquet", "clean/run.json", "inner/run.json"]
)
def test_a_folder_with_other_files_is_refused_before_anything_is_deleted(run: Store, other: str) -> None:
    run.write_atomic(f"{REPAIR}/{other}", b'{"tables": {}}')
    calls: list[Any] = [
        lambda: steps_to_repair(cast(Any, SimpleNamespace(steps=[])), run, []),
        lambda: repair(None, cast(Any, None), run, []),
        lambda: delete_scratch(run),
    ]
    for call in calls:
        with pytest.raises(
            ConfigError,
            match=f"run/repair: expected files of a killed `penstock repair` or no such folder, got {other}",
        ):
            call()
    assert run.read_bytes(f"{REPAIR}/{other}") == b'{"tables": {}}'
    assert run.read_bytes(LEFT) == b"left"


def test_what_a_killed_repair_left_is_deleted(run: Store) -> None:
    assert steps_to_repair(cast(Any, SimpleNamespace(steps=[])), run, []) == []
    delete_scratch(run)
    assert not run.exists(REPAIR)
    delete_scratch(run)


def test_garbage_is_what_a_repair_writes(run: Store) -> None:
    run.write_atomic(f"{REPAIR}/notes.txt", b"mine")
    assert {each.path: each.why for each in find_garbage(run)} == {LEFT: LEFT_PART}
