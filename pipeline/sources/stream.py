"""The byte stream of a split: it takes the SHA-256 of the file while it is read.

An input is identified before reading by name, size and time; its digest is taken on the way, so that nothing is read
twice. Readers may jump: bytes are hashed once, in order, up to a high-water mark, and `finish` reads the rest.
"""

import hashlib
from typing import Any

from pipeline.engine.stage import Split
from schemas.storage import resolve

READ_BYTES = 1 << 20


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
        while self.read(READ_BYTES):
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
