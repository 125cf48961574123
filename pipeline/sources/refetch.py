"""The original record of a document, read again by its byte range and compared with what was recorded of it.

The bytes pass through the source stage once more, so whatever it would now say of them is compared: record type, URL,
date, status, media type, size of the page.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.engine.stage import Row, Split
from pipeline.sources.compression import FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import open_split
from pipeline.sources.splits import HashedStream
from pipeline.sources.warc import RECORD_STARTS, DecodedWindow
from schemas.errors import ContractError
from schemas.storage import resolve_uri

COMPARED_COLUMNS = ("record_type", "url", "date", "http_status", "mime", "page_bytes")
HEAD_BYTES = 2000
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class RefetchedRecord:
    """A record as it lies there now."""

    uri: str
    """The file it was read from."""
    offset: int
    """Where it begins, in the unit of its table [bytes, or rows]."""
    length: int
    """Its length in the same unit."""
    changes: tuple[str, ...]
    """Everything in which it is another record than the one that was recorded; empty = the same."""
    head: bytes
    """Its first bytes as the crawler wrote them, decompressed. RAW: may hold personal data."""


def refetch(split: Split, recorded: Mapping[str, Any], config: SourceConfig) -> RefetchedRecord:
    """The record of a document in its file, read again; `recorded` is the document's row, with offset and length.

    Raises ContractError if the file cannot be read.
    """
    offset, length = int(recorded["offset"]), int(recorded["length"])
    try:
        fs, path = resolve_uri(split.uri)
        data = _read(fs, path, split, offset, length)
    except (OSError, pa.ArrowException) as error:
        raise ContractError(f"{split.uri}: expected the record at {offset}, got {error}. Restore the file.") from error
    rows = open_split(replace(split, size=len(data)), HashedStream(io.BytesIO(data)), config)
    row = next((row for row, _ in rows if row["record_type"] != "gap"), None)
    return RefetchedRecord(
        split.uri, offset, length, tuple(_changes(row, recorded, split, len(data))), _head(split, data)
    )


def _read(fs: pafs.FileSystem, path: str, split: Split, offset: int, length: int) -> bytes:
    """The bytes of a record; a row of a Parquet file as a file of that row alone."""
    if split.format == "parquet":
        return _read_row(fs, path, offset)
    if split.format == "jsonl" and split.name.lower().endswith((".gz", ".zst", ".bz2")):
        # Offsets count decompressed bytes, and what is before them has to be decompressed.
        with fs.open_input_stream(path) as stream:
            left = offset
            while left and (passed := len(stream.read(min(left, READ_BYTES)))):
                left -= passed
            return bytes(stream.read(length))
    with fs.open_input_file(path) as file:
        file.seek(min(offset, file.size()))
        return bytes(file.read(length))


def _read_row(fs: pafs.FileSystem, path: str, number: int) -> bytes:
    with fs.open_input_file(path) as stream:
        file, first = pq.ParquetFile(stream), 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number < first + rows:
                sink = io.BytesIO()
                pq.write_table(file.read_row_group(group).slice(number - first, 1), sink)
                return sink.getvalue()
            first += rows
    return b""


def _changes(row: Row | None, recorded: Mapping[str, Any], split: Split, size: int) -> list[str]:
    if split.format != "parquet" and size < recorded["length"]:
        return [f"length: expected {recorded['length']} bytes from {recorded['offset']} on, got {size}"]
    if row is None:
        return [f"expected a record at {recorded['offset']}, got bytes of none"]
    named = [name for name in COMPARED_COLUMNS if name in recorded]
    return [
        f"{name}: expected {recorded[name]}, got {row.get(name)}" for name in named if recorded[name] != row.get(name)
    ]


def _head(split: Split, data: bytes) -> bytes:
    if split.format != "warc":
        return b"" if split.format == "parquet" else data[:HEAD_BYTES]
    window = DecodedWindow(FrameReader(io.BytesIO(data), RECORD_STARTS))
    while not window.skip_newlines():
        if window.advance() is None:
            return b""
    return window.peek()[:HEAD_BYTES]
