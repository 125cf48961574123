"""Record headers: what is read from good and odd ones, and what is distinguished from other bytes."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sources.crawl.http import (
    RECORD_START,
    parse_arc_line,
    parse_date,
    parse_fields,
    parse_warc_header,
    starts_with_record,
)
from tests.support.growth import MOST, growth


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-05-18T01:58:10Z", datetime(2024, 5, 18, 1, 58, 10, tzinfo=UTC)),
        ("2024-05-18T01:58:10.999999Z", datetime(2024, 5, 18, 1, 58, 10, 999_000, UTC)),
        ("2024-05-18T01:58:10.123456789Z", datetime(2024, 5, 18, 1, 58, 10, 123_000, UTC)),
        ("2024-05-18T03:58:10+02:00", datetime(2024, 5, 18, 1, 58, 10, tzinfo=UTC)),
        ("2024-05-18", datetime(2024, 5, 18, tzinfo=UTC)),
        ("20080509190241", datetime(2008, 5, 9, 19, 2, 41, tzinfo=UTC)),
        ("20080509", datetime(2008, 5, 9, tzinfo=UTC)),
        ("0001-01-01T00:00:00+23:00", None),
        ("20081309190241", None),
        ("2024", datetime(2024, 1, 1, tzinfo=UTC)),
        ("2024-05", datetime(2024, 5, 1, tzinfo=UTC)),
        ("2024-13", None),
        ("202405", None),
        ("soon", None),
        ("", None),
    ],
)
def test_date(text, expected):
    assert parse_date(text) == expected


def test_warc_header():
    header = parse_warc_header(
        b"WARC/1.1\r\nWARC-Type: Response\r\nwarc-target-uri: <http://a.com/>\r\nContent-Length : 12\r\n"
        b"WARC-Truncated: length\r\nWARC-Block-Digest: sha1:A\r\nno colon\r\n: no name\r\n\r\n"
    )
    assert (header.kind, header.url, header.length) == ("response", "http://a.com/", 12)
    assert (header.truncated, header.block_digest, header.payload_digest) == ("length", "sha1:A", None)
    assert (header.date, header.content_type, header.arc) == (None, None, False)


@pytest.mark.parametrize("length", [None, "", "-1", "1.5", "0x10", "9" * 16, "many"])
def test_a_header_without_a_length_is_none(length):
    field = "" if length is None else f"Content-Length: {length}\r\n"
    assert parse_warc_header(f"WARC/1.0\r\nWARC-Type: response\r\n{field}\r\n".encode()) is None


def test_fields_fold_and_the_last_of_several_wins():
    block = b"first line: x\nA: 1\n  2\n\t3\nB: x\nb:y\r\nC:\n z\n"
    assert parse_fields(block) == {"a": "1 2 3", "b": "y", "c": "z"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"http://a.com/ 1.2.3.4 20080509190241 text/html 65\n", ("response", "http://a.com/", 65, "text/html")),
        (b"http://a.com/x y 1.2.3.4 20080509190241  3\r\n", ("response", "http://a.com/x y", 3, None)),
        (b"http://a/ ::1 20080509190241 text/html 200 x - 9 f.arc 7\n", ("response", "http://a/", 7, "text/html")),
        (b"filedesc://f.arc 0.0.0.0 20080509 text/plain 73\n", ("arc_header", "filedesc://f.arc", 73, "text/plain")),
        (b"http://a.com/ 1.2.3.4 null text/html 65\n", None),
        (b"http://a.com/ 1.2.3.4 20080509190241 text/html\n", None),
        (b"http://a.com/ 1.2.3.4 20080509190241 text/html 65", None),
    ],
)
def test_arc_line(line, expected):
    header = parse_arc_line(line)
    assert (header and (header.kind, header.url, header.length, header.content_type)) == expected
    assert starts_with_record(line) == (expected is not None)


@pytest.mark.parametrize(
    ("data", "weakly", "strictly"),
    [
        (b"WARC/1.0\r\nWARC-Type: x", True, 0),
        (b"WARC/1.0\nContent-Length: 3", True, 0),
        (b"WARC/0.17\r\nwarc-type: x", True, 0),
        (b"warc/1.0\r\nWARC-Type: x", True, None),
        (b"WARC/1.0\r\nOther: x", True, None),
        (b"WARC/x", False, None),
        (b"see WARC/1.0\r\nWARC-Type: x", False, 4),
        (b"x\nhttp://a.com/ 1.2.3.4 20080509190241 text/html 65\nHTTP", False, 1),
        (b"xhttp://a.com/ 1.2.3.4 20080509190241 text/html 65\n", True, None),
    ],
)
def test_starts(data, weakly, strictly):
    found = RECORD_START.search(data)
    assert (starts_with_record(data), found.start() if found else None) == (weakly, strictly)


@given(st.binary(max_size=200))
def test_no_header_raises(data):
    header = parse_warc_header(b"WARC/1.0\r\nContent-Length: 1\r\n" + data)
    assert header is None or header.length >= 0
    parse_arc_line(b"http://" + data + b" 1.2.3.4 20080509190241 text/html 65\n")


def test_lines_of_a_list_are_one_value():
    coded = b"HTTP/1.0 200\nContent-Encoding: deflate\nTransfer-Encoding: chunked\ncontent-encoding: gzip\n"
    assert parse_fields(coded + b"Transfer-Encoding: chunked\n") == {
        "content-encoding": "deflate , gzip",
        "transfer-encoding": "chunked",
    }
    assert growth(parse_fields, lambda n: b"".join(b"\nContent-Encoding: %d" % k for k in range(n)), 10_000) < MOST


def test_folded_lines_are_one_value_in_linear_time():
    assert parse_fields(b"HTTP/1.0 200\nA:\n b\n \n\tc \nB: x\n  y\nA: z\n") == {"a": "z", "b": "x y"}
    assert parse_fields(b"HTTP/1.0 200\nA: \n b\n \n\tc ") == {"a": "b c"}
    assert growth(parse_fields, lambda n: b"WARC/1.0\nA: b" + b"\n c" * n, 100_000) < MOST
