"""Readers of JSON lines (plain, gzip, zstd or bzip2) and Parquet files: one row for each line or row, and for each gap.

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
from pipeline.sources.compression import ByteStream, FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.provenance import SourceItem, account_bytes, new_row
from pipeline.sources.rows import UNREADABLE_VALUE, row_of

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

    def __init__(self, frames: FrameReader, max_bytes: int):
        self._frames = frames
        self._max_bytes = max_bytes
        self.position = 0

    def __iter__(self) -> Iterator[tuple[int, bytes | Drop]]:
        """Yield (offset, line without its line feed). A Drop replaces a line that is too long or cannot be decoded."""
        held: list[bytes] = []
        start = size = 0
        while (piece := self._frames.next()) is not None:
            if piece.fault is not None:
                if size:
                    yield start, b"".join(held) if size <= self._max_bytes else self._too_long(size)
                yield self.position, Drop(piece.fault, float(piece.resumed - piece.start))
                held, start, size = [], self.position, 0
                continue
            *whole, rest = piece.data.split(b"\n")
            for part in whole:
                size += len(part)
                line = b"".join([*held, part]) if held else part
                yield start, line if size <= self._max_bytes else self._too_long(size)
                start += size + 1
                held, size = [], 0
            size += len(rest)
            if rest and size <= self._max_bytes:
                held.append(rest)
            elif rest:
                held = []
            self.position += len(piece.data)
        if size:
            yield start, b"".join(held) if size <= self._max_bytes else self._too_long(size)

    def _too_long(self, size: int) -> Drop:
        return Drop("record_too_large", float(size), float(self._max_bytes))


def open_jsonl(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a file with one JSON object per line."""
    return read_lines(split, stream, config, _parse)


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


def _parse(line: bytes, config: SourceConfig) -> tuple[Row, Drop | None]:
    try:
        value = json.loads(line.strip())
    except (ValueError, RecursionError):
        return new_row("row"), Drop("bad_line")
    if not isinstance(value, dict):
        return new_row("row"), Drop("bad_line")
    return row_of(value, config)


def open_parquet(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a Parquet file."""
    return read_parquet(split, stream, lambda names: _columns(names, config), lambda value: row_of(value, config))


def read_parquet(
    split: Split,
    stream: ByteStream,
    columns_of: Callable[[list[str]], list[str]],
    parse: Callable[[dict[str, Any]], tuple[Row, Drop | None]],
) -> SourceRows:
    """Yield the rows of a Parquet file. `columns_of` chooses the columns to read; `parse` returns the row of a row.

    The unreadable rows of a row group are one gap. An unreadable file is one gap of length 0, and the drop_value of
    this gap is the file's size [bytes].
    """
    num_rows = 0

    def items() -> Iterator[SourceItem]:
        nonlocal num_rows
        size = stream.seek(0, 2)
        if not size:
            return
        try:
            file = pq.ParquetFile(stream, pre_buffer=False, buffer_size=BUFFER_BYTES)
            columns = columns_of(file.schema_arrow.names)
        except UNREADABLE:
            yield SourceItem(0, new_row("gap"), Drop("unreadable_gap", float(size)))
            return
        for group in range(file.num_row_groups):
            end = num_rows + file.metadata.row_group(group).num_rows
            for value in _group(file, group, columns):
                yield SourceItem(num_rows, *parse(value))
                num_rows += 1
            if num_rows < end:
                yield SourceItem(num_rows, new_row("gap"), Drop("unreadable_gap", float(end - num_rows)))
                num_rows = end

    return account_bytes(items(), split, lambda: num_rows)


def _group(file: pq.ParquetFile, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a row group, up to the first batch that cannot be read."""
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns):
            values = [_values(batch.column(batch.schema.get_field_index(name))) for name in columns]
            for row in range(batch.num_rows):
                yield {name: column[row] for name, column in zip(columns, values, strict=True)}
    except UNREADABLE:
        return


def _columns(names: list[str], config: SourceConfig) -> list[str]:
    """Return the columns of a Parquet file to read, in the order of the file; names that occur twice are left out."""
    wanted = {config.text_field, config.url_field, config.id_field, config.date_field, config.licence_field}
    wanted |= {*(names if config.meta_fields is None else config.meta_fields)}
    return [name for name in names if name in wanted and names.count(name) == 1]


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
