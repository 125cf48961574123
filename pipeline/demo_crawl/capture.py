"""A capture: the HTTP response as a crawler received it, with the label of what was planted in it."""

import gzip
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import brotli

from pipeline.demo_crawl.html import render
from pipeline.demo_crawl.page import Expected, Page

Fault = Literal["none", "corrupt", "truncated", "length_too_small", "length_too_large", "no_length", "garbage"]
"""What is wrong with the record in its file; see `write.stored`."""
FIRST_DATE = datetime(2024, 1, 1, tzinfo=UTC)
SERVERS = ("nginx", "nginx/1.24.0", "Apache/2.4.57 (Debian)", "Apache", "Caddy", "Microsoft-IIS/10.0", "lighttpd/1.4")


@dataclass(frozen=True)
class Capture:
    """A response to be written, and its label."""

    url: str
    response: bytes
    """Status line, header and body."""
    kind: str
    """What was planted; `page` is an ordinary page that no line of the truth file names."""
    expected: Expected = "keep"
    rules: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    fault: Fault = "none"


def capture_of(page: Page) -> Capture:
    """The response that serves a page."""
    html = render(page).encode(page.charset, "xmlcharrefreplace")
    mime = "text/html" if page.http_charset is None else f"text/html; charset={page.http_charset}"
    response = http_response(page.url, html, [("Content-Type", mime)], page.encoding)
    names = ("language", "charset", "http_charset", "meta_charset", "encoding")
    details = {name: getattr(page, name) for name in names} | dict(page.details)
    return Capture(page.url, response, page.kind, page.expected, page.rules, details)


def http_response(
    url: str, body: bytes, headers: list[tuple[str, str]], encoding: str = "identity", status: str = "200 OK"
) -> bytes:
    """Status line, header and body of a response, the body encoded as one of ENCODINGS says."""
    rng = random.Random(f"http {url}")
    sent = ENCODINGS[encoding](body)
    coding, _, transfer = encoding.partition("+") if encoding != "chunked" else ("identity", "", "chunked")
    fields = [("Date", date_of(url).strftime("%a, %d %b %Y %H:%M:%S GMT")), ("Server", rng.choice(SERVERS)), *headers]
    if coding != "identity":
        fields.append(("Content-Encoding", coding))
    fields.append(("Transfer-Encoding", transfer) if transfer else ("Content-Length", str(len(sent))))
    more = (("Cache-Control", "max-age=600"), ("X-Powered-By", "PHP/8.2.7"), ("Vary", "Accept-Encoding"))
    fields += [pair for pair in more if rng.random() < 0.4]
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + sent


def date_of(url: str) -> datetime:
    """When a URL was captured: in the first 300 days of 2024, by its name, so that nothing depends on the clock."""
    return FIRST_DATE + timedelta(seconds=zlib.crc32(url.encode()) % (300 * 86400))


def chunked(body: bytes) -> bytes:
    """The body in chunks of 1,024 to 8,191 bytes. Source: RFC 9112, section 7.1."""
    rng = random.Random(len(body))
    parts, position = [], 0
    while position < len(body):
        chunk = body[position : position + rng.randrange(1024, 8192)]
        parts.append(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        position += len(chunk)
    return b"".join(parts) + b"0\r\n\r\n"


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, 6, mtime=0)


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "identity": bytes,
    "gzip": _gzip,
    "br": lambda body: brotli.compress(body, quality=5),
    "deflate": zlib.compress,
    "chunked": chunked,
    "gzip+chunked": lambda body: chunked(_gzip(body)),
}
"""The function from a body to what goes over the wire, by name; `+` joins content and transfer encoding."""
