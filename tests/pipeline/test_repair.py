"""The folder in which `penstock repair` builds tables again: it is deleted only if a repair has written all of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.garbage import LEFT_PART, REPAIR, find_garbage
from pipeline.repair import delete_scratch, find_damage, own_tables, owners_of, repair, steps_to_repair
from schemas.errors import ConfigError, ContractError
from schemas.manifest import make_manifest, open_table, read_run, write_manifest, write_run
from schemas.storage import Store
from schemas.union import write_union
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


def flip(folder: Store, path: str) -> None:
    data = bytearray(folder.read_bytes(path))
    data[len(data) // 2] ^= 1
    Path(folder.path(path)).write_bytes(data)


def test_damage_of_a_dataset_that_is_out_of_date_is_found(run: Store) -> None:
    """As after `penstock stage clean` with other settings: `run.json` names the dataset, and it can be trained on."""
    how = {"paths": {}, "started": "2026-01-01", "wall_seconds": 1.0, "cpu_seconds": 1.0, "code_version": "0.1.0"}
    content = {"stages": {}, "config": {}, "inputs": [], "files": [], "counts": {"rows_in": 0, "rows_kept": 0}}
    version = "v-0123456789ab"
    write_manifest(run.child(f"clean/{version}"), make_manifest({"table": "clean", **content}, how, "clean"))
    folder, manifest = open_table(run, "tokens")
    read = {"name": "clean", "bytes": 1, "sha256": "0" * 64}
    stale = manifest.model_dump(mode="json")
    stale["content"]["inputs"].append(read)
    write_manifest(folder.child("../v-ba9876543210"), make_manifest(stale["content"], stale["run"], "tokens"))
    Path(folder.child("..").path("v-ba9876543210/manifest.json")).replace(folder.path("manifest.json"))
    state = read_run(run)
    write_run(run, state.model_copy(update={"tables": state.tables | {"clean": version}}))
    assert find_damage(own_tables(run)) == []
    path = manifest.paths_of("web/train")[0]
    flip(folder, path)
    damage = find_damage(own_tables(run))
    assert [(file.table, file.path) for file in damage] == [("tokens", path)]
    with pytest.raises(ContractError, match="expected a recipe with the step that writes tokens, got one that does"):
        steps_to_repair(cast(Any, SimpleNamespace(steps=[])), run, damage)


def test_damage_in_a_member_of_a_union_names_the_run_to_repair(run: Store, tmp_path: Path) -> None:
    second = make_tiny_dataset(tmp_path / "second", {"news": 20}, seed=7)
    union = Store(str(tmp_path / "union"))
    write_union(union, [run, second])
    assert owners_of(union) == [run.uri, second.uri]
    folder, manifest = open_table(second, "tokens")
    flip(folder, manifest.paths_of("news/train")[0])
    damage = find_damage(own_tables(union))
    assert len(damage) == 1
    with pytest.raises(ContractError, match=rf"got files of {second.uri}, .*\. Run `penstock repair {second.uri}`\."):
        steps_to_repair(cast(Any, SimpleNamespace(steps=[])), union, damage)
