"""HTTP responses: decoding in every order, quirks that real archives have, and limits on both sides."""

import gzip
import io
import zlib

import brotli
import pytest
from fastwarc.stream_io import ZstdWriter
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.stage import Drop
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.http import read_response, split_content_type

HTML = "<!doctype html><title>Wörter</title><p>Text</p>".encode()
CONFIG = SourceConfig(paths=("x",), max_page_bytes=1000)


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def zstd(data):
    out = io.BytesIO()
    with ZstdWriter(out) as writer:
        writer.write(data)
    return out.getvalue()


def chunked(data, size=7, end=b"0\r\n\r\n"):
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + end


def response(body, content_type="text/html", status=b"HTTP/1.1 200 OK", **fields):
    named = {"Content-Type": content_type} | {name.replace("_", "-"): value for name, value in fields.items()}
    lines = [f"{name}: {value}".encode() for name, value in named.items() if value is not None]
    return b"\r\n".join([status, *lines, b"", body])


@pytest.mark.parametrize(
    ("block", "body"),
    [
        (response(HTML), HTML),
        (response(gzip.compress(HTML, mtime=0), Content_Encoding="gzip"), HTML),
        (response(gzip.compress(HTML, mtime=0), Content_Encoding="X-GZIP"), HTML),
        (response(gzip.compress(HTML[:9], mtime=0) + gzip.compress(HTML[9:], mtime=0), Content_Encoding="gzip"), HTML),
        (response(gzip.compress(HTML, mtime=0) + b"padding", Content_Encoding="gzip"), HTML),
        (response(zlib.compress(HTML), Content_Encoding="deflate"), HTML),
        (response(raw_deflate(HTML), Content_Encoding="deflate"), HTML),
        (response(brotli.compress(HTML), Content_Encoding="br"), HTML),
        (response(zstd(HTML), Content_Encoding="zstd"), HTML),
        (response(zstd(b"") * 9_000 + zstd(HTML), Content_Encoding="zstd"), HTML),
        (response(chunked(HTML), Transfer_Encoding="chunked"), HTML),
        (response(chunked(HTML, end=b""), Transfer_Encoding="chunked"), HTML),
        (response(b"%020x\r\n" % len(HTML) + HTML + b"\r\n0\r\n\r\n", Transfer_Encoding="chunked"), HTML),
        (response(chunked(HTML, end=b"0\r\nLink: <x>\r\n\r\n"), Transfer_Encoding="chunked"), HTML),
        (response(chunked(gzip.compress(HTML, mtime=0)), Transfer_Encoding="gzip, chunked"), HTML),
        (response(chunked(gzip.compress(HTML, mtime=0)), Content_Encoding="gzip", Transfer_Encoding="chunked"), HTML),
        (response(brotli.compress(gzip.compress(HTML, mtime=0)), Content_Encoding="gzip,br"), HTML),
        # Decoded by the crawler, with the old headers left in place.
        (response(HTML, Content_Encoding="gzip", Transfer_Encoding="chunked"), HTML),
        (response(gzip.compress(HTML, mtime=0), Content_Encoding="gzip\r\nContent-Encoding: identity"), HTML),
        (response(chunked(HTML), Transfer_Encoding="chunked\r\nTransfer-Encoding: chunked"), HTML),
        (response(HTML, Content_Encoding="deflate"), HTML),
        (response(HTML, Content_Encoding="br"), HTML),
        (response(HTML + b"\n", Content_Encoding="br"), HTML + b"\n"),
        (response(brotli.compress(HTML) + b"\r\n", Content_Encoding="br"), HTML),
        (response(gzip.compress(HTML, mtime=0), Content_Encoding='"gzip"'), HTML),
        (response(gzip.compress(HTML, mtime=0), Content_Encoding="gzip;q=1.0"), HTML),
        (response(HTML, Content_Encoding="zstd"), HTML),
        # Names that are no coding.
        (response(HTML, Content_Encoding="utf-8"), HTML),
        (response(HTML, Content_Encoding="identity, none"), HTML),
        # Line feeds only, a doubled carriage return, a folded field, a status without a reason.
        (response(HTML).replace(b"\r\n", b"\n"), HTML),
        (response(HTML).replace(b"\r\n", b"\r\r\n"), HTML),
        (response(HTML, X_Long="a\r\n b"), HTML),
        (response(HTML, status=b"HTTP/2 200"), HTML),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + response(HTML), HTML),
        (response(HTML, content_type=None), HTML),
        (response(b"\xef\xbb\xbf \n <HTML ><b>", content_type=None), b"\xef\xbb\xbf \n <HTML ><b>"),
        (response(b"\0\xff\xfe", content_type="application/xhtml+xml"), b"\0\xff\xfe"),
    ],
)
def test_body(block, body):
    page = read_response(block, CONFIG)
    assert (page.drop, page.body, page.status) == (None, body, 200)


@pytest.mark.parametrize(
    ("value", "mime", "charset"),
    [
        (None, None, None),
        ("", None, None),
        ("TEXT/HTML", "text/html", None),
        (' text/html ; Charset = "UTF-8"', "text/html", "UTF-8"),
        ("text/html, text/html", "text/html", None),
        ("text/html,text/html; charset=gbk", "text/html", "gbk"),
        ("text/html; charset=gbk, text/html", "text/html", "gbk"),
        ("text/html; charset=gbk, text/plain", "text/plain", None),
        ("text/plain, text/html", "text/html", None),
        ("text/html, */*", "text/html", None),
        ("text/html charset=gbk", "text/html", "gbk"),
        ('"text/html"', "text/html", None),
        ("*/*", None, None),
        ("unknown/unknown", None, None),
        ("html", None, None),
        ('application/xhtml+xml;profile="a,b"', "application/xhtml+xml", None),
    ],
)
def test_content_types_are_read_as_by_browsers(value: str | None, mime: str | None, charset: str | None) -> None:
    assert split_content_type(value) == (mime, charset)


@pytest.mark.parametrize("value", ["*/*", "unknown/unknown", "html"])
def test_a_page_of_an_unknown_type_is_recognised_by_its_first_bytes(value: str) -> None:
    assert read_response(response(HTML, content_type=value), CONFIG).body == HTML
    assert read_response(response(b"GIF89a", content_type=value), CONFIG).drop.rule == "not_html"


@pytest.mark.parametrize(
    ("block", "rule"),
    [
        (b"", "no_http_header"),
        (b"<html>", "no_http_header"),
        (b"ICY 200 OK\r\n\r\nx", "no_http_header"),
        (b"HTTP/1.1 garbage\r\n\r\nx", "bad_http"),
        (b"HTTP/1.1 20\r\n\r\nx", "bad_http"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5 + response(HTML), "http_status"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" + HTML, "http_status"),
        (b"HTTP/1.1 2000 OK\r\n\r\nx", "bad_http"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\nx", "bad_http"),
        (response(HTML, status=b"HTTP/1.1 404 Not Found"), "http_status"),
        (response(HTML, status=b"HTTP/1.1 201 Created"), "http_status"),
        (response(HTML, content_type="image/png"), "not_html"),
        (response(b"plain words", content_type=None), "not_html"),
        (response(b"<htmlx", content_type=None), "not_html"),
        (response(b"PK\3\4", content_type=""), "not_html"),
        (response(b""), "empty_page"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html", "empty_page"),
        (response(gzip.compress(b"", mtime=0), Content_Encoding="gzip"), "empty_page"),
        (response(b"\x01\x02\x03", Content_Encoding="gzip"), "bad_encoding"),
        (response(gzip.compress(HTML, mtime=0)[:-9], Content_Encoding="gzip"), "bad_encoding"),
        (response(gzip.compress(HTML, mtime=0)[:-5] + b"\0\0\0\0\0", Content_Encoding="gzip"), "bad_encoding"),
        (response(zlib.compress(HTML)[:-9], Content_Encoding="deflate"), "bad_encoding"),
        (response(brotli.compress(HTML)[:-4], Content_Encoding="br"), "bad_encoding"),
        (response(zstd(HTML)[:-4], Content_Encoding="zstd"), "bad_encoding"),
        (response(zstd(b"") * 10_000 + zstd(HTML), Content_Encoding="zstd"), "bad_encoding"),
        (response(b"\x1f\x9d\x90", Content_Encoding="compress"), "bad_encoding"),
        (response(HTML, Content_Encoding="gzip,gzip,gzip,gzip,gzip"), "bad_encoding"),
        (response(chunked(HTML)[:-20], Transfer_Encoding="chunked"), "bad_encoding"),
        (response(b"5\r\nhelloXX7\r\n", Transfer_Encoding="chunked"), "bad_encoding"),
    ],
)
def test_drop(block, rule):
    page = read_response(block, CONFIG)
    assert (page.drop.rule, page.body) == (rule, None)


@pytest.mark.parametrize(
    ("encode", "name"),
    [
        (bytes, ""),
        (gzip.compress, "gzip"),
        (zlib.compress, "deflate"),
        (raw_deflate, "deflate"),
        (brotli.compress, "br"),
        (zstd, "zstd"),
    ],
)
def test_page_limit_holds_for_every_coding(encode, name):
    kept = read_response(response(encode(b"a" * 1000), Content_Encoding=name), CONFIG)
    assert (kept.drop, kept.body) == (None, b"a" * 1000)
    large = read_response(response(encode(b"a" * 1001), Content_Encoding=name), CONFIG)
    assert large.drop == Drop("page_too_large", 1001.0 if not name else None, 1000.0)


@pytest.mark.parametrize(("encode", "name"), [(gzip.compress, "gzip"), (brotli.compress, "br"), (zstd, "zstd")])
def test_a_bomb_is_not_unpacked(encode, name):
    nested = response(encode(encode(bytes(3_000_000))), Content_Encoding=f"{name}, {name}")
    assert read_response(nested, CONFIG).drop == Drop("page_too_large", None, 1000.0)


def test_statuses_and_media_types_follow_the_settings():
    config = SourceConfig(paths=("x",), http_statuses=(200, 404), mime_types=("text/plain",))
    block = response(b"words", content_type="text/plain", status=b"HTTP/1.1 404 Gone")
    assert read_response(block, config).body == b"words"
    assert read_response(response(HTML), config).drop == Drop("not_html")
    assert read_response(response(HTML, status=b"HTTP/1.0 500 No"), config).drop == Drop("http_status", 500.0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (None, None)),
        ("", (None, None)),
        ("Text/HTML", ("text/html", None)),
        ("text/html; charset=UTF-8", ("text/html", "UTF-8")),
        ("text/html;Charset = 'gb2312'; x=y", ("text/html", "gb2312")),
        ('text/html; a=b; charset="koi8-r"', ("text/html", "koi8-r")),
        ("text/html; charset=", ("text/html", None)),
        ("; charset=latin1", (None, "latin1")),
    ],
)
def test_split_content_type(value, expected):
    assert split_content_type(value) == expected


@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate", "br", "zstd", "chunked", "compress", ""]))
def test_no_body_raises(body, coding):
    page = read_response(response(body, Content_Encoding=coding), CONFIG)
    assert (page.drop is None) == (page.body is not None)
