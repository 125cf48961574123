"""The keep order as bytes: sorting the bytes sorts the documents by the rules, on real and missing values."""

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keep_order import (
    EARLIER,
    NODE_BYTES,
    binary_array,
    nodes,
    order_bytes,
    order_columns,
    orders,
    rows_of_bytes,
)


def batch(rows: list[dict]) -> pa.RecordBatch:
    schema = pa.schema(
        [
            pa.field("doc_id", pa.binary(16)),
            pa.field("source", pa.string()),
            pa.field("snapshot", pa.string()),
            pa.field("date", pa.timestamp("ms", tz="UTC")),
            pa.field("num_bytes", pa.int64()),
            pa.field("gopher_stop_words", pa.int32()),
            pa.field("language_score", pa.float32()),
        ]
    )
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def ranking(rows: list[dict], *keep: str, **settings) -> list[int]:
    """Return the indices of the rows, best first."""
    config = DedupConfig(keep=keep, **settings)
    encoded = orders(batch([{"doc_id": name(index), **row} for index, row in enumerate(rows)]), 3, config)
    assert encoded.shape == (len(rows), order_bytes(config))
    return sorted(range(len(rows)), key=lambda index: encoded[index].tobytes())


def day(number: int, year: int = 2024) -> datetime:
    return datetime(year, 1, number, tzinfo=UTC)


@pytest.mark.parametrize(
    ("column", "values", "keep", "expected"),
    [
        ("num_bytes", [7, 300, 256, 70_000_000_000], "longest", [3, 1, 2, 0]),
        ("num_bytes", [7, 300, 256, 70_000_000_000], "shortest", [0, 2, 1, 3]),
        ("date", [day(2), None, day(1), day(1, 1960)], "earliest", [3, 2, 0, 1]),
        ("date", [day(2), None, day(1), day(1, 1960)], "latest", [0, 2, 3, 1]),
        ("snapshot", ["CC-MAIN-2024-10", "CC-MAIN-2023-50", None], "snapshot", [2, 1, 0]),
        ("source", ["web", "wiki", "books", "web"], "source_rank", [1, 0, 3, 2]),
        ("language_score", [0.5, float("nan"), None, -2.0, 0.75], "highest:language_score", [4, 0, 3, 1, 2]),
        ("language_score", [0.5, float("nan"), None, -2.0, 0.75], "lowest:language_score", [3, 0, 4, 1, 2]),
        ("language_score", [0.0, -0.0], "lowest:language_score", [0, 1]),
        ("language_score", [-0.0, 0.0], "highest:language_score", [0, 1]),
    ],
)
def test_bytes_sort_as_the_rules_do(column, values, keep, expected):
    settings = {"source_ranks": ("wiki", "web")} if keep == "source_rank" else {}
    assert ranking([{column: value} for value in values], keep, **settings) == expected


def test_rules_decide_in_turn_and_then_the_smaller_doc_id():
    rows = [{"num_bytes": 5, "date": day(2)}, {"num_bytes": 5, "date": day(1)}, {"num_bytes": 6, "date": day(3)}]
    assert ranking([*rows, rows[1]], "longest", "earliest") == [2, 1, 3, 0]
    assert ranking(rows, "earliest", "longest") == [1, 0, 2]


def test_a_node_is_the_doc_id_and_its_part_and_ends_the_order():
    rows = batch([{"doc_id": name(7), "num_bytes": 1}])
    assert nodes(rows.column("doc_id"), 258)[0].tobytes() == name(7) + b"\0\0\1\2"
    assert orders(rows, 258, DedupConfig(keep=("longest",)))[0, -NODE_BYTES:].tobytes() == name(7) + b"\0\0\1\2"
    assert EARLIER.to_bytes(4, "big") == b"\x80\0\0\0"


def test_columns_are_those_that_the_rules_need():
    config = DedupConfig(keep=("source_rank", "highest:perplexity", "longest", "latest"))
    assert order_columns(config) == {"documents": ["source", "num_bytes", "date"], "scores": ["perplexity"]}


def test_matrices_and_binary_arrays_are_each_other_also_when_sliced():
    rows = np.arange(60, dtype=np.uint8).reshape(5, 12)
    array = binary_array(rows)
    assert array.to_pylist() == [row.tobytes() for row in rows]
    assert (rows_of_bytes(array.slice(2, 2), 12) == rows[2:4]).all()
    fixed = pa.array([row.tobytes() for row in rows], pa.binary(12))
    assert (rows_of_bytes(fixed.slice(1), 12) == rows[1:]).all()
    assert rows_of_bytes(array.slice(5), 12).shape == (0, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": ("newest",)}, r"keep: expected rules of source_rank, .*got 'newest'\. Set dedup\.keep"),
        ({"keep": ("highest:url",)}, "got 'highest:url'"),
        (
            {"threshold": 0.8, "rows": 5},
            r"expected no value if bands or rows are set, got both\. Remove dedup\.threshold\.",
        ),
        ({"near": False, "exact": "off"}, r"got exact = 'off' and near = false\. Set dedup\.near=true\."),
        (
            {"near": False, "rounds": 2, "bands": 3},
            r"near: expected true with bands, rounds, got false, .*remove dedup\.bands, dedup\.rounds\.",
        ),
        ({"blocks": 3}, r"expected more than max_distance = 3, got 3\. Set dedup\.blocks to at least 4\."),
        ({"keep": ("longest",), "source_ranks": ("web",)}, r"got keep = \['longest'\]\. Add 'source_rank'"),
        ({"write_index": True}, "expected keep rules that begin with 'snapshot'"),
        ({"write_index": True, "keep": ("snapshot",), "verify": "jaccard"}, "verify = 'jaccard'"),
        ({"indexes": ("run",), "by_url": "newest"}, "by_url: expected 'off' or 'first' .*got 'newest'"),
        ({"write_index": True, "keep": ("snapshot",), "by_url": "newest"}, "'first' with write_index, .*got 'newest'"),
        (
            {"write_index": True, "keep": ("snapshot",), "by_url": "longest"},
            "with write_index, .*got 'longest'",
        ),
        ({"indexes": ("run",), "scope": ("snapshot",)}, r"scope keeps snapshots apart, got \['snapshot'\]"),
        ({"rehydration": {2: 1}}, r"for size 1 and any larger sizes, got \{2: 1\}"),
        ({"rehydration": {1: 1, 9: 0}}, r"expected 1 to 100 reads .* got \{1: 1, 9: 0\}"),
        ({"rehydration": {1: 1, 9: 101}}, r"expected 1 to 100 reads .* got \{1: 1, 9: 101\}"),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        DedupConfig(**settings)
