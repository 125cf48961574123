"""Reader of WARC, WET and ARC archives, compressed or not: one row per record, and one per gap between records.

Reading never stops at damage. A record's declared length is accepted if the file continues correctly at its end, such
as with another record. Otherwise the record is dropped, and reading resumes at the next record start after its header.
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
from pipeline.sources.crawl.http import (
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

# A window on the decoded bytes of a file, which knows their stored offsets and reports every damaged range. The bytes
# are divided into *runs*: ranges without damage, within which a record must lie. A frame (such as a gzip member) that
# starts with a record starts a new run, so a record with a wrong declared length cannot include the next frame.

NEWLINES = re.compile(rb"[\r\n]*")
BLANK_LINE = re.compile(rb"\n\r{0,2}\n")


class DecodedWindow:
    """Reads the decoded bytes of a file forwards from a current position.

    The bytes are divided into runs. A run is a range without damage, and no record extends over the end of a run.
    """

    def __init__(self, frames: FrameReader):
        self.frames = frames
        self.next: DecodedBlock | None = None
        """The block after the current run, once it has been read: the first of the next run, or one with a fault."""
        self._buffer = b""
        self._at = 0
        self._base = 0
        """Decoded offset of the buffer's first byte."""
        self._marks: deque[tuple[int, int, bool]] = deque()
        """(decoded offset, stored offset, plain) of frame starts; the first is at or before the current position."""
        self._ended = False

    def fill(self, size: int) -> int:
        """Decode until `size` bytes after the current position are buffered, or until the run ends.

        Return the number of bytes that are buffered.
        """
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
        """Move from the end of a run to the next run, and return its first block; None at the end of the file.

        If there is damage before the next run, return a block that describes the damage. Another call then moves to the
        run.
        """
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
        """Continue at the offset `stored` in the compressed file, where a frame or a run of plain bytes must start."""
        self.frames.seek(stored)
        self._base += self._at
        self._buffer, self._at, self.next, self._ended = b"", 0, None, False
        self._marks.clear()

    def stored(self) -> tuple[int, bool]:
        """Return the current offset in the stored file, and True if the bytes there are not compressed.

        In a compressed frame, return the offset of the frame's start, and False.
        """
        position = self._base + self._at
        while len(self._marks) > 1 and self._marks[1][0] <= position:
            self._marks.popleft()
        decoded, stored, plain = self._marks[0]
        return (stored + position - decoded, True) if plain else (stored, False)

    def peek(self) -> bytes:
        """Return the next bytes of the run, at most PEEK_BYTES, without moving."""
        self.fill(PEEK_BYTES)
        return self._buffer[self._at : self._at + PEEK_BYTES]

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes of the run and move after them; fewer bytes only at the end of the run."""
        self.fill(size)
        data = self._buffer[self._at : self._at + size]
        self._at += len(data)
        return data

    def ahead(self, distance: int) -> bytes | None:
        """Return at most PEEK_BYTES bytes that start `distance` bytes after the current position, without moving.

        Return None if fewer than `distance` bytes of the run are left.
        """
        if self.fill(distance + PEEK_BYTES) < distance:
            return None
        return self._buffer[self._at + distance : self._at + distance + PEEK_BYTES]

    def skip(self, size: int) -> int:
        """Skip `size` bytes; return the number of skipped bytes, which is smaller only at the end of the run."""
        left = size
        while left and self.fill(1):
            step = min(left, len(self._buffer) - self._at)
            self._at += step
            left -= step
        return size - left

    def skip_newlines(self) -> bool:
        """Skip carriage returns and line feeds; return True if the run continues after them."""
        while self.fill(1):
            match = NEWLINES.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer):
                return True
        return False

    def take_header(self) -> bytes | None:
        """Return the bytes up to and including the next blank line, and move after the blank line.

        If MAX_HEADER_BYTES or the rest of the run contain no blank line, skip these bytes and return None.
        """
        size = 4 << 10
        while True:
            held = self.fill(size)
            if match := BLANK_LINE.search(self._buffer, self._at):
                return self.take(match.end() - self._at)
            if held < size:
                self.skip(held)
                return None
            if size >= MAX_HEADER_BYTES:
                # The next header may start in the last PEEK_BYTES.
                self.skip(size - PEEK_BYTES)
                return None
            size *= 4

    def search(self, pattern: re.Pattern[bytes]) -> bool:
        """Move to the next match of `pattern` in this run and return True.

        Without a match, move to the run's end and return False.
        """
        while True:
            held = self.fill(BLOCK_BYTES)
            if match := pattern.search(self._buffer, self._at):
                self._at = match.start()
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
    """A record as stored in the file, or a gap: bytes without a readable record. A gap has no `header`.

    `drop` is the reason why the record or gap cannot be used; None if the record can be used.
    """

    start: int
    header: RecordHeader | None = None
    block: bytes = b""
    drop: Drop | None = None


def open_warc(
    split: Split, stream: ByteStream, config: SourceConfig, base: int = 0
) -> Iterator[tuple[Row, Drop | None]]:
    """Yield the rows of an archive in order. Offsets and lengths are bytes of the stored file.

    The lengths of all rows add up to the size of the file. `base`: offset in the file at which the stream begins.
    """
    frames = FrameReader(stream, RECORD_STARTS)
    records = read_records(DecodedWindow(frames), config.max_record_bytes)
    return account_bytes((_item(record, config) for record in records), split, lambda: frames.end, base)


def read_records(window: DecodedWindow, max_bytes: int) -> Iterator[ArchiveRecord]:
    """Yield every record and gap in order. A record's block is skipped if it is larger than `max_bytes`."""
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


def _read_framed(window: DecodedWindow, start: int, max_bytes: int) -> ArchiveRecord:
    """Read a record in decoded bytes of gzip members or zstd frames, which can only be read forwards."""
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
    if not window.skip_newlines() and (fault := _fault_of(window, start)):
        drop = Drop(fault)
    return ArchiveRecord(start, header, block, drop)


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
        drop = _read_page(row, header, record.block, config)
    return SourceItem(record.start, row, drop)


def _read_page(row: Row, header: RecordHeader, block: bytes, config: SourceConfig) -> Drop | None:
    """Set the columns of a row from the block of its record. Return a Drop if the block has no page to keep."""
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
