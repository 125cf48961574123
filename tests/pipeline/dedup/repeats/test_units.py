"""Tests of lines, paragraphs and spans of sentences: their spans, their equality, and the text that cuts leave."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.dedup.config import REPEATS, RepeatsConfig
from pipeline.dedup.repeats.units import (
    _table,
    cuts_in_whole_text,
    cuts_of,
    line_spans,
    normal_forms,
    paragraph_spans,
    regions,
    scoped,
    sentence_spans,
    units_of,
)
from pipeline.text.spans import complement, without
from schemas.errors import ConfigError
from schemas.overrides import load_recipe

LINES = RepeatsConfig(units=("line",))


@pytest.mark.parametrize(
    ("unit", "normal"),
    [
        ("  Read More! ", "read more"),
        ("Page 12 of 340", "page 00 of 000"),
        ("Caf\u00e9 d\u2019\u00c9t\u00e9 \u2014 \u00ab Ol\u00e9 \u00bb", "cafe dete ole"),
        ("cafe\u0301", "cafe"),
        ("\u0663 \uff11", "0 0"),  # digits of other scripts
        ("a - b", "a b"),
        ("a\tb\u00a0c\r", "a b c"),
        ("a\0b", "ab"),
        ("$5 + 3 = 8", "$0 + 0 = 0"),  # symbols are no punctuation
        ("\u3010\u5317\u4eac\u3011\u3002", "\u5317\u4eac"),
        ("* * *", ""),
        ("\ud800x", "\ufffdx"),
        ("two\nlines", "two lines"),
        ("", ""),
    ],
)
def test_normal_form_of_ccnet(unit: str, normal: str):
    assert normal_forms([unit]) == [normal]
    assert normal_forms(["x", unit, "\u00e9"]) == ["x", normal, "e"]


def test_ascii_is_no_other_text():
    text = "".join(chr(code) for code in range(128) if code != 10)
    both = normal_forms([text, "\u00e9"])
    assert both[0] == normal_forms([text])[0]
    assert len(_table()) == 0x110000


def pieces(text: str, spans: np.ndarray) -> list[str]:
    return [text[start:end] for start, end in spans.tolist()]


def test_lines_and_paragraphs():
    text = "a\nb\n \n\nc d\n"
    assert pieces(text, line_spans(text)) == ["a", "b", " ", "", "c d", ""]
    assert pieces(text, paragraph_spans(text)) == ["a\nb", "c d\n"]
    assert pieces("", line_spans("")) == [""]


def test_sentences():
    text = 'One. "Two!" Three?\nFour v1.5 (five.) six\n\u5317\u4eac\u3002\u4e0a\u6d77\uff01'
    assert [piece.strip() for piece in pieces(text, sentence_spans(text))] == [
        *("One.", '"Two!"', "Three?", "", "Four v1.5 (five.)", "six", "\u5317\u4eac\u3002", "\u4e0a\u6d77\uff01", "")
    ]


def test_units_are_equal_where_their_normal_forms_are():
    text = "Home\nPrice: 10 EUR\n---\nhome!\nPrice 99 eur\n"
    units = units_of(text, "line", LINES)
    assert [text[a:b] for a, b in zip(units.starts, units.ends)] == ["Home", "Price: 10 EUR", "home!", "Price 99 eur"]
    keys = units.keys.tolist()
    assert (keys[0], keys[1]) == (keys[2], keys[3])
    assert keys[0] != keys[1]
    long = units_of(text, "line", RepeatsConfig(units=("line",), min_unit_chars=5))
    assert long.starts.tolist() == [5, 29]  # "price 00 eur" has 12, "home" has 4
    assert len(units_of(text, "line", RepeatsConfig(units=("line",), min_unit_chars=12)).keys) == 2
    assert len(units_of(text, "line", RepeatsConfig(units=("line",), min_unit_chars=13)).keys) == 0


def test_spans_of_three_sentences():
    text = "A b. C d! ... E f? G h."
    units = units_of(text, "sentences", RepeatsConfig(units=("sentences",)))
    assert [text[a:b].strip() for a, b in zip(units.starts, units.ends)] == ["A b. C d! ... E f?", "C d! ... E f? G h."]
    other = "x\nC D. E, F.\nG. H."  # "g", "h" are two sentences
    assert len(units_of(other, "sentences", RepeatsConfig(units=("sentences",))).keys) == 3
    same = units_of("c d\ne f\ng h", "sentences", RepeatsConfig(units=("sentences",)))
    assert same.keys.tolist() == units.keys.tolist()[1:]
    turned = units_of("e f\nc d\ng h", "sentences", RepeatsConfig(units=("sentences",)))
    assert turned.keys.tolist() != same.keys.tolist()
    for length, count in [(11, 2), (12, 0)]:  # "a b c d e f" has 11
        config = RepeatsConfig(units=("sentences",), min_unit_chars=length)
        assert len(units_of(text, "sentences", config).keys) == count
    assert len(units_of("A. B.", "sentences", RepeatsConfig(units=("sentences",))).keys) == 0
    assert len(units_of("A. B.", "sentences", RepeatsConfig(units=("sentences",), sentences=2)).keys) == 1


def test_kinds_and_scopes_have_keys_of_their_own():
    keys = units_of("a", "line", LINES).keys
    assert units_of("a", "paragraph", LINES).keys.tolist() == keys.tolist()
    numbers = [int(scoped(keys, kind, np.uint64(n))[0]) for kind in ("line", "paragraph") for n in (0, 1)]
    assert len(set(numbers)) == 4


@pytest.mark.parametrize(
    ("text", "passages", "left"),
    [
        ("a\nmenu\nb", ["menu"], "a\nb"),
        ("menu\nb", ["menu"], "b"),
        ("a\nmenu", ["menu"], "a"),
        ("menu", ["menu"], ""),
        ("a\n\nmenu\nb", ["menu"], "a\n\nb"),
        ("a\nmenu\n\nb", ["menu"], "a\n\nb"),
        ("a\nmenu\nfoot\nb\nc", ["menu", "foot"], "a\nb\nc"),
        ("a\nmenu\nb\nfoot\nc", ["menu", "foot"], "a\nb\nc"),
        ("one. two. three. four.", ["two. three."], "one. four."),
        ("one. two.\n\nthree. four.", ["two.\n\nthree."], "one.\n\nfour."),
        ("he said (one two) so", ["one two"], "he said ( ) so"),
        ("xyone twoz", ["one two"], "xy z"),
        ("xyonez", ["one"], "xyz"),
        ("  menu  ", ["menu"], ""),
        ("a  menu", ["menu"], "a"),
    ],
)
def test_text_after_cuts(text: str, passages: list[str], left: str):
    spans = [(text.index(passage), text.index(passage) + len(passage)) for passage in passages]
    cuts = cuts_of(text, [("line", spans)])
    assert without(text, [(start, end) for start, end, _ in cuts]) == left


def test_a_shared_span_is_cut_with_the_reason_of_the_first_kind():
    text = "aa bb cc dd ee"
    cuts = cuts_of(text, [("line", [(3, 8)]), ("substring", [(6, 11)])])
    assert cuts == [(3, 9, "line"), (9, 12, "substring")]
    cuts = cuts_of(text, [("substring", [(6, 11)]), ("line", [(3, 8)])])
    assert cuts == [(3, 6, "line"), (6, 12, "substring")]
    assert cuts_of(text, [("line", []), ("substring", [])]) == []


def test_cuts_are_spans_of_the_whole_text():
    text, before = "xx menu. yy\nmenu. zz", [(2, 8), (11, 12)]
    body = without(text, before)
    assert body == "xx yymenu. zz"
    cuts = cuts_of(body, [("line", [(5, 10)])])
    in_text = cuts_in_whole_text(cuts, complement(before, len(text)))
    assert in_text == [(12, 17, "line")]
    assert cuts_in_whole_text([(1, 4, "a"), (4, 6, "b")], complement(before, len(text))) == [
        *((1, 2, "a"), (8, 10, "a"), (10, 11, "b"), (12, 13, "b"))
    ]


TEXTS = st.text("ab \n", max_size=40)
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=5)


@given(TEXTS, SPANS, SPANS)
def test_cuts_hold_the_passages_and_besides_them_whitespace_alone(text, first, second):
    def inside(spans):
        return [(start, min(start + size, len(text))) for start, size in spans if start < len(text)]

    passages = [("line", inside(first)), ("substring", inside(second))]
    cuts = cuts_of(text, passages)
    assert all(a < b for a, b, _ in cuts)
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(cuts))
    repeated = {index for _, spans in passages for a, b in spans for index in range(a, b)}
    cut = {index for a, b, _ in cuts for index in range(a, b)}
    assert all(text[index].isspace() for index in repeated ^ cut)
    left = without(text, [(a, b) for a, b, _ in cuts])
    assert "".join(left.split()) == "".join(char for index, char in enumerate(text) if index not in repeated).replace(
        " ", ""
    ).replace("\n", "")
    for a, b in regions(text, [span for _, spans in passages for span in spans]):
        space = any(char.isspace() for char in text[a:b])
        stays = len(set(range(a, b)) - cut)
        assert (stays > 0) == (space and ((a > 0 and b < len(text)) or text[a:b].isspace()))


def recipe(*overrides: str):
    return load_recipe({}, overrides, {REPEATS.name: RepeatsConfig}, "test")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["units=['lines']"], r"repeats.units.0: Input should be 'paragraph', 'line', 'sentences' or 'substring'"),
        (["units=['line','line']"], "got units with line more than once. Remove"),
        (["min_count=3"], r"got min_count \(ignored without units\)"),
        (["units=['line']", "sentences=2"], r"sentences \(ignored without the unit 'sentences'\)"),
        (["units=['line']", "substring_length=60"], r"substring_length \(ignored without the unit 'substring'\)"),
        (["units=['substring']", "min_unit_chars=3"], r"min_unit_chars \(ignored with the unit 'substring' alone\)"),
        (["units=['substring']", "max_repeated_share=0.1"], r"max_repeated_share \(ignored with on_substring 'cut'\)"),
        (["units=['line']", "min_count=1"], "greater than or equal to 2, .* 1"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        recipe(*(f"repeats.{setting}" for setting in settings))


def test_lengths_as_published():
    words = recipe("repeats.units=['substring']")["repeats"]
    size = recipe("repeats.units=['substring']", "repeats.substring_unit=bytes")["repeats"]
    given = recipe("repeats.units=['substring']", "repeats.substring_length=30")["repeats"]
    assert (words.length, size.length, given.length) == (50, 100, 30)
