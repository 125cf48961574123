"""EPUB files and books in plain text: chapters in the order of the spine, and every damage a drop with its reason."""

import gzip
import io
import json
import zipfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.stage import Drop, Split
from pipeline.sources.books.books import chapter_text, open_books
from pipeline.sources.config import BooksConfig, SourceConfig
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import HashedStream, find_splits, open_stream

CONFIG = SourceConfig(paths=("x",), max_record_bytes=1 << 16)
CONTAINER = (
    '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/a.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)
METADATA = (
    "<dc:title>A &amp; B</dc:title><dc:creator>One</dc:creator><dc:creator>Two</dc:creator>"
    "<dc:language>en</dc:language><dc:date>1999-12</dc:date><dc:rights>CC-BY-4.0</dc:rights><dc:identifier>urn:isbn:1</dc:identifier>"
    "<dc:identifier>https://a.org/1</dc:identifier><dc:publisher>P</dc:publisher><meta property='x'>y</meta>"
)
ITEMS = (
    '<item id="c2" href="Text/two%20.xhtml" media-type="application/xhtml+xml"/>'
    '<item id="c1" href="one.xhtml#x" media-type="application/xhtml+xml"/>'
    '<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>'
    '<item id="svg" href="a.svg" media-type="image/svg+xml"/>'
    '<item id="gone" href="gone.xhtml" media-type="application/xhtml+xml"/>'
)
SPINE = "".join(f'<itemref idref="{key}"/>' for key in ("nav", "c1", "svg", "gone", "c2", "c1", "unknown"))
ONE = (
    '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml"><head><title/>'
    '</head><body><a id="p1"/><h1>Chapter 1</h1><p>First <i>words</i>&#233;.</p><ul><li>a</li><li>b</li></ul>'
    "</body></html>"
)
TWO = "<body><h1>Chapter 2</h1><table><tr><td>x</td><td>1</td></tr><tr><td>y</td><td>2</td></tr></table></body>"


def package(metadata: str = METADATA, items: str = ITEMS, spine: str = SPINE, head: str = "") -> str:
    return (
        f'<?xml version="1.0"?>{head}<package xmlns="http://www.idpf.org/2007/opf" version="3.0">'
        f'<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">{metadata}</metadata>'
        f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    )


def epub(changes: Mapping[str, str | bytes | None] | None = None) -> bytes:
    """An EPUB file; `changes` replaces members, and None removes one."""
    members: dict[str, str | bytes | None] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/a.opf": package(),
        "OEBPS/Text/two .xhtml": TWO,
        "OEBPS/one.xhtml": ONE,
        "OEBPS/nav.xhtml": "<p>contents</p>",
        **(changes or {}),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            if data is not None:
                archive.writestr(name, data)
    return out.getvalue()


def read(stored: bytes, name: str = "a.epub", config: SourceConfig = CONFIG) -> tuple[dict[str, Any], Drop | None]:
    split = Split(0, name, name, len(stored), "", "books", "books")
    ((row, drop),) = open_books(split, HashedStream(io.BytesIO(stored)), config)
    assert (row["offset"], (drop is None) == (row["text"] is not None)) == (0, True)
    return row, drop


def test_a_book(tmp_path: Path) -> None:
    (tmp_path / "a.epub").write_bytes(epub())
    config = SourceConfig(paths=(f"{tmp_path}/*",))
    (split,) = find_splits(config)
    ((row, drop),) = open_split(split, open_stream(split), config)
    assert (drop, split.format) == (None, "books")
    assert row["text"] == "Chapter 1\n\nFirst words\u00e9.\n\n- a\n- b\n\nChapter 2\n\nx | 1\ny | 2"
    assert (row["title"], row["url"], row["domain"]) == ("A & B", "https://a.org/1", "a.org")
    assert (row["licence"], row["date"]) == ("CC-BY-4.0", datetime(1999, 12, 1, tzinfo=UTC))
    assert json.loads(row["meta"]) == {"author": "One, Two", "language": "en", "publisher": "P", "missing_chapters": 1}
    assert (row["length"], row["record_type"]) == (split.size, "book")
    again = refetch(split, row, config)
    assert (again.changes, again.head) == ((), b"application/epub+zip")


BOMB = '<!DOCTYPE package [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]>'
ENCRYPTION = (
    '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container" xmlns:enc="http://www.w3.org/2001/04/xmlenc#">'
    '<enc:EncryptedData><enc:EncryptionMethod Algorithm="{}"/><enc:CipherData><enc:CipherReference URI="{}"/>'
    "</enc:CipherData></enc:EncryptedData></encryption>"
)
AES = "http://www.w3.org/2001/04/xmlenc#aes128-cbc"
ONE_ITEM = '<item id="c1" href="{}" media-type="application/xhtml+xml"/>'


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"META-INF/container.xml": None}, "bad_epub"),
        ({"META-INF/container.xml": "<container>"}, "bad_epub"),
        ({"META-INF/container.xml": "<a/>"}, "bad_epub"),
        ({"OEBPS/a.opf": None}, "bad_epub"),
        ({"OEBPS/a.opf": "no XML"}, "bad_epub"),
        ({"OEBPS/a.opf": package(head=BOMB, metadata="<dc:title>&b;</dc:title>")}, "bad_epub"),
        ({"OEBPS/a.opf": package(metadata="<a>" * 200 + "</a>" * 200)}, "bad_epub"),
        ({"OEBPS/a.opf": package(spine="")}, "bad_epub"),
        ({"OEBPS/a.opf": package(items="")}, "bad_epub"),
        ({"OEBPS/a.opf": package(items=ONE_ITEM.format("../../etc/passwd"))}, "unsafe_name"),
        ({"OEBPS/a.opf": package(items=ONE_ITEM.format("/etc/passwd"))}, "unsafe_name"),
        ({"../a.xhtml": "x"}, "unsafe_name"),
        ({"/a.xhtml": "x"}, "unsafe_name"),
        ({"C:\\a.xhtml": "x"}, "unsafe_name"),
        ({"META-INF/encryption.xml": ENCRYPTION.format(AES, "OEBPS/one.xhtml")}, "encrypted_book"),
        ({"META-INF/encryption.xml": ENCRYPTION.format(AES, "OEBPS/font.ttf")}, None),
        (
            {"META-INF/encryption.xml": ENCRYPTION.format("http://www.idpf.org/2008/embedding", "OEBPS/one.xhtml")},
            None,
        ),
        ({"OEBPS/one.xhtml": "<p>" + "x" * (1 << 17)}, "record_too_large"),
        ({"OEBPS/one.xhtml": "x" * 40_000, "OEBPS/Text/two .xhtml": "y" * 40_000}, "record_too_large"),
        ({"OEBPS/a.opf": package(metadata=" " * (5 << 20))}, "record_too_large"),
        ({"OEBPS/one.xhtml": "<div>" * 4000}, "bad_epub"),
        ({"OEBPS/one.xhtml": "", "OEBPS/Text/two .xhtml": "<p> </p>"}, "empty_page"),
        ({"OEBPS/one.xhtml": None}, None),
        ({"OEBPS/one.xhtml": b"\xff\xfe<\0p\0>\0x\0"}, None),
    ],
)
def test_damaged_epubs(changes: Mapping[str, str | bytes | None], rule: str | None) -> None:
    _, drop = read(epub(changes))
    assert (drop.rule if drop else None) == rule


@pytest.mark.parametrize(
    ("stored", "name", "rule"),
    [
        (b"", "a.epub", "empty_file"),
        (b"no zip", "a.epub", "bad_archive"),
        (epub()[:-40], "a.epub", "bad_archive"),
        (b"PK\x03\x04" + bytes(100), "a.txt", "bad_archive"),
        (b"words", "a.jpg", "not_a_book"),
        (b"<p>words</p>", "b/a.html", "not_a_book"),
        (b"\x89PNG\x00\x01\x02", "a.txt", "not_a_book"),
        (b"x" * (1 << 17), "a.txt", "record_too_large"),
        (gzip.compress(b"words", mtime=0)[:-9], "a.txt.gz", "truncated_record"),
        (b" ", "a.txt", "empty_page"),
    ],
)
def test_damaged_files(stored: bytes, name: str, rule: str) -> None:
    _, drop = read(stored, name)
    assert (drop and drop.rule) == rule


@pytest.mark.parametrize("name", ["a.txt", "b/Book", "a.TXT.gz"])
def test_plain_text(tmp_path: Path, name: str) -> None:
    text = "words of a line that is rather long for its width\nand more of them until the very end of it.\n\nb\nc"
    stored = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    joined = text.replace("width\nand", "width and")
    row, drop = read(stored, name)
    assert (drop, row["text"], row.get("title")) == (None, joined, None)
    assert row["length"] == len(text)
    config = CONFIG.model_copy(update={"books": BooksConfig(join_lines=False)})
    assert read(stored, name, config)[0]["text"] == text
    path = tmp_path / "file"
    path.write_bytes(stored)
    again = refetch(Split(0, name, str(path), len(stored), "", "books", "books"), row, CONFIG)
    assert (again.changes, again.head) == ((), text.encode())


def test_a_chapter_with_too_many_tags_for_blocks_keeps_its_end() -> None:
    text = chapter_text(("<p>start</p>" + "<p>a</p>" * 60_000 + "<p>the end</p>").encode())
    assert (text[:5], text[-7:]) == ("start", "the end")


@given(st.binary(max_size=300), st.integers(0, 900), st.integers(0, 20))
def test_no_file_raises(noise: bytes, place: int, length: int) -> None:
    whole = epub()
    read(noise)
    read(whole[:place] + noise[:length] + whole[place + length :])
    read(whole[:-place] + noise)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<p>a<![CDATA[ <b> & c ]]>d</p><p><![CDATA[e]]></p>", "a <b> & c d\n\ne"),
        ("<p>a</p><![CDATA[ b", "a"),
        ("<p><math><mfrac><mn>1</mn><mn>2</mn></mfrac></math> of 10<sup>5</sup></p>", "$\\frac{1}{2}$ of 10^5"),
    ],
)
def test_chapters_have_sections_of_xml_and_formulas(body: str, text: str) -> None:
    assert chapter_text(f"<html><body>{body}</body></html>".encode()) == text
