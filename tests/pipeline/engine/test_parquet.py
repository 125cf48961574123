"""Part files: equal rows give equal bytes, the digest is that of the file, wrong types are refused by column."""

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine import parquet as writing
from pipeline.engine.parquet import PartWriter
from schemas.errors import ContractError
from schemas.storage import Store

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.string())])


def write(folder, rows):
    with PartWriter(folder, "part-00000", SCHEMA, size_column="text") as writer:
        for row in rows:
            writer.add(row)
    return writer.written


def test_equal_rows_give_equal_bytes_under_other_names(tmp_path):
    folder = Store(str(tmp_path))
    rows = [{"id": i, "text": f"text {i}" if i % 3 else None} for i in range(5000)]
    one, two = write(folder, rows), write(folder, rows)
    assert one.path != two.path
    assert one.sha256 == two.sha256 == hashlib.sha256((tmp_path / one.path).read_bytes()).hexdigest()
    assert one.bytes == (tmp_path / one.path).stat().st_size
    table = pq.read_table(tmp_path / one.path)
    assert table.num_rows == one.rows == 5000
    assert table.to_pylist() == rows


def test_row_groups_are_cut_by_rows_and_by_text_size(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "GROUP_BYTES", 100)
    folder = Store(str(tmp_path))
    entry = write(folder, [{"id": i, "text": "x" * 60} for i in range(5)])
    with pq.ParquetFile(tmp_path / entry.path) as file:
        assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [2, 2, 1]


def test_a_wrong_type_names_the_column(tmp_path):
    folder = Store(str(tmp_path))
    wrong = pytest.raises(ContractError, match="column id: expected int64")
    with wrong, PartWriter(folder, "part-00000", SCHEMA) as writer:
        writer.add({"id": "seven", "text": "x"})
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_block_removes_the_file(tmp_path):
    with pytest.raises(ZeroDivisionError), PartWriter(Store(str(tmp_path)), "part-00000", SCHEMA) as writer:
        writer.add({"id": 1 // 0, "text": "x"})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="expected a finished file"):
        _ = writer.written


def test_no_rows_give_an_empty_table(tmp_path):
    entry = write(Store(str(tmp_path)), [])
    assert pq.read_table(tmp_path / entry.path).schema.equals(SCHEMA)
    assert entry.rows == 0
