"""Readers of JSON lines (plain or compressed) and Parquet files: one row for each line or row, and for each gap.

Offsets and lengths of JSON lines count bytes of the decompressed file, so `zcat FILE | tail -c +$((OFFSET + 1))` prints
from that line on. Lengths add up to the size. Compressed bytes that cannot be decoded are a gap of length 0, whose
drop_value is their number. In Parquet files, offsets and lengths count rows.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow.parquet as pq

from pipeline.engine.stage import Drop, RangeStart, Row, Split
from pipeline.sources.blocks import ByteStream
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import SourceRows, parse_object, read_lines
from pipeline.sources.provenance import SourceItem, account_bytes, most_rows, new_row
from pipeline.sources.rows import UNREADABLE, RowMapping, most_bytes, rows_of_batch, value_bytes

BATCH_ROWS = 16
"""Number of rows that are read at a time, if they are large [rows]."""
MAX_BATCH_ROWS, BATCH_BYTES = 512, 1 << 20
"""Maximum number of rows that are read at a time, and their size by the mean of the row group [rows, bytes]."""
BUFFER_BYTES = 1 << 20
MAX_TEXT_BYTES = 256 << 20
"""Maximum size of the texts of a column that are read at a time [bytes], if it is known before: rows whose texts are
entries of a dictionary may take far more than they take in the file. Reading takes up to four times as much memory."""
MAX_RATIO = 100
"""Ratio of compression from which a row group is not read, if one of its columns of texts is also larger than
MAX_TEXT_BYTES. A page of the file has to be decompressed whole."""
MAX_STATED_ROWS = 1 << 48
"""Number of rows from which the footer of a file is not believed: offsets of rows are sums of what it states."""
SMALL_BYTES = 4 << 20
"""Size of a column of a row group up to which the size of its dictionary is not looked at [bytes]."""


def open_jsonl(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a file with one JSON object per line."""
    mapping = RowMapping(config)
    return read_lines(split, stream, config, lambda line, _: _parse(line, mapping))


def _parse(line: bytes, mapping: RowMapping) -> tuple[Row, Drop | None]:
    value = parse_object(line)
    return mapping(value) if value is not None else (new_row("row"), Drop("bad_line"))


def open_parquet(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a Parquet file."""
    mapping = RowMapping(config)
    return read_parquet(split, stream, mapping.columns, mapping)


def read_parquet(
    split: Split,
    stream: ByteStream,
    columns_of: Callable[[list[str]], list[str]],
    parse: Callable[[dict[str, Any]], tuple[Row, Drop | None]],
) -> SourceRows:
    """Yield the rows of a Parquet file. `columns_of` chooses the columns to read; `parse` returns the row of a row.

    The unreadable rows of a row group are one gap, as are those beyond `most_rows`, and those beyond its share of
    `most_bytes`. An unreadable file is one gap of length 0, and the drop_value of this gap is the file's size [bytes].
    """
    num_rows = split.first.offset

    def items() -> Iterator[SourceItem]:
        nonlocal num_rows
        size = stream.seek(0, 2)
        if not size:
            return
        most = most_rows(size)
        try:
            file = pq.ParquetFile(stream, pre_buffer=False, buffer_size=BUFFER_BYTES)
            columns = columns_of(file.schema_arrow.names)
            stated = _stated_rows(file.metadata)
            shares = _shares(file.metadata, most_bytes(size))
        except UNREADABLE:
            yield SourceItem(0, new_row("gap"), Drop("unreadable_gap", float(size)))
            return
        first_group = split.first.resume[0] if split.first.resume else 0
        for group in range(first_group, len(stated)):
            end = num_rows + stated[group]
            texts = _texts(file, group, columns)
            left = shares[group]
            bomb = max((text.total_uncompressed_size for text in texts if _is_bomb(text)), default=0)
            for value in _group(file, group, columns, _most_rows(stream, texts)) if not bomb else ():
                left -= value_bytes(value)
                if num_rows >= most or left < 0:
                    break
                yield SourceItem(num_rows, *parse(value))
                num_rows += 1
            if most <= num_rows < sum(stated):
                yield SourceItem(num_rows, new_row("gap"), Drop("too_many_rows", float(sum(stated)), float(most)))
                num_rows = sum(stated)
                return
            if num_rows < end:
                drop = Drop("unreadable_gap", float(end - num_rows))
                if bomb:
                    drop = Drop("page_too_large", float(bomb), float(MAX_TEXT_BYTES))
                elif left < 0:
                    drop = Drop("too_many_rows", float(end), float(num_rows))
                yield SourceItem(num_rows, new_row("gap"), drop)
                num_rows = end

    return account_bytes(items(), split, lambda: num_rows)


def find_row_groups(stream: ByteStream, config: SourceConfig, places: Sequence[int]) -> Iterator[RangeStart]:
    """Yield, for each of the ascending places in a Parquet file, the first row of a row group, if there is one.

    Groups have places by the sizes of their uncompressed values, of which the footer has the sum for each.
    """
    size, left, num_rows, begin = stream.seek(0, 2), deque(places), 0, 0
    try:
        facts = pq.ParquetFile(stream, pre_buffer=False).metadata
        stated = _stated_rows(facts)
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    except UNREADABLE:
        return
    weights = [max(0, group.total_byte_size) for group in groups]
    total = max(1, sum(weights))
    for number in range(len(groups)):
        if num_rows >= most_rows(size):
            return
        while left and stated[number] and num_rows and left[0] * total <= begin * size:
            left.popleft()
            yield RangeStart(num_rows, 0, (number,))
        num_rows, begin = num_rows + stated[number], begin + weights[number]


def _stated_rows(facts: pq.FileMetaData) -> list[int]:
    """Return the number of rows of each row group, by the footer. Raises ValueError if they cannot be true."""
    stated = [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]
    if min(stated, default=0) < 0 or sum(stated) > MAX_STATED_ROWS:
        raise ValueError(f"expected 0 to {MAX_STATED_ROWS} rows, got others in the footer")
    return stated


def _shares(facts: pq.FileMetaData, num_bytes: int) -> list[int]:
    """Return `num_bytes` in shares of the row groups, by the sizes that the footer states for them.

    A group has the same share whether its file is read whole or in ranges.
    """
    groups = [facts.row_group(group) for group in range(facts.num_row_groups)]
    sizes = [
        max(0, sum(group.column(index).total_compressed_size for index in range(group.num_columns))) for group in groups
    ]
    total = sum(sizes)
    return [num_bytes * size // total if total else num_bytes // len(sizes) for size in sizes]


def _texts(file: pq.ParquetFile, group: int, columns: list[str]) -> list[Any]:
    """Return the metadata of those columns of a row group that hold texts or bytes, parts of nested ones included."""
    facts = file.metadata.row_group(group)
    parts = [facts.column(index) for index in range(facts.num_columns)]
    texts = [part for part in parts if part.physical_type == "BYTE_ARRAY"]
    return [part for part in texts if part.path_in_schema.split(".")[0] in columns]


def _is_bomb(text: Any) -> bool:
    size = text.total_uncompressed_size
    return bool(size > MAX_TEXT_BYTES and size > MAX_RATIO * text.total_compressed_size)


def _most_rows(stream: ByteStream, texts: list[Any]) -> int:
    """Return the number of rows that may be read at a time, by the sizes of the dictionaries of their texts."""
    large = [text for text in texts if text.dictionary_page_offset and text.total_uncompressed_size > SMALL_BYTES]
    sizes = [_page_bytes(stream, text.dictionary_page_offset) for text in large]
    return max(1, MAX_TEXT_BYTES // max(1, sum(sizes)))


def _page_bytes(stream: ByteStream, offset: int) -> int:
    """Return the uncompressed size of the page at an offset; 0 if there is no page.

    A page begins with its kind and this size, in Thrift's compact protocol: each a field of type i32, whose number is
    one more than that of the field before. Source: parquet.thrift, PageHeader.
    """
    stream.seek(offset)
    head = stream.read(16)
    at, value = 0, 0
    for _ in range(2):
        if head[at : at + 1] != b"\x15":
            return 0
        at, value, shift = at + 1, 0, 0
        while at < len(head):
            value |= (head[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if head[at - 1] < 0x80:
                break
    return value >> 1


def _group(file: pq.ParquetFile, group: int, columns: list[str], most: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a row group, at most `most` at a time, up to the first batch that cannot be read.

    Batches of rows that are small on average are larger: each costs as much as a hundred such rows. The rows of one
    that cannot be read are read again in batches of BATCH_ROWS, so that no more rows are lost.
    """
    facts = file.metadata.row_group(group)
    many = min(MAX_BATCH_ROWS, BATCH_BYTES * facts.num_rows // max(1, facts.total_byte_size))
    num_rows = 0
    few = min(BATCH_ROWS, most)
    for size in (min(many, most) // BATCH_ROWS * BATCH_ROWS, few):
        done, first = num_rows, 0
        try:
            for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=columns) if size else ():
                if first >= done:
                    for row in rows_of_batch(batch, columns):
                        yield row
                        num_rows += 1
                first += batch.num_rows
        except UNREADABLE:
            continue
        if size:
            return
