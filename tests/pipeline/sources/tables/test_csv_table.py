"""CSV: every record comes out once with its offset, whatever its fields contain, and is found again."""

import bz2
import csv
import gzip
import io
from pathlib import Path
from typing import Any

import lz4.frame
import pytest

from pipeline.engine.stage import Drop, Split
from pipeline.sources import first_rows, provenance
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from schemas.config import build_recipe
from schemas.errors import ConfigError

HEADER = b"url,text\r\n"


def read(stored: bytes, name: str = "a.csv", **settings: Any) -> list[tuple[dict[str, Any], Drop | None]]:
    """The rows of a file, after checking that they follow each other without a hole."""
    config = SourceConfig.model_validate({"paths": "x", **settings})
    split = Split(0, name, name, len(stored), "", "s", "csv")
    rows = list(open_split(split, HashedStream(io.BytesIO(stored)), config))
    position = 0
    for row, _ in rows:
        assert row["offset"] == position
        position += row["length"]
    return rows


def verdicts(stored: bytes, name: str = "a.csv", **settings: Any) -> list[str]:
    return [drop.rule if drop else row["text"] for row, drop in read(stored, name, **settings)]


@pytest.mark.parametrize("record", [b"u,hello\n", b'u,"in two\nlines"\n'])
def test_the_rest_of_a_file_with_too_many_lines_is_a_gap(record: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "FREE_ROWS", 7)
    monkeypatch.setattr(provenance, "ROWS_A_BYTE", 0)
    content = HEADER + record * 20
    rows = read(content)
    assert [drop for _, drop in rows] == [None] * (len(rows) - 1) + [Drop("too_many_rows", 7.0, 7.0)]
    assert rows[-1][0]["record_type"] == "gap"
    assert sum(row["length"] for row, _ in rows) == len(content)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lz4.frame.compress])
def test_records_are_read_with_their_offsets(pack: Any) -> None:
    texts = ['with "quotes", commas', "two\nlines", "two\r\nlines", "", "end ü"]
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(["id", "text"])
    for number, text in enumerate(texts):
        writer.writerow([number, text])
    content = out.getvalue().encode()
    rows = read(pack(content))
    assert [row["text"] for row, _ in rows] == [text or None for text in texts]
    assert [row["url"] for row, _ in rows] == [str(number) for number in range(len(texts))]
    assert sum(row["length"] for row, _ in rows) == len(content)
    for row, _ in rows[1:]:
        record = content[row["offset"] : row["offset"] + row["length"]].decode()
        assert next(csv.reader(io.StringIO(record, newline="")))[0] == row["url"]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (b"1,words\n", ["words"]),
        (b'1,"a ""b"""\n', ['a "b"']),
        (b'1,5" nail\n', ['5" nail']),
        (b"1\n", ["ragged_row"]),
        (b"1,a,b\n", ["ragged_row"]),
        (b"\n\r\n", []),
        (b"1,\xff\n", ["\ufffd"]),
        (b"1,a\rb,c\n", ["bad_row"]),
        (b"1, \n", ["empty_page"]),
        (b"1," + b"x" * 1100 + b"\n", ["record_too_large"]),
        (b'1,"' + b"x\n" * 1100 + b'"\n', ["record_too_large"]),
        (b'1,"' + b"x" * 1100 + b'\nmore" \n', ["record_too_large"]),
        (b'1,"a\n' + b"x" * 1100 + b'","b""\n"\n', ["record_too_large"]),
    ],
)
def test_a_record_costs_itself_only(record: bytes, found: list[str]) -> None:
    good = b"2,good\n"
    assert verdicts(HEADER + good + record + good, max_record_bytes=1024) == ["good", *found, "good"]


@pytest.mark.parametrize(
    ("stored", "name", "settings", "found"),
    [
        (b"\xef\xbb\xbftext\nx\n", "a.csv", {}, ["x"]),
        (b"text\turl\n'a, b'\t1\n", "A.TSV", {}, ["'a, b'"]),
        (b"text\turl\nx\t1\n", "a.tsv.gz", {}, ["x"]),
        (b"text;url\n'a;\nb';1\n", "a.csv", {"csv": {"delimiter": ";", "quote": "'"}}, ["a;\nb"]),
        (b'text,n\n"x,1\n', "a.csv", {"csv": {"quote": ""}}, ['"x']),
        (b'text,n\n"x\\"y",1\n', "a.csv", {"csv": {"escape": "\\"}}, ['x"y']),
        (b"x,1\ny,2\n", "a.csv", {"csv": {"columns": ["text", "n"]}}, ["x", "y"]),
        (b"text\n\xfc\n", "a.csv", {"csv": {"charset": "latin-1"}}, ["ü"]),
        (b"text\n", "a.csv", {}, ["empty_file"]),
        (b"", "a.csv", {}, ["empty_file"]),
        (b'text\n"no end', "a.csv", {}, ["truncated_record"]),
        (b"text\nno line end", "a.csv", {}, ["no line end"]),
    ],
)
def test_settings_and_ends(stored: bytes, name: str, settings: Any, found: list[str]) -> None:
    assert verdicts(stored, name, **settings) == found


@pytest.mark.parametrize(
    ("stored", "rule"),
    [
        (b"id," + b"x" * 5000 + b",text\n", "record_too_large"),
        (gzip.compress(HEADER, mtime=0)[:10] + b"\xff" * 20, "bad_gzip"),
    ],
)
def test_no_record_takes_the_place_of_a_lost_header(stored: bytes, rule: str) -> None:
    records = b"1,one\n2,two\n"
    data = stored + (records if rule == "record_too_large" else gzip.compress(records))
    rows = read(data, max_record_bytes=1024)
    assert [drop and drop.rule for _, drop in rows] == [rule, "bad_row", "bad_row"]
    split = Split(0, "f", "f", len(data), "", "s", "csv")
    config = SourceConfig.model_validate({"paths": "x", "max_record_bytes": 1024})
    assert [*first_rows.ROWS_OF["csv"](HashedStream(io.BytesIO(data)), split, config)] == []
    named = read(data, max_record_bytes=1024, csv={"columns": ["id", "text"]})
    assert [row["text"] for row, _ in named[1:]] == ["one", "two"]


def test_a_name_that_two_columns_have_is_that_of_no_field() -> None:
    data = b"text,text,url,,\nfirst,second,1,x,y\n"
    ((row, drop),) = read(data)
    assert (row["text"], row["url"], row["meta"], drop and drop.rule) == (None, "1", None, "no_text_field")
    ((row, drop),) = read(data.replace(b"text,text", b"text,body"))
    assert (row["text"], row["meta"], drop) == ("first", '{"body":"second"}', None)


def test_a_damaged_file_keeps_its_whole_records() -> None:
    lines = HEADER + b"".join(b'%d,"text %d"\n' % (number, number) for number in range(20_000))
    rows = read(gzip.compress(lines)[:-2000])
    texts = [row["text"] for row, drop in rows if drop is None]
    assert texts == [f"text {number}" for number in range(len(texts))]
    assert 5_000 < len(texts) < 20_000
    assert [drop.rule for _, drop in rows if drop][-1] == "truncated_record"
    assert all(drop.rule == "truncated_record" for _, drop in rows if drop)
    assert rows[-1][0]["record_type"] == "gap"


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_record_is_read_again(tmp_path: Path, name: str) -> None:
    content = HEADER + b'1,"one\ntwo"\n2,three\nurl,text\n4,four'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    config = SourceConfig(paths=(f"{tmp_path}/*",))
    (split,) = find_splits(config)
    rows = [row for row, _ in open_split(split, open_stream(split), config)]
    assert [row["url"] for row in rows] == ["1", "2", "url", "4"]
    for row in rows:
        found = refetch(split, row, config)
        assert found.changes == ()
        assert found.head == content[row["offset"] : row["offset"] + row["length"]]
    changed = refetch(split, rows[1] | {"page_bytes": 9}, config)
    assert changed.changes == ("page_bytes: expected 9, got 5",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"charset": "utf-16"}, r"source\.csv\.charset.*extends ASCII, got 'utf-16'"),
        ({"charset": "none"}, r"source\.csv\.charset.*got 'none'"),
        ({"delimiter": "\n"}, r"source\.csv\.delimiter.*ends no line"),
        ({"delimiter": ""}, r"source\.csv\.delimiter"),
    ],
)
def test_a_wrong_setting_is_named(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_recipe({"source": {"paths": "x", "csv": settings}}, {"source": SourceConfig}, "t")
