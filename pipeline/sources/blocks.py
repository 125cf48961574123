"""Reading anywhere in a byte stream through one cached block, and finding bytes in it."""

import re
from collections.abc import Iterator
from typing import Protocol

BLOCK_BYTES = 1 << 20
OVERLAP_BYTES = 16 << 10


class ByteStream(Protocol):
    """What a source needs of a file: reading from any position."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class Blocks:
    """Reading anywhere in a stream through one cached block."""

    def __init__(self, stream: ByteStream):
        self._stream = stream
        self._start = 0
        self._block = b""
        self._view = memoryview(b"")

    def at(self, position: int, size: int) -> memoryview:
        """At most `size` bytes from `position`; fewer where a block ends; none only at the end of the file."""
        offset = position - self._start
        if not 0 <= offset < len(self._block):
            self._load(position)
            offset = 0
        return self._view[offset : offset + size]

    def peek(self, position: int, size: int) -> bytes:
        """Exactly `size` bytes from `position`, fewer only where the file ends; the cached block stays."""
        offset = position - self._start
        if 0 <= offset <= len(self._block) - size:
            return bytes(self._view[offset : offset + size])
        return self._read(position, size)

    def search(self, pattern: re.Pattern[bytes], position: int) -> Iterator[int]:
        """Positions where `pattern` matches, from `position` on; a match longer than OVERLAP_BYTES may be missed."""
        size = BLOCK_BYTES >> 4
        while True:
            block = self.peek(position, size)
            last = len(block) < size
            covered = len(block) if last else len(block) - OVERLAP_BYTES
            for match in pattern.finditer(block):
                if match.start() < covered:
                    yield position + match.start()
            if last:
                return
            position += covered
            size = BLOCK_BYTES

    def size(self) -> int:
        """The size of the file [bytes]."""
        return self._stream.seek(0, 2)

    def _load(self, position: int) -> None:
        self._start, self._block = position, self._read(position, BLOCK_BYTES)
        self._view = memoryview(self._block)

    def _read(self, position: int, size: int) -> bytes:
        if self._stream.tell() != position:
            self._stream.seek(position)
        data = self._stream.read(size)
        while 0 < len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        return data
