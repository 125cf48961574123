"""Byte streams of a split: one that takes the SHA-256 of what is read, one that reads anywhere in blocks.

An input is identified before reading by name, size and time; its digest is taken on the way, so that nothing is read
twice. Readers may jump: bytes are hashed once, in order, up to a high-water mark, and `finish` reads the rest.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow.fs as pafs

from pipeline.stage import Split

BLOCK_BYTES = 1 << 20
OVERLAP_BYTES = 16 << 10


class ByteStream(Protocol):
    """What a source needs of a file: reading from any position."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class HashedStream:
    """A seekable file that takes the SHA-256 of its content while it is read."""

    def __init__(self, inner: Any):
        self._inner = inner
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._position = int(inner.tell())
        self.closed = False

    def read(self, size: int | None = -1, /) -> bytes:
        """At most `size` bytes from here on; all of them when it is negative; empty at the end of the file."""
        data: bytes = self._inner.read(size) if size is not None and size >= 0 else self._inner.read()
        start, self._position = self._position, self._position + len(data)
        if start <= self._hashed < self._position:
            self._digest.update(memoryview(data)[self._hashed - start :])
            self._hashed = self._position
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to another position and return it."""
        self._inner.seek(offset, whence)
        self._position = int(self._inner.tell())
        return self._position

    def tell(self) -> int:
        """The position of the next byte to read."""
        return self._position

    def readable(self) -> bool:
        """True: pyarrow asks."""
        return True

    def seekable(self) -> bool:
        """True: pyarrow asks."""
        return True

    def finish(self) -> tuple[str, int]:
        """The SHA-256 (hex) and the size [bytes] of the whole file; reads what was never read."""
        self.seek(self._hashed)
        while self.read(BLOCK_BYTES):
            pass
        return self._digest.hexdigest(), self._hashed

    def close(self) -> None:
        """Close the file below."""
        self.closed = True
        self._inner.close()


def open_stream(split: Split) -> HashedStream:
    """The split's file, hashed while it is read. Raises OSError if it is gone."""
    fs, path = resolve(split.uri)
    return HashedStream(fs.open_input_file(path))


def resolve(uri: str) -> tuple[pafs.FileSystem, str]:
    """The filesystem of a local path or URI, and the path as that filesystem spells it."""
    if "://" not in uri:
        return pafs.LocalFileSystem(), uri
    fs, path = pafs.FileSystem.from_uri(uri)
    return fs, path


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
