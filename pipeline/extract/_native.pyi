"""The native module of extraction: functions of whole pages that return arrays as bytearrays of NumPy's types."""

from collections.abc import Iterable, Mapping

from typing_extensions import Buffer

SOURCES: str

class TagTables:
    """The tables by which start tags are read; an opaque object."""

class Lexicon:
    """The codes of words; an opaque object."""

def read_markup(
    html: str, limits: tuple[int, int], keys: Buffer, effects: Buffer, mix: int, factor: int, /
) -> tuple[bytes, bytearray, bytearray, bytearray, bytearray, bytearray, list[str], bytearray, bool]:
    """Return the fields of `Markup` of blocks.py. `limits`: MAX_TAGS and HEAD_FACTOR of blocks.py.

    The four last arguments are EFFECT_TABLES of tags.py.
    """

def tag_tables(
    elements: Mapping[str, int],
    roles: Mapping[str, int],
    marks: list[int],
    comments: Iterable[str],
    properties: Iterable[str],
    bits: tuple[int, int, int, int, int],
    /,
) -> TagTables:
    """Return the tables of start tags. `bits` are those of comments, hidden, property, body_property and scope."""

def read_tags(
    tables: TagTables, html: Buffer, begins: Buffer, ends: Buffer, is_read: Buffer, name_bytes: int, /
) -> tuple[list[tuple[int, int, tuple[str, ...]]], bytearray]:
    """Return element, marks and words of each distinct tag, and the number of each tag among them (int64)."""

def count_characters(texts: list[str], classes: Buffer, /) -> tuple[bytearray, bytearray]:
    """Return the counts of `count_characters_in_python` (float32, 5 rows), and whether each text is closed (bool)."""

def lexicon(codes: Mapping[str, float], stripped: str, /) -> Lexicon:
    """Return the codes of words as a table; `stripped` are the characters that are cut from the ends of a piece."""

def look_up(
    words: Lexicon, texts: list[str], title: set[str], most: int, absent: float, /
) -> tuple[bytearray, bytearray, bytearray]:
    """Return the number of pieces of each text (int64), the code of each piece (float32), and whether the title has it.

    At most the first `most` pieces of a text are looked up. `absent`: the code of a word that the lexicon lacks.
    """

def count_attributes(page: str, long_tag: int, read_factor: int, /) -> tuple[int, int, int]:
    """Return what `attribute_work_in_python` of page_limits.py returns."""

def count_formatting(page: str, /) -> int:
    """Return the number of matches of `_FORMATTING_START` of nesting.py."""

def count_tags(page: bytes, /) -> tuple[int, int]:
    """Return the numbers of `<` and of `</` in a page."""

def nesting(
    page: str, kinds: dict[str, int], factor: int, max_depth: int, max_reopened: int, /
) -> tuple[str, int] | None:
    """Return the rule and the value of the Drop that `scan_in_python` of nesting.py returns, or None.

    `kinds` and `factor`: KINDS and ATTRIBUTE_FACTOR of nesting.py.
    """

def head_tags(
    page: bytes, limits: tuple[int, int, int], marks: tuple[bytes, ...], names: tuple[bytes, ...], /
) -> list[bytes]:
    """Return what `head_tags_in_python` of pipeline/rights/marks.py returns.

    `limits`: the maximum numbers of bytes of the page, of bytes of a tag, and of tags. A tag has one of `marks` and one
    of `names`, in lower case.
    """

def text_between_tags(page: str, /) -> str:
    """Return what `text_between_tags_in_python` of pipeline/language.py returns."""
