"""Reader of compressed files: gzip members, zstd and LZ4 frames, bzip2 streams (all called frames) and plain bytes.

Each frame's exact byte range in the file (its stored offsets) is found. After bytes that cannot be decoded, reading
resumes at the next frame.
"""

import re
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.sources.blocks import BlockReader, ByteStream
from pipeline.sources.decoders import (
    BZIP2,
    CANDIDATE,
    DECODED_BYTES,
    GZIP,
    LZ4,
    MAGIC_BYTES,
    SLICE_BYTES,
    ZSTD,
    Codec,
    CountedBlocks,
    DamageError,
    codec_of,
)

# A decoder detects damage only some bytes after it. The search for the next frame starts this far before that position.
BACKTRACK_BYTES = 192 << 10
PEEK_BYTES = 8 << 10
PROBE_BYTES = 5 << 20
"""Maximum number of bytes that are read of a candidate for a frame until it has to decode; a block of LZ4 has 4 MiB."""
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
NESTED_FACTOR, MAX_COUNTED_BYTES = 4, 16 << 10
"""Bytes of records with a coding of their own that a frame may have for each of its stored bytes, and how many bytes of
one record count, as so many can become the largest page; see NestedCodings."""
REPEATED_GROWTH = 8
"""Bytes that a record with a coding may decode to for each of its bytes if its frame repeats such records. Of 2,181
pages of Common Crawl in gzip, 96 % become less than 8 times as large."""
VERBATIM_BYTES = 64
"""Bytes of a frame, at most, that are compared with decoded bytes to find it there."""
STORED_FACTOR = 2
"""Decoded bytes of one stored byte, above which a block is compressed and has no bytes of the file in it."""
RESTARTS, MAX_RESTARTS = {BZIP2: 3, GZIP: 15}, 63
"""Maximum number of ranges that begin inside one frame, by codec, and for the others. Of JSON lines, a core decodes
67 MB/s of bzip2, 580 of gzip and 1,900 of zstd, and measures 1.6: with the maximum, a file takes about 4 % longer."""
FIRST_PAIRS = tuple(int.from_bytes(magic[:2], "big") for magic in (GZIP, ZSTD, BZIP2, LZ4))
"""The first two bytes of each, as a number."""


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
    end: int = 0
    """Stored offset up to which the frame or the plain bytes have been read for them."""


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
            codec = codec_of(self.blocks.peek(match, MAGIC_BYTES))
            if codec is not None and not (self._is_bearable(match) and self._decodes(codec, match)):
                continue
            return match + (self.blocks.peek(match, 1) == b"\n")
        return self.blocks.size()

    def _is_bearable(self, position: int) -> bool:
        return self._wasted <= WASTED_BYTES + WASTED_FACTOR * position

    def _decodes(self, codec: Codec, position: int) -> bool:
        probe = CountedBlocks(self.blocks, position + PROBE_BYTES)
        try:
            data = next((data for data, _ in codec(probe, position) if data), b"")
            probe.bytes += len(data)
            decodes = self.starts is None or self.starts.begins(data)
        except DamageError:
            decodes = False
        if not decodes:
            self._wasted += max(probe.bytes, MIN_PROBE_BYTES)
        return decodes

    def _read(self, position: int) -> Generator[DecodedBlock, None, None]:
        while head := self.blocks.peek(position, MAGIC_BYTES):
            self._note(position)
            codec = codec_of(head)
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

    def _frame(self, codec: Codec, start: int) -> Generator[DecodedBlock, None, int]:
        first, position = True, start
        stored = CountedBlocks(self.blocks)
        try:
            for data, end in codec(stored, start):
                if self._is_too_much(len(data)):
                    position = self.size()
                    yield DecodedBlock(b"", start, False, first, "decoded_too_large", position)
                    break
                inside = self._frame_inside(codec, start, data, (position, end))
                position, data = (end, data) if inside is None else (inside.start, data[: inside.size])
                if data:
                    yield DecodedBlock(data, start, False, first, end=min(position, stored.decoded))
                    first = False
                if inside is not None:
                    yield DecodedBlock(b"", start, False, first, inside.reason, position)
                    break
        except DamageError as damage:
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

    def _frame_inside(self, codec: Codec, start: int, data: bytes, stored: tuple[int, int]) -> _FrameInside | None:
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
            own = codec_of(self.blocks.peek(place, MAGIC_BYTES))
            if size < 0 or own is None or not self._decodes(own, place):
                continue
            if (reason := self._damage_of(codec, start, place + BACKTRACK_BYTES)) is not None:
                return _FrameInside(place, size, reason)
        return None

    def _damage_of(self, codec: Codec, start: int, limit: int) -> str | None:
        """Return the damage of a frame that is detected up to the offset `limit` in the file; None if there is none."""
        again = CountedBlocks(self.blocks)
        try:
            next((end for _, end in codec(again, start) if end > limit), None)
        except DamageError as damage:
            return damage.reason
        finally:
            self._read_again += again.bytes
        return None

    def _plain(self, position: int, is_first: bool = True) -> Generator[DecodedBlock, None, int]:
        while True:
            self._note(position, int(not is_first))
            if not (data := self.blocks.at(position, DECODED_BYTES >> 2)):
                return position
            end = position + len(data)
            yield DecodedBlock(bytes(data), position, True, is_first, end=end)
            position, is_first = end, False


def _candidates(block: bytes) -> Iterator[int]:
    """Yield the positions at which CANDIDATE matches, three times as fast as its `finditer`."""
    codes = np.frombuffer(block, np.uint8).astype(np.uint16)
    pairs = codes[:-1] << 8 | codes[1:]
    places = np.logical_or.reduce([pairs == pair for pair in FIRST_PAIRS]).nonzero()[0].tolist()
    return (place for place in places if CANDIDATE.match(block, place))


class NestedCodings:
    """Limits the records of a frame that have a coding of their own, such as a page in gzip.

    Such a record cannot be compressed again, so the records of a frame have about as many bytes as the frame. If they
    have many more, the frame repeats them: 5.6 kB of zstd have 39,000 copies of a page that gzip shortens to 16 kB and
    that would be processed 39,000 times.
    """

    def __init__(self, frame: int = 0, size: int = 0):
        """`frame`, `size`: the `state` of an object that has seen the earlier records of the frame."""
        self.state = frame, size
        """Stored offset of the current frame, and bytes of its records with codings so far."""

    def is_repeated(self, frame: int, end: int, size: int) -> bool:
        """Count a record of `size` bytes; return True if there are too many, in which case it is not counted.

        The frame begins at the offset `frame` in the file and has been read up to `end`.
        """
        total = min(size, MAX_COUNTED_BYTES) + (self.state[1] if frame == self.state[0] else 0)
        if total > NESTED_FACTOR * (end - frame):
            return True
        self.state = frame, total
        return False


def most_decoded(size: int) -> int:
    """Return the maximum number of bytes that the frames of a file with so many bytes may decode to."""
    return DECODED_FREE + DECODED_A_BYTE * size


def max_restarts(head: bytes) -> int:
    """Return how many ranges of a file, at most, may begin inside a frame with these MAGIC_BYTES first bytes.

    Each of them decodes the frame from its start, so together they decode it half as many times as they are.
    """
    return next((number for magic, number in RESTARTS.items() if head.startswith(magic)), MAX_RESTARTS)
