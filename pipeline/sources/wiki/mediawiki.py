"""Reader of the XML dumps of Wikipedia and other wikis that run MediaWiki: one document for each page.

The file is searched for `<page>` elements, and each is parsed by itself: a dump that is cut or damaged loses only the
pages there, entities cannot be declared, and a page needs no root element around it. Only the latest revision in a page
is read. Text between pages, such as a page without its first tag, is a gap. Offsets and lengths count bytes of the
decompressed file, also in multistream dumps, whose streams hold 100 pages each. A record extends to the start of the
next page or gap; the first one begins with the head of the dump.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import NamedTuple
from urllib.parse import quote
from xml.parsers import expat

import pyarrow.fs as pafs

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import SourceRows
from pipeline.sources.provenance import SourceItem, account_bytes, encodable, new_row, set_text, too_many_rows
from pipeline.sources.rows import date_of, meta_of
from pipeline.sources.wiki.blocks import WikiForm
from pipeline.sources.wiki.names import DISAMBIGUATION_NAMES, REDIRECT
from pipeline.sources.wiki.wikitext import categories, plain_name, template_names, text_of_wikitext

HEAD_BYTES = 1 << 20
"""Maximum size of the head of a dump, before its first page. More bytes than this between pages are a gap."""
MAX_ELEMENTS = 64
"""Maximum nesting of elements in a page; real pages have 5 levels."""
FILE_KEYS = frozenset(("-2", "6", "14"))
"""Keys of the namespaces of media, files and categories."""
MAX_TITLE_CHARS = 1_000
WIKITEXT = ("wikitext", None)

_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be", b"<\0": "utf-16-le", b"\0<": "utf-16-be"}
_LINK = re.compile(r"\[\[\s*+:?([^\[\]|{}<>\n]{1,500})")
"""The title of a page to which a link leads."""
_TAG = re.compile(r"<[^<>]*>?")
_OTHER = re.compile(r"[^\s\ufeff\]>]")
"""What remains neither of white space nor, once the tags are removed, of a document type."""
_BRACKETS = re.compile(r"\(([^()]{1,80})\)\s*+\Z")


class _Piece(NamedTuple):
    """Bytes between pages, a page, or bytes that cannot be read."""

    start: int
    kind: str
    data: bytes = b""
    drop: Drop | None = None


class _PageScanner:
    """Cuts the decompressed file into pages and what is between them. It holds at most one page and one block."""

    def __init__(self, stream: ByteStream, max_bytes: int):
        self._frames = FrameReader(stream, None)
        self._max_bytes = max_bytes
        self.position = 0
        """Offset of the first byte that is not yet in a piece; after the last piece, the size of the file."""
        self._buffer = bytearray()
        self._searched = 0
        self._is_open = False
        self._skipped = 0
        """Size of the part of a page that is too large which was passed over."""
        self._set_encoding("utf-8")

    def size(self) -> int:
        """Return the size of the file as stored [bytes]."""
        return self._frames.size()

    def _set_encoding(self, encoding: str) -> None:
        self.encoding = encoding
        self._width = 1 if encoding == "utf-8" else 2
        opening = [re.escape(f"<page{end}".encode(encoding)) for end in "> \n\t"]
        self._opening = re.compile(b"|".join(opening))
        self._closing = re.compile(b"|".join([*opening, re.escape("</page>".encode(encoding))]))
        self._overlap = 8 * self._width

    def __iter__(self) -> Iterator[_Piece]:
        is_first = True
        while (block := self._frames.next()) is not None:
            if block.fault is not None:
                yield from self._end()
                yield _Piece(self.position, "gap", drop=Drop(block.fault, float(block.resumed - block.start)))
                continue
            self._buffer += block.data
            if is_first:
                self._set_encoding(_UTF16.get(bytes(self._buffer[:2]), "utf-8"))
                is_first = len(self._buffer) < 2
            yield from self._cut()
        yield from self._end()

    def _cut(self) -> Iterator[_Piece]:
        """Yield the pieces that are complete."""
        while (place := self._search(self._closing if self._is_open else self._opening)) is not None:
            start, end = place
            is_end = end - start == len("</page>") * self._width
            if not self._is_open:
                yield from self._take("between", start)
            elif is_end:
                yield from self._take("page", end)
            else:  # Another page begins: this one has no end.
                yield from self._take("cut", start)
            self._is_open = not is_end
            self._searched = 0 if is_end else end - start
        yield from self._keep_tail()

    def _search(self, pattern: re.Pattern[bytes]) -> tuple[int, int] | None:
        position = self._searched
        while (match := pattern.search(self._buffer, position)) is not None:
            if (self.position + self._skipped + match.start()) % self._width == 0:
                return match.span()
            position = match.start() + 1
        return None

    def _keep_tail(self) -> Iterator[_Piece]:
        """Remember how far the buffer was searched, and pass over what is too large to be held."""
        self._searched = max(0, len(self._buffer) - self._overlap)
        if len(self._buffer) <= self._overlap + (self._max_bytes if self._is_open else HEAD_BYTES):
            return
        if self._is_open:
            self._skipped += self._searched
            del self._buffer[: self._searched]
        else:
            yield from self._take("between", self._searched)
        self._searched = 0

    def _take(self, kind: str, size: int) -> Iterator[_Piece]:
        """Yield the first `size` bytes of the buffer, and the bytes that were passed over before them, as a piece."""
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        start, total = self.position, self._skipped + size
        self.position += total
        self._skipped = self._searched = 0
        if not total:
            return
        if kind != "between" and total > self._max_bytes:
            yield _Piece(start, "page", drop=Drop("record_too_large", float(total), float(self._max_bytes)))
        elif kind == "cut":
            yield _Piece(start, "page", drop=Drop("truncated_record"))
        else:
            yield _Piece(start, kind, data)

    def _end(self) -> Iterator[_Piece]:
        """Yield what is left in the buffer; a page that is open has no end."""
        yield from self._take("cut" if self._is_open else "between", len(self._buffer))
        self._is_open = False


def open_mediawiki(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of the pages of a dump, compressed or not."""
    scanner = _PageScanner(stream, config.max_record_bytes)

    def items() -> Iterator[SourceItem]:
        for number, (start, kind, element, drop) in enumerate(_elements(scanner)):
            if (surplus := too_many_rows(number, scanner.size)) is not None:
                yield SourceItem(start, new_row("gap"), surplus)
                return
            if element is None:
                yield SourceItem(start, new_row(kind), drop)
            else:
                yield SourceItem(start, *element.wiki.row(element.text, config))

    return account_bytes(items(), split, lambda: scanner.position)


def read_articles(stream: ByteStream, max_bytes: int) -> Iterator[tuple[str | None, str] | Drop]:
    """Yield URL and wikitext of each article of a dump, and a Drop for each other page and for unreadable bytes.

    The URL is None if the dump does not state its wiki. `max_bytes`: of a page; a larger one is a Drop.
    """
    for _, _, element, drop in _elements(_PageScanner(stream, max_bytes)):
        if element is None:
            yield drop or Drop("unreadable_gap")
        elif (page := _parse(element.text)) is None:
            yield Drop("bad_xml")
        elif page.namespace not in (None, 0):
            yield Drop("other_namespace", page.namespace)
        elif _target_of(page) is not None:
            yield Drop("redirect")
        else:
            yield element.wiki.url(_title_of(page)), page.text


class _Element(NamedTuple):
    """A `<page>` element, and the wiki that it belongs to."""

    wiki: "Wiki"
    text: str


def _elements(scanner: _PageScanner) -> Iterator[tuple[int, str, _Element | None, Drop | None]]:
    """Yield (offset, `page` or `gap`, element, None or why there is no element) for each page and each gap."""
    wiki: Wiki | None = None
    head = b""
    is_gap = False
    for piece in scanner:
        if piece.kind == "between":
            head = head or piece.data[:HEAD_BYTES]
            text = "" if is_gap else piece.data.decode(scanner.encoding, "replace")
            if not is_gap and (len(piece.data) > HEAD_BYTES or _has_text(text)):
                yield piece.start, "gap", None, Drop("unreadable_gap")
                is_gap = True
            continue
        is_gap = piece.kind == "gap"  # It extends to the next page.
        if piece.drop is not None:
            yield piece.start, "gap" if piece.kind == "gap" else "page", None, piece.drop
            continue
        wiki = wiki or Wiki.of_head(head.decode(scanner.encoding, "replace"))
        yield piece.start, "page", _Element(wiki, piece.data.decode(scanner.encoding, "replace")), None


def _has_text(between: str) -> bool:
    """Return True if bytes between pages have text that is neither in a tag nor in the head of a dump."""
    start, end = between.find("<siteinfo"), between.rfind("</siteinfo>")
    rest = between[:start] + between[end:] if 0 <= start < end else between
    return _OTHER.search(_TAG.sub("", rest)) is not None


@dataclass(frozen=True)
class Wiki:
    """What the head of a dump states about its wiki."""

    name: str | None = None
    """Name of the database, such as `enwiki`."""
    base: str | None = None
    """URL of the main page."""
    namespaces: frozenset[str] = frozenset()
    """Names of the namespaces of files and categories."""

    @classmethod
    def of_head(cls, head: str) -> "Wiki":
        """Return what the bytes before the first page state; the last `<siteinfo>` counts."""
        head = head[: head.rfind("</siteinfo>") + 1]
        head = head[head.rfind("<siteinfo") :] if "<siteinfo" in head else ""
        names = re.findall(r'<namespace key="(-?\d{1,6})"[^<>]{0,200}>([^<>]{1,100})(?=<)', head)
        name, base = (re.search(rf"<{tag}>\s*+([^<>\s]{{1,500}}+)", head) for tag in ("dbname", "base"))
        return cls(
            name[1] if name else None,
            base[1] if base else None,
            frozenset(plain_name(label) for key, label in names if key in FILE_KEYS),
        )

    @cached_property
    def prefix(self) -> str | None:
        """The URL of a page without its title; None if the head states none."""
        if self.base is None or "://" not in self.base:
            return None
        for mark in ("/wiki/", "title="):
            if mark in self.base:
                return self.base[: self.base.index(mark) + len(mark)]
        return self.base[: self.base.rindex("/") + 1]

    def url(self, title: str) -> str | None:
        """Return the URL of the page with this title; None if the title is empty or the head states no base."""
        return self.prefix + quote(title.replace(" ", "_"), safe="/:;@$!*(),~'") if self.prefix and title else None

    def row(self, element: str, config: SourceConfig) -> tuple[Row, Drop | None]:
        """Return the row of a `<page>` element, with a Drop if it is no document."""
        page = _parse(element)
        if page is None:
            return new_row("page"), Drop("bad_xml")
        title = _title_of(page)
        row = new_row("page", self.url(title), page.date)
        row["title"] = title or None
        facts = {
            "page_id": page.identifier,
            "revision_id": page.revision,
            "wiki": self.name,
            "namespace": page.namespace,
        }
        row["meta"], row["_meta"] = meta_of(facts, set(), config)
        target = _target_of(page)
        if (drop := _unwanted(page, target, config)) is not None:
            return row, drop
        if target is not None:
            return row, set_text(row, f"{title}\n\n{target}", config)
        settings = config.mediawiki
        form = WikiForm(settings.headings, settings.lists, settings.tables, settings.math)
        return row, set_text(row, text_of_wikitext(page.text, form, self.namespaces), config)


@dataclass
class _Page:
    """The fields of a `<page>` element, in its latest revision."""

    title: str = ""
    namespace: int | None = None
    identifier: int | None = None
    revision: int | None = None
    date: datetime | None = None
    model: str | None = None
    redirect: str | None = None
    """The title of the element `redirect`, which may be empty; None: the page has no such element."""
    text: str = ""
    texts: dict[str, str] = field(default_factory=dict)


def _title_of(page: _Page) -> str:
    return encodable(" ".join(page.title.split()))[:MAX_TITLE_CHARS]


def _target_of(page: _Page) -> str | None:
    """Return the title of the page to which a redirect leads, empty if it is not known; None for other pages."""
    start = page.text[:1000]
    if page.redirect is None and REDIRECT.match(start) is None:
        return None
    link = _LINK.search(start)
    return encodable(" ".join((page.redirect or (link[1] if link else "")).replace("_", " ").split()))


def _unwanted(page: _Page, target: str | None, config: SourceConfig) -> Drop | None:
    settings = config.mediawiki
    if (page.namespace or 0) not in settings.namespaces:
        return Drop("other_namespace", page.namespace)
    if page.model not in WIKITEXT:
        return Drop("not_wikitext")
    if target is not None:
        return None if settings.keep_redirects and target else Drop("redirect")
    if not settings.keep_disambiguation and _is_disambiguation(page, settings.disambiguation_names):
        return Drop("disambiguation")
    return None


def _is_disambiguation(page: _Page, more: tuple[str, ...]) -> bool:
    names = DISAMBIGUATION_NAMES.union(map(plain_name, more)) if more else DISAMBIGUATION_NAMES
    brackets = _BRACKETS.search(page.title)
    if (brackets is not None and plain_name(brackets[1]) in names) or "__DISAMBIG__" in page.text:
        return True
    return not names.isdisjoint(template_names(page.text)) or not names.isdisjoint(categories(page.text))


class _TooDeepError(Exception):
    """The elements of a page are nested deeper than MAX_ELEMENTS."""


class _Handler:
    """Collects the texts of the elements that are read. The last revision replaces those before it."""

    def __init__(self) -> None:
        self.page = _Page()
        self._path: list[str] = []
        self._parts: list[str] | None = None

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Handle the start of an element."""
        if len(self._path) >= MAX_ELEMENTS:
            raise _TooDeepError
        self._path.append(name)
        place = "/".join(self._path[1:])
        if place == "revision":
            self.page.texts = {key: value for key, value in self.page.texts.items() if "/" not in key}
        if place == "redirect":
            self.page.redirect = attributes.get("title", "")
        self._parts = [] if place in _FIELDS else None

    def data(self, text: str) -> None:
        """Handle text."""
        if self._parts is not None:
            self._parts.append(text)

    def end(self, name: str) -> None:
        """Handle the end of an element."""
        if self._parts is not None:
            self.page.texts["/".join(self._path[1:])] = "".join(self._parts)
            self._parts = None
        self._path.pop()


_FIELDS = frozenset(("title", "ns", "id", "revision/id", "revision/timestamp", "revision/model", "revision/text"))


def _parse(element: str) -> _Page | None:
    """Return the fields of a `<page>` element; None if it is not well-formed."""
    parser = expat.ParserCreate("utf-8")
    handler = _Handler()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = handler.start, handler.end
    parser.CharacterDataHandler = handler.data
    try:
        parser.Parse(element.encode("utf-8", "replace"), True)
    except (expat.ExpatError, _TooDeepError):
        return None
    page, texts = handler.page, handler.page.texts
    page.title, page.text = texts.get("title", ""), texts.get("revision/text", "")
    page.namespace, page.identifier = _number(texts.get("ns")), _number(texts.get("id"))
    page.revision, page.date = _number(texts.get("revision/id")), date_of(texts.get("revision/timestamp"))
    page.model = texts.get("revision/model")
    return page


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None


def read_page(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Return a page after the head of its dump, so that the result can be read as a dump of one page."""
    with fs.open_input_file(path) as file:
        frames = FrameReader(file, None)
        head, page, position = bytearray(), bytearray(), 0
        while position < offset + length and (block := frames.next()) is not None:
            if len(head) < min(HEAD_BYTES, offset):
                head += block.data[: HEAD_BYTES - len(head)]
            page += block.data[max(0, offset - position) : max(0, offset + length - position)]
            position += len(block.data)
    return _head_of(bytes(head[:offset])) + bytes(page)


def _head_of(data: bytes) -> bytes:
    encoding = _UTF16.get(data[:2], "utf-8")
    end = "</siteinfo>".encode(encoding)
    places = data.find("<page".encode(encoding)), data.find(end) + len(end)
    return data[: places[0] if places[0] >= 0 else places[1] if places[1] >= len(end) else 0]


def page_of(data: bytes) -> bytes:
    """Return a record without the head of the dump."""
    encoding = _UTF16.get(data[:2], "utf-8")
    return data[max(0, data.find("<page".encode(encoding))) :]
