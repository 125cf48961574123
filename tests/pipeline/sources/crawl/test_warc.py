"""Archives made by hand: the columns and the verdict of every kind of record, and going on at damage."""

import bz2
import gzip
import hashlib
import random
import tracemalloc
import zlib
from collections import Counter
from datetime import UTC, datetime

import brotli
import lz4.frame
import pytest
import zstandard

from pipeline.engine.stage import Drop
from pipeline.sources.compression import DECODED_A_BYTE, NESTED_FACTOR
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.http import BODY_FREE
from schemas.ids import doc_id
from tests.support.tiny_archive import PAGE, page, read, record, verdicts


def test_columns_of_a_page():
    stored = page(1, WARC_Date="2024-05-18T01:58:10.123987Z") + page(2, WARC_Target_URI="<http://[::1]/b>")
    (first, drop), (second, _) = read(stored)
    assert drop is None
    assert (first["source"], first["split"], first["offset"]) == ("web", "test.warc", 0)
    assert (first["url"], first["domain"]) == ("http://www.example.co.uk/a", "example.co.uk")
    assert first["date"] == datetime(2024, 5, 18, 1, 58, 10, 123_000, UTC)
    assert (first["record_type"], first["http_status"], first["mime"]) == ("response", 200, "text/html")
    assert (first["page_bytes"], first["_payload"], first["text"]) == (13, b"<p>page 1</p>", None)
    assert (second["url"], second["domain"]) == ("http://[::1]/b", None)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (record(b"x", "warcinfo"), [("warcinfo", "not_a_page")]),
        (record(b"x", "request") + record(b"x", "METADATA"), [("request", "not_a_page"), ("metadata", "not_a_page")]),
        (page(1, kind="revisit"), [("revisit", "not_a_page")]),
        (record(b"1 2", Content_Type="text/dns"), [("response", "not_a_page")]),
        (record(b"<p>x", "resource", Content_Type="text/html"), [("resource", "kept")]),
        (record(b"x", "resource", Content_Type="image/png"), [("resource", "not_html")]),
        (record(b"<p >x", "resource", Content_Type=None), [("resource", "kept")]),
        (record(b"words", "conversion", Content_Type="text/plain"), [("conversion", "kept")]),
        (record(b" \n", "conversion", Content_Type="text/plain"), [("conversion", "empty_page")]),
        (record(b"x", "conversion", Content_Type="image/png"), [("conversion", "not_html")]),
        (page(1, Content_Type=None), [("response", "kept")]),
        (page(1, length="abc"), [("gap", "bad_header")]),
        (page(1, length=-1) + page(2), [("gap", "bad_header"), ("response", "kept")]),
        (b"WARC/1.0\r\nno end", [("gap", "bad_header")]),
        (page(1, end=b"") + page(2, end=b"\n"), [("response", "kept"), ("response", "kept")]),
        (page(1) + b"junk" + page(2), [("response", "kept"), ("gap", "unreadable_gap"), ("response", "kept")]),
        (page(1, end=b"") + b"junk" + page(2), [("response", "lying_length"), ("response", "kept")]),
        (page(1)[:-30], [("response", "truncated_record")]),
        (page(1)[:-30] + page(2), [("response", "lying_length"), ("response", "kept")]),
        (page(1, length=1 << 20) + page(2), [("response", "lying_length"), ("response", "kept")]),
        (page(1, length=0, end=b""), [("response", "lying_length")]),
        (page(1).replace(b"\r\n", b"\n").replace(b"Content-Length: 57", b"Content-Length: 54"), [("response", "kept")]),
        (page(1).replace(b"WARC/1.0", b"warc/0.17"), [("response", "kept")]),
        (b"junk" + page(1), [("gap", "unreadable_gap"), ("response", "kept")]),
        (b"", [("gap", "empty_file")]),
    ],
)
def test_verdicts_do_not_depend_on_compression(stored, expected):
    assert verdicts(stored) == expected
    assert verdicts(gzip.compress(stored)) == expected


def test_a_huge_length_in_plain_bytes_costs_one_record():
    stored = page(1, length=1 << 40) + page(2)
    assert verdicts(stored) == [("response", "lying_length"), ("response", "kept")]
    assert verdicts(b"\r\n\r\n") == [("gap", "unreadable_gap")]


def test_records_of_one_member_are_parts_of_it_and_the_last_one_carries_its_length():
    packed = gzip.compress(page(1) + page(2) + page(3))
    rows = [row for row, _ in read(packed + gzip.compress(page(4)))]
    assert [(row["offset"], row["length"]) for row in rows[:3]] == [(0, 0), (0, 0), (0, len(packed))]
    assert rows[3]["offset"] == len(packed)
    expected = [doc_id("web", "test.warc", 0, part) for part in range(3)]
    assert [row["doc_id"] for row in rows] == [*expected, doc_id("web", "test.warc", len(packed), 0)]


def test_a_record_may_span_members_but_not_the_start_of_another():
    stored = page(1)
    spanning = gzip.compress(stored[:100]) + gzip.compress(stored[100:]) + gzip.compress(page(2))
    assert verdicts(spanning) == [("response", "kept"), ("response", "kept")]
    cut = gzip.compress(stored[:-20]) + gzip.compress(page(2))
    assert verdicts(cut) == [("response", "lying_length"), ("response", "kept")]


@pytest.mark.parametrize("size", [600, 5_000, 100_000])
def test_records_after_a_cut_member_without_compression_are_read_once(size):
    large = record(b"<p>" + b"words " * 50_000, "resource", Content_Type="text/html")
    cut = gzip.compress(large, 0)[:size]
    members = [gzip.compress(page(1) + page(2), 0), gzip.compress(page(3), 0)]
    rows = read(cut + b"".join(members))
    assert [(row["offset"], row["length"], drop is None) for row, drop in rows] == [
        (0, size, False),
        (size, 0, True),
        (size, len(members[0]), True),
        (size + len(members[0]), len(members[1]), True),
    ]
    assert len({row["doc_id"] for row, _ in rows}) == 4


def test_a_first_byte_that_flipped_costs_one_record():
    members = [gzip.compress(page(number)) for number in range(3)]
    stored = b"\x1e" + b"".join(members)[1:]
    assert verdicts(stored) == [("gap", "unreadable_gap"), ("response", "kept"), ("response", "kept")]


def test_a_checksum_that_does_not_match_drops_the_record():
    member = bytearray(gzip.compress(page(1)))
    member[-8] ^= 1
    (row, drop), _ = read(bytes(member) + gzip.compress(page(2)))
    assert (row["url"], drop) == ("http://www.example.co.uk/a", Drop("bad_gzip"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_record_limit_on_both_sides(pack):
    config = SourceConfig(paths=("x",), max_record_bytes=2000)
    blocks = [b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n".ljust(size, b"a") for size in (2000, 2001, 100)]
    rows = read(b"".join(pack(record(block)) for block in blocks), config)
    assert [drop for _, drop in rows] == [None, Drop("record_too_large", 2001.0, 2000.0), None]
    assert verdicts(pack(record(blocks[1], "request")), config) == [("request", "not_a_page")]


@pytest.mark.parametrize("length", [600_000_000, 50_000_000, 0])
def test_memory_is_bounded_whatever_a_member_unpacks_to(length):
    packer = zlib.compressobj(9, wbits=31)
    head = record(b"", length=length, end=b"")
    parts = [packer.compress(head), *(packer.compress(bytes(1 << 20)) for _ in range(60)), packer.flush()]
    stored = b"".join(parts) + gzip.compress(page(2))
    tracemalloc.start()
    try:
        found = verdicts(stored)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [("response", "lying_length"), ("response", "kept")]
    assert peak < 12 << 20


def test_headers_with_nul_bytes_and_invalid_utf8():
    stored = page(1, WARC_Target_URI="http://a.com/\udcff\0x", X="\udcfe", WARC_Date="soon")
    ((row, drop),) = read(stored)
    assert (row["url"], row["domain"], row["date"], drop) == ("http://a.com/\ufffd\0x", "a.com", None, None)


def test_truncated_records_by_setting():
    stored = page(1, WARC_Truncated="length")
    assert verdicts(stored) == [("response", "kept")]
    assert verdicts(stored, SourceConfig(paths=("x",), drop_truncated=True)) == [("response", "truncated_record")]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("WARC_Block_Digest", "sha1:{sha1}", "kept"),
        ("WARC_Block_Digest", "SHA-256:{sha256}", "kept"),
        ("WARC_Block_Digest", "sha1:3I42H3S6NNFQ2MSVX7XZKYAYSCX5QBYJ", "digest_mismatch"),
        ("WARC_Block_Digest", "crc32:00000000", "kept"),
        ("WARC_Payload_Digest", "md5:{payload}", "kept"),
        ("WARC_Payload_Digest", "md5:{payload}0", "digest_mismatch"),
    ],
)
def test_digests_by_setting(field, value, rule):
    block = PAGE % 1
    digests = {"sha1": hashlib.sha1(block).hexdigest(), "sha256": hashlib.sha256(block).hexdigest().upper()}
    value = value.format(payload=hashlib.md5(b"<p>page 1</p>").hexdigest(), **digests)
    stored = record(block, **{field: value})
    assert verdicts(stored, SourceConfig(paths=("x",), verify_digests=True)) == [("response", rule)]
    assert verdicts(stored) == [("response", "kept")]


def test_arc_versions_and_the_space_in_a_url():
    body = b"HTTP/1.0 200 OK\nContent-Type: text/html\n\n<p>arc</p>"
    version = b"1 0 Test\nURL IP-address Archive-date Content-type Archive-length\n"
    lines = [
        b"filedesc://t.arc 0.0.0.0 20080619093439 text/plain %d\n%s\n" % (len(version), version),
        b"http://a.com/x y 1.2.3.4 20080509190241 text/html %d\n%s\n" % (len(body), body),
        b"http://b.com/ 1.2.3.4 20080509190241 text/html 200 - - 99 t.arc %d\n%s\n" % (len(body), body),
        b"http://c.com/ 1.2.3.4 20080509190241  3\nabc\n",
        b"dns:d.com 1.2.3.4 20080509190241 text/dns 3\nabc\n",
    ]
    rules = ["not_a_page", "kept", "kept", "no_http_header", "not_a_page"]
    for stored in (b"".join(lines), b"".join(map(gzip.compress, lines)), gzip.compress(b"".join(lines))):
        rows = read(stored, name="t.arc")
        assert [drop.rule if drop else "kept" for _, drop in rows] == rules
        assert rows[0][0]["record_type"] == "arc_header"
        assert (rows[1][0]["url"], rows[1][0]["date"]) == (
            "http://a.com/x y",
            datetime(2008, 5, 9, 19, 2, 41, tzinfo=UTC),
        )
    damaged = lines[0] + b"junk\n" + lines[1] + lines[2][:-9] + b"\n" + lines[1]
    rules = Counter(rule for _, rule in verdicts(damaged))
    assert rules == {"lying_length": 2, "kept": 2}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_header_of_a_record_has_at_most_64_kilobytes(pack):
    def stored(size):
        return pack(page(1, WARC_Target_URI=f"http://a.com/{'x' * size}")) + pack(page(2))

    (first, drop), (second, _) = read(stored(60_000))
    assert (drop, len(first["url"])) == (None, 60_013)
    (first, drop), (second, _) = read(stored(70_000))
    assert (first["record_type"], first["url"], drop) == ("gap", None, Drop("bad_header"))
    assert second["_payload"] == b"<p>page 2</p>"


def test_a_body_decodes_to_a_bounded_multiple_of_its_bytes():
    bomb = zstandard.ZstdCompressor().compress(b"<p>" + bytes(1 << 22))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: zstd\r\n\r\n"
    ((_, drop),) = read(gzip.compress(record(head + bomb)))
    assert drop == Drop("decoded_too_large", None, float(BODY_FREE + DECODED_A_BYTE * len(bomb)))


def coded(body: bytes, number: int, level: int = 9) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n"
    return record(head + gzip.compress(b"<p>%d</p>" % number + body, level, mtime=0))


PACKS = [gzip.compress, zstandard.ZstdCompressor().compress, bz2.compress, lz4.frame.compress]


@pytest.mark.parametrize("pack", PACKS)
def test_pages_in_gzip_that_a_frame_repeats_do_not_grow(pack):
    page = coded(b"word " * 1_000_000, 1)
    stored = pack(page * 1_000)
    rows = read(stored)
    kept = sum(drop is None for _, drop in rows)
    assert kept <= NESTED_FACTOR * len(stored) // len(gzip.compress(b"word " * 1_000_000))
    assert {drop.rule for _, drop in rows if drop} == {"decoded_too_large"}


@pytest.mark.parametrize("pack", PACKS)
def test_pages_in_gzip_are_kept_beside_frames_that_repeat_them(pack):
    rng = random.Random(4)
    words = [b"%x " % rng.getrandbits(100) for _ in range(300)]
    pages = [coded(b" ".join(rng.choices(words, k=1000)), number) for number in range(100)]
    zeros = [record(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + bytes(1 << 20))]
    bombs = [coded(b"word " * 300_000, number) * 5 for number in range(20)]
    for parts in ([*zeros, *bombs, *pages], [*pages, *bombs, *zeros, *pages]):
        for stored in (b"".join(map(pack, parts)), pack(b"".join(parts))):
            rows = read(stored)
            kept = [row["_payload"] for row, drop in rows if drop is None and len(row["_payload"]) < 1 << 20]
            assert len(kept) >= sum(part in pages for part in parts)


def test_a_page_that_is_only_wrapped_in_gzip_is_kept():
    pages = b"".join(coded(b"word " * 4_000, number, level=0) for number in range(50))
    assert [drop for _, drop in read(gzip.compress(pages))] == [None] * 50


def test_long_headers_do_not_count_as_repeated_pages():
    cookies = b"Set-Cookie: a=deleted; expires=Thu, 01-Jan-1970 00:00:00 GMT; path=/\r\n" * 80
    body = gzip.compress(b"<p>" + b" ".join(b"%x" % (number % 99_991) for number in range(0, 10**7, 3_001)) * 15)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n"
    assert len(gzip.decompress(body)) > 8 * len(body)
    assert read(gzip.compress(record(head + cookies + b"\r\n" + body)))[0][1] is None


@pytest.mark.parametrize("pack", PACKS)
def test_pages_that_were_decoded_and_kept_their_field_do_not_count(pack):
    """A crawler decodes gzip and stores brotli as it is received; all pages have the field."""
    rng = random.Random(8)
    words = [b"%x" % rng.getrandbits(60) for _ in range(2_000)]

    def page_of(coding: bytes, body: bytes) -> bytes:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: " + coding
        return record(head + b"\r\n\r\n" + body)

    template = b"<p>" + b" ".join(rng.choices(words, k=900))
    plain = [page_of(b"gzip", template + b" %d" % number) for number in range(300)]
    coded = [brotli.compress(b"<p>" + b" ".join(rng.choices(words, k=300)) * 12) for _ in range(20)]
    stored = pack(b"".join([*plain, *(page_of(b"br", body) for body in coded)]))
    assert [drop for _, drop in read(stored) if drop is not None] == []


@pytest.mark.parametrize("pack", PACKS)
def test_repeated_pages_leave_the_bound_of_later_bytes_to_later_pages(pack):
    rng = random.Random(9)
    again = coded(b"word " * 3_000 + b" ".join(b"%x" % rng.getrandbits(60) for _ in range(300)), 0) * 2_000
    pages = [
        coded(b" ".join(b"%x" % rng.getrandbits(60) for _ in range(500)) + b" and" * 80_000, number)
        for number in range(60)
    ]
    rows = read(pack(again + b"".join(pages)))
    lost = sum(drop is not None for _, drop in rows[2_000:])
    assert lost <= 8  # those of the 32 KiB that had been read ahead
