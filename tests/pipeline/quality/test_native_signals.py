"""Every signal, cut and key of a text is the same with the native module and in Python alone."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.minhash.stage import SignatureConfig, anchor, shingle_hashes, signature
from pipeline.quality.config import QualityConfig
from pipeline.quality.gopher import ngram_characters
from pipeline.quality.repeated_lines import repeated_line_cuts
from pipeline.quality.stage import make
from pipeline.quality.text import (
    SIZES,
    TextView,
    read_normal_pieces,
    read_pieces,
    read_raw_words,
    read_unicode_words,
    recurring_ngrams,
)
from pipeline.text.spacy_tokens import split_english
from pipeline.text.words import Codes, Vocabulary, Words
from schemas.signals import FAMILIES
from tests.pipeline.text.test_native import texts_of_all_characters
from tests.support.native import needs_native, python_only, tricky_texts

pytestmark = needs_native
READERS = (read_pieces, read_normal_pieces, read_raw_words, read_unicode_words)
EVERYTHING = QualityConfig(families=(*FAMILIES, "lines"), cut_lines=("c4", "refinedweb"), cut_repeated_lines=True)
Measure = Callable[[dict[str, Any]], object]


def both(function: Callable[[], Any]) -> tuple[Any, Any]:
    """What a function returns with the native module, and in Python alone."""
    with python_only():
        expected = function()
    return function(), expected


def columns(reader: Any, text: str) -> list[list[int]]:
    return [column.tolist() for column in TextView(text, Vocabulary(split_english)).read(reader)]


def measured(function: Measure, text: str, language: str) -> dict[str, Any]:
    """The row of a text with its signature; the keys of its words are in the signature."""
    row: dict[str, Any] = {"text": text, "language": language}
    function(row)
    words = row.pop("_words")
    for numbers in ("zero", "kept"):
        config = SignatureConfig.model_validate({"numbers": numbers})
        row[numbers] = signature(row["_body"], language, config, words)
        row[f"anchor of {numbers}"] = anchor(shingle_hashes(row["_body"], language, config, words), 1)
    return row


@settings(max_examples=300)
@given(tricky_texts)
def test_words_of_each_dialect(text: str) -> None:
    for reader in READERS:
        result, expected = both(lambda reader=reader: columns(reader, text))
        assert result == expected


@pytest.mark.parametrize("shape", ["{}", "a{}", "A{}b,", "\u0431{}\u0432"])
def test_words_of_every_character(shape: str) -> None:
    for text in texts_of_all_characters(shape):
        for reader in READERS:
            result, expected = both(lambda reader=reader, text=text: columns(reader, text))
            assert result == expected


@settings(max_examples=200)
@given(tricky_texts, st.sampled_from(("en", "de", "zh", "xx")))
@example("Read more...\nSign-in\n12\n\nA line. [1] {\n" * 3, "en")
@example("A long line of prose that is longer than fifty characters, twice.\r\n" * 2, "en")
def test_every_value_of_a_row(text: str, language: str) -> None:
    result, expected = both(lambda: measured(make(EVERYTHING, {}), text, language))
    assert result == expected


codes = st.lists(st.integers(0, 3), max_size=60).map(lambda items: np.array(items, np.uint64))


def as_lists(words: Codes) -> list[tuple[list[int], int, list[int]]]:
    # The order of the most frequent n-grams has no meaning.
    return [(found.places.tolist(), found.most, sorted(found.firsts.tolist())) for found in recurring_ngrams(words)]


@settings(max_examples=300)
@given(codes, st.integers(0, 2**32))
def test_recurring_ngrams(words: Codes, factor: int) -> None:
    result, expected = both(lambda: as_lists(words * np.uint64(factor)))
    assert result == expected
    assert len(result) == len(SIZES)


@settings(max_examples=300)
@given(codes, st.integers(0, 2**32), st.data())
def test_ngrams_of_gopher(words: Codes, factor: int, data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, 4), min_size=len(words), max_size=len(words))), np.int64)
    tokens = Words(lengths, np.ones(len(words), np.uint8), words * np.uint64(factor), lengths)
    result, expected = both(lambda: list(ngram_characters(tokens)))
    assert result == expected


def test_ngrams_by_hand() -> None:
    """`a b a b a b`, with words of 1 character: `a b` occurs three times, and `b a` twice."""
    tokens = Words(np.ones(6, np.int64), np.ones(6, np.uint8), np.array([1, 2] * 3, np.uint64), np.ones(6, np.int64))
    # (a b) three times and 3 characters with its space; (a b a) twice; (a b a b) twice
    assert list(ngram_characters(tokens))[:3] == [9, 10, 14]
    assert list(ngram_characters(tokens))[3:] == [0, 0, 0, 0, 0, 0]
    assert [(found.places.tolist(), found.most) for found in recurring_ngrams(tokens.codes)][:4] == [
        ([0, 1, 2, 3, 4], 3),
        ([0, 1, 2, 3], 2),
        ([0, 2], 2),
        ([], 1),
    ]


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(("a line of prose that is long enough to be cut", "other", "\t", "  ", "\u2028", "\n", "\r\n")),
        max_size=12,
    )
)
@example(["twenty chars of line", "\n", "twenty chars of line"])
@example(["nineteen characters", "\n", "nineteen characters"])
def test_repeated_lines(parts: list[str]) -> None:
    text = "".join(parts)
    result, expected = both(lambda: repeated_line_cuts(text, text.splitlines(keepends=True), "zh"))
    assert result == expected


@pytest.mark.parametrize(("quarter", "dialect"), list(enumerate(["datatrove", "dclm", "dolma", "redpajama"])))
def test_real_pages(quarter: int, dialect: str, shared_data: Path) -> None:
    """A quarter of the 1,689 pages that the peers have decided; every signal of every family is measured."""
    file = shared_data.parent / "peers" / "filters_in.jsonl.gz"
    if not file.exists():
        pytest.skip(f"the pages are not beside the project ({file.name} is missing)")
    function = make(QualityConfig(dialect=dialect, families=(*FAMILIES, "lines")), {})  # type: ignore[arg-type]
    with gzip.open(file, "rt") as lines:
        texts = [json.loads(line)["text"] for number, line in enumerate(lines) if number % 4 == quarter]
    assert len(texts) > 400
    result, expected = both(lambda: [measured(function, text, "en") for text in texts])
    assert result == expected
