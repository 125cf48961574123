"""Tables that DuckDB, Dask and Hugging Face `datasets` open as they are: every row and value as pyarrow reads them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pytest

from pipeline.engine.parquet import PartWriter
from schemas.entries import value_type
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.tokens import open_dataset
from tests.pipeline.inspect.test_diff import write_manifest_lineage
from tests.support.lineage_run import join_dataset
from tests.support.report_run import make_run
from tests.support.table_readers import READERS, Files, by_every_reader, check_reader, files_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The synthetic crawl with one dataset."""
    found = make_run(tmp_path_factory.mktemp("readers") / "run")
    join_dataset(found)
    write_manifest_lineage(found)
    return found


def example(kind: pa.DataType, number: int) -> Any:
    """A value of a column's type that no other number has, large enough to be cut by a narrower type."""
    if value_type(kind) is not None:
        return {f"name-{number}": number, "é": None, "a": 2**24}
    if pa.types.is_list(kind):
        return [example(kind.value_type, number + place) for place in range(number)]
    if pa.types.is_struct(kind):
        return {field.name: example(field.type, number) for field in kind}
    if pa.types.is_timestamp(kind):
        return datetime(2026, 1, 1, 23, 59, number, 1000, UTC)
    if pa.types.is_string(kind):
        return f"text {number} \0 ‮ 𝔘"
    if pa.types.is_boolean(kind):
        return number % 2 == 0
    if pa.types.is_floating(kind):
        return number + 0.5
    if pa.types.is_integer(kind):
        return (1 << kind.bit_width - 1) - number
    return bytes([number, 0, 255, 128]) * 4


@by_every_reader
def test_every_column_of_every_table(reader: str, tmp_path: Path) -> None:
    """Rows of extreme values, rows without any, and empty lists, for each schema there is."""
    for table, schema in ((table.name, table.schema) for table in TABLES.values() if table.schema is not None):
        empty = {field.name: {} if value_type(field.type) else [] for field in schema if pa.types.is_list(field.type)}
        with PartWriter(Store(str(tmp_path)), table, schema) as writer:
            for number in (1, 2, 3):
                writer.add({field.name: example(field.type, number) for field in schema})
                writer.add({"doc_id": bytes(16)})
                writer.add({"doc_id": bytes(16), **empty})
        files = Files(table, "parquet", [str(tmp_path / writer.written.path)], 9)
        written = files.read().to_pylist()
        assert READERS[reader](files, tmp_path) == written, table
        for field in schema:
            if value_type(field.type) is not None:
                assert [entry["name"] for entry in written[6][field.name]] == ["a", "name-3", "é"]
                assert [row[field.name] for row in written[1:3]] == [None, []]


@by_every_reader
def test_every_table_of_a_run(reader: str, run: Store, tmp_path: Path) -> None:
    tables = {"documents", "text", "verdicts", "clusters", "dedup", "clean", "tokens"}
    assert check_reader(reader, run, tmp_path) >= tables


def test_duckdb_counts_joins_and_looks_up_names(run: Store) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    paths = {files.table: files.paths for files in files_of(run) if files.kind == "parquet"}
    query = "select drop_rule, count(*) from read_parquet(?) where drop_stage is not null group by all order by all"
    found = dict(duckdb.connect().execute(query, [paths["verdicts"]]).fetchall())
    assert found == {"c4_lorem_ipsum": 1, "gopher_short_doc": 6, "toxic_word_share": 3}
    emails = "select sum(map_from_entries(pii_counts)['email']) from read_parquet(?)"
    assert duckdb.connect().execute(emails, [paths["clean"]]).fetchall() == [(6,)]
    kinds = (
        "select entry.name, sum(entry.value) from (select unnest(pii_counts) as entry from read_parquet(?)) "
        "group by all order by all"
    )
    assert duckdb.connect().execute(kinds, [paths["clean"]]).fetchall() == [("email", 6), ("phone", 3)]
    joined = "select count(*) from read_parquet(?) join read_parquet(?) using (doc_id)"
    rows = sum(entry.rows for entry in open_table(run, "clean")[1].content.files)
    assert duckdb.connect().execute(joined, [paths["documents"], paths["clean"]]).fetchall() == [(rows,)]


def test_shards_are_datasets_of_token_lists(run: Store, tmp_path: Path) -> None:
    """Of one stream: by pyarrow, by DuckDB through it, by `datasets`."""
    dataset = open_dataset(run)
    paths = [dataset.folder.path(shard.path) for shard in dataset.streams["web/train"]]
    tokens = pads.dataset(paths, format="ipc")
    total = dataset.num_tokens()["web"]
    assert sum(map(len, tokens.to_table().column("tokens").to_pylist())) == total
    files = Files("tokens", "arrow", paths, tokens.count_rows())
    for reader in ("duckdb", "datasets"):
        assert sum(len(row["tokens"]) for row in READERS[reader](files, tmp_path)) == total
