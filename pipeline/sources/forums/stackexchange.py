"""Reader of Stack Exchange dumps: the file Posts.xml, compressed, in a 7z archive or plain; a document per question.

A document is the title and body of a question, then its answers: the accepted one, then those with the highest scores.
Answers can be far from their question, so they are grouped on disk before the file is read a second time. Every row of
the file is a row of `documents`, answers as drops, with its offset in the decompressed file.
"""

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import lru_cache
from html import unescape as unescape_html
from importlib.util import find_spec
from typing import Any, NamedTuple

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from pipeline.engine.stage import Drop, Row, Split
from pipeline.extract.assemble import EMPTY_LINE, MARKED_LINES, assemble
from pipeline.extract.blocks import cut_blocks
from pipeline.extract.exponents import mark_exponents, may_have_exponents
from pipeline.extract.formulas import may_have_formulas, write_formulas
from pipeline.extract.inline import TextForm
from pipeline.extract.page_limits import bearable
from pipeline.sources.archives.seven_zip import MAGIC, MemberFrames
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import FrameReader, Frames
from pipeline.sources.config import SourceConfig
from pipeline.sources.forums.temporary_rows import RowBatch, temporary_database
from pipeline.sources.lines import LineReader, SourceRows
from pipeline.sources.provenance import (
    SourceItem,
    account_bytes,
    domain_of,
    encodable,
    new_row,
    set_text,
    set_title,
    too_many_rows,
)
from pipeline.sources.rows import date_of, meta_of

QUESTION, ANSWER = b"1", b"2"
"""Values of PostTypeId."""
LICENCES = (("2011-04-08", "CC-BY-SA-2.5"), ("2018-05-02", "CC-BY-SA-3.0"), ("9999", "CC-BY-SA-4.0"))
"""Licence of what was posted before a day. Source: stackoverflow.com/help/licensing."""
SITES = re.compile(
    r"(?<![a-z0-9-])((?:[a-z0-9-]+\.)*(?:stackexchange\.com|stackoverflow\.com|serverfault\.com|superuser\.com|"
    r"askubuntu\.com|mathoverflow\.net|stackapps\.com))(?![a-z0-9])",
    re.IGNORECASE,
)
MAX_UNCLOSED = 700
"""Maximum number of start tags without an end tag of a body that is parsed: parsers are quadratic in nested elements.
The tags of other bodies are left out, and their text is kept."""
ROW_START = re.compile(rb"<row(?=[\s/])")
ROW = re.compile(rb'<row(?:\s+[\w:.-]+\s*=\s*"[^"<]*")*+\s*/?>')
ATTRIBUTE = re.compile(rb'(?<![\w:.-])([\w:.-]++)\s*+=\s*+"([^"]*)"')
DOCTYPE = re.compile(rb"<!(?:DOCTYPE|ENTITY)")
FOREIGN = re.compile(rb"&(?!(?:lt|gt|amp|quot|apos|#\d{1,7}|#x[0-9A-Fa-f]{1,6});)")
"""An ampersand that begins no reference of XML."""
QUESTION_TEXTS = (b"Body", b"Title", b"Tags")
ADD_ANSWER = "INSERT OR IGNORE INTO answer VALUES (?, ?, ?, ?, ?, ?, ?)"
REFERENCE = re.compile(r"&(?:#(\d{1,7}|x[0-9A-Fa-f]{1,6})|(\w+));|&")
ENTITIES = (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#xA;", "\n"), ("&#xD;", "\r"), ("&apos;", "'"))
TAG = re.compile(r"<[^<>]*>")
_NUMBERED = re.compile(r"<(?:ol|li)\s[^<>]*?\b(?:start|value|reversed)\b", re.IGNORECASE)
"""Lists whose first number is not 1, as after code between two items."""
NEXT_EMPTY_LINE = re.compile(r"(?<=\n\n)(?=\n)")
TAGS = re.compile(r"[^<>|]+")

Attributes = Mapping[bytes, bytes]


class PostRow(NamedTuple):
    """A row of the file at an offset, or what is in its place."""

    start: int
    length: int
    attributes: Attributes | Drop


class _Answer(NamedTuple):
    id: int
    score: int
    start: int
    length: int
    licence: str
    body_bytes: int


def frames_of(stream: ByteStream) -> Frames:
    """Return the decoded blocks of Posts.xml, in whatever form the file has it."""
    stream.seek(0)
    is_archive = stream.read(len(MAGIC)) == MAGIC
    stream.seek(0)
    return MemberFrames(stream, is_posts) if is_archive else FrameReader(stream, None)


def is_posts(name: str) -> bool:
    """Return True if a member of an archive is Posts.xml."""
    return name.replace("\\", "/").rpartition("/")[2].lower() == "posts.xml"


def problem_of(uri: str, config: SourceConfig) -> str | None:
    """Return why a dump cannot be read, and what to do about it; None if it can."""
    if uri.lower().endswith(".7z") and find_spec("py7zr") is None:
        return "a 7z archive without the package py7zr to read it. Run `pip install penstock[formats]`."
    if site_of(uri, config) is None:
        return "a path without the name of a site. Set source.stackexchange.site."
    return None


def site_of(uri: str, config: SourceConfig) -> str | None:
    """Return the host of the site that a dump is of; None if neither the settings nor the path have it."""
    named = SITES.findall(uri)
    return config.stackexchange.site or (named[-1].lower() if named else None)


def open_stackexchange(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of Posts.xml in their order: questions with their answers, and answers as drops."""
    size = 0

    def items() -> Iterator[SourceItem]:
        nonlocal size
        with temporary_database() as database, closing(_Posts(stream, config)) as posts:
            _collect(database, posts, config)
            reader = _Questions(database, config, site_of(split.uri, config) or "")
            for post in posts.read():
                yield SourceItem(post.start, *reader.row(post))
            size = posts.size

    return account_bytes(items(), split, lambda: size)


class _Posts:
    """Reads the rows of a dump, several times if needed."""

    def __init__(self, stream: ByteStream, config: SourceConfig):
        self._stream, self._max_bytes = stream, config.max_record_bytes
        self._frames: Frames | None = None
        self.size = 0
        """Size of the decompressed file, once it is read [bytes]."""

    def read(self) -> Iterator[PostRow]:
        """Yield all rows and gaps, from the start of the file on."""
        self.close()
        self._frames = frames_of(self._stream)
        lines = LineReader(self._frames, self._max_bytes)
        for number, row in enumerate(_rows_on(lines)):
            if (surplus := too_many_rows(number, self._frames.size)) is not None:
                yield PostRow(row.start, 0, surplus)
                break
            yield row
        self.size = lines.position

    def close(self) -> None:
        """End the thread that decompresses an archive."""
        if isinstance(self._frames, MemberFrames):
            self._frames.close()


def _rows_on(lines: LineReader) -> Iterator[PostRow]:
    """Yield all rows and gaps of the lines of a file."""
    has_doctype = False
    for start, line in lines:
        if isinstance(line, Drop):
            yield PostRow(start, 0, line)
            continue
        match = ROW_START.search(line)
        if match is None and not has_doctype and DOCTYPE.search(line):
            has_doctype = True
            yield PostRow(start, 0, Drop("xml_doctype"))
        is_alone = line.count(b"<") == 1 and line.count(b'"') % 2 == 0
        while match is not None:
            begin = match.start()
            end = _row_end(line, begin, is_alone)
            found = dict(ATTRIBUTE.findall(line, begin, end)) if end else Drop("bad_row")
            yield PostRow(start + begin, max(0, end - begin), found)
            match = ROW_START.search(line, end or match.end())


def _row_end(line: bytes, begin: int, is_alone: bool) -> int:
    """Return the end of the element that begins here; 0 if it is cut or no well-formed row.

    `is_alone`: the line has no other tag and an even number of quotation marks.
    """
    if is_alone and (text := line.rstrip()).endswith(b"/>"):
        return len(text)  # A row alone on its line, as in all dumps: the expression takes 10 times as long.
    row = ROW.match(line, begin)
    return row.end() if row is not None else 0


def _collect(database: sqlite3.Connection, posts: _Posts, config: SourceConfig) -> None:
    """Store the questions of a dump with whether they are kept, and all answers."""
    settings = config.stackexchange
    database.execute("CREATE TABLE question (id INTEGER PRIMARY KEY, accepted INTEGER, is_kept INTEGER, start INTEGER)")
    database.execute(
        "CREATE TABLE answer (question INTEGER, id INTEGER PRIMARY KEY, score INTEGER, start INTEGER, length INTEGER, "
        "licence TEXT, body BLOB)"
    )
    answers = RowBatch(database, ADD_ANSWER)
    for start, length, found in posts.read():
        if isinstance(found, Drop):
            continue
        number, kind, score = _number(found, b"Id"), found.get(b"PostTypeId"), _number(found, b"Score") or 0
        if kind == QUESTION and number is not None:
            is_kept = settings.min_score is None or score >= settings.min_score
            is_kept = is_kept and all(map(_is_readable, (found.get(name, b"") for name in QUESTION_TEXTS)))
            accepted = _number(found, b"AcceptedAnswerId")
            database.execute("INSERT OR IGNORE INTO question VALUES (?, ?, ?, ?)", (number, accepted, is_kept, start))
        elif kind == ANSWER and number is not None and _is_readable(found.get(b"Body", b"")):
            parent, body = _number(found, b"ParentId"), found.get(b"Body", b"")
            answers.add((parent, number, score, start, length, licence_of(found), body), len(body))
    answers.flush()
    database.execute("CREATE INDEX by_question ON answer (question, score DESC, id)")


class _Questions:
    """Turns the rows of a dump into rows of `documents`, with the answers that are stored."""

    def __init__(self, database: sqlite3.Connection, config: SourceConfig, site: str):
        self._database, self._config, self._settings = database, config, config.stackexchange
        self._site, self._domain = f"https://{site}", domain_of(f"https://{site}/")
        self._form = TextForm(markdown=self._settings.markdown)
        self._joined = lru_cache(maxsize=1024)(self._joined_ids)

    def row(self, post: PostRow) -> tuple[Row, Drop | None]:
        """Return the row of a post or gap, with a Drop unless it is the question of a document."""
        found = post.attributes
        if isinstance(found, Drop):
            is_row = found.rule in ("bad_row", "record_too_large")
            return new_row("row" if is_row else "gap"), found
        number, kind = _number(found, b"Id"), found.get(b"PostTypeId")
        if number is None or kind is None:
            return new_row("row"), Drop("bad_row")
        if kind == ANSWER:
            return self._answer_row(found, post.start)
        if kind != QUESTION:
            return new_row("row"), Drop("not_a_question")
        if self._is_repeated(number, post.start):
            return new_row("row"), Drop("bad_row")
        try:
            return self._question_row(found)
        except ValueError:  # an entity that XML does not have
            return new_row("row"), Drop("bad_row")

    def _answer_row(self, found: Attributes, start: int) -> tuple[Row, Drop]:
        row, settings, score = new_row("row", date=_date(found)), self._settings, _number(found, b"Score") or 0
        number, parent = _number(found, b"Id"), _number(found, b"ParentId")
        row["url"], row["domain"] = f"{self._site}/a/{number}", self._domain
        if self._database.execute("SELECT start FROM answer WHERE id = ?", (number,)).fetchone() != (start,):
            return row, Drop("bad_row")  # It cannot be read, or an earlier answer has the same id.
        question = self._database.execute("SELECT accepted, is_kept FROM question WHERE id = ?", (parent,)).fetchone()
        if question is None:
            return row, Drop("answer_without_question")
        accepted, is_kept = question
        if accepted != number and settings.min_answer_score is not None and score < settings.min_answer_score:
            return row, Drop("low_answer_score", float(score), float(settings.min_answer_score))
        if not is_kept:
            return row, Drop("question_dropped")
        if settings.max_answers is not None and number not in self._joined(parent, accepted):
            return row, Drop("surplus_answer", None, float(settings.max_answers))
        return row, Drop("joined_to_question")

    def _joined_ids(self, question: int | None, accepted: int | None) -> frozenset[int]:
        """Return the ids of the answers that are joined to a question."""
        return frozenset(answer.id for answer in self._answers(question, accepted))

    def _is_repeated(self, question: int, start: int) -> bool:
        """Return True if an earlier question has the same id: the answers are joined once, to the first."""
        first = self._database.execute("SELECT start FROM question WHERE id = ?", (question,)).fetchone()
        return first is not None and first[0] != start

    def _question_row(self, found: Attributes) -> tuple[Row, Drop | None]:
        config, settings, score = self._config, self._settings, _number(found, b"Score") or 0
        number, accepted = _number(found, b"Id"), _number(found, b"AcceptedAnswerId")
        row = new_row("row", date=_date(found))
        row["url"], row["domain"] = f"{self._site}/questions/{number}", self._domain
        body, title = unescape(found.get(b"Body", b"")), " ".join(unescape(found.get(b"Title", b"")).split())
        set_title(row, title)
        own_size = row["page_bytes"] = len(encodable(body).encode())
        is_low = settings.min_score is not None and score < settings.min_score
        answers = [] if is_low else list(self._answers(number, accepted))
        row["licence"] = " AND ".join(sorted({licence_of(found), *(answer.licence for answer in answers)}))
        meta = {
            "id": number,
            "score": score,
            "tags": TAGS.findall(unescape(found.get(b"Tags", b""))),
            "views": _number(found, b"ViewCount"),
            "accepted_answer": accepted,
            "answer_ids": [answer.id for answer in answers] or None,
            "answer_scores": [answer.score for answer in answers] or None,
            "answer_offsets": [[answer.start, answer.length] for answer in answers] or None,
        }
        row["meta"], row["_meta"] = meta_of(meta, set(), config)
        if answers:  # A takedown of an answer by its URL finds the document that holds its text.
            row["parents"] = [f"{self._site}/a/{answer.id}" for answer in answers]
        if is_low:
            return row, Drop("low_score", float(score), float(settings.min_score or 0))
        if not answers and not settings.keep_unanswered:
            return row, Drop("unanswered")
        size = own_size + sum(answer.body_bytes for answer in answers)
        if size > 4 * config.max_page_bytes:  # Markup and escapes included; the text is compared below.
            return row, Drop("page_too_large", float(size), float(config.max_page_bytes))
        bodies = (body, *map(unescape, self._bodies(number, accepted)))
        texts = [title, *(text_of_html(html, self._form) for html in bodies)]
        drop = set_text(row, "\n\n".join(text for text in texts if text), config)
        row[MARKED_LINES] = EMPTY_LINE in (row["text"] or "")
        row["page_bytes"] = own_size  # Of the question alone, so that it can be compared when it is read again.
        return row, drop

    def _answers(self, question: int | None, accepted: int | None) -> Iterator[_Answer]:
        """Yield the answers to join to a question, the best first, without their bodies."""
        for values in self._selected("id, score, start, length, licence, length(body)", question, accepted):
            yield _Answer(*values)

    def _bodies(self, question: int | None, accepted: int | None) -> Iterator[bytes]:
        """Yield the bodies of these answers. They may not fit into memory unless their sizes were compared before."""
        for (body,) in self._selected("body", question, accepted):
            yield body

    def _selected(self, columns: str, question: int | None, accepted: int | None) -> Iterator[tuple[Any, ...]]:
        settings = self._settings
        query = (
            f"SELECT {columns} FROM answer WHERE question = ? AND (score >= ? OR id = ?) "
            "ORDER BY id = ? DESC, score DESC, id, start LIMIT ?"
        )
        least = settings.min_answer_score if settings.min_answer_score is not None else -(1 << 62)
        most = settings.max_answers if settings.max_answers is not None else -1
        known = accepted if accepted is not None else -1
        yield from self._database.execute(query, (question, least, known, known, most))


def _is_readable(value: bytes) -> bool:
    """Return True if the text of an attribute refers to no entity but those of XML."""
    if FOREIGN.search(value) is None:
        return True
    try:
        unescape(value)
    except ValueError:
        return False
    return True


def _number(found: Attributes, name: bytes) -> int | None:
    value = found.get(name, b"")
    return int(value) if value.removeprefix(b"-").isdigit() and len(value) <= 18 else None


def _date(found: Attributes) -> Any:
    return date_of(found.get(b"CreationDate", b"").decode("ascii", "replace"))


def licence_of(found: Attributes) -> str:
    """Return the licence of a post: as the dump declares it, else by the day on which it was created."""
    declared = found.get(b"ContentLicense", b"").decode("ascii", "replace").strip()
    if declared:
        return declared.replace("CC BY-SA ", "CC-BY-SA-")
    day = found.get(b"CreationDate", b"").decode("ascii", "replace")
    return next((licence for before, licence in LICENCES if day < before), LICENCES[-1][1])


def unescape(value: bytes) -> str:
    """Return the text of an attribute. Raises ValueError if it refers to an entity that is not one of XML."""
    text = value.decode("utf-8", "replace")
    if "&" in text:
        for entity, character in ENTITIES:
            text = text.replace(entity, character)
        if text.count("&") > text.count("&amp;"):
            return REFERENCE.sub(_character, text)
        text = text.replace("&amp;", "&")
    return text


def _character(reference: re.Match[str]) -> str:
    if reference[1] is not None:
        number = int(reference[1][1:], 16) if reference[1][0] == "x" else int(reference[1])
        return chr(number) if number <= 0x10FFFF else "\ufffd"
    if reference[2] == "amp":
        return "&"
    raise ValueError(f"expected an entity of XML, got {reference[0][:20]}")


def text_of_html(html: str, form: TextForm) -> str:
    """Return the text of a post's HTML: paragraphs, lists, quotes, and code as it is.

    In code, EMPTY_LINE is in empty lines that follow another one.
    """
    if not html or html.isspace():
        return ""
    if html.count("<") - html.count("</") > MAX_UNCLOSED:
        return unescape_html(TAG.sub(" ", html)).strip()
    html = bearable(html).html
    tree = HTMLTree.parse(html)
    if may_have_formulas(html):
        write_formulas(tree)
    if may_have_exponents(html):
        mark_exponents(tree)
    if form.markdown or _NUMBERED.search(html):
        blocks = cut_blocks(tree.body.html if tree.body is not None else "")
        return assemble(blocks, range(len(blocks)), form)
    # 10 times as fast, for the many short texts of a dump, but it counts the items of every list from 1.
    text: str = extract_plain_text(tree, preserve_formatting=True, main_content=False, alt_texts=False, links=False)
    return text if "\n\n\n" not in text else NEXT_EMPTY_LINE.sub(EMPTY_LINE, text)
