"""Captures that are broken, hostile or no pages at all: what every real crawl holds a little of.

Some must be dropped, some must survive; none may stop a run or take its neighbours with it.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from pipeline.demo_crawl.capture import Capture, Fault, capture_of, http_response
from pipeline.demo_crawl.html import CLEAN
from pipeline.demo_crawl.page import Page, prose
from pipeline.demo_crawl.stock import Stock, title_of
from pipeline.demo_crawl.urls import Urls

HTML = [("Content-Type", "text/html; charset=utf-8")]
NESTED_TAGS = 100_000
BIG_PAGE_BYTES = 20_000_000
FAULTS: dict[Fault, tuple[str, ...]] = {
    "corrupt": ("bad_gzip",),
    "truncated": ("truncated_record", "bad_gzip"),
    "length_too_small": ("lying_length",),
    "length_too_large": ("lying_length", "truncated_record"),
    "no_length": ("bad_header",),
    "garbage": ("unreadable_gap",),
}
"""Rules that may drop a record, by what is wrong with it in its file."""


def broken_captures(stock: Stock, urls: Urls, rng: random.Random) -> Iterator[Capture]:
    """Every broken capture, a few of each kind."""
    for _ in range(3):
        yield from _not_pages(urls, rng)
        yield from _odd_bytes(stock, urls, rng)
        yield from _wrong_encodings(stock, urls, rng)
    yield from _hostile(stock, urls)
    for fault, rules in FAULTS.items():
        capture = capture_of(good_page(stock, urls, rng))
        yield replace(capture, kind=f"record_{fault}", rules=rules, expected="drop", fault=fault)


def good_page(stock: Stock, urls: Urls, rng: random.Random, min_chars: int = 1200) -> Page:
    """A plain page of good text in a layout that adds nothing to it."""
    topic, paragraphs = stock.paragraphs(min_chars)
    return Page(urls.new(topic), title_of(topic, rng), prose(paragraphs), rng.choice(CLEAN))


def _not_pages(urls: Urls, rng: random.Random) -> Iterator[Capture]:
    lost = b"<!DOCTYPE html><html><head><title>Not found</title></head><body><h1>Not found</h1></body></html>"
    url = urls.new("missing")
    yield _dropped("not_found", url, http_response(url, lost, HTML, status="404 Not Found"), "http_status")
    url, target = urls.new("moved"), ("Location", urls.new("here"))
    yield _dropped("redirect", url, http_response(url, b"", [*HTML, target], status="301 Moved"), "http_status")
    url = urls.new("busy")
    yield _dropped("server_error", url, http_response(url, lost, HTML, status="503 Unavailable"), "http_status")
    url, pdf = urls.new("paper"), b"%PDF-1.7\n" + rng.randbytes(4000) + b"\n%%EOF\n"
    yield _dropped("pdf", url, http_response(url, pdf, [("Content-Type", "application/pdf")]), "not_html")
    url, image = urls.new("picture"), b"\x89PNG\r\n\x1a\n" + rng.randbytes(2000)
    yield _dropped("image", url, http_response(url, image, [("Content-Type", "image/png")]), "not_html")
    url = urls.new("blank")
    yield _dropped("empty_body", url, http_response(url, b"", HTML), "empty_page")
    url, script = (
        urls.new("app"),
        b'<html><head><script>start("app");</script></head><body><div id="root"></div></body></html>',
    )
    yield _dropped("no_text", url, http_response(url, script, HTML), "no_text")
    yield _dropped("no_http_header", urls.new("bare"), b"<html><body>no header</body></html>", "no_http_header")


def _odd_bytes(stock: Stock, urls: Urls, rng: random.Random) -> Iterator[Capture]:
    """Pages with a few bytes that are no UTF-8, and with NUL bytes: both have text that is worth keeping."""
    for kind, odd in (("invalid_utf8", b"\xff\xfe\x80"), ("nul_bytes", b"\x00")):
        capture = capture_of(good_page(stock, urls, rng))
        head, _, body = capture.response.partition(b"<p>")
        spots = sorted(rng.sample([spot for spot, byte in enumerate(body) if byte == 0x20], 4), reverse=True)
        for spot in spots:
            body = body[:spot] + odd + body[spot:]
        html = (head + b"<p>" + body).partition(b"\r\n\r\n")[2]
        yield replace(capture, kind=kind, response=http_response(capture.url, html, HTML))


def _wrong_encodings(stock: Stock, urls: Urls, rng: random.Random) -> Iterator[Capture]:
    """Bodies that are not encoded as their header says: plain under `gzip`, gzip under `br`, gzip cut short."""
    capture = capture_of(good_page(stock, urls, rng))
    html = capture.response.partition(b"\r\n\r\n")[2]
    plain = http_response(capture.url, html, [*HTML, ("Content-Encoding", "gzip")])
    yield replace(capture, kind="encoding_undone", response=plain)
    url = urls.new("mislabelled")
    zipped = http_response(url, html, HTML, "gzip").replace(b"Content-Encoding: gzip", b"Content-Encoding: br")
    yield _dropped("encoding_wrong", url, zipped, "bad_encoding")
    url = urls.new("short")
    yield _dropped("encoding_cut", url, http_response(url, html, HTML, "gzip")[:-400], "bad_encoding")


def _hostile(stock: Stock, urls: Urls) -> Iterator[Capture]:
    """A page of 100,000 nested elements and one of 20 MB, each small in its file."""
    text = stock.paragraphs(1000)[1][0].encode()
    url = urls.new("deep")
    deep = b"<html><body>" + b"<div>" * NESTED_TAGS + text + b"</div>" * NESTED_TAGS + b"</body></html>"
    yield _dropped("nested_tags", url, http_response(url, deep, HTML), "too_deep")
    url, paragraph = urls.new("huge"), b"<p>" + text + b"</p>\n"
    huge = b"<html><body>" + paragraph * (BIG_PAGE_BYTES // len(paragraph) + 1) + b"</body></html>"
    yield _dropped("huge_page", url, http_response(url, huge, HTML), "page_too_large", "record_too_large")


def _dropped(kind: str, url: str, response: bytes, *rules: str) -> Capture:
    return Capture(url, response, kind, "drop", rules)
