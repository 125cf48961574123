"""The lines of a file, compressed or not, with their offsets in the decompressed file."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.compression import ByteStream, FrameReader, Frames
from pipeline.sources.config import SourceConfig
from pipeline.sources.provenance import SourceItem, account_bytes, new_row

BOM = b"\xef\xbb\xbf"
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

    After the last line, `position` is the size of the decompressed file [bytes].
    """

    def __init__(self, frames: Frames, max_bytes: int, mark: bytes = b""):
        """`mark`: a byte to count in lines that are too long."""
        self._frames = frames
        self._max_bytes = max_bytes
        self._mark = mark
        self.position = 0
        self.num_marks = 0
        """Number of marks in the line that was yielded last, if it is too long."""

    def __iter__(self) -> Iterator[tuple[int, bytes | Drop]]:
        """Yield (offset, line without its line feed). A Drop replaces a line that is too long or cannot be decoded."""
        held: list[bytes] = []
        start = size = marks = 0
        max_bytes = self._max_bytes
        while (piece := self._frames.next()) is not None:
            if piece.fault is not None:
                if size:
                    yield start, b"".join(held) if size <= max_bytes else self._too_long(size, marks)
                yield self.position, Drop(piece.fault, float(piece.resumed - piece.start))
                held, start, size, marks = [], self.position, 0, 0
                continue
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
            self.position += len(piece.data)
        if size:
            yield start, b"".join(held) if size <= max_bytes else self._too_long(size, marks)

    def _count(self, parts: list[bytes]) -> int:
        return sum(part.count(self._mark) for part in parts) if self._mark else 0

    def _too_long(self, size: int, marks: int) -> Drop:
        self.num_marks = marks
        return Drop("record_too_large", float(size), float(self._max_bytes))


def read_lines(split: Split, stream: ByteStream, config: SourceConfig, parse: LineParser) -> SourceRows:
    """Yield the rows of a file with one row per line. `parse` returns the row of a line.

    An empty line has no row. Its bytes belong to the row before it.
    """
    lines = LineReader(FrameReader(stream, None), config.max_record_bytes)

    def items() -> Iterator[SourceItem]:
        for start, line in lines:
            if isinstance(line, Drop):
                kind = "row" if line.rule == "record_too_large" else "gap"
                yield SourceItem(start, new_row(kind), line)
            elif (line := line.removeprefix(BOM)).strip():
                yield SourceItem(start, *parse(line, config))

    return account_bytes(items(), split, lambda: lines.position)
