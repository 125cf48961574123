"""Decoder of compressed files: gzip members, zstd and LZ4 frames, bzip2 streams (all called frames) and plain bytes.

Each frame's exact byte range in the file (its stored offsets) is found and its checksum is verified. A decoded block
has a maximum size at any compression ratio. After bytes that cannot be decoded, reading resumes at the next frame.
"""

import bz2
import io
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import zstandard
from fastwarc.stream_io import ZstdReader
from lz4.frame import LZ4FrameDecompressor

# Random access to a byte stream through one cached block, and search in it.

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


SLICE_BYTES = 32 << 10
DECODED_BYTES = 1 << 20
# A decoder detects damage only some bytes after it. The search for the next frame starts this far before that position.
BACKTRACK_BYTES = 192 << 10
ZSTD_BLOCK_BYTES = 128 << 10
PEEK_BYTES = 8 << 10
PROBE_BYTES = 5 << 20
"""Maximum number of bytes that are read of a candidate for a frame until it has to decode; a block of LZ4 has 4 MiB."""
MIN_PEEK_BYTES = 256
"""What reading a header of a block costs [bytes]."""
MIN_PROBE_BYTES = 16 << 10
"""What a candidate costs at least, however few bytes of it are read [bytes]."""
WASTED_BYTES, WASTED_FACTOR = 16 << 20, 8
"""Bytes that may be read in vain because of damage: so many, and so many times the offset in the file. Real
damage costs a few times the bytes of its frame. Bytes made to look like frames would cost the square of the file;
beyond the maximum, candidates are passed over and no byte of a damaged frame is read again, so that all belong to a
gap."""
DECODED_FREE, DECODED_A_BYTE = 64 << 20, 1_100
"""Maximum number of bytes that the frames of a file decode to: so many, and so many for each byte of the file. Deflate
cannot reach the second number (1,032 at most). A repeated line of 18 bytes has a ratio of 10,900 in zstd, 9,300 in
bzip2 and 6,800 in LZMA; at 14 us a line, a megabyte of it in zstd would keep a core busy for two hours."""
MAGIC_BYTES = 10
VERBATIM_BYTES = 64
"""Bytes of a frame, at most, that are compared with decoded bytes to find it there."""
STORED_FACTOR = 2
"""Decoded bytes of one stored byte, above which a block is compressed and has no bytes of the file in it."""
MAX_USUAL_WINDOW, MAX_WINDOW = 128 << 20, 1 << 31
"""Largest window of zstd frames that decoders accept, without and with `--long=31` [bytes]. Reddit dumps have 2 GiB."""
CANDIDATE = re.compile(rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd|\x04\x22\x4d\x18|BZh[1-9](?:1AY&SY|\x17\x72\x45\x38\x50\x90)")
GZIP, ZSTD, BZIP2, LZ4 = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"BZh", b"\x04\x22\x4d\x18"
RESTARTS, MAX_RESTARTS = {BZIP2: 3, GZIP: 15}, 63
"""Maximum number of ranges that begin inside one frame, by codec, and for the others. Of JSON lines, a core decodes
67 MB/s of bzip2, 580 of gzip and 1,900 of zstd, and measures 1.6: with the maximum, a file takes about 4 % longer."""
FIRST_PAIRS = tuple(int.from_bytes(magic[:2], "big") for magic in (GZIP, ZSTD, BZIP2, LZ4))
"""The first two bytes of each, as a number."""
# Skippable zstd frames have sixteen magic numbers. Source: RFC 8878, section 3.1.2.
ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")


class DecodedBlock(NamedTuple):
    """Consecutive decoded bytes of one frame, or consecutive bytes that are stored without compression (plain)."""

    data: bytes
    start: int
    """Stored offset of the frame; of plain bytes, stored offset of the block itself."""
    plain: bool
    """True if the bytes are not compressed in the file."""
    first: bool
    """True if the block is the first of a frame, or of a run of plain bytes."""
    fault: str | None = None
    """If bytes cannot be decoded completely, the reason; they extend from `start` to `resumed`."""
    resumed: int = 0
    """Stored offset at which reading resumes after a fault."""


class Frames(Protocol):
    """The decoded blocks of a file in order."""

    def next(self) -> DecodedBlock | None: ...
    def size(self) -> int: ...


class RecordPatterns(NamedTuple):
    """How to recognize the start of a record, so that reading can resume after damage."""

    begins: Callable[[bytes], bool]
    """Returns True if decoded bytes start with a record; used where a record is expected."""
    pattern: re.Pattern[bytes]
    """Stricter pattern to find a record among other bytes. A match starts at the record or the line end before it."""


class FrameState(NamedTuple):
    """What a FrameReader knows when it starts to decode a frame, or a block of plain bytes.

    A reader that resumes in this state yields the same blocks, faults included, as the one that had it.
    """

    position: int
    """Stored offset of the frame or of the block of plain bytes."""
    block: int
    """Stored offset of the cached block: how many bytes a decoder gets at a time decides where it notices damage."""
    wasted: int
    """Bytes that were read in vain so far; see WASTED_BYTES."""
    read_again: int
    """Bytes that were read again so far, to see whether a frame that contains another one is damaged."""
    inside_plain: int
    """1 if plain bytes precede the block, else 0."""
    decoded: int
    """Bytes that the frames before it have decoded to; see DECODED_FREE."""


class _DamageError(Exception):
    def __init__(self, reason: str, position: int):
        self.reason = reason
        self.position = position


class _FrameInside(NamedTuple):
    """A frame whose stored bytes were decoded as those of a damaged frame before it."""

    start: int
    """Its stored offset."""
    size: int
    """Size of the decoded bytes before it [bytes]."""
    reason: str
    """The damage of the frame before it."""


class FrameReader:
    """Reads the decoded blocks of a file in order.

    `starts` recognizes the start of a record. It is None for text files, in which any bytes are valid.
    """

    def __init__(self, stream: ByteStream, starts: RecordPatterns | None):
        self.blocks = BlockReader(stream)
        self.starts = starts
        self.end = 0
        """The size of the file [bytes]; set after the last block has been read."""
        self._wasted = 0
        """Bytes that were read of damaged frames, and read and decoded of candidates; see WASTED_BYTES."""
        self._read_again = 0
        """Bytes that were read again to find out whether a frame that contains another one is damaged."""
        self._decoded = 0
        """Bytes that frames have decoded to; see DECODED_FREE."""
        self._anything = re.compile(CANDIDATE.pattern + b"|" + starts.pattern.pattern) if starts else CANDIDATE
        self.state = FrameState(0, 0, 0, 0, 0, 0)
        """The state before the frame, or the block of plain bytes, of the block that was returned last."""
        self._pieces = self._read(0)

    def next(self) -> DecodedBlock | None:
        """Return the next decoded block, or None at the end of the file."""
        return next(self._pieces, None)

    def size(self) -> int:
        """Return the size of the file as stored, or the bytes read if a server does not give it [bytes]."""
        return max(self.blocks.size(), self.blocks.reached)

    def seek(self, position: int) -> None:
        """Continue at this offset in the compressed file, where a frame or a run of plain bytes must start."""
        self._pieces.close()
        self._pieces = self._read(position)

    def resume(self, state: FrameState) -> None:
        """Continue with the frame, or the block of plain bytes, that a reader of the same file had before it."""
        self.seek(state.position)
        self.blocks.load(state.block)
        self._wasted, self._read_again, self._decoded = state.wasted, state.read_again, state.decoded
        if state.inside_plain:
            self._pieces = self._rest_of_plain(state.position)

    def next_start(self, position: int) -> int:
        """Return the offset in the compressed file of the next readable frame or record, from `position` on.

        Return the size of the file if there is no such frame or record.
        """
        return self._search(self._anything, position)

    def _search(self, pattern: re.Pattern[bytes], position: int) -> int:
        for match in self.blocks.search(pattern, position):
            codec = _codec(self.blocks.peek(match, MAGIC_BYTES))
            if codec is not None and not (self._is_bearable(match) and self._decodes(codec, match)):
                continue
            return match + (self.blocks.peek(match, 1) == b"\n")
        return self.blocks.size()

    def _is_bearable(self, position: int) -> bool:
        return self._wasted <= WASTED_BYTES + WASTED_FACTOR * position

    def _decodes(self, codec: "Codec", position: int) -> bool:
        probe = _Counted(self.blocks, position + PROBE_BYTES)
        try:
            data = next((data for data, _ in codec(probe, position) if data), b"")
            probe.bytes += len(data)
            decodes = self.starts is None or self.starts.begins(data)
        except _DamageError:
            decodes = False
        if not decodes:
            self._wasted += max(probe.bytes, MIN_PROBE_BYTES)
        return decodes

    def _read(self, position: int) -> Generator[DecodedBlock, None, None]:
        while head := self.blocks.peek(position, MAGIC_BYTES):
            self._note(position)
            codec = _codec(head)
            if codec is not None:
                position = yield from self._frame(codec, position)
            elif self._is_plain(position):
                position = yield from self._plain(position)
            else:
                start, position = position, self.next_start(position + 1)
                yield DecodedBlock(b"", start, False, True, "unreadable_gap", position)
        self.end = position

    def _rest_of_plain(self, position: int) -> Generator[DecodedBlock, None, None]:
        self.end = yield from self._plain(position, is_first=False)

    def _note(self, position: int, inside_plain: int = 0) -> None:
        counts = self._wasted, self._read_again, inside_plain, self._decoded
        self.state = FrameState(position, self.blocks.start, *counts)

    def _is_plain(self, position: int) -> bool:
        if self.starts is None:
            return position == 0
        return self.starts.begins(self.blocks.peek(position, PEEK_BYTES).lstrip(b"\r\n"))

    def _frame(self, codec: "Codec", start: int) -> Generator[DecodedBlock, None, int]:
        first, position = True, start
        stored = _Counted(self.blocks)
        try:
            for data, end in codec(stored, start):
                if self._is_too_much(len(data)):
                    position = self.size()
                    yield DecodedBlock(b"", start, False, first, "decoded_too_large", position)
                    break
                inside = self._frame_inside(codec, start, data, (position, end))
                position, data = (end, data) if inside is None else (inside.start, data[: inside.size])
                if data:
                    yield DecodedBlock(data, start, False, first)
                    first = False
                if inside is not None:
                    yield DecodedBlock(b"", start, False, first, inside.reason, position)
                    break
        except _DamageError as damage:
            # Only frames are searched for: a damaged frame may contain its record uncompressed, and the record must not
            # be read twice.
            self._wasted += stored.bytes
            if self._is_bearable(start):
                position = max(start + 1, damage.position - BACKTRACK_BYTES)
            else:
                position = damage.position if damage.position > start else stored.end
            position = self._search(CANDIDATE, position)
            yield DecodedBlock(b"", start, False, first, damage.reason, position)
        return position

    def _is_too_much(self, num_bytes: int) -> bool:
        """Count decoded bytes; return True if the file has too few bytes for them."""
        self._decoded += num_bytes
        return self._decoded > DECODED_FREE and self._decoded > most_decoded(self.size())

    def _frame_inside(self, codec: "Codec", start: int, data: bytes, stored: tuple[int, int]) -> _FrameInside | None:
        """Return the next frame if `data`, decoded from the stored bytes [stored), has its bytes as they are.

        A stored block of deflate that is cut extends into the next frames. Their records would be read twice. A frame
        without damage may contain another one, such as the copy of an archive.
        """
        begin, end = max(start + 1, stored[0] - MAGIC_BYTES), stored[1]
        if not data or len(data) > STORED_FACTOR * (end - begin) or end - begin > SLICE_BYTES + MAGIC_BYTES:
            return None  # zstd gives the whole frame as the source of each block; only small ones are searched.
        block = self.blocks.peek(begin, end - begin)
        for place in map(begin.__add__, _candidates(block)):
            if not self._is_bearable(place) or self._read_again > WASTED_BYTES + WASTED_FACTOR * place:
                break
            size = data.find(block[max(0, place - begin, stored[0] - begin) :][:VERBATIM_BYTES])
            own = _codec(self.blocks.peek(place, MAGIC_BYTES))
            if size < 0 or own is None or not self._decodes(own, place):
                continue
            if (reason := self._damage_of(codec, start, place + BACKTRACK_BYTES)) is not None:
                return _FrameInside(place, size, reason)
        return None

    def _damage_of(self, codec: "Codec", start: int, limit: int) -> str | None:
        """Return the damage of a frame that is detected up to the offset `limit` in the file; None if there is none."""
        again = _Counted(self.blocks)
        try:
            next((end for _, end in codec(again, start) if end > limit), None)
        except _DamageError as damage:
            return damage.reason
        finally:
            self._read_again += again.bytes
        return None

    def _plain(self, position: int, is_first: bool = True) -> Generator[DecodedBlock, None, int]:
        while True:
            self._note(position, int(not is_first))
            if not (data := self.blocks.at(position, DECODED_BYTES >> 2)):
                return position
            yield DecodedBlock(bytes(data), position, True, is_first)
            position, is_first = position + len(data), False


class _Counted:
    """The file as the decoder of a frame reads it: the bytes are counted. There are none at `limit` and after it."""

    def __init__(self, blocks: BlockReader, limit: int | None = None):
        self._blocks = blocks
        self._limit = limit
        self.bytes = 0
        """Bytes that were read."""
        self.end = 0
        """Offset after the last of them in the file."""

    def at(self, position: int, size: int) -> memoryview:
        data = self._blocks.at(position, self._allowed(position, size))
        self.bytes += len(data)
        self.end = max(self.end, position + len(data))
        return data

    def peek(self, position: int, size: int) -> bytes:
        data = self._blocks.peek(position, self._allowed(position, size))
        self.bytes += max(len(data), MIN_PEEK_BYTES)
        self.end = max(self.end, position + len(data))
        return data

    def _allowed(self, position: int, size: int) -> int:
        return size if self._limit is None else max(0, min(size, self._limit - position))


def _candidates(block: bytes) -> Iterator[int]:
    """Yield the positions at which CANDIDATE matches, three times as fast as its `finditer`."""
    codes = np.frombuffer(block, np.uint8).astype(np.uint16)
    pairs = codes[:-1] << 8 | codes[1:]
    places = np.logical_or.reduce([pairs == pair for pair in FIRST_PAIRS]).nonzero()[0].tolist()
    return (place for place in places if CANDIDATE.match(block, place))


Codec = Callable[[_Counted, int], Iterator[tuple[bytes, int]]]
"""Function from (file, stored offset of a frame) to the frame's decoded blocks, each with the stored offset up to which
the file has been read. It raises _DamageError."""


def most_decoded(size: int) -> int:
    """Return the maximum number of bytes that the frames of a file with so many bytes may decode to."""
    return DECODED_FREE + DECODED_A_BYTE * size


def max_restarts(head: bytes) -> int:
    """Return how many ranges of a file, at most, may begin inside a frame with these MAGIC_BYTES first bytes.

    Each of them decodes the frame from its start, so together they decode it half as many times as they are.
    """
    return next((number for magic, number in RESTARTS.items() if head.startswith(magic)), MAX_RESTARTS)


def is_compressed(head: bytes) -> bool:
    """Return True if a file with these MAGIC_BYTES first bytes begins with a compressed frame."""
    return _codec(head) is not None


def _codec(head: bytes) -> Codec | None:
    if head.startswith(GZIP):
        return _gzip
    if head.startswith(ZSTD) or ZSTD_SKIPPABLE.match(head):
        return _zstd
    if head.startswith(LZ4):
        return _lz4
    return _bzip2 if head.startswith(BZIP2) and CANDIDATE.match(head) else None


def _gzip(blocks: _Counted, start: int) -> Iterator[tuple[bytes, int]]:
    decoder = zlib.decompressobj(31)
    position = start
    while not decoder.eof:
        stored = blocks.at(position, SLICE_BYTES)
        try:
            data = decoder.decompress(stored, DECODED_BYTES)
        except zlib.error:
            if position == start:
                data, size = _salvage(stored)
                yield data, position + size
            raise _DamageError("bad_gzip", position) from None
        # At the end of the gzip member both attributes hold the rest of the input.
        position += len(stored) - len(decoder.unused_data if decoder.eof else decoder.unconsumed_tail)
        if data or stored:
            yield data, position
        elif not decoder.eof:
            raise _DamageError("truncated_record", position)


def _salvage(stored: memoryview) -> tuple[bytes, int]:
    """Return the bytes of a damaged gzip member that can be decoded before the damage, and the size of their source."""
    decoder = zlib.decompressobj(31)
    parts: list[bytes] = []
    size = 0
    try:
        # In small slices: zlib discards the output of a call that fails.
        for offset in range(0, len(stored), 8):
            parts.append(decoder.decompress(stored[offset : offset + 8], DECODED_BYTES))
            size = min(offset + 8, len(stored))
    except zlib.error:
        pass
    return b"".join(parts), size


def _bzip2(blocks: _Counted, start: int) -> Iterator[tuple[bytes, int]]:
    decoder = bz2.BZ2Decompressor()
    position = start
    while not decoder.eof:
        stored = blocks.at(position, SLICE_BYTES) if decoder.needs_input else memoryview(b"")
        if decoder.needs_input and not stored:
            raise _DamageError("truncated_record", position)
        try:
            data = decoder.decompress(stored, DECODED_BYTES)
        except OSError:
            raise _DamageError("bad_gzip", position) from None
        position += len(stored) - len(decoder.unused_data)
        yield data, position


def _lz4(blocks: _Counted, start: int) -> Iterator[tuple[bytes, int]]:
    decoder = LZ4FrameDecompressor()
    position = start
    while not decoder.eof:
        stored = bytes(blocks.at(position, SLICE_BYTES)) if decoder.needs_input else b""
        if decoder.needs_input and not stored:
            raise _DamageError("truncated_record", position)
        try:
            data = decoder.decompress(stored, DECODED_BYTES)
        except (RuntimeError, EOFError, MemoryError):
            raise _DamageError("bad_gzip", position) from None
        position += len(stored) - (len(decoder.unused_data or b"") if decoder.eof else 0)
        yield data, position


def _zstd(blocks: _Counted, start: int) -> Iterator[tuple[bytes, int]]:
    damage = None
    try:
        end = _zstd_end(blocks, start)
    except _DamageError as error:
        damage, end = error, error.position
    stored = _Range(blocks, start, end)
    try:
        reader = _zstd_reader(blocks, stored) if blocks.peek(start, 4) == ZSTD else io.BytesIO()
        while data := reader.read(DECODED_BYTES):
            yield data, end
    except (OSError, MemoryError, zstandard.ZstdError):
        if stored.problem is not None:
            raise stored.problem from None
        raise damage or _DamageError("bad_gzip", start) from None
    if damage:
        raise damage
    yield b"", end


def _zstd_reader(blocks: _Counted, stored: "_Range") -> Any:
    """Return a reader of the zstd frame `stored`.

    Source: RFC 8878, section 3.1.1.1.2 (window descriptor).
    """
    flags, window = blocks.peek(stored.tell(), 6).ljust(6, b"\0")[4:6]
    size = 0 if flags >> 5 & 1 else (1 << 10 + (window >> 3)) // 8 * (8 + (window & 7))
    if size <= MAX_USUAL_WINDOW:
        return ZstdReader(cast(Any, stored))
    return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(cast(Any, stored))


def _zstd_end(blocks: _Counted, start: int) -> int:
    """Return the offset in the file at which a zstd frame ends, found by reading its block headers.

    Source: RFC 8878, sections 3.1.1 and 3.1.2.
    """
    head = blocks.peek(start, 8).ljust(8, b"\0")
    position = start
    if head[:4] != ZSTD:
        end = start + 8 + int.from_bytes(head[4:8], "little")
    else:
        flags = head[4]
        single_segment = flags >> 5 & 1
        content_size = (single_segment, 2, 4, 8)[flags >> 6]
        position += 5 + (1 - single_segment) + (0, 1, 2, 4)[flags & 3] + content_size
        last = False
        while not last:
            if len(block := blocks.peek(position, 3)) < 3:
                raise _DamageError("truncated_record", position)
            header = int.from_bytes(block, "little")
            last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            if kind == 3 or size > ZSTD_BLOCK_BYTES:
                raise _DamageError("bad_gzip", position)
            position += 3 + (1 if kind == 1 else size)
        end = position + (4 if flags >> 2 & 1 else 0)
    if not blocks.peek(end - 1, 1):
        raise _DamageError("truncated_record", position)
    return end


class _Range:
    """The bytes [start, end) of the compressed file as a file object, for decoders that require one."""

    def __init__(self, blocks: _Counted, start: int, end: int):
        self._blocks = blocks
        self._position = start
        self._end = end
        self.problem: OSError | None = None
        """The error of the storage, which a decoder takes for damage."""

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, empty at the end of the range."""
        left = self._end - self._position
        try:
            data = bytes(self._blocks.at(self._position, min(left, size if size >= 0 else SLICE_BYTES)))
        except OSError as error:
            self.problem = error
            raise
        self._position += len(data)
        return data

    def tell(self) -> int:
        """Return the offset, in the compressed file, of the next byte to read."""
        return self._position
