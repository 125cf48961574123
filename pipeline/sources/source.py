"""The source stage: its declaration, the reader of a file, and that of one record for `penstock trace --refetch`."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipeline.engine.failures import FAILURE, Failure, place_of
from pipeline.engine.stage import TITLE_FIRST, Drop, Row, Source, Split
from pipeline.sources.blocks import ByteStream
from pipeline.sources.common_crawl.listing import read_crawl_range
from pipeline.sources.common_crawl.requests import UnreachableFileError
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.warc import open_warc
from pipeline.sources.formats import FORMATS
from pipeline.sources.provenance import COLUMNS, new_row
from pipeline.sources.splits import HashedStream
from schemas.errors import ContractError, PenstockError
from schemas.ids import doc_id
from schemas.storage import resolve_uri

__all__ = ["REASONS", "SOURCE", "SourceConfig", "open_split"]

COMMON_REASONS = {
    "not_a_page": "a record of another kind: warcinfo, request, metadata, revisit, a DNS answer, an archive header",
    "http_status": "the HTTP status is not one that is kept",
    "not_html": "the media type is not one that is kept, or none is declared and the bytes do not look like HTML",
    "no_http_header": "a response that does not begin with an HTTP status line",
    "bad_http": "an HTTP header without a valid status line or an end",
    "bad_encoding": "the body is not in its transfer or content encoding",
    "page_too_large": "the decoded page or text is larger than max_page_bytes",
    "record_too_large": "the record or line as stored is larger than max_record_bytes; it was passed over",
    "empty_page": "nothing, or nothing but white space, where the page should be",
    "truncated_record": "the file ends inside the record; or the crawler cut it short and such records are not kept",
    "lying_length": "no record, gap or end of file at the declared end of the record",
    "digest_mismatch": "the block does not have the digest that its header gives",
    "bad_header": "a record whose header has no end or no length",
    "decoded_too_large": "the rest of a file that decodes to more than 64 MiB and 1,100 bytes for each of its bytes, "
    "such as one line repeated in zstd; gzip cannot. Or a page with a coding of its own that decodes to more than 64 "
    "KiB and 1,100 bytes for each of its bytes, or to 8 if its frame repeats such pages; or such a package of a paper",
    "too_many_rows": "the rest of a file or row group whose rows or lines take almost no bytes; the limit is the "
    "number of those read",
    "bad_gzip": "a compressed member is damaged (gzip, zstd, bzip2 or LZ4)",
    "unreadable_gap": "bytes that belong to no record",
    "empty_file": "the file holds no bytes, or no record and no gap",
    "bad_line": "a line that is no JSON object",
    "no_text_field": "a row without a text",
}
"""Reasons of every format: reason → meaning."""
_BAD_ROW = {"bad_row": "a row of a table or dump that cannot be parsed, or a question with the id of an earlier one"}
_LOW_SCORE = {"low_score": "a question or submission whose score is lower than min_score"}
_NOT_A_FILE = {"not_a_file": "a link, device or pipe in an archive or folder; no link is followed"}
_UNSAFE_PATH = {"unsafe_path": "the name of a member leads out of its archive, or is empty, too long or too deep"}
_PACKAGE_TOO_LARGE = {
    "package_too_large": "an archive, or the package of a paper, that unpacks to more than the maximum"
}
FORMAT_REASONS: Mapping[str, Mapping[str, str]] = {
    "mediawiki": {
        "bad_xml": "an element of an XML dump that is not well-formed, or nested too deeply",
        "other_namespace": "a page in a namespace that is not in mediawiki.namespaces; the value is its number",
        "not_wikitext": "a page of a wiki that is code, data or a discussion by its content model",
        "redirect": "a page of a wiki that only leads to another one",
        "disambiguation": "a page of a wiki that lists the meanings of a name, by its templates, categories or title",
    },
    "gutenberg": {
        "not_a_book": "a file or a member of an archive that is no text and no EPUB, by its name or its bytes",
        "bad_archive": "a zip archive or EPUB that is damaged or none, or compressed by another method than deflate",
        "bad_epub": "an EPUB without a readable package document or chapter, or with a chapter that no parser can bear",
        "encrypted_book": "an archive or EPUB whose texts are encrypted",
        "unsafe_name": "an archive with a name that points outside of it",
    },
    "csv": {
        **_BAD_ROW,
        "ragged_row": "a row of a CSV file with more or fewer fields than the header; the value is their number",
    },
    "stackexchange": {
        **_BAD_ROW,
        **_LOW_SCORE,
        "not_a_question": "a post that is neither question nor answer, such as the description of a tag",
        "joined_to_question": "an answer that is in the document of its question",
        "answer_without_question": "an answer whose question is not in the file",
        "question_dropped": "an answer whose question is dropped",
        "low_answer_score": "an answer whose score is lower than min_answer_score",
        "surplus_answer": "an answer beyond the max_answers best ones of its question",
        "unanswered": "a question without an answer to join",
        "xml_doctype": "a document type declaration, whose entities are not expanded",
    },
    "reddit": {
        **_BAD_ROW,
        **_LOW_SCORE,
        "subreddit_not_kept": "a submission of a subreddit that is not among those to keep",
        "bot_author": "a submission of a bot",
        "deleted_post": "a submission whose title or text was deleted or removed",
        "adult_content": "a submission that is marked as adult content",
        "link_post": "a submission of a link, without a text of its own",
        "title_only": "a submission of a mere title, without a text",
    },
    "arxiv": {
        **_NOT_A_FILE,
        **_UNSAFE_PATH,
        **_PACKAGE_TOO_LARGE,
        "pdf_only": "a paper of which there is only a PDF or PostScript file",
        "no_tex": "a paper without a TeX file",
        "withdrawn": "a paper that its authors withdrew, so that only a note is left",
        "no_main_file": "a paper none of whose TeX files is the main file",
        "too_many_expansions": "a paper whose macros expand beyond the limits",
    },
    "code": {
        **_NOT_A_FILE,
        **_UNSAFE_PATH,
        **_PACKAGE_TOO_LARGE,
        "bad_member": "a member of an archive that is damaged, encrypted, or packed by an unknown method",
        "unknown_language": "a file whose programming language is not recognized by its name or content",
        "other_language": "a file in a programming language that is not one of source.code.languages",
        "unknown_licence": "a file without a licence that is recognized, in the file or in the folders above it",
        "other_licence": "a file whose licence is not one of source.code.licences",
        "lock_file": "a list of the exact versions of dependencies",
        "vendored": "a copy of another project, by its path",
        "generated": "a file that a program wrote, by its name or a note in its first lines",
        "binary_file": "a file that is no text, because it has NUL bytes",
        "hidden_xml": "a file of another language that begins as XML",
        "too_many_lines": "the number of lines is above source.code.max_lines",
        "long_line": "the longest line is longer than its maximum",
        "long_lines": "the mean length of lines is above source.code.max_mean_line_chars",
        "few_alphanumeric": "the share of letters and digits is below source.code.min_alphanumeric",
        "few_alphabetic": "the share of letters is below its minimum",
        "encoded_data": "a long run, or a large share, of encoded bytes",
        "data_size": "a JSON or YAML file that is shorter or longer than source.code.data_chars",
        "little_visible_text": "an HTML file with less visible text than its minimum",
    },
}
"""Further reasons of single formats: format → reason → meaning."""
CRAWL_REASONS = {
    "unreachable_file": "a file of a crawl, or its rest, that cannot be fetched; the value is the HTTP status",
}
"""Further reasons of the files of `source.crawl`."""
PARENTS_REASONS = {
    "bad_parents": "a row whose parents are not all document ids (32 hex digits) or URLs",
    "too_many_parents": "a row with more parents than a document may name; the value is their number",
}
"""Further reasons of sources with `parents_field`. A takedown could not follow the parents of such a row."""
_SAME_REASONS = {"books": "gutenberg", "unarxive": "arxiv", "arrow": "parquet", "hf": "parquet"}
"""Formats that have the reasons of another one."""
_OF_FORMATS = {name: text for reasons in FORMAT_REASONS.values() for name, text in reasons.items()}
REASONS = COMMON_REASONS | _OF_FORMATS | CRAWL_REASONS | PARENTS_REASONS
"""The reasons of all formats."""


def reasons_of(file_format: str, is_crawl: bool = False, has_parents: bool = False) -> dict[str, str]:
    """Return the reasons for which a record of a file in this format may be dropped, with their meanings.

    `has_parents`: True if the source has `parents_field`.
    """
    own = FORMAT_REASONS.get(_SAME_REASONS.get(file_format, file_format), {})
    more = {**(CRAWL_REASONS if is_crawl else {}), **(PARENTS_REASONS if has_parents else {})}
    return {**COMMON_REASONS, **own, **more}


def open_split(split: Split, stream: ByteStream, config: SourceConfig) -> Iterator[tuple[Row, Drop | None]]:
    """Yield (row, drop) for each record of a file or of its range, in order. `drop` is None if it can be a document.

    Invalid content never raises an error. If a reader raises one nevertheless, the last row is a gap up to the end of
    the file, with the Failure that describes it. An error of the storage, and one of memory, is raised.
    """
    if split.span is not None and split.span.first is None:
        return iter(())
    opened = chosen_rows(split, stream, config) if split.ranges else FORMATS[split.format].open(split, stream, config)
    rows = _contained(opened, split, stream)
    return rows if config.title == "column" else _with_mark(rows)


def chosen_rows(split: Split, stream: Any, config: SourceConfig) -> Iterator[tuple[Row, Drop | None]]:
    """Yield the rows of the records that `source.where` chooses of an archive; `stream`: a `ChosenRecords`.

    Each is equal to the row of the record in a run that reads the whole archive.
    """
    for span, data in stream.records(config.max_record_bytes):
        if data is not None:
            yield from open_warc(split, io.BytesIO(data), config, span.first)
            continue
        size = span.end - span.first
        row = new_row("gap") | {"doc_id": doc_id(split.source, split.name, span.first), "source": split.source}
        row |= {"split": split.name, "offset": span.first, "length": size, "snapshot": split.snapshot}
        yield row, Drop("record_too_large", float(size), float(config.max_record_bytes))


def _contained(
    rows: Iterator[tuple[Row, Drop | None]], split: Split, stream: ByteStream
) -> Iterator[tuple[Row, Drop | None]]:
    end = split.first.offset
    try:
        for row, drop in rows:
            end = row["offset"] + row["length"]
            yield row, drop
    except (OSError, MemoryError, PenstockError):
        raise
    except Exception as error:
        yield gap_to_end(split, end, error, stream)


GAP_PART = (1 << 31) - 1
"""Number, among the rows at its offset, of the gap after which a file was not read: no record has as many."""


def gap_to_end(split: Split, begin: int, error: Exception, stream: Any) -> tuple[Row, Drop]:
    """Return the gap from an offset to the end of a file, or of the range of one, whose reader has failed.

    The row has the error that describes it.
    """
    is_unreachable = isinstance(error, UnreachableFileError)
    size = split.size if split.span is None or split.span.following is None else split.span.following.offset
    if split.is_crawl:
        size = getattr(stream, "known_size", begin) if is_unreachable else stream.seek(0, 2)
    rest = max(0, size - begin) if FORMATS[split.format].in_bytes else 0
    identifier = doc_id(split.source, split.name, begin, GAP_PART)
    row = new_row("gap") | {"doc_id": identifier, "source": split.source}
    row |= {"split": split.name, "offset": begin, "length": rest, "snapshot": split.snapshot}
    message = error.cause if isinstance(error, UnreachableFileError) else ""
    row[FAILURE] = Failure(SOURCE.name, type(error).__name__, place_of(error), message)
    if isinstance(error, UnreachableFileError):
        return row, Drop("unreachable_file", None if error.status is None else float(error.status))
    return row, Drop("unreadable_gap", float(rest))


def _with_mark(rows: Iterator[tuple[Row, Drop | None]]) -> Iterator[tuple[Row, Drop | None]]:
    """Yield the rows with the mark by which the extract stage adds the title to the text, once it has both."""
    for row, drop in rows:
        row[TITLE_FIRST] = True
        yield row, drop


SOURCE = Source(
    name="source",
    version=12,
    config=SourceConfig,
    adds=COLUMNS,
    reasons=REASONS,
    open=open_split,
)


# Refetch: reads the original record of a document again by its byte range and compares it with the stored row.
#
# The bytes pass through the source stage again. Record type, URL, date, status, media type and page size are compared.

COMPARED_COLUMNS = ("record_type", "url", "date", "http_status", "mime", "page_bytes")
HEAD_BYTES = 2000


@dataclass(frozen=True)
class RefetchedRecord:
    """A record read again from its input file, and the record's differences from its row in `documents`."""

    uri: str
    """URI of the input file."""
    offset: int
    """Offset of the record in the file [bytes; rows in a Parquet file]."""
    length: int
    """Length of the record [bytes; rows in a Parquet file]."""
    changes: tuple[str, ...]
    """Differences from the stored row, as messages; empty if there are none."""
    head: bytes
    """First bytes of the record as the crawler wrote them, decompressed; of a package of files, those of the main one.
    They may contain personal data."""


def refetch(split: Split, recorded: Mapping[str, Any], config: SourceConfig) -> RefetchedRecord:
    """Read a document's record again from its input file, and compare the record with `recorded`.

    `recorded` is the document's row in `documents`. Raises ContractError if the input file cannot be read.
    """
    offset, length = int(recorded["offset"]), int(recorded["length"])
    file_format = FORMATS[split.format]
    try:
        if split.is_crawl:
            data = read_crawl_range(split.uri, offset, length)
        else:
            fs, path = resolve_uri(split.uri)
            data = file_format.read_record(fs, path, offset, length)
    except (OSError, pa.ArrowException) as error:
        raise ContractError(
            f"{split.uri}: expected a readable record at offset {offset}, got an error: {error}. Restore the file from "
            "a backup."
        ) from error
    open_record = file_format.open_record or file_format.open
    alone = replace(split, size=len(data), companions=(), ranges="", span=None)
    rows = open_record(alone, HashedStream(io.BytesIO(data)), config)
    row = next((row for row, _ in rows if row["record_type"] != "gap"), None)
    if file_format.in_bytes and file_format.is_exact(data) and len(data) < length:
        changes = [f"length: expected {length} bytes from {offset} on, got {len(data)}"]
    else:
        changes = _changes(row, recorded)
    return RefetchedRecord(split.uri, offset, length, tuple(changes), file_format.head(data)[:HEAD_BYTES])


def _changes(row: Row | None, recorded: Mapping[str, Any]) -> list[str]:
    if row is None:
        return [f"expected a record at {recorded['offset']}, got bytes of none"]
    named = [name for name in COMPARED_COLUMNS if name in recorded]
    return [
        f"{name}: expected {recorded[name]}, got {row.get(name)}" for name in named if recorded[name] != row.get(name)
    ]
