"""JSON lines and Parquet: every line and row comes out once, with where it lies, whatever the file's state."""

import ast
import bz2
import gzip
import io
import json
import re
import subprocess
import sys
from datetime import UTC, date, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastwarc.stream_io import ZstdWriter
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.engine.stage import Drop, Split
from pipeline.sources import provenance
from pipeline.sources import rows as rows_module
from pipeline.sources.config import SourceConfig
from pipeline.sources.provenance import COLUMNS
from pipeline.sources.rows import is_number
from pipeline.sources.splits import HashedStream
from pipeline.sources.tables.jsonl_parquet import MAX_TEXT_BYTES, find_row_groups, open_jsonl, open_parquet
from tests.support.paths import ROOT
from tests.support.tiny_archive import record

CONFIG = SourceConfig(paths=("x",), max_page_bytes=40, max_record_bytes=1 << 10)
GOOD = b'{"text": "words", "url": "http://www.a.co.uk/1"}'


def zstd(data):
    out = io.BytesIO()
    with ZstdWriter(out) as writer:
        writer.write(data)
    return out.getvalue()


def read(stored, opener=open_jsonl, config=CONFIG):
    """The rows of a file, after checking that they follow each other without a hole."""
    split = Split(0, "f", "f", len(stored), "", "books", "jsonl")
    rows = list(opener(split, HashedStream(io.BytesIO(stored)), config))
    position = 0
    for row, drop in rows:
        assert set(row) == set(COLUMNS)
        assert row["offset"] == position
        position += row["length"]
        assert (drop is None) == (row["text"] is not None)
    assert len({row["doc_id"] for row, _ in rows}) == len(rows)
    return rows, position


def verdicts(stored, opener=open_jsonl):
    return [drop.rule if drop else row["text"] for row, drop in read(stored, opener)[0]]


READ = """
import io, resource, sys
from pipeline.engine.stage import Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import open_split
from pipeline.sources.splits import open_stream
size = __import__("os").path.getsize(sys.argv[1])
split = Split(0, "f", sys.argv[1], size, "", "web", sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rules = {}
for row, drop in open_split(split, open_stream(split), SourceConfig(paths=("x",))):
    rule = drop.rule if drop else "kept"
    rules[rule] = rules.get(rule, 0) + 1
print(rules, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def used(path, format_name="parquet"):
    """The verdicts of a file, and the memory that reading it takes at most [MiB], in a process of its own."""
    call = [sys.executable, "-c", READ, str(path), format_name]
    rules, memory = subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True).stdout.rsplit(" ", 1)
    return ast.literal_eval(rules), int(memory)


def test_a_small_table_of_one_huge_text_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge"
    texts = pa.array(["x" * (MAX_TEXT_BYTES + (16 << 20))], pa.large_string())
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", use_dictionary=False)
    del texts
    assert path.stat().st_size < 20_000
    rules, memory = used(path)
    assert rules == {"page_too_large": 1}
    assert memory < 64


def test_rows_that_share_a_large_entry_of_a_dictionary_are_read_a_few_at_a_time(tmp_path):
    path = tmp_path / "shared"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 48, pa.int32()), ["x" * (20 << 20)])
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 20_000
    rules, memory = used(path)
    assert rules == {"page_too_large": 48}
    assert memory < 4 * (MAX_TEXT_BYTES >> 20)


def test_chunks_of_one_byte_take_a_few_bytes_of_memory(tmp_path):
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n"
    path = tmp_path / "a.warc"
    path.write_bytes(record(block + b"1\r\nx\r\n" * (1 << 20) + b"0\r\n\r\n"))
    rules, memory = used(path, "warc")
    assert rules == {"kept": 1}
    assert memory < 6 * path.stat().st_size >> 20


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd, bz2.compress])
def test_a_line_is_found_again_at_its_offset(pack):
    lines = [
        json.dumps({"text": f"text {number} ü", "url": f"http://h{number}.com/"}).encode() for number in range(500)
    ]
    content = b"\n".join(lines)
    half = len(content) // 2
    rows, size = read(pack(content[:half]) + pack(content[half:]))
    assert size == len(content)
    for number, (row, drop) in enumerate(rows):
        assert drop is None
        assert content[row["offset"] : row["offset"] + row["length"]].rstrip(b"\n") == lines[number]
        assert (row["text"], row["domain"]) == (f"text {number} ü", f"h{number}.com")
        assert (row["record_type"], row["page_bytes"]) == ("row", len(row["text"].encode()))
        assert (row["source"], row["_payload"], row["mime"]) == ("books", None, None)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (GOOD, "words"),
        (b"\xef\xbb\xbf" + GOOD + b"\r", "words"),
        (b'{"text": "a\\u0000b"}', "a\ufffdb"),
        (b'{"text": "a\\ud83d\\ude00b"}', "a\U0001f600b"),
        (b'{"text": "a\\ud800b\\udc00"}', "a\ufffdb\ufffd"),
        (b'{"text": "' + b"a" * 40 + b'"}', "a" * 40),
        (b'{"text": "' + b"a" * 41 + b'"}', "page_too_large"),
        (b'{"text": "' + "ü".encode() * 21 + b'"}', "page_too_large"),
        (b'{"text": "' + b"a" * 1012 + b'"}', "page_too_large"),
        (b'{"text": "' + b"a" * 1013 + b'"}', "record_too_large"),
        (b'{"text": " \\n\\u3000"}', "empty_page"),
        (b'{"text": ""}', "empty_page"),
        (b'{"text": null}', "no_text_field"),
        (b'{"text": 5}', "no_text_field"),
        (b'{"Text": "x"}', "no_text_field"),
        (b'{"text": "x"', "bad_line"),
        (b'["text"]', "bad_line"),
        (b'{"text": "\xff"}', "bad_line"),
        (b"words", "bad_line"),
        (b"\0", "bad_line"),
        (b"[" * 1000, "bad_line"),
        (b'{"n": ' + b"9" * 900 + b', "text": "x"}', "x"),
    ],
)
def test_a_line_costs_itself_only(line, found):
    assert verdicts(GOOD + b"\n" + line + b"\n" + GOOD) == ["words", found, "words"]
    assert verdicts(line) == [found]


def test_a_number_too_long_to_convert_and_deep_nesting_are_bad_lines():
    config = SourceConfig(paths=("x",), max_record_bytes=1 << 20)
    lines = b"\n".join([b'{"n": ' + b"9" * 5000 + b"}", b"[" * 200_000, GOOD])
    assert [drop for _, drop in read(lines, config=config)[0]] == [Drop("bad_line"), Drop("bad_line"), None]


def test_empty_lines_are_no_rows():
    rows, size = read(b"\n \n" + GOOD + b"\n\n\r\n" + GOOD + b"\n\n")
    assert [(row["offset"], row["length"]) for row, _ in rows] == [
        (0, 3 + len(GOOD) + 4),
        (7 + len(GOOD), 2 + len(GOOD)),
    ]
    assert size == 9 + 2 * len(GOOD)
    assert verdicts(b"\n\n") == verdicts(b"") == verdicts(gzip.compress(b"")) == ["empty_file"]


def test_url_field_and_the_id_that_stands_in_for_it():
    config = SourceConfig(paths=("x",), text_field="t", url_field="u", id_field="n")
    lines = (
        b'{"t":"x","u":"http://b.org/","n":1}\n{"t":"x","u":"","n":7}\n{"t":"x","u":[1],"n":2}\n{"t":"x","u":"\\ud800"}'
    )
    rows = [row for row, _ in read(lines, config=config)[0]]
    assert [(row["url"], row["domain"]) for row in rows] == [
        ("http://b.org/", "b.org"),
        ("7", None),
        (None, None),
        ("\ufffd", None),
    ]


@pytest.mark.parametrize("lost", [8, 12])
def test_a_compressed_file_that_is_cut_keeps_its_whole_lines(lost):
    member = gzip.compress(GOOD + b"\n" + GOOD + b"\n", mtime=0)
    rows, size = read(member + gzip.compress(GOOD + b"\n" + b'{"text": "end"}')[:-lost])
    assert [drop.rule if drop else row["text"] for row, drop in rows][:3] == ["words"] * 3
    assert rows[-1][1] == Drop("truncated_record", float(len(gzip.compress(GOOD + b"\n" + b'{"text": "end"}')) - lost))
    assert (rows[-1][0]["record_type"], rows[-1][0]["length"]) == ("gap", 0)
    assert size <= 4 * len(GOOD)


def test_junk_between_members_is_a_gap_of_no_length():
    member = gzip.compress(GOOD + b"\n")
    rows, size = read(member + b"junk" + member)
    assert [drop for _, drop in rows] == [None, Drop("unreadable_gap", 4.0), None]
    assert [row["length"] for row, _ in rows] == [len(GOOD) + 1, 0, len(GOOD) + 1]
    assert size == 2 * len(GOOD) + 2


@given(st.lists(st.binary(max_size=60), max_size=12), st.sampled_from([bytes, gzip.compress]))
def test_no_line_raises_and_no_byte_is_lost(lines, pack):
    content = b"\n".join(lines)
    _, size = read(pack(content))
    assert size == len(content) or content[:3] in (b"\x1f\x8b\x08", b"\x28\xb5\x2f", b"BZh", b"\x04\x22\x4d")


def parquet(table, **options):
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def test_parquet_rows_have_their_numbers():
    texts = [f"text {number}" if number % 3 else None for number in range(100)]
    urls = [f"http://h{number}.com/" if number % 2 else None for number in range(100)]
    table = pa.table({"other": range(100), "text": texts, "url": urls, "id": [f"id{number}" for number in range(100)]})
    rows, num_rows = read(parquet(table, row_group_size=30), open_parquet)
    assert num_rows == 100
    assert [row["offset"] for row, _ in rows] == list(range(100))
    assert [row["text"] for row, _ in rows] == texts
    assert [drop for _, drop in rows] == [None if text else Drop("no_text_field") for text in texts]
    assert [row["url"] for row, _ in rows[:3]] == ["id0", "http://h1.com/", "id2"]


def test_parquet_without_a_text_column_or_with_another_type():
    assert verdicts(parquet(pa.table({"words": ["a", "b"]})), open_parquet) == ["no_text_field"] * 2
    assert verdicts(parquet(pa.table({"text": [b"\xff"]})), open_parquet) == ["no_text_field"]
    assert verdicts(parquet(pa.table({"text": pa.array(["a", "a"]).dictionary_encode()})), open_parquet) == ["a", "a"]
    assert verdicts(parquet(pa.table({"text": pa.array([], pa.string())})), open_parquet) == ["empty_file"]
    assert verdicts(parquet(pa.table({"text": ["", "a\0", "b" * 41]})), open_parquet) == [
        "empty_page",
        "a\ufffd",
        "page_too_large",
    ]


def test_parquet_with_invalid_utf8_costs_no_row():
    text = pa.array([b"ok", b"\xff!", None]).view(pa.string())
    assert verdicts(parquet(pa.table({"text": text})), open_parquet) == ["ok", "\ufffd!", "no_text_field"]


def test_parquet_that_cannot_be_opened_is_one_gap():
    stored = parquet(pa.table({"text": ["a"]}))
    for damaged in (stored[:-1], stored[4:-9], b"PAR1", b"no parquet at all"):
        ((row, drop),), num_rows = read(damaged, open_parquet)
        assert (row["record_type"], drop, num_rows) == ("gap", Drop("unreadable_gap", float(len(damaged))), 0)
    assert verdicts(b"", open_parquet) == ["empty_file"]


def test_rows_that_take_no_bytes_are_limited(monkeypatch):
    """A repeated value takes a few bytes for any number of rows."""
    monkeypatch.setattr(provenance, "FREE_ROWS", 1000)
    for values in (["hello"], [None]):
        for group in (1 << 20, 7000):
            table = pa.table({"text": pa.array(values * 60_000, pa.string()), "url": pa.nulls(60_000, pa.string())})
            stored = parquet(table, row_group_size=group)
            most = 1000 + 10 * len(stored)
            rows, num_rows = read(stored, open_parquet)
            assert num_rows == 60_000
            assert len(rows) == most + 1 < 50_000
            assert (rows[-1][0]["record_type"], rows[-1][0]["offset"]) == ("gap", most)
            assert rows[-1][1] == Drop("too_many_rows", 60_000.0, float(most))
    most = 1000 + 10 * len(parquet(pa.table({"text": ["a"] * 5000})))
    exact = parquet(pa.table({"text": ["a"] * most}))
    assert 1000 + 10 * len(exact) >= most
    assert len(read(exact, open_parquet)[0]) == most
    honest = pa.table({"text": [f"text {number}" for number in range(60_000)]})
    assert {drop for _, drop in read(parquet(honest, compression="zstd"), open_parquet)[0]} == {None}


def test_a_damaged_row_group_is_a_gap_of_its_rows():
    table = pa.table({"text": [f"text {number}" for number in range(90)]})
    stored = bytearray(parquet(table, row_group_size=30, compression="gzip", use_dictionary=False))
    start = pq.ParquetFile(io.BytesIO(bytes(stored))).metadata.row_group(1).column(0).data_page_offset
    stored[start : start + 60] = b"\xff" * 60
    rows, num_rows = read(bytes(stored), open_parquet)
    assert num_rows == 90
    gaps = [(row["offset"], row["length"], drop) for row, drop in rows if drop]
    assert gaps == [(30, 30, Drop("unreadable_gap", 30.0))]
    assert [row["text"] for row, drop in rows if drop is None] == [f"text {n}" for n in range(90) if not 30 <= n < 60]


def test_a_damaged_page_loses_the_rows_from_its_batch_on():
    """Pages of 10 rows, the sixth of them damaged: the batch of the rows 48 to 63 is the first that needs it."""
    table = pa.table({"text": [f"words {number}" for number in range(100)]})
    stored = bytearray(parquet(table, compression="gzip", use_dictionary=False, data_page_size=1, write_batch_size=10))
    starts = [match.start() for match in re.finditer(b"\x1f\x8b\x08", stored)]
    assert len(starts) == 10
    stored[starts[5] + 12] ^= 0xFF
    rows, _ = read(bytes(stored), open_parquet)
    assert [row["text"] for row, drop in rows if drop is None] == [f"words {number}" for number in range(48)]
    gaps = [(row["offset"], row["length"], drop) for row, drop in rows if row["record_type"] == "gap"]
    assert gaps == [(48, 52, Drop("unreadable_gap", 52.0))]


# ------------------------------------------------------------------------------------------ fields beside the text


def meta_of(line, **settings):
    """`meta`, the causes of cuts, date and licence of one line with these settings."""
    ((row, _),), _ = read(json.dumps(line).encode(), config=SourceConfig(paths=("x",), **settings))
    date = row["date"].isoformat() if row["date"] else None
    return row["meta"], row["_meta"].cut if row["_meta"] else (), date, row["licence"]


ROW = {"text": "x", "url": "http://a.org/", "id": 7, "score": 3.5, "tags": ["a", "ü"], "none": None}


@pytest.mark.parametrize(
    ("line", "settings", "meta"),
    [
        (ROW, {}, '{"id":7,"score":3.5,"tags":["a","ü"]}'),  # the id is nowhere else
        (ROW | {"url": ""}, {}, '{"score":3.5,"tags":["a","ü"]}'),  # the id is the URL
        (ROW, {"meta_fields": ("tags", "absent")}, '{"tags":["a","ü"]}'),
        (ROW, {"meta_fields": ("url",)}, '{"url":"http://a.org/"}'),
        (ROW, {"meta_fields": ()}, None),
        ({"text": "x"}, {}, None),
        ({"text": "x", "n": 1 << 63, "big": float("inf"), "yes": True}, {}, '{"n":"9223372036854775808","yes":true}'),
        ({"text": "x", "a\ud800": "\ud800\0"}, {}, '{"a\ufffd":"\ufffd\\u0000"}'),
    ],
)
def test_fields_beside_the_text_are_stored_as_json(line, settings, meta):
    assert meta_of(line, **settings)[:2] == (meta, ())


def test_fields_that_do_not_fit_are_left_out_and_counted():
    line = {"text": "x", "a": "1234", "b": "ü" * 9, "c": 5}
    for size, meta in ((12, '{"a":"1234"}'), (11, '{"c":5}'), (18, '{"a":"1234","c":5}'), (6, None)):
        assert meta_of(line, max_meta_bytes=size)[:2] == (meta, ("too_large",)), size
    assert meta_of(line, max_meta_bytes=43)[:2] == ('{"a":"1234","b":"ü' + "ü" * 8 + '","c":5}', ())
    deep = inner = {}
    for _ in range(16):
        inner["a"] = inner = {}
    assert meta_of({"text": "x", "d": deep, "c": 5})[1] == ()
    inner["a"] = {}
    assert meta_of({"text": "x", "d": deep, "c": 5})[:2] == ('{"c":5}', ("too_deep",))


@pytest.mark.parametrize(
    ("value", "date"),
    [
        ("2024-05-06T07:08:09Z", "2024-05-06T07:08:09+00:00"),
        ("2024-05-06T07:08:09.1234+02:00", "2024-05-06T05:08:09.123000+00:00"),
        ("2024-05-06", "2024-05-06T00:00:00+00:00"),
        ("2024-05", "2024-05-01T00:00:00+00:00"),
        ("2024", "2024-01-01T00:00:00+00:00"),
        (2024, "2024-01-01T00:00:00+00:00"),
        (1999.0, "1999-01-01T00:00:00+00:00"),
        (1234.5, "1970-01-01T00:20:34.500000+00:00"),
        (201912, "2019-12-01T00:00:00+00:00"),
        (20191231, "2019-12-31T00:00:00+00:00"),
        ("20191231", "2019-12-31T00:00:00+00:00"),
        (20191231235958, "2019-12-31T23:59:58+00:00"),
        ("20191231235958", "2019-12-31T23:59:58+00:00"),
        ("201912", "2019-12-01T00:00:00+00:00"),
        ("1577836799000000", "2019-12-31T23:59:59+00:00"),
        ("1577836799000000000", "2019-12-31T23:59:59+00:00"),
        (1_700_000_000_123, "2023-11-14T22:13:20.123000+00:00"),
        ("1700000000123", "2023-11-14T22:13:20.123000+00:00"),
        (1_700_000_000_123_456, "2023-11-14T22:13:20.123000+00:00"),
        (1_700_000_000_123_456_789, "2023-11-14T22:13:20.123000+00:00"),
        ("2024-05-06 07:08:09 UTC", "2024-05-06T07:08:09+00:00"),
        (1_700_000_000, "2023-11-14T22:13:20+00:00"),
        ("1700000000", "2023-11-14T22:13:20+00:00"),
        ("1700000000.25", "2023-11-14T22:13:20.250000+00:00"),
    ],
)
def test_dates(value, date):
    assert meta_of({"text": "x", "when": value}, date_field="when") == (None, (), date, None)


@pytest.mark.parametrize("value", ["yesterday", "2024-13", 202413, 20240230, 1e300, True, [], "0000"])
def test_what_is_no_date_stays_in_meta_and_is_counted(value):
    meta = json.dumps({"when": value}, separators=(",", ":"))
    assert meta_of({"text": "x", "when": value}, date_field="when") == (meta, ("no_date",), None, None)


def test_a_licence_has_a_column():
    assert meta_of({"text": "x", "by": "CC0-1.0"}, licence_field="by") == (None, (), None, "CC0-1.0")
    assert meta_of({"text": "x", "by": ["CC0", "MIT"]}, licence_field="by") == (None, (), None, '["CC0","MIT"]')
    assert meta_of({"text": "x", "by": ""}, licence_field="by") == ('{"by":""}', (), None, None)


def test_the_text_is_no_meta_field():
    with pytest.raises(ValidationError, match="expected fields other than text_field, got text"):
        SourceConfig(paths=("x",), meta_fields=("score", "text"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, True) for value in (1, 1.5, "3.50", "-2e5", "0.1")),
        *((value, False) for value in ("007", "1.2.3", "", "2024-01-01", True, [1])),
    ],
)
def test_values_that_are_compared_as_numbers(value, expected):
    assert is_number(value) is expected


def test_parquet_columns_beside_the_text():
    when = pa.array([datetime(2024, 1, 2, 3, tzinfo=UTC), None], pa.timestamp("us", "UTC"))
    far = pa.array([1 << 60, 0], pa.int64()).view(pa.timestamp("ms"))
    table = pa.table(
        {
            "text": ["a", "b"],
            "when": when,
            "day": pa.array([date(2024, 1, 2), None]),
            "far": far,
            "raw": [b"\0\xff", None],
            "pair": [{"x": 1, "y": [0.5]}, None],
            "bad": pa.array([b"\xff", b"a"]).view(pa.string()),
        }
    )
    config = SourceConfig(paths=("x",), date_field="when")
    (first, second), _ = read(parquet(table), open_parquet, config)
    assert first[0]["date"] == datetime(2024, 1, 2, 3, tzinfo=UTC)
    assert json.loads(first[0]["meta"]) == {
        "bad": "\ufffd",
        "day": "2024-01-02",
        "raw": "00ff",
        "pair": {"x": 1, "y": [0.5]},
    }
    assert first[0]["_meta"].cut == ("unreadable",)
    assert json.loads(second[0]["meta"]) == {"far": "1970-01-01T00:00:00", "bad": "a"}
    assert [drop for _, drop in (first, second)] == [None, None]


def with_rows_stated(stored: bytes, actual: int, stated: int) -> bytes:
    """A Parquet file whose row groups of `actual` rows state another number of them."""

    def field(number: int) -> bytes:
        value, out = (number << 1 ^ number >> 63) & (1 << 64) - 1, b"\x16"
        while value > 0x7F:
            value, out = value >> 7, out + bytes([value & 0x7F | 0x80])
        return out + bytes([value])

    size = int.from_bytes(stored[-8:-4], "little")
    footer = stored[-8 - size : -8]
    first, *rest = footer.split(field(actual))  # the column of each group states it first, and then the group
    parts = [field(stated if at % 2 else actual) + part for at, part in enumerate(rest)]
    footer = b"".join([first, *parts])
    return stored[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("stated", [1 << 62, (1 << 63) - 1, -1, -(1 << 62), (1 << 48) + 1])
def test_a_footer_that_states_impossible_numbers_of_rows_is_unreadable(stated: int) -> None:
    out = io.BytesIO()
    table = pa.table({"text": [f"words {number}" for number in range(1234)]})
    with pq.ParquetWriter(out, table.schema, write_statistics=False, store_schema=False) as writer:
        for _ in range(3):
            writer.write_table(table)
    assert len(read(with_rows_stated(out.getvalue(), 1234, 1234), open_parquet)[0]) == 3 * 1234
    stored = with_rows_stated(out.getvalue(), 1234, stated)
    ((row, drop),), _ = read(stored, open_parquet)
    assert (row["record_type"], row["length"]) == ("gap", 0)
    assert drop == Drop("unreadable_gap", float(len(stored)))
    assert list(find_row_groups(io.BytesIO(stored), CONFIG, [len(stored) // 2])) == []


@pytest.mark.parametrize("group", [1 << 20, 500])
def test_rows_that_share_one_text_are_limited_by_its_length(monkeypatch, group):
    """A text in a dictionary takes a bit for each of its rows. The rest of each row group is one gap."""
    monkeypatch.setattr(rows_module, "FREE_BYTES", 500)
    monkeypatch.setattr(rows_module, "BYTES_A_BYTE", 3)
    number, text = 1000, "a shared text"
    stored = parquet(pa.table({"text": [text] * number}), row_group_size=group)
    rows, num_rows = read(stored, open_parquet)
    kept = [row for row, drop in rows if drop is None]
    gaps = [(row["record_type"], drop.rule, drop.value) for row, drop in rows if drop is not None]
    ends = range(min(group, number), number + 1, min(group, number))
    assert gaps == [("gap", "too_many_rows", float(end)) for end in ends]
    assert {row["text"] for row in kept} == {text}
    assert 0 < len(kept) * len(text) <= 500 + 3 * len(stored)
    assert num_rows == number
