"""Real pages with the main text that people marked: html, answer, snippets, language, site and fold of each record.

A record of `html_gold` or `html_gold_more` names the WARC record of its page. An extractor that is trained on these
pages is measured by five-fold cross-validation: all pages of a site, that is of a registrable domain, have one fold.
"""

import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastwarc.warc import ArchiveIterator
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

import penstock
from pipeline.extract.charset import decode
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.http import read_response
from pipeline.sources.provenance import domain_of
from tests.support.paths import SHARED

NUM_FOLDS = 5
MORE = "wcxb_more"
"""The set of `html_gold_more`; all others are of `html_gold`."""
SETS: Mapping[str, tuple[str, str]] = {
    **{
        name: (f"html_gold/{name}.jsonl.gz", "warc")
        for name in (
            *("chinese-wce", "daniel", "fundus", "magic-html", "newspaper", "newspaper4k"),
            *("readability", "scrapinghub", "trafilatura", "wcxb"),
        )
    },
    MORE: ("html_gold_more/wcxb.jsonl.gz", "html_gold_more"),
}
"""Set → its file of answers, and the folder of its WARC files, below the folder of real data."""

_ARCHIVED = re.compile(r"https?://web\.archive\.org/web/\w+/(?:https?://)?")
_NO_HOST = ".invalid"
_ANY_PAGE = SourceConfig(paths=("gold",))


@dataclass(frozen=True)
class GoldPage:
    """A page and what people say about its main text."""

    set: str
    """Name in SETS."""
    id: str
    """Id of the record, unique in its set."""
    url: str
    site: str
    """Registrable domain of the page; for a page of unknown origin that of its canonical URL, else the id."""
    fold: int
    """Fold of the site in a cross-validation, in 0..4."""
    language: str | None
    """Code that the origin states, else that of the answer or the snippets as detected; None if there is no answer."""
    page_type: str | None
    """Such as article, forum or product; None if the origin does not state it."""
    html: str
    """The page, decoded as the pipeline decodes it."""
    num_bytes: int
    """Size of the page after HTTP decoding [bytes]."""
    text: str | None
    """The main text; None if there are only snippets, or if the text has no letter and no digit."""
    with_: tuple[str, ...]
    """Snippets that an extraction must contain."""
    without: tuple[str, ...]
    """Snippets that an extraction must not contain."""
    title: str | None
    author: str | None
    date: str | None

    @property
    def key(self) -> str:
        """The set and the id, such as `wcxb/f1c34fd619fc1a51`."""
        return f"{self.set}/{self.id}"


def missing_data(sets: Collection[str] = tuple(SETS), folder: Path = SHARED) -> str | None:
    """Return the reason why the pages cannot be read: the first file that is missing; None if all are there."""
    files = (folder / path for name in sets for path in SETS[name])
    missing = next((path for path in files if not path.exists()), None)
    return missing and f"the gold pages are not beside the project ({missing.relative_to(folder)} is missing)"


def gold_pages(sets: Collection[str] = tuple(SETS), folder: Path = SHARED) -> Iterator[GoldPage]:
    """Yield the pages of the sets, in the order of SETS and of their files.

    `folder`: the folder of real data. Raises FileNotFoundError with the reason of `missing_data`, ValueError for a
    record that is no page.
    """
    if reason := missing_data(sets, folder):
        raise FileNotFoundError(reason)
    for name in SETS:
        if name not in sets:
            continue
        answers, archives = (folder / path for path in SETS[name])
        with gzip.open(answers, "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                yield _page(name, record, read_record(archives / record["warc"], record["offset"]))


def read_record(path: Path, offset: int) -> bytes:
    """Return the block of the WARC record that starts at an offset: an HTTP response."""
    with path.open("rb") as stream:
        stream.seek(offset)
        block: bytes = next(iter(ArchiveIterator(stream, parse_http=False))).reader.read()
        return block


def fold_of(site: str) -> int:
    """Return the fold of a site, in 0..4."""
    return zlib.crc32(site.encode()) % NUM_FOLDS


def site_of(url: str, html: str, record: str) -> str:
    """Return the registrable domain of a page.

    A copy in the Internet Archive has the domain of its original. A host without a domain, such as an IP address, is a
    site itself. A page without a known host (under `.invalid`) has the domain of its canonical URL or `og:url`; without
    one, its site is its record.
    """
    url = _ARCHIVED.sub("http://", url)
    host = urlsplit(url).hostname or _NO_HOST
    if not host.endswith(_NO_HOST):
        return domain_of(url) or host
    tree = HTMLTree.parse(html)
    for selector, attribute in (('link[rel="canonical"]', "href"), ('meta[property="og:url"]', "content")):
        element = tree.document.query_selector(selector)
        if element is not None and (site := domain_of(element.getattr(attribute) or "")):
            return site
    return record


def _page(name: str, record: Mapping[str, Any], block: bytes) -> GoldPage:
    response = read_response(block, _ANY_PAGE)
    if response.body is None:
        raise ValueError(f"{name}/{record['id']}: expected a page, got {response.drop}.")
    html = decode(response.body, response.charset).text
    text = record.get("text") or (_text_of(record["html"]) if "html" in record else None)
    if text is not None and not any(map(str.isalnum, text)):
        text = None
    snippets = [tuple(record.get(kind) or ()) for kind in ("with", "without")]
    site = site_of(record["url"], html, record["id"])
    return GoldPage(
        set=name,
        id=record["id"],
        url=record["url"],
        site=site,
        fold=fold_of(site),
        language=record["lang"] or _language_of(text or " ".join(snippets[0])),
        page_type=record["page_type"],
        html=html,
        num_bytes=len(response.body),
        text=text,
        with_=snippets[0],
        without=snippets[1],
        title=record.get("title"),
        author=record.get("author"),
        date=record.get("date"),
    )


def _text_of(html: str) -> str:
    """Return the whole text of an answer in HTML."""
    tree = HTMLTree.parse(html)
    text: str = extract_plain_text(tree, main_content=False, alt_texts=False, links=False, list_bullets=False)
    return text


def _language_of(text: str) -> str | None:
    return str(penstock.detect_language(text)) if text.strip() else None
