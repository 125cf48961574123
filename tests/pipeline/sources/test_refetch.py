"""Tests of reading an original record again: the same bytes are the same record, and any other is named."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine.stage import Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import HashedStream
from schemas.errors import ContractError

CONFIG = SourceConfig(paths=("unused",))


def record(url: str, body: str) -> bytes:
    """A WARC response."""
    page = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><body>{body}</body></html>".encode()
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2024-02-22T00:00:00Z\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(page)}\r\n\r\n"
    )
    return head.encode() + page + b"\r\n\r\n"


RECORDS = [record(f"http://example.com/{name}", name * 40) for name in ("one", "two", "six")]
LINES = [json.dumps({"text": f"line {number}", "url": f"http://example.com/{number}"}) for number in range(3)]


def files() -> dict[str, tuple[str, bytes]]:
    """By name the format and content of files with three records each."""
    table = io.BytesIO()
    rows = [json.loads(line) for line in LINES]
    pq.write_table(pa.Table.from_pylist(rows), table, row_group_size=2)
    lines = "\n".join(LINES).encode() + b"\n"
    return {
        "a.warc": ("warc", b"".join(RECORDS)),
        "a.warc.gz": ("warc", b"".join(gzip.compress(one) for one in RECORDS)),
        "a.jsonl": ("jsonl", lines),
        "a.jsonl.gz": ("jsonl", gzip.compress(lines)),
        "a.parquet": ("parquet", table.getvalue()),
    }


def read(folder: Path, name: str) -> tuple[Split, list[dict[str, Any]]]:
    """A split and its rows, as the source stage makes them."""
    kind, data = files()[name]
    path = folder / name
    path.write_bytes(data)
    split = Split(0, name, str(path), len(data), "", "web", kind)
    return split, [row for row, _ in open_split(split, HashedStream(io.BytesIO(data)), CONFIG)]


@pytest.mark.parametrize("name", files())
def test_every_record_is_found_again_and_is_the_same(tmp_path: Path, name: str) -> None:
    split, rows = read(tmp_path, name)
    assert len(rows) == 3
    for row, raw, line in zip(rows, RECORDS, LINES, strict=True):
        found = refetch(split, row, CONFIG)
        assert (found.changes, found.offset, found.length) == ((), row["offset"], row["length"])
        expected = {"warc": raw, "jsonl": line.encode() + b"\n", "parquet": b""}[split.format]
        assert found.head == expected


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_another_record_at_its_place_is_named_with_both_sides(tmp_path: Path, name: str) -> None:
    split, rows = read(tmp_path, name)
    found = refetch(split, rows[0] | {"url": "http://example.com/old", "page_bytes": 7}, CONFIG)
    assert found.changes == (
        "url: expected http://example.com/old, got http://example.com/one",
        f"page_bytes: expected 7, got {rows[0]['page_bytes']}",
    )


def test_a_truncated_or_changed_file_is_reported(tmp_path: Path) -> None:
    split, rows = read(tmp_path, "a.warc.gz")
    path = tmp_path / "a.warc.gz"
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    (change,) = refetch(split, rows[2], CONFIG).changes
    length, offset = rows[2]["length"], rows[2]["offset"]
    assert change == f"length: expected {length} bytes from {offset} on, got {length - 9}"
    path.write_bytes(b"\0" * len(data))
    assert refetch(split, rows[1], CONFIG).changes == (f"expected a record at {rows[1]['offset']}, got bytes of none",)
    path.unlink()
    with pytest.raises(ContractError, match=f"expected a readable record at offset {offset}, got .*Restore the file"):
        refetch(split, rows[2], CONFIG)
