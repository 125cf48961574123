"""Decoders of one frame: a gzip member, a zstd or LZ4 frame, or a bzip2 stream.

Each verifies the checksum of its frame and gives decoded blocks of a maximum size at any compression ratio.
"""

import bz2
import io
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import zstandard
from fastwarc.stream_io import ZstdReader
from lz4.frame import LZ4FrameDecompressor

from pipeline.sources.blocks import BlockReader

SLICE_BYTES = 32 << 10
"""Bytes that a decoder gets at a time."""
DECODED_BYTES = 1 << 20
"""Maximum size of a decoded block."""
ZSTD_BLOCK_BYTES = 128 << 10
MIN_PEEK_BYTES = 256
"""What reading a header of a block costs [bytes]."""
MAGIC_BYTES = 10
MAX_USUAL_WINDOW, MAX_WINDOW = 128 << 20, 1 << 31
"""Largest window of zstd frames that decoders accept, without and with `--long=31` [bytes]. Reddit dumps have 2 GiB."""
CANDIDATE = re.compile(rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd|\x04\x22\x4d\x18|BZh[1-9](?:1AY&SY|\x17\x72\x45\x38\x50\x90)")
GZIP, ZSTD, BZIP2, LZ4 = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"BZh", b"\x04\x22\x4d\x18"
# Skippable zstd frames have sixteen magic numbers. Source: RFC 8878, section 3.1.2.
ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")


class DamageError(Exception):
    """Bytes of a frame that cannot be decoded."""

    def __init__(self, reason: str, position: int):
        self.reason = reason
        self.position = position


class CountedBlocks:
    """The file as the decoder of a frame reads it: the bytes are counted. There are none at `limit` and after it."""

    def __init__(self, blocks: BlockReader, limit: int | None = None):
        self._blocks = blocks
        self._limit = limit
        self.bytes = 0
        """Bytes that were read."""
        self.end = 0
        """Offset after the last of them in the file."""
        self.decoded = 0
        """The same without the headers of blocks that are read ahead."""

    def at(self, position: int, size: int) -> memoryview:
        data = self._blocks.at(position, self._allowed(position, size))
        self.bytes += len(data)
        self.decoded = max(self.decoded, position + len(data))
        self.end = max(self.end, self.decoded)
        return data

    def peek(self, position: int, size: int) -> bytes:
        data = self._blocks.peek(position, self._allowed(position, size))
        self.bytes += max(len(data), MIN_PEEK_BYTES)
        self.end = max(self.end, position + len(data))
        return data

    def _allowed(self, position: int, size: int) -> int:
        return size if self._limit is None else max(0, min(size, self._limit - position))


Codec = Callable[[CountedBlocks, int], Iterator[tuple[bytes, int]]]
"""Function from (file, stored offset of a frame) to the frame's decoded blocks, each with the stored offset up to which
the file has been read. It raises DamageError."""


def is_compressed(head: bytes) -> bool:
    """Return True if a file with these MAGIC_BYTES first bytes begins with a compressed frame."""
    return codec_of(head) is not None


def codec_of(head: bytes) -> Codec | None:
    """Return the decoder of the frame that begins with these MAGIC_BYTES bytes, or None."""
    if head.startswith(GZIP):
        return _gzip
    if head.startswith(ZSTD) or ZSTD_SKIPPABLE.match(head):
        return _zstd
    if head.startswith(LZ4):
        return _lz4
    return _bzip2 if head.startswith(BZIP2) and CANDIDATE.match(head) else None


def _gzip(blocks: CountedBlocks, start: int) -> Iterator[tuple[bytes, int]]:
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
            raise DamageError("bad_gzip", position) from None
        # At the end of the gzip member both attributes hold the rest of the input.
        position += len(stored) - len(decoder.unused_data if decoder.eof else decoder.unconsumed_tail)
        if data or stored:
            yield data, position
        elif not decoder.eof:
            raise DamageError("truncated_record", position)


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


def _bzip2(blocks: CountedBlocks, start: int) -> Iterator[tuple[bytes, int]]:
    decoder = bz2.BZ2Decompressor()
    position = start
    while not decoder.eof:
        stored = blocks.at(position, SLICE_BYTES) if decoder.needs_input else memoryview(b"")
        if decoder.needs_input and not stored:
            raise DamageError("truncated_record", position)
        try:
            data = decoder.decompress(stored, DECODED_BYTES)
        except OSError:
            raise DamageError("bad_gzip", position) from None
        position += len(stored) - len(decoder.unused_data)
        yield data, position


def _lz4(blocks: CountedBlocks, start: int) -> Iterator[tuple[bytes, int]]:
    decoder = LZ4FrameDecompressor()
    position = start
    while not decoder.eof:
        stored = bytes(blocks.at(position, SLICE_BYTES)) if decoder.needs_input else b""
        if decoder.needs_input and not stored:
            raise DamageError("truncated_record", position)
        try:
            data = decoder.decompress(stored, DECODED_BYTES)
        except (RuntimeError, EOFError, MemoryError):
            raise DamageError("bad_gzip", position) from None
        position += len(stored) - (len(decoder.unused_data or b"") if decoder.eof else 0)
        yield data, position


def _zstd(blocks: CountedBlocks, start: int) -> Iterator[tuple[bytes, int]]:
    damage = None
    try:
        end = _zstd_end(blocks, start)
    except DamageError as error:
        damage, end = error, error.position
    stored = _Range(blocks, start, end)
    try:
        reader = _zstd_reader(blocks, stored) if blocks.peek(start, 4) == ZSTD else io.BytesIO()
        while data := reader.read(DECODED_BYTES):
            yield data, end
    except (OSError, MemoryError, zstandard.ZstdError):
        if stored.problem is not None:
            raise stored.problem from None
        raise damage or DamageError("bad_gzip", start) from None
    if damage:
        raise damage
    yield b"", end


def _zstd_reader(blocks: CountedBlocks, stored: "_Range") -> Any:
    """Return a reader of the zstd frame `stored`.

    Source: RFC 8878, section 3.1.1.1.2 (window descriptor).
    """
    flags, window = blocks.peek(stored.tell(), 6).ljust(6, b"\0")[4:6]
    size = 0 if flags >> 5 & 1 else (1 << 10 + (window >> 3)) // 8 * (8 + (window & 7))
    if size <= MAX_USUAL_WINDOW:
        return ZstdReader(cast(Any, stored))
    return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(cast(Any, stored))


def _zstd_end(blocks: CountedBlocks, start: int) -> int:
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
                raise DamageError("truncated_record", position)
            header = int.from_bytes(block, "little")
            last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            if kind == 3 or size > ZSTD_BLOCK_BYTES:
                raise DamageError("bad_gzip", position)
            position += 3 + (1 if kind == 1 else size)
        end = position + (4 if flags >> 2 & 1 else 0)
    if not blocks.peek(end - 1, 1):
        raise DamageError("truncated_record", position)
    return end


class _Range:
    """The bytes [start, end) of the compressed file as a file object, for decoders that require one."""

    def __init__(self, blocks: CountedBlocks, start: int, end: int):
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
