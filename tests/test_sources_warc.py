"""Archives: known answers of real pages, the account of every byte of real and broken files, and going on at damage."""

import gzip
import hashlib
import io
import json
import tracemalloc
import zlib
from collections import Counter, defaultdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.sources.config import SourceConfig
from pipeline.sources.declare import REASONS
from pipeline.sources.provenance import COLUMNS
from pipeline.sources.stream import HashedStream
from pipeline.sources.warc import open_warc
from pipeline.stage import Drop, Split
from schemas.ids import doc_id

DATA = Path(__file__).parents[1].parent / "shared" / "data" / "warc"
CONFIG = SourceConfig(paths=("x",))
SMALL = SourceConfig(paths=("x",), max_record_bytes=1 << 16, max_page_bytes=1 << 15)
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"needs the archives in {DATA}")
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>page %d</p>"


def split_of(name="test.warc"):
    return Split(0, name, name, 0, "", "web", "warc")


def record(block, kind="response", length=None, end=b"\r\n\r\n", **fields):
    named = {"WARC-Type": kind, "WARC-Target-URI": "http://www.example.co.uk/a", "WARC-Date": "2024-05-18T01:58:10Z"}
    named |= {"Content-Type": "application/http", "Content-Length": len(block) if length is None else length}
    named |= {name.replace("_", "-"): value for name, value in fields.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value is not None)
    return b"WARC/1.0\r\n" + lines.encode("utf-8", "surrogateescape") + b"\r\n" + block + end


def page(number, **fields):
    return record(PAGE % number, **fields)


def read(stored, config=CONFIG, name="test.warc"):
    """The rows of an archive, after checking what holds for every file."""
    stream = HashedStream(io.BytesIO(stored))
    rows = list(open_warc(split_of(name), stream, config))
    position = 0
    for row, drop in rows:
        assert set(row) == set(COLUMNS)
        assert row["offset"] == position
        position += row["length"]
        assert drop is None or drop.rule in REASONS
        assert (drop is None) == (row["_payload"] is not None or row["text"] is not None)
        assert (row["record_type"] == "gap") <= (drop is not None)
    assert position == len(stored)
    assert len({row["doc_id"] for row, _ in rows}) == len(rows)
    assert stream.finish() == (hashlib.sha256(stored).hexdigest(), len(stored))
    return rows


def verdicts(stored, config=CONFIG):
    return [(row["record_type"], drop.rule if drop else "kept") for row, drop in read(stored, config)]


@cache
def manifest():
    lines = (DATA / "manifest.jsonl").read_text().splitlines() if DATA.exists() else []
    return {entry["file"]: entry for entry in map(json.loads, lines)}


@needs_data
@pytest.mark.parametrize("name", ["pages-000.warc.gz", "pages-001.warc.gz", "pages-002.warc.gz"])
def test_every_known_page_comes_out_as_it_was_saved(name):
    with gzip.open(DATA / "pages-index.jsonl.gz", "rt") as index:
        known = {entry["offset"]: entry for entry in map(json.loads, index) if entry["warc"] == name}
    with open(DATA / name, "rb") as stream:
        for row, drop in open_warc(split_of(name), stream, CONFIG):
            if row["record_type"] == "warcinfo":
                continue
            entry = known.pop(row["offset"])
            found = (row["url"], hashlib.sha1(row["_payload"]).hexdigest(), row["page_bytes"], row["_http_charset"])
            assert found == (entry["url"], entry["html_sha1"], entry["html_bytes"], entry["http_charset"] or None)
            assert drop is None
            assert row["doc_id"] == doc_id("web", name, row["offset"])
    assert known == {}


@needs_data
@pytest.mark.parametrize("folder", ["real", "broken"])
def test_every_byte_of_real_and_broken_files_is_accounted_for(folder):
    for name in manifest():
        if name.startswith(f"{folder}/"):
            read((DATA / name).read_bytes())


@needs_data
def test_undamaged_archives_hold_the_records_that_fastwarc_counts():
    for name, entry in manifest().items():
        counted = entry["reader"]["fastwarc"]
        if name.startswith("real/") and counted and "unknown" not in counted:
            kinds = Counter(row["record_type"] for row, _ in read((DATA / name).read_bytes()))
            assert kinds == counted, name


MADE = {
    "made-ok.warc.gz": {"kept": 12},
    "made-plain.warc": {"kept": 12},
    "made-gz-name-but-plain.warc.gz": {"kept": 12},
    "made-single-member.warc.gz": {"kept": 12},
    "made-zstd.warc.zst": {"kept": 12},
    "made-truncated-last.warc.gz": {"kept": 11, "truncated_record": 1},
    "made-truncated-first-8-bytes-left.warc.gz": {"kept": 6, "truncated_record": 1},
    "made-bitrot-member6.warc.gz": {"kept": 11, "bad_gzip": 1},
    "made-garbage-between-members.warc.gz": {"kept": 12, "unreadable_gap": 1},
    "made-zero-padding.warc.gz": {"kept": 12, "unreadable_gap": 1},
    "made-content-length-short.warc": {"kept": 11, "lying_length": 1},
    "made-content-length-short.warc.gz": {"kept": 11, "lying_length": 1},
    "made-content-length-long.warc": {"kept": 11, "lying_length": 1},
    "made-content-length-long.warc.gz": {"kept": 11, "lying_length": 1},
    "made-empty-warc-type.warc.gz": {"kept": 11, "not_a_page": 1},
    # Its status line is three bytes longer than the one its length was written for.
    "made-bad-http-status.warc.gz": {"kept": 11, "lying_length": 1},
    "made-bad-digest.warc.gz": {"kept": 11, "digest_mismatch": 1},
    "made-empty.warc.gz": {"empty_file": 1},
    "made-empty-member.warc.gz": {"empty_file": 1},
    "made-not-a-warc.warc.gz": {"unreadable_gap": 1},
    "made-huge-compressible.warc.gz": {"kept": 2, "page_too_large": 1},
}


@needs_data
def test_damage_that_was_made_costs_what_it_must_and_no_more():
    config = SourceConfig(paths=("x",), verify_digests=True)
    made = [name for name, entry in manifest().items() if entry["kind"] == "made"]
    assert sorted(made) == sorted(f"broken/{name}" for name in MADE)
    for name in made:
        found = Counter(rule for _, rule in verdicts((DATA / name).read_bytes(), config))
        assert found == MADE[name.removeprefix("broken/")], name


@needs_data
def test_an_arc_file_gives_the_pages_of_the_same_crawl_in_warc():
    crawls = [read((DATA / "real" / f"IAH-2008-blackbook.{kind}.gz").read_bytes()) for kind in ("arc", "warc")]
    arc, warc = (
        [(row["url"], row["date"], row["mime"], row["_payload"], drop) for row, drop in rows if row["mime"]]
        for rows in crawls
    )
    assert Counter(drop.rule if drop else "kept" for *_, drop in arc)["kept"] == 94
    assert Counter(map(str, arc)) == Counter(map(str, warc))


@needs_data
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["made-ok.warc.gz", "made-single-member.warc.gz", "made-plain.warc", "made-zstd.warc.zst"]),
    st.lists(
        st.tuples(st.integers(0, 60_000), st.sampled_from("flip cut insert remove".split()), st.binary(max_size=40))
    ),
)
def test_no_damage_loses_a_byte_or_raises(name, damages):
    stored = bytearray((DATA / "broken" / name).read_bytes()[:60_000])
    for position, kind, junk in damages:
        if kind == "flip" and position < len(stored):
            stored[position] ^= 0x10
        elif kind == "cut":
            del stored[max(position, 1000) :]
        elif kind == "insert":
            stored[position:position] = junk
        elif kind == "remove":
            del stored[position : position + len(junk)]
    read(bytes(stored), SMALL)


def test_columns_of_a_page():
    stored = page(1, WARC_Date="2024-05-18T01:58:10.123987Z") + page(2, WARC_Target_URI="<http://[::1]/b>")
    (first, drop), (second, _) = read(stored)
    assert drop is None
    assert (first["source"], first["split"], first["offset"]) == ("web", "test.warc", 0)
    assert (first["url"], first["domain"]) == ("http://www.example.co.uk/a", "example.co.uk")
    assert first["date"] == datetime(2024, 5, 18, 1, 58, 10, 123_000, UTC)
    assert (first["record_type"], first["http_status"], first["mime"]) == ("response", 200, "text/html")
    assert (first["page_bytes"], first["_payload"], first["text"]) == (13, b"<p>page 1</p>", None)
    assert (second["url"], second["domain"]) == ("http://[::1]/b", "[::1]")


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


@needs_data
def test_a_wet_file_gives_its_text():
    kept = [row for row, drop in read((DATA / "real" / "whirlwind.warc.wet.gz").read_bytes()) if drop is None]
    (row,) = kept
    assert (row["record_type"], row["mime"], row["_payload"]) == ("conversion", "text/plain", None)
    assert row["url"] == "https://an.wikipedia.org/wiki/Escopete"
    assert row["page_bytes"] == len(row["text"].encode())
    domains = defaultdict(int)
    domains[row["domain"]] += 1
    assert domains == {"wikipedia.org": 1}
