"""The links in one file: a WAT file, a file of Reddit submissions with their scores, or the XML dump of a wiki.

Links of a wiki's articles are those to other sites, as wikitext spells them: `[http://… text]`, addresses that stand
for themselves, and those in parameters of templates such as `{{cite web |url=http://…}}`. Sources: Common Crawl, WAT
format (ia-web-commons); the fields of Reddit submissions in Pushshift's dumps; MediaWiki, Help:Links, external links.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

from pipeline.engine.stage import Drop
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import FrameReader
from pipeline.sources.crawl.warc import RECORD_STARTS, read_records
from pipeline.sources.crawl.window import DecodedWindow
from pipeline.sources.lines import LineReader, parse_object
from pipeline.sources.provenance import domain_of, encodable
from pipeline.sources.splits import WAT
from pipeline.sources.wiki.mediawiki import read_articles
from schemas.urls import url_key

REDDIT = re.compile(r"(?:\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|bz2))?|(?:^|/)RS_[\w.-]+)$", re.IGNORECASE)
DUMP = re.compile(r"\.xml(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE)
MAX_RECORD_BYTES = 32 << 20
MAX_LINKS = 10_000
"""Maximum number of links of one page that are written."""
MAX_TEXT_CHARS, MAX_URL_CHARS = 1_000, 4_096
_WEB = re.compile(r"https?://", re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_EXTERNAL = re.compile(
    rf"(?P<open>\[)?(?<![\w/])(?P<url>https?://[^\s\[\]<>\"|{{}}]{{1,{MAX_URL_CHARS}}}+)"
    rf"(?(open)[ \t]*+(?P<text>[^\[\]\n]{{0,{MAX_TEXT_CHARS}}}+))",
    re.IGNORECASE,
)
_PUNCTUATION = ".,;:!?'"


@dataclass
class LinkCounts:
    """What was read and written; records read = pages + records left out, by cause."""

    records: int = 0
    pages: int = 0
    """Records with a list of links, submissions, and articles."""
    links: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Records without links, by cause: `no_html`, `no_link`, `bad_json`, or the reason of the source stage for damaged
    bytes and for pages of a wiki that are no articles."""
    links_left_out: Counter[str] = field(default_factory=Counter)
    """Links by cause: `same_domain`, `not_web`, `no_domain`, `too_long`, `over_limit`."""

    def add(self, other: "LinkCounts") -> None:
        """Add the counts of another file."""
        self.records += other.records
        self.pages += other.pages
        self.links += other.links
        self.left_out += other.left_out
        self.links_left_out += other.links_left_out


def is_read(name: str) -> bool:
    """Return True if the links of a file with this name are read."""
    return any(kind.search(name) for kind in (WAT, REDDIT, DUMP))


def read_links(name: str, stream: ByteStream, internal: bool, counts: LinkCounts) -> Iterator[dict[str, Any]]:
    """Yield the links in a file as rows of LINKS, in its order, and add to `counts`. Damage is counted."""
    read = _wat_pages if WAT.search(name) else _articles if DUMP.search(name) else _submissions
    for links in read(stream, counts):
        counts.pages += 1
        for number, row in enumerate(links):
            cause = "over_limit" if number >= MAX_LINKS else _problem(row, internal)
            if cause is not None:
                counts.links_left_out[cause] += 1
                continue
            counts.links += 1
            row["url_key"] = url_key(row["url"])
            yield row


def _problem(row: dict[str, Any], internal: bool) -> str | None:
    if not _WEB.match(row["url"]):
        return "not_web"
    if len(row["url"]) > MAX_URL_CHARS:
        return "too_long"
    row["domain"] = domain_of(row["url"])
    if row["domain"] is None:
        return "no_domain"
    return "same_domain" if row["domain"] == row["from_domain"] and not internal else None


def _row(url: str, page: str | None, text: Any, rel: Any = None, score: Any = None) -> dict[str, Any]:
    number = score if isinstance(score, int) and -(1 << 31) <= score < 1 << 31 else None
    return {
        "url": encodable(url),
        "url_key": None,
        "domain": None,
        "from_url": page,
        "from_domain": domain_of(page) if page else None,
        "text": _words(text),
        "rel": _words(rel),
        "score": number,
    }


def _words(text: Any) -> str | None:
    return " ".join(encodable(text).split())[:MAX_TEXT_CHARS] or None if isinstance(text, str) else None


# WAT: a metadata record in JSON for each record of a WARC file.


def _wat_pages(stream: ByteStream, counts: LinkCounts) -> Iterator[Iterator[dict[str, Any]]]:
    for record in read_records(DecodedWindow(FrameReader(stream, RECORD_STARTS)), MAX_RECORD_BYTES):
        counts.records += 1
        if record.header is None or record.drop is not None:
            counts.left_out[record.drop.rule if record.drop else "unreadable_gap"] += 1
            continue
        value = parse_object(record.block) if record.header.kind == "metadata" else {}
        if value is None:
            counts.left_out["bad_json"] += 1
            continue
        html = _path(value, "Envelope", "Payload-Metadata", "HTTP-Response-Metadata", "HTML-Metadata")
        page = _path(value, "Envelope", "WARC-Header-Metadata").get("WARC-Target-URI") or record.header.url
        if not html or not isinstance(page, str):
            counts.left_out["no_html"] += 1
            continue
        yield _page_links(html, encodable(page) if len(page) <= MAX_URL_CHARS else None)


def _page_links(html: dict[str, Any], page: str | None) -> Iterator[dict[str, Any]]:
    declared = _path(html, "Head").get("Base")
    base = _absolute(page or "", declared) if isinstance(declared, str) else page or ""
    if len(base) > MAX_URL_CHARS:
        base = ""  # Joining takes time linear in its length for each link. Relative links are left out.
    links = html.get("Links")
    for link in links if isinstance(links, list) else ():
        # Other paths are images, scripts, forms and the like.
        if not isinstance(link, dict) or link.get("path") != "A@/href" or not isinstance(link.get("url"), str):
            continue
        yield _row(_absolute(base, link["url"]), page, link.get("text"), link.get("rel"))


def _absolute(base: str, url: str) -> str:
    try:
        return urljoin(base, url.strip())
    except ValueError:
        return ""


def _path(value: Any, *names: str) -> dict[str, Any]:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


# Reddit: a submission in JSON on each line.


def _submissions(stream: ByteStream, counts: LinkCounts) -> Iterator[Iterator[dict[str, Any]]]:
    for _, line in LineReader(FrameReader(stream, None), MAX_RECORD_BYTES):
        if not isinstance(line, Drop) and not line.strip():
            continue
        counts.records += 1
        value = None if isinstance(line, Drop) else parse_object(line)
        if isinstance(line, Drop) or value is None:
            counts.left_out[line.rule if isinstance(line, Drop) else "bad_json"] += 1
        elif value.get("is_self") or not isinstance(value.get("url"), str):
            counts.left_out["no_link"] += 1
        else:
            page = value.get("permalink")
            shown = f"https://www.reddit.com{encodable(page)}" if isinstance(page, str) else "https://www.reddit.com/"
            yield iter([_row(value["url"].strip(), shown, value.get("title"), None, value.get("score"))])


# Dumps of wikis.


def _articles(stream: ByteStream, counts: LinkCounts) -> Iterator[Iterator[dict[str, Any]]]:
    for article in read_articles(stream, MAX_RECORD_BYTES):
        counts.records += 1
        if isinstance(article, Drop):
            counts.left_out[article.rule] += 1
        else:
            yield _external_links(*article)


def _external_links(page: str | None, wikitext: str) -> Iterator[dict[str, Any]]:
    for link in _EXTERNAL.finditer(_COMMENT.sub("", wikitext)):
        url = link["url"]
        if not link["open"]:  # punctuation after a URL without brackets is not part of it
            url = url.rstrip(_PUNCTUATION)
            url = url.rstrip(")" + _PUNCTUATION) if "(" not in url else url
        yield _row(url, page, link["text"])
