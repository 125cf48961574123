"""Tests of Unicode's word boundaries: known answers of uniseg 0.10.1 for each rule."""

import pytest

from pipeline.text.words import pieces_of, unicode_words


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ("hello", "hello"),
        ("don't", "don't"),
        ("'quoted'", "quoted"),
        ("cats'", "cats"),
        ("e.g.", "e.g"),
        ("U.S.A.", "U.S.A"),
        ("a:b", "a:b"),
        ("10:30", "10 30"),
        ("3.14,", "3.14"),
        ("1,250.5;7", "1,250.5;7"),
        ("1.a", "1 a"),
        ("a,b", "a b"),
        ("a1b2", "a1b2"),
        ("x_y", "x_y"),
        ("_x", ""),
        ("well-known", "well known"),
        ("http://www.site.org/a?b=1", "http www.site.org a b 1"),
        ("me@x.org", "me x.org"),
        ("don’t", "don’t"),
        ("caf\u0301e", "caf\u0301e"),
        ("a\u00ad-\u0301b", "a\u00ad b"),
        ("\u0301abc", "abc"),
        ("l·l", "l·l"),
        ("Straße;", "Straße"),
        ("Дом.Дом", "Дом.Дом"),
        ("１，２", "１，２"),
        ("中文字", "中 文 字"),
        ("ひらカタカナ漢", "ひ ら カタカナ 漢"),
        ("カa", "カ a"),
        ("한국어", "한국어"),
        ("ภาษา", "ภ า ษ า"),
        ("צה״ל", "צה״ל"),
        ('צ"ל', 'צ"ל'),
        ("א'", "א'"),
        ('a"b', "a b"),
        ("30\u202fdays", "30\u202fdays"),
        ("½x", "½ x"),
        ("!?", ""),
    ],
)
def test_words(piece: str, words: str) -> None:
    assert list(unicode_words(piece)) == (words.split(" ") if words else [])


def test_pieces_lie_between_all_whitespace_but_the_narrow_no_break_space() -> None:
    assert pieces_of(" a\u00a0b\n c\u3000d ") == ["a", "b", "c", "d"]
    assert pieces_of(" a\u202fb\n c\u00a0d\u202f ") == ["a\u202fb", "c", "d\u202f"]
