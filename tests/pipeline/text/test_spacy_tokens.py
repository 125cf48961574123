"""Tests of the token rules: pieces that each rule decides, on both sides of it; the comparison with spaCy is parity."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, split_english, split_neutral, split_unspaced, splitter_of


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


@pytest.mark.parametrize(
    ("language", "piece", "tokens"),
    [
        ("zh", "他们赋有理性和良心,并应以", "他们 赋 有 理性 和 良心 , 并 应 以"),
        ("zh", "（2024年3月）Python语言。", "（ 2024 年 3 月 ） Python 语言 。"),
        ("zh", "𠮷野家𠮷", "𠮷 野家 𠮷"),
        ("ja", "コンピューターを使う。", "コンピューター を 使う 。"),
        ("th", "เกิดมามีอิสระ", "เกิด มา มี อิสระ"),
        ("lo", "ມະນຸດທຸກຄົນ", "ມະນຸດ ທຸກຄົນ"),
        ("km", "មនុស្សទាំងអស់", "មនុស្ស ទាំងអស់"),
        ("my", "လူတိုင်းသည်", "လူ တိုင်း သည်"),
        ("bo", "འགྲོ་བ", "འགྲོ ་ བ"),
        ("yue", "Windows電腦", "Windows 電腦"),
        ("zh", "Python", "Python"),
        ("de", "我们Straße,", "我 们 Straße ,"),
        ("en", "don't", "do n't"),
        ("xx", "don't", "don't"),
    ],
)
def test_the_splitter_of_a_language(language: str, piece: str, tokens: str) -> None:
    assert " ".join(pickle.loads(pickle.dumps(splitter_of(language)))(piece)) == tokens


def test_every_language_has_one_splitter() -> None:
    assert {splitter_of(language) for language in UNSPACED_LANGUAGES} == {split_unspaced}
    assert (splitter_of("en"), splitter_of("ko")) == (split_english, split_neutral)


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: len(text.split()) == 1))
def test_tokens_spell_the_piece(text: str) -> None:
    piece = text.strip()
    for split in (split_english, split_neutral, split_unspaced):
        tokens = split(piece)
        assert "".join(tokens) == piece
        assert all(tokens)


@pytest.mark.parametrize(
    "piece", ["=" * 200_000, ")..(" * 50_000, "a@" * 100_000 + ".b", "a.-" * 60_000, "'" * 200_000]
)
def test_no_piece_costs_more_than_linear_time(piece: str) -> None:
    """A quadratic rule would take minutes here."""
    assert "".join(split_english(piece)) == piece


@pytest.mark.parametrize("run", ["人人生而自由", "中", "ア", "มนุษย์", "ก", "က", "\u1780"])
def test_no_run_of_unspaced_writing_costs_more_than_linear_time(run: str) -> None:
    """The longest that a document may hold; 0.1 s each as measured."""
    text = run * (300_000 // len(run))
    assert "".join(split_unspaced(text)) == text


def test_a_lone_surrogate_is_a_token_as_elsewhere() -> None:
    assert list(split_unspaced("中\ud800文")) == ["中", "\ud800", "文"]
