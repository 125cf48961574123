"""Reader of CSV files, compressed or not: one row for each record after the header, and for each gap.

Records are parsed by Python's csv module, line by line, so that fields can contain line ends. Offsets and lengths count
bytes of the decompressed file; the header belongs to the first record.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

from pipeline.engine.stage import Drop, Split
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import BOM, LineReader, SourceRows
from pipeline.sources.provenance import SourceItem, account_bytes, new_row
from pipeline.sources.rows import RowMapping
from schemas.storage import resolve_uri

TAB_SUFFIX = ".tsv"
CODEC_SUFFIXES = (".gz", ".zst", ".bz2", ".lz4")


class CsvRecord(NamedTuple):
    """A record of a CSV file, or the reason why it cannot be read."""

    start: int
    """Offset of the record's first line in the decompressed file [bytes]."""
    fields: list[str] | Drop


class _TooLargeError(Exception):
    """A record has more than `max_record_bytes`."""


class _Lines:
    """The lines of a file for a csv reader, which asks for them one by one; they stop before a gap."""

    def __init__(self, lines: LineReader, charset: str, max_bytes: int, mark: bytes):
        self._reader, self._lines = lines, iter(lines)
        self._charset, self._max_bytes, self._mark = charset, max_bytes, mark
        self.next = next(self._lines, None)
        """The next line, or a Drop in its place, and its offset; None at the end of the file."""
        self.start = 0
        """Offset of the current record [bytes]."""
        self.is_cut = False
        """True if the current record is cut by the end of the file or by a gap."""

    def skip(self) -> None:
        """Move after the next line."""
        self.next = next(self._lines, None)

    def begin(self, start: int) -> None:
        """Start a record at the next line."""
        self.start, self.is_cut = start, False

    def __iter__(self) -> Iterator[str]:
        """Yield the lines of a record and of those after it. Raises _TooLargeError if the record becomes too large."""
        lines, charset, max_bytes = self._lines, self._charset, self._max_bytes
        end = self.start
        while True:
            start, line = self.next or (0, None)
            if not isinstance(line, bytes):
                if line is not None and line.rule == "record_too_large":
                    raise _TooLargeError
                self.is_cut = end > self.start
                return
            end = start + len(line)
            if end - self.start > max_bytes:
                raise _TooLargeError
            self.next = following = next(lines, None)
            if following is not None and following[0] == end:
                self.is_cut = True  # A gap follows, and not a line end.
            end += 1
            yield (line if start else line.removeprefix(BOM)).decode(charset, "replace") + "\n"

    def pass_over(self) -> Drop:
        """Move after the rest of a record that is too large, and return its Drop.

        Lines that were read of it belong to a quoted field, which extends to the next line with an odd number of marks.
        """
        size = float(self.next[0] - self.start if self.next is not None else 0)
        is_quoted = size > 0
        while self.next is not None:
            line = self.next[1]
            if isinstance(line, Drop) and line.rule != "record_too_large":
                break
            marks = self._reader.num_marks if isinstance(line, Drop) else line.count(self._mark)
            size += (line.value or 0.0) if isinstance(line, Drop) else len(line) + 1
            self.skip()
            is_quoted ^= bool(self._mark) and marks % 2 == 1
            if not is_quoted:
                break
        return Drop("record_too_large", size, float(self._max_bytes))


def open_csv(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a CSV file."""
    return _open(split, stream, config, list(config.csv.columns) or None)


def open_csv_record(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the row of one record, whose bytes may begin with the header. The split's file has the column names."""
    header = list(config.csv.columns) or None
    if header is None:
        fs, path = resolve_uri(split.uri)
        with closing(fs.open_input_file(path)) as file:
            found = next(read_records(file, split, config), None)
        records = [record.fields for record in islice(read_records(stream, split, config), 2)]
        stream.seek(0)
        if found is not None and isinstance(found.fields, list) and not (records[1:] and records[0] == found.fields):
            header = found.fields
    return _open(split, stream, config, header)


def _open(split: Split, stream: ByteStream, config: SourceConfig, names: list[str] | None) -> SourceRows:
    lines = LineReader(FrameReader(stream, None), config.max_record_bytes, _mark(config))
    mapping = RowMapping(config)

    def items() -> Iterator[SourceItem]:
        header = names
        for start, fields in _records(lines, split, config):
            if isinstance(fields, Drop):
                is_fault = fields.value is not None and fields.limit is None  # a number of compressed bytes
                is_gap = is_fault or fields.rule == "too_many_rows"
                yield SourceItem(start, new_row("gap" if is_gap else "row"), fields)
                header = [] if header is None else header  # The header is lost, and no record takes its place.
            elif header is None:
                header = fields
            elif not header:
                yield SourceItem(start, new_row("row"), Drop("bad_row"))
            elif len(fields) != len(header):
                yield SourceItem(start, new_row("row"), Drop("ragged_row", float(len(fields)), float(len(header))))
            else:
                yield SourceItem(start, *mapping(by_name(header, fields)))

    return account_bytes(items(), split, lambda: lines.position)


def by_name(names: Sequence[str], fields: Sequence[str]) -> dict[str, str]:
    """Return the fields of a record by the names of their columns. Names that occur twice are left out."""
    value = dict(zip(names, fields, strict=True))
    if len(value) < len(names):
        counts = Counter(names)
        return {name: field for name, field in value.items() if counts[name] == 1}
    return value


def read_records(stream: ByteStream, split: Split, config: SourceConfig) -> Iterator[CsvRecord]:
    """Yield the records of a CSV file, the header included. Blank lines are no records."""
    return _records(LineReader(FrameReader(stream, None), config.max_record_bytes, _mark(config)), split, config)


def _records(lines: LineReader, split: Split, config: SourceConfig) -> Iterator[CsvRecord]:
    csv.field_size_limit(max(csv.field_size_limit(), config.max_record_bytes))
    feed = _Lines(lines, config.csv.charset, config.max_record_bytes, _mark(config))
    dialect = _dialect(split, config)
    reader = csv.reader(feed, **dialect)
    while feed.next is not None:
        start, line = feed.next
        if isinstance(line, Drop) and line.rule != "record_too_large":
            feed.skip()
            yield CsvRecord(start, line)
            continue
        feed.begin(start)
        fields: list[str] | Drop
        try:
            fields = next(reader)
        except (_TooLargeError, csv.Error) as error:
            fields = Drop("bad_row") if isinstance(error, csv.Error) else feed.pass_over()
        except StopIteration:
            fields = []
        if isinstance(fields, Drop) or feed.is_cut:
            reader = csv.reader(feed, **dialect)
            fields = fields if isinstance(fields, Drop) else Drop("truncated_record")
        if fields:
            yield CsvRecord(start, fields)


def _mark(config: SourceConfig) -> bytes:
    return config.csv.quote.encode()


def _dialect(split: Split, config: SourceConfig) -> dict[str, Any]:
    settings, name = config.csv, split.name.lower()
    name = next((name.removesuffix(suffix) for suffix in CODEC_SUFFIXES if name.endswith(suffix)), name)
    quoting = csv.QUOTE_MINIMAL if settings.quote else csv.QUOTE_NONE
    return {
        "delimiter": settings.delimiter or ("\t" if name.endswith(TAB_SUFFIX) else ","),
        "quotechar": settings.quote or None,
        "escapechar": settings.escape,
        "quoting": quoting,
        "strict": False,
    }
