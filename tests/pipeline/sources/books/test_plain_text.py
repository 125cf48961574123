"""Joining lines: prose that was broken for its length becomes paragraphs; verse, tables and short lines are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sources.books.plain_text import decoded_text, joined_lines, kept_lines

PROSE = """\
It is a truth universally acknowledged, that a single man in
possession of a good fortune, must be in want of a wife. However
little known the feelings or views of such a man may be on his
first entering a neighbourhood, this truth is so well fixed in the
minds of the surrounding families, that he is considered the
rightful property of some one or other of their daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard
that Netherfield Park is let at last?"
"""
VERSE = """\
    Tyger Tyger, burning bright,
    In the forests of the night;
      What immortal hand or eye,
    Could frame thy fearful symmetry?"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PROSE, PROSE.replace("\n\n", "~").replace("\n", " ").replace("~", "\n\n").strip()),
        (VERSE, VERSE.replace("\n    ", "\n").strip()),
        ("Dear Sir,\nI am\nyours,\nA. B.", "Dear Sir,\nI am\nyours,\nA. B."),
        ("             A TITLE", "A TITLE"),
        ("Chapter I     page 1\nChapter II    page 20", "Chapter I     page 1\nChapter II    page 20"),
        (
            "these lines end at a hyphen of a well-\nknown compound word, or at a dash--\nwhich needs no space here",
            "these lines end at a hyphen of a well-known compound word, or at a dash--which needs no space here",
        ),
        ("一" * 40 + "\n" + "二" * 40 + "\n三。", "一" * 40 + "二" * 40 + "三。"),
        ("a" * 300 + "\n" + "b" * 300, "a" * 300 + "\n" + "b" * 300),
        ("", ""),
        ("one\fpage", "one\n\npage"),
    ],
)
def test_joined_lines(text: str, expected: str) -> None:
    if text == VERSE or text.startswith("Dear"):  # Their width is that of the prose around them.
        assert joined_lines(f"{PROSE}\n{text}").partition('at last?"\n\n')[2] == expected
    else:
        assert joined_lines(text) == expected


def test_paragraphs_that_only_an_indentation_separates() -> None:
    lines = PROSE.split("\n\n")[0]
    assert joined_lines(f"    {lines}\n    {lines}") == "\n\n".join([lines.replace("\n", " ")] * 2)


def test_kept_lines() -> None:
    assert kept_lines("a  \n\tb\fc") == "a\n    b\n\nc"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\r\nb\rc\x1a", "a\nb\nc"),
        ("\ufeffü".encode(), "ü"),
        ("ü word".encode("utf-16"), "ü word"),
        (b"%PDF-1.4 \x00\x01\x02\x03\x04", None),
        (b"", ""),
    ],
)
def test_decoded_text(data: bytes, text: str | None) -> None:
    assert decoded_text(data) == text


@given(st.text(alphabet=" \n\fab|-\t一", max_size=200))
def test_no_word_is_lost(text: str) -> None:
    assert "".join(joined_lines(text).split()) == "".join(text.split())
