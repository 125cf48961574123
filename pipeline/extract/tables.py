"""Tables of a page: which of them have data, which hold code with line numbers, and the columns of their cells."""

import re
from collections.abc import Iterator, Sequence

from pipeline.extract.blocks import Blocks
from pipeline.extract.code_blocks import holds_line_numbers
from pipeline.extract.places import CELLS, ROW, ROW_GROUPS, Places, children_of

MAX_CELL_WORDS = 60
"""Maximum number of words in a cell of a table with data; tables with more text in a cell are page layout."""
CHARS_PER_WORD = 6
"""Number of letters that count as a word where no spaces separate words; a word of English has as many."""
MAX_COLUMNS = 50
"""Maximum number of columns that the spans of cells make; the cells of a row are written however many they are."""

_SPAN = re.compile(r' (col|row)span="(\d{1,4})"')
_WIDE = re.compile(r"[\u2e80-\U0003ffff]")
_NUMBERS = re.compile(r"[\d\s\v]+")
_LINE_NUMBER = re.compile(r' data-line-number="\d+"')
MAX_NUMBER_TAGS = 100
"""Number of tags of a cell whose texts are compared with line numbers."""
_GUTTER_SIGNS = ("lineno", "blob-num", "gutter", "hljs-ln", "crayon-num", "line-number", "line_number", '"lnt"')
"""A page with line numbers in the cells of a table has one of them in its markup."""


def data_cells(blocks: Blocks, kept: Sequence[int]) -> list[list[int]]:
    """Return all blocks of each table with data of which a block is kept."""
    places, own = Places(blocks), blocks.own.tolist()
    around = {table for block in kept if (table := places[own[block]].table) is not None}
    cells: dict[int, list[int]] = {}
    for block in range(len(own) if around else 0):
        place = places[own[block]]
        if place.table in around and place.row is not None and place.cell is not None:
            cells.setdefault(place.table, []).append(block)
    found = data_tables(blocks, [block for members in cells.values() for block in members], places)
    return [members for table, members in cells.items() if table in found]


def data_tables(blocks: Blocks, kept: Sequence[int], places: Places) -> frozenset[int]:
    """Return the tables with several rows and columns of short cells; the others are page layout, or hold code."""
    rows: dict[int, dict[int, dict[int, int]]] = {}
    words: dict[int, int] = {}
    own = blocks.own.tolist()
    for block in kept:
        place = places[own[block]]
        if place.table is not None and place.row is not None and place.cell is not None:
            cells = rows.setdefault(place.table, {}).setdefault(place.row, {})
            cells[place.cell] = cells.get(place.cell, 0) + 1
            count = MAX_CELL_WORDS + 1 if place.is_code else _num_words(blocks.source(block))
            words[place.table] = max(words.get(place.table, 0), count)
    return frozenset(
        table
        for table, cells_of in rows.items()
        if len(cells_of) >= 2
        and words[table] <= MAX_CELL_WORDS
        and sum(len(cells) >= 2 for cells in cells_of.values()) * 2 >= len(cells_of)
        and sum(map(len, cells_of.values())) * 2 >= sum(sum(cells.values()) for cells in cells_of.values())
    )


def _num_words(text: str) -> int:
    """Return the number of words, at most a few more than MAX_CELL_WORDS; two ideographs count as one."""
    parts = text[: 4 * CHARS_PER_WORD * MAX_CELL_WORDS].split(None, MAX_CELL_WORDS)
    letters = sum(map(len, parts))
    if letters <= 2 * MAX_CELL_WORDS or text.isascii():
        return len(parts)
    return max(len(parts), len(_WIDE.findall(text)) // 2, letters // (2 * CHARS_PER_WORD))


def code_tables(blocks: Blocks, kept: Sequence[int], places: Places) -> frozenset[int | None]:
    """Return the tables with kept blocks in which a cell holds line numbers, by its class and its text."""
    own = blocks.own.tolist()
    around = {table for block in kept if (table := places[own[block]].table) is not None}
    if not around or not any(map(blocks.has_markup, _GUTTER_SIGNS)):
        return frozenset()
    tables = set()
    for cell in range(min(around), max(int(blocks.ends[table]) for table in around)):
        if blocks.container(cell).element in CELLS and (table := places[cell].table) in around:
            source = blocks.tag(int(blocks.opened[cell])) if table not in tables else ""
            if not holds_line_numbers(source):
                continue
            text = _text(blocks, cell)
            if _NUMBERS.fullmatch(text) if text else _LINE_NUMBER.search(source):
                tables.add(table)
    return frozenset(tables)


def _text(blocks: Blocks, container: int) -> str:
    """Return the text of a container, with that up to the next container, without white space at its ends."""
    after = int(blocks.ends[container])
    first = int(blocks.opened[container])
    last = int(blocks.opened[after]) if after < len(blocks.opened) else len(blocks.tag_starts)
    return "".join(map(blocks.text, range(first, min(last, first + MAX_NUMBER_TAGS)))).strip()


class Grid:
    """The columns of the cells of one table, by the spans of its cells."""

    def __init__(self, blocks: Blocks, table: int):
        """Read the spans of all cells of the table."""
        self.columns: dict[int, list[int | None]] = {}
        """Row → cell that begins in each column; None: no cell, or one that began before or in a row above."""
        below: dict[int, int] = {}
        for row in _rows(blocks, table):
            cells: list[int | None] = []
            for cell in children_of(blocks, row, CELLS):
                while below.get(len(cells), 0):
                    below[len(cells)] -= 1
                    cells.append(None)
                column, rows = _spans(blocks.tag(int(blocks.opened[cell])))
                column = max(1, min(column, MAX_COLUMNS - len(cells)))
                if rows > 1 and len(cells) < MAX_COLUMNS:
                    below |= dict.fromkeys(range(len(cells), len(cells) + column), rows - 1)
                cells += [cell, *[None] * (column - 1)]
            while below.get(len(cells), 0):
                below[len(cells)] -= 1
                cells.append(None)
            self.columns[row] = cells
        self.width = max(map(len, self.columns.values()), default=0)


def _rows(blocks: Blocks, table: int) -> Iterator[int]:
    rows = frozenset((ROW,))
    for part in children_of(blocks, table, ROW_GROUPS | rows):
        if blocks.container(part).element == ROW:
            yield part
        else:
            yield from children_of(blocks, part, rows)


def _spans(tag: str) -> tuple[int, int]:
    """Return the number of columns and of rows of a cell, from its start tag."""
    spans = {kind: max(1, int(number)) for kind, number in _SPAN.findall(tag)}
    return spans.get("col", 1), spans.get("row", 1)
