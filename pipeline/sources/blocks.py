"""Random access to the bytes of an input file through one cached block, and search in them."""

import re
from collections.abc import Iterator
from typing import Protocol

BLOCK_BYTES = 1 << 20
OVERLAP_BYTES = 16 << 10


class ByteStream(Protocol):
    """The methods of the file object of an input file. The file object must be readable and seekable."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class BlockReader:
    """Reads a file at any position. One block of the file is cached."""

    def __init__(self, stream: ByteStream):
        self._stream = stream
        self._size: int | None = None
        self._start = 0
        self._block = b""
        self._view = memoryview(b"")
        self.reached = 0
        """Offset after the bytes that `at` returned last."""

    @property
    def start(self) -> int:
        """Offset of the cached block."""
        return self._start

    def at(self, position: int, size: int) -> memoryview:
        """Return 1 to `size` bytes from `position` on; empty at the end of the file."""
        offset = position - self._start
        if not 0 <= offset < len(self._block):
            self.load(position)
            offset = 0
        data = self._view[offset : offset + size]
        self.reached = position + len(data)
        return data

    def peek(self, position: int, size: int) -> bytes:
        """Return `size` bytes from `position` on; fewer only at the end of the file."""
        offset = position - self._start
        if 0 <= offset <= len(self._block) - size:
            return bytes(self._view[offset : offset + size])
        return self._read(position, size)  # The cached block is not replaced.

    def search(self, pattern: re.Pattern[bytes], position: int) -> Iterator[int]:
        """Yield the positions of matches at or after `position`; matches longer than OVERLAP_BYTES may be missed."""
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
        """Return the size of the file [bytes]."""
        if self._size is None:
            self._size = self._stream.seek(0, 2)
        return self._size

    def load(self, position: int) -> None:
        """Cache the block that starts at a position."""
        self._start, self._block = position, self._read(position, BLOCK_BYTES)
        self._view = memoryview(self._block)

    def _read(self, position: int, size: int) -> bytes:
        if self._stream.tell() != position:
            self._stream.seek(position)
        data = self._stream.read(size)
        while 0 < len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        return data
