"""`source.title`: the title of a document as the first line of its text, in every format that has one."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.worker import FusedStages
from pipeline.extract.extract import EXTRACT, with_title
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import open_split
from pipeline.sources.splits import find_splits, open_stream
from pipeline.sources.wiki.names import DISAMBIGUATION
from schemas.config import build_recipe
from tests.support.paths import ROOT

PAGE = b"<page><title> A  title </title><revision><text>Words of the page.</text></revision></page>"
BOOK = b"Title: A title\n\n*** START OF THE PROJECT GUTENBERG EBOOK A TITLE ***\n\nA TITLE\n\nWords of the book."
_PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<title>A title</title><body><p>Words of the site.</p>"
SITE = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n" % (
    len(_PAGE),
    _PAGE,
)


def texts(path: Path, **settings: Any) -> list[tuple[str | None, str]]:
    """Title and text of each document of a file, after the extract stage."""
    values = {"paths": (str(path),), **settings}
    recipe = build_recipe(
        {"source": values, "extract": {"extractor": "all"}}, {"source": SourceConfig, "extract": EXTRACT.config}, ""
    )
    stages = FusedStages((EXTRACT,), recipe, {})
    config = SourceConfig(**values)
    (split,) = find_splits(config)
    rows = [stages(row) for row, drop in open_split(split, open_stream(split), config) if drop is None]
    return [(row["title"], row["text"]) for row in rows]


@pytest.mark.parametrize(
    ("content", "kind", "column", "first_line"),
    [
        (PAGE, "mediawiki", "Words of the page.", "A title\n\nWords of the page."),
        (BOOK, "gutenberg", "A TITLE\n\nWords of the book.", "A TITLE\n\nWords of the book."),
        (SITE, "warc", "Words of the site.", "A title\n\nWords of the site."),
    ],
)
def test_a_title(tmp_path: Path, content: bytes, kind: str, column: str, first_line: str) -> None:
    (tmp_path / "file").write_bytes(content)
    assert texts(tmp_path / "file", format=kind) == [("A title", column)]
    assert texts(tmp_path / "file", format=kind, title="first_line") == [("A title", first_line)]


def test_a_row_without_a_title(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "words"}))
    assert texts(tmp_path / "a.jsonl", title="first_line") == [(None, "words")]


@pytest.mark.parametrize(
    ("title", "text", "expected"),
    [
        ("A", "words", "A\n\nwords"),
        ("A", "a\n\nwords", "a\n\nwords"),
        ("A b", "# A  B\nwords", "# A  B\nwords"),
        ("A", "A b", "A\n\nA b"),
        ("A", "", ""),
    ],
)
def test_with_title(title: str, text: str, expected: str) -> None:
    assert with_title(title, text) == expected


def test_the_setting_enters_the_fingerprint_only_if_it_is_used() -> None:
    assert "title" not in SourceConfig(paths=("x",)).content()
    assert SourceConfig(paths=("x",), title="first_line").content()["title"] == "first_line"


def test_the_documented_names_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    for language, names in DISAMBIGUATION.items():
        assert f"| {language} | {', '.join(names.split('|'))} |" in page
