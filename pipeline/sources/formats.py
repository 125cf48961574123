"""The registry of input file formats: the suffixes of each, and functions that read a whole file or one record.

A new format is a module with its reader, a row of FORMATS and a test: see `docs/extend/source_format.md`.
"""

import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.engine.stage import Drop, RangeStart, Row, Split
from pipeline.sources.archives.folders import FolderArchive
from pipeline.sources.archives.seven_zip import MemberFrames
from pipeline.sources.archives.tar import BLOCK, DecodedBytes, TarReader, is_tar_header
from pipeline.sources.archives.zip import ZIP_START, first_member
from pipeline.sources.blocks import ByteStream
from pipeline.sources.books.books import open_books, read_whole_book
from pipeline.sources.books.gutenberg import open_gutenberg, open_gutenberg_record, read_book
from pipeline.sources.code.code import PARQUET, ROWS, ZIP, is_loose, is_packed, open_code
from pipeline.sources.compression import FrameReader, Frames
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.warc import RECORD_STARTS, find_archive_starts, open_warc
from pipeline.sources.crawl.window import DecodedWindow
from pipeline.sources.decoders import MAGIC_BYTES, is_compressed
from pipeline.sources.forums.reddit import may_have_comments, open_reddit
from pipeline.sources.forums.stackexchange import SITES, is_posts, open_stackexchange, problem_of
from pipeline.sources.lines import find_line_starts
from pipeline.sources.papers.arxiv import SINGLE, head_of_paper, open_arxiv
from pipeline.sources.papers.unarxive import open_unarxive
from pipeline.sources.tables.arrow_table import open_arrow, read_arrow_row
from pipeline.sources.tables.csv_table import open_csv, open_csv_record
from pipeline.sources.tables.jsonl_parquet import find_row_groups, open_jsonl, open_parquet
from pipeline.sources.wiki.mediawiki import open_mediawiki, page_of, read_page

CODECS = "gz|zst|bz2|lz4"


OF_META = frozenset(("meta_fields",))
OF_CODE = OF_META | {"text_field", "url_field", "id_field", "date_field", "licence_field"}
OF_ROWS = OF_CODE | {"text", "title_field", "parents_field"}
OF_PAGES = frozenset(("http_statuses", "mime_types", "drop_truncated", "verify_digests"))

StartFinder = Callable[[ByteStream, SourceConfig, Sequence[int]], Iterator[RangeStart]]
"""(file, settings, ascending places in the stored file) → for each place the first row at or after it. There is none
for the last places if no row begins there. The first row of the file is none of them. Each row read by `open` from one
on is equal to that of the whole file."""


def _never(name: str) -> StartFinder | None:
    return None


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
    as_stored: bool = False
    """True if these are bytes of the stored file, compressed or not, so that lengths add up to its size."""
    open_record: Callable[[Split, ByteStream, SourceConfig], Iterator[tuple[Row, Drop | None]]] | None = None
    """Yields the row of the bytes of one record, if it needs more than these bytes; None: `open` does."""
    is_exact: Callable[[bytes], bool] = lambda data: True
    """Returns False if `read_record` wrote the record in another form, whose size says nothing about the record."""
    companions: Callable[[SourceConfig], tuple[str, ...]] = lambda config: ()
    """Returns the paths and patterns of other files that the reader needs, as `Split.companions`."""
    needs: Callable[[str, str, SourceConfig], bool] = lambda name, companion, config: True
    """(name of a file, name of a companion) → whether the reader of this file reads the companion."""
    problem: Callable[[str, SourceConfig], str | None] = lambda uri, config: None
    """Returns why a file cannot be read with these settings, and what to do about it; None if it can."""
    packs: Callable[[str], bool] | None = None
    """True for names of files that are read as an archive of one file. If it is set, a folder is read as an archive
    too, so that one split has many files."""
    settings: frozenset[str] = OF_META
    """Settings of `[source]` that not all formats read, and this one does."""
    has_parents: bool = False
    """True if rows name the documents that their texts were made from."""
    starts: Callable[[str], StartFinder | None] = _never
    """(name of a file) → what finds the rows with which ranges of a large file begin; None: a file is not divided."""


def _decoded_range(frames: Frames, offset: int, length: int) -> bytes:
    """Return `length` bytes from `offset` on of the decompressed file; fewer if it cannot be read that far."""
    parts, position = [], 0
    # Offsets count decompressed bytes, so everything before them has to be decompressed.
    while position < offset + length and (piece := frames.next()) is not None:
        parts.append(piece.data[max(0, offset - position) : max(0, offset + length - position)])
        position += len(piece.data)
    return b"".join(parts)


def _read_range(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    with fs.open_input_file(path) as file:
        file.seek(min(offset, file.size()))
        return bytes(file.read(length))


def _read_line(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    with fs.open_input_file(path) as stream:
        frames = FrameReader(stream, None)
        if is_compressed(frames.blocks.peek(0, MAGIC_BYTES)):
            return _decoded_range(frames, offset, length)
    return _read_range(fs, path, offset, length)


def _read_post(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    if not path.lower().endswith(".7z"):
        return _read_line(fs, path, offset, length)
    with fs.open_input_file(path) as stream, closing(MemberFrames(stream, is_posts)) as frames:
        return _decoded_range(frames, offset, length)


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


def _open_shard(split: Split, stream: ByteStream, config: SourceConfig) -> Iterator[tuple[Row, Drop | None]]:
    return (open_parquet if split.name.endswith(".parquet") else open_arrow)(split, stream, config)


def _read_shard(fs: pafs.FileSystem, path: str, number: int, length: int) -> bytes:
    return (_read_row if path.endswith(".parquet") else read_arrow_row)(fs, path, number, length)


def _read_package(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Return the bytes of a paper in a tar file, decompressed if it is compressed, or of a file with one paper."""
    return (_read_range if SINGLE.search(path) else _read_line)(fs, path, offset, length)


def _read_code(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    if fs.get_file_info(path).type == pafs.FileType.Directory or is_loose(path):
        archive = FolderArchive(fs, path)
        archive.seek(offset)
        data = archive.read(length)
        archive.close()
        return data
    if PARQUET.search(path):
        return _read_row(fs, path, offset, length)
    if ZIP.search(path):
        return _read_range(fs, path, offset, length)
    return _read_line(fs, path, offset, length)


def _starts_of_rows(name: str) -> StartFinder | None:
    """Return what finds the starts of ranges of a file of rows; None for archives and other kinds of files."""
    if PARQUET.search(name):
        return find_row_groups
    return find_line_starts if ROWS.search(name) else None


def _starts_of_code(name: str) -> StartFinder | None:
    """Return what finds the starts of ranges of a file of rows; there are none in an archive with the name of one."""
    find = _starts_of_rows(name)

    def starts(stream: ByteStream, config: SourceConfig, places: Sequence[int]) -> Iterator[RangeStart]:
        if find is not None and not is_packed(stream):
            yield from find(stream, config, places)

    return None if find is None else starts


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


NO_SUFFIX = re.compile(r"(?!)")
"""Suffixes of a format that is recognized in another way."""
POSTS_NAMES = re.compile(
    rf"(?:(?:^|[/.-])Posts\.xml(?:\.(?:{CODECS}))?|{SITES.pattern}(?:-Posts)?\.7z)$", re.IGNORECASE
)
"""Names of Posts.xml, and of the archives of a site that hold it."""
REDDIT_NAMES = re.compile(rf"(?:^|/)RS_(?:v2_)?\d{{4}}-\d\d(?:-\d\d)?(?:\.(?:{CODECS}))?$")
"""Names of the monthly and daily files of submissions."""


def _suffixes(names: str, codecs: str = "") -> re.Pattern[str]:
    return re.compile(rf"\.(?:{names})" + (rf"(?:\.(?:{codecs}))?$" if codecs else "$"), re.IGNORECASE)


_DUMP = re.compile(
    r"-pages-(?:articles|meta-current|meta-history)[^/]*\.xml(?:-p\d+p\d+)?(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE
)
"""Names of the dumps of Wikimedia, such as enwiki-20240101-pages-articles1.xml-p1p41242.bz2."""

FORMATS: Mapping[str, FileFormat] = {
    row.name: row
    for row in (
        FileFormat(
            "warc",
            _suffixes("warc|arc|wet", "gz|zst"),
            open_warc,
            _read_range,
            _record_head,
            as_stored=True,
            settings=OF_PAGES,
            starts=lambda name: find_archive_starts,
        ),
        FileFormat(
            "jsonl",
            _suffixes("jsonl|ndjson|json", CODECS),
            open_jsonl,
            _read_line,
            lambda data: data,
            settings=OF_ROWS,
            starts=lambda name: find_line_starts,
        ),
        FileFormat(
            "arrow",
            _suffixes("arrows?|feather|ipc"),
            open_arrow,
            read_arrow_row,
            lambda data: b"",
            in_bytes=False,
            settings=OF_ROWS,
        ),
        FileFormat(
            "csv",
            _suffixes("csv|tsv", CODECS),
            open_csv,
            _read_line,
            lambda data: data,
            open_record=open_csv_record,
            settings=OF_ROWS,
        ),
        FileFormat(
            "hf",
            NO_SUFFIX,
            _open_shard,
            _read_shard,
            lambda data: b"",
            in_bytes=False,
            settings=OF_ROWS,
            starts=_starts_of_rows,
        ),
        FileFormat(
            "parquet",
            _suffixes("parquet|pq"),
            open_parquet,
            _read_row,
            lambda data: b"",
            in_bytes=False,
            settings=OF_ROWS,
            starts=lambda name: find_row_groups,
        ),
        FileFormat("mediawiki", _DUMP, open_mediawiki, read_page, page_of),
        FileFormat(
            "gutenberg",
            NO_SUFFIX,
            open_gutenberg,
            read_book,
            first_member,
            open_record=open_gutenberg_record,
            is_exact=lambda data: not data.startswith(ZIP_START),
        ),
        FileFormat("books", _suffixes("epub"), open_books, read_whole_book, first_member),
        FileFormat(
            "stackexchange",
            POSTS_NAMES,
            open_stackexchange,
            _read_post,
            lambda data: data,
            problem=problem_of,
            has_parents=True,
        ),
        FileFormat(
            "reddit",
            REDDIT_NAMES,
            open_reddit,
            _read_line,
            lambda data: data,
            companions=lambda config: config.reddit.comments,
            needs=may_have_comments,
            starts=lambda name: find_line_starts,
        ),
        FileFormat("arxiv", NO_SUFFIX, open_arxiv, _read_package, head_of_paper),
        FileFormat(
            "unarxive", NO_SUFFIX, open_unarxive, _read_line, lambda data: data, starts=lambda name: find_line_starts
        ),
        FileFormat(
            "code",
            NO_SUFFIX,
            open_code,
            _read_code,
            _member_head,
            packs=is_loose,
            settings=OF_CODE,
            starts=_starts_of_code,
        ),
    )
}
"""Format by name; a file has the first format whose suffixes match."""


def ignored_settings(config: SourceConfig, read: Collection[str]) -> Iterator[str]:
    """Yield a problem for each setting of a source that none of the formats of its files reads. `read`: their names."""
    sections = config.formats().keys()
    for name in sorted(config.model_fields_set & sections - {*read}):
        yield f"expected a file of the format {name} for [source.{name}], got none. Remove it."
    used = frozenset[str]().union(*(FORMATS[each].settings for each in read))
    for name in sorted(config.model_fields_set & (OF_ROWS | OF_PAGES) - used):
        formats = ", ".join(row.name for row in FORMATS.values() if name in row.settings)
        yield f"expected a file of a format that reads source.{name} ({formats}), got none. Remove source.{name}."
