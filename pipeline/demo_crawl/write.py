"""Writers of captures as WARC 1.0 files, one gzip member per record, and of the truth files that list planted captures.

Source: ISO 28500:2009. Random choices depend on the seed and the captures alone, and neither clock nor host name is
used, so equal captures give equal bytes.
"""

import base64
import gzip
import hashlib
import random
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import brotli

from pipeline.demo_crawl.html import DemoPage, Expected, render
from schemas.ids import canonical_json

# A capture: the HTTP response as a crawler receives it, with its label, which is the expected verdict.

Fault = Literal["none", "corrupt", "truncated", "length_too_small", "length_too_large", "no_length", "garbage"]
"""The damage of the record in its file; see `stored_record`."""
FIRST_DATE = datetime(2024, 1, 1, tzinfo=UTC)
SERVERS = ("nginx", "nginx/1.24.0", "Apache/2.4.57 (Debian)", "Apache", "Caddy", "Microsoft-IIS/10.0", "lighttpd/1.4")


@dataclass(frozen=True)
class Capture:
    """An HTTP response to write to a WARC file, with its expected verdict and the rules that may drop it."""

    url: str
    response: bytes
    """Status line, header and body."""
    kind: str
    """Kind of planted page; `page` is an ordinary page, which has no line in the truth file."""
    expected: Expected = "keep"
    rules: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    fault: Fault = "none"


def capture_of(page: DemoPage) -> Capture:
    """Return the capture of a page: the HTML in an HTTP response, and the expected verdict of the page."""
    html = render(page).encode(page.charset, "xmlcharrefreplace")
    mime = "text/html" if page.http_charset is None else f"text/html; charset={page.http_charset}"
    response = http_response(page.url, html, [("Content-Type", mime)], page.encoding)
    names = ("language", "charset", "http_charset", "meta_charset", "encoding")
    details = {name: getattr(page, name) for name in names} | dict(page.details)
    return Capture(page.url, response, page.kind, page.expected, page.rules, details)


def http_response(
    url: str, body: bytes, headers: list[tuple[str, str]], encoding: str = "identity", status: str = "200 OK"
) -> bytes:
    """Return an HTTP response as bytes: status line, header, and the body in `encoding`, one of ENCODINGS."""
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
    """Derive the capture date of a page from its URL: one of the first 300 days of 2024."""
    return FIRST_DATE + timedelta(seconds=zlib.crc32(url.encode()) % (300 * 86400))


def chunked(body: bytes) -> bytes:
    """Return the body in chunked transfer encoding, in chunks of 1,024 to 8,191 bytes. Source: RFC 9112, 7.1."""
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
"""Encoding → the function that encodes a body; `+` joins content and transfer encoding."""


NUM_FILES = 4
REQUEST_STEP = 8
"""One capture in this many has a request record before it."""
NAMESPACE = uuid.UUID("5f0c2d7e-8a35-5c7b-9a0e-3d5a7c1e6b42")
USER_AGENT = "penstock-demo/1.0 (+https://www.penrose.example/bot)"


@dataclass(frozen=True)
class PlantedCapture:
    """One planted capture: its position in a WARC file, and its expected verdict."""

    url: str
    record_id: str
    file: str
    offset: int
    """Start of the gzip member in the file [bytes]."""
    length: int
    """Length of the gzip member, which can be truncated [bytes]."""
    kind: str
    expected: str
    """`keep`, `drop` or `either`; of an original and its copies, which have one `group`, any may be the survivor."""
    rules: tuple[str, ...]
    """Rules that may drop the capture, the intended one first."""
    details: dict[str, Any]
    """Further fields that depend on the kind: group and true similarity of copies, charsets, personal data."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of the capture's line in `truth.jsonl`."""
        position = {"url": self.url, "record_id": self.record_id, "file": self.file, "offset": self.offset}
        label = {"length": self.length, "kind": self.kind, "expected": self.expected, "rules": list(self.rules)}
        return self.details | position | label


@dataclass(frozen=True)
class Truth:
    """The content of the truth files of a demo crawl."""

    files: tuple[str, ...]
    num_responses: int
    """Number of response records, including broken ones."""
    num_pages: int
    """Number of ordinary pages, which should all be kept."""
    planted: tuple[PlantedCapture, ...]
    num_requests: int = 0
    """Number of request records."""

    @property
    def num_records(self) -> int:
        """Number of rows that a run reads: pages, planted captures, requests, and a warcinfo record for each file."""
        return self.num_pages + len(self.planted) + self.num_requests + len(self.files)

    @property
    def counts(self) -> dict[str, int]:
        """Number of planted captures by kind."""
        return dict(sorted(Counter(item.kind for item in self.planted).items()))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the summary file, `truth.json`."""
        numbers = {"num_responses": self.num_responses, "num_pages": self.num_pages, "planted": self.counts}
        return {"files": list(self.files), **numbers}


def write_crawl(out: Path, captures: list[Capture], seed: int) -> Truth:
    """Write the captures in shuffled order to WARC files in `out`, together with `truth.jsonl` and `truth.json`."""
    out.mkdir(parents=True, exist_ok=True)
    planted: list[PlantedCapture] = []
    num_requests = 0
    files = _spread(captures, random.Random(f"order {seed}"))
    for number, content in enumerate(files):
        name = f"demo-{number:03d}.warc.gz"
        file = bytearray(_member(_warcinfo(name)))
        for capture in content:
            if int(_digest(capture.url.encode()), 16) % REQUEST_STEP == 0 and capture.fault == "none":
                file += _member(_request(capture))
                num_requests += 1
            offset, data = len(file), stored_record(capture)
            file += data
            if capture.kind != "page":
                planted.append(_planted(capture, name, offset, len(data)))
        _write_if_new(out / name, bytes(file))
    names = tuple(f"demo-{number:03d}.warc.gz" for number in range(len(files)))
    num_pages = sum(capture.kind == "page" for capture in captures)
    num_responses = sum(capture.fault != "garbage" for capture in captures)
    truth = Truth(names, num_responses, num_pages, tuple(planted), num_requests)
    lines = b"".join(canonical_json(item.to_json()) + b"\n" for item in planted)
    _write_if_new(out / "truth.jsonl", lines)
    _write_if_new(out / "truth.json", canonical_json(truth.to_json()) + b"\n")
    return truth


def _write_if_new(path: Path, data: bytes) -> None:
    # The modification time is part of the identity of an input, so an unchanged file keeps it.
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)


def stored_record(capture: Capture) -> bytes:
    """Return the bytes of a capture's response record, with the damage that `capture.fault` names."""
    if capture.fault == "garbage":
        return random.Random(capture.url).randbytes(700)
    length = len(capture.response)
    match capture.fault:
        case "length_too_small":
            length //= 2
        case "length_too_large":
            length += 5000
    fields = [("WARC-Target-URI", capture.url), ("WARC-IP-Address", f"192.0.2.{1 + len(capture.url)}")]
    fields += [("WARC-Payload-Digest", _sha1(capture.response.partition(b"\r\n\r\n")[2]))]
    fields += [("WARC-Block-Digest", _sha1(capture.response)), ("Content-Type", "application/http; msgtype=response")]
    fields += [("Content-Length", str(length))] if capture.fault != "no_length" else []
    head = [("WARC-Record-ID", f"<{_record_id(capture)}>"), ("WARC-Date", _iso(capture.url))]
    data = _member(_record("response", head + fields, capture.response))
    if capture.fault == "corrupt":
        middle = len(data) // 2
        return data[:middle] + bytes(byte ^ 0x55 for byte in data[middle : middle + 64]) + data[middle + 64 :]
    return data[: len(data) * 3 // 5] if capture.fault == "truncated" else data


def _spread(captures: list[Capture], rng: random.Random) -> list[list[Capture]]:
    """Divide the captures among the WARC files, in random order, and return the captures of each file.

    Truncated captures are at the end of the last file.
    """
    whole = [capture for capture in captures if capture.fault == "none"]
    rng.shuffle(whole)
    files = [whole[number::NUM_FILES] for number in range(NUM_FILES)]
    for number, capture in enumerate(capture for capture in captures if capture.fault not in ("none", "truncated")):
        content = files[number % NUM_FILES]
        content.insert(len(content) * (number + 1) // 8, capture)
    files[-1] += [capture for capture in captures if capture.fault == "truncated"]
    return files


def _planted(capture: Capture, file: str, offset: int, length: int) -> PlantedCapture:
    return PlantedCapture(
        url=capture.url,
        record_id=_record_id(capture),
        file=file,
        offset=offset,
        length=length,
        kind=capture.kind,
        expected=capture.expected,
        rules=capture.rules,
        details=dict(capture.details),
    )


def _record(kind: str, fields: list[tuple[str, str]], block: bytes) -> bytes:
    head = "".join(f"{name}: {value}\r\n" for name, value in [("WARC-Type", kind), *fields])
    return f"WARC/1.0\r\n{head}\r\n".encode() + block + b"\r\n\r\n"


def _warcinfo(name: str) -> bytes:
    lines = ("software: penstock demo-crawl", "format: WARC File Format 1.0", "robots: obey", "isPartOf: demo crawl")
    block = "".join(f"{line}\r\n" for line in lines).encode()
    fields = [
        ("WARC-Record-ID", f"<{uuid.uuid5(NAMESPACE, name).urn}>"),
        ("WARC-Date", f"{FIRST_DATE:%Y-%m-%dT%H:%M:%SZ}"),
    ]
    fields += [
        ("WARC-Filename", name),
        ("Content-Type", "application/warc-fields"),
        ("Content-Length", str(len(block))),
    ]
    return _record("warcinfo", fields, block)


def _request(capture: Capture) -> bytes:
    _, _, host, path = capture.url.split("/", 3)
    block = f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {USER_AGENT}\r\nAccept: text/html\r\n\r\n".encode()
    identity = uuid.uuid5(NAMESPACE, f"request {capture.url}").urn
    fields = [("WARC-Record-ID", f"<{identity}>"), ("WARC-Date", _iso(capture.url)), ("WARC-Target-URI", capture.url)]
    fields += [("WARC-Concurrent-To", f"<{_record_id(capture)}>")]
    fields += [("Content-Type", "application/http; msgtype=request"), ("Content-Length", str(len(block)))]
    return _record("request", fields, block)


def _record_id(capture: Capture) -> str:
    return uuid.uuid5(NAMESPACE, capture.url).urn


def _member(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)


def _iso(url: str) -> str:
    return f"{date_of(url):%Y-%m-%dT%H:%M:%SZ}"


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _sha1(data: bytes) -> str:
    return "sha1:" + base64.b32encode(bytes.fromhex(_digest(data))).decode()
