"""A file in a 7z archive as decoded blocks, in bounded memory: a thread decompresses, and waits for the reader.

Nothing of the archive is written to disk, so names of members such as `../x` have no effect.
"""

import io
from collections.abc import Callable
from queue import Queue
from threading import Thread
from typing import Any, cast

from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import DecodedBlock, most_decoded

MAGIC = b"7z\xbc\xaf\x27\x1c"
MAX_DICTIONARY = 1 << 30
"""Largest dictionary of LZMA that is accepted: the decoder holds it in memory [bytes]."""
MAX_HEADER_BYTES = 64 << 10
"""Maximum size of the list of members as stored; decompressed it may be 10,000 times as large [bytes]."""
HELD_BLOCKS = 4
_LZMA, _LZMA2 = b"\x03\x01\x01", b"\x21"


class MemberFrames:
    """Reads the decoded blocks of the first member of a 7z archive whose name `is_wanted` accepts.

    An archive that cannot be read, or has no such member, is one block with a fault.
    """

    def __init__(self, stream: ByteStream, is_wanted: Callable[[str], bool]):
        self._stream, self._is_wanted = stream, is_wanted
        self._blocks: Queue[bytes | str | None] = Queue(HELD_BLOCKS)
        self._thread: Thread | None = None
        self._is_closed = self._has_ended = False
        self._size = self._decoded = 0

    def next(self) -> DecodedBlock | None:
        """Return the next decoded block, or None at the end of the member."""
        if self._thread is None:
            self._thread = Thread(target=self._decompress, daemon=True)
            self._thread.start()
        block = None if self._has_ended else self._blocks.get()
        if isinstance(block, bytes):
            return DecodedBlock(block, 0, False, False)
        self._has_ended = True
        if block is None:
            return None
        return DecodedBlock(b"", 0, False, False, block, self._size)

    def size(self) -> int:
        """Return the size of the archive [bytes]; call it after `next`."""
        return self._size

    def close(self) -> None:
        """End the thread; no more blocks are read."""
        self._is_closed = True
        while self._thread is not None and self._thread.is_alive():
            while not self._blocks.empty():
                self._blocks.get()
            self._thread.join(0.05)

    def put(self, data: bytes) -> None:
        """Add a block. Raises _ClosedError if the reader is closed, and _TooLargeError if the blocks are too many."""
        if self._is_closed:
            raise _ClosedError
        self._decoded += len(data)
        if self._decoded > most_decoded(self._size):
            raise _TooLargeError
        self._blocks.put(data)

    def _decompress(self) -> None:
        import py7zr

        try:
            self._size = self._stream.seek(0, 2)
            self._stream.seek(0)
            head = self._stream.read(32)
            if int.from_bytes(head[20:28], "little") > MAX_HEADER_BYTES:
                raise ValueError("the list of members is too large")
            self._stream.seek(0)
            with py7zr.SevenZipFile(cast(Any, _File(self._stream))) as archive:
                if _dictionary(archive) > MAX_DICTIONARY:
                    raise ValueError("the dictionary is too large")
                name, *others = [name for name in archive.getnames() if self._is_wanted(name)] or [""]
                if not name:
                    raise StopIteration
                archive.extract(targets=[name], factory=_factory(self))
            self._blocks.put("unreadable_gap" if others else None)
        except _ClosedError:
            return
        except StopIteration:
            self._blocks.put("unreadable_gap")
        except _TooLargeError:
            self._blocks.put("decoded_too_large")
        except Exception as error:  # py7zr raises errors of many kinds on damaged archives
            if not self._is_closed:
                self._blocks.put("truncated_record" if isinstance(error, EOFError) else "bad_gzip")


class _ClosedError(Exception):
    """The reader needs no more blocks."""


class _TooLargeError(Exception):
    """The member is too large for the bytes of the archive."""


class _File(io.RawIOBase):
    """The bytes of an archive as the kind of file object that py7zr accepts."""

    def __init__(self, stream: ByteStream):
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes."""
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to another position and return it."""
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        """Return the current position."""
        return self._stream.tell()

    def readable(self) -> bool:
        """Return True; py7zr calls this."""
        return True

    def seekable(self) -> bool:
        """Return True; py7zr calls this."""
        return True


def _factory(frames: MemberFrames) -> Any:
    """Return an object that gives py7zr the writer of a member: one that passes its bytes on."""
    from py7zr.io import Py7zIO, WriterFactory

    class Writer(Py7zIO):
        written = 0

        def write(self, s: bytes | bytearray) -> int:
            for start in range(0, len(s), 1 << 20):
                frames.put(bytes(s[start : start + (1 << 20)]))
            self.written += len(s)
            return len(s)

        def read(self, size: int | None = None) -> bytes:
            return b""

        def seek(self, offset: int, whence: int = 0) -> int:
            return 0

        def flush(self) -> None:
            return

        def size(self) -> int:
            return self.written

    class Factory(WriterFactory):
        def create(self, filename: str) -> Writer:
            return Writer()

    return Factory()


def _dictionary(archive: Any) -> int:
    """Return the size of the largest dictionary of an archive [bytes]."""
    streams = archive.header.main_streams
    sizes = [0]
    for folder in streams.unpackinfo.folders if streams is not None else ():
        for coder in folder.coders:
            method, properties = coder["method"], coder["properties"] or b""
            if method == _LZMA2 and properties:
                sizes.append((2 | properties[0] & 1) << (properties[0] // 2 + 11))
            elif method == _LZMA and len(properties) >= 5:
                sizes.append(int.from_bytes(properties[1:5], "little"))
    return max(sizes)
