"""Tests of the units of shingles: both paths return the keys of the text's normalized words."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.minhash.shingles import _as_ascii, _KnownWords, shingle_units, text_keys, uses_characters
from pipeline.minhash.stage import SignatureConfig, signature
from pipeline.text.words import normal_words, word_keys

pytestmark = pytest.mark.usefixtures("implementation")
LETTERS = "aAbZ\u00e9\u00f6\u00df’“–—\u00a0 \n\t0123.,-'=≠\u0301١٫،１．İΣσςK½²\u200b\ud800_#ñ中한"
PADDING = " plain words of ascii so that most of the text is ascii, and some more of them for good measure" * 3


def expected(text: str) -> list[int]:
    return word_keys(normal_words(text)).tolist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \n", []),
        ("?!... --", []),
        ("One, two", ["one", "two"]),
        ("1,000,000 or 1.5.2", ["0", "0", "or", "0", "0"]),
        ("abc123def 4u 2x4", ["abc0def", "0u", "0x0"]),
        ("1. 2,3", ["0", "0"]),
        ("Don’t “quote” naïve café–bar", ["don", "t", "quote", "naive", "cafe", "bar"]),
        ("x" * 13 + " " + "x" * 14, ["x" * 13, "x" * 14]),
        ("end" + "y" * 40, ["end" + "y" * 40]),
    ],
)
def test_keys_of_texts(text: str, words: list[str]) -> None:
    assert normal_words(text) == words
    assert text_keys(text).tolist() == word_keys(words).tolist()


KEPT = SignatureConfig(numbers="kept")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,000,000 or 1.5.2", ["1", "000", "000", "or", "1", "5", "2"]),
        ("Q3 2x4 007", ["q3", "2x4", "007"]),
        ("1\u066b5 \uff11\uff12 \u0661\u0662, \u00bd", ["1\u066b5", "12", "12", "\u00bd"]),  # digits of other scripts
        ("Caf\u00e9, 3.50", ["cafe", "3", "50"]),
    ],
)
def test_numbers_that_keep_their_digits(text: str, words: list[str]) -> None:
    assert normal_words(text, keep_numbers=True) == words
    assert shingle_units(text, "en", None, KEPT)[0].tolist() == word_keys(words).tolist()
    ignored = text_keys(text)  # keys with numbers as 0, which the quality stage computes
    assert shingle_units(text, "en", ignored, KEPT)[0].tolist() == word_keys(words).tolist()


@settings(deadline=None, max_examples=100)
@given(st.text(LETTERS, max_size=60) | st.text(max_size=30))
def test_the_choice_of_numbers_changes_only_words_with_digits(text: str) -> None:
    kept = shingle_units(text, "en", None, KEPT)[0].tolist()
    assert kept == (word_keys(normal_words(text, keep_numbers=True)).tolist() or word_keys([text]).tolist())
    if not any(char.isdecimal() for char in text):
        assert kept == shingle_units(text, "en", None, SignatureConfig())[0].tolist()


@pytest.mark.parametrize("family", ["fast", "datasketch", "datatrove", "simhash"])
@pytest.mark.parametrize("language", ["en", "de", "zh"])
def test_texts_that_differ_in_numbers_alone(family: str, language: str) -> None:
    zero, kept = (SignatureConfig.model_validate({"family": family, "numbers": value}) for value in ("zero", "kept"))
    one, other, plain = (
        "net profit of 12 mln and of 7",
        "net profit of 15 mln and of 9",
        "net profit and no more",
    )
    assert signature(one, language, zero) == signature(other, language, zero)
    assert signature(one, language, kept) != signature(other, language, kept)
    assert signature(plain, language, zero) == signature(plain, language, kept)


def test_the_default_of_numbers_is_no_part_of_the_content() -> None:
    assert "numbers" not in SignatureConfig().content()
    assert SignatureConfig().content() == SignatureConfig(numbers="zero").content()
    assert KEPT.content() == {**SignatureConfig().content(), "numbers": "kept"}


@settings(deadline=None, max_examples=300)
@given(st.text(LETTERS, max_size=60) | st.text(st.characters(max_codepoint=127)) | st.text(max_size=30))
def test_keys_are_those_of_normal_words(text: str) -> None:
    assert text_keys(text).tolist() == expected(text)
    assert text_keys(text + PADDING).tolist() == expected(text + PADDING)


@pytest.mark.slow
def test_every_character_in_context() -> None:
    texts = (f"a{chr(code)}b 1{chr(code)}2 {chr(code)}" + PADDING for code in range(0x110000))
    assert [text for text in texts if _as_ascii(text) is not None and text_keys(text).tolist() != expected(text)] == []


def test_which_texts_are_as_good_as_ascii() -> None:
    assert _as_ascii("İt’s “déjà vu” – 1½?" + PADDING) is None  # ½ stays a letter of its word
    assert _as_ascii("İt’s “déjà vu” – １?" + PADDING) == "it s  deja vu    0?" + PADDING
    assert _as_ascii("слова" + PADDING) is None
    assert _as_ascii("e\u0301" + PADDING) is None  # a mark alone would join its neighbors
    assert _as_ascii("é" * 20) is None  # most of it is not ASCII


@pytest.mark.parametrize("word", ["a", "b" * 5000])
def test_long_texts_are_cut_between_words(word: str) -> None:
    text = f"{word} some, 12.5 others\n" * (400_000 // (len(word) + 20))
    assert text_keys(text).tolist() == expected(text)


def test_a_word_longer_than_a_span() -> None:
    text = "before " + "x" * 70_000 + " after"
    assert text_keys(text).tolist() == expected(text)


def test_known_words_that_share_a_slot_keep_their_own_keys() -> None:
    known = _KnownWords()
    numbers = np.arange(1, 400_001, dtype=np.uint64)  # more than there are places
    answers = [known.keys(numbers, lambda place: str(place + 1).encode()) for _ in range(2)]
    assert answers[0].tolist() == answers[1].tolist() == word_keys(map(str, range(1, 400_001))).tolist()
    some = np.array([0, 7, 0], np.uint64)  # 0: too long to have a number
    assert known.keys(some, lambda place: f"long {place}".encode())[[0, 2]].tolist() == [
        *word_keys(["long 0", "long 2"])
    ]


def test_units_of_characters_are_code_points() -> None:
    config = SignatureConfig(unit="chars", shingle_chars=3)
    units, size = shingle_units("Ab, é\U00020000", "en", None, config)
    assert (units.tolist(), size) == ([97, 98, 101, 0x20000], 3)
    assert shingle_units("?", "en", None, config)[0].tolist() == word_keys(["?"]).tolist()


@pytest.mark.parametrize(
    ("language", "unit", "chars"),
    [("zh", "auto", True), ("en", "auto", False), ("zh", "words", False), ("en", "chars", True)],
)
def test_by_characters(language: str, unit: str, chars: bool) -> None:
    assert uses_characters(language, SignatureConfig(unit=unit)) is chars


def test_keys_of_real_texts(shared_data: Path) -> None:
    with gzip.open(shared_data / "quality" / "cc_en_head.jsonl.gz", "rt", encoding="utf-8") as stream:
        texts = [json.loads(line)["text"] for line in stream]
    assert len(texts) == 10
    for text in texts:
        assert text_keys(text).tolist() == expected(text)
