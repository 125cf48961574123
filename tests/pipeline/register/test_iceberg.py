"""The metadata of Iceberg over a table: exactly the files of the manifest, as pyiceberg reads them."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.register.iceberg import register_iceberg
from pipeline.register.tables import ParquetTable, Registered, parquet_tables
from schemas.errors import ConfigError, ContractError
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.versions import attach_run
from tests.support.registered import (
    OLDER_RUN,
    TABLES,
    iceberg_table,
    rows_of_files,
    rows_of_iceberg,
    without_null_lists,
)
from tests.support.report_run import make_run
from tests.support.tiny_takedown import take_down

pytest.importorskip("pyiceberg.catalog.memory", reason="pyiceberg is not installed: pip install 'penstock[register]'")


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """The synthetic run of 53 records in two parts."""
    return make_run(tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Store:
    """The folder of the metadata, which does not exist yet."""
    return Store(str(tmp_path / "iceberg"))


def register(run: Store, out: Store, *names: str) -> list[Registered]:
    """What the registration of some tables, or of all, did."""
    return [register_iceberg(table, out) for table in parquet_tables(run, names)]


def changed(table: ParquetTable, schema: pa.Schema) -> ParquetTable:
    """A table without files and with other columns, as a later version of penstock may write it."""
    return ParquetTable(**vars(table) | {"schema": schema, "files": (), "digest": "0" * 64})


def test_every_table_has_the_rows_of_its_files(run: Store, out: Store) -> None:
    assert register(run, out) == [Registered(1, is_changed=True)] * len(TABLES)
    for table in TABLES:
        # pyiceberg reads an absent list of entries as an empty one; rows without such lists are equal as they are
        rows, files = rows_of_iceberg(out, table), rows_of_files(run, table)
        assert without_null_lists(rows) == without_null_lists(files), table
        assert rows == files or table in ("documents", "text", "clean")


def test_the_run_of_an_older_version(tmp_path: Path, out: Store) -> None:
    shutil.copytree(OLDER_RUN, tmp_path / "run")
    run = Store(str(tmp_path / "run"))
    register(run, out)
    for table in TABLES:
        assert without_null_lists(rows_of_iceberg(out, table)) == without_null_lists(rows_of_files(run, table)), table


def test_the_metadata(run: Store, out: Store) -> None:
    register(run, out, "clean")
    folder, manifest = open_table(run, "clean")
    table = iceberg_table(out, "clean")
    assert sorted(out.child("clean/metadata").names())[-2:] == ["v1.metadata.json", "version-hint.text"]
    assert table.format_version == 2
    assert table.properties["penstock.digest"] == manifest.digest
    assert table.properties["gc.enabled"] == "false"
    assert str(table.schema().find_type("doc_id")) == "fixed[16]"
    assert table.schema().find_field("text").doc.startswith("text after cuts")
    mapped = [field["names"] for field in json.loads(table.properties["schema.name-mapping.default"])]
    assert mapped[0] == ["doc_id"]
    files = {task.file.file_path: task.file for task in table.scan().plan_files()}
    assert {*files} == {f"file://{folder.path(path)}" for path in manifest.paths.values()}
    for entry in manifest.content.files:
        file = files[f"file://{folder.path(manifest.paths[entry.key])}"]
        assert (file.record_count, file.file_size_in_bytes) == (entry.rows, entry.bytes)
        assert not file.lower_bounds
        assert not file.upper_bounds


def test_files_that_no_manifest_names_are_not_in_the_table(run: Store, out: Store) -> None:
    folder, manifest = open_table(run, "verdicts")
    named = Path(folder.path(next(iter(manifest.paths.values()))))
    shutil.copy(named, named.with_name("part-00009-killed.parquet"))
    register(run, out, "verdicts")
    assert rows_of_iceberg(out, "verdicts") == rows_of_files(run, "verdicts")


def test_a_second_registration_writes_nothing(run: Store, out: Store) -> None:
    register(run, out, "clean", "verdicts")
    before = sorted(out.walk())
    assert register(run, out, "clean", "verdicts") == [Registered(1, is_changed=False)] * 2
    assert sorted(out.walk()) == before


def test_it_follows_a_takedown(tmp_path: Path, out: Store) -> None:
    shutil.copytree(OLDER_RUN, tmp_path / "run")
    run = Store(str(tmp_path / "run"))
    register(run, out)
    take_down(tmp_path / "run", domain=["site1.example.com"])
    assert {each.version for each in register(run, out)} == {2}
    for table in ("verdicts", "clusters", "dedup", "audit"):
        assert rows_of_iceberg(out, table) == rows_of_files(run, table), table
        operations = [each.summary.operation.value for each in iceberg_table(out, table).snapshots()]
        assert operations == ["append", "overwrite"]
    assert len(iceberg_table(out, "clean").snapshots()) == 1  # its files are the same, its digest is another


def test_it_follows_a_moved_run(run: Store, out: Store, tmp_path: Path) -> None:
    register(run, out, "verdicts")
    shutil.move(run.root, tmp_path / "moved")
    moved = Store(str(tmp_path / "moved"))
    assert register(moved, out, "verdicts") == [Registered(2, is_changed=True)]
    assert rows_of_iceberg(out, "verdicts") == rows_of_files(moved, "verdicts")


def test_columns_are_added_and_removed(run: Store, out: Store) -> None:
    (table,) = parquet_tables(run, ["verdicts"])
    register_iceberg(table, out)
    columns = [*(column for column in table.schema if column.name != "drop_limit"), pa.field("added", pa.int32())]
    assert register_iceberg(changed(table, pa.schema(columns)), out) == Registered(2, is_changed=True)
    assert "added" in iceberg_table(out, "verdicts").schema().column_names
    assert "drop_limit" not in iceberg_table(out, "verdicts").schema().column_names
    assert register_iceberg(table, out) == Registered(3, is_changed=True)
    assert rows_of_iceberg(out, "verdicts") == rows_of_files(run, "verdicts")


def test_tables_of_another_run_are_registered_where_they_are(run: Store, out: Store, tmp_path: Path) -> None:
    other = Store(str(tmp_path / "other"))
    attach_run(other, run)
    register(other, out, "verdicts")
    assert rows_of_iceberg(out, "verdicts") == rows_of_files(run, "verdicts")


def test_the_folder_of_another_table_is_refused(run: Store, out: Store, tmp_path: Path) -> None:
    register(run, out, "clean")
    shutil.move(out.root, tmp_path / "moved")
    with pytest.raises(ConfigError, match="expected a table that was registered in this folder, got one of file://"):
        register(run, Store(str(tmp_path / "moved")), "clean")


def test_a_damaged_hint_is_refused(run: Store, out: Store) -> None:
    register(run, out, "clean")
    Path(out.path("clean/metadata/version-hint.text")).write_text("7")
    with pytest.raises(ContractError, match=r"expected the number of a version, got '7'. Delete the folder"):
        register(run, out, "clean")


def test_a_path_that_is_no_location_is_refused(run: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a path without # \? %, got # in .*/a#b/clean. Rename"):
        register(run, Store(str(tmp_path / "a#b")), "clean")
