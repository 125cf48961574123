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
from pipeline.sources.archive import BLOCK, DecodedBytes, TarReader, is_tar_header
from pipeline.sources.arxiv import SINGLE, open_arxiv
from pipeline.sources.code import PARQUET, ZIP, is_loose, open_code
from pipeline.sources.compression import ByteStream, FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.folders import FolderArchive
from pipeline.sources.jsonl_parquet import open_jsonl, open_parquet
from pipeline.sources.unarxive import open_unarxive
from pipeline.sources.warc import RECORD_STARTS, DecodedWindow, open_warc

READ_BYTES = 1 << 20
_COMPRESSED = (".gz", ".zst", ".bz2", ".tgz", ".tzst", ".tbz2", ".tbz")
_CODECS = {"tgz": "gzip", "tzst": "zstd", "tbz2": "bz2", "tbz": "bz2"}
NO_SUFFIX = re.compile(r"(?!)")
"""Suffixes of a format that only `source.format` selects, because other formats have files of the same names."""


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
    packs: Callable[[str], bool] | None = None
    """True for names of files that are read as an archive of one file. If it is set, a folder is read as an archive
    too, so that one split has many files."""


def _read_range(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    with fs.open_input_file(path) as file:
        file.seek(min(offset, file.size()))
        return bytes(file.read(length))


def _read_line(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    if not path.lower().endswith(_COMPRESSED):
        return _read_range(fs, path, offset, length)
    # Offsets count decompressed bytes, so everything before them has to be decompressed.
    with fs.open_input_stream(path, compression=_CODECS.get(path.lower().rpartition(".")[2], "detect")) as stream:
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


def _read_package(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Return the bytes of a paper in a tar file, decompressed if it is compressed, or of a file with one paper."""
    return (_read_range if SINGLE.search(path) else _read_line)(fs, path, offset, length)


def _read_code(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    if PARQUET.search(path):
        return _read_row(fs, path, offset, length)
    if ZIP.search(path):
        return _read_range(fs, path, offset, length)
    if fs.get_file_info(path).type == pafs.FileType.Directory or is_loose(path):
        archive = FolderArchive(fs, path)
        archive.seek(offset)
        data = archive.read(length)
        archive.close()
        return data
    return _read_line(fs, path, offset, length)


def _member_head(data: bytes) -> bytes:
    """Return the first bytes of the content of a member of a tar file, or of other bytes of a text."""
    if not is_tar_header(data[:BLOCK]):
        return data
    reader = TarReader(DecodedBytes(FrameReader(io.BytesIO(data), None)), len(data), lambda name, size: True)
    return next((member.data for member in reader if member.data is not None), b"")


def _record_head(data: bytes) -> bytes:
    window = DecodedWindow(FrameReader(io.BytesIO(data), RECORD_STARTS))
    while not window.skip_newlines():
        if window.advance() is None:
            return b""
    return window.peek()


def _suffixes(names: str, codecs: str = "") -> re.Pattern[str]:
    return re.compile(rf"\.(?:{names})" + (rf"(?:\.(?:{codecs}))?$" if codecs else "$"), re.IGNORECASE)


FORMATS: Mapping[str, FileFormat] = {
    row.name: row
    for row in (
        FileFormat("warc", _suffixes("warc|arc|wet", "gz|zst"), open_warc, _read_range, _record_head),
        FileFormat("jsonl", _suffixes("jsonl|ndjson|json", "gz|zst|bz2"), open_jsonl, _read_line, lambda data: data),
        FileFormat("parquet", _suffixes("parquet|pq"), open_parquet, _read_row, lambda data: b"", in_bytes=False),
        FileFormat("arxiv", NO_SUFFIX, open_arxiv, _read_package, _member_head),
        FileFormat("unarxive", NO_SUFFIX, open_unarxive, _read_line, lambda data: data),
        FileFormat("code", NO_SUFFIX, open_code, _read_code, _member_head, packs=is_loose),
    )
}
"""Format by name; a file has the first format whose suffixes match."""
