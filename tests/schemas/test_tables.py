"""The registry of tables, and columns of values by name: entries are sorted, read back equal, and looked up."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.dedup.index import LEADERS
from pipeline.dedup.keys import KEYS
from pipeline.engine.parquet import PartWriter
from pipeline.inspect.show import JOINED
from pipeline.stages import STEPS
from pipeline.takedown.select import CLUSTERED
from schemas.entries import entries_of, flatten_entries, lookup_entry, to_entries, to_mapping, value_type
from schemas.storage import Store
from schemas.tables import LATER_VERDICTS, TABLES, Table

KIND = entries_of(pa.float32())
ROWS: list[dict[str, float | None] | None] = [{"b": 0.5, "a": 0.25}, None, {}, {"a": None}, {"b": 2.0}, {"é": 1.0}]
COLUMN = pa.array(map(to_entries, ROWS), KIND)


def test_entries_are_sorted_and_come_back_as_they_were() -> None:
    assert to_entries({"b": 1, "é": 3, "a": None, "B": 2}) == [("B", 2), ("a", None), ("b", 1), ("é", 3)]
    assert (to_entries({}), to_entries(None), to_mapping([]), to_mapping(None)) == ([], None, {}, None)
    assert list(map(to_mapping, COLUMN.to_pylist())) == ROWS
    assert COLUMN[0].as_py() == [{"name": "a", "value": 0.25}, {"name": "b", "value": 0.5}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", [0.25, None, None, None, None, None]),
        ("b", [0.5, None, None, None, 2.0, None]),
        ("é", [None] * 5 + [1.0]),
        ("c", [None] * 6),
    ],
)
def test_a_value_is_looked_up_in_any_slice(name: str, expected: list[float | None]) -> None:
    for start in range(7):
        for length in range(7 - start):
            values = lookup_entry(COLUMN.slice(start, length), name)
            assert values.to_pylist() == expected[start : start + length]
            assert values.type == pa.float32()


def test_all_entries_with_their_rows() -> None:
    rows, names, values = flatten_entries(COLUMN.slice(1))
    assert (rows.tolist(), names.to_pylist(), values.to_pylist()) == ([2, 3, 4], ["a", "b", "é"], [None, 2.0, 1.0])


def test_entries_of_a_null_row_are_none() -> None:
    """A null row may cover entries, as a blanked row does."""
    entries = pa.array([("a", 1.0), ("b", 2.0), ("a", 3.0)], KIND.value_type)
    column = pa.ListArray.from_arrays(pa.array([0, 2, 3]), entries, KIND, mask=pa.array([True, False]))
    assert (lookup_entry(column, "a").to_pylist(), flatten_entries(column).rows.tolist()) == ([None, 3.0], [1])


@pytest.mark.parametrize(
    "kind",
    [
        pa.float32(),
        pa.list_(pa.float32()),
        pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32())])),
        pa.list_(pa.struct([("name", pa.string())])),
        pa.list_(pa.struct([("name", pa.string()), ("value", pa.int32()), ("more", pa.int32())])),
    ],
)
def test_other_columns_hold_no_entries(kind: pa.DataType) -> None:
    assert value_type(kind) is None
    assert value_type(KIND) == pa.float32()


def test_the_columns_of_the_tables() -> None:
    """Some columns are written as entries, and no table has a map, which `datasets` rejects."""
    fields = [(table.name, field) for table in TABLES.values() for field in table.schema or ()]
    types = {(name, field.name): value_type(field.type) for name, field in fields if value_type(field.type)}
    assert types == {
        ("documents", "contamination"): pa.int32(),
        ("templates", "contamination"): pa.int32(),
        ("documents", "toxic_word_counts"): pa.int32(),
        ("templates", "toxic_word_counts"): pa.int32(),
        ("scores", "classifier_scores"): pa.float32(),
        ("scores", "importance"): pa.float32(),
        ("clean", "pii_counts"): pa.int32(),
    }
    assert not [field.name for _, field in fields if pa.types.is_map(field.type)]


def test_the_order_in_memory_does_not_change_the_file(tmp_path: Any) -> None:
    schema = pa.schema([("scores", KIND)])
    digests = set()
    for row in ({"a": 1.0, "b": np.float32(2.0)}, {"b": 2.0, "a": 1.0}):
        with PartWriter(Store(str(tmp_path)), "part", schema) as writer:
            for scores in (row, None, {}):
                writer.add({"scores": scores})
        digests.add(writer.written.sha256)
    assert len(digests) == 1


OWN = {
    *("documents", "text", "scores", "verdicts", "clusters", "index", "dedup", "representatives", "audit", "repeats"),
    *("clean", "tokenizer", "tokens"),
}
"""The tables whose properties are known here; a table that is added later is held to the rules alone."""


def columns_of(table: Table) -> set[str]:
    """Return the columns of all kinds of files of a table."""
    return {*KEYS.names, *LEADERS.names} if table.name == "index" else {*(table.schema or pa.schema([])).names}


def test_the_tables_are_those_that_the_steps_write_in_order() -> None:
    assert [*TABLES] == [name for step in STEPS for name in step.writes]
    assert all(name == table.name and table.meaning for name, table in TABLES.items())
    positions = {name: number for number, name in enumerate(TABLES)}
    assert [(step.name, read) for step in STEPS for read in step.reads if positions[read] >= positions[step.name]] == []


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_a_table_has_the_columns_that_its_traits_name(table: Table) -> None:
    assert {*table.ids, *table.blank_keeps, *table.searchable} <= columns_of(table)
    assert not table.describes_documents or table.ids == ("doc_id",)
    assert not table.blank_keeps or table.rows == "record"  # other tables lose the row, which they could not keep
    repeated = columns_of(table) & {*TABLES["documents"].searchable} - {"doc_id"}
    assert table.name == "documents" or not repeated & {*table.searchable}


def test_the_tables_that_each_verb_chooses() -> None:
    others = {"index", "representatives", "audit", "tokenizer", "tokens"}
    assert {name for name in JOINED if name in OWN} == OWN - {"documents", "text"} - others
    assert [name for name in LATER_VERDICTS if name in OWN] == ["verdicts", "dedup", "repeats", "clean"]
    assert [name for name in CLUSTERED if name in OWN] == ["clusters", "dedup"]
    assert {name for name in OWN if TABLES[name].blank_keeps} == {"documents", "text"}
    assert {name for name in OWN if not TABLES[name].ids} == {"representatives", "tokenizer", "tokens"}


def test_no_column_can_be_searched_in_two_tables() -> None:
    names = [name for table in TABLES.values() for name in table.searchable]
    assert len(names) == len({*names})
