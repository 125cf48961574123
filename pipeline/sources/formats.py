"""The registry of input file formats: the suffixes of each, and functions that read a whole file or one record.

A new format is a module with its reader, a row of FORMATS and a test: see `docs/extend/source_format.md`.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.books import open_books, read_whole_book
from pipeline.sources.compression import ByteStream, FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.gutenberg import open_gutenberg, read_book
from pipeline.sources.jsonl_parquet import open_jsonl, open_parquet
from pipeline.sources.mediawiki import open_mediawiki, page_of, read_page
from pipeline.sources.warc import RECORD_STARTS, DecodedWindow, open_warc
from pipeline.sources.zip_archives import first_member

READ_BYTES = 1 << 20
_COMPRESSED = (".gz", ".zst", ".bz2")


@dataclass(frozen=True)
class FileFormat:
    """A format of input files."""

    name: str
    """Value of `source.format`."""
    suffixes: re.Pattern[str]
    """Pattern of the end of file names in this format."""
    open: Callable[[Split, ByteStream, SourceConfig], Iterator[tuple[Row, Drop | None]]]
    """Yields the rows of a file."""
    read_record: Callable[[pafs.FileSystem, str, int, int], bytes]
    """(filesystem, path, offset, length) → the bytes of a record, which `open` can read as a file."""
    head: Callable[[bytes], bytes]
    """Stored bytes of a record → its first bytes, decompressed; empty in a binary format."""
    in_bytes: bool = True
    """True if lengths count bytes; False if they count rows."""


def _read_range(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    with fs.open_input_file(path) as file:
        file.seek(min(offset, file.size()))
        return bytes(file.read(length))


def _read_line(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    if not path.lower().endswith(_COMPRESSED):
        return _read_range(fs, path, offset, length)
    # Offsets count decompressed bytes, so everything before them has to be decompressed.
    with fs.open_input_stream(path) as stream:
        left = offset
        while left and (skipped := len(stream.read(min(left, READ_BYTES)))):
            left -= skipped
        return bytes(stream.read(length))


def _read_row(fs: pafs.FileSystem, path: str, number: int, length: int) -> bytes:
    """Return row `number` of a Parquet file as a Parquet file of one row; empty if there is no such row."""
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


def _record_head(data: bytes) -> bytes:
    window = DecodedWindow(FrameReader(io.BytesIO(data), RECORD_STARTS))
    while not window.skip_newlines():
        if window.advance() is None:
            return b""
    return window.peek()


def _suffixes(names: str, codecs: str = "") -> re.Pattern[str]:
    return re.compile(rf"\.(?:{names})" + (rf"(?:\.(?:{codecs}))?$" if codecs else "$"), re.IGNORECASE)


_DUMP = re.compile(
    r"-pages-(?:articles|meta-current|meta-history)[^/]*\.xml(?:-p\d+p\d+)?(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE
)
"""Names of the dumps of Wikimedia, such as enwiki-20240101-pages-articles1.xml-p1p41242.bz2."""
_NONE = re.compile(r"(?!)")
"""Matches no name: the suffixes of such a format mean other formats too, so `source.format` has to name it."""

FORMATS: Mapping[str, FileFormat] = {
    row.name: row
    for row in (
        FileFormat("warc", _suffixes("warc|arc|wet|wat", "gz|zst"), open_warc, _read_range, _record_head),
        FileFormat("jsonl", _suffixes("jsonl|ndjson|json", "gz|zst|bz2"), open_jsonl, _read_line, lambda data: data),
        FileFormat("parquet", _suffixes("parquet|pq"), open_parquet, _read_row, lambda data: b"", in_bytes=False),
        FileFormat("mediawiki", _DUMP, open_mediawiki, read_page, page_of),
        FileFormat("gutenberg", _NONE, open_gutenberg, read_book, first_member),
        FileFormat("books", _suffixes("epub"), open_books, read_whole_book, first_member),
    )
}
"""Format by name; a file has the first format whose suffixes match."""
