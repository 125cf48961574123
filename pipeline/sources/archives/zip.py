"""Readers of zip archives, EPUB files among them: their members in the order of the file, in bounded memory.

`read_zip` passes over all members; a `TextArchive` lists them, and reads those that its caller chooses. Declared sizes
are not trusted: a member is decompressed up to the limit and not further. No member is written to a disk.
Source: PKWARE, APPNOTE 6.3.10, sections 4.3 and 4.4.
"""

import io
import re
import stat
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from pipeline.engine.stage import Drop
from pipeline.sources.archives.tar import MAX_PATH_BYTES, ArchiveMember, is_unsafe
from pipeline.sources.blocks import ByteStream

MAX_DIRECTORY_BYTES = 128 << 20
"""Maximum size of the directory of an archive of many files, which is held in memory [bytes]; about a million
members."""
MAX_LIST_BYTES = 4 << 20
"""Maximum size of the directory of an archive of texts [bytes]; it has about 60 bytes for each member."""
DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError, LookupError),
)
"""What reading a damaged archive raises. Errors of the storage are others."""
_LOCAL = struct.Struct("<4s5H3I2H")
ZIP_START, _CENTRAL, _END, _END_64 = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06"
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1, 8, 0x800
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_KNOWN_METHODS = frozenset((*_METHODS, 1, 2, 3, 4, 5, 6, 9, 10, 12, 14, *range(93, 100)))
MAX_VERSION = 63
"""Version of the format, times ten, up to which members are written."""
MAX_JOINED = 16
"""Maximum number of archives in front of the last one of a file, as `cat` writes them, that are read."""
_DRIVE = re.compile(r"^[A-Za-z]:[/\\]|\0")
"""A name that begins with a drive, or ends early in programs that read it up to a zero byte."""
_SLICE = 1 << 18


def is_zip(stream: ByteStream) -> bool:
    """Return True if a file begins as a zip archive does. The stream is moved to its start."""
    stream.seek(0)
    head = stream.read(4)
    stream.seek(0)
    return head == ZIP_START


def is_unsafe_name(name: str) -> bool:
    """Return True if the name of a member points outside of its archive."""
    return is_unsafe(name) or _DRIVE.search(name) is not None


# The directory at the end of the file.


class _CheckedStream:
    """A file object that refuses reads as large as only a damaged archive asks for, and positions before the start."""

    def __init__(self, stream: ByteStream, max_bytes: int):
        self._stream, self._max_bytes = stream, max_bytes

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes."""
        data = self._stream.read(self._max_bytes + 1 if size < 0 else min(size, self._max_bytes + 1))
        if len(data) > self._max_bytes:
            raise zipfile.BadZipFile(f"expected a list of at most {self._max_bytes} bytes, got more")
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


def _open_zip(stream: ByteStream, max_list_bytes: int) -> zipfile.ZipFile:
    """Read the directory of an archive. Raises one of DAMAGE if it cannot be read or has more than this many bytes."""
    return zipfile.ZipFile(cast(Any, _CheckedStream(stream, max_list_bytes)))


# All members, one after another.


class _Entry(NamedTuple):
    """What the directory, or the local header, says about a member."""

    start: int
    name: str
    size: int
    stored: int
    method: int
    flags: int
    crc: int | None
    is_file: bool = True
    is_folder: bool = False


class _Directory(NamedTuple):
    """The entries of a directory by their offsets, and the range of bytes that it takes with its end record."""

    entries: list[_Entry]
    start: int
    end: int


def read_zip(
    stream: ByteStream, max_bytes: int, wanted: Callable[[str, int], bool], depth: int = 0
) -> Iterator[ArchiveMember]:
    """Yield the files and links of a zip archive. `wanted` decides by name and size whether a content is loaded.

    The directory says where members are. Without one, as in the bytes of a single member, the headers of the members
    are read one after another. Archives in front of the last one are read too, up to MAX_JOINED of them. Other members
    that no directory lists are a gap. `depth`: number of archives after this one in the file.
    """
    size = stream.seek(0, 2)
    directory = _directory(stream, size)
    if isinstance(directory, Drop):
        yield ArchiveMember(0, "", size, drop=directory)
        return
    if directory is None:
        yield from _without_directory(stream, size, max_bytes, wanted)
        return
    end = read = 0
    places = _HeaderPlaces(stream, directory)
    for entry, stored in map(places.cut, directory.entries):
        yield from _unlisted(stream, (read, entry.start), (max_bytes, wanted, depth))
        # Members that share their bytes would be decompressed as often as they are listed.
        is_shared = entry.start < end
        end = max(end, entry.start + _LOCAL.size + entry.stored)
        member, after = _member(stream, entry, max_bytes, _nothing if is_shared or entry.is_folder else wanted)
        read = max(read, end, after)
        if entry.is_folder:
            continue
        is_cut = member.drop is not None and entry.stored < stored and places.has_header(entry.start)
        if is_shared or is_cut:
            member = ArchiveMember(entry.start, entry.name, entry.size, drop=Drop("lying_length", float(stored)))
        yield member
    yield from _unlisted(stream, (read, directory.start), (max_bytes, wanted, depth))
    yield from _unlisted(stream, (max(read, directory.end), size), (max_bytes, wanted, MAX_JOINED))


class _HeaderPlaces:
    """Where the listed members of an archive begin, as far as there are headers at these places."""

    def __init__(self, stream: ByteStream, directory: _Directory):
        self._stream, self._directory = stream, directory
        self._next = iter([*(entry.start for entry in directory.entries[1:]), directory.start])
        self._starts: list[int] | None = None
        """Found when a member is too long for the first time."""

    def cut(self, entry: _Entry) -> tuple[_Entry, int]:
        """Return the next entry without the bytes from the next header on, and its listed size [bytes]."""
        if entry.start + _LOCAL.size + entry.stored <= next(self._next):
            return entry, entry.stored
        if self._starts is None:
            starts = sorted({each.start for each in self._directory.entries})
            self._starts = [*filter(self.has_header, starts), self._directory.start]
        following = self._starts[min(bisect_right(self._starts, entry.start), len(self._starts) - 1)]
        return entry._replace(stored=max(0, min(entry.stored, following - self._begin(entry)))), entry.stored

    def _begin(self, entry: _Entry) -> int:
        head = self._head(entry.start)
        return entry.start + _LOCAL.size + (sum(_LOCAL.unpack(head)[-2:]) if self.has_header(entry.start) else 0)

    def has_header(self, start: int) -> bool:
        """Return True if a member begins at an offset."""
        head = self._head(start)
        return len(head) == _LOCAL.size and head.startswith(ZIP_START) and _is_header(head)

    def _head(self, start: int) -> bytes:
        self._stream.seek(start)
        return self._stream.read(_LOCAL.size)


def _nothing(name: str, size: int) -> bool:
    return False


def _unlisted(
    stream: ByteStream, place: tuple[int, int], how: tuple[int, Callable[[str, int], bool], int]
) -> Iterator[ArchiveMember]:
    """Yield what is in a range of bytes that belongs to no listed member: an archive of its own, a gap, or nothing.

    `how`: the arguments of `read_zip` after the stream.
    """
    start, end = place
    first = _first_header(stream, start, end)
    if first is None:
        return
    max_bytes, wanted, depth = how
    part = _Part(stream, start, end)
    found = _directory(part, end - start) if depth < MAX_JOINED else None
    if isinstance(found, _Directory) and found.entries and found.end == end - start:
        for member in read_zip(part, max_bytes, wanted, depth + 1):
            yield member._replace(start=start + member.start)
        return
    yield ArchiveMember(first, "", end - first, drop=Drop("unreadable_gap", float(end - first)))


def _first_header(stream: ByteStream, start: int, end: int) -> int | None:
    """Return the offset of the first header of a member in a range of bytes; None if there is none."""
    block, at = b"", start
    while at < end and end - start >= _LOCAL.size:
        stream.seek(at)
        kept = block[-3:]  # a header may begin at the end of the block before
        block = kept + stream.read(min(_SLICE, end - at))
        if len(block) == len(kept):
            return None
        place = block.find(ZIP_START)
        while place >= 0:
            header = at - len(kept) + place
            stream.seek(header)
            head = stream.read(_LOCAL.size)
            if len(head) == _LOCAL.size and header + _LOCAL.size < end and _is_header(head):
                return header
            place = block.find(ZIP_START, place + 1)
        at += len(block) - len(kept)
    return None


def _is_header(head: bytes) -> bool:
    """Return True if the bytes after a signature are as in the header of a member; other files have the bytes too."""
    version, method, name_size = (int.from_bytes(head[at : at + 2], "little") for at in (4, 8, 26))
    return version & 0xFF <= MAX_VERSION and method in _KNOWN_METHODS and 0 < name_size <= MAX_PATH_BYTES


class _Part:
    """A range of the bytes of a stream, as a stream."""

    def __init__(self, stream: ByteStream, start: int, end: int):
        self._stream, self._start, self._size = stream, start, end - start
        self._at = 0

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes."""
        left = max(0, self._size - self._at)
        self._stream.seek(self._start + self._at)
        data = self._stream.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to another position and return it."""
        self._at = max(0, offset + {0: 0, 1: self._at, 2: self._size}[whence])
        return self._at

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return self._at


def _directory(stream: ByteStream, size: int) -> _Directory | Drop | None:
    """Return the directory; None if there is none; a Drop if it is too large."""
    before = max(0, size - (1 << 16) - 22)
    stream.seek(before)
    tail = stream.read((1 << 16) + 22)
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        return None
    declared = int.from_bytes(tail[at + 12 : at + 16], "little")
    # The whole directory lies before its end record, also if its size does not fit into the record.
    if declared > MAX_DIRECTORY_BYTES and (declared != 0xFFFFFFFF or size > MAX_DIRECTORY_BYTES << 8):
        return Drop("package_too_large", float(declared), float(MAX_DIRECTORY_BYTES))
    try:
        with _open_zip(stream, MAX_DIRECTORY_BYTES) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
            start = max(0, archive.start_dir)
    except DAMAGE:
        return None
    entries = [
        _Entry(
            min(info.header_offset, start), info.filename, info.file_size, info.compress_size, info.compress_type,
            info.flag_bits, info.CRC, stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG),
            info.filename.endswith("/"),
        )
        for info in infos
        if info.header_offset >= 0  # The bytes of the last member alone end with the directory of all.
    ]  # fmt: skip
    return _Directory(entries, start, before + at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little"))


def _without_directory(
    stream: ByteStream, size: int, max_bytes: int, wanted: Callable[[str, int], bool]
) -> Iterator[ArchiveMember]:
    start = 0
    while start < size:
        entry = _local(stream, start)
        if entry is None:
            if start == 0 or not _is_directory(stream, start):
                yield ArchiveMember(start, "", size - start, drop=Drop("unreadable_gap", float(size - start)))
            else:
                yield from _unlisted(stream, (start, size), (max_bytes, wanted, MAX_JOINED))
            return
        member, end = _member(stream, entry, max_bytes, wanted)
        if not entry.is_folder:
            yield member
        if end <= start:
            return
        start = end


def _is_directory(stream: ByteStream, start: int) -> bool:
    stream.seek(start)
    return stream.read(4) in (_CENTRAL, _END, _END_64)


def _local(stream: ByteStream, start: int) -> _Entry | None:
    stream.seek(start)
    head = stream.read(_LOCAL.size)
    if len(head) < _LOCAL.size or not head.startswith(ZIP_START):
        return None
    _, _, flags, method, _, _, crc, stored, size, name_size, _ = _LOCAL.unpack(head)
    raw = stream.read(name_size)
    name = raw.decode("utf-8" if flags & _UTF8 else "cp437", "replace")
    follows = bool(flags & _SIZES_FOLLOW) or stored == 0xFFFFFFFF
    return _Entry(
        start, name, -1 if follows else size, -1 if follows else stored, method, flags, None if follows else crc,
        is_folder=name.endswith("/"),
    )  # fmt: skip


def _member(
    stream: ByteStream, entry: _Entry, max_bytes: int, wanted: Callable[[str, int], bool]
) -> tuple[ArchiveMember, int]:
    """Return a member and the offset of its end."""
    stream.seek(entry.start)
    head = stream.read(_LOCAL.size)
    if len(head) < _LOCAL.size or not head.startswith(ZIP_START):
        return ArchiveMember(entry.start, entry.name, 0, drop=Drop("bad_member")), entry.start
    begin = entry.start + _LOCAL.size + sum(_LOCAL.unpack(head)[-2:])
    end = begin + max(0, entry.stored)
    if not entry.is_file:
        return ArchiveMember(entry.start, entry.name, 0, drop=Drop("not_a_file")), end
    if entry.flags & _ENCRYPTED or entry.method not in _METHODS:
        return ArchiveMember(entry.start, entry.name, entry.size, drop=Drop("bad_member")), end
    if entry.stored >= 0 and not wanted(entry.name, entry.size):
        return ArchiveMember(entry.start, entry.name, entry.size), end
    if entry.size > max_bytes:
        too_large = Drop("record_too_large", float(entry.size), float(max_bytes))
        return ArchiveMember(entry.start, entry.name, entry.size, drop=too_large), end
    data, read, drop = _unpack(stream, entry, begin, max_bytes)
    if entry.stored < 0:
        end = _after_descriptor(stream, begin + read)
        drop = drop if data is not None or drop is not None else Drop("bad_member")
    elif drop is None and data is not None and zlib.crc32(data) != entry.crc:
        data, drop = None, Drop("bad_member")
    return ArchiveMember(entry.start, entry.name, len(data or b""), data, drop), end


def _unpack(stream: ByteStream, entry: _Entry, begin: int, max_bytes: int) -> tuple[bytes | None, int, Drop | None]:
    """Return the content of a member, the number of its stored bytes, and a Drop if it cannot be unpacked."""
    stream.seek(begin)
    if entry.method == zipfile.ZIP_STORED:
        if entry.stored < 0:
            return None, 0, Drop("bad_member")
        if entry.stored > max_bytes:
            return None, entry.stored, Drop("record_too_large", float(entry.stored), float(max_bytes))
        data = stream.read(entry.stored)
        return (data, len(data), None) if len(data) == entry.stored else (None, len(data), Drop("truncated_record"))
    decoder = zlib.decompressobj(-15)
    parts: list[bytes] = []
    size = read = 0
    left = entry.stored
    while not decoder.eof:
        stored = decoder.unconsumed_tail or stream.read(_SLICE if left < 0 else min(_SLICE, left - read))
        read += 0 if decoder.unconsumed_tail else len(stored)
        if not stored:
            return None, read, Drop("truncated_record")
        try:
            part = decoder.decompress(stored, max_bytes + 1 - size)
        except zlib.error:
            return None, read, Drop("bad_member")
        size += len(part)
        parts.append(part)
        if size > max_bytes:
            return None, read, Drop("record_too_large", float(size), float(max_bytes))
    return b"".join(parts), read - len(decoder.unused_data), None


def _after_descriptor(stream: ByteStream, position: int) -> int:
    """Return the offset after the sizes that follow a member."""
    stream.seek(position)
    data = stream.read(64)
    found = [at for at in (data.find(ZIP_START), data.find(_CENTRAL)) if at >= 0]
    return position + (min(found) if found else len(data))


# Archives of texts, whose members the caller chooses.


class TextArchive:
    """A zip archive whose members are read one at a time."""

    def __init__(self, stream: ByteStream):
        """Read the list of members. Raises one of DAMAGE if it cannot be read."""
        self._zip = _open_zip(stream, MAX_LIST_BYTES)
        self.members: Sequence[zipfile.ZipInfo] = sorted(
            (info for info in self._zip.infolist() if not info.filename.endswith("/")),
            key=lambda info: info.header_offset,
        )
        """The members in the order of their bytes."""
        entries = [
            _Entry(info.header_offset, "", 0, info.compress_size, info.compress_type, info.flag_bits, None)
            for info in self.members
        ]
        places, end = _HeaderPlaces(stream, _Directory(entries, self._zip.start_dir, 0)), 0
        self._overlaps: list[bool] = []
        for entry, stored in map(places.cut, entries):
            self._overlaps.append(entry.start < end or entry.stored < stored)
            end = max(end, entry.start + _LOCAL.size + entry.stored)
        self._numbers = {id(info): number for number, info in enumerate(self.members)}

    def unsafe_names(self) -> int:
        """Return the number of members whose names point outside of the archive."""
        return sum(is_unsafe_name(info.orig_filename) for info in self.members)

    def read(self, info: zipfile.ZipInfo, max_bytes: int) -> bytes | Drop:
        """Return the content of a member, or a Drop if it is too large, encrypted or damaged.

        Members that share their bytes would be unpacked as often as they are listed, so all but one are damaged.
        """
        if info.flag_bits & _ENCRYPTED:
            return Drop("encrypted_book")
        if info.compress_type not in _METHODS or self._overlaps[self._numbers[id(info)]]:
            return Drop("bad_archive")
        if info.file_size > max_bytes:
            return Drop("record_too_large", float(info.file_size), float(max_bytes))
        try:
            with self._zip.open(info) as member:
                data = member.read(max_bytes + 1)
        except DAMAGE:
            return Drop("bad_archive")
        return data if len(data) <= max_bytes else Drop("record_too_large", float(len(data)), float(max_bytes))


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
    if not data.startswith(ZIP_START):
        return data
    try:
        archive = TextArchive(io.BytesIO(data))
    except DAMAGE:
        return b""
    content = archive.read(archive.members[0], len(data) * 1100) if archive.members else b""
    return b"" if isinstance(content, Drop) else content
