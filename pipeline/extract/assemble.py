"""The text of a page's kept blocks in their shape: headings, lists, tables, quotes and code, as plain text or Markdown.

Plain text has empty lines between paragraphs, `- ` and numbers before list items, ` | ` between the columns of a table,
and code as it is. Markdown adds marks for headings, emphasis, quotes and code. Neither escapes characters of the page,
so that the text is what a reader sees.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.extract.blocks import LINE_BREAK, Blocks
from pipeline.extract.code_blocks import code_of, has_code_alone, language_around
from pipeline.extract.inline import Inline, TextForm
from pipeline.extract.places import ITEM, MAX_INDENT, ORDERED, Place, Places, children_of
from pipeline.extract.tables import Grid, code_tables, data_tables

MAX_AROUND = 4
"""Number of containers around code that can name its language."""
EMPTY_LINE = "\ufdd0"
"""The content of an empty line of code that follows another one, until the text is normalized: outside code, several
empty lines become one. It is also before the indentation of code with which the text begins, as white space at the ends
of a text is removed. It is a noncharacter, which no text has."""
MARKED_LINES = "_marked_lines"
"""Field of a row: True if its source has written EMPTY_LINE into the text."""

_ITEMS = frozenset((ITEM,))
_FIRST_NUMBER = re.compile(r' (?:start|value)="(-?\d{1,6})"')
_BULLET = re.compile(r"[-–—•·▪●○◦*]\s+(?=\S)")
"""A mark that the page has typed before an item that is marked anyway."""
_REVERSED = re.compile(r" reversed\b")


class _Unit(NamedTuple):
    """Lines of the text, and where they are."""

    lines: str
    group: int | None = None
    """The list, definition list or table that they are in."""
    quote: int | None = None
    """The outermost quote that they are in."""
    quotes: int = 0
    is_indented: bool = False
    """True for code whose first line is indented."""


def assemble(blocks: Blocks, kept: Sequence[int], form: TextForm, base: str | None = None) -> str:
    """Return the text of the kept blocks, given by their numbers in ascending order.

    `base`: URL of the page, against which the URLs of links and images are resolved. EMPTY_LINE is in the text.
    """
    text: list[str] = []
    last = _Unit("")
    for unit in _Writer(blocks, kept, form, base).units():
        if unit.lines:
            if text:
                text.append(_between(last, unit, form))
            elif unit.is_indented:
                text.append(EMPTY_LINE)
            text.append(unit.lines)
            last = unit
    return "".join(text)


def _between(last: _Unit, unit: _Unit, form: TextForm) -> str:
    if unit.group is not None and unit.group == last.group:
        return "\n"
    if form.markdown and unit.quote is not None and unit.quote == last.quote:
        marks = "> " * min(last.quotes, unit.quotes, MAX_INDENT)
        return f"\n{marks.rstrip()}\n"
    return "\n\n"


def _without_mark(line: str, mark: str) -> str:
    """Return the first line of an item of a list without a mark that the page has typed there."""
    typed = _BULLET.match(line) if mark == "- " else None
    return line[typed.end() :] if typed is not None else line.removeprefix(mark)


class _Writer:
    """Writes the kept blocks of one page."""

    def __init__(self, blocks: Blocks, kept: Sequence[int], form: TextForm, base: str | None):
        self.blocks, self.kept, self.form = blocks, kept, form
        self.inline = Inline(blocks, form, base)
        self.places = Places(blocks)
        self.own = blocks.own.tolist()
        self.marks: dict[int, str] = {}
        """Item of a list → the mark before it."""
        self.marked: set[int] = set()
        """Items of which a line was written."""
        self.numbers: dict[int, dict[int, int]] = {}
        """Ordered list → number of each item."""
        self.data_tables = data_tables(blocks, kept, self.places)
        self.code_tables = code_tables(blocks, kept, self.places)
        self.grids: dict[int, Grid] = {}
        self.cells = frozenset(self.places[self.own[block]].cell for block in kept)
        """Cells of tables that have text."""
        self.shown: dict[int, frozenset[int]] = {}
        """Table → its columns that have text."""

    def units(self) -> Iterator[_Unit]:
        """Yield the lines of each block, of each row of a table with data, and of each table with code."""
        number, size = 0, len(self.kept)
        rows: set[int] = set()
        tables: set[int | None] = set()
        while number < size:
            block = self.kept[number]
            place = self.places[self.own[block]]
            if self.form.images:
                yield _Unit(self._images(number))
            start = number
            number += 1
            if place.table in self.code_tables:
                while number < size and self._place(number).table == place.table:
                    number += 1
                first = int(self.blocks.first_tags[block] if place.table in tables else self.blocks.opened[place.table])
                tables.add(place.table)
                yield self._unit(self._code(first, self.kept[number - 1]), None, place)
            elif place.table not in self.data_tables or place.row is None or place.cell is None or place.row in rows:
                in_layout = place.table is not None and place.item is None
                yield self._unit(self._block(block, place), None if in_layout else place.group, place)
            else:
                while number < size and self._place(number).row == place.row:
                    number += 1
                yield self._unit(self._row(place, self.kept[start:number]), place.table, place)
                rows.add(place.row)
        if self.form.images:
            yield _Unit(self._images(size))

    def _place(self, number: int) -> Place:
        return self.places[self.own[self.kept[number]]]

    def _unit(self, lines: list[str], group: int | None, place: Place) -> _Unit:
        if place.quotes and self.form.markdown:
            marks = "> " * min(place.quotes, MAX_INDENT)
            lines = [(marks + line.replace(EMPTY_LINE, "")).rstrip() for line in lines]
        # Only code keeps the white space at the start of a line, and the items of nested lists have theirs from here.
        is_indented = bool(lines) and lines[0][:1].isspace() and place.item is None
        return _Unit("\n".join(lines), group, place.quote, place.quotes, is_indented)

    def _row(self, place: Place, blocks: Sequence[int]) -> list[str]:
        """Return the line of a row, with the line that Markdown has below the first row of a table."""
        texts: dict[int | None, list[str]] = {}
        for block in blocks:
            texts.setdefault(self.places[self.own[block]].cell, []).append(" ".join(self.inline.text(block).split()))
        table, row = place.table or 0, place.row or 0
        is_first = table not in self.grids
        grid = self.grids.setdefault(table, Grid(self.blocks, table)) if is_first else self.grids[table]
        columns = grid.columns.get(row, texts)
        cells = [" ".join(texts.get(cell, ())) if cell is not None else "" for cell in columns]
        if not self.form.markdown:
            shown = self._columns(table, grid)
            cells = [cell for column, cell in enumerate(cells) if cell or column in shown]
            while cells and not cells[-1]:
                cells.pop()
            return [" | ".join(cells).strip()]
        cells += [""] * (grid.width - len(cells) if is_first else 0)
        line = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        return [line, f"|{' --- |' * len(cells)}"] if is_first else [line]

    def _columns(self, table: int, grid: Grid) -> frozenset[int]:
        """Return the columns of a table in which a cell has text; others only make space."""
        if table not in self.shown:
            self.shown[table] = frozenset(
                column
                for cells in grid.columns.values()
                for column, cell in enumerate(cells)
                if cell is not None and cell in self.cells
            )
        return self.shown[table]

    def _block(self, block: int, place: Place) -> list[str]:
        """Return the lines of a block outside tables with data."""
        if place.is_code:
            lines = self._code(self.blocks.first_tags[block], block)
        else:
            text = self.inline.text(block, in_heading=place.heading > 0)
            if (
                LINE_BREAK in text
                and b"<code" in self.blocks.markup(block)
                and has_code_alone(self._html(self.blocks.first_tags[block], block))
            ):
                lines = self._code(self.blocks.first_tags[block], block)
            else:
                lines = list(filter(None, (" ".join(line.split()) for line in text.split(LINE_BREAK))))
                if place.item is not None and lines and place.item not in self.marked:
                    lines[0] = _without_mark(lines[0], self._mark(place.item))
        if place.heading and lines:
            lines = ["#" * place.heading * self.form.markdown + " " * self.form.markdown + " ".join(lines)]
        return self._item(lines, place, place.item) if place.item is not None and lines else lines

    def _item(self, lines: list[str], place: Place, item: int) -> list[str]:
        """Return the lines of a block in list items, indented, and with the mark of the innermost `item` once."""
        before = "".join(" " * len(self._mark(outer)) for outer in place.first_items)
        mark = self._mark(item)
        indent = before + " " * len(mark)
        first = before + mark if item not in self.marked else indent
        around: Place | None = place
        while around is not None and around.item is not None:
            if around.item in self.marked:  # as are the items around it
                break
            self.marked.add(around.item)
            around = around.outer
        return [first + lines[0], *(indent + line if line.strip(EMPTY_LINE) else line for line in lines[1:])]

    def _mark(self, item: int) -> str:
        mark = self.marks.get(item)
        if mark is None:
            around = int(self.blocks.parents[item])
            is_ordered = self.blocks.container(around).element == ORDERED
            mark = self.marks[item] = f"{self._numbers(around)[item]}. " if is_ordered else "- "
        return mark

    def _numbers(self, ordered: int) -> dict[int, int]:
        """Return the number of each item of an ordered list."""
        numbers = self.numbers.get(ordered)
        if numbers is None:
            items = children_of(self.blocks, ordered, _ITEMS)
            tag = self.blocks.tag(int(self.blocks.opened[ordered]))
            step = -1 if _REVERSED.search(tag) else 1
            start = _FIRST_NUMBER.search(tag)
            number = int(start[1]) if start else len(items) if step < 0 else 1
            numbers = self.numbers[ordered] = {}
            for item in items:
                own = _FIRST_NUMBER.search(self.blocks.tag(int(self.blocks.opened[item])))
                number = int(own[1]) if own else number
                numbers[item] = number
                number += step
        return numbers

    def _html(self, first: int, last: int) -> str:
        """Return the markup from a tag to the end of a block, without elements that are left out."""
        tokens = range(first, self.blocks.last_tags[last])
        return "".join(f"<{self.blocks.tag(token)}>{self.blocks.text(token)}" for token in tokens)

    def _code(self, first: int, last: int) -> list[str]:
        """Return the lines of the code from a tag to the end of a block."""
        code = code_of(self._html(first, last))
        lines = code.text.rstrip().split("\n")
        while lines and not lines[0].strip():
            lines.pop(0)
        for number in range(1, len(lines) - 1):
            if not lines[number].strip() and not lines[number - 1].strip(f" \t{EMPTY_LINE}"):
                lines[number] = EMPTY_LINE
        if not lines or not self.form.markdown:
            return lines
        fence = "```"
        while any(line.lstrip().startswith(fence) for line in lines):
            fence += "`"
        return [fence + (code.language or self._language_around(last) or ""), *lines, fence]

    def _language_around(self, block: int) -> str | None:
        """Return the programming language of a block of code, as the nearest containers around it name it."""
        container = self.own[block]
        for _ in range(MAX_AROUND):
            container = int(self.blocks.parents[container])
            language = language_around(self.blocks.tag(int(self.blocks.opened[container]))) if container else None
            if language is not None:
                return language
        return None

    def _images(self, number: int) -> str:
        """Return the images between two kept blocks, one per line: those before kept[number].

        Beside a block that is not kept, only images in the container around the kept one count.
        """
        blocks, kept = self.blocks, self.kept
        before = kept[number - 1] if number else None
        after = kept[number] if number < len(kept) else None
        parts = []
        if before is not None and after is not None and after == before + 1:
            parts.append(range(blocks.last_tags[before], blocks.first_tags[after]))
        else:
            if before is not None:
                end = blocks.first_tags[before + 1] if before + 1 < len(blocks) else len(blocks.tag_starts)
                parts.append(range(blocks.last_tags[before], min(end, self._end_around(before))))
            if after is not None:
                start = blocks.last_tags[after - 1] if after else 0
                parts.append(range(max(start, self._start_around(after)), blocks.first_tags[after]))
        return "\n".join(filter(None, map(self.inline.images, parts)))

    def _end_around(self, block: int) -> int:
        """Return a tag after the container around a block's own; the end of the block if this is the body."""
        around = int(self.blocks.parents[self.own[block]])
        if not around and block + 1 < len(self.blocks):
            return int(self.blocks.last_tags[block])
        after = int(self.blocks.ends[around])
        return int(self.blocks.opened[after]) if after < len(self.blocks.opened) else len(self.blocks.tag_starts)

    def _start_around(self, block: int) -> int:
        """Return the tag of the container around a block's own; the start of the block if this is the body."""
        around = int(self.blocks.parents[self.own[block]])
        return int(self.blocks.opened[around] if around or not block else self.blocks.first_tags[block])
