"""Tests of the measurements: cuts against the text C4 leaves, repetition against its definition, sentences."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.quality.c4_fineweb import POLICIES, SCRIPT, C4LineRules, fineweb_signals
from pipeline.quality.gopher import (
    STOP_WORDS,
    count_repeats,
    gopher_signals,
    repetition_signals,
    split_lines,
    split_paragraphs,
    stop_codes,
)
from pipeline.quality.stage import QualityMeasures, Vocabularies, measure
from pipeline.text.spacy_tokens import split_english
from pipeline.text.words import Vocabulary

pytestmark = pytest.mark.usefixtures("implementation")
VOCABULARY = Vocabulary(split_english)


def cut(text: str, **rules: Any) -> tuple[list[tuple[int, int]], str]:
    """Cuts and body of an English text."""
    row = measure(text, "en", QualityMeasures(lines=C4LineRules(**rules)), VOCABULARY)
    return row["cuts"], row["_body"]


def without(text: str, cuts: Sequence[tuple[int, int]]) -> str:
    """The text minus its cuts, which must be sorted, disjoint, and neither empty nor adjacent."""
    assert all(0 <= start < end <= len(text) for start, end in cuts)
    assert all(left[1] < right[0] for left, right in pairwise(cuts))
    edges = [0, *chain.from_iterable(cuts), len(text)]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2]))


# ------------------------------------------------------------------------------------------------------------ C4 lines


@pytest.mark.parametrize(
    ("text", "cuts", "body"),
    [
        ("one two three", [], "one two three"),
        ("one two three\nfour five", [(13, 23)], "one two three"),
        ("four five\none two three", [(0, 10)], "one two three"),
        ("one two three\n\n\nfour five six", [(14, 16)], "one two three\nfour five six"),
        ("one two three\nx\nfour five six\n", [(14, 16), (29, 30)], "one two three\nfour five six"),
        ("  one two three  \n  four five six ", [(0, 2), (15, 17), (18, 20), (33, 34)], "one two three\nfour five six"),
        ("one two three\r\nfour five six", [(13, 14)], "one two three\nfour five six"),
        ("one two[12] three [edit]\nfour five six", [(7, 11), (18, 24)], "one two three \nfour five six"),
        ("[1] one two\none [citation needed] two", [(0, 4), (16, 33)], "one two\none  two"),
        ("one two[1]", [(0, 10)], ""),
        ("one two [a] [1a]", [], "one two [a] [1a]"),
        ("use JavaScript now\none two three", [(0, 19)], "one two three"),
        ("see our Privacy Policy here\none two three", [(0, 28)], "one two three"),
        ("This site uses cookies daily\nThe use of cookies is fine\nplease use cookies now", [(0, 78)], ""),
        ("read the terms of use\nour cookie policy applies\none two three", [(0, 48)], "one two three"),
        ("one two three\u2028four five six", [], "one two three\u2028four five six"),
        ("only two\nwords here", [(0, 19)], ""),
        ("", [], ""),
    ],
)
def test_cuts(text: str, cuts: list[tuple[int, int]], body: str) -> None:
    assert cut(text) == (cuts, body)
    assert without(text, cuts) == body


@pytest.mark.parametrize(("length", "kept"), [(1000, True), (1001, False)])
def test_long_words(length: int, kept: bool) -> None:
    line = f"one two {'x' * length}"
    assert cut(line)[1] == (line if kept else "")


@pytest.mark.parametrize(
    ("line", "kept"),
    [("one two three.", 1), ('she said "no"', 1), ("so it goes!", 1), ("one two three", 0), ("one two three...", 0)],
)
def test_terminal_punctuation(line: str, kept: int) -> None:
    assert cut(line, terminal_punctuation=True)[1] == line * kept
    assert cut(line)[1] == line


def test_lines_are_counted_without_being_cut() -> None:
    row = measure("one two three.\n\nfour five\n", "en", QualityMeasures(cut_lines=frozenset()), VOCABULARY)
    assert (row["c4_lines_cut"], row["c4_num_sentences"]) == (1, 1)
    assert (row["cuts"], row["_body"]) == ([], "one two three.\n\nfour five\n")


def c4_text(text: str) -> str:
    """What C4's line rules leave, by their definition."""
    kept = []
    for line in map(str.strip, text.splitlines()):
        words, bare = line.split(), re.sub(r"\[\d*]|\[edit]|\[citation needed]", "", line)
        if len(words) < 3 or max(map(len, words)) > 1000 or "javascript" in bare.lower():
            continue
        if not re.search("terms of use|(privacy|cookie) policy|(uses|use of|use) cookies", bare.lower()):
            kept.append(bare)
    return "\n".join(kept).strip()


LINES = st.lists(
    st.sampled_from(
        ["word", "Javascript", "use cookies", "[1]", "[edit]", "[x]", " ", "  ", "\n", "\n", "\n\n", "a b c."]
    )
)


@settings(deadline=None, max_examples=200)
@given(LINES)
def test_text_minus_cuts_is_what_c4_leaves(tokens: list[str]) -> None:
    text = " ".join(tokens)
    cuts, body = cut(text)
    assert without(text, cuts) == body == c4_text(text)


@settings(deadline=None, max_examples=100)
@given(st.text())
def test_cuts_of_any_text_are_valid(text: str) -> None:
    assume(not any(phrase in text.lower() for phrase in (*POLICIES, SCRIPT, "[edit]", "[citation needed]")))
    cuts, body = cut(text, min_words=1)
    assert without(text, cuts) == body
    assert body.split() == re.sub(r"\[\d*]", "", text).split()


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("no end at all", 1),
        ("One two three. Four five six", 2),
        ("One two three.\nFour five six.", 2),
        ("One two three... four five", 1),
        ("Wait, what?! No way. (Yes.) Fine", 4),
        ("Mr. Smith e.g. said so", 1),
        ("It is 3.14 or so", 1),
        ('He said "go." She went', 2),
    ],
)
def test_sentences(text: str, sentences: int) -> None:
    assert measure(text, "en", QualityMeasures(), VOCABULARY)["c4_num_sentences"] == sentences


# ---------------------------------------------------------------------------------------------------------- repetition


@settings(deadline=None)
@given(st.text("a \n", max_size=12))
def test_lines_and_paragraphs_are_those_of_the_definition(text: str) -> None:
    assert split_lines(text) == re.split("\n+", text)
    assert split_paragraphs(text) == re.split("\n{2,}", text.strip())


@pytest.mark.parametrize(
    ("items", "expected"),
    [([], (0, 0)), (["a", "b"], (0, 0)), (["ab", "ab", "c", "ab", ""], (2, 4)), (["", ""], (1, 0))],
)
def test_repeats(items: list[str], expected: tuple[int, int]) -> None:
    assert count_repeats(items) == expected


def top_characters(words: list[str], n: int) -> int:
    """Characters of the most frequent n-gram, by its definition."""
    grams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    return max((len(gram) * count for gram, count in grams.most_common(1)), default=0)


def repeated_characters(words: list[str], n: int) -> int:
    """Characters in repeated n-grams, by the greedy scan of the definition."""
    seen, characters, at = set(), 0, 0
    while at + n <= len(words):
        gram = "".join(words[at : at + n])
        if gram in seen:
            characters += len(gram)
            at += n
        else:
            seen.add(gram)
            at += 1
    return characters


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["1", "11", "111", "a", "bb", "ccc"]), max_size=60))
def test_ngrams_are_those_of_the_definition(words: list[str]) -> None:
    text = " ".join(words)
    signals = repetition_signals(text, VOCABULARY.words(VOCABULARY.numbers(words)))
    for n in (2, 3, 4):
        assert signals[f"gopher_top_{n}gram"] == top_characters(words, n) / max(len(text), 1)
    for n in range(5, 11):
        assert signals[f"gopher_dup_{n}gram"] == repeated_characters(words, n) / max(len(text), 1)


def test_repeated_ngrams_ignore_where_their_words_part() -> None:
    text = "1 2 3 4 56 x 12 3 4 5 6"
    words = text.split()
    signals = repetition_signals(text, VOCABULARY.words(VOCABULARY.numbers(words)))
    assert signals["gopher_dup_5gram"] == 6 / 23


# -------------------------------------------------------------------------------------------------- Gopher and FineWeb


def test_gopher_signals() -> None:
    text = "• The cat, and # cats…\n- it’s 42 of... \n\nthe end"
    words = VOCABULARY.words(VOCABULARY.numbers(text.split()))
    tokens = "• The cat , and # cats … - it ’s 42 of ... the end"
    assert words.lengths.tolist() == [len(token) for token in tokens.split()]
    assert gopher_signals(text, text.splitlines(), words, stop_codes(STOP_WORDS)) == {
        "gopher_num_words": 11,  # the bullet is no punctuation in the dialect
        "gopher_mean_word_length": len("•Thecatandcatsit’s42oftheend") / 11,
        "gopher_hash_ratio": 1 / 16,
        "gopher_ellipsis_ratio": 2 / 16,
        "gopher_bullet_lines": 2 / 4,
        "gopher_ellipsis_lines": 2 / 4,
        "gopher_alpha_words": 9 / 16,
        "gopher_stop_words": 3,
    }


def test_fineweb_signals() -> None:
    body = "Ends well.\n\nends badly\n  \nends badly\n" + "x" * 31 + "。\n"
    assert fineweb_signals(body, 12) == {
        "fineweb_terminal_lines": 2 / 4,
        "fineweb_short_lines": 3 / 4,
        "fineweb_dup_line_chars": 10 / (len(body) - 6),
        "fineweb_newline_ratio": 6 / 12,
    }


def test_a_vocabulary_serves_all_languages_that_are_split_alike() -> None:
    vocabularies = Vocabularies()
    assert vocabularies["de"] is vocabularies["fr"] is vocabularies["xx"]
    assert len({id(vocabularies[language]) for language in ("en", "de", "zh", "ja")}) == 3
