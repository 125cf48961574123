"""Tests of the token rules: pieces that each rule decides, on both sides of it; the comparison with spaCy is parity."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.pieces import split_english, split_neutral


@pytest.mark.parametrize(
    ("piece", "tokens"),
    [
        # punctuation is peeled off both ends, from the outside
        ("word", "word"),
        ("word,", "word ,"),
        ("(“word”).", "( “ word ” ) ."),
        ("$5", "$ 5"),
        ("US$5", "US$ 5"),
        ("+5", "+5"),
        ("+x", "+ x"),
        ("...and", "... and"),
        ("wait...", "wait ..."),
        ("…", "…"),
        ("😀good😀", "😀 good 😀"),
        # a full stop ends a word after a small letter, a digit or two capitals; not after one capital
        ("1999.", "1999 ."),
        ("NASA.", "NASA ."),
        ("X.", "X."),
        ("|.", "| ."),
        # what ends a token after a digit only
        ("10km", "10 km"),
        ("akm", "akm"),
        ("50%", "50 %"),
        ("5€", "5 €"),
        ("20m/s", "20 m/s"),
        # possessives and contractions, with either apostrophe or none
        ("dog's", "dog 's"),
        ("dog’s", "dog ’s"),
        ("don't", "do n't"),
        ("Don’t", "Do n’t"),
        ("(can't)", "( ca n't )"),
        ("cannot", "can not"),
        ("dont", "do nt"),
        ("well", "well"),
        ("its", "its"),
        ("she'd've", "she 'd 've"),
        # abbreviations, times, faces
        ("Mr.", "Mr."),
        ("Dr.Smith", "Dr. Smith"),
        ("e.g.", "e.g."),
        ("10a.m.", "10 a.m."),
        ("(a.", "( a."),
        (":)", ":)"),
        ("word:)", "word :)"),
        # infixes between letters
        ("long-term", "long - term"),
        ("word—word", "word — word"),
        ("and/or", "and/or"),
        ("his/her", "his / her"),
        ("one,two", "one , two"),
        ("1,000", "1,000"),
        ("end.Start", "end . Start"),
        ("3.14", "3.14"),
        ("2019-20", "2019 - 20"),
        ("a=b", "a = b"),
        ("well..then", "well .. then"),
        # addresses stay whole
        ("https://example.org/a-b?c=d", "https://example.org/a-b?c=d"),
        ("(www.example.com)", "( www.example.com )"),
        ("someone@example.co.uk,", "someone@example.co.uk ,"),
    ],
)
def test_english(piece: str, tokens: str) -> None:
    assert " ".join(split_english(piece)) == tokens


@pytest.mark.parametrize(
    ("piece", "tokens"),
    [
        ("don't", "don't"),
        ("Straße,", "Straße ,"),
        ("dont", "dont"),
        ("„Haus“", "„ Haus “"),
        ("我们。", "我 们 。"),
        ("Python语言", "Python 语 言"),
        ("カタカナ", "カ タ カ ナ"),
        ("한국어는", "한국어는"),
    ],
)
def test_other_languages(piece: str, tokens: str) -> None:
    assert " ".join(split_neutral(piece)) == tokens


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: len(text.split()) == 1))
def test_tokens_spell_the_piece(text: str) -> None:
    piece = text.strip()
    for split in (split_english, split_neutral):
        tokens = split(piece)
        assert "".join(tokens) == piece
        assert all(tokens)


@pytest.mark.parametrize(
    "piece", ["=" * 200_000, ")..(" * 50_000, "a@" * 100_000 + ".b", "a.-" * 60_000, "'" * 200_000]
)
def test_no_piece_costs_more_than_linear_time(piece: str) -> None:
    """A quadratic rule would take minutes here."""
    assert "".join(split_english(piece)) == piece
