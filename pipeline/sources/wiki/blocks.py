"""The lines of a wiki page, after templates, links and tags are resolved: headings, lists, tables and paragraphs.

The form is that of the extractor of HTML pages: empty lines between paragraphs, `- ` and numbers before the items of
lists, and ` | ` between the cells of a table.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from html import unescape
from typing import Literal, NamedTuple

GONE, HOLD, HOLD_END, BREAK, CELL, EDGE = "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4", "\ufdd5", "\ufdd6"
"""Noncharacters that mark, until the text is complete: something left out, content that is held, a line break, the
start of a cell, and the start or end of a block such as `<div>`."""
MAX_TABLES = 8
"""Maximum number of tables inside each other; deeper ones are left out."""
MAX_COLUMNS = 50
"""Maximum number of columns that the spans of cells make; the cells of a row are written however many they are."""
MAX_INDENT = 10
MAX_CELL_CHARS = 400
"""Maximum length of a cell of a table with data [code points]; tables with longer cells are layout, and their cells are
paragraphs."""

_HIDDEN_TABLE = re.compile(
    r"(?:infobox|navbox|sidebar|metadata|noprint|ambox|toccolours|taxobox|succession|persondata|messagebox|display\s*:\s*none)",
    re.IGNORECASE,
)
_SPAN = re.compile(r"\b(col|row)span\s*+=\s*+[\"']?\s*+(\d{1,4})", re.IGNORECASE)
_ITEM = re.compile(r"[*#:;]++")
_HELD = re.compile(f"{HOLD}(\\d+){HOLD_END}")
_SPACES = re.compile(r"[ \t\xa0]{2,}|[\t\xa0]")
_MARKS = re.compile("[\ufdd0-\ufdef]")
_GONE_RUN = re.compile(f"{GONE}(?: ?{GONE})++")
_GONE_ALONE = re.compile(rf"[(\uff08\[] ?{GONE} ?[)\uff09\]]")
_SIGNS = "[,;:/\uff0c\uff1b\u3001]"
_OPENED = re.compile(rf"([(\uff08\[]) ?(?:{_SIGNS}? ?{GONE} ?{_SIGNS}? ?){{1,8}}+")
_CLOSED = re.compile(rf" ?(?:{_SIGNS}? ?{GONE} ?{_SIGNS}? ?){{1,8}}+(?=[)\uff09\]])")
_EMPTY_BRACKETS = re.compile(r" ?(?:\( ?\)|\uff08 ?\uff09|\[ ?\])")
_BEFORE_SIGN = re.compile(rf" {GONE} ?(?=[.,;:!?)\u3002\uff0c])")
_AROUND = re.compile(rf"(?<= ){GONE} ")
_WIDE = re.compile(r"[\u2e80-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef]")
_TO_SPACES = str.maketrans(dict.fromkeys((BREAK, CELL, EDGE), " "))
_WORD = re.compile(r"\w")


class Held(NamedTuple):
    """Content that is restored when the text is complete."""

    kind: Literal["inline", "block", "formula", "display"]
    text: str


class WikiForm(NamedTuple):
    """What is kept of a page."""

    headings: bool = True
    lists: bool = True
    tables: bool = True
    math: bool = True


class _Block(NamedTuple):
    kind: Literal["heading", "item", "line", "text"]
    text: str
    level: int = 0


def mark_of(number: int, held: Held) -> str:
    """Return what takes the place of held content in the lines of the page."""
    mark = f"{HOLD}{number}{HOLD_END}"
    return f"{EDGE}{mark}{EDGE}" if held.kind in ("block", "display") else mark


def text_of_lines(text: str, form: WikiForm, held: list[Held]) -> str:
    """Return the text of a page. `text` has marks of `held`, to which tables are appended."""
    lines = _Tables(form, held).flat_lines(text.split("\n"))
    parts: list[str] = []
    last = ""
    for block in _with_text(_blocks(lines, form, held)):
        if parts:
            parts.append("\n" if block.kind == last and last in ("item", "line") else "\n\n")
        parts.append(block.text)
        last = block.kind
    text = _HELD.sub(lambda match: _restored(held[int(match[1])]), unescape("".join(parts)))
    return _MARKS.sub("", text)


def _restored(held: Held) -> str:
    if held.kind in ("formula", "display"):
        sign = "$" if held.kind == "formula" else "$$"
        return f"{sign}{held.text}{sign}"
    # The cells of a table may hold formulas; the number of held contents inside others is bounded by MAX_TABLES.
    return held.text


class _Table:
    def __init__(self, is_hidden: bool):
        self.is_hidden = is_hidden
        self.caption: list[str] = []
        self.rows: list[list[list[str]]] = [[]]
        self.spans: list[list[tuple[int, int]]] = [[]]
        """Number of columns and of rows of each cell."""

    def add(self, lines: Sequence[str]) -> None:
        """Add lines to the last cell; what is before the first cell of a row is not shown."""
        if self.rows[-1]:
            self.rows[-1][-1].extend(lines)

    def add_row(self) -> None:
        """Begin another row."""
        self.rows.append([])
        self.spans.append([])

    def add_cells(self, line: str) -> None:
        """Add the cells of a line that begins with a mark of cells."""
        parts = re.split(r"\|\||!!", line[1:]) if line[0] == "!" else line[1:].split("||")
        for part in parts:
            attributes, pipe, content = part.partition("|")
            self.rows[-1].append([(content if pipe else attributes).strip()])
            found = {kind.lower(): int(number) for kind, number in _SPAN.findall(attributes[:500])} if pipe else {}
            self.spans[-1].append((found.get("col", 1), found.get("row", 1)))


class _Tables:
    """Replaces the tables of a page by held contents, or by the lines of their cells."""

    def __init__(self, form: WikiForm, held: list[Held]):
        self._form, self._held = form, held
        self._open: list[_Table] = []
        self._lines: list[str] = []
        self._deep = 0
        """Number of open tables that are nested too deeply."""

    def flat_lines(self, lines: Sequence[str]) -> list[str]:
        """Return the lines of a page without marks of tables."""
        for line in lines:
            mark = line.lstrip(f" \t:{EDGE}{GONE}")
            if mark.startswith("{|"):
                if len(self._open) >= MAX_TABLES:
                    self._deep += 1
                else:
                    self._open.append(_Table(_HIDDEN_TABLE.search(mark[:2000]) is not None))
            elif self._open and mark.startswith("|}"):
                self._close(mark[2:])
            elif self._deep:
                continue
            elif self._open and mark[:1] in ("|", "!"):
                self._cells(mark)
            else:
                self._add([line])
        while self._open:
            self._deep = 0
            self._close("")
        return [part for line in self._lines for part in line.split(EDGE)]

    def _add(self, lines: Sequence[str]) -> None:
        if self._open:
            self._open[-1].add(lines)
        else:
            self._lines.extend(lines)

    def _cells(self, mark: str) -> None:
        table = self._open[-1]
        if mark.startswith("|-"):
            table.add_row()
        elif mark.startswith("|+"):
            table.caption = [mark[2:].rpartition("|")[2]]
        else:
            table.add_cells(mark)

    def _close(self, rest: str) -> None:
        if self._deep:
            self._deep -= 1
            return
        table = self._open.pop()
        if self._form.tables and not table.is_hidden:
            self._add(self._table_lines(table))
        self._add([rest] if rest.strip() else [])

    def _table_lines(self, table: _Table) -> list[str]:
        rows = [row for row in table.rows if row]
        texts = [[_cell_text(cell) for cell in row] for row in rows]
        texts = [row for row in texts if any(row)]
        is_data = (
            len(texts) >= 2
            and 2 * sum(len(row) >= 2 for row in texts) >= len(texts)
            and all(len(text) <= MAX_CELL_CHARS for row in texts for text in row)
            and not any(self._has_block(line) for row in rows for cell in row for line in cell)
        )
        if not is_data:
            return ["", *table.caption, "", *(line for row in rows for cell in row for line in (*cell, ""))]
        content = "\n".join(_rows(table))
        content = _HELD.sub(lambda match: _restored(self._held[int(match[1])]), unescape(content))
        self._held.append(Held("block", content))
        return ["", *table.caption, mark_of(len(self._held) - 1, self._held[-1]), ""]

    def _has_block(self, line: str) -> bool:
        return any(self._held[int(number)].kind in ("block", "display") for number in _HELD.findall(line))


def _rows(table: _Table) -> Iterator[str]:
    """Yield the lines of a table with data; each cell is in its column, also after empty ones."""
    below: Counter[int] = Counter()
    placed: list[list[str]] = []
    for row, spans in zip(table.rows, table.spans, strict=True):
        cells: list[str] = []
        for cell, (columns, rows) in zip(row, spans, strict=True):
            _skip(cells, below)
            columns = max(1, min(columns, MAX_COLUMNS - len(cells)))
            if rows > 1 and len(cells) < MAX_COLUMNS:
                below.update(dict.fromkeys(range(len(cells), len(cells) + columns), rows - 1))
            cells += [_cell_text(cell), *[""] * (columns - 1)]
        if row:
            _skip(cells, below)
            placed.append(cells)
    shown = {column for cells in placed for column, text in enumerate(cells) if text}
    for cells in placed:
        text = " | ".join(text for column, text in enumerate(cells) if column in shown)
        if text.strip(" |"):
            yield text.rstrip(" |").strip()


def _skip(cells: list[str], below: Counter[int]) -> None:
    """Leave the next columns empty that cells of rows above extend into."""
    while below[len(cells)] > 0:
        below[len(cells)] -= 1
        cells.append("")


def _cell_text(lines: Sequence[str]) -> str:
    """Return the content of a cell in one line."""
    parts = (_ITEM.sub("", line.strip(), count=1) for line in lines)
    return _clean(" ".join(part.strip() for part in parts).translate(_TO_SPACES))


def _blocks(lines: Sequence[str], form: WikiForm, held: Sequence[Held]) -> Iterator[_Block]:
    paragraph: list[str] = []
    counters: dict[int, int] = {}
    for line in lines:
        blocks = _special_line(line, form, held, counters)
        if blocks is None and line.strip(f" \t{BREAK}"):
            paragraph.append(line)
            counters.clear()
            continue
        if blocks is None and GONE in line:
            continue  # Nothing is left of this line, so it separates nothing.
        if paragraph and (text := _joined(paragraph)):
            yield _Block("text", text)
        paragraph = []
        yield from blocks or ()
    if paragraph and (text := _joined(paragraph)):
        yield _Block("text", text)


def _special_line(line: str, form: WikiForm, held: Sequence[Held], counters: dict[int, int]) -> Sequence[_Block] | None:
    """Return the blocks of a line that is no part of a paragraph; None if it is one, or has no text."""
    plain = line.strip(f" \t{BREAK}{GONE}")
    if not plain:
        return None
    if (match := _HELD.fullmatch(plain.lstrip(": "))) is not None:
        content = held[int(match[1])]
        if content.kind == "formula":
            return [_Block("text", f"$${content.text}$$".replace(HOLD, ""))]
        return [_Block("text", match[0])] if content.kind != "inline" else None
    if plain[0] == "=" and plain[-1] == "=" and len(plain) > 2:
        return [_heading(plain)] if form.headings else [_Block("heading", "", 6)]
    if plain[0] in "*#:;":
        return _item(plain, form, counters)
    if CELL in plain:
        cells = filter(None, (_clean(cell) for cell in plain.split(CELL)))
        return [_Block("line", text)] if form.tables and (text := " | ".join(cells)) else []
    if plain.startswith("----"):
        rest = _clean(plain.lstrip("-"))
        return [_Block("text", rest)] if rest else []
    if line[0] == " ":
        text = _clean(line)
        return [_Block("line", text)] if text else []
    return None


def _heading(plain: str) -> _Block:
    opening = len(plain) - len(plain.lstrip("="))
    closing = len(plain) - len(plain.rstrip("="))
    level = max(1, min(opening, closing, 6))
    return _Block("heading", _clean(plain[level : len(plain) - level]), level)


def _item(plain: str, form: WikiForm, counters: dict[int, int]) -> Sequence[_Block]:
    match = _ITEM.match(plain)
    marks = match[0] if match is not None else ""
    content = plain[len(marks) :]
    text = _clean(content.translate(_TO_SPACES))
    depth = len(marks)
    for deeper in [number for number in counters if number > depth]:
        del counters[deeper]
    if not text or (GONE in content and not _WORD.search(text)):
        return []
    if marks[-1] in ":;" and not set(marks) & {"*", "#"}:
        term, colon, definition = text.partition(" : ") if marks[-1] == ";" else (text, "", "")
        return (
            [_Block("item", line) for line in (term.strip(), definition.strip()) if line]
            if colon
            else [_Block("item", text)]
        )
    if not form.lists:
        return []
    indent = "  " * min(sum(mark in "*#" for mark in marks[:-1]), MAX_INDENT)
    if marks[-1] == "#":
        counters[depth] = counters.get(depth, 0) + 1
        return [_Block("item", f"{indent}{counters[depth]}. {text}")]
    return [_Block("item", f"{indent}- {text}" if marks[-1] == "*" else f"{indent}  {text}")]


def _joined(lines: Sequence[str]) -> str:
    """Return a paragraph in one line, but for its line breaks."""
    parts: list[str] = []
    for line in lines:
        text = line.strip()
        if parts and not parts[-1].endswith("\n") and text:
            wide = _WIDE.match(text) and _WIDE.match(parts[-1][-1])
            parts.append("" if wide else " ")
        parts.append(text.replace(BREAK, "\n"))
    had_gone = any(GONE in line for line in lines)
    cleaned = "\n".join(filter(None, map(_clean, "".join(parts).split("\n"))))
    return cleaned if _WORD.search(cleaned) or HOLD in cleaned or not had_gone else ""


def _clean(line: str) -> str:
    """Return a line without marks of what was left out, and without brackets and spaces that are empty for it."""
    line = _SPACES.sub(" ", line).strip()
    if GONE in line:
        line = _GONE_RUN.sub(GONE, _GONE_ALONE.sub(GONE, line))
        line = _CLOSED.sub("", _OPENED.sub(r"\1", line))
        line = _AROUND.sub("", _BEFORE_SIGN.sub("", line)).replace(GONE, "")
        line = _SPACES.sub(" ", _EMPTY_BRACKETS.sub("", line)).strip()
    return line


def _with_text(blocks: Iterator[_Block]) -> Iterator[_Block]:
    """Yield the blocks without the headings below which there is no text."""
    waiting: list[_Block] = []
    for block in blocks:
        if block.kind != "heading":
            yield from (heading for heading in waiting if heading.text)
            waiting = []
            yield block
            continue
        while waiting and waiting[-1].level >= block.level:
            waiting.pop()
        waiting.append(block)
