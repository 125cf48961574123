"""Reader of books in EPUB files and plain text: one document for each file.

The chapters of an EPUB are read in the order of its spine, with their headings, lists and tables, by the same parser as
web pages. Title, authors, language, date and rights are those of its package document. Names are looked up in the
archive only, nothing is written to a disk, and all chapters together have at most `max_record_bytes`.

Source: EPUB 3.3, W3C Recommendation 2023; OCF 3.3, section 4.2.6.3.2 (encryption).
"""

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple
from urllib.parse import unquote
from xml.parsers import expat

import pyarrow.fs as pafs
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLParserException, HTMLTree

from pipeline.engine.stage import Drop, Row, Split
from pipeline.extract.assemble import EMPTY_LINE, assemble
from pipeline.extract.blocks import cut_blocks
from pipeline.extract.charset import decode
from pipeline.extract.exponents import mark_exponents, may_have_exponents
from pipeline.extract.formulas import may_have_formulas, write_formulas
from pipeline.extract.inline import TextForm
from pipeline.extract.nesting import nesting_problem
from pipeline.extract.page_limits import bearable
from pipeline.sources.archives.zip import DAMAGE, TextArchive, is_unsafe_name, is_zip
from pipeline.sources.blocks import ByteStream
from pipeline.sources.books.plain_text import decoded_text, joined_lines, kept_lines, read_decoded, read_whole
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import SourceRows
from pipeline.sources.provenance import SourceItem, account_bytes, encodable, new_row, set_text
from pipeline.sources.rows import date_of, meta_of

MAX_PACKAGE_BYTES = 4 << 20
"""Maximum size of the package document of an EPUB, and of its list of encrypted files [bytes]."""
MAX_ELEMENTS = 100
"""Maximum nesting of elements in them; real ones have less than 10."""
MAX_DEPTH = 3_000
"""Maximum nesting of elements in a chapter, as of pages by default."""
MAX_TITLE_CHARS = 1_000
FONTS = frozenset(("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"))
"""Algorithms that only obfuscate fonts."""

_BOOK_NAME = re.compile(r"(?:\.(?:txt|text|epub)(?:\.(?:gz|zst|bz2))?|(?:^|/)[^./]+)$", re.IGNORECASE)
_EPUB_NAME = re.compile(r"\.epub$", re.IGNORECASE)
_HTML = frozenset(("application/xhtml+xml", "text/html", "application/x-dtbook+xml", "text/x-oeb1-document"))
_EMPTY_ELEMENT = re.compile(r"<([a-zA-Z][\w:-]*+)((?:[^<>/]|/(?!>))*+)/>")
_VOID_NAMES = "area base br col embed hr img input link meta param source track wbr image"
_VOID = frozenset(_VOID_NAMES.split())


def open_books(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the row of the book in a file."""
    size = stream.seek(0, 2)
    if not size:
        return account_bytes(iter(()), split, lambda: 0)
    if is_zip(stream):
        row, drop = _epub_row(stream, config)
    elif _EPUB_NAME.search(split.name):
        row, drop = new_row("book"), Drop("bad_archive")
    elif not _BOOK_NAME.search(split.name):
        row, drop = new_row("book"), Drop("not_a_book")
    else:
        whole = read_whole(stream, config.max_record_bytes)
        size = whole.size
        row, drop = (new_row("book"), whole.drop) if whole.drop is not None else _text_row(whole.data, config)
    return account_bytes(iter([SourceItem(0, row, drop)]), split, lambda: size)


def _text_row(data: bytes, config: SourceConfig) -> tuple[Row, Drop | None]:
    row = new_row("book")
    text = decoded_text(data)
    if text is None:
        return row, Drop("not_a_book")
    return row, set_text(row, (joined_lines if config.books.join_lines else kept_lines)(text).strip("\n"), config)


class _Item(NamedTuple):
    """A file in the manifest of a package document."""

    name: str
    media_type: str
    properties: str


@dataclass
class Package:
    """The package document of an EPUB."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    """Texts of the metadata, by the name of their Dublin Core element."""
    items: dict[str, _Item] = field(default_factory=dict)
    """Files by their ids."""
    spine: list[str] = field(default_factory=list)
    """Ids of the chapters."""


class _BadEpubError(Exception):
    """The book is dropped for this reason."""

    def __init__(self, drop: Drop):
        super().__init__(drop.rule)
        self.drop = drop


def _epub_row(stream: ByteStream, config: SourceConfig) -> tuple[Row, Drop | None]:
    row = new_row("book")
    try:
        archive = TextArchive(stream)
    except DAMAGE:
        return row, Drop("bad_archive")
    if unsafe := archive.unsafe_names():
        return row, Drop("unsafe_name", float(unsafe))
    epub = _Epub(archive, config.max_record_bytes)
    try:
        package = epub.package()
        names, missing = epub.names(package)
        _describe(row, package, missing, config)
        chapters = [epub.chapter(name) for name in names]
    except _BadEpubError as error:
        return row, error.drop
    return row, set_text(row, "\n\n".join(filter(None, chapters)), config)


def _describe(row: Row, package: Package, missing: int, config: SourceConfig) -> None:
    """Set the title, URL, date, licence and further fields of a book. `missing`: chapters that the archive lacks."""
    fields = {name: [" ".join(text.split()) for text in texts] for name, texts in package.fields.items()}
    row["title"] = encodable(next(iter(fields.get("title", ())), ""))[:MAX_TITLE_CHARS] or None
    names = (*fields.get("identifier", ()), *fields.get("source", ()))
    url = next((name for name in names if re.match(r"https?://\S+\Z", name)), None)
    row.update(new_row("book", encodable(url or "")) | {"title": row["title"]})
    row["date"] = date_of(next(iter(fields.get("date", ())), None))
    rights = encodable(" ".join(fields.get("rights", ())))
    row["licence"] = rights if rights and len(rights.encode()) <= config.max_meta_bytes else None
    facts: dict[str, Any] = {
        "author": ", ".join(fields.get("creator", ())),
        "language": ", ".join(fields.get("language", ())),
    }
    facts |= {"publisher": ", ".join(fields.get("publisher", ())), "missing_chapters": missing}
    row["meta"], row["_meta"] = meta_of({key: value for key, value in facts.items() if value}, set(), config)


class _Epub:
    """An EPUB file. Its methods raise _BadEpubError."""

    def __init__(self, archive: TextArchive, max_bytes: int):
        self._archive = archive
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._members = {info.filename: info for info in archive.members}

    def _read(self, name: str, max_bytes: int) -> bytes:
        data = self._archive.read(self._members[name], max_bytes)
        if isinstance(data, Drop):
            raise _BadEpubError(data)
        return data

    def package(self) -> Package:
        """Return the package document that the container names."""
        if "META-INF/container.xml" not in self._members:
            raise _BadEpubError(Drop("bad_epub"))
        paths: list[str] = []
        _parse_xml(
            self._read("META-INF/container.xml", MAX_PACKAGE_BYTES),
            lambda path, attributes: paths.append(attributes.get("full-path", "")) if path[-1] == "rootfile" else None,
        )
        name = next((path for path in paths if path in self._members), None)
        if name is None:
            raise _BadEpubError(Drop("bad_epub"))
        package = Package()

        def start(path: list[str], attributes: Mapping[str, str]) -> None:
            if path[-1] == "item" and "id" in attributes:
                href = _resolved(posixpath.dirname(name), attributes.get("href", ""))
                kind, properties = attributes.get("media-type", ""), attributes.get("properties", "")
                package.items[attributes["id"]] = _Item(href, kind, properties)
            elif path[-1] == "itemref":
                package.spine.append(attributes.get("idref", ""))

        def text(path: list[str], content: str) -> None:
            if "metadata" in path[:-1] and content.strip():
                package.fields.setdefault(path[-1], []).append(content)

        _parse_xml(self._read(name, MAX_PACKAGE_BYTES), start, text)
        return package

    def names(self, package: Package) -> tuple[list[str], int]:
        """Return the names of the chapters in the order of the spine, and the number of chapters that do not exist."""
        items = [package.items[key] for key in dict.fromkeys(package.spine) if key in package.items]
        items = [item for item in items if "nav" not in item.properties.split() and item.media_type in _HTML]
        if any(is_unsafe_name(item.name) for item in items):
            raise _BadEpubError(Drop("unsafe_name", 1.0))
        names = [item.name for item in items if item.name in self._members]
        missing = len(items) - len(names)
        if not names:
            raise _BadEpubError(Drop("bad_epub"))
        if not self._encrypted().isdisjoint(names):
            raise _BadEpubError(Drop("encrypted_book"))
        return names, missing

    def _encrypted(self) -> set[str]:
        """Return the names of the files that are encrypted, without obfuscated fonts."""
        if "META-INF/encryption.xml" not in self._members:
            return set()
        names: set[str] = set()
        algorithms: list[str] = []

        def start(path: list[str], attributes: Mapping[str, str]) -> None:
            if path[-1] == "EncryptionMethod" and path[-2:-1] == ["EncryptedData"]:
                algorithms.append(attributes.get("Algorithm", ""))
            elif path[-1] == "CipherReference" and not FONTS.intersection(algorithms[-1:]):
                names.add(posixpath.normpath(unquote(attributes.get("URI", ""))))

        _parse_xml(self._read("META-INF/encryption.xml", MAX_PACKAGE_BYTES), start)
        return names

    def chapter(self, name: str) -> str:
        """Return the text of a chapter."""
        data = self._archive.read(self._members[name], self._left)
        if isinstance(data, Drop):
            large = Drop("record_too_large", data.value and data.value - self._left + self._max_bytes, self._max_bytes)
            raise _BadEpubError(large if data.rule == "record_too_large" else data)
        self._left -= len(data)
        return chapter_text(data)


def _resolved(folder: str, href: str) -> str:
    return posixpath.normpath(posixpath.join(folder, unquote(href.partition("#")[0])))


def _without_cdata(html: str) -> str:
    """Return a chapter with its CDATA sections of XML as text: parsers of HTML take them for comments."""
    parts, position = [], 0
    while (start := html.find("<![CDATA[", position)) >= 0 and (end := html.find("]]>", start)) >= 0:
        parts += [html[position:start], escape(html[start + len("<![CDATA[") : end], quote=False)]
        position = end + len("]]>")
    return "".join([*parts, html[position:]]) if parts else html


def chapter_text(data: bytes) -> str:
    """Return the text of a chapter in HTML. Raises _BadEpubError if no parser can bear it."""
    html = bearable(_without_cdata(decode(data, None).text)).html
    if nesting_problem(data, html, MAX_DEPTH) is not None:
        raise _BadEpubError(Drop("bad_epub"))
    try:
        tree = HTMLTree.parse(_EMPTY_ELEMENT.sub(_with_end, html))
        if may_have_formulas(html):
            write_formulas(tree)
        if may_have_exponents(html):
            mark_exponents(tree)
        blocks = cut_blocks(tree.body.html if tree.body is not None else "")
        if blocks.is_cut:
            return str(extract_plain_text(tree, main_content=False, alt_texts=False)).strip()
        return assemble(blocks, range(len(blocks)), TextForm()).replace(EMPTY_LINE, "").strip("\n")
    except (HTMLParserException, UnicodeError) as error:
        raise _BadEpubError(Drop("bad_epub")) from error


def _with_end(match: re.Match[str]) -> str:
    """Return an empty element of XHTML with an end tag, which HTML requires."""
    return match[0] if match[1].lower() in _VOID else f"<{match[1]}{match[2]}></{match[1]}>"


StartHandler = Callable[[list[str], Mapping[str, str]], None]
"""Function of (names of the open elements, attributes) that is called at the start of an element."""
TextHandler = Callable[[list[str], str], None]
"""Function of (names of the open elements, text) that is called at the end of an element."""


class _XmlReader:
    """Calls functions for the elements and texts of an XML document. Entities may not be declared."""

    def __init__(self, start: StartHandler, text: TextHandler | None):
        self._start, self._text = start, text
        self._path: list[str] = []
        self._parts: list[str] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Handle the start of an element."""
        if len(self._path) >= MAX_ELEMENTS:
            raise _BadEpubError(Drop("bad_epub"))
        self._path.append(name.rpartition(" ")[2])
        self._parts.clear()
        self._start(self._path, attributes)

    def data(self, text: str) -> None:
        """Handle text."""
        self._parts.append(text)

    def end(self, name: str) -> None:
        """Handle the end of an element."""
        if self._text is not None:
            self._text(self._path, "".join(self._parts))
        self._parts.clear()
        self._path.pop()

    def entity(self, *_: object) -> None:
        """Refuse the declaration of an entity."""
        raise _BadEpubError(Drop("bad_epub"))


def _parse_xml(data: bytes, start: StartHandler, text: TextHandler | None = None) -> None:
    """Call `start` and `text` for each element of an XML document."""
    parser = expat.ParserCreate(namespace_separator=" ")
    reader = _XmlReader(start, text)
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler, parser.EntityDeclHandler = reader.data, reader.entity
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise _BadEpubError(Drop("bad_epub")) from error


def read_whole_book(fs: pafs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Return the file of a book, decompressed if it is text."""
    with fs.open_input_file(path) as file:
        if is_zip(file):
            return bytes(file.read(length))
    return read_decoded(fs, path, offset, length)
