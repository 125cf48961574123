"""Markdown of papers and cards: texts of users and of data stay text."""

import re
from collections.abc import Iterator, Sequence

from schemas.text import printable_line

SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$])")
"""Characters that Markdown may read as markup, HTML included."""

BLOCK_START = re.compile(r"^(\d*)([-=.)])")
"""The beginning of a line that Markdown may read as a rule, a list or the underline of a heading."""
ESCAPED_PIPE = r"\\|"
BARE_PIPE = re.compile(r"(?<!\\)\|")
"""A character that would end a cell of a table, in code too; in `escaped` text it has a backslash already."""


def escaped(text: str) -> str:
    """Return a text on one line in which Markdown reads no markup."""
    return SPECIAL.sub(r"\\\1", printable_line(text))


def paragraph(text: str) -> str:
    """Return a text as a paragraph or an item of a list: its beginning is no rule, list or heading either."""
    return BLOCK_START.sub(r"\1\\\2", escaped(text))


def code(text: str) -> str:
    """Return a text as code on one line; backticks are left out."""
    return f"`{printable_line(text).replace('`', '')}`"


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose cells are Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(BARE_PIPE.sub(ESCAPED_PIPE, cell) for cell in row)} |" for row in rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose cells are Markdown."""
    return "\n".join(table_lines(head, rows))
