"""Output as plain text: safe characters, tables, durations, sizes and JSON values."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, TextIO

PREFIXES = ("", "k", "M", "G", "T", "P")
FIRST_SECONDS = 2.0
"""Time before the first progress line [s]."""
LINE_SECONDS = 10.0
"""Time between progress lines in a log file [s]; on a terminal the line is overwritten once a second."""
CLEAR = "\r\x1b[K"
"""Control sequence that clears the current line of a terminal."""
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0001-\U000e007f]"
)
"""Characters that a terminal executes, that reorder or hide other characters, or that cannot be encoded: C0 and C1
controls, line and paragraph separators, marks and overrides of direction, invisible characters, surrogates and tags."""
HOSTILE_IN_LINES = re.compile(CONTROL_CHARACTERS.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
"""The same characters without line feeds and tabs, which a text of several lines keeps."""


def printable(text: str) -> str:
    r"""Return text that is safe to print on a terminal, with control characters as visible escapes such as `\x1b`.

    CONTROL_CHARACTERS are replaced, line breaks and tabs included. Titles, URLs and texts of crawled documents may
    contain such characters on purpose.
    """
    return CONTROL_CHARACTERS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def printable_block(text: str) -> str:
    """Return a text of several lines that is safe to print; line feeds and tabs stay as they are."""
    return HOSTILE_IN_LINES.sub(_escape, text)


def printable_line(text: str) -> str:
    """Return the text on one line, safe to print; each run of white space becomes one space."""
    return printable(" ".join(text.split()))


def printable_value(value: Any) -> Any:
    """Return a JSON value in which every text and name is safe to show; texts keep line feeds and tabs."""
    if isinstance(value, str):
        return printable_block(value)
    if isinstance(value, dict):
        return {printable_block(str(name)): printable_value(item) for name, item in value.items()}
    return [printable_value(item) for item in value] if isinstance(value, list | tuple) else value


def printable_lines(text: str) -> list[str]:
    """Return the lines of a text, each safe to print. Lines end at line feeds only; tabs become spaces."""
    return [printable(line.removesuffix("\r").expandtabs(4)) for line in text.removesuffix("\n").split("\n")]


def to_json_value(value: Any) -> Any:
    """Return a value of a table as a JSON value; numbers that are not finite become null, and bytes become hex."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(name): to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value if isinstance(value, int | str | bool | None) else str(value)


def printable_json(value: Any, indent: int | None = None) -> str:
    """Return the JSON text of a value of a table, safe to print: control characters are escaped, letters are not."""
    text = json.dumps(to_json_value(value), ensure_ascii=False, indent=indent)
    return "\n".join(CONTROL_CHARACTERS.sub(_json_escape, line) for line in text.split("\n"))


def printable_json_bytes(canonical: bytes) -> bytes:
    """Return the bytes of a JSON value on one line with control characters escaped; the value stays the same."""
    return CONTROL_CHARACTERS.sub(_json_escape, canonical.decode("utf-8")).encode()


def _json_escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def text_table(rows: Sequence[Sequence[str]], align: str = "<", indent: str = "") -> list[str]:
    """Return one line per row, with columns two spaces apart and without spaces at the end.

    `align` has `<` or `>` for each column; its last character also applies to all further columns. Cells are made safe
    to print.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), align[-1])
    lines = ("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)) for row in rows)
    return [f"{indent}{line}".rstrip() for line in lines]


def format_clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, such as `0:42:10`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def format_duration(seconds: float) -> str:
    """Return a duration with its unit, such as `4.2 s` or `1 h 03 min`."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def format_short(number: float, space: str = " ") -> str:
    """Return a number with three significant digits and an SI prefix, such as `12.3 M`; no prefix below 1000."""
    step = 0
    while abs(number) >= 999.5 and step < len(PREFIXES) - 1:
        number, step = number / 1000, step + 1
    return f"{number:.3g}{space}{PREFIXES[step]}" if step else f"{number:.3g}"


SIZE_TEXT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+) ?([kKMGBT])")
SIZE_FACTORS = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def parse_size(value: object) -> object:
    """Return the number that a text such as `10M` or `1.5B` means (k, M, B or G, T); any other value as it is."""
    match = SIZE_TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    return round(Fraction(match[1].replace(",", "").replace("_", "")) * SIZE_FACTORS[match[2]])


def format_bytes(number: float) -> str:
    """Return a size with three significant digits and a decimal prefix, such as `1.23 MB` or `512 bytes`."""
    return f"{format_short(number)}B" if number >= 999.5 else f"{number:.0f} bytes"


class PrintableStream:
    """A text stream that shows CONTROL_CHARACTERS as visible escapes, except line feeds and tabs.

    Whatever a verb prints, no byte of its data reaches the terminal as a command. `raw` is the stream itself, for the
    control sequences of our own progress lines.
    """

    def __init__(self, raw: TextIO):
        self.raw = raw

    def write(self, text: str) -> int:
        """Write a text with escapes, and return the length of the text."""
        self.raw.write(printable_block(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream itself, such as `flush` or `fileno`."""
        return getattr(self.raw, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream below a PrintableStream, for text that is printable except for our own control sequences."""
    return stream.raw if isinstance(stream, PrintableStream) else stream
