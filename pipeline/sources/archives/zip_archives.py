"""Zip archives of texts, and EPUB files: their members are read in bounded memory, and never written to a disk.

Declared sizes are not trusted: a member is decompressed up to the limit and not further. The list of members is refused
if it is too large.
"""

import io
import re
import zipfile
import zlib
from collections.abc import Sequence

from pipeline.engine.stage import Drop
from pipeline.sources.compression import ByteStream

MAX_LIST_BYTES = 4 << 20
"""Maximum size of the list of members of an archive [bytes]; it has about 60 bytes for each."""
ZIP = b"PK\x03\x04"
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OverflowError)
"""What reading a damaged archive raises. Errors of the storage are others."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_OUTSIDE = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)|^[/\\]|^[A-Za-z]:[/\\]|\0")
"""A name that points outside of the archive."""


class _CheckedStream:
    """A file object that refuses reads as large as only a damaged archive asks for, and positions before the start."""

    def __init__(self, stream: ByteStream):
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes."""
        data = self._stream.read(MAX_LIST_BYTES + 1 if size < 0 else min(size, MAX_LIST_BYTES + 1))
        if len(data) > MAX_LIST_BYTES:
            raise zipfile.BadZipFile(f"expected a list of at most {MAX_LIST_BYTES} bytes, got more")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to another position and return it."""
        start = {0: 0, 1: self._stream.tell()}.get(whence)
        if start is None:
            here = self._stream.tell()
            start = self._stream.seek(0, 2)
            self._stream.seek(here)
        if start + offset < 0:
            raise zipfile.BadZipFile(f"expected a position in the archive, got {start + offset}")
        return self._stream.seek(start + offset)

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._stream.tell()

    def seekable(self) -> bool:
        """Return True."""
        return True


class TextArchive:
    """A zip archive whose members are read one at a time."""

    def __init__(self, stream: ByteStream):
        """Read the list of members. Raises one of DAMAGE if it cannot be read."""
        self._zip = zipfile.ZipFile(_CheckedStream(stream))
        self.members: Sequence[zipfile.ZipInfo] = sorted(
            (info for info in self._zip.infolist() if not info.is_dir()), key=lambda info: info.header_offset
        )
        """The members in the order of their bytes."""

    def unsafe_names(self) -> int:
        """Return the number of members whose names point outside of the archive."""
        return sum(_OUTSIDE.search(info.orig_filename) is not None for info in self.members)

    def read(self, info: zipfile.ZipInfo, max_bytes: int) -> bytes | Drop:
        """Return the content of a member, or a Drop if it is too large, encrypted or damaged."""
        if info.flag_bits & 0x1:
            return Drop("encrypted_book")
        if info.compress_type not in _METHODS:
            return Drop("bad_archive")
        if info.file_size > max_bytes:
            return Drop("record_too_large", float(info.file_size), float(max_bytes))
        try:
            with self._zip.open(info) as member:
                data = member.read(max_bytes + 1)
        except DAMAGE:
            return Drop("bad_archive")
        return data if len(data) <= max_bytes else Drop("record_too_large", float(len(data)), float(max_bytes))


def is_zip(stream: ByteStream) -> bool:
    """Return True if a file begins as a zip archive does. The stream is moved to its start."""
    stream.seek(0)
    head = stream.read(4)
    stream.seek(0)
    return head == ZIP


def is_unsafe(name: str) -> bool:
    """Return True if a name points outside of its archive."""
    return _OUTSIDE.search(name) is not None


def single_member(stream: ByteStream, offset: int, max_bytes: int) -> bytes:
    """Return an archive that holds only the member whose record begins at `offset`; empty if there is none."""
    try:
        archive = TextArchive(stream)
    except DAMAGE:
        return b""
    starts = [info.header_offset if number else 0 for number, info in enumerate(archive.members)]
    if offset not in starts:
        return b""
    info = archive.members[starts.index(offset)]
    data = archive.read(info, max_bytes)
    if isinstance(data, Drop):
        return b""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as copy:
        copy.writestr(zipfile.ZipInfo(info.filename), data)
    return sink.getvalue()


def first_member(data: bytes) -> bytes:
    """Return the content of the first member of an archive; the data itself if it is no archive."""
    if not data.startswith(ZIP):
        return data
    try:
        archive = TextArchive(io.BytesIO(data))
    except DAMAGE:
        return b""
    content = archive.read(archive.members[0], len(data) * 1100) if archive.members else b""
    return b"" if isinstance(content, Drop) else content
