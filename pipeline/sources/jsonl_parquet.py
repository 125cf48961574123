"""Readers of JSON lines (plain or compressed) and Parquet files: one row for each line or row, and for each gap.

Offsets and lengths of JSON lines count bytes of the decompressed file, so `zcat FILE | tail -c +$((OFFSET + 1))` prints
from that line on. Lengths add up to the size. Compressed bytes that cannot be decoded are a gap of length 0, whose
drop_value is their number. In Parquet files, offsets and lengths count rows.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.compression import ByteStream, FrameReader, Frames
from pipeline.sources.config import SourceConfig
from pipeline.sources.provenance import SourceItem, account_bytes, new_row
from pipeline.sources.rows import UNREADABLE_VALUE, RowMapping

BATCH_ROWS = 16
BUFFER_BYTES = 1 << 20
UNREADABLE = (pa.ArrowException, OSError, ValueError)
BOM = b"\xef\xbb\xbf"
SourceRows = Iterator[tuple[Row, Drop | None]]
LineParser = Callable[[bytes, SourceConfig], tuple[Row, Drop | None]]
"""Function from (line without its line feed, settings) to the line's row, with a Drop if it cannot be a document."""


class LineReader:
    """Iterates over the lines of a file and their offsets in the decompressed file.

    After the last line, `position` is the size of the decompressed file [bytes].
    """

    def __init__(self, frames: Frames, max_bytes: int, mark: bytes = b""):
        """`mark`: a byte to count in lines that are too long."""
        self._frames = frames
        self._max_bytes = max_bytes
        self._mark = mark
        self.position = 0
        self.num_marks = 0
        """Number of marks in the line that was yielded last, if it is too long."""

    def __iter__(self) -> Iterator[tuple[int, bytes | Drop]]:
        """Yield (offset, line without its line feed). A Drop replaces a line that is too long or cannot be decoded."""
        held: list[bytes] = []
        start = size = marks = 0
        while (piece := self._frames.next()) is not None:
            if piece.fault is not None:
                if size:
                    yield start, b"".join(held) if size <= self._max_bytes else self._too_long(size, marks)
                yield self.position, Drop(piece.fault, float(piece.resumed - piece.start))
                held, start, size, marks = [], self.position, 0, 0
                continue
            *whole, rest = piece.data.split(b"\n")
            for part in whole:
                size += len(part)
                if size > self._max_bytes:
                    yield start, self._too_long(size, marks + self._count([*held, part]))
                else:
                    yield start, b"".join([*held, part]) if held else part
                start += size + 1
                held, size, marks = [], 0, 0
            size += len(rest)
            if rest and size <= self._max_bytes:
                held.append(rest)
            elif rest:
                marks += self._count([*held, rest])
                held = []
            self.position += len(piece.data)
        if size:
            yield start, b"".join(held) if size <= self._max_bytes else self._too_long(size, marks)

    def _count(self, parts: list[bytes]) -> int:
        return sum(part.count(self._mark) for part in parts) if self._mark else 0

    def _too_long(self, size: int, marks: int) -> Drop:
        self.num_marks = marks
        return Drop("record_too_large", float(size), float(self._max_bytes))


def open_jsonl(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a file with one JSON object per line."""
    mapping = RowMapping(config)
    return read_lines(split, stream, config, lambda line, _: _parse(line, mapping))


def read_lines(split: Split, stream: ByteStream, config: SourceConfig, parse: LineParser) -> SourceRows:
    """Yield the rows of a file with one row per line. `parse` returns the row of a line.

    An empty line has no row. Its bytes belong to the row before it.
    """
    lines = LineReader(FrameReader(stream, None), config.max_record_bytes)

    def items() -> Iterator[SourceItem]:
        for start, line in lines:
            if isinstance(line, Drop):
                kind = "row" if line.rule == "record_too_large" else "gap"
                yield SourceItem(start, new_row(kind), line)
            elif (line := line.removeprefix(BOM)).strip():
                yield SourceItem(start, *parse(line, config))

    return account_bytes(items(), split, lambda: lines.position)


def _parse(line: bytes, mapping: RowMapping) -> tuple[Row, Drop | None]:
    try:
        value = json.loads(line.strip())
    except (ValueError, RecursionError):
        return new_row("row"), Drop("bad_line")
    if not isinstance(value, dict):
        return new_row("row"), Drop("bad_line")
    return mapping(value)


def open_parquet(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a Parquet file.

    The unreadable rows of a row group are one gap. An unreadable file is one gap of length 0, and the drop_value of
    this gap is the file's size [bytes].
    """
    num_rows, mapping = 0, RowMapping(config)

    def items() -> Iterator[SourceItem]:
        nonlocal num_rows
        size = stream.seek(0, 2)
        if not size:
            return
        try:
            file = pq.ParquetFile(stream, pre_buffer=False, buffer_size=BUFFER_BYTES)
            columns = mapping.columns(file.schema_arrow.names)
        except UNREADABLE:
            yield SourceItem(0, new_row("gap"), Drop("unreadable_gap", float(size)))
            return
        for group in range(file.num_row_groups):
            end = num_rows + file.metadata.row_group(group).num_rows
            for value in _group(file, group, columns):
                yield SourceItem(num_rows, *mapping(value))
                num_rows += 1
            if num_rows < end:
                yield SourceItem(num_rows, new_row("gap"), Drop("unreadable_gap", float(end - num_rows)))
                num_rows = end

    return account_bytes(items(), split, lambda: num_rows)


def _group(file: pq.ParquetFile, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a row group, up to the first batch that cannot be read."""
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns):
            yield from rows_of_batch(batch, columns)
    except UNREADABLE:
        return


def rows_of_batch(batch: pa.RecordBatch, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch with these columns. A value that cannot be converted is UNREADABLE_VALUE."""
    values = [_values(batch.column(batch.schema.get_field_index(name))) for name in columns]
    for row in range(batch.num_rows):
        yield {name: column[row] for name, column in zip(columns, values, strict=True)}


def _values(column: pa.Array) -> list[Any]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            return [_value(column, row) for row in range(len(column))]
        stored = column.cast(pa.large_binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "replace") for value in stored]
    except (ValueError, OverflowError, pa.ArrowException):
        return [_value(column, row) for row in range(len(column))]


def _value(column: pa.Array, row: int) -> Any:
    try:
        return column[row].as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return UNREADABLE_VALUE  # counted as a field that is left out of `meta`; the row itself is read
