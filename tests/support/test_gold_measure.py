"""The gold pages and the measure of extraction, on values that are computed by hand."""

import gzip
import json
import zlib
from pathlib import Path

import pytest

from tests.support.gold_pages import SETS, fold_of, gold_pages, missing_data, site_of
from tests.support.paths import SHARED

CANONICAL = '<html><head><link rel="canonical" href="https://www.example.co.uk/a"></head><body>x</body></html>'
OPEN_GRAPH = '<html><head><meta property="og:url" content="https://news.example.de/a"></head><body>x</body></html>'
RELATIVE = '<html><head><link rel="canonical" href="/a"></head><body>x</body></html>'


@pytest.mark.parametrize(
    ("url", "html", "expected"),
    [
        ("https://www.bbc.co.uk/news/1", CANONICAL, "bbc.co.uk"),
        ("https://web.archive.org/web/20120216182711/http://www.stol.it/a", "", "stol.it"),
        ("https://web.archive.org/web/20130307194448/the-pain.net/2008", "", "the-pain.net"),
        ("https://web.archive.org/", "", "archive.org"),
        ("http://192.0.2.7/a", "", "192.0.2.7"),
        ("http://readability.saved.invalid/1", CANONICAL, "example.co.uk"),
        ("http://readability.saved.invalid/1", OPEN_GRAPH, "example.de"),
        ("http://readability.saved.invalid/1", RELATIVE, "0123abcd"),
        ("http://readability.saved.invalid/1", "", "0123abcd"),
    ],
)
def test_site(url: str, html: str, expected: str) -> None:
    assert site_of(url, html, "0123abcd") == expected


def test_fold_of_a_site() -> None:
    assert [fold_of(site) for site in ("bbc.co.uk", "stol.it", "example.de")] == [
        zlib.crc32(b"bbc.co.uk") % 5,
        zlib.crc32(b"stol.it") % 5,
        zlib.crc32(b"example.de") % 5,
    ]
    assert {fold_of(f"{number}.example") for number in range(100)} == {0, 1, 2, 3, 4}


def test_missing_pages_are_named(tmp_path: Path) -> None:
    reason = "the gold pages are not beside the project (html_gold/daniel.jsonl.gz is missing)"
    assert missing_data(("daniel",), tmp_path) == reason
    with pytest.raises(FileNotFoundError, match=r"html_gold/daniel\.jsonl\.gz is missing"):
        next(gold_pages(("daniel",), tmp_path))


def test_pages_of_the_real_data(shared_data: Path) -> None:
    if reason := missing_data(("newspaper4k", "readability", "wcxb")):
        pytest.skip(reason)
    pages = list(gold_pages(("readability", "newspaper4k")))
    assert [page.set for page in pages] == ["newspaper4k"] * 9 + ["readability"] * 42
    assert len({page.key for page in pages}) == 51
    assert sum(page.url.split("/")[2].endswith(".invalid") and page.site == page.id for page in pages) == 18
    assert all(page.fold == fold_of(page.site) and page.text and not page.with_ for page in pages)
    assert {page.language for page in pages if page.set == "newspaper4k"} == {"ar", "en", "es", "ja", "lv", "zh"}
    first = next(gold_pages(("wcxb",)))
    lines = gzip.decompress((SHARED / SETS["wcxb"][0]).read_bytes()).splitlines()
    record = json.loads(lines[0])
    assert (first.key, first.site, first.language) == ("wcxb/f1c34fd619fc1a51", "spaceotechnologies.com", "en")
    assert (first.text, first.with_, first.without) == (record["text"], (*record["with"],), (*record["without"],))
    assert (first.page_type, first.title, first.date) == ("article", record["title"], record["date"])
    assert first.html.count("<p") > 10
