"""Reader of zip archives: their members in the order of the file, with offsets, in bounded memory.

The directory at the end of the file says where members are. Without one, as in the bytes of a single member, the
headers of the members are read one after another. Source: PKWARE, APPNOTE 6.3.10, sections 4.3 and 4.4.
"""

import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from pipeline.engine.stage import Drop
from pipeline.sources.archives.tar import ArchiveMember
from pipeline.sources.compression import ByteStream

MAX_DIRECTORY_BYTES = 128 << 20
"""Maximum size of the directory of a zip file, which is held in memory [bytes]; about a million members."""
_LOCAL = struct.Struct("<4s5H3I2H")
_SIGNATURE, _END = b"PK\x03\x04", b"PK\x05\x06"
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1, 8, 0x800
_STORED, _DEFLATED = 0, 8
_SLICE = 1 << 18


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


def read_zip(stream: ByteStream, max_bytes: int, wanted: Callable[[str, int], bool]) -> Iterator[ArchiveMember]:
    """Yield the files and links of a zip archive. `wanted` decides by name and size whether a content is loaded."""
    size = stream.seek(0, 2)
    directory = _directory(stream, size)
    if isinstance(directory, Drop):
        yield ArchiveMember(0, "", size, drop=directory)
        return
    if directory is None:
        yield from _without_directory(stream, size, max_bytes, wanted)
        return
    for entry in directory:
        if not entry.is_folder:
            yield _member(stream, entry, max_bytes, wanted)[0]


def _directory(stream: ByteStream, size: int) -> list[_Entry] | Drop | None:
    """Return the entries of the directory by their offsets; None if there is none; a Drop if it is too large."""
    stream.seek(max(0, size - (1 << 16) - 22))
    tail = stream.read((1 << 16) + 22)
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        return None
    declared = int.from_bytes(tail[at + 12 : at + 16], "little")
    # The whole directory lies before its end record, also if its size does not fit into the record.
    if declared > MAX_DIRECTORY_BYTES and (declared != 0xFFFFFFFF or size > MAX_DIRECTORY_BYTES << 8):
        return Drop("package_too_large", float(declared), float(MAX_DIRECTORY_BYTES))
    try:
        with zipfile.ZipFile(cast(Any, stream)) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    except (zipfile.BadZipFile, RuntimeError, ValueError, struct.error, EOFError):
        return None
    return [
        _Entry(
            info.header_offset, info.filename, info.file_size, info.compress_size, info.compress_type, info.flag_bits,
            info.CRC, stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG), info.is_dir(),
        )
        for info in infos
        if info.header_offset >= 0  # The bytes of the last member alone end with the directory of all.
    ]  # fmt: skip


def _without_directory(
    stream: ByteStream, size: int, max_bytes: int, wanted: Callable[[str, int], bool]
) -> Iterator[ArchiveMember]:
    start = 0
    while start < size:
        entry = _local(stream, start)
        if entry is None:
            if start == 0 or not _is_directory(stream, start):
                yield ArchiveMember(start, "", size - start, drop=Drop("unreadable_gap", float(size - start)))
            return
        member, end = _member(stream, entry, max_bytes, wanted)
        if not entry.is_folder:
            yield member
        if end <= start:
            return
        start = end


def _is_directory(stream: ByteStream, start: int) -> bool:
    stream.seek(start)
    return stream.read(4) in (b"PK\x01\x02", _END, b"PK\x06\x06")


def _local(stream: ByteStream, start: int) -> _Entry | None:
    stream.seek(start)
    head = stream.read(_LOCAL.size)
    if len(head) < _LOCAL.size or not head.startswith(_SIGNATURE):
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
    if len(head) < _LOCAL.size or not head.startswith(_SIGNATURE):
        return ArchiveMember(entry.start, entry.name, 0, drop=Drop("bad_member")), entry.start
    begin = entry.start + _LOCAL.size + sum(_LOCAL.unpack(head)[-2:])
    end = begin + max(0, entry.stored)
    if not entry.is_file:
        return ArchiveMember(entry.start, entry.name, 0, drop=Drop("not_a_file")), end
    if entry.flags & _ENCRYPTED or entry.method not in (_STORED, _DEFLATED):
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
    if entry.method == _STORED:
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
    found = [at for at in (data.find(b"PK\x03\x04"), data.find(b"PK\x01\x02")) if at >= 0]
    return position + (min(found) if found else len(data))
