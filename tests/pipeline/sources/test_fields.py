"""Fields of rows: paths into objects, and texts that are joined from several fields."""

import io
import json
import tracemalloc
from typing import Any

import lz4.frame
import pytest
from pydantic import ValidationError

from pipeline.engine.stage import Drop, Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.fields import MISSING, lookup, parse_text, without
from pipeline.sources.source import open_split
from pipeline.sources.splits import HashedStream

ROW = {
    "title": "T",
    "body": "B",
    "n": 3,
    "blank": " \n",
    "none": None,
    "flag": True,
    "a": {"b": {"c": "deep"}},
    "a.x": 1,
}


def rows(value: dict[str, Any] | bytes, **settings: Any) -> list[tuple[dict[str, Any], Drop | None]]:
    stored = value if isinstance(value, bytes) else json.dumps(value).encode()
    config = SourceConfig.model_validate({"paths": "x", **settings})
    split = Split(0, "f", "f", len(stored), "", "s", "jsonl")
    return list(open_split(split, HashedStream(io.BytesIO(stored)), config))


@pytest.mark.parametrize(
    ("path", "value"),
    [("title", "T"), ("a.b.c", "deep"), ("a.x", 1), ("a.b.d", MISSING), ("title.b", MISSING), ("x", MISSING)],
)
def test_paths(path: str, value: Any) -> None:
    assert lookup(ROW, path) == value


def test_fields_are_taken_out() -> None:
    assert without({"a": {"b": 1, "c": 2}, "d.e": 3, "f": 4}, ["a.b", "d.e"]) == {"a": {"c": 2}, "f": 4}
    assert without({"a": {"b": 1}}, ["a.b"]) == {}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("title", "T"),
        ("title + body", "TB"),
        ("title + '\n\n' + body", "T\n\nB"),
        (r"title+'\n\t\\'+body", "T\n\t\\B"),
        ("""title + " 'x' " + body + "\\"" """, "T 'x' B\""),
        ("'<' + title + '>' + '!' + n + '.'", "<T>!3."),
        ("x + ': ' + body", "B"),
        ("title + ': ' + blank + ' - ' + body", "T - B"),
        ("title + ' (' + none + ')'", "T"),
        ("'Title: ' + x + body", "B"),
        ("x + flag + none", None),
        ("x + blank", ""),
        (("title", "x", "a.b.c"), "T\n\ndeep"),
        (("title + body",), None),
    ],
)
def test_texts_are_joined(expression: Any, text: str | None) -> None:
    assert parse_text(expression).join(ROW) == text


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "expected a field or quoted text at the end"),
        ("a +", "expected a field or quoted text at the end"),
        ("+ a", "expected a field or quoted text at character 1"),
        ("a b", r"expected \+ at character 2"),
        ("a 'b'", r"expected \+ at character 2"),
        ("a + 'b", "expected a closing ' after character 5"),
        ("'a'", "expected at least one field"),
        ((), "expected the names of fields"),
        (("a", " "), "expected the names of fields"),
    ],
)
def test_a_wrong_expression_is_named(expression: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_text(expression)
    with pytest.raises(ValidationError, match=r"Correct source\.text\."):
        SourceConfig(paths=("x",), text=expression)


def test_a_row_by_its_settings() -> None:
    value = {
        "doc": {"title": "T\n x", "parts": {"abstract": "A", "body": "B"}, "year": "1999"},
        "links": {"web": "http://a.org/1"},
    }
    settings = {"text": ["doc.parts.abstract", "doc.parts.body"], "title_field": "doc.title", "url_field": "links.web"}
    ((row, drop),) = rows(value, date_field="doc.year", **settings)
    assert (row["text"], row["title"], row["url"], row["domain"], drop) == (
        "A\n\nB",
        "T x",
        "http://a.org/1",
        "a.org",
        None,
    )
    assert (row["date"].year, row["meta"]) == (1999, None)
    ((row, _),) = rows(value, meta_fields=["doc.parts.body", "doc.none"], **settings)
    assert row["meta"] == '{"doc.parts.body":"B"}'
    assert [drop for _, drop in rows({"x": 1}, **settings)] == [Drop("no_text_field")]
    assert [drop for _, drop in rows({"doc": {"parts": {"body": " "}}}, **settings)] == [Drop("empty_page")]
    assert "title" not in rows({"doc": {"title": " "}}, **settings)[0][0]


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="expected either text or text_field, got both"):
        SourceConfig(paths=("x",), text="a", text_field="b")
    with pytest.raises(ValidationError, match="meta_fields: expected fields other than text_field, got a"):
        SourceConfig(paths=("x",), text="a", meta_fields=("a",))


def test_new_settings_change_no_fingerprint_unless_they_are_set() -> None:
    plain = SourceConfig(paths=("x",)).content()
    assert not {"text", "title_field", "csv", "hf", "reddit", "stackexchange"} & plain.keys()
    assert SourceConfig(paths=("x",), text="a + b").content()["text"] == "a + b"


def test_a_single_line_never_fills_the_memory() -> None:
    line = lz4.frame.compress(b'{"text": "' + b"x" * (200 << 20) + b'"}\n{"text": "next"}')
    tracemalloc.start()
    found = rows(line, max_record_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [drop and drop.rule for _, drop in found] == ["record_too_large", None]
    assert peak < 40 << 20
