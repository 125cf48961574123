"""The lists of records that the index of a crawl names: what no index of records has is one sentence."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.steps.crawl_files import IndexQuery, _write_list, index_rows
from schemas.errors import ContractError
from schemas.storage import Store

ARCHIVE = "crawl-data/CC-MAIN-2024-10/segments/1/warc/0.warc.gz"
QUERY = IndexQuery("fetch_status = 200", {ARCHIVE: 0}, 1)


def write(folder: Path, offsets: list[Any], lengths: list[Any], kind: pa.DataType) -> None:
    """Write an index of records of one archive, and the list of them."""
    columns = {"warc_filename": [ARCHIVE] * len(offsets), "fetch_status": pa.array([200] * len(offsets), pa.int16())}
    columns |= {"warc_record_offset": pa.array(offsets, kind), "warc_record_length": pa.array(lengths, kind)}
    pq.write_table(pa.table(columns), folder / "index.parquet")
    _write_list((Store(str(folder)), "list.parquet"), index_rows(QUERY, str(folder / "index.parquet")), False)


def test_records_one_after_another_are_listed(tmp_path: Path) -> None:
    write(tmp_path, [9, 0], [5, 9], pa.int32())
    assert pq.read_table(tmp_path / "list.parquet").num_rows == 2


@pytest.mark.parametrize(
    ("offsets", "lengths", "kind", "message"),
    [
        ([None, 0], [5, 9], pa.int32(), "an index with offset and length of each record, got records without"),
        ([5, 0], [None, 4], pa.int32(), "an index with offset and length of each record, got records without"),
        ([0, 3], [9, 9], pa.int32(), "an index with records one after another"),
        ([-1], [9], pa.int32(), "an index with records one after another"),
        ([0.5], [9.5], pa.float64(), "whole numbers in warc_record_offset and warc_record_length, got others"),
        (["x"], ["y"], pa.string(), "whole numbers in warc_record_offset and warc_record_length, got others"),
    ],
)
def test_an_index_of_other_values(
    tmp_path: Path, offsets: list[Any], lengths: list[Any], kind: pa.DataType, message: str
) -> None:
    with pytest.raises(ContractError, match=f"expected {message}"):
        write(tmp_path, offsets, lengths, kind)
