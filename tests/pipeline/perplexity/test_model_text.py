"""Tests of CCNet's text normalization: a table of texts and their normal forms; lines are preserved."""

import unicodedata

import numpy as np
import pytest

from pipeline.perplexity.model import line_spans, load_splitter, normalize, sentences, words
from schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("Hello World", "hello world"),
        ("In 1984, 3.14 and ٣ १ ５", "in 0000, 0.00 and 0 0 0"),
        ("Café Ünïcode ÅNGSTRÖM", "cafe unicode angstrom"),
        ("cafe\u0301", "cafe"),
        ("ΟΔΟΣ ΣΣ", "οδος σς"),
        ("İstanbul", "istanbul"),
        ("\u201cquoted\u201d \u201elow\u201c \u00abangle\u00bb \u300ccorner\u300d", '"quoted" "low" "angle" "corner"'),
        ("it\u2019s a\u00b4b", "it's a'b"),
        ("1\u20132 a\u2014b", "0-0 a - b"),
        ("wait\u2026", "wait..."),
        ("\u4f60\u597d\uff0c\u4e16\u754c\u3002\uff01\uff1f", "\u4f60\u597d,\u4e16\u754c.!?"),
        ("\uff08\uff05\uff09\uff1b\uff1a\uff5e\uff0e", "(%);:~. "),
        ("\u3008a\u3009\u3010b\u3011\u3001", "<a>[b],"),
        ("a\tb\0c\x7fd\x85e\x9ff", "abcdef"),
        ("line\r\nline\n", "line\nline\n"),
        ("\ud55c", "\u1112\u1161\u11ab"),
        ("\u0e01\u0e34", "\u0e01"),
        ("half \ud800", "half \ufffd"),
        ("\U0001d7d8\U0001f600", "0\U0001f600"),
        ("\u2018single\u2019", "\u2018single'"),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalize(text) == expected


def test_normal_text_does_not_change_and_has_no_marks_digits_or_controls() -> None:
    all_chars = "".join(map(chr, range(0x30000)))
    normal = normalize(all_chars)
    assert normalize(normal) == normal
    categories = {unicodedata.category(char) for char in set(normal) - {"\n", "0"}}
    assert not categories & {"Mn", "Nd", "Cc", "Cs"}
    assert normal.count("\n") == 1
    # Remaining upper-case characters have no lower case.
    assert all(char.lower() == char for char in normal)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [[0, 0]]),
        ("ab", [[0, 2]]),
        ("ab\n", [[0, 2], [3, 3]]),
        ("\n\u4f60\u597d\n\U0001f600x", [[0, 0], [1, 3], [4, 6]]),
    ],
)
def test_line_spans(text: str, expected: list[list[int]]) -> None:
    spans = line_spans(text)
    assert spans.tolist() == expected
    assert spans.dtype == np.int64
    assert [text[start:end] for start, end in expected] == text.split("\n")


def test_words() -> None:
    assert words(["a  b ", "", " "]) == [["a", "b"], [], []]


def test_sentences() -> None:
    assert sentences("A  b, \u00c9\n\n \t\n12\n", words) == ["a b, e", "00"]


def test_bytes_that_are_not_a_sentencepiece_model() -> None:
    with pytest.raises(ConfigError, match=r"here: expected a SentencePiece model, got .*\. Set lm\.pieces\.$"):
        load_splitter(b"no model", "here", "Set lm.pieces.")
