"""Reader of books of Project Gutenberg, in plain text or zip archives of it: one document for each book.

The header and the licence around a book are cut off by the marks that they have had since 1991, and the note on who
produced the file. Notes of the transcriber are kept, as they are about the text. Title, author, language, date of
release and number are read from the header. An archive has a record for each member; other files are one record each.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow.fs as pafs

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.archives.zip import DAMAGE, TextArchive, is_unsafe_name, is_zip, single_member
from pipeline.sources.blocks import ByteStream
from pipeline.sources.books.plain_text import decoded_text, joined_lines, kept_lines, read_decoded, read_whole
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import SourceRows
from pipeline.sources.provenance import SourceItem, account_bytes, encodable, new_row, set_text
from pipeline.sources.rows import meta_of
from schemas.storage import resolve_uri

MAX_HEADER_CHARS = 60_000
"""Length of the beginning of a file that is searched for the end of its header [code points]; the longest headers,
with the licence before the book, have about 20,000."""
MAX_OTHERS = 30
"""Number of paragraphs after which an old header has ended."""
MAX_MEMBER_BYTES = 1 << 30
TEXT_NAMES = (".txt", ".text")

_START = re.compile(
    r"^[ \t*]*\*{2,3} ?START OF (?:THE |THIS )?PROJECT GUTENBERG'?S? E-?(?:BOOK|TEXT)", re.IGNORECASE | re.MULTILINE
)
_SMALL_PRINT = re.compile(r"^[^\n]{0,20}\*END[ *]*(?:OF )?THE SMALL PRINT![^\n]*", re.IGNORECASE | re.MULTILINE)
_END = re.compile(
    r"^[ \t*]*\*{2,3} ?END OF (?:THE |THIS )?PROJECT GUTENBERG'?S? E-?(?:BOOK|TEXT)", re.IGNORECASE | re.MULTILINE
)
_LAST_LINE = (
    r"^[ \t*_<]*(?:(?:The )?End|Ende|Fin|Fine|Einde|Slut|Loppu)\b[^\n]{0,25}?\bPro[jy]e[ck]to?s?[ -]Gutenberg|"
    r"^[ \t*]*This file should be named \S+ or \S+"
)
_OVER = re.compile(_LAST_LINE, re.IGNORECASE | re.MULTILINE)
_FINISH = re.compile(
    rf"{_LAST_LINE}|^[ \t]*\*{{3}} ?START: FULL LICENSE|^[ \t]*\*{{3}} ?START ?\*{{2}} ?(?:THE )?SMALL PRINT",
    re.IGNORECASE | re.MULTILINE,
)
_CREDIT = re.compile(
    r"\[?(?:This |The )?(?:Project Gutenberg )?(?:Produced|Prepared|Transcribed|Scanned|Typed|Digiti[sz]ed|Created|"
    r"HTML version|Proofread|E-?text|e-?book|text|file|book)\b[^\n]{0,60}?\b(?:by|from|was|prepared|produced)\b|"
    r"\[?(?:Online )?Distributed Proofread|"
    r"\[?(?:Note: )?(?:Project Gutenberg|Images of the original)\b[^\n]{0,40}(?:also|available)",
    re.IGNORECASE,
)
_IS_CREDIT = re.compile(
    r"produced|prepared|transcribed|scanned|typed|digiti|proofread|gutenberg|pgdp|e-?text", re.IGNORECASE
)
_PARAGRAPH = re.compile(r"\S[^\n]*(?:\n(?!\s*\n)[^\n]*)*")
_LEGAL = re.compile(r"Project Gutenberg|\bE-?texts?\b|small print", re.IGNORECASE)
_NUMBER = re.compile(r"\[\s*E-?(?:Book|Text)\s*#\s*(\d{1,7})\s*\]", re.IGNORECASE)
_NUMBER_IN_NAME = re.compile(r"(?:^|/)(?:pg)?(\d{1,7})(?:-(?:0|8|tei|utf8))?\.(?:txt|zip)", re.IGNORECASE)
_FIELD = re.compile(r"^([A-Z][A-Za-z ]{2,24}):[ \t]*(\S[^\n]*(?:\n[ \t]{2,}[^\s:][^\n]*)*)", re.MULTILINE)
_FIRST_LINE = re.compile(
    r"Project\s+Gutenberg(?:'s)?\s+(?:E-?(?:text|book)s?)?(?:\s+of|,)?\s+(.{2,200}?)(?:,\s+by\s+([^\n*]{2,100}?))?\s*\**\s*$",
    re.IGNORECASE | re.MULTILINE,
)
_LONG_SPACE = re.compile(r"\s{9,}")
_CHARSET = re.compile(rb"^Character set encoding:[ \t]*([\w. ()-]{2,40})", re.IGNORECASE | re.MULTILINE)
_MONTH_NAMES = "January February March April May June July August September October November December"
_MONTHS = _MONTH_NAMES.split()
_DATE = re.compile(rf"\b({'|'.join(_MONTHS)})\b,?\s+(?:(\d{{1,2}}),\s+)?(\d{{4}})|\b(\d{{4}})-(\d\d)-(\d\d)\b")
_PEOPLE = ("Author", "Translator", "Editor", "Illustrator", "Contributor", "Compiler")


class Book(NamedTuple):
    """A book without what is around it."""

    header: str
    body: str


def open_gutenberg(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of the books in a file."""
    if is_zip(stream):
        return account_bytes(_archive_items(stream, split.name, config), split, lambda: stream.seek(0, 2))
    whole = read_whole(stream, config.max_record_bytes)

    def items() -> Iterator[SourceItem]:
        if whole.size or whole.drop is not None:
            yield SourceItem(0, *(_row(whole.data, split.name, config) if whole.drop is None else _dropped(whole.drop)))

    return account_bytes(items(), split, lambda: whole.size)


def open_gutenberg_record(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the row of the file of a book, or of an archive of the one member that was read again.

    The name of the split's file is that of the book only if this is an archive of one member too.
    """
    fs, path = resolve_uri(split.uri)
    with fs.open_input_file(path) as file:
        is_one = not is_zip(file) or len(TextArchive(file).members) == 1
    return open_gutenberg(split if is_one else replace(split, name=""), stream, config)


def _dropped(drop: Drop) -> tuple[Row, Drop]:
    return new_row("book"), drop


def _archive_items(stream: ByteStream, name: str, config: SourceConfig) -> Iterator[SourceItem]:
    try:
        archive = TextArchive(stream)
    except DAMAGE:
        yield SourceItem(0, *_dropped(Drop("bad_archive")))
        return
    for info in archive.members:
        if is_unsafe_name(info.orig_filename):
            found: tuple[Row, Drop | None] = _dropped(Drop("unsafe_name"))
        elif not info.filename.lower().endswith(TEXT_NAMES):
            found = _dropped(Drop("not_a_book"))
        else:
            data = archive.read(info, config.max_record_bytes)
            number = name if name and len(archive.members) == 1 else info.filename
            found = _dropped(data) if isinstance(data, Drop) else _row(data, number, config)
        yield SourceItem(info.header_offset, *found)


def _row(data: bytes, name: str, config: SourceConfig) -> tuple[Row, Drop | None]:
    declared = _CHARSET.search(data[:MAX_HEADER_CHARS])
    text = decoded_text(data, _charset(declared[1].decode("ascii")) if declared else None)
    if text is None:
        return _dropped(Drop("not_a_book"))
    book = cut_book(text)
    fields = header_fields(book.header)
    number = _NUMBER.search(book.header) or _NUMBER_IN_NAME.search(name)
    url = f"https://www.gutenberg.org/ebooks/{number[1].lstrip('0')}" if number else None
    row = new_row("book", url, _date(fields.get("Release Date") or fields.get("Posting Date") or _dated_line(book)))
    title = encodable(fields.get("Title", ""))
    row["title"] = title or None
    facts: dict[str, Any] = {key.lower(): fields[key] for key in (*_PEOPLE, "Language") if key in fields}
    facts |= {"ebook": int(number[1])} if number else {}
    facts |= {"copyrighted": True} if "COPYRIGHTED Project Gutenberg" in book.header else {}
    row["meta"], row["_meta"] = meta_of(facts, set(), config)
    body = joined_lines(book.body) if config.gutenberg.join_lines else kept_lines(book.body)
    return row, set_text(row, body.strip("\n"), config)


def _charset(label: str) -> str | None:
    """Return the charset that a header names; several spellings are of no standard."""
    label = label.strip().lower()
    if "ascii" in label or "646" in label:
        return None
    match = re.search(r"utf-?8|utf-?16|(?:iso[ -]?)?8859[ -]\d{1,2}|(?:windows|cp)[ -]?\d{3,4}|[\w-]+", label)
    name = match[0].replace(" ", "-") if match else label
    return f"iso-{name}" if name.startswith("8859") else name.replace("iso8859", "iso-8859")


def cut_book(text: str) -> Book:
    """Return the header and the body of a book; the header is empty if the text has no mark of one."""
    start, header_end = _begin(text)
    end = _finish(text, start)
    return Book(text[:header_end], _without_credits(text[start:end]))


def _begin(text: str) -> tuple[int, int]:
    """Return where the body begins, and where the header ends."""
    head = text[:MAX_HEADER_CHARS]
    if (match := _START.search(head)) is not None:
        line_end = _line_end(text, match.end())
        closing = text.find("***", match.end(), match.end() + 400)
        return (_line_end(text, closing) if closing >= 0 else line_end), match.start()
    over = _OVER.search(text)
    ends = [small.end() for small in _SMALL_PRINT.finditer(head, 0, over.start() if over else len(head))]
    if ends:
        end = _line_end(text, ends[-1])
        return end, end
    if "gutenberg" not in head[:3_000].lower():
        return 0, 0
    # Headers before 1992 have no mark of their end: it is the last paragraph about the project that is near another.
    end = others = 0
    finish = _FINISH.search(text)
    for paragraph in _PARAGRAPH.finditer(text, 0, min(20_000, finish.start() if finish else len(text))):
        others = 0 if _LEGAL.search(paragraph[0]) else others + 1
        end = paragraph.end() if not others else end
        if others > MAX_OTHERS:
            break
    return end, end


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _finish(text: str, start: int) -> int:
    """Return where the body ends."""
    marked = _end_mark(text, start)
    end = marked.start() if marked is not None else len(text)
    # The line before the mark, such as "End of Project Gutenberg's Emma"; or without the mark, in the last part.
    least = max(start, end - 1_500 if marked is not None else end - max(40_000, (len(text) - start) // 4))
    line = _FINISH.search(text, least, end)
    return line.start() if line is not None else end


def _end_mark(text: str, start: int) -> re.Match[str] | None:
    """Return the first match of _END after `start`, by its asterisks: the pattern itself tries every line."""
    at = text.find("**", start)
    while at >= 0:
        line = text.rfind("\n", 0, at) + 1
        if line >= start and (match := _END.match(text, line)) is not None:
            return match
        at = text.find("**", _line_end(text, at))
    return None


def _without_credits(body: str) -> str:
    """Return the body without the paragraphs at its beginning on who produced the file."""
    position = 0
    for match in _PARAGRAPH.finditer(body[:6_000]):
        if not (_CREDIT.match(match[0]) and _IS_CREDIT.search(match[0])) or len(match[0]) > 1_000:
            break
        position = match.end()
    return body[position:]


def header_fields(header: str) -> dict[str, str]:
    """Return the fields of a header by name, such as Title; those of older headers are read from their first line."""
    fields: dict[str, str] = {}
    for match in _FIELD.finditer(header):
        fields.setdefault(match[1].strip(), " ".join(_NUMBER.sub("", match[2]).split()))
    # _FIRST_LINE takes the fourth power of the length of a run of white space. A line end in it is kept.
    top = _LONG_SPACE.sub(lambda run: "  \n  " if "\n" in run[0] else "  ", header[:3_000])
    if "Title" not in fields and (first := _FIRST_LINE.search(top)) is not None:
        fields["Title"] = " ".join(first[1].split()).strip(" *,")
        if first[2] is not None:
            fields.setdefault("Author", " ".join(first[2].split()).strip(" *.,"))
    return fields


def _dated_line(book: Book) -> str | None:
    match = _NUMBER.search(book.header)
    return book.header[: match.start()].rpartition("\n")[2] if match is not None else None


def _date(text: str | None) -> datetime | None:
    match = _DATE.search(text or "")
    if match is None:
        return None
    year, month, day = (
        (int(match[4]), int(match[5]), int(match[6]))
        if match[4]
        else (int(match[3]), _MONTHS.index(match[1]) + 1, int(match[2] or 1))
    )
    try:
        return datetime(year, month, day, tzinfo=UTC)
    except ValueError:
        return None


def read_book(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Return the file of a book, or an archive of the one member that begins at `offset`."""
    with fs.open_input_file(path) as file:
        if is_zip(file):
            return single_member(file, offset, MAX_MEMBER_BYTES)
    return read_decoded(fs, path, offset, length)
