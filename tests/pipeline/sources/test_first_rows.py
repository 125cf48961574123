"""The first rows of input files: their fields, and the early end of a run whose source has no text."""

import io
import json
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine.stage import Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.first_rows import (
    OTHER_FILES,
    WATCHED_ROWS,
    FieldSample,
    TextWatch,
    fields_of,
    spread,
    suggest_text_field,
)
from pipeline.sources.ranges import ranges_of
from pipeline.sources.source import open_split
from pipeline.sources.splits import find_splits, open_stream
from schemas.errors import ConfigError

Rows = Sequence[dict[str, Any]]
GOOD: Rows = [{"id": 1, "text": "a page of text", "tags": ["a"]}] * 3
BAD: Rows = [{"id": 1, "body": "a page of text", "title": "page"}] * 3


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., list[Split]]:
    """A function that writes files and returns them as splits."""

    def make(**files: Rows | bytes) -> list[Split]:
        for name, rows in files.items():
            stem, _, suffix = name.rpartition("_")
            path = tmp_path / f"{stem}.{suffix}"
            if isinstance(rows, bytes):
                path.write_bytes(rows)
            elif suffix == "parquet":
                pq.write_table(pa.Table.from_pylist(list(rows)), path)
            else:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return find_splits(SourceConfig(paths=(f"{tmp_path}/*",)))

    return make


def read(splits: Sequence[Split], **settings: Any) -> list[int]:
    """The rows of each split until the watch ends it; every part sees all splits."""
    config = SourceConfig(paths=("x",), **settings)
    numbers = []
    for split in splits:
        watch = TextWatch([split], spread(splits), config, open_split)
        with closing(open_stream(split)) as stream:
            number = 0
            for row, drop in open_split(split, stream, config):
                number += 1
                if drop is not None:
                    row |= {"drop_stage": "source", "drop_rule": drop.rule}
                watch.see(row)
        watch.end()
        numbers.append(number)
    return numbers


def test_fields_of_both_formats(write: Callable[..., list[Split]]) -> None:
    rows = [{"n": 1, "t": "abcd", "l": [1]}, {"n": None, "t": "ab", "l": None}]
    expected = {"n": FieldSample(("number",), 0), "t": FieldSample(("text",), 3), "l": FieldSample(("list",), 0)}
    jsonl, parquet, warc = write(a_jsonl=rows, b_parquet=rows, c_warc=b"WARC/1.0\r\n")
    assert fields_of(jsonl, SourceConfig(paths=("x",))) == fields_of(parquet, SourceConfig(paths=("x",))) == expected
    assert fields_of(warc, SourceConfig(paths=("x",))) == {}
    assert suggest_text_field(expected) == "t"
    assert suggest_text_field({"n": expected["n"]}) is None


def test_files_that_cannot_be_read_have_no_fields(write: Callable[..., list[Split]]) -> None:
    assert [
        fields_of(split, SourceConfig(paths=("x",)))
        for split in write(a_parquet=b"PAR1 no", b_jsonl=b"a,b\n1,2\n", c_jsonl=b"")
    ] == [{}] * 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a_jsonl": BAD, "b_jsonl": BAD},
            r"source.text_field: expected the field `text` in the rows of a.jsonl and 1 other file, "
            r"got the fields id, body, title. Set source.text_field=body.",
        ),
        (
            {"a_parquet": BAD},
            "source.text_field: expected the field `text` in the rows of a.parquet, got the fields id, body, title. "
            "Set source.text_field=body.",
        ),
        (
            {"a_jsonl": [{"text": ["a list"], "raw": "text"}] * 2},
            "source.text_field: expected text in the field `text` of a.jsonl, got list in 2 rows. "
            "Set source.text_field=raw.",
        ),
        (
            {"a_jsonl": [{"text": None}]},
            "source.text_field: expected text in the field `text` of a.jsonl, got null in 1 row. "
            "Name files that have texts in source.paths.",
        ),
        (
            {"a_jsonl": [{str(number): 1 for number in range(14)}]},
            "source.text_field: expected the field `text` in the rows of a.jsonl, got the fields 0, 1, 2, 3, 4, 5, 6, "
            "7, 8, 9, 10, 11 and 2 more. Name files that have texts in source.paths.",
        ),
        (
            {"a_jsonl": b"a,b\n1,2\n"},
            "source.paths: expected a JSON object on each line of a.jsonl, got none in 2 lines. Name other files, or "
            "set source.format.",
        ),
        (
            {"a_jsonl": b"", "b_warc": b"", "c_parquet": b""},
            "source.paths: expected records in a.jsonl and 2 other files, got none. Name files that have records, or "
            "set source.format.",
        ),
        (
            {"a_warc": b"<html>not a WARC file</html>" * 9},
            "source.paths: expected records in a.warc, got none, only unreadable_gap. Name files that have records, or "
            "set source.format.",
        ),
    ],
)
def test_a_source_without_text_ends_the_run(
    write: Callable[..., list[Split]], files: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(write(**files))
    assert str(caught.value) == message


def test_a_file_without_text_among_others_is_read_to_its_end(write: Callable[..., list[Split]]) -> None:
    splits = write(a_jsonl=BAD * 500, b_jsonl=b"", c_jsonl=GOOD, d_jsonl=b"a,b\n")
    assert read(splits) == [1500, 1, 3, 1]


@pytest.mark.parametrize(("rows", "ends"), [(WATCHED_ROWS - 1, False), (WATCHED_ROWS, True)])
def test_a_long_file_is_watched_for_its_first_rows(write: Callable[..., list[Split]], rows: int, ends: bool) -> None:
    splits = write(a_jsonl=[{"id": 1}] * rows + [{"text": "at last"}])
    if not ends:
        assert read(splits) == [rows + 1]
        return
    with pytest.raises(ConfigError, match=r"got the fields id"):
        read(splits)


@pytest.mark.parametrize(
    "first", [{"text": ""}, {"text": "short"}, {"text": "x" * 200}], ids=["empty", "short", "too large"]
)
def test_a_row_with_the_field_shows_that_the_setting_is_right(
    write: Callable[..., list[Split]], first: dict[str, Any]
) -> None:
    assert read(write(a_jsonl=[first, {"id": 1}]), max_page_bytes=100) == [2]


def test_other_files_are_spread_over_the_source(write: Callable[..., list[Split]]) -> None:
    splits = write(**{f"{number:03}_jsonl": GOOD for number in range(100)})
    chosen = spread(splits)
    assert len(set(chosen)) == OTHER_FILES
    assert (chosen[0], chosen[-1]) == (splits[0], splits[-1])
    assert spread(splits[:5]) == tuple(splits[:5])


def test_fields_of_tables(write: Callable[..., list[Split]]) -> None:
    arrow = io.BytesIO()
    with pa.ipc.new_stream(arrow, pa.schema({"n": pa.int64(), "t": pa.string()})) as writer:
        writer.write_table(pa.table({"n": [1, None], "t": ["abcd", "ab"]}))
    for split in write(a_arrow=arrow.getvalue(), b_csv=b"n,t\nx,abcd\nyy,ab\nz\n"):
        sample = fields_of(split, SourceConfig(paths=("x",)))["t"]
        assert sample == FieldSample(("text",), 3)


def test_a_joined_text_without_its_fields_names_the_setting(write: Callable[..., list[Split]]) -> None:
    with pytest.raises(ConfigError, match=r"source\.text: expected the field `title, text`.*Set source\.text=body\."):
        read(write(a_csv=b"head,body\n1,abc\n"), text="title + text")


def test_the_first_range_of_a_file_decides_by_the_whole_file(write: Callable[..., list[Split]]) -> None:
    """A range may end before the first text, and later ones need none."""
    for rows, fails in (([*BAD, *GOOD], False), (BAD, True)):
        (split,) = write(a_jsonl=rows)
        ranges = ranges_of(replace(split, num_ranges=6))
        for part in ranges[1:]:
            assert read([part]) == [0]
        watch = TextWatch([ranges[0]], [split], SourceConfig(paths=("x",)), open_split)
        watch.see({"record_type": "row", "drop_stage": "source", "drop_rule": "no_text_field"})
        with pytest.raises(ConfigError, match=r"source\.text_field") if fails else nullcontext():
            watch.end()
