"""Reader of Arrow IPC files and streams, Feather included: one row for each row, and one gap for what cannot be read.

Both kinds are read as a stream: a file holds one after its first bytes, so a file that is cut keeps its whole batches.
Offsets and lengths count rows. A record batch is in memory at a time, of at most MAX_BATCH_BYTES.
"""

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.engine.stage import Drop, Split
from pipeline.sources.compression import ByteStream
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import SourceRows
from pipeline.sources.provenance import SourceItem, account_bytes, new_row
from pipeline.sources.rows import UNREADABLE, RowMapping, rows_of_batch

FILE_START = b"ARROW1\0\0"
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
    """The stream of an Arrow file as a file object that refuses messages beyond the limits.

    Arrow reads the length of a message, its metadata, and its body in one call each.
    """

    def __init__(self, stream: ByteStream):
        self._stream = stream
        self._length = 0
        self._metadata = b""
        stream.seek(0)
        head = stream.read(len(FILE_START))
        if head != FILE_START:
            stream.seek(0)

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

    What follows the last readable batch is one gap of length 0, whose drop_value is its size [bytes].
    """
    num_rows, mapping = 0, RowMapping(config)

    def items() -> Iterator[SourceItem]:
        nonlocal num_rows
        size = stream.seek(0, 2)
        if not size:
            return
        end = 0
        try:
            messages = _Messages(stream)
            with pa.ipc.open_stream(messages) as reader:
                columns = mapping.columns(reader.schema.names)
                end = messages.tell()
                for batch in _batches(reader):
                    end = messages.tell()
                    for start in range(0, batch.num_rows, SLICE_ROWS):
                        for value in rows_of_batch(batch.slice(start, SLICE_ROWS), columns):
                            yield SourceItem(num_rows, *mapping(value))
                            num_rows += 1
        except UNREADABLE:
            yield SourceItem(num_rows, new_row("gap"), Drop("unreadable_gap", float(size - end)))

    return account_bytes(items(), split, lambda: num_rows)


def read_batches(stream: ByteStream) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow file or stream. Raises an error of UNREADABLE where it is damaged."""
    with pa.ipc.open_stream(_Messages(stream)) as reader:
        yield from _batches(reader)


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
