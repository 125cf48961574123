"""The native module returns what the functions in Python return, for every text, and keeps to its bounds."""

import gc
import gzip
import hashlib
import json
import random
import resource
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.text import native, native_words
from pipeline.text.native_words import normal_keys, normal_points, properties_of, tokenize
from pipeline.text.spacy_tokens import split_english, split_neutral, split_unspaced
from pipeline.text.words import Vocabulary, normal_words, word_keys
from tests.support.native import SPACES, needs_native, python_only, tricky_texts

pytestmark = needs_native
SPLITS = (split_english, split_neutral, split_unspaced)
Split = Callable[[str], Sequence[str]]


def python_tokens(split: Split, text: str) -> tuple[list[int], list[list[int]]]:
    """What `tokenize` has to return, by the vocabulary."""
    pieces = [line.split() for line in text.splitlines()]
    vocabulary = Vocabulary(split)
    words = vocabulary.words(vocabulary.numbers([piece for line in pieces for piece in line]))
    columns = (words.counts, words.lengths, words.flags, words.codes)
    return list(map(len, pieces)), [column.tolist() for column in columns]


def native_tokens(split: Split, text: str) -> tuple[list[int], list[list[int]]]:
    lines, words = tokenize(split, text)
    return lines, [column.tolist() for column in (words.counts, words.lengths, words.flags, words.codes)]


def texts_of_all_characters(shape: str) -> Iterator[str]:
    """Texts that have each character up to U+1FFFF once, in the place {} of `shape`."""
    for start in range(0, 0x20000, 0x2000):
        yield " ".join(shape.format(chr(code)) for code in range(start, start + 0x2000))


@settings(deadline=None, max_examples=300)
@given(tricky_texts)
def test_tokens_equal_those_in_python(text: str) -> None:
    for split in SPLITS:
        assert native_tokens(split, text) == python_tokens(split, text)


@pytest.mark.parametrize("shape", ["{}", "a{}", "{}B.", "7{}1"])
@pytest.mark.parametrize("split", SPLITS)
def test_tokens_of_every_character(split: Split, shape: str) -> None:
    for text in texts_of_all_characters(shape):
        assert native_tokens(split, text) == python_tokens(split, text)


@settings(deadline=None, max_examples=300)
@given(tricky_texts, st.booleans())
def test_normal_words_equal_those_in_python(text: str, keep_numbers: bool) -> None:
    words = normal_words(text, keep_numbers)
    assert normal_keys(text, keep_numbers).tolist() == word_keys(words).tolist()
    assert normal_points(text, keep_numbers).tolist() == list(map(ord, "".join(words)))


EDGES = (
    "wait…… wait… …… (…) 'cause, 'Cause. :), (:, <3. (<3) (Mr.) Mr., (Mrs.), \"don't\" (can't). I'll, "
    "o'clock. 's S's x’s 5kg 5kg. (10km/h) 100% $5 US$5 US$ C$3 A$ +1 + +a a+ a.m. 10a.m. 10a.m., U.S. "
    "U.S.A. (U.S.) XY. Y. 25°C. °C. é. É. ÉÉ. 1. 1.x 2,y 3., 1.2.3 1..2 1,,2 .5 5. - -- -a a- a-b a--b "
    "x.y X.y x.Y e-mail, https://a.bc/d?e=f. a@b.cd ... a... ...a 中文。 中a文 (中文) あア 한국어. ไทย, עברית' "
    "\"עב\"ר don`t ca n't cannot gonna lets let's Let’s ' '' \" “a” «b» ¿c? ¡d! ΟΔΟΣ ΟΔΟΣ. Σ ΣΑΣ, "
    "İstanbul ﬁn ẞ Ǆ ǅ x̧́ q̣̇ 한 〮가 １，２ ١٫٢ ½ ² ① _a_ a_b __ # a#b … • ·"
)
"""Pieces on both sides of each rule of the tokenizer and of normal words."""


def test_pieces_at_the_edges_of_the_rules() -> None:
    for text in (EDGES, *EDGES.split(), *(f"({piece})," for piece in EDGES.split())):
        for split in SPLITS:
            assert native_tokens(split, text) == python_tokens(split, text)
        for keep_numbers in (False, True):
            words = normal_words(text, keep_numbers)
            assert normal_keys(text, keep_numbers).tolist() == word_keys(words).tolist()


@pytest.mark.parametrize("keep_numbers", [False, True])
@pytest.mark.parametrize("shape", ["{}", "a{}b", "1{}2"])
def test_normal_words_of_every_character(shape: str, keep_numbers: bool) -> None:
    for text in texts_of_all_characters(shape):
        expected = word_keys(normal_words(text, keep_numbers)).tolist()
        assert normal_keys(text, keep_numbers).tolist() == expected


def test_words_of_every_length_around_the_slot_of_a_key() -> None:
    words = ["x" * size for size in range(1, 140)] + ["\u00df" * size for size in range(1, 40)]
    for _ in range(2):  # computed, then cached
        assert normal_keys(" ".join(words), False).tolist() == word_keys(words).tolist()


def texts_by_language(folder: Path) -> dict[str, list[str]]:
    """Up to 60 texts of each language and of each collection beside the project."""
    texts: dict[str, list[str]] = defaultdict(list)
    for name in ("ud", "lingua"):
        file = folder / "langid" / f"{name}.jsonl.gz"
        if not file.exists():
            pytest.skip(f"the texts are not beside the project ({file} is missing)")
        with gzip.open(file, "rt") as lines:
            for line in map(json.loads, lines):
                if len(texts[f"{name} {line['lang']}"]) < 60:
                    texts[f"{name} {line['lang']}"].append(line["text"])
    return texts


def test_real_texts_of_many_languages(shared_data: Path) -> None:
    languages = texts_by_language(shared_data)
    assert len(languages) > 60
    for texts in languages.values():
        text = "\n".join(texts)
        for split in SPLITS:
            assert native_tokens(split, text) == python_tokens(split, text)
        assert normal_keys(text, True).tolist() == word_keys(normal_words(text, True)).tolist()


@pytest.mark.parametrize(
    "text",
    ["", "\0", "a\0b \0", "\ud800", "(" * 5_000, "." * 5_000, "a." * 3_000, "x" * 3_000_000, "\u4e2d" * 5_000, SPACES],
)
def test_hostile_texts(text: str) -> None:
    for split in SPLITS:
        assert native_tokens(split, text) == python_tokens(split, text)
    assert normal_keys(text, False).tolist() == word_keys(normal_words(text)).tolist()


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 32))
def test_blake2s_is_that_of_hashlib(data: bytes, size: int) -> None:
    assert native.loaded().blake2s(data, size) == hashlib.blake2s(data, digest_size=size).digest()


def test_blake2s_of_rfc_7693() -> None:
    """Appendix B, and the self-test of appendix E with messages of its own lengths."""
    digest = "508c5e8c327c14e2e1a72ba34eeb452f37458b209ed63a294d999b4c86675982"
    assert native.loaded().blake2s(b"abc", 32).hex() == digest
    for size in (0, 3, 64, 65, 255, 1024):
        message = bytes(index % 251 for index in range(size))
        assert native.loaded().blake2s(message, 32) == hashlib.blake2s(message).digest()


@pytest.mark.parametrize("size", [0, -1, 33])
def test_a_digest_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"blake2s: expected a size of 1 to 32 bytes"):
        native.loaded().blake2s(b"", size)


def test_an_error_of_the_tokenizer_leaves_the_tokenizer_usable() -> None:
    failing = True

    def split(piece: str) -> Sequence[str]:
        if failing:
            raise MemoryError(piece)
        return split_english(piece)

    tokenizer = native.loaded().Tokenizer(native.loaded().ENGLISH, properties_of, split, {}, {})
    for _ in range(3):
        with pytest.raises(MemoryError, match="e-mail"):
            tokenizer.words("plain words, then e-mail")
    assert tokenizer.cached() == 0
    failing = False
    lines, counts, lengths, _, _ = tokenizer.words("plain words, then e-mail")
    assert np.frombuffer(lines, np.int64).tolist() == [4]
    assert np.frombuffer(counts, np.int64).tolist() == [1, 2, 1, 3]
    assert np.frombuffer(lengths, np.int64).tolist() == [5, 5, 1, 4, 1, 1, 4]


@pytest.mark.parametrize("answer", [None, 3, [b"bytes"], ["a", 1]])
def test_a_tokenizer_that_returns_no_strings_is_refused(answer: object) -> None:
    tokenizer = native.loaded().Tokenizer(native.loaded().ENGLISH, properties_of, lambda piece: answer, {}, {})
    with pytest.raises(TypeError, match="tokenizer: expected"):
        tokenizer.words("an e-mail")


@pytest.mark.parametrize("properties", [lambda code: "x", lambda code: -1, lambda code: 1 / 0])
def test_an_error_of_the_properties_is_raised(properties: Callable[[int], object]) -> None:
    tokenizer = native.loaded().Tokenizer(native.loaded().NEUTRAL, properties, split_neutral, {}, {})
    with pytest.raises((TypeError, OverflowError, ZeroDivisionError)):
        tokenizer.words("text")


def test_other_types_are_refused() -> None:
    module = native.loaded()
    for method in (
        module.Tokenizer(1, properties_of, split_neutral, {}, {}).words,
        module.WordSet(["a"], [], []).may_have,
    ):
        with pytest.raises(TypeError, match="expected str, got bytes"):
            method(b"text")
    with pytest.raises(ValueError, match="dialect: expected 0, 1 or 2, got 3"):
        module.Tokenizer(3, properties_of, split_neutral, {}, {})
    with pytest.raises(ValueError, match="expected as many lengths as codes"):
        module.gopher_ngrams(np.zeros(2, np.uint64), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="64-bit numbers"):
        module.recurring_ngrams(b"1234567")


def test_memory_does_not_grow_with_the_texts() -> None:
    """Every text has pieces that the caches have not seen, which they must forget again."""
    generator = random.Random(0)
    tokenizer = native.loaded().Tokenizer(native.loaded().ENGLISH, properties_of, split_english, {}, {})

    def read(number: int) -> None:
        for _ in range(number):
            pieces = (f"{generator.getrandbits(48):x}-{generator.getrandbits(48):x}" for _ in range(20))
            text = " ".join(pieces)
            tokenizer.words(text)
            normal_keys(text, True)

    read(12_000)  # more pieces than the cache has room for
    assert 0 < tokenizer.cached() < 150_000
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read(12_000)
    assert tokenizer.cached() < 150_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # [KiB]


def test_short_calls_leave_nothing_behind() -> None:
    def read() -> None:
        for _ in range(50_000):
            tokenize(split_english, "One line, two words.\nDon't \ud800 stop")
            normal_points("A line 3.5", False)

    read()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000  # [KiB]


def test_python_is_used_without_the_module() -> None:
    assert native.implementation() == "native"
    with python_only():
        assert native.implementation() == "python"
        assert not native_words.is_native(split_english)
        with pytest.raises(RuntimeError, match="expected the native module, got none"):
            native.loaded()
    assert native_words.is_native(split_english)
    assert not native_words.is_native(str.split)


def test_a_module_of_other_sources_is_not_used() -> None:
    for package in ("pipeline.text", "pipeline.extract"):
        module = native.load(package)
        assert module is not None
        assert native.current(module, package) is module
        other = SimpleNamespace(SOURCES="those before an update")
        assert native.current(other, package) is None  # type: ignore[arg-type]
    assert native.load("pipeline.quality") is None


def test_forgetting_clears_the_caches() -> None:
    tokenize(split_english, "a well-known e-mail")
    assert native_words._tokenizer(split_english).cached() > 0
    native_words.forget()
    assert native_words._tokenizer(split_english).cached() == 0
