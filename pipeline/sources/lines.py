"""The lines of a file, compressed or not, with their offsets in the decompressed file."""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.engine.stage import Drop, RangeStart, Row, Split
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import DecodedBlock, FrameReader, Frames, FrameState
from pipeline.sources.config import SourceConfig
from pipeline.sources.decoders import MAGIC_BYTES, is_compressed
from pipeline.sources.provenance import SourceItem, account_bytes, most_rows, new_row, too_many_rows

BOM = b"\xef\xbb\xbf"
LINE_END = re.compile(rb"\n")
SourceRows = Iterator[tuple[Row, Drop | None]]
"""What a reader yields: each row, with a Drop if it cannot be a document."""
LineParser = Callable[[bytes, SourceConfig], tuple[Row, Drop | None]]
"""Function from (line without its line feed, settings) to the line's row, with a Drop if it cannot be a document."""


_decode_object = json.JSONDecoder().raw_decode


def parse_line(line: bytes) -> Any:
    """Return the JSON value on a line, as `json.loads` does. Raises ValueError or RecursionError if it has none."""
    if line[:1] != b"{" or line[1:2] == b"\0" or line[-1:] != b"}":
        return json.loads(line)
    # An object whose second byte is not NUL is in UTF-8, so that its encoding need not be guessed.
    text = line.decode("utf-8", "surrogatepass")
    value, end = _decode_object(text)
    if end != len(text):
        raise ValueError(f"expected the end of the line after {end} characters, got more")
    return value


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object on a line; None if the line is no JSON, or another value."""
    try:
        value = parse_line(line.strip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class LineReader:
    """Iterates over the lines of a file and their offsets in the decompressed file.

    `position` is the number of bytes that were decompressed; after the last line, the size of the decompressed file.
    """

    def __init__(self, frames: Frames, max_bytes: int, mark: bytes = b"", position: int = 0, num_lines: int = 0):
        """`mark`: a byte to count in lines that are too long.

        `position`, `num_lines`: offset of the first byte of `frames`, and number of the lines before it.
        """
        self._frames = frames
        self._max_bytes = max_bytes
        self._mark = mark
        self.position = position
        self.num_lines = num_lines
        """Number of lines up to the one that was yielded last."""
        self.num_marks = 0
        """Number of marks in the line that was yielded last, if it is too long."""

    def __iter__(self) -> Iterator[tuple[int, bytes | Drop]]:
        """Yield (offset, line without its line feed). A Drop replaces a line that is too long or cannot be decoded.

        If the file has too many lines for its bytes, a Drop replaces the rest of it.
        """
        checked = most_rows(0)
        for start, line in self._lines():
            if self.num_lines >= checked:
                if (surplus := too_many_rows(self.num_lines, self._frames.size)) is not None:
                    yield start, surplus
                    return
                checked = most_rows(self._frames.size())
            self.num_lines += 1
            yield start, line

    def _lines(self) -> Iterator[tuple[int, bytes | Drop]]:
        held: list[bytes] = []
        start, size, marks = self.position, 0, 0
        max_bytes = self._max_bytes
        while (piece := self._frames.next()) is not None:
            if piece.fault is not None:
                if size:
                    yield start, b"".join(held) if size <= max_bytes else self._too_long(size, marks)
                yield self.position, Drop(piece.fault, float(piece.resumed - piece.start))
                held, start, size, marks = [], self.position, 0, 0
                continue
            self.position += len(piece.data)
            *whole, rest = piece.data.split(b"\n")
            for part in whole:
                if not size and len(part) <= max_bytes:  # A whole line, as most are.
                    yield start, part
                    start += len(part) + 1
                    continue
                size += len(part)
                if size > max_bytes:
                    yield start, self._too_long(size, marks + self._count([*held, part]))
                else:
                    yield start, b"".join([*held, part])
                start += size + 1
                held, size, marks = [], 0, 0
            size += len(rest)
            if rest and size <= max_bytes:
                held.append(rest)
            elif rest:
                marks += self._count([*held, rest])
                held = []
        if size:
            yield start, b"".join(held) if size <= max_bytes else self._too_long(size, marks)

    def _count(self, parts: list[bytes]) -> int:
        return sum(part.count(self._mark) for part in parts) if self._mark else 0

    def _too_long(self, size: int, marks: int) -> Drop:
        self.num_marks = marks
        return Drop("record_too_large", float(size), float(self._max_bytes))


def _filled(lines: LineReader) -> Iterator[tuple[int, bytes | Drop]]:
    """Yield the lines that are not empty without their mark of the encoding, and the Drops, with their offsets."""
    for start, line in lines:
        if isinstance(line, Drop) or (line := line.removeprefix(BOM)).strip():
            yield start, line


def read_lines(split: Split, stream: ByteStream, config: SourceConfig, parse: LineParser) -> SourceRows:
    """Yield the rows of a file with one row per line. `parse` returns the row of a line.

    An empty line has no row. Its bytes belong to the row before it.
    """
    lines = lines_of(split, stream, config.max_record_bytes)

    def items() -> Iterator[SourceItem]:
        for start, line in _filled(lines):
            if isinstance(line, Drop):
                kind = "row" if line.rule == "record_too_large" else "gap"
                yield SourceItem(start, new_row(kind), line)
            else:
                yield SourceItem(start, *parse(line, config))

    return account_bytes(items(), split, lambda: lines.position)


# The ranges of a file of lines. A line feed is the end of a line wherever it is, so a range of a file that is not
# compressed may begin after any of them. A compressed file is decompressed to find the frame that a line begins in.


class _LaterFrames:
    """The decoded blocks of a file without its first bytes."""

    def __init__(self, frames: Frames, skipped: int):
        self._frames, self._left = frames, skipped

    def size(self) -> int:
        return self._frames.size()

    def next(self) -> DecodedBlock | None:
        piece = self._frames.next()
        while piece is not None and self._left and piece.fault is None:
            size = min(self._left, len(piece.data))
            self._left -= size
            if size < len(piece.data):
                return piece._replace(data=piece.data[size:])
            piece = self._frames.next()
        return piece


class _NotedFrames:
    """The decoded blocks of a file; it remembers the states of the frames that the current line may begin in."""

    def __init__(self, frames: FrameReader):
        self._frames = frames
        self._size = 0
        self._states: deque[tuple[int, FrameState]] = deque()

    def size(self) -> int:
        return self._frames.size()

    def next(self) -> DecodedBlock | None:
        piece = self._frames.next()
        if piece is not None and piece.fault is None:
            if piece.first:
                self._states.append((self._size, self._frames.state))
            self._size += len(piece.data)
        return piece

    def resume_at(self, offset: int) -> tuple[int, ...]:
        """Return the state of the frame that has this offset, and the number of its decoded bytes before it."""
        while len(self._states) > 1 and self._states[1][0] <= offset:
            self._states.popleft()
        start, state = self._states[0]
        return (*state, offset - start)


def lines_of(split: Split, stream: ByteStream, max_bytes: int) -> LineReader:
    """Return the lines of a file from the first line of the split on."""
    frames = FrameReader(stream, None)
    if not split.first.resume:
        return LineReader(frames, max_bytes)
    *state, skipped, num_lines = split.first.resume
    frames.resume(FrameState(*state))
    later = _LaterFrames(frames, skipped)
    return LineReader(later, max_bytes, position=split.first.offset, num_lines=num_lines)


def find_line_starts(stream: ByteStream, config: SourceConfig, places: Sequence[int]) -> Iterator[RangeStart]:
    """Yield, for each of the ascending places in the stored file, the first line at or after it, if there is one.

    A line of a compressed file has the place up to which the file had to be decompressed for it.
    """
    frames = FrameReader(stream, None)
    is_plain = not is_compressed(frames.blocks.peek(0, MAGIC_BYTES))
    find = _starts_in_plain if is_plain else _starts_in_frames
    yield from find(frames, config.max_record_bytes, places)


def _starts_in_plain(frames: FrameReader, max_bytes: int, places: Sequence[int]) -> Iterator[RangeStart]:
    first = next((start for start, _ in _filled(LineReader(frames, max_bytes))), None)
    offset = -1
    for place in places:
        if place > offset:
            end = next(frames.blocks.search(LINE_END, place - 1), None)
            if end is None or first is None:
                return
            frames.resume(FrameState(end + 1, end + 1, 0, 0, 1, 0))
            lines = _filled(LineReader(frames, max_bytes, position=end + 1))
            found = next((start for start, _ in lines if start > first), None)
            if found is None:
                return
            offset = found
        yield RangeStart(offset, 0, (offset, offset, 0, 0, 1, 0, 0, 0))


def _starts_in_frames(frames: FrameReader, max_bytes: int, places: Sequence[int]) -> Iterator[RangeStart]:
    noted, left = _NotedFrames(frames), deque(places)
    reader, before = LineReader(noted, max_bytes), None
    for start, line in _filled(reader):
        is_later = before is not None and start > before  # the first range begins with the file
        before = start if before is not None else 0
        if not is_later or (isinstance(line, Drop) and line.rule != "record_too_large"):
            continue
        while left and left[0] <= frames.blocks.reached:
            left.popleft()
            yield RangeStart(start, 0, (*noted.resume_at(start), reader.num_lines - 1))
        if not left:
            return
