"""Part files: equal rows give equal bytes, the digest is that of the file, wrong types are refused by column."""

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine import parquet as writing
from pipeline.engine.parquet import PartWriter, read_measured, without_templates
from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tables import DOCUMENTS, TEMPLATES, TEXT
from tests.support.checked_paths import written_part

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


def test_row_groups_are_cut_by_the_size_of_other_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "GROUP_CHARS", 100)
    schema = SCHEMA.append(pa.field("url", pa.string())).append(pa.field("meta", pa.string()))
    with PartWriter(Store(str(tmp_path)), "part-00000", schema, size_column="text") as writer:
        for number in range(5):
            writer.add({"id": number, "text": "x" * 90, "url": "u" * 40, "meta": "m" * 20})
    with pq.ParquetFile(tmp_path / writer.written.path) as file:
        assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [2, 2, 1]


def test_row_groups_of_a_long_part_grow_so_that_its_metadata_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "GROUP_ROWS", 2)
    monkeypatch.setattr(writing, "GROUPS_OF_A_SIZE", 3)
    entry = write(Store(str(tmp_path)), [{"id": i, "text": "x"} for i in range(3 * (2 + 4 + 8) + 16 + 16 + 5)])
    with pq.ParquetFile(tmp_path / entry.path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        assert file.read().column("id").to_pylist() == [*range(sum(sizes))]
    assert sizes == [2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 5]


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


# Columns that the table `templates` replaces.

NEW = {"doc_id", "num_chars", "text_cuts", "template_chars", "gopher_num_words"}


def replaced_part(tmp_path):
    """Four documents, of which the second was dropped; from the last one templates were cut."""
    store = Store(str(tmp_path))
    ids = [number.to_bytes(16, "big") for number in range(4)]
    tables = {
        "documents": (
            DOCUMENTS,
            [{"num_chars": 10 * n, "drop_stage": "extract" if n == 1 else None} for n in range(4)],
        ),
        "text": (TEXT, [{"text": "a" * 10 * n, "cuts": [{"start": n, "end": n + 1}]} for n in range(4)]),
        "templates": (
            pa.schema([column for column in TEMPLATES if column.name in NEW]),
            [
                {"template_chars": None},
                {"template_chars": 0},
                {"template_chars": 4, "num_chars": 26, "text_cuts": [(0, 4)]},
            ],
        ),
    }
    paths = {}
    for name, (schema, rows) in tables.items():
        chosen = ids if name != "templates" else [ids[0], *ids[2:]]
        with PartWriter(store.child(name), "part-00000", schema) as writer:
            for identifier, row in zip(chosen, rows, strict=True):
                writer.add({"doc_id": identifier} | row)
        paths[name] = writer.written.path
    return written_part(0, {name: store.child(name) for name in paths}, paths), ids


def test_values_without_templates_replace_those_of_documents_and_text(tmp_path):
    part, _ = replaced_part(tmp_path)
    columns = {"documents": ["num_chars", "url"], "text": ["cuts", "text"], "templates": ["template_chars"]}
    (batch,) = read_measured(part, columns)
    assert batch.schema.names == ["doc_id", "num_chars", "url", "cuts", "text", "template_chars"]
    assert batch.column("num_chars").to_pylist() == [0, 20, 26]
    spans = [[(cut["start"], cut["end"]) for cut in cuts] for cuts in batch.column("cuts").to_pylist()]
    assert spans == [[(0, 1)], [(2, 3)], [(0, 4)]]
    assert [len(text) for text in batch.column("text").to_pylist()] == [0, 20, 30]
    assert batch.column("template_chars").to_pylist() == [None, 0, 4]
    (narrow,) = read_measured(part, {"text": ["cuts"]})
    assert narrow.schema.names == ["doc_id", "cuts"]
    assert narrow.column("cuts") == batch.column("cuts")
    (counts,) = read_measured(part, {"documents": ["url"], "templates": ["gopher_num_words"]})  # nothing is replaced
    assert counts.schema.names == ["doc_id", "url", "gopher_num_words"]
    without = written_part(0, part.folders, {name: path for name, path in part.paths.items() if name != "templates"})
    (before,) = read_measured(without, {"documents": ["num_chars"]})
    assert before.column("num_chars").to_pylist() == [0, 20, 30]


def test_single_rows_have_the_same_values_in_any_order(tmp_path):
    part, ids = replaced_part(tmp_path)
    rows = pa.RecordBatch.from_pydict(
        {"doc_id": pa.array([ids[3], ids[0], ids[1]], pa.binary(16)), "num_chars": pa.array([30, 0, 10])}
    )
    assert without_templates(part, "documents", rows).column("num_chars").to_pylist() == [26, 0, 10]
    texts = pa.RecordBatch.from_pydict({"doc_id": pa.array(ids[:1], pa.binary(16)), "text": ["a"]})
    assert without_templates(part, "text", texts) is texts
    assert without_templates(part, "documents", rows.slice(0, 0)).num_rows == 0
