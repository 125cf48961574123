"""Tests of the cuts of repeated lines: which lines repeat, what stays, and what the signals then measure."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.quality.config import QualityConfig
from pipeline.quality.repeated_lines import MAX_CUT, MIN_CHARS, is_prose, repeated_line_cuts, spans_in_whole_text
from pipeline.quality.stage import QUALITY, QualityMeasures, measure
from pipeline.text.spacy_tokens import split_english
from pipeline.text.spans import complement, without
from pipeline.text.words import Vocabulary

pytestmark = pytest.mark.usefixtures("implementation")
VOCABULARY = Vocabulary(split_english)
LINES = QualityMeasures(frozenset(("lines",)), frozenset(), cut_repeated_lines=True)
OFFER = "Book before the end of December to travel in the spring."  # 56 code points
FILL = "\n".join(f"The {word} paragraph of this page is about something of its own." for word in "abcdefghijk")


def left(text: str, language: str = "en") -> str:
    """What the cuts leave."""
    return without(text, repeated_line_cuts(text, text.splitlines(keepends=True), language)[0])


def line_of(size: int) -> str:
    """A line of letters and single spaces of this size."""
    return ("word " * size)[: size - 1] + "s"


def test_later_occurrences_are_cut_and_the_first_stays() -> None:
    text = f"{FILL}\n\n{OFFER}\n\nMiddle.\n\n{OFFER}\n\n  {OFFER.replace(' ', '  ')}\nEnd."
    lines = text.splitlines(keepends=True)
    cuts, number = repeated_line_cuts(text, lines, "en")
    assert (without(text, cuts), number) == (f"{FILL}\n\n{OFFER}\n\nMiddle.\n\nEnd.", 2)
    assert repeated_line_cuts(FILL, FILL.splitlines(keepends=True), "en") == ([], 0)


@pytest.mark.parametrize(("size", "stays"), [(MIN_CHARS - 1, True), (MIN_CHARS, False)])
def test_only_long_lines_are_cut(size: int, stays: bool) -> None:
    line = line_of(size)
    assert len(line) == size
    text = f"{line}\n{FILL}\n{line}"
    assert left(text) == (text if stays else f"{line}\n{FILL}")


@pytest.mark.parametrize(("size", "language", "stays"), [(19, "zh", True), (20, "zh", False), (20, "ko", True)])
def test_a_line_without_spaces_is_long_earlier(size: int, language: str, stays: bool) -> None:
    line, fill = "水" * size, "山" * 200
    text = f"{line}\n{fill}\n{line}"
    assert left(text, language) == (text if stays else f"{line}\n{fill}")


@pytest.mark.parametrize(
    ("line", "prose"),
    [
        ("letters only", True),
        ("abcdefghijklm 1234567", True),  # 13 of 20 are letters: 0.65
        ("abcdefghijkl 12345678", False),  # 12 of 20
        ("Wi-Fi | Bluetooth and all that", False),
        ("if user is known: return name;", False),
        ("const make = a => b", False),
        ("docker stop broker && docker rm broker", False),
        ("call make() first", False),
        ("read https://a.example for more", False),
        ("# Or explicitly by a field", False),
        ("a hash # inside", True),
        ("print(of everything)", False),
        ("(all of it) in brackets", True),
        ("", True),
    ],
)
def test_prose_has_letters_and_no_sign_of_code_or_tables(line: str, prose: bool) -> None:
    assert is_prose(line) is prose


def test_code_and_rows_of_tables_stay() -> None:
    for line in ("return connection.open(handlers={'all': on_event, 'other': off})", "Wi-Fi | Bluetooth | " + "x" * 40):
        text = f"{line}\n{FILL}\n{line}"
        assert left(text) == text


@pytest.mark.parametrize(("others", "cut"), [(100, True), (99, False)])
def test_a_page_of_repetition_is_left_to_the_rules(others: int, cut: bool) -> None:
    line = line_of(99)  # 100 code points with its line end, of which the second and third are half of the text
    text = f"{line}\n{'x' * (others - 1)}\n{line}\n{line}\n"
    assert len(text) == 300 + others
    assert (MAX_CUT * len(text) >= 200) is cut
    assert (left(text) != text) is cut


def test_an_article_that_the_page_has_twice_is_left_once() -> None:
    assert left(f"Short title\n\n{FILL}\n\nShort title\n\n{FILL}") == f"Short title\n\n{FILL}\n\nShort title"


def measured(text: str, **settings: Any) -> dict[str, Any]:
    """The row of the stage for an English text."""
    row: dict[str, Any] = {"text": text, "language": "en"}
    QUALITY.make(QualityConfig(**settings), {})(row)
    return row


def test_signals_are_measured_on_what_is_left() -> None:
    text = f"{FILL}\n{OFFER}\nMore of it.\n{OFFER}"
    published, cut = measured(text), measured(text, cut_repeated_lines=True)
    assert published["gopher_dup_line_frac"] == pytest.approx(1 / 14)
    assert cut["gopher_dup_line_frac"] == cut["gopher_dup_line_char_frac"] == cut["fineweb_dup_line_chars"] == 0
    assert cut["repeated_lines_cut"] == 1
    assert "repeated_lines_cut" not in published
    alone = measured(f"{FILL}\n{OFFER}\nMore of it.")
    names = alone.keys() - {"text", "cuts", "_words"}
    assert {name: cut[name] for name in names} == {name: alone[name] for name in names}


def test_cuts_of_line_rules_are_spans_of_the_whole_text() -> None:
    text = f"{FILL}\n{OFFER}\nWe have a cookie policy and terms of use.\n{OFFER}\nMore of it."
    row = measured(text, cut_repeated_lines=True, keep_structure=True)
    assert row["_body"] == f"{FILL}\n{OFFER}\nMore of it."
    assert without(text, row["cuts"]) == row["_body"]
    assert len(row["cuts"]) == 1  # adjacent cuts are joined


def test_lines_of_line_signals_are_spans_of_the_whole_text() -> None:
    text = f"{FILL}\n{OFFER}\nFirst.\n{OFFER}\nMore of it.\nLast"
    row = measure(text, "en", LINES, VOCABULARY)
    lines = [text[start:end] for start, end in row["lines"]]
    assert lines == f"{FILL}\n{OFFER}\nFirst.\nMore of it.\nLast".splitlines(keepends=True)
    assert len(row["refinedweb_line_words"]) == len(lines)


def test_spans_move_by_what_is_cut_before_them() -> None:
    assert spans_in_whole_text([(3, 5), (9, 12)], 20, [(0, 3), (3, 7), (7, 15)]) == [(0, 3), (5, 9), (12, 20)]
    assert spans_in_whole_text([], 4, [(0, 2), (2, 4)]) == [(0, 2), (2, 4)]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["", " ", "short", OFFER, f" {OFFER}", FILL, line_of(60), "a | " + line_of(60)])))
def test_no_word_is_lost_and_a_second_pass_cuts_nothing(parts: list[str]) -> None:
    text = "\n".join(parts)
    lines = text.splitlines(keepends=True)
    cuts, number = repeated_line_cuts(text, lines, "en")
    rest = without(text, cuts)
    assert set(rest.split()) == set(text.split())
    assert sum(bool(line.strip()) for line in text.splitlines()) == number + sum(
        bool(line.strip()) for line in rest.splitlines()
    )
    assert complement(complement(cuts, len(text)), len(text)) == cuts
    if number:
        again = repeated_line_cuts(rest, rest.splitlines(keepends=True), "en")
        assert again == ([], 0)
        row = measure(
            text, "en", QualityMeasures(frozenset(("lines",)), frozenset(), cut_repeated_lines=True), VOCABULARY
        )
        assert row["_body"] == rest
        assert "".join(text[start:end] for start, end in row["lines"]) == rest
