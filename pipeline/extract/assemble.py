"""The text of a page's kept blocks in their shape: headings, lists, tables, quotes and code, as plain text or Markdown.

Plain text has empty lines between paragraphs, `- ` and numbers before list items, ` | ` between the cells of a row, and
code as it is. Markdown adds marks for headings, emphasis, quotes and code. Neither escapes characters of the page, so
that the text is what a reader sees.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urljoin

from pipeline.extract.blocks import LINE_BREAK, Blocks, unescape
from pipeline.extract.code_blocks import code_of
from pipeline.extract.tags import CONTAINERS, IMAGE

MAX_CELL_WORDS = 60
"""Maximum number of words in a cell of a table with data; tables with more text in a cell are page layout."""
MAX_INDENT = 10
"""Maximum number of nested lists for which the lines of an item are indented."""
MAX_URL_CHARS = 2_000
"""Maximum length of the URL of a link or an image; a longer one is left out."""

_NUMBER = {name: number for number, name in enumerate(CONTAINERS)}
_HEADINGS = {_NUMBER[f"h{level}"]: level for level in range(1, 7)}
_LISTS = frozenset((_NUMBER["ul"], _NUMBER["ol"], _NUMBER["menu"], _NUMBER["dir"]))
_CELLS = frozenset((_NUMBER["td"], _NUMBER["th"]))
_TERMS = frozenset((_NUMBER["dt"], _NUMBER["dd"]))
_PRE, _ITEM, _TABLE, _ROW, _QUOTE, _ORDERED, _TERM_LIST = (
    _NUMBER[name] for name in ("pre", "li", "table", "tr", "blockquote", "ol", "dl")
)
_FIRST_NUMBER = re.compile(r' start="(\d{1,6})"')
_URL = re.compile(r' (?:href|src)="([^"]*)"')
_ALT = re.compile(r' alt="([^"]*)"')
_MARK_OF = {"b": "**", "strong": "**", "i": "*", "em": "*", "code": "`", "kbd": "`", "samp": "`"}


@dataclass(frozen=True)
class TextForm:
    """How the text of a page is written."""

    markdown: bool = False
    links: bool = False
    """True to write the URL of each link after its text."""
    images: bool = False
    """True to write the alternative text of images, in Markdown with their URLs."""


class _Place(NamedTuple):
    """Where a container is: the elements around it that give its text a shape. Containers are numbers, or None."""

    heading: int = 0
    quotes: int = 0
    items: tuple[int, ...] = ()
    """The list items around it, from the outermost on."""
    group: int | None = None
    """Outermost list, definition list or table; the lines of one group have no empty lines between them."""
    table: int | None = None
    row: int | None = None
    cell: int | None = None
    is_code: bool = False


class _Places(dict[int, _Place]):
    """Maps a container to its place; computed on first access."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self[0] = _Place()

    def __missing__(self, container: int) -> _Place:
        missing = []
        while container not in self:
            missing.append(container)
            container = int(self.blocks.parents[container])
        place = self[container]
        for inner in reversed(missing):
            place = self[inner] = _inside(place, inner, self.blocks.container(inner).element)
        return place


def _inside(place: _Place, container: int, element: int) -> _Place:
    """Return the place of a container with this element in the place of its parent."""
    if element in _HEADINGS:
        return place._replace(heading=_HEADINGS[element])
    if element == _ITEM:
        group = container if place.group is None else place.group
        return place._replace(items=(*place.items, container), group=group)
    if element in _LISTS or element == _TERM_LIST:
        return place if place.group is not None else place._replace(group=container)
    if element == _TABLE:
        return _Place(quotes=place.quotes, group=container, table=container)
    if element == _ROW:
        return place._replace(row=container, cell=None)
    if element in _CELLS:
        return place._replace(cell=container)
    if element == _QUOTE:
        return place._replace(quotes=place.quotes + 1)
    return place._replace(is_code=True) if element == _PRE else place


def assemble(blocks: Blocks, kept: Sequence[int], form: TextForm, base: str | None = None) -> str:
    """Return the text of the kept blocks, given by their numbers in ascending order.

    `base`: URL of the page, against which the URLs of links and images are resolved.
    """
    text: list[str] = []
    last: int | None = None
    for group, lines in _Writer(blocks, kept, form, base).units():
        if lines:
            if text:
                text.append("\n" if group is not None and group == last else "\n\n")
            text.append(lines)
            last = group
    return "".join(text)


class _Writer:
    """Writes the kept blocks of one page."""

    def __init__(self, blocks: Blocks, kept: Sequence[int], form: TextForm, base: str | None):
        self.blocks, self.kept, self.form, self.base = blocks, kept, form, base
        self.places = _Places(blocks)
        self.own = blocks.own.tolist()
        self.marked: set[int] = set()
        self.data_tables = self._data_tables()

    def units(self) -> Iterator[tuple[int | None, str]]:
        """Yield (group, lines) of each block, and of each row of a table with data; None = not in a group."""
        number, size = 0, len(self.kept)
        ruled: set[int | None] = set()
        while number < size:
            block = self.kept[number]
            if self.form.images and number and self.kept[number - 1] == block - 1:
                yield None, self._images(self.blocks.last_tags[block - 1], self.blocks.first_tags[block])
            place = self.places[self.own[block]]
            if place.table not in self.data_tables or place.row is None or place.cell is None:
                in_layout = place.table is not None and not place.items
                yield (None if in_layout else place.group), self._block(block, place)
                number += 1
                continue
            start, row = number, place.row
            while number < size and self.places[self.own[self.kept[number]]].row == row:
                number += 1
            yield place.table, self._row(row, self.kept[start:number], place.table not in ruled)
            ruled.add(place.table)

    def _data_tables(self) -> frozenset[int | None]:
        """Return the tables with several rows and columns of short cells; the others are page layout."""
        rows: dict[int, dict[int, dict[int, int]]] = {}
        words: dict[int, int] = {}
        for block in self.kept:
            place = self.places[self.own[block]]
            if place.table is not None and place.row is not None and place.cell is not None:
                cells = rows.setdefault(place.table, {}).setdefault(place.row, {})
                cells[place.cell] = cells.get(place.cell, 0) + 1
                count = len(self.blocks.source(block).split(None, MAX_CELL_WORDS))
                words[place.table] = max(words.get(place.table, 0), count)
        return frozenset(
            table
            for table, cells_of in rows.items()
            if len(cells_of) >= 2
            and words[table] <= MAX_CELL_WORDS
            and sum(len(cells) >= 2 for cells in cells_of.values()) * 2 >= len(cells_of)
            and sum(map(len, cells_of.values())) * 2 >= sum(sum(cells.values()) for cells in cells_of.values())
        )

    def _row(self, row: int, blocks: Sequence[int], is_first: bool) -> str:
        texts: dict[int, list[str]] = {}
        for block in blocks:
            cell = self.places[self.own[block]].cell
            if cell is not None:
                texts.setdefault(cell, []).append(" ".join(self._inline(block).split()))
        cells = [" ".join(texts.get(cell, ())) for cell in self._children(row, _CELLS)]
        if not self.form.markdown:
            return " | ".join(filter(None, cells))
        line = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        return f"{line}\n|{' --- |' * len(cells)}" if is_first else line

    def _children(self, container: int, elements: frozenset[int]) -> list[int]:
        """Return the containers directly in a container that have one of the elements."""
        children = []
        inner, end = container + 1, int(self.blocks.ends[container])
        while inner < end:
            if self.blocks.container(inner).element in elements:
                children.append(inner)
            inner = int(self.blocks.ends[inner])
        return children

    def _block(self, block: int, place: _Place) -> str:
        """Return the lines of a block outside tables with data."""
        if place.is_code:
            lines = self._code(block)
        else:
            lines = [" ".join(line.split()) for line in self._inline(block).split(LINE_BREAK)]
            lines = [line for line in lines if line]
        if not lines:
            return ""
        if place.heading and self.form.markdown:
            lines = ["#" * place.heading + " " + " ".join(lines)]
        if place.items:
            indent = "  " * min(len(place.items), MAX_INDENT)
            item = place.items[-1]
            mark = self._mark(item) if item not in self.marked else "  "
            self.marked.update(place.items)
            lines = [indent[2:] + mark + lines[0], *(indent + line if line else "" for line in lines[1:])]
        if place.quotes and self.form.markdown:
            lines = ["> " * place.quotes + line for line in lines]
        return "\n".join(lines)

    def _mark(self, item: int) -> str:
        around = int(self.blocks.parents[item])
        if self.blocks.container(around).element != _ORDERED:
            return "- "
        items = self._children(around, frozenset((_ITEM,)))
        first = _FIRST_NUMBER.search(self.blocks.tag(int(self.blocks.opened[around])))
        return f"{items.index(item) + (int(first[1]) if first else 1)}. " if item in items else "- "

    def _code(self, block: int) -> list[str]:
        tokens = range(self.blocks.first_tags[block], self.blocks.last_tags[block])
        html = "".join(f"<{self.blocks.tag(token)}>{self.blocks.text(token)}" for token in tokens)
        code = code_of(html)
        lines = code.text.rstrip().split("\n")
        while lines and not lines[0].strip():
            lines.pop(0)
        if not lines or not self.form.markdown:
            return lines
        fence = "```"
        while any(line.lstrip().startswith(fence) for line in lines):
            fence += "`"
        return [fence + (code.language or ""), *lines, fence]

    def _inline(self, block: int) -> str:
        """Return the text of a block, with marks for emphasis, links and images if they are chosen."""
        if not (self.form.markdown or self.form.links or self.form.images):
            return self.blocks.source(block)
        parts: list[str] = []
        opened: list[tuple[str, int, str]] = []
        for token in range(self.blocks.first_tags[block], self.blocks.last_tags[block]):
            source = self.blocks.tag(token)
            tag = source.partition(" ")[0]
            if tag.startswith("/"):
                if opened and opened[-1][0] == tag[1:]:
                    self._close(parts, *opened.pop())
            elif tag == "a" or (tag in _MARK_OF and self.form.markdown):
                opened.append((tag, len(parts), source if tag == "a" else ""))
            elif tag == "img" and self.form.images:
                parts.append(self._image(token))
            parts.append((LINE_BREAK if tag == "br" else "") + unescape(self.blocks.text(token)))
        while opened:
            self._close(parts, *opened.pop())
        return "".join(parts)

    def _close(self, parts: list[str], tag: str, start: int, attributes: str) -> None:
        """Put marks around the parts from `start` on, without the white space at their ends."""
        inner = "".join(parts[start:])
        core = inner.strip()
        if not core:
            return
        lead, tail = inner[: inner.index(core)], inner[inner.index(core) + len(core) :]
        if tag == "a":
            url = self._url(attributes) if self.form.links else None
            marked = core if url is None else f"[{core}]({url})" if self.form.markdown else f"{core} ({url})"
        else:
            marked = _MARK_OF[tag] + core + _MARK_OF[tag]
        parts[start:] = [lead, marked, tail]

    def _url(self, attributes: str) -> str | None:
        found = _URL.search(attributes)
        if found is None or not found[1].strip() or len(found[1]) > MAX_URL_CHARS:
            return None
        url = unescape(found[1].strip())
        if url.startswith(("#", "data:", "javascript:")):
            return None
        try:
            return urljoin(self.base or "", url).replace(" ", "%20")
        except ValueError:
            return None

    def _image(self, token: int) -> str:
        attributes = self.blocks.tag(token)
        alt = _ALT.search(attributes)
        text = " ".join(unescape(alt[1]).split()) if alt else ""
        if not self.form.markdown:
            return text
        url = self._url(attributes)
        return f"![{text}]({url})" if url else text

    def _images(self, first: int, last: int) -> str:
        """Return the images between two blocks, one per line."""
        tokens = (token for token in range(first, last) if self.blocks.effects[token] == IMAGE)
        return "\n".join(filter(None, map(self._image, tokens)))
