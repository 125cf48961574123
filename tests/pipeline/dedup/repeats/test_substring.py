"""Tests of repeated runs: equal to a brute-force search over all windows of a corpus, to the token."""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dedup.config import RepeatsConfig
from pipeline.dedup.repeats.keys import (
    SEED,
    SUBSTRING,
    Document,
    KeyOccurrences,
    KnownRepeats,
    key_bytes,
    known_repeats,
    tallies,
)
from pipeline.dedup.repeats.step import repeated_runs
from pipeline.dedup.repeats.units import Tokens, covered_runs, grams, scoped, seeds, sliding_extremes, window_seeds
from tests.support.repeats_oracle import repeats_by_steps, total_rows

NO_SCOPE = np.uint64(0)


def brute_force(texts: Sequence[str], unit: str, n: int, min_count: int, keep_first: bool) -> list[set[int]]:
    """Return the tokens of each text in repeated windows of n tokens; texts are in keep order."""
    tokens = [list(text.encode()) if unit == "bytes" else text.split() for text in texts]
    where: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for number, words in enumerate(tokens):
        for start in range(len(words) - n + 1):
            where[tuple(words[start : start + n])].append((number, start))
    cut: list[set[int]] = [set() for _ in texts]
    for occurrences in where.values():
        if len(occurrences) >= min_count:
            for number, start in sorted(occurrences)[int(keep_first) :]:
                cut[number].update(range(start, start + n))
    return cut


def by_steps(texts: Sequence[str], config: RepeatsConfig, parts: int = 1, at_once: int = 1 << 20) -> list[set[int]]:
    """Return the same by seeds, windows and totals, with the texts divided into parts."""
    cut = []
    for number, known in enumerate(repeats_by_steps(texts, config, parts, at_once)):
        document = Document(number.to_bytes(16, "big"), texts[number], NO_SCOPE, np.zeros(1, np.uint8))
        tokens = Tokens(texts[number], config.substring_unit)
        chars = repeated_runs(document, known, config)
        if config.substring_unit == "bytes":
            cut.append({index for start, end in chars for index in range(start, end)})
        else:
            starts = [len(texts[number][:start].split()) for start, _ in chars]
            ends = [len(texts[number][:end].split()) for _, end in chars]
            cut.append({index for start, end in zip(starts, ends) for index in range(start, end)})
        assert tokens.chars(np.zeros((0, 2), np.int64)) == []
    return cut


def settings_of(unit: str, n: int, **others: object) -> RepeatsConfig:
    return RepeatsConfig(units=("substring",), substring_unit=unit, substring_length=n, **others)


def test_a_run_by_hand():
    texts = ["a b c d e f", "x b c d e y", "b c d", "c d e f"]
    config = settings_of("words", 4)
    # b c d e occurs in 0 and 1, c d e f in 0 and 3; the first of each is in 0
    assert by_steps(texts, config) == [set(), {1, 2, 3, 4}, set(), {0, 1, 2, 3}]
    assert brute_force(texts, "words", 4, 2, True) == by_steps(texts, config)
    every = settings_of("words", 4, keep_first=False)
    assert by_steps(texts, every) == [{1, 2, 3, 4, 5}, {1, 2, 3, 4}, set(), {0, 1, 2, 3}]
    assert by_steps(texts, settings_of("words", 5)) == [set()] * 4


def test_min_count_on_both_sides():
    texts = ["a b c d", "z a b c d", "a b c d y"]
    assert by_steps(texts, settings_of("words", 4, min_count=3)) == [set(), {1, 2, 3, 4}, {0, 1, 2, 3}]
    assert by_steps(texts, settings_of("words", 4, min_count=4)) == [set()] * 3


def test_a_run_that_repeats_inside_one_document_and_overlaps_itself():
    assert by_steps(["a b a b a b a b"], settings_of("words", 4)) == [{2, 3, 4, 5, 6, 7}]
    assert by_steps(["x x x x x x"], settings_of("words", 4)) == [{1, 2, 3, 4, 5}]
    assert by_steps(["aaaaaaaaaa"], settings_of("bytes", 4)) == [set(range(1, 10))]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.text("ab ", max_size=60), min_size=1, max_size=6),
    st.sampled_from(["words", "bytes"]),
    st.integers(4, 12),
    st.integers(2, 4),
    st.booleans(),
)
def test_runs_are_those_of_brute_force(texts: list[str], unit: str, n: int, min_count: int, first: bool) -> None:
    if unit == "words":
        texts = [" ".join(text.replace(" ", "c")) for text in texts]
    config = settings_of(unit, n, min_count=min_count, keep_first=first)
    expected = brute_force(texts, unit, n, min_count, first)
    assert by_steps(texts, config) == expected
    assert by_steps(texts, config, parts=3, at_once=5) == expected


@pytest.mark.parametrize(("unit", "n"), [("words", 13), ("words", 20), ("bytes", 50)])
def test_runs_of_copied_passages_are_those_of_brute_force(unit: str, n: int):
    draw = random.Random(7)
    source = [draw.choice(["the", "of", "and", "to"]) + str(draw.randrange(40)) for _ in range(400)]
    texts = []
    for _ in range(40):
        words = [str(draw.randrange(10**6)) for _ in range(draw.randrange(60))]
        for _ in range(draw.randrange(4)):
            start, at = draw.randrange(400), draw.randrange(len(words) + 1)
            words[at:at] = source[start : start + draw.randrange(5, 60)]
        texts.append(" ".join(words))
    expected = brute_force(texts, unit, n, 2, True)
    assert by_steps(texts, settings_of(unit, n), parts=4, at_once=100) == expected
    assert sum(map(len, expected)) > 500


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(2, 9), st.integers(4, 20))
def test_windows_that_are_equal_have_equal_seeds_and_a_seed_at_as_many_places(numbers, width, n):
    codes = np.array(numbers, np.uint64)
    least, greatest = ([take(numbers[i : i + width]) for i in range(len(numbers) - width + 1)] for take in (min, max))
    if len(numbers) >= width:
        assert sliding_extremes(codes, width, np.minimum).tolist() == least
        assert sliding_extremes(codes, width, np.maximum).tolist() == greatest
    windows = [tuple(numbers[i : i + n]) for i in range(len(numbers) - n + 1)]
    hashes, of_window = grams(codes, n), window_seeds(codes, n)
    assert len(hashes) == len(of_window) == len(windows)
    places = seeds(codes, n).tolist()
    for window in set(windows):
        own = [place for place, other in enumerate(windows) if other == window]
        assert len({int(hashes[place]) for place in own}) == len({int(of_window[place]) for place in own}) == 1
        assert places.count(int(of_window[own[0]])) >= len(own)
    assert len({int(value) for value in hashes}) == len(set(windows))


def test_few_places_are_seeds():
    codes = np.random.default_rng(0).integers(0, 1 << 63, 200_000).astype(np.uint64)
    share = len(seeds(codes, 50)) / len(codes)
    assert 0.07 < share < 0.078  # 2 in 27


def test_words_are_split_at_whitespace_and_unspaced_writing_into_characters():
    tokens = Tokens("Ein  Wort,\n北京 ok", "words")
    assert tokens.pieces == ["Ein", "Wort,", "北", "京", "ok"]
    assert tokens.chars(np.array([[1, 3], [4, 5]])) == [(5, 12), (14, 16)]
    same = Tokens("Ein Wort, 北 京\tok", "words")
    assert same.codes.tolist() == tokens.codes.tolist()
    assert same.checks(np.array([0]), 5).tolist() == tokens.checks(np.array([0]), 5).tolist()


def test_runs_of_bytes_cover_whole_characters():
    tokens = Tokens("aé\ud800b", "bytes")  # 1, 2, 3 and 1 bytes
    assert [tokens.chars(np.array([run])) for run in ([0, 2], [1, 3], [2, 7], [3, 6], [4, 5], [0, 7])] == [
        [(0, 1)],
        [(1, 2)],
        [(2, 4)],
        [(2, 3)],
        [],
        [(0, 4)],
    ]


def test_covered():
    assert covered_runs(np.array([], np.int64), 3).tolist() == []
    assert covered_runs(np.array([0, 2, 5, 9]), 3).tolist() == [[0, 8], [9, 12]]


def test_windows_of_one_fingerprint_are_distinguished_by_their_bytes():
    keys = np.array([[7, 1], [7, 3], [7, 9], [8, 3]], np.uint64)
    documents = np.zeros((4, 16), np.uint8)
    known = KnownRepeats(keys, documents, np.array([-1, 5, -1, -1]))
    requested = np.array([[7, 0], [7, 1], [7, 3], [7, 4], [7, 9], [7, 10], [8, 3], [8, 4], [9, 1]], np.uint64)
    repeated = known.is_repeat(requested, np.full(9, 5), bytes(16))
    assert repeated.tolist() == [False, True, False, False, True, False, True, False, False]
    assert known.is_repeat(requested[2:3], np.array([6]), bytes(16)).tolist() == [True]
    assert known.has_first_number(np.array([6, 7, 9], np.uint64)).tolist() == [False, True, False]


def test_a_seed_or_window_of_another_scope_is_another():
    keys = np.array([1, 2], np.uint64)
    assert scoped(keys, SEED, NO_SCOPE).tolist() != scoped(keys, SUBSTRING, NO_SCOPE).tolist()
    assert scoped(keys, SEED, np.uint64(5)).tolist() != scoped(keys, SEED, NO_SCOPE).tolist()


def test_a_key_of_two_chunks_keeps_the_place_that_is_first():
    order = np.frombuffer(b"\x01" + bytes(range(16)) + bytes(4), np.uint8)
    places = [KeyOccurrences(order, np.array([[3]], np.uint64), np.array([at])) for at in (4, 2)]
    rows = total_rows(list(tallies(iter(places), 0, 1)), 2, True)
    (known,) = known_repeats(rows, (1,))
    assert len(known) == 1
    key = np.array([[3], [3]], np.uint64)
    assert known.is_repeat(key, np.array([4, 2]), bytes(range(16))).tolist() == [True, False]
    assert key_bytes(key)[0].tobytes() == b"\0" * 7 + b"\3"


@pytest.mark.parametrize(("unit", "n"), [("words", 50), ("bytes", 100)])
def test_runs_of_real_newswire_are_those_of_brute_force(shared_data, unit: str, n: int):
    with gzip.open(shared_data / "dedup" / "reuters_pairs.jsonl.gz") as file:
        pairs = [json.loads(line) for line in file][::3]
    named = {pair[side] for pair in pairs for side in "ab"}
    with gzip.open(shared_data / "sources" / "news" / "reuters.jsonl.gz") as file:
        texts = [row["text"] for row in map(json.loads, file) if row["id"] in named]
    assert all(map(str.isascii, texts))  # so that bytes are characters
    expected = brute_force(texts, unit, n, 2, True)
    assert by_steps(texts, settings_of(unit, n), parts=5, at_once=1000) == expected
    cut = sum(map(len, expected))
    assert cut > 5000
