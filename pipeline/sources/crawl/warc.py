"""Reader of WARC, WET and ARC archives, compressed or not: one row per record, and one per gap between records.

Reading never stops at damage. A record's declared length is accepted if the file continues correctly at its end, such
as with another record. Otherwise the record is dropped, and reading resumes at the next record start after its header.
"""

import base64
import hashlib
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.engine.stage import Drop, RangeStart, Row, Split
from pipeline.rights.preferences import HEADER_FIELDS
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import PEEK_BYTES, FrameReader, NestedCodings, RecordPatterns
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.http import (
    ARC_LINE,
    RECORD_START,
    HttpPage,
    RecordHeader,
    compressed_size,
    parse_arc_line,
    parse_warc_header,
    read_response,
    set_body,
    split_content_type,
    starts_with_record,
)
from pipeline.sources.crawl.window import DecodedWindow
from pipeline.sources.provenance import SourceItem, account_bytes, new_row, set_text, too_many_rows

TERMINATOR = re.compile(rb"\r?\n\r?\n")
DIGESTS = frozenset({"md5", "sha1", "sha256", "sha384", "sha512"})
RECORD_STARTS = RecordPatterns(starts_with_record, RECORD_START)
PAGE_RECORD_TYPES = frozenset({"response", "resource", "conversion"})


@dataclass(slots=True)
class ArchiveRecord:
    """A record as stored in the file, or a gap: bytes without a readable record. A gap has no `header`.

    `drop` is the reason why the record or gap cannot be used; None if the record can be used.
    """

    start: int
    header: RecordHeader | None = None
    block: bytes = b""
    drop: Drop | None = None
    is_repeated: bool = False
    """True if its frame repeats responses with codings of their own, or its body does not look like its coding."""


def open_warc(
    split: Split, stream: ByteStream, config: SourceConfig, base: int = 0
) -> Iterator[tuple[Row, Drop | None]]:
    """Yield the rows of an archive in order. Offsets and lengths are bytes of the stored file.

    The lengths of all rows add up to the size of the file. `base`: offset in the file at which the stream begins.
    """
    frames = FrameReader(stream, RECORD_STARTS)
    window, num_before, nested = DecodedWindow(frames), 0, NestedCodings()
    if split.first.resume:
        *state, num_before, frame, size = split.first.resume
        window.resume((*state,))
        nested = NestedCodings(frame, size)
    records = read_records(window, config.max_record_bytes, num_before, nested)
    items = (_item(record, config) for record in records)
    return account_bytes(items, split, lambda: frames.end or frames.size(), base)


def find_archive_starts(stream: ByteStream, config: SourceConfig, places: Sequence[int]) -> Iterator[RangeStart]:
    """Yield, for each of the ascending places in the stored file, the first record or gap at or after it, if any.

    Records are read as for the rows, but their blocks are not looked at: nothing in a record can pass for the start of
    another one. Records that share a frame have the place up to which the file was decoded.
    """
    frames = FrameReader(stream, RECORD_STARTS)
    window = DecodedWindow(frames)
    nested = NestedCodings()
    records = read_records(window, config.max_record_bytes, 0, nested)
    left, offset, number, num_before = deque(places), 0, 0, 0
    next(records, None)  # the first range begins with the file
    while left:
        state, reached, coded = window.state(), min(frames.blocks.reached, window.reached), nested.state
        num_before += 1
        if (record := next(records, None)) is None:
            return
        is_new = record.start != offset
        offset, number = record.start, 0 if is_new else number + 1
        while state is not None and left and left[0] <= (offset if is_new else reached):
            left.popleft()
            yield RangeStart(offset, number, (*state, num_before, *coded))


def read_records(
    window: DecodedWindow, max_bytes: int, num_before: int = 0, nested: NestedCodings | None = None
) -> Iterator[ArchiveRecord]:
    """Yield every record and gap in order. A record's block is skipped if it is larger than `max_bytes`.

    `num_before`: number of records and gaps before the current position. If the file has too many of them for its
    bytes, a gap replaces the rest of it. `nested` has counted the earlier responses with codings in the current frame.
    """
    number, nested = num_before, nested or NestedCodings()
    while True:
        if window.skip_newlines():
            start, plain = window.stored()
            if (surplus := too_many_rows(number, window.frames.size)) is not None:
                yield ArchiveRecord(start, drop=surplus)
                return
            if starts_with_record(window.peek()):
                yield _read_plain(window, start, max_bytes) if plain else _read_framed(window, max_bytes, nested)
            else:
                window.skip(1)
                yield ArchiveRecord(start, drop=_lost(window, start, plain, "unreadable_gap"))
        elif (piece := window.advance()) is None:
            return
        elif piece.fault is not None:
            yield ArchiveRecord(piece.start, drop=Drop(piece.fault))
        else:
            continue  # a frame without damage: the next run begins
        number += 1


def _read_plain(window: DecodedWindow, start: int, max_bytes: int) -> ArchiveRecord:
    """Read a record in a run of plain (uncompressed) bytes."""
    header = _take_header(window)
    if header is None:
        return ArchiveRecord(start, drop=_lost(window, start, True, "bad_header"))
    # The bytes at the declared end are checked first, so a wrong length does not cause a long read.
    blocks = window.frames.blocks
    end = window.stored()[0] + header.length if header.length else None
    if end is not None and not blocks.peek(end - 1, 1):
        return ArchiveRecord(start, header, drop=_lost(window, start, True, "truncated_record", "lying_length"))
    following = blocks.peek(end, PEEK_BYTES) if end is not None else window.peek()
    if not _may_follow(following):
        return ArchiveRecord(start, header, drop=_lost(window, start, True, "lying_length"))
    if end is not None and header.length > max_bytes:
        window.seek(end + len(following) - len(following.lstrip(b"\r\n")))
        return ArchiveRecord(start, header, drop=Drop("record_too_large", float(header.length), float(max_bytes)))
    return ArchiveRecord(start, header, window.take(header.length))


def _read_framed(window: DecodedWindow, max_bytes: int, nested: NestedCodings) -> ArchiveRecord:
    """Read a record in decoded bytes of gzip members or zstd frames, which can only be read forwards."""
    start, _ = window.stored()
    header = _take_header(window)
    if header is None:
        return ArchiveRecord(start, drop=_lost(window, start, False, "bad_header"))
    block, drop = b"", None
    if header.length > max_bytes:
        drop = Drop("record_too_large", float(header.length), float(max_bytes))
        following = window.peek() if window.skip(header.length) == header.length else None
    else:
        following = window.ahead(header.length)
    if following is None or not _may_follow(following):
        reason = "truncated_record" if following is None and window.next is None else "lying_length"
        return ArchiveRecord(start, header, drop=_lost(window, start, False, reason, "lying_length"))
    if drop is None:
        block = window.take(header.length)
    size = compressed_size(block)
    is_repeated = size is not None and (not size or nested.is_repeated(start, window.reached, size))
    if not window.skip_newlines() and (fault := _fault_of(window, start)):
        drop = Drop(fault)
    return ArchiveRecord(start, header, block, drop, is_repeated)


def _take_header(window: DecodedWindow) -> RecordHeader | None:
    """Read the record header at the current position. None if the header has no end or declares no valid length."""
    head = window.peek()
    if line := ARC_LINE.match(head):
        return parse_arc_line(window.take(line.end()))
    block = window.take_header()
    return parse_warc_header(block) if block is not None else None


def _may_follow(data: bytes) -> bool:
    """Return True if a record may end directly before these bytes."""
    # A record may end before two line ends, before another record or at the end of the file.
    rest = data.lstrip(b"\r\n")
    return not rest or TERMINATOR.match(data) is not None or starts_with_record(rest)


def _lost(window: DecodedWindow, start: int, plain: bool, reason: str, reason_if_resumed: str | None = None) -> Drop:
    """Skip an unreadable record, up to the next record; return the drop for the skipped bytes.

    The drop has `reason_if_resumed` (if given) if another record was found, else `reason`. If damage of the frame at
    `start` ends the run, the drop names the kind of damage.
    """
    if plain:
        # The search starts one byte earlier, to include the line end before an ARC line.
        here = window.stored()[0] - 1 if window.fill(1) else start
        next_start = window.frames.next_start(max(here, start + 1))
        window.seek(next_start)
        is_resumed = next_start < window.frames.blocks.size()
    else:
        is_resumed = window.search(RECORD_START)
        if not is_resumed and (fault := _fault_of(window, start)):
            return Drop(fault)
    return Drop(reason_if_resumed if is_resumed and reason_if_resumed else reason)


def _fault_of(window: DecodedWindow, start: int) -> str | None:
    """Return the kind of damage if the frame at `start` is damaged, and move past the damage; else return None."""
    piece = window.next
    if piece is None or piece.fault is None or piece.start != start:
        return None
    window.advance()
    return piece.fault


def _item(record: ArchiveRecord, config: SourceConfig) -> SourceItem:
    header, drop = record.header, record.drop
    if header is None:
        return SourceItem(record.start, new_row("gap"), drop)
    row = new_row(header.kind, header.url, header.date)
    if header.kind not in PAGE_RECORD_TYPES and (drop is None or drop.rule == "record_too_large"):
        drop = Drop("not_a_page")
    if drop is None:
        drop = _read_page(row, record, header, config)
    return SourceItem(record.start, row, drop)


def _read_page(row: Row, record: ArchiveRecord, header: RecordHeader, config: SourceConfig) -> Drop | None:
    """Set the columns of a row from the block of its record. Return a Drop if the block has no page to keep."""
    block = record.block
    if config.drop_truncated and header.truncated:
        return Drop("truncated_record")
    if config.verify_digests and not digest_matches(header, block):
        return Drop("digest_mismatch")
    mime, charset = split_content_type(header.content_type)
    if header.kind == "conversion" and mime in (None, "text/plain"):
        row["mime"] = mime
        return set_text(row, block.decode("utf-8", "replace").removeprefix("\ufeff"), config)
    if header.kind == "response":
        is_http = (header.url or "").lower().startswith("http") if header.arc else mime in (None, "application/http")
        if not is_http:
            row["mime"] = mime
            return Drop("not_a_page")
        page = read_response(block, config, record.is_repeated)
    else:
        page = HttpPage(mime=mime, charset=charset)
        if mime is None or mime in config.mime_types:
            set_body(page, memoryview(block), [], config)
        else:
            page.drop = Drop("not_html")
    row["http_status"], row["mime"], row["_http_charset"] = page.status, page.mime, page.charset
    row[HEADER_FIELDS] = page.rights
    if page.body is not None:
        row["_payload"], row["page_bytes"] = page.body, len(page.body)
    return page.drop


def digest_matches(header: RecordHeader, block: bytes) -> bool:
    """Return True if the block has the declared digest, or if no digest of a known algorithm is declared.

    The payload digest is compared only if no block digest is declared. Source: ISO 28500:2017, sections 5.8 and 5.9
    (`algorithm:value`, in base 32 or base 16).
    """
    declared = header.block_digest or header.payload_digest or ""
    if not header.block_digest and header.kind == "response" and (blank := TERMINATOR.search(block)):
        block = block[blank.end() :]
    algorithm, _, value = declared.partition(":")
    algorithm = algorithm.strip().lower().replace("-", "")
    if algorithm not in DIGESTS:
        return True
    digest = hashlib.new(algorithm, block, usedforsecurity=False).digest()
    value = value.strip()
    return value.lower() == digest.hex() or value.upper().rstrip("=") == base64.b32encode(digest).decode().rstrip("=")
