"""Tables that an earlier version wrote, without columns that were added since: they are read with nulls."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from jobs.cli import main
from jobs.verbs.browse import open_run_of
from pipeline.browse.rows import judged_batches
from pipeline.dedup.audit.sample import rows_of
from pipeline.engine.parquet import parts_of, read_measured
from pipeline.export.rows import PartRows, open_rows
from pipeline.takedown.select import batches_of
from schemas.errors import ContractError
from schemas.manifest import TableVersion, open_table
from schemas.older_tables import missing_columns, read_batches, read_columns
from schemas.storage import Store
from schemas.tables import DOCUMENTS
from tests.support.lineage_run import record_files
from tests.support.report_run import make_run

ADDED = {
    "documents": ("licence", "meta", "snapshot"),
    "text": ("title",),
    "clean": ("licence", "meta", "weight", "cluster_size", "date"),
}
"""Columns that the tables of an earlier version may lack, by table."""


@pytest.fixture
def older(tmp_path: Path) -> Store:
    """A run whose tables lack some columns."""
    run = make_run(tmp_path / "run")
    for table, names in ADDED.items():
        folder, manifest = open_table(run, table)
        for path in manifest.paths_of():
            rows = pq.read_table(folder.path(path))
            pq.write_table(rows.drop_columns([name for name in names if name in rows.column_names]), folder.path(path))
        record_files(run, table)
    return run


def test_missing_columns_are_null_and_unknown_ones_are_refused(older: Store) -> None:
    folder, manifest = open_table(older, "documents")
    with folder.open_input(manifest.paths_of()[0]) as stream:
        file = pq.ParquetFile(stream)
        assert missing_columns(file, "documents", ["url", "licence"]).names == ["licence"]
        (batch, *_) = read_batches(file, "documents", ["licence", "url"], 5)
        assert batch.num_rows == 5
        assert batch.column("licence").null_count == 5
        assert batch.column("licence").type == DOCUMENTS.field("licence").type
        assert batch.column("url").null_count < 5
        with pytest.raises(ContractError, match=r"documents: expected the column own_score, got a table without it"):
            missing_columns(file, "documents", ["own_score"])


def test_steps_read_measured_documents_of_older_tables(older: Store) -> None:
    tables = {name: TableVersion(*open_table(older, name)) for name in ("documents", "text")}
    for part in parts_of(tables):
        batches = list(read_measured(part, {"documents": ["licence", "language"], "text": ["text"]}))
        rows = pa.Table.from_batches(batches)
        assert rows.num_rows
        assert rows.column("licence").null_count == rows.num_rows
        assert rows.column("text").null_count == 0


def test_every_verb_that_shows_documents_reads_older_tables(
    older: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", older.uri, "--where", "licence is null", "--limit", "2", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == 2
    newer = make_run(tmp_path / "newer")
    for command in (
        ["report", older.uri],
        ["diff", older.uri, newer.uri],
        ["lineage", older.uri],
        ["verify", older.uri],
        ["gc", older.uri, "--dry-run"],
    ):
        assert main(command) == 0, capsys.readouterr().err


def test_every_reader_of_documents_gets_nulls(older: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of an export, of `browse`, of a takedown, of the audit and of the Python API."""
    source = open_rows(older, [], None, {})
    tables = {name: TableVersion(*open_table(older, name)) for name in ("documents", "text", "clean")}
    for part in parts_of(tables):
        rows = PartRows(source, part)
        (exported, *_) = rows.read(0, len(rows.rows))
        assert {exported.column(name).null_count for name in ("licence", "date")} == {exported.num_rows}
        assert rows.counts("licence") == {}
        wanted = pa.array(exported.column("id").to_pylist()[:1])
        ids = pa.array([bytes.fromhex(wanted[0].as_py())], pa.binary(16))
        (found,) = rows_of(part, "clean", ["doc_id", "weight", "text"], ids)
        assert (found.column("weight").null_count, found.num_rows) == (1, 1)
    run = open_run_of(older.uri)
    for batch in judged_batches(run, 0, ["licence"]):
        assert batch.rows.column("licence").null_count == batch.rows.num_rows
    for batch in batches_of(older, "clean", ["doc_id", "licence", "date"]):
        assert batch.schema.names == ["doc_id", "licence", "date"]
        assert batch.column("licence").null_count == batch.num_rows
    run_of_python = penstock.open(older.uri)
    assert {row["title"] for row in run_of_python.documents.select("doc_id", "title").limit(3)} == {None}
    assert main(["takedown", older.uri, "--domain", "nowhere.example", "--dry-run"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("read", ["batches", "columns"])
def test_texts_that_are_not_utf_8_are_one_sentence(tmp_path: Path, read: str) -> None:
    path = str(tmp_path / "part.parquet")
    pq.write_table(pa.table({"url": pa.array([b"a", b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)}), path)
    file = pq.ParquetFile(path)
    call = read_columns if read == "columns" else lambda *values: next(read_batches(*values, 5))
    with pytest.raises(ContractError, match=r"documents: expected valid values, got an error: .* Restore the table"):
        call(file, "documents", ["url"])
