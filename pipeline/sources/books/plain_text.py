"""Text of whole files, such as books: reading with bounded memory, and joining lines that were broken for their length.

Books in plain text mostly have lines of about 70 characters. A line of prose was broken because the next word did not
fit; a line of verse, a table or a list of contents ends where the author ended it. So a block of lines between empty
lines is prose if, at most line ends, the first word of the next line would not have fit.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pyarrow.fs as pafs

from pipeline.engine.stage import Drop
from pipeline.extract.charset import decode
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import FrameReader

MAX_CONTROLS = 0.01
"""Maximum share of control characters in a text; files with more are no text."""
MAX_WIDTH = 120
"""Maximum width of lines that were broken for their length [code points]."""
MIN_WIDTH = 30
"""Minimum width of such lines [code points]."""
SLACK = 8
"""A word would have fit if the line with it is shorter than the width by more than 1 / SLACK of the width: many editors
broke lines by hand."""

_CONTROLS = bytes([*range(9), *range(14, 26), *range(28, 32)])
"""Control characters that no text has; 26 ends files of DOS, and 27 switches between Japanese alphabets."""
_LINE_ENDS = ("\r\n", "\r", "\x0b", "\x85", "\u2028")
_GAP = re.compile(r"\S {3,}\S|\S +\| +\S|^\s*[-+=_|]{5,}")
"""What lines of a table have: wide spaces between words, bars, or a rule."""
_MAY_GAP = re.compile(r"\S   | \| |[-+=_|]{5}")
"""A block without these has no such line."""
_RULE_SIGNS, _RULE = bytes.maketrans(b"+=_|", b"----"), b"-----"
_WIDE = re.compile(r"[\u2e80-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef]")
_HYPHEN = re.compile(r"(?:\w-|--|\u2014)\Z")


class WholeFile(NamedTuple):
    """The decompressed content of a file, or the reason why it has none."""

    data: bytes
    drop: Drop | None
    size: int
    """Size of the content [bytes]."""


def read_whole(stream: ByteStream, max_bytes: int) -> WholeFile:
    """Read a file, compressed or not. Content of more than `max_bytes` is counted and not kept."""
    frames = FrameReader(stream, None)
    data, size = bytearray(), 0
    drop: Drop | None = None
    while (block := frames.next()) is not None:
        if block.fault is not None:
            drop = drop or Drop(block.fault, float(block.resumed - block.start))
        size += len(block.data)
        if size <= max_bytes:
            data += block.data
        else:
            data.clear()
    if size > max_bytes:
        drop = Drop("record_too_large", float(size), float(max_bytes))
    return WholeFile(b"" if drop else bytes(data), drop, size)


def read_decoded(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Return `length` bytes from `offset` on of a decompressed file; fewer only at its end."""
    data, position = bytearray(), 0
    with fs.open_input_file(path) as file:
        frames = FrameReader(file, None)
        while position < offset + length and (block := frames.next()) is not None:
            data += block.data[max(0, offset - position) : max(0, offset + length - position)]
            position += len(block.data)
    return bytes(data)


def decoded_text(data: bytes, charset: str | None = None) -> str | None:
    """Return the text of a file with `\\n` as its line ends; None if it is no text.

    `charset`: the charset that the file declares, if any.
    """
    decoded = decode(data, charset)
    content = decoded.text.encode("utf-8", "replace") if decoded.charset.startswith(("utf-16", "utf-32")) else data
    if len(content) - len(content.translate(None, _CONTROLS)) > MAX_CONTROLS * len(content):
        return None
    text = decoded.text.removeprefix("\ufeff")
    for line_end in _LINE_ENDS:  # A pattern for all of them takes ten times as long.
        text = text.replace(line_end, "\n")
    return text.replace("\x1a", "")


def joined_lines(text: str) -> str:
    """Return the text with the lines of each paragraph joined, where they were broken for their length.

    The lines of verse and tables are kept. The indentation of paragraphs is removed.
    """
    pages = _stripped(text).split("\f")
    blocks = [
        block.strip("\n").split("\n")
        for page in pages
        for block in page.split("\n\n")  # No line ends with white space.
        if block and not block.isspace()
    ]
    width = _width(blocks)
    return "\n\n".join(_paragraphs(block, width) for block in blocks)


def kept_lines(text: str) -> str:
    """Return the text with its lines as they are."""
    return _stripped(text).replace("\f", "\n\n")


def _stripped(text: str) -> str:
    return "\n".join(map(str.rstrip, (text.expandtabs(4) if "\t" in text else text).split("\n")))


def _width(blocks: Sequence[Sequence[str]]) -> int:
    """Return the width at which lines were broken: nine tenths of the lines before another one are not longer."""
    lengths = sorted(len(line) for block in blocks for line in block[:-1])
    width = lengths[len(lengths) * 9 // 10] if lengths else 0
    return width if MIN_WIDTH <= width <= MAX_WIDTH else 0


def _paragraphs(block: Sequence[str], width: int) -> str:
    if len(block) == 1:
        return block[0].strip()
    if not width or not _is_prose(block, width):
        return _dedented(block)
    if not any(line[0].isspace() for line in block):
        return _joined(block)
    indents = [len(line) - len(line.lstrip()) for line in block]
    left = min(indents)
    parts: list[list[str]] = []
    for number, line in enumerate(block):
        begins = indents[0] > left and indents[number] > left and indents[number + 1 : number + 2] in ([left], [])
        if begins or not parts:
            parts.append([])
        parts[-1].append(line.strip())
    return "\n\n".join(map(_joined, parts))


def _is_prose(block: Sequence[str], width: int) -> bool:
    if _may_have_gap("\n".join(block)) and 3 * sum(_GAP.search(line) is not None for line in block) > len(block):
        return False
    breaks = len(block) - 1
    limit = width - width // SLACK
    early = sum(
        len(line) < limit and len(line) + 1 + _first_word(after) <= limit  # Most lines are too long for any word.
        for line, after in pairwise(block)
    )
    return 2 * early < breaks


def _may_have_gap(text: str) -> bool:
    # Few blocks get past these searches for fixed texts, and the pattern takes 10 times as long.
    may_have = "   " in text or " | " in text or _RULE in text.encode("utf-8", "replace").translate(_RULE_SIGNS)
    return may_have and _MAY_GAP.search(text) is not None


def _first_word(line: str) -> int:
    """Return the length of the first word of a line; an ideograph is a word."""
    line = line.lstrip()
    if not line.isascii() and _WIDE.match(line):
        return 1
    end = line.find(" ")
    return len(line) if end < 0 else end


def _dedented(block: Sequence[str]) -> str:
    left = min(len(line) - len(line.lstrip()) for line in block)
    return "\n".join(line[left:] for line in block)


def _joined(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    if text.isascii() and "-\n" not in text:
        return text.replace("\n", " ")
    parts: list[str] = []
    for line in lines:
        if parts:
            last = parts[-1]
            sign = last[-1:]
            is_whole = (sign in "-\u2014" and _HYPHEN.search(last[-2:])) or (_WIDE.match(sign) and _WIDE.match(line))
            parts.append("" if is_whole else " ")
        parts.append(line)
    return "".join(parts)
