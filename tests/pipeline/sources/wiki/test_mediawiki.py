"""MediaWiki dumps: every page comes out once with its place and its reason, whatever the state of the file."""

import bz2
import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastwarc.stream_io import ZstdWriter
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.stage import Drop, Split
from pipeline.sources import provenance
from pipeline.sources.config import MediaWikiConfig, SourceConfig
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from pipeline.sources.wiki.mediawiki import HEAD_BYTES, Wiki, open_mediawiki
from schemas.errors import ConfigError
from tests.support.paths import SHARED

CONFIG = SourceConfig(paths=("x",), max_record_bytes=1 << 12)
HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">\n  <siteinfo>\n'
    "    <dbname>enwiki</dbname>\n    <base>https://en.wikipedia.org/wiki/Main_Page</base>\n    <namespaces>\n"
    '      <namespace key="0" case="first-letter" />\n      <namespace key="6" case="first-letter">Bildo</namespace>\n'
    "    </namespaces>\n  </siteinfo>\n"
)
TAIL = "</mediawiki>\n"


def page(title: str = "A b", text: str = "words", ns: int = 0, more: str = "") -> str:
    """A page element as a dump has it."""
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{ns}</ns>\n    <id>7</id>\n{more}    <revision>\n"
        "      <id>9</id>\n"
        "      <timestamp>2020-01-02T03:04:05Z</timestamp>\n      <contributor><id>3</id></contributor>\n"
        f'      <model>wikitext</model>\n      <text xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
    )


LOST = page(text="lost").replace("<page>", "<pagE>")
"""A page of which one bit is damaged, so that nothing shows where it begins."""


def zstd(data: bytes) -> bytes:
    out = io.BytesIO()
    with ZstdWriter(out) as writer:
        writer.write(data)
    return out.getvalue()


def read(stored: bytes, config: SourceConfig = CONFIG) -> tuple[list[tuple[dict[str, Any], Drop | None]], int]:
    """The rows of a file and its size, after checking that they follow each other without a hole."""
    split = Split(0, "f", "f", len(stored), "", "wiki", "mediawiki")
    rows = [*open_mediawiki(split, HashedStream(io.BytesIO(stored)), config)]
    position = 0
    for row, drop in rows:
        assert row["offset"] == position
        assert (drop is None) == (row["text"] is not None)
        position += row["length"]
    assert len({row["doc_id"] for row, _ in rows}) == len(rows)
    return rows, position


def test_a_dump_with_too_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "FREE_ROWS", 50)
    monkeypatch.setattr(provenance, "ROWS_A_BYTE", 0)
    rows, size = read((HEAD + page() + "<page></page>" * 99 + TAIL).encode())
    assert rows[-1][1] == Drop("too_many_rows", 50.0, 50.0)
    assert len(rows) == 51
    assert sum(row["length"] for row, _ in rows) == size


def verdicts(dump: str, config: SourceConfig = CONFIG) -> list[str]:
    return [drop.rule if drop else row["text"] for row, drop in read(dump.encode(), config)[0]]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd, bz2.compress])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_page_is_found_again_at_its_offset(tmp_path: Path, pack: Callable[[bytes], bytes], encoding: str) -> None:
    pages = [page(f"Title {number} ü", f"text {number} ü") for number in range(300)]
    content = (HEAD + "".join(pages) + TAIL).encode(encoding)
    half = len(content) // 2
    path = tmp_path / "dump"
    path.write_bytes(pack(content[:half]) + pack(content[half:]))
    rows, size = read(path.read_bytes())
    assert (size, len(rows)) == (len(content), 300)
    split = Split(0, "f", str(path), path.stat().st_size, "", "wiki", "mediawiki")
    for number in (0, 1, 150, 299):
        row, drop = rows[number]
        assert (drop, row["text"], row["title"]) == (None, f"text {number} ü", f"Title {number} ü")
        assert row["url"] == f"https://en.wikipedia.org/wiki/Title_{number}_%C3%BC"
        assert (row["domain"], row["record_type"]) == ("wikipedia.org", "page")
        assert row["date"] == datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
        assert json.loads(row["meta"]) == {"page_id": 7, "revision_id": 9, "wiki": "enwiki", "namespace": 0}
        again = refetch(split, row, CONFIG)
        assert again.changes == ()
        assert again.head.startswith("<page>".encode(encoding.replace("16", "16-le")))


@pytest.mark.parametrize(
    ("dump", "expected"),
    [
        (HEAD + page() + TAIL, ["words"]),
        (page() + page(text="more"), ["words", "more"]),
        (HEAD + page(ns=1) + page(ns=14) + page(), ["other_namespace", "other_namespace", "words"]),
        (page(more="<redirect title='B' />"), ["redirect"]),
        (page(text="#REDIRECT [[B]]") + page(text="#перенаправление: [[B]]"), ["redirect", "redirect"]),
        (page(text="# See [[B]]"), ["1. See B"]),
        (page(text="{{Disambig}}\n* [[B]]"), ["disambiguation"]),
        (page(text="* [[B]]\n[[Category:Disambiguation pages]]"), ["disambiguation"]),
        (page(text="a __DISAMBIG__"), ["disambiguation"]),
        (page("A (Begriffsklärung)") + page("A (film)"), ["disambiguation", "words"]),
        (page(text="{{For|B}} {{Begriffsklärungshinweis}} x"), ["x"]),
        (page().replace(">wikitext<", ">css<"), ["not_wikitext"]),
        (page(text=" {{Infobox}} [[File:a.png]]"), ["empty_page"]),
        (HEAD + page(text="[[Bildo:a.png|b]]x"), ["x"]),
        (page(text="a &amp;lt; b &#60;!-- c --&gt;"), ["a < b"]),
        (page(text="&bomb;") + page(), ["bad_xml", "words"]),
        ("<!DOCTYPE a [<!ENTITY bomb 'x'>]>" + page(text="&bomb;"), ["bad_xml"]),
        (page(text="<a>" * 100 + "</a>" * 100) + page(), ["bad_xml", "words"]),
        (page(text="a\x0bb") + page(), ["bad_xml", "words"]),
        (page() + page()[:200], ["words", "truncated_record"]),
        (page()[:200] + page(), ["truncated_record", "words"]),
        (page(text="x" * 5000) + page(), ["record_too_large", "words"]),
        (page(text="x" * 3_000_000) + page(), ["record_too_large", "words"]),
        ("<page>" + "x" * 3_000_000, ["record_too_large"]),
        ("<page><page>" + page(), ["truncated_record", "truncated_record", "words"]),
        ("<pages>" + page() + "</pages>", ["words"]),
        ("", ["empty_file"]),
        ("<", ["empty_file"]),
        (HEAD + TAIL, ["empty_file"]),
        ("<posts><row Id='1' /></posts>", ["empty_file"]),
        ("x" * (HEAD_BYTES * 5) + page(), ["unreadable_gap", "words"]),
        (page() + "x" * (HEAD_BYTES * 5) + page(), ["words", "unreadable_gap", "words"]),
        (HEAD + page() + LOST + page() + TAIL, ["words", "unreadable_gap", "words"]),
        (HEAD + LOST + page() + TAIL, ["unreadable_gap", "words"]),
        (HEAD + page() + LOST * 3 + TAIL, ["words", "unreadable_gap"]),
        (HEAD + page() + TAIL + HEAD + page() + TAIL, ["words", "words"]),
        (f"\ufeff<?xml version='1.0'?>\n<!-- A -->\n{HEAD}" + page() + "\n\n<!-- B -->" + page(), ["words", "words"]),
        (page() + "x" + page(), ["words", "unreadable_gap", "words"]),
    ],
)
def test_a_page_costs_itself_only(dump: str, expected: list[str]) -> None:
    assert verdicts(dump) == expected


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_page_without_its_first_tag_is_a_gap(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "dump"
    path.write_bytes((HEAD + LOST + page("B") + TAIL).encode(encoding))
    (gap, drop), (row, _) = read(path.read_bytes())[0]
    assert (gap["record_type"], drop) == ("gap", Drop("unreadable_gap"))
    assert (gap["offset"], row["offset"]) == (0, len((HEAD + LOST + "  ").encode(encoding)))
    assert row["url"] == "https://en.wikipedia.org/wiki/B"
    split = Split(0, "f", str(path), path.stat().st_size, "", "wiki", "mediawiki")
    assert refetch(split, row, CONFIG).changes == ()


def test_the_last_revision_counts() -> None:
    first = "<revision><id>1</id><model>css</model><text>old</text></revision>"
    rows, _ = read(page(text="new", more=first).encode())
    assert (rows[0][0]["text"], json.loads(rows[0][0]["meta"])["revision_id"]) == ("new", 9)


def test_settings() -> None:
    dump = page(ns=1) + page(text="{{dab}} list") + page(text="{{Nūruodis}} list") + page(text="{{a}} list")
    settings = MediaWikiConfig(namespaces=(1, 0), disambiguation_names=("Template:nūruodis",))
    config = CONFIG.model_copy(update={"mediawiki": settings})
    assert verdicts(dump, config) == ["words", "disambiguation", "disambiguation", "list"]
    config = CONFIG.model_copy(update={"mediawiki": MediaWikiConfig(keep_disambiguation=True)})
    assert verdicts(dump, config) == ["other_namespace", "list", "list", "list"]
    config = CONFIG.model_copy(update={"mediawiki": MediaWikiConfig(keep_redirects=True)})
    dump = page(more="<redirect title='B &amp; c' />") + page(more="<redirect />", text="#REDIRECT [[b_c#d|e]]")
    dump += (
        page(text="#перенаправление: [[B]] {{Disambig}}")
        + page(more="<redirect />")
        + page(ns=1, text="#REDIRECT [[B]]")
    )
    assert verdicts(dump, config) == ["A b\n\nB & c", "A b\n\nb c#d", "A b\n\nB", "redirect", "other_namespace"]
    with pytest.raises(ValueError, match=r"mediawiki: expected format = 'mediawiki', got 'jsonl'"):
        SourceConfig.model_validate({"paths": "x", "format": "jsonl", "mediawiki": {"tables": False}})
    assert "mediawiki" not in SourceConfig(paths=("x",)).content()
    chosen = SourceConfig.model_validate({"paths": "x", "mediawiki": {"tables": False}})
    assert chosen.content()["mediawiki"]["tables"] is False
    assert "keep_redirects" not in chosen.content()["mediawiki"]
    kept = SourceConfig.model_validate({"paths": "x", "mediawiki": {"keep_redirects": True}})
    assert kept.content()["mediawiki"]["keep_redirects"] is True


@pytest.mark.parametrize(
    ("base", "prefix"),
    [
        ("https://de.wikipedia.org/wiki/Wikipedia:Hauptseite", "https://de.wikipedia.org/wiki/"),
        ("https://a.org/index.php/Main_Page", "https://a.org/index.php/"),
        ("https://a.org/w/index.php?title=Main_Page", "https://a.org/w/index.php?title="),
        ("Main_Page", None),
        (None, None),
    ],
)
def test_urls(base: str | None, prefix: str | None) -> None:
    assert Wiki(base=base).prefix == prefix


def test_a_dump_that_is_cut_keeps_the_pages_before_the_cut() -> None:
    numbers = [" ".join(str(number * number % 99991) for number in range(at, at + 150)) for at in range(0, 6000, 150)]
    content = (HEAD + "".join(page(text=text) for text in numbers) + TAIL).encode()
    for pack in (gzip.compress, bz2.compress):
        stored = pack(content[:9000]) + pack(content[9000:])
        rows, _ = read(stored[: len(stored) * 3 // 4])
        rules = [drop.rule if drop else "kept" for _, drop in rows]
        assert rules[-1] == "truncated_record"
        assert rules.count("kept") >= 7
        assert [row["record_type"] for row, _ in rows][-1] == "gap"
    first, second = bz2.compress(content[:9000]), bz2.compress(content[9000:])
    rows, _ = read(first[:1000] + b"\0" * 100 + first[1100:] + second)
    rules = [drop.rule if drop else "kept" for _, drop in rows]
    assert (rules.count("bad_gzip"), rules.count("kept") > 20) == (1, True)


@given(st.lists(st.sampled_from([HEAD, TAIL, page(), "<page>", "</page>", "x", "<page", "é"]), max_size=8), st.binary())
def test_no_file_raises_and_no_byte_is_lost(parts: list[str], rest: bytes) -> None:
    content = "".join(parts).encode() + rest
    assert read(content)[1] == len(content)


def test_names_of_dumps(tmp_path: Path) -> None:
    names = ["enwiki-20240101-pages-articles-multistream.xml.bz2", "a-pages-articles1.xml-p1p41242.bz2", "a.xml.bz2"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    found = find_splits(SourceConfig(paths=(f"{tmp_path}/*pages*",)))
    assert [split.format for split in found] == ["mediawiki"] * 2
    with pytest.raises(ConfigError, match="suffix fits no known format"):
        find_splits(SourceConfig(paths=(f"{tmp_path}/*",)))


WIKIPEDIA = SHARED / "sources" / "wikipedia"
needs_samples = pytest.mark.skipif(not WIKIPEDIA.is_dir(), reason=f"no real dumps in {WIKIPEDIA}")


@needs_samples
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("enwiki-pages-articles-part0.xml.bz2", {"kept": 52, "redirect": 52, "disambiguation": 1}),
        ("ltgwiki-pages-articles.xml.bz2", {"kept": 901, "redirect": 147, "other_namespace": 954, "empty_page": 2}),
    ],
)
def test_real_dumps(name: str, expected: dict[str, int]) -> None:
    config = SourceConfig(paths=(str(WIKIPEDIA / name),))
    (split,) = find_splits(config)
    rows = [*open_split(split, open_stream(split), config)]
    assert Counter(drop.rule if drop else "kept" for _, drop in rows) == expected
    assert sum(row["length"] for row, _ in rows) == len(bz2.decompress((WIKIPEDIA / name).read_bytes()))
    for row, _ in (rows[0], rows[-1]):
        assert refetch(split, row, config).changes == ()


@needs_samples
def test_real_pages_without_a_root() -> None:
    with tarfile.open(WIKIPEDIA / "single-pages.tar.gz") as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    for name, content in files.items():
        ((row, drop),) = open_mediawiki(
            Split(0, name, name, len(content), "", "wiki", "mediawiki"), io.BytesIO(content), SourceConfig(paths=("x",))
        )
        assert (drop, row["url"]) == (None, None)
        assert not any(mark in row["text"] for mark in ("{{", "[[", "]]", "<ref", "'''", "{|", "\ufdd1"))
        assert len(row["text"]) > 2000
