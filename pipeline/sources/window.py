"""A window on decoded bytes that knows where each one is stored, and that never slides over a damaged place unseen.

The bytes it goes through form *runs*: stretches without damage that a record may span. A frame that begins with a
record begins a new run, so a record whose declared length is wrong cannot swallow the next gzip member.
"""

import re
from collections import deque

from pipeline.sources.blocks import BLOCK_BYTES, OVERLAP_BYTES
from pipeline.sources.compression import PEEK_BYTES, Frames, Piece
from pipeline.sources.headers import MAX_HEADER_BYTES

NEWLINES = re.compile(rb"[\r\n]*")
BLANK_LINE = re.compile(rb"\n\r{0,2}\n")


class Window:
    """The decoded bytes of a file from a current position on, pulled as they are asked for."""

    def __init__(self, frames: Frames):
        self.frames = frames
        self.next: Piece | None = None
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

    def advance(self) -> Piece | None:
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

    def _append(self, piece: Piece, parts: list[bytes], decoded: int) -> int:
        if piece.first or not self._marks:
            self._marks.append((decoded, piece.start, piece.plain))
        parts.append(piece.data)
        return len(piece.data)

    def _begins_run(self, piece: Piece) -> bool:
        starts = self.frames.starts
        if piece.fault is not None or starts is None:
            return piece.fault is not None
        return piece.first and starts.begins(piece.data.lstrip(b"\r\n"))
