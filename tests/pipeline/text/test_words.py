"""Tests of the vocabulary: what it says of a word, and that what it met before never changes an answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.text.spacy_tokens import split_english
from pipeline.text.words import (
    ALPHABETIC,
    BASE,
    ENDS_SENTENCE,
    MARK,
    PUNCTUATION,
    SENTENCE_ENDS,
    WORD,
    Vocabulary,
    normal_words,
    powers,
    token_flags,
    word_keys,
    words_of,
)

TEXT = "The quick-brown fox didn't jump, it 1,234.5 times flew (over) Zürich … the end."
PIECES = TEXT.split()


@pytest.mark.parametrize(
    ("token", "flags"),
    [
        ("house", WORD | ALPHABETIC),
        ("the", WORD | ALPHABETIC),
        ("The", WORD | ALPHABETIC),
        ("中文", WORD | ALPHABETIC),
        ("n't", WORD | ALPHABETIC),
        ("1999", WORD),
        ("€", WORD),
        (".", ENDS_SENTENCE),
        ("。", ENDS_SENTENCE),
        (",", MARK),
        ("...", MARK),
        ("+", 0),
    ],
)
def test_flags(token: str, flags: int) -> None:
    assert token_flags(token) == flags


def test_character_sets_of_the_dialect() -> None:
    assert (len(SENTENCE_ENDS), len(set(PUNCTUATION))) == (159, 129)
    assert {"!", ".", "?", "。", "…"} & SENTENCE_ENDS == {"!", ".", "?", "。"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello,  WORLD!", ["hello", "world"]),
        ("don't", ["don", "t"]),
        ("1,234.5 and 99", ["0", "0", "and", "0"]),
        ("v2.0beta", ["v0beta"]),
        ("Zürich naïve", ["zurich", "naive"]),
        ("café—bar…", ["cafe", "bar"]),
        ("١٢٣ 我们。", ["0", "我们"]),
        ("?!", []),
    ],
)
def test_normal_words(text: str, words: list[str]) -> None:
    assert normal_words(text) == words


@settings(deadline=None, max_examples=60)
@given(st.text())
def test_normal_words_of_a_text_are_those_of_its_pieces(text: str) -> None:
    assert normal_words(text) == [word for piece in text.split() for word in normal_words(piece)]


def test_words_are_the_tokens_in_order() -> None:
    vocabulary = Vocabulary(split_english)
    tokens = [token for piece in PIECES for token in split_english(piece)]
    words = vocabulary.words(vocabulary.numbers(PIECES))
    assert words.lengths.tolist() == [len(token) for token in tokens]
    assert words.flags.tolist() == [token_flags(token) for token in tokens]
    assert words.counts.tolist() == [len(split_english(piece)) for piece in PIECES]
    assert words.codes.tolist() == [
        sum(ord(char) * pow(BASE, place, 1 << 64) for place, char in enumerate(token)) % (1 << 64) for token in tokens
    ]


def test_keys_are_the_hashes_of_the_normal_words() -> None:
    vocabulary = Vocabulary(split_english)
    numbers = vocabulary.numbers(PIECES)
    assert vocabulary.keys(numbers).tolist() == word_keys(normal_words(TEXT)).tolist()
    assert vocabulary.keys(numbers[2:4]).tolist() == word_keys(["fox", "didn", "t"]).tolist()
    assert word_keys(["", "abc"]).tolist() == [0x9CDA80DD788B2AEF, 0x264DED62C9D2E97]


def test_powers_are_inverse() -> None:
    forward, backward = powers(70_000)
    assert min(len(forward), len(backward)) >= 70_000
    assert np.all(forward[:70_000] * backward[:70_000] == 1)
    assert forward[:3].tolist() == [1, BASE, BASE * BASE % (1 << 64)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.text("abc.,'1é", min_size=1, max_size=6), max_size=20), max_size=8))
def test_answers_do_not_depend_on_the_past(documents: list[list[str]]) -> None:
    small = Vocabulary(split_english, capacity=3)
    for pieces in documents:
        small.trim()
        fresh = Vocabulary(split_english)
        numbers, expected = small.numbers(pieces), fresh.numbers(pieces)
        assert small.keys(numbers).tolist() == fresh.keys(expected).tolist()
        ours, theirs = small.words(numbers), fresh.words(expected)
        assert ours.codes.tolist() == theirs.codes.tolist()
        assert ours.flags.tolist() == theirs.flags.tolist()


def test_it_forgets_beyond_its_capacity() -> None:
    vocabulary = Vocabulary(split_english, capacity=2)
    assert vocabulary.numbers(["one", "two", "one"]).tolist() == [0, 1, 0]
    vocabulary.trim()
    assert vocabulary.numbers(["two", "three"]).tolist() == [1, 2]
    vocabulary.trim()
    assert vocabulary.numbers(["three"]).tolist() == [0]


def test_readings_of_a_piece_are_learnt_when_first_asked_for() -> None:
    halves = words_of(lambda piece: (piece[:1], piece[1:]) if len(piece) > 1 else (piece,), lambda token: len(token))
    vocabulary = Vocabulary(split_english)
    numbers = vocabulary.numbers(["don't", "a"])
    assert vocabulary.words(numbers).lengths.tolist() == [2, 3, 1]
    assert vocabulary.words(numbers, halves).flags.tolist() == [1, 4, 1]
    more = vocabulary.numbers(["a", "cat", "don't"])
    assert vocabulary.words(more, halves).lengths.tolist() == [1, 1, 2, 1, 4]
    assert vocabulary.words(more[:0], halves).lengths.tolist() == []


def test_it_recovers_from_an_interruption() -> None:
    def split(piece: str) -> tuple[str, ...]:
        if piece == "bad":
            raise MemoryError
        return (piece,)

    vocabulary = Vocabulary(split)
    with pytest.raises(MemoryError):
        vocabulary.words(vocabulary.numbers(["good", "bad"]))
    vocabulary.trim()
    assert vocabulary.words(vocabulary.numbers(["good", "fine"])).lengths.tolist() == [4, 4]
