"""Reader of tar archives, compressed or not: their members in order, with offsets, in bounded memory.

A member's content is loaded only if the caller wants it and it is not too large. No member is written to disk, and no
link is followed. After damage, reading resumes at the next header. Source: POSIX.1-2017, pax, and the GNU tar manual.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipeline.engine.stage import Drop
from pipeline.sources.compression import FrameReader
from pipeline.sources.provenance import too_many_rows

BLOCK = 512
MAX_NAME_BYTES = 64 << 10
"""Maximum size of a member's name, and of its extended header, which may have other fields [bytes]."""
MAX_PATH_BYTES, MAX_PATH_LEVELS = 4096, 256
"""Maximum size of the path of a file, as on Linux [bytes], and number of folders in it. Longer ones take much time."""
MIN_SEARCH_BYTES, SEARCH_BYTES = 4 << 10, 1 << 20
"""Bytes in which the next header is looked for at first, and at a time after damage of that size."""
MAGIC = re.compile(rb"ustar[\0 ]")
MAGIC_OFFSET = 257
_LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX = b"L", b"K", b"x", b"g"
_FILES = (b"0", b"\0", b"7")
_SPARSE = "GNU.sparse"
"""Start of the names of fields that describe a file with holes, which is not read."""
_PAX_FIELD = re.compile(rb"(\d{1,9}) ([^=\n]+)=")
_COMMIT = re.compile(rb"(?<!\d)\d{1,9} comment=([0-9a-f]{40}(?:[0-9a-f]{24})?)\n")


class ArchiveMember(NamedTuple):
    """A file, link or other object in an archive, or a range of damaged bytes."""

    start: int
    """Offset of its header in the decompressed archive [bytes]."""
    name: str
    """Its path in the archive; empty for damaged bytes."""
    size: int
    """Size of its content [bytes]."""
    data: bytes | None = None
    """Its content; None if it was not loaded."""
    drop: Drop | None = None
    """Why it cannot be used; None if it can be."""


class DecodedBytes:
    """The decoded bytes of a file, read forwards. A read ends early at damage, which `fault` then describes."""

    def __init__(self, frames: FrameReader):
        self._frames = frames
        self._block = b""
        self._at = 0
        self.position = 0
        """Offset of the next byte in the decoded file; after the last byte, the size of the decoded file [bytes]."""
        self.fault: Drop | None = None
        self._start, self._end = -1, 0

    def frame(self) -> tuple[int, int] | None:
        """Return the stored offsets at which the current frame starts, and up to which it was read; None if plain."""
        return (self._start, self._end) if self._start >= 0 else None

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer at the end of the file and at damage."""
        parts = []
        while size and (self._at < len(self._block) or self._load()):
            part = self._block[self._at : self._at + size]
            self._at += len(part)
            self.position += len(part)
            size -= len(part)
            parts.append(part)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def skip(self, size: int) -> int:
        """Skip `size` bytes; return the number of skipped bytes, which is smaller at the end and at damage."""
        left = size
        while left and (self._at < len(self._block) or self._load()):
            step = min(left, len(self._block) - self._at)
            self._at += step
            self.position += step
            left -= step
        return size - left

    def unread(self, data: bytes) -> None:
        """Put the last bytes that were read in front of the next ones."""
        if self._at >= len(data):  # all are of this block
            self._at -= len(data)
        else:
            self._block, self._at = data + self._block[self._at :], 0
        self.position -= len(data)

    def size(self) -> int:
        """Return the size of the file as stored [bytes]."""
        return self._frames.size()

    def take_fault(self) -> Drop | None:
        """Return the damage that ended the last read, and continue after it."""
        fault, self.fault = self.fault, None
        return fault

    def _load(self) -> bool:
        piece = self._frames.next() if self.fault is None else None
        if piece is not None and piece.fault is not None:
            self.fault = Drop(piece.fault, float(piece.resumed - piece.start))
        self._block, self._at = (piece.data if piece is not None else b""), 0
        if piece is not None:
            self._start, self._end = -1 if piece.plain else piece.start, piece.end
        return bool(self._block) or (piece is not None and piece.fault is None and self._load())


def is_tar_header(block: bytes) -> bool:
    """Return True if these 512 bytes are a tar header: their checksum is right."""
    if len(block) < BLOCK or not block.strip(b"\0"):
        return False
    declared = _number(block[148:156])
    total = sum(block) - sum(block[148:156]) + 8 * 32
    return declared == total


class TarReader:
    """Iterates over the members of a tar archive. Directories, long names and padding yield nothing."""

    def __init__(self, stream: DecodedBytes, max_bytes: int, wanted: Callable[[str, int], bool]):
        """`wanted` decides by name and size whether a member's content is loaded; it is if it has at most `max_bytes`.

        A member that is wanted and larger has a Drop.
        """
        self._stream = stream
        self._max_bytes = max_bytes
        self._wanted = wanted
        self.commit: str | None = None
        """The commit that `git archive` notes at the start of its archives."""

    def __iter__(self) -> Iterator[ArchiveMember]:
        """Yield every file, link, other object and damaged range in the order of the archive."""
        for number, member in enumerate(self._members()):
            if (surplus := too_many_rows(number, self._stream.size)) is not None:
                yield ArchiveMember(member.start, "", 0, drop=surplus)
                return
            yield member

    def _members(self) -> Iterator[ArchiveMember]:
        start, extended = self._stream.position, dict[str, bytes]()
        while True:
            start = start if extended else self._stream.position
            block = self._stream.read(BLOCK)
            if len(block) < BLOCK:
                fault = self._stream.take_fault()
                if fault is None:
                    if block.strip(b"\0"):
                        yield ArchiveMember(start, "", len(block), drop=Drop("unreadable_gap", float(len(block))))
                    return
                yield ArchiveMember(start, "", len(block), drop=fault)
                self._resume()
                extended = {}
            elif is_tar_header(block) and (size := _number(block[124:136])) is not None:
                kind = block[156:157]
                if kind in (_LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX):
                    extended |= self._extension(kind, size)
                else:
                    yield from self._member(start, block, size, extended)
                    extended = {}
            elif block.strip(b"\0"):
                self._stream.unread(block[1:])
                self._resume()
                lost = self._stream.position - start
                yield ArchiveMember(start, "", lost, drop=Drop("unreadable_gap", float(lost)))
                extended = {}

    def _member(self, start: int, block: bytes, size: int, extended: dict[str, bytes]) -> Iterator[ArchiveMember]:
        kind, name = block[156:157], _name(block)
        raw = extended.get("path", extended.get("name", name)).partition(b"\0")[0]
        if (declared := extended.get("size", b"")).isdigit() and len(declared) < 20:
            size = int(declared)
        path = raw.decode("utf-8", "replace")
        if kind == b"5" or (kind in _FILES and path.endswith("/")):
            self._stream.skip(_padded(size))
        elif kind not in _FILES or _SPARSE in extended:
            # Links have no content, whatever their size says.
            self._stream.skip(0 if kind in b"123456" else _padded(size))
            yield ArchiveMember(start, path, 0, drop=Drop("not_a_file"))
        else:
            yield self._file(start, path, size)

    def _file(self, start: int, path: str, size: int) -> ArchiveMember:
        data, drop = None, None
        if not self._wanted(path, size):
            read = self._stream.skip(size)
        elif size > self._max_bytes:
            drop = Drop("record_too_large", float(size), float(self._max_bytes))
            read = self._stream.skip(size)
        else:
            data = self._stream.read(size)
            read = len(data)
        if read < size:
            return ArchiveMember(start, path, size, drop=Drop("truncated_record", float(read), float(size)))
        self._stream.skip(_padded(size) - size)
        return ArchiveMember(start, path, size, data, drop)

    def _extension(self, kind: bytes, size: int) -> dict[str, bytes]:
        """Read a header that extends the next one; return its fields. One that is too large has none."""
        if size > MAX_NAME_BYTES:
            self._stream.skip(_padded(size))
            return {"_": b""}
        data = self._stream.read(_padded(size))[:size]
        if kind == _GLOBAL_PAX:
            match = _COMMIT.search(data)
            self.commit = match[1].decode() if match else self.commit
            return {"_": b""}
        if kind == _PAX:
            return {"_": b""} | _pax_fields(data)
        return {"name" if kind == _LONG_NAME else "_": data}

    def _resume(self) -> None:
        """Skip to the next header that can be read, or to the end of the bytes that can be decoded."""
        size = MIN_SEARCH_BYTES
        while data := self._stream.read(size):
            for match in MAGIC.finditer(data):
                begin = match.start() - MAGIC_OFFSET
                block = data[max(begin, 0) : begin + BLOCK]
                if begin >= 0 and is_tar_header(block) and _number(block[124:136]) is not None:
                    self._stream.unread(data[begin:])
                    return
            if len(data) < size:
                return
            self._stream.unread(data[-BLOCK:])
            size = min(2 * size, SEARCH_BYTES)


def _pax_fields(data: bytes) -> dict[str, bytes]:
    """Return the fields of an extended header that are used, up to the first that is damaged.

    Other fields are left out, since a file may have any number of headers in a row.
    """
    fields, at = {}, 0
    while match := _PAX_FIELD.match(data, at):
        end = at + int(match[1])
        if end <= match.end() or end > len(data):
            break
        name = match[2].decode("utf-8", "replace")
        name = _SPARSE if name.startswith(_SPARSE) else name
        if name in ("path", "size", _SPARSE):
            fields[name] = data[match.end() : end - 1]
        at = end
    return fields


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    # Old GNU headers use the place of the prefix for other fields.
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _number(data: bytes) -> int | None:
    """Return a number of a header, in octal digits or in base 256; None if it is neither."""
    if data[0] & 0x80:
        return int.from_bytes(bytes([data[0] & 0x7F]) + data[1:], "big")
    digits = data.strip(b"\0 ")
    return int(digits, 8) if re.fullmatch(rb"[0-7]*", digits) and digits else (None if digits else 0)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def is_unsafe(path: str) -> bool:
    """Return True if a member's name leads out of its archive, because it is absolute or has a part `..`.

    The same holds for a name that no filesystem takes, or that has more than MAX_PATH_LEVELS folders.
    """
    if path.count("/") > MAX_PATH_LEVELS or len(path.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
        return True
    return path.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", path)
