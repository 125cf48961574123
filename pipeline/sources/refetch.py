"""Refetch: reads the original record of a document again by its byte range and compares it with its stored row.

The bytes pass through the source stage again; record type, URL, date, status, media type and page size are compared.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipeline.engine.stage import Row, Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.formats import FORMATS
from pipeline.sources.source import open_split
from pipeline.sources.splits import HashedStream
from schemas.errors import ContractError
from schemas.storage import resolve_uri

COMPARED_COLUMNS = ("record_type", "url", "date", "http_status", "mime", "page_bytes")
HEAD_BYTES = 2000


@dataclass(frozen=True)
class RefetchedRecord:
    """The current state of a document's record in its file."""

    uri: str
    """The file it was read from."""
    offset: int
    """Its offset, in the unit of its table [bytes, or rows]."""
    length: int
    """Its length in the same unit."""
    changes: tuple[str, ...]
    """Differences from the stored row, as messages; empty if there are none."""
    head: bytes
    """Its first bytes as the crawler wrote them, decompressed. RAW: may hold personal data."""


def refetch(split: Split, recorded: Mapping[str, Any], config: SourceConfig) -> RefetchedRecord:
    """Read the record of a document again; `recorded` is the document's row, with offset and length.

    Raises ContractError if the file cannot be read.
    """
    offset, length = int(recorded["offset"]), int(recorded["length"])
    file_format = FORMATS[split.format]
    try:
        fs, path = resolve_uri(split.uri)
        data = file_format.read_record(fs, path, offset, length)
    except (OSError, pa.ArrowException) as error:
        raise ContractError(f"{split.uri}: expected the record at {offset}, got {error}. Restore the file.") from error
    rows = open_split(replace(split, size=len(data)), HashedStream(io.BytesIO(data)), config)
    row = next((row for row, _ in rows if row["record_type"] != "gap"), None)
    if file_format.in_bytes and len(data) < length:
        changes = [f"length: expected {length} bytes from {offset} on, got {len(data)}"]
    else:
        changes = _changes(row, recorded)
    return RefetchedRecord(split.uri, offset, length, tuple(changes), file_format.head(data)[:HEAD_BYTES])


def _changes(row: Row | None, recorded: Mapping[str, Any]) -> list[str]:
    if row is None:
        return [f"expected a record at {recorded['offset']}, got bytes of none"]
    named = [name for name in COMPARED_COLUMNS if name in recorded]
    return [
        f"{name}: expected {recorded[name]}, got {row.get(name)}" for name in named if recorded[name] != row.get(name)
    ]
