"""Lines: the JSON value on a line is the one that json.loads finds, in whatever encoding and with whatever errors."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sources.lines import parse_line, parse_object

OBJECT = {"text": "a \u00e9 \U0001f600", "n": [1, 2.5, None, True]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_an_object_in_each_encoding(encoding):
    assert parse_line(json.dumps(OBJECT, ensure_ascii=False).encode(encoding)) == OBJECT


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"{}", {}),
        (b"[1]", [1]),
        (b" {} ", {}),
        (b'{"a": "\xed\xa0\x80"}', {"a": "\ud800"}),
        (b"3", 3),
        (b"{\x00}\x00", {}),
    ],
)
def test_values(line, value):
    assert parse_line(line) == value


@pytest.mark.parametrize("line", [b"{", b"{} {}", b"{}x}", b'{"a": "\xff"}', b"", b"{'a': 1}"])
def test_errors(line):
    with pytest.raises(ValueError, match=r"."):
        parse_line(line)


@given(st.binary(max_size=12).map(lambda inner: b"{" + inner + b"}"))
def test_the_same_as_json_loads(line):
    try:
        expected = json.loads(line)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            parse_line(line)
    else:
        assert parse_line(line) == expected


@pytest.mark.parametrize("line", [b"", b"[]", b"null", b"3", b"{", b"[" * 100_000])
def test_lines_without_an_object(line):
    assert parse_object(line) is None
