"""A window on the decoded bytes of an archive, which knows their stored offsets and reports every damaged range.

The bytes are divided into *runs*: ranges without damage, within which a record must lie. A frame (such as a gzip
member) that starts with a record starts a new run, so a record with a wrong declared length cannot include the next
frame.
"""

import re
from collections import deque

from pipeline.sources.blocks import BLOCK_BYTES, OVERLAP_BYTES
from pipeline.sources.compression import PEEK_BYTES, DecodedBlock, FrameReader, FrameState
from pipeline.sources.crawl.http import MAX_HEADER_BYTES

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
        self._states: deque[tuple[int, FrameState]] = deque()
        """(decoded offset, state of the frames) where frames and blocks of plain bytes start, as `_marks`."""
        self._ended = False
        self.reached = 0
        """Stored offset up to which the frame of the last block in the buffer has been read."""

    def state(self) -> tuple[int, ...] | None:
        """Return what `resume` needs to continue at the current position; None if it cannot continue there.

        These are the state of the frames, and the numbers of decoded bytes since then and of those that are buffered:
        a header or a record start is looked for in what is buffered.
        """
        if self._at < len(self._buffer):
            position = self._base + self._at
            self._forget(position)
            decoded, state = self._states[0]
            return (*state, position - decoded, len(self._buffer) - self._at)
        if self.next is not None and self.next.fault is None:
            return (*self.frames.state, 0, 0)
        return None

    def resume(self, state: tuple[int, ...]) -> None:
        """Continue where a window on the same file had this state. The window must be a new one."""
        *frame, skipped, held = state
        self.frames.resume(FrameState(*frame))
        parts: list[bytes] = []
        size = 0
        while held and size < skipped + held and (piece := self.frames.next()) is not None and piece.fault is None:
            if size + len(piece.data) <= skipped:
                parts, self._base = [], size + len(piece.data)
                self._append(piece, [], size)
            else:
                self._append(piece, parts, size)
            size += len(piece.data)
        self._buffer, self._at = b"".join(parts), skipped - self._base

    def fill(self, size: int) -> int:
        """Decode until `size` bytes after the current position are buffered, or until the run ends.

        Return the number of bytes that are buffered.
        """
        held = len(self._buffer) - self._at
        if held >= size or self.next is not None or self._ended:
            return held
        parts = [self._buffer[self._at :]]
        self._base += self._at
        self._forget(self._base)
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
        self._states.clear()
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
        self._states.clear()

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
            if match := BLANK_LINE.search(self._buffer, self._at, self._at + MAX_HEADER_BYTES):
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

    def _forget(self, position: int) -> None:
        """Remove the states of frames that end at or before a decoded offset."""
        while len(self._states) > 1 and self._states[1][0] <= position:
            self._states.popleft()

    def _append(self, piece: DecodedBlock, parts: list[bytes], decoded: int) -> int:
        if piece.first or not self._marks:
            self._marks.append((decoded, piece.start, piece.plain))
        if piece.first or piece.plain:
            self._states.append((decoded, self.frames.state))
        self.reached = piece.end
        parts.append(piece.data)
        return len(piece.data)

    def _begins_run(self, piece: DecodedBlock) -> bool:
        starts = self.frames.starts
        if piece.fault is not None or starts is None:
            return piece.fault is not None
        return piece.first and starts.begins(piece.data.lstrip(b"\r\n"))
