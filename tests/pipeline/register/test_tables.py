"""Which tables of a run can be registered, and the errors that name what is wrong."""

import shutil
from pathlib import Path

import pytest

from pipeline.register.tables import check_files, parquet_tables
from schemas.errors import ConfigError, ContractError
from schemas.manifest import RunFile, open_table, read_run, write_run
from schemas.storage import Store
from tests.support.registered import OLDER_RUN, TABLES
from tests.support.report_run import make_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import take_down


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """The synthetic run of 53 records in two parts."""
    return make_run(tmp_path / "run")


def test_tables_come_in_their_order(run: Store) -> None:
    assert tuple(table.name for table in parquet_tables(run)) == TABLES
    assert [table.name for table in parquet_tables(run, ["clean", "text"])] == ["text", "clean"]


def test_a_table_names_its_files(run: Store) -> None:
    folder, manifest = open_table(run, "clean")
    (table,) = parquet_tables(run, ["clean"])
    assert table.digest == manifest.digest
    assert [file.rows for file in table.files] == [entry.rows for entry in manifest.content.files]
    assert [file.location for file in table.files] == [f"file://{folder.path(path)}" for path in manifest.paths_of()]
    assert table.schema.field("text").metadata[b"meaning"].startswith(b"text after cuts")


def test_after_a_takedown_files_lie_in_several_versions(tmp_path: Path) -> None:
    shutil.copytree(OLDER_RUN, tmp_path / "run")
    take_down(tmp_path / "run", domain=["site1.example.com"])
    (table,) = parquet_tables(Store(str(tmp_path / "run")), ["clean"])
    assert [file.name for file in table.files] == ["v-a795d0a5266e/part-00000-b63a7cd58400.parquet"]
    assert table.files[0].location == f"file://{tmp_path}/run/clean/{table.files[0].name}"
    check_files(table)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cleen", r"expected a table whose files are Parquet, got 'cleen' \(did you mean 'clean'\?\)\. Correct"),
        ("tokens", r"expected a table whose files are Parquet, got 'tokens'"),
        ("scores", r"expected a table whose files are Parquet, got 'scores'"),
    ],
)
def test_a_wrong_name_is_refused(run: Store, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parquet_tables(run, [name])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a run folder, got one without run\.json"):
        parquet_tables(Store(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"expected a run folder, got no such folder"):
        parquet_tables(Store(str(tmp_path / "none")))


def test_a_run_without_tables_is_refused(tmp_path: Path) -> None:
    write_run(Store(str(tmp_path / "run")), RunFile())
    with pytest.raises(ContractError, match=r"got an empty run. Run `penstock run`."):
        parquet_tables(Store(str(tmp_path / "run")))
    with pytest.raises(ContractError, match=r"expected a table 'documents', got \['tokenizer', 'tokens'\]"):
        parquet_tables(make_tiny_dataset(tmp_path / "tokens"))


def test_tables_of_a_run_that_is_not_complete_are_refused(run: Store, tmp_path: Path) -> None:
    """A command with other settings has built `documents` again and ended."""
    other = make_run(tmp_path / "other", figures={"documents": {"more": 1}})
    shutil.copytree(other.path("documents/v-0000000071a9"), run.path("documents/v-0123456789ab"))
    state = read_run(run)
    write_run(run, RunFile(tables=state.tables | {"documents": "v-0123456789ab"}, recipe=state.recipe))
    assert [table.name for table in parquet_tables(run, ["documents"])] == ["documents"]
    with pytest.raises(ConfigError, match=r"up to date, got clean, made from tables that have changed since. Run"):
        parquet_tables(run, ["clean"])
    with pytest.raises(ConfigError, match=r"up to date, got .*verdicts, .*clean, made from"):
        parquet_tables(run)


def test_missing_and_cut_files_are_refused(run: Store) -> None:
    (table,) = parquet_tables(run, ["clean"])
    path = Path(table.version.path(table.files[1].path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ContractError, match=r"got a file of \d+ bytes. Run `penstock repair "):
        check_files(table)
    path.unlink()
    with pytest.raises(ContractError, match=r"got no such file. Run `penstock repair "):
        check_files(table)
