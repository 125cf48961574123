"""Reader of Arrow IPC files and streams, Feather included: one row for each row, and one gap for what cannot be read.

Both kinds are read as a stream: a file holds one after its first bytes, so a file that is cut keeps its whole batches.
Streams that follow each other in a file, as `cat` and loggers write them, are all read. Offsets and lengths count rows.
A record batch is in memory at a time, of at most MAX_BATCH_BYTES.
"""

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.engine.stage import Drop, Split
from pipeline.sources.blocks import ByteStream
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import SourceRows
from pipeline.sources.provenance import SourceItem, account_bytes, most_rows, new_row
from pipeline.sources.rows import UNREADABLE, RowMapping, most_bytes, rows_of_batch, value_bytes

FILE_START, FILE_END = b"ARROW1\0\0", b"ARROW1"
MAX_PADDING = 64
"""Maximum number of bytes between the stream of a file and its footer."""
MAX_BATCH_BYTES = 1 << 30
"""Maximum size of one message of a file, such as a record batch, also after it is decompressed [bytes]."""
FREE_ROWS, ROWS_A_BYTE = 1_000_000, 1_000
"""Maximum number of rows of a batch: so many, and so many for each byte of it. A column of nulls has no bytes."""
LENGTH_BYTES = 4
_DICTIONARY, _RECORD_BATCH = 2, 3
"""Types of the messages that have buffers."""
SLICE_ROWS = 64
"""Number of rows that are converted at a time."""


class _Messages(io.RawIOBase):
    """A stream in an Arrow file as a file object that refuses messages beyond the limits.

    It begins at the position of `stream`. Arrow reads the length of a message, its metadata, and its body in one call
    each.
    """

    def __init__(self, stream: ByteStream):
        self._stream = stream
        self._length = 0
        self._metadata = b""
        start = stream.tell()
        self.is_file = stream.read(len(FILE_START)) == FILE_START
        """True if a footer follows the stream."""
        if not self.is_file:
            stream.seek(start)

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes. Raises OSError if these are more than MAX_BATCH_BYTES."""
        if not 0 <= size <= MAX_BATCH_BYTES:
            raise OSError(f"expected a message of at most {MAX_BATCH_BYTES} bytes, got {size}")
        data = self._stream.read(size)
        metadata, self._metadata = self._metadata, b""
        if metadata:
            _check_body(metadata, data)
        elif size == self._length:
            self._metadata, self._length = (data if _body_length(data) else b""), 0
        elif size == LENGTH_BYTES:
            self._length = int.from_bytes(data, "little")
        return data

    def tell(self) -> int:
        """Return the position of the next byte in the file."""
        return self._stream.tell()

    def readable(self) -> bool:
        """Return True; pyarrow calls this."""
        return True


# The metadata of a message is a flatbuffer. Source: Arrow's Message.fbs, and the internals of flatbuffers.


def _field(data: bytes, table: int, number: int) -> int:
    """Return the position of a field of a table; 0 if it has its default."""
    fields = table - _integer(data, table, 4)
    place = 4 + 2 * number
    offset = _integer(data, fields + place, 2) if place < _integer(data, fields, 2) else 0
    return table + offset if offset else 0


def _target(data: bytes, position: int) -> int:
    return position + _integer(data, position, 4)


def _integer(data: bytes, position: int, size: int) -> int:
    if not 0 <= position <= len(data) - size:
        raise OSError("expected a message of Arrow, got metadata that leads out of the message")
    return int.from_bytes(data[position : position + size], "little", signed=size > 2)


def _body_length(metadata: bytes) -> int:
    """Return the size of the body of a message with buffers; 0 for other messages."""
    message = _target(metadata, 0)
    kind, length = _field(metadata, message, 1), _field(metadata, message, 3)
    has_buffers = kind and _integer(metadata, kind, 1) in (_DICTIONARY, _RECORD_BATCH)
    return _integer(metadata, length, 8) if has_buffers and length else _check_body(metadata, b"")


def _check_body(metadata: bytes, body: bytes) -> int:
    """Raise OSError if a message has more rows, or more bytes when it is decompressed, than the limits; return 0."""
    message = _target(metadata, 0)
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if not kind or not header or _integer(metadata, kind, 1) not in (_DICTIONARY, _RECORD_BATCH):
        return 0
    batch = _target(metadata, header)
    if _integer(metadata, kind, 1) == _DICTIONARY:
        batch = _target(metadata, _field(metadata, batch, 1))
    rows = _field(metadata, batch, 0)
    most = FREE_ROWS + ROWS_A_BYTE * len(body)
    if rows and _integer(metadata, rows, 8) > most:
        raise OSError(f"expected at most {most} rows in {len(body)} bytes, got more")
    buffers, size = _field(metadata, batch, 2), 0
    if buffers and _field(metadata, batch, 3):
        vector = _target(metadata, buffers)
        for place in range(vector + 4, vector + 4 + 16 * _integer(metadata, vector, 4), 16):
            begin, length = _integer(metadata, place, 8), _integer(metadata, place + 8, 8)
            size += max(_integer(body, begin, 8), length - 8) if length >= 8 else 0
    if size > MAX_BATCH_BYTES:
        raise OSError(f"expected a message of at most {MAX_BATCH_BYTES} decompressed bytes, got {size}")
    return 0


def open_arrow(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of an Arrow file or stream.

    What follows the last readable batch is one gap of length 0, whose drop_value is its size [bytes]. So is what
    follows after `most_rows` or `most_bytes`, but its drop_value is the number of rows up to the end of their batch.
    """
    num_rows, mapping = 0, RowMapping(config)

    def items() -> Iterator[SourceItem]:
        nonlocal num_rows
        size, end = stream.seek(0, 2), 0
        most, left = most_rows(size), most_bytes(size)
        names: list[str] | None = None
        columns: list[str] = []
        try:
            for batch, position in _read(stream, size):
                end = position
                if batch is None:
                    continue
                if batch.schema.names != names:
                    names = batch.schema.names
                    columns = mapping.columns(names)
                total = num_rows + batch.num_rows
                for start in range(0, min(batch.num_rows, most - num_rows), SLICE_ROWS):
                    for value in rows_of_batch(batch.slice(start, min(SLICE_ROWS, most - num_rows)), columns):
                        left -= value_bytes(value)
                        if left < 0:
                            most = num_rows
                            break
                        yield SourceItem(num_rows, *mapping(value))
                        num_rows += 1
                if num_rows < total:
                    yield SourceItem(num_rows, new_row("gap"), Drop("too_many_rows", float(total), float(most)))
                    return
        except UNREADABLE:
            yield SourceItem(num_rows, new_row("gap"), Drop("unreadable_gap", float(size - end)))

    return account_bytes(items(), split, lambda: num_rows)


def read_batches(stream: ByteStream) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow file or of streams. Raises an error of UNREADABLE where it is damaged."""
    for batch, _ in _read(stream, stream.seek(0, 2)):
        if batch is not None:
            yield batch


def _read(stream: ByteStream, size: int) -> Iterator[tuple[pa.RecordBatch | None, int]]:
    """Yield (record batch, offset of its end), and (None, offset) after the schema of each stream and after its end.

    Raises an error of UNREADABLE at damage, and at bytes after the last stream that are not the footer of a file.
    """
    end = stream.seek(0)
    while end < size:
        messages = _Messages(stream)
        with pa.ipc.open_stream(messages) as reader:
            yield None, messages.tell()
            for batch in _batches(reader):
                yield batch, messages.tell()
        end = messages.tell()
        yield None, end
        if messages.is_file:
            _check_footer(stream, end, size)
            return


def _check_footer(stream: ByteStream, start: int, size: int) -> None:
    """Raise OSError if a file does not end with the footer that begins at `start`."""
    stream.seek(max(start, size - LENGTH_BYTES - len(FILE_END)))
    tail = stream.read()
    footer = int.from_bytes(tail[:LENGTH_BYTES], "little") + LENGTH_BYTES + len(FILE_END)
    if tail[LENGTH_BYTES:] != FILE_END or not 0 <= size - start - footer <= MAX_PADDING:
        raise OSError(f"expected a footer after the stream of a file, got {size - start} other bytes")


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream. Raises an error of UNREADABLE at one that is damaged."""
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        _validate(batch)
        yield batch


def _validate(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid if the batch is damaged, so that its values lie outside its buffers. Invalid UTF-8 is none."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for column in batch.columns:
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                column = column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
            column.validate(full=True)


def read_arrow_row(fs: pafs.FileSystem, path: str, number: int, length: int) -> bytes:
    """Return row `number` of an Arrow file as a stream of one row; empty if there is no such row."""
    first = 0
    with fs.open_input_file(path) as file:
        for batch in read_batches(file):
            if number < first + batch.num_rows:
                sink = io.BytesIO()
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch.slice(number - first, 1))
                return sink.getvalue()
            first += batch.num_rows
    return b""
