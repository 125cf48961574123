"""Parts read side by side: same documents, same order, whatever the batches; others are refused."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine.parquet import apply_cuts, read_measured
from schemas.errors import ContractError
from schemas.storage import Store
from tests.support.checked_paths import written_part


def ids(*numbers):
    return pa.array([bytes([number]) * 16 for number in numbers], pa.binary(16))


def part(folder, tables):
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=3)
    return written_part(0, dict.fromkeys(tables, Store(str(folder))), {name: f"{name}.parquet" for name in tables})


DOCUMENTS = {
    "doc_id": ids(1, 2, 3, 4, 5),
    "language": ["en", "de", None, "en", "fr"],
    "drop_stage": [None, None, "source", None, None],
}
VERDICTS = {"doc_id": ids(1, 2, 4, 5), "drop_stage": ["quality", None, None, "quality"]}
TEXT = {"doc_id": ids(1, 2, 3, 4, 5), "text": list("abcde")}


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 100])
def test_measured_documents_meet_their_rows_in_other_tables(tmp_path, rows_at_once):
    whole = part(tmp_path, {"documents": DOCUMENTS, "verdicts": VERDICTS, "text": TEXT})
    columns = {"documents": ["language"], "verdicts": ["drop_stage"], "text": ["text"]}
    rows = [row for batch in read_measured(whole, columns, rows_at_once) for row in batch.to_pylist()]
    assert [(row["doc_id"][0], row["language"], row["drop_stage"], row["text"]) for row in rows] == [
        (1, "en", "quality", "a"),
        (2, "de", None, "b"),
        (4, "en", None, "d"),
        (5, "fr", "quality", "e"),
    ]


def test_a_column_of_two_tables_keeps_its_table_name(tmp_path):
    whole = part(tmp_path, {"documents": DOCUMENTS, "verdicts": VERDICTS, "dedup": VERDICTS})
    (batch,) = read_measured(whole, {"dedup": ["drop_stage"], "verdicts": ["drop_stage"]})
    assert batch.schema.names == ["doc_id", "drop_stage", "verdicts.drop_stage"]


@pytest.mark.parametrize("numbers", [(1, 2, 4), (1, 2, 4, 5, 6), (1, 2, 5, 4), ()])
def test_tables_of_other_documents_are_refused(tmp_path, numbers):
    other = {"doc_id": ids(*numbers), "drop_stage": pa.array([None] * len(numbers), pa.string())}
    whole = part(tmp_path, {"documents": DOCUMENTS, "verdicts": other})
    with pytest.raises(ContractError, match="part-00000: expected the same documents in `documents` and `verdicts`"):
        list(read_measured(whole, {"verdicts": ["drop_stage"]}))


def test_a_part_without_measured_documents_has_no_rows(tmp_path):
    none = {"doc_id": ids(1), "drop_stage": ["source"]}
    empty = {"doc_id": ids(), "drop_stage": pa.array([], pa.string())}
    assert (
        list(read_measured(part(tmp_path, {"documents": none, "verdicts": empty}), {"verdicts": ["drop_stage"]})) == []
    )


def test_cuts_are_taken_out_of_a_text():
    assert apply_cuts("abcdef", [{"start": 0, "end": 1}, {"start": 3, "end": 5}]) == "bcf"
    assert apply_cuts("abc", []) == "abc"
