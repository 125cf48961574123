"""Readers of JSON lines (plain, gzip, zstd or bzip2) and Parquet files: one row for each line or row, and for each gap.

Offsets and lengths of JSON lines count bytes of the decompressed file, so `zcat FILE | tail -c +$((OFFSET + 1))` prints
from that line on. Lengths add up to the size. Compressed bytes that cannot be decoded are a gap of length 0, whose
drop_value is their number. In Parquet files, offsets and lengths count rows.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.compression import ByteStream, FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.provenance import SourceItem, account_bytes, encodable, new_row, set_text

BATCH_ROWS = 16
BUFFER_BYTES = 1 << 20
UNREADABLE = (pa.ArrowException, OSError, ValueError)
BOM = b"\xef\xbb\xbf"
MAX_META_DEPTH = 16
"""Maximum nesting depth of a field that is stored in `meta`; deeper values are left out."""
MAX_NAME = 64
"""Maximum length of the name of a field that the manifest counts [code points]."""
UNREADABLE_VALUE = object()
"""Takes the place of a value of a Parquet column that cannot be converted, such as a date after the year 9999."""
PARTIAL_DATE = re.compile(r"(\d{4})(?:-(\d\d))?")
NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,17})(?:\.\d{1,18})?(?:[eE][-+]?\d{1,2})?")
"""A text that is compared as a number; a leading zero makes it a code."""
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
    return _row(value, config)


def open_parquet(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a Parquet file.

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
            columns = _columns(file.schema_arrow.names, config)
        except UNREADABLE:
            yield SourceItem(0, new_row("gap"), Drop("unreadable_gap", float(size)))
            return
        for group in range(file.num_row_groups):
            end = num_rows + file.metadata.row_group(group).num_rows
            for value in _group(file, group, columns):
                yield SourceItem(num_rows, *_row(value, config))
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


def _row(value: dict[str, Any], config: SourceConfig) -> tuple[Row, Drop | None]:
    url, stored = value.get(config.url_field), {config.text_field}
    origin = config.url_field
    if url is None or url == "":
        stored.add(config.url_field)
        url, origin = value.get(config.id_field), config.id_field
    row = new_row("row", encodable(str(url)) if isinstance(url, str | int) else None)
    stored |= {origin} if isinstance(url, str | int) else set()
    if config.date_field is not None and (found := parse_date(value.get(config.date_field))) is not None:
        row["date"] = found
        stored.add(config.date_field)
    if config.licence_field is not None and (licence := _licence(value.get(config.licence_field), config)) is not None:
        row["licence"] = licence
        stored.add(config.licence_field)
    row["meta"], row["_meta"] = pack_meta(value, stored, config)
    text = value.get(config.text_field)
    if not isinstance(text, str):
        return row, Drop("no_text_field")
    return row, set_text(row, text, config)


# The fields of a row beside text, URL and id.


class MetaNote(NamedTuple):
    """What the manifest counts of the fields of one row."""

    numbers: Mapping[str, bool]
    """Whether the value is a number, by the name of each field in `meta`; names over MAX_NAME are not counted."""
    cut: tuple[str, ...]
    """Causes for which fields were left out or not used: `too_large`, `too_deep`, `unreadable`, `no_date`."""


class _TooDeep(ValueError):
    """A value is nested deeper than MAX_META_DEPTH."""


def pack_meta(value: Mapping[str, Any], stored: set[str], config: SourceConfig) -> tuple[str | None, MetaNote | None]:
    """Return the JSON object of the fields to store in `meta` (None: no field), and what to count of them."""
    if config.meta_fields is None:
        names = [name for name in value if name not in stored]
    else:
        names = [name for name in config.meta_fields if name in value]
    size, parts, numbers, cut = 1, [], {}, set()
    is_dated = config.date_field is None or config.date_field in stored or value.get(config.date_field) is None
    cut |= set() if is_dated else {"no_date"}
    for name in names:
        if value[name] is None:
            continue
        if value[name] is UNREADABLE_VALUE:
            cut.add("unreadable")
            continue
        try:
            plain = plain_value(value[name])
        except _TooDeep:
            cut.add("too_deep")
            continue
        if plain is None:
            continue
        part = encodable(f"{json.dumps(name, ensure_ascii=False)}:{_json(plain)}")
        if size + len(part.encode()) + 1 > config.max_meta_bytes:
            cut.add("too_large")
            continue
        size += len(part.encode()) + 1
        parts.append(part)
        if len(name) <= MAX_NAME:
            numbers[encodable(name)] = is_number(plain)
    note = MetaNote(numbers, tuple(sorted(cut))) if numbers or cut else None
    return (f"{{{','.join(parts)}}}" if parts else None), note


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def is_number(value: Any) -> bool:
    """Return True if a value of `meta` is compared as a number: a number, or a text that is written as one."""
    if isinstance(value, str):
        return NUMBER.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain_value(value: Any, depth: int = 0) -> Any:
    """Return a value of a line or row as a JSON value. Numbers that are not finite are None.

    Whole numbers beyond 64 bits, and values without a JSON type, such as dates, become texts. Bytes become hexadecimal.
    Raises ValueError if the value is nested deeper than MAX_META_DEPTH.
    """
    if depth > MAX_META_DEPTH:
        raise _TooDeep(f"expected at most {MAX_META_DEPTH} levels, got more")
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain_value(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, depth + 1) for item in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def parse_date(value: Any) -> datetime | None:
    """Return the date of a row in UTC; None if the value is no date that the column can hold."""
    try:
        if isinstance(value, datetime):
            found = value
        elif isinstance(value, date):
            found = datetime(value.year, value.month, value.day)
        elif isinstance(value, str) and (match := PARTIAL_DATE.fullmatch(value.strip())):
            found = datetime(int(match[1]), int(match[2] or 1), 1)
        elif isinstance(value, str):
            found = datetime.fromisoformat(value.strip())
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found = datetime.fromtimestamp(value, UTC)
        else:
            return None
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None
    # pandas dates have nanoseconds; the column has milliseconds.
    return datetime(*found.timetuple()[:6], found.microsecond // 1000 * 1000, UTC)


def _licence(value: Any, config: SourceConfig) -> str | None:
    """Return the licence of a row as text; None if there is none or it does not fit into `max_meta_bytes`."""
    try:
        plain = plain_value(None if value is UNREADABLE_VALUE else value)
    except _TooDeep:
        return None
    if plain is None or plain == "":
        return None
    text = encodable(plain if isinstance(plain, str) else _json(plain))
    return text if len(text.encode()) <= config.max_meta_bytes else None
