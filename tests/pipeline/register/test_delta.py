"""The Delta log of a table: exactly the files of the manifest, by deltalake and by the actions themselves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.register.delta import PROTOCOL, read_log, register_delta
from pipeline.register.tables import Registered, parquet_tables
from schemas.errors import ConfigError, ContractError
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.versions import attach_run
from tests.support.registered import OLDER_RUN, TABLES, rows_of_delta, rows_of_files
from tests.support.report_run import make_run
from tests.support.tiny_takedown import take_down


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """The synthetic run of 53 records in two parts."""
    return make_run(tmp_path / "run")


def register(run: Store, *names: str) -> list[Registered]:
    """What the registration of some tables, or of all, did."""
    return [register_delta(table) for table in parquet_tables(run, names)]


def actions(run: Store, table: str, version: int) -> list[dict[str, Any]]:
    """The actions of a commit."""
    text = Path(run.path(f"{table}/_delta_log/{version:020}.json")).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_table_has_the_rows_of_its_files(run: Store) -> None:
    assert register(run) == [Registered(0, is_changed=True)] * len(TABLES)
    for table in TABLES:
        assert rows_of_delta(run, table) == rows_of_files(run, table), table


def test_the_run_of_an_older_version(tmp_path: Path) -> None:
    shutil.copytree(OLDER_RUN, tmp_path / "run")
    run = Store(str(tmp_path / "run"))
    register(run)
    for table in TABLES:
        assert rows_of_delta(run, table) == rows_of_files(run, table), table


def test_the_first_commit(run: Store) -> None:
    register(run, "clean")
    manifest = open_table(run, "clean")[1]
    info, protocol, metadata, *added = actions(run, "clean", 0)
    assert info["commitInfo"]["operation"] == "CREATE TABLE"
    assert protocol == {"protocol": PROTOCOL}
    columns = {column["name"]: column for column in json.loads(metadata["metaData"]["schemaString"])["fields"]}
    assert columns["doc_id"]["type"] == "binary"
    assert columns["date"]["type"] == "timestamp"
    assert columns["weight"]["type"] == "integer"
    assert columns["length"]["metadata"]["comment"].endswith("add up to the file size [bytes]")
    assert columns["pii_counts"]["type"]["elementType"]["fields"][1]["type"] == "integer"
    assert metadata["metaData"]["configuration"]["penstock.digest"] == manifest.digest
    for entry, action in zip(manifest.content.files, added, strict=True):
        assert action["add"]["path"] == f"v-0000000071a9/{manifest.paths[entry.key]}"
        assert action["add"]["size"] == entry.bytes
        assert json.loads(action["add"]["stats"]) == {"numRecords": entry.rows}


def test_files_that_no_manifest_names_are_not_in_the_table(run: Store) -> None:
    folder, manifest = open_table(run, "clean")
    named = folder.path(next(iter(manifest.paths.values())))
    shutil.copy(named, Path(named).with_name("part-00009-killed.parquet"))
    shutil.copytree(folder.root, Path(folder.root).with_name("v-0123456789ab"))
    register(run, "clean")
    assert rows_of_delta(run, "clean") == rows_of_files(run, "clean")


def test_a_second_registration_writes_nothing(run: Store) -> None:
    register(run, "clean", "verdicts")
    assert register(run, "clean", "verdicts") == [Registered(0, is_changed=False)] * 2
    assert sorted(run.child("clean/_delta_log").names()) == [f"{0:020}.json"]


def test_a_moved_run_is_the_same_table(run: Store, tmp_path: Path) -> None:
    register(run, "clean")
    shutil.move(run.root, tmp_path / "moved")
    moved = Store(str(tmp_path / "moved"))
    assert register(moved, "clean") == [Registered(0, is_changed=False)]
    assert rows_of_delta(moved, "clean") == rows_of_files(moved, "clean")


def test_it_follows_a_takedown(tmp_path: Path) -> None:
    shutil.copytree(OLDER_RUN, tmp_path / "run")
    run = Store(str(tmp_path / "run"))
    register(run)
    before = rows_of_files(run, "verdicts")
    take_down(tmp_path / "run", domain=["site1.example.com"])
    assert register(run, "verdicts") == [Registered(1, is_changed=True)]
    after = rows_of_delta(run, "verdicts")
    assert after == rows_of_files(run, "verdicts")
    assert {*after} < {*before}
    assert [next(iter(action)) for action in actions(run, "verdicts", 1)] == ["commitInfo", "metaData", "remove", "add"]
    text = (tmp_path / "run" / "documents" / "_delta_log" / f"{0:020}.json").read_text()
    assert "site1.example.com" not in text


def test_only_the_digest_changes_where_a_takedown_rewrites_no_file(tmp_path: Path) -> None:
    shutil.copytree(OLDER_RUN, tmp_path / "run")
    run = Store(str(tmp_path / "run"))
    register(run, "clean")
    take_down(tmp_path / "run", domain=["site1.example.com"])
    assert register(run, "clean") == [Registered(1, is_changed=True)]
    assert [next(iter(action)) for action in actions(run, "clean", 1)] == ["commitInfo", "metaData"]
    assert rows_of_delta(run, "clean") == rows_of_files(run, "clean")


def test_vacuum_deletes_no_version(run: Store) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")
    folder, _ = open_table(run, "clean")
    shutil.copytree(folder.root, Path(folder.root).with_name("v-0123456789ab"))
    register(run, "clean")
    table = deltalake.DeltaTable(run.child("clean").uri)
    assert table.vacuum(dry_run=True, full=True) == []
    everything = table.vacuum(dry_run=True, full=True, retention_hours=0, enforce_retention_duration=False)
    assert any("v-0123456789ab" in name for name in everything)


@pytest.mark.parametrize(
    ("number", "text", "message"),
    [
        (2, "{}", "expected every commit from 0 on, got 00000000000000000000.json to 00000000000000000002.json"),
        (1, "not json", "expected a commit of a Delta table"),
        (1, '{"add": {"path": "x"}}', r"expected a commit of a Delta table, got a missing or wrong value \(KeyError"),
        (1, '{"protocol": {"minReaderVersion": 3}}', "of another writer. Delete the folder .*_delta_log and register"),
    ],
)
def test_the_log_of_another_writer_is_refused(run: Store, number: int, text: str, message: str) -> None:
    register(run, "clean")
    Path(run.path(f"clean/_delta_log/{number:020}.json")).write_text(text)
    with pytest.raises(ContractError, match=message):
        register(run, "clean")


def test_an_empty_folder_has_no_state(tmp_path: Path) -> None:
    assert read_log(Store(str(tmp_path / "none"))).version == -1


def test_a_log_behind_a_link_is_not_written(run: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Path(run.path("clean/_delta_log")).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ContractError, match="got a symbolic link to"):
        register(run, "clean")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_tables_of_another_run_are_refused(run: Store, tmp_path: Path) -> None:
    other = Store(str(tmp_path / "other"))
    attach_run(other, run)
    with pytest.raises(ConfigError, match=r"expected tables in the run folder itself, got clean in .*/run/clean"):
        register(other, "clean")


def test_a_type_that_delta_lacks_is_refused(run: Store) -> None:
    (table,) = parquet_tables(run, ["clean"])
    odd = type(table)(**vars(table) | {"schema": pa.schema([("numbers", pa.list_(pa.uint64()))])})
    with pytest.raises(ContractError, match=r"got uint64 in numbers. Leave out the table"):
        register_delta(odd)
