"""WARC, WET, WAT and ARC archives, compressed or not: one row for every record, and one for every gap between them.

Reading never stops at damage. A record ends where its declared length says if something that can follow a record is
there; otherwise it is dropped, and the next place where a record starts is looked for behind its header.
"""

import base64
import hashlib
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.compression import (
    BLOCK_BYTES,
    OVERLAP_BYTES,
    PEEK_BYTES,
    ByteStream,
    DecodedBlock,
    FrameReader,
    RecordPatterns,
)
from pipeline.sources.config import SourceConfig
from pipeline.sources.http import (
    ARC_LINE,
    MAX_HEADER_BYTES,
    RECORD_START,
    HttpPage,
    RecordHeader,
    parse_arc_line,
    parse_warc_header,
    read_response,
    set_body,
    split_content_type,
    starts_with_record,
)
from pipeline.sources.provenance import SourceItem, account_bytes, new_row, set_text

# A window on decoded bytes that knows where each one is stored, and that never slides over a damaged place unseen.
#
# The bytes it goes through form *runs*: stretches without damage that a record may span. A frame that begins with a
# record begins a new run, so a record whose declared length is wrong cannot swallow the next gzip member.

NEWLINES = re.compile(rb"[\r\n]*")
BLANK_LINE = re.compile(rb"\n\r{0,2}\n")


class DecodedWindow:
    """The decoded bytes of a file from a current position on, pulled as they are asked for."""

    def __init__(self, frames: FrameReader):
        self.frames = frames
        self.next: DecodedBlock | None = None
        """The piece behind the run: what begins the next one, or why nothing can be decoded there."""
        self._buffer = b""
        self._at = 0
        self._base = 0
        """Decoded offset of the buffer's first byte."""
        self._marks: deque[tuple[int, int, bool]] = deque()
        """(decoded offset, stored offset, plain) where frames begin, the first at or before the position."""
        self._ended = False

    def fill(self, size: int) -> int:
        """The number of bytes at hand: `size` or more, fewer only where the run ends."""
        held = len(self._buffer) - self._at
        if held >= size or self.next is not None or self._ended:
            return held
        parts = [self._buffer[self._at :]]
        self._base += self._at
        while held < size:
            piece = self.frames.next()
            if piece is None:
                self._ended = True
                break
            if self._begins_run(piece):
                self.next = piece
                break
            held += self._append(piece, parts, self._base + held)
        self._buffer, self._at = b"".join(parts), 0
        return held

    def advance(self) -> DecodedBlock | None:
        """Enter the next run, this one being used up, and return its first piece; None at the end of the file.
        A piece with a fault is returned once, and the run behind it is entered by the next call."""
        piece, self.next = self.next, None
        if piece is None:
            return None
        self._base += self._at
        self._buffer, self._at = b"", 0
        self._marks.clear()
        if piece.fault is None:
            parts: list[bytes] = []
            self._append(piece, parts, self._base)
            self._buffer = piece.data
        return piece

    def seek(self, stored: int) -> None:
        """Go on at a stored offset where a frame or plain stretch starts."""
        self.frames.seek(stored)
        self._base += self._at
        self._buffer, self._at, self.next, self._ended = b"", 0, None, False
        self._marks.clear()

    def stored(self) -> tuple[int, bool]:
        """Where the current byte is stored (the start of its frame, if it has one), and whether it is plain."""
        position = self._base + self._at
        while len(self._marks) > 1 and self._marks[1][0] <= position:
            self._marks.popleft()
        decoded, stored, plain = self._marks[0]
        return (stored + position - decoded, True) if plain else (stored, False)

    def peek(self) -> bytes:
        """The next bytes of the run, PEEK_BYTES at most."""
        self.fill(PEEK_BYTES)
        return self._buffer[self._at : self._at + PEEK_BYTES]

    def take(self, size: int) -> bytes:
        """The next `size` bytes of the run, fewer only where it ends."""
        self.fill(size)
        data = self._buffer[self._at : self._at + size]
        self._at += len(data)
        return data

    def ahead(self, distance: int) -> bytes | None:
        """The bytes that stand `distance` further on, PEEK_BYTES at most; None if the run ends before."""
        if self.fill(distance + PEEK_BYTES) < distance:
            return None
        return self._buffer[self._at + distance : self._at + distance + PEEK_BYTES]

    def skip(self, size: int) -> int:
        """Pass over `size` bytes without holding them; the number passed, less only where the run ends."""
        left = size
        while left and self.fill(1):
            step = min(left, len(self._buffer) - self._at)
            self._at += step
            left -= step
        return size - left

    def skip_newlines(self) -> bool:
        """Pass over line ends; whether the run goes on behind them."""
        while self.fill(1):
            found = NEWLINES.match(self._buffer, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._buffer):
                return True
        return False

    def take_header(self) -> bytes | None:
        """The bytes up to the next blank line and with it. None if none is in reach; the bytes without it are then
        passed over, since no header ends in them, but for the last ones, in which the next header may begin."""
        size = 4 << 10
        while True:
            held = self.fill(size)
            if found := BLANK_LINE.search(self._buffer, self._at):
                return self.take(found.end() - self._at)
            if held < size:
                self.skip(held)
                return None
            if size >= MAX_HEADER_BYTES:
                self.skip(size - PEEK_BYTES)
                return None
            size *= 4

    def search(self, pattern: re.Pattern[bytes]) -> bool:
        """Move to the next match of `pattern` in this run, or to its end; whether there is one."""
        while True:
            held = self.fill(BLOCK_BYTES)
            if found := pattern.search(self._buffer, self._at):
                self._at = found.start()
                return True
            if held < BLOCK_BYTES:
                self._at = len(self._buffer)
                return False
            self._at += held - OVERLAP_BYTES

    def _append(self, piece: DecodedBlock, parts: list[bytes], decoded: int) -> int:
        if piece.first or not self._marks:
            self._marks.append((decoded, piece.start, piece.plain))
        parts.append(piece.data)
        return len(piece.data)

    def _begins_run(self, piece: DecodedBlock) -> bool:
        starts = self.frames.starts
        if piece.fault is not None or starts is None:
            return piece.fault is not None
        return piece.first and starts.begins(piece.data.lstrip(b"\r\n"))


TERMINATOR = re.compile(rb"\r?\n\r?\n")
DIGESTS = frozenset({"md5", "sha1", "sha256", "sha384", "sha512"})
RECORD_STARTS = RecordPatterns(starts_with_record, RECORD_START)
PAGE_RECORD_TYPES = frozenset({"response", "resource", "conversion"})


@dataclass(slots=True)
class ArchiveRecord:
    """A record as it lies in the file, or a gap (no header); `drop` says what is wrong with its bytes."""

    start: int
    header: RecordHeader | None = None
    block: bytes = b""
    drop: Drop | None = None


def open_warc(split: Split, stream: ByteStream, config: SourceConfig) -> Iterator[tuple[Row, Drop | None]]:
    """The rows of an archive in the order of the file. Offsets and lengths are stored bytes and add up to its size."""
    frames = FrameReader(stream, RECORD_STARTS)
    records = read_records(DecodedWindow(frames), config.max_record_bytes)
    return account_bytes((_item(record, config) for record in records), split, lambda: frames.end)


def read_records(window: DecodedWindow, max_bytes: int) -> Iterator[ArchiveRecord]:
    """Every record and gap in order; a block above `max_bytes` is passed over without being held."""
    while True:
        if window.skip_newlines():
            start, plain = window.stored()
            if starts_with_record(window.peek()):
                yield _read_plain(window, start, max_bytes) if plain else _read_framed(window, start, max_bytes)
            else:
                window.skip(1)
                yield ArchiveRecord(start, drop=_lost(window, start, plain, "unreadable_gap"))
        elif (piece := window.advance()) is None:
            return
        elif piece.fault is not None:
            yield ArchiveRecord(piece.start, drop=Drop(piece.fault))


def _read_plain(window: DecodedWindow, start: int, max_bytes: int) -> ArchiveRecord:
    """A record in uncompressed bytes. The place where it says it ends is looked at before the record is read, so a
    wrong length costs one look, however large it is."""
    header = _take_header(window)
    if header is None:
        return ArchiveRecord(start, drop=_lost(window, start, True, "bad_header"))
    blocks = window.frames.blocks
    end = window.stored()[0] + header.length if header.length else None
    if end is not None and not blocks.peek(end - 1, 1):
        return ArchiveRecord(start, header, drop=_lost(window, start, True, "truncated_record", "lying_length"))
    behind = blocks.peek(end, PEEK_BYTES) if end is not None else window.peek()
    if not _may_follow(behind):
        return ArchiveRecord(start, header, drop=_lost(window, start, True, "lying_length"))
    if end is not None and header.length > max_bytes:
        window.seek(end + len(behind) - len(behind.lstrip(b"\r\n")))
        return ArchiveRecord(start, header, drop=Drop("record_too_large", float(header.length), float(max_bytes)))
    return ArchiveRecord(start, header, window.take(header.length))


def _read_framed(window: DecodedWindow, start: int, max_bytes: int) -> ArchiveRecord:
    """A record in decoded bytes of gzip members or zstd frames, which can only be read forwards."""
    header = _take_header(window)
    if header is None:
        return ArchiveRecord(start, drop=_lost(window, start, False, "bad_header"))
    block, drop = b"", None
    if header.length > max_bytes:
        drop = Drop("record_too_large", float(header.length), float(max_bytes))
        behind = window.peek() if window.skip(header.length) == header.length else None
    else:
        behind = window.ahead(header.length)
    if behind is None or not _may_follow(behind):
        reason = "truncated_record" if behind is None and window.next is None else "lying_length"
        return ArchiveRecord(start, header, drop=_lost(window, start, False, reason, "lying_length"))
    if drop is None:
        block = window.take(header.length)
    if not window.skip_newlines() and (fault := _fault_of(window, start)):
        drop = Drop(fault)
    return ArchiveRecord(start, header, block, drop)


def _take_header(window: DecodedWindow) -> RecordHeader | None:
    """The header at the window's position, which moves behind it; None if it has no end or no length."""
    head = window.peek()
    if line := ARC_LINE.match(head):
        return parse_arc_line(window.take(line.end()))
    block = window.take_header()
    return parse_warc_header(block) if block is not None else None


def _may_follow(data: bytes) -> bool:
    """Whether these bytes may stand behind a record: line ends and then another record, the end, or anything at all
    behind the two line ends that close a WARC record."""
    rest = data.lstrip(b"\r\n")
    return not rest or TERMINATOR.match(data) is not None or starts_with_record(rest)


def _lost(window: DecodedWindow, start: int, plain: bool, reason: str, found_reason: str | None = None) -> Drop:
    """Move to the next record and return the drop for what is passed: for `found_reason` if one starts before the
    stretch ends, for `reason` if not, unless the stretch ends in damage that explains it."""
    if plain:
        # One byte back, for the line end in front of an ARC line.
        here = window.stored()[0] - 1 if window.fill(1) else start
        found = window.frames.next_start(max(here, start + 1))
        window.seek(found)
        is_found = found < window.frames.blocks.size()
    else:
        is_found = window.search(RECORD_START)
        if not is_found and (fault := _fault_of(window, start)):
            return Drop(fault)
    return Drop(found_reason if is_found and found_reason else reason)


def _fault_of(window: DecodedWindow, start: int) -> str | None:
    """The fault of the frame at `start` if the run ends in it; it is then taken as dealt with."""
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
        drop = _read_page(row, header, record.block, config)
    return SourceItem(record.start, row, drop)


def _read_page(row: Row, header: RecordHeader, block: bytes, config: SourceConfig) -> Drop | None:
    """Fill in the columns of a page from its whole block; the reason why it is none, if so."""
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
        page = read_response(block, config)
    else:
        page = HttpPage(mime=mime, charset=charset)
        if mime is None or mime in config.mime_types:
            set_body(page, memoryview(block), [], config)
        else:
            page.drop = Drop("not_html")
    row["http_status"], row["mime"], row["_http_charset"] = page.status, page.mime, page.charset
    if page.body is not None:
        row["_payload"], row["page_bytes"] = page.body, len(page.body)
    return page.drop


def digest_matches(header: RecordHeader, block: bytes) -> bool:
    """Whether the block has the digest its header gives: of the block, else of the payload. True if it gives none that
    can be compared. Source: ISO 28500:2017, sections 5.8 and 5.9 (`algorithm:value`, in base 32 or base 16)."""
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
