"""Tests of the stage `signature`: shingles, equality of texts, digests, anchors, settings, and the row function."""

import hashlib
import tracemalloc
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.minhash.fast import sketch
from pipeline.minhash.permutations import BLOCK, draw_odd_numbers, mix_bits
from pipeline.minhash.shingles import shingles
from pipeline.minhash.stage import (
    FAMILIES,
    SIGNATURE,
    SignatureConfig,
    anchor,
    as_matrix,
    band_keys,
    jaccard,
    make,
    raw_digest,
    shingle_hashes,
    signature,
    similarity,
    text_digest,
    value_type,
)
from pipeline.text.spacy_tokens import split_english
from pipeline.text.words import Vocabulary, normal_words, word_keys
from schemas.errors import ContractError

CONFIG = SignatureConfig()
TEXT = "The quick brown fox jumps over the lazy dog, 42 times a day; nobody knows why it does so."
CHINESE = "今天下午有一个关于历史和文化的讲座，欢迎大家参加。"
EVERY_FAMILY = [SignatureConfig(family=family) for family in ("fast", "datasketch", "datatrove", "simhash")]


@pytest.mark.parametrize(
    "other",
    [
        TEXT,
        TEXT.upper(),
        TEXT.replace(" ", "\n\n"),
        TEXT.replace(",", "").replace(";", " --"),
        TEXT.replace("42", "1.5"),
        TEXT.replace("o", "ö"),
    ],
)
def test_what_does_not_change_the_signature(other: str) -> None:
    assert signature(other, "en", CONFIG) == signature(TEXT, "en", CONFIG)


@pytest.mark.parametrize("other", [TEXT + " more", TEXT.replace("fox", "cat"), " ".join(reversed(TEXT.split()))])
def test_what_changes_the_signature(other: str) -> None:
    assert signature(other, "en", CONFIG) != signature(TEXT, "en", CONFIG)


def test_signature_is_the_same_on_every_machine() -> None:
    values = signature(TEXT, "en", CONFIG)
    assert len(values) == 112 * 4
    assert hashlib.sha256(values).hexdigest()[:16] == "111e01d8b366a617"
    assert np.frombuffer(values, "<u4")[:3].tolist() == [78150302, 608509945, 47254614]
    assert hashlib.sha256(band_keys(as_matrix([values])).astype("<u8").tobytes()).hexdigest()[:16] == "42609e241303f2ac"
    assert anchor(FAMILIES["fast"].hashes(TEXT, "en", None, CONFIG), 1) == 277787870382542181
    assert signature(TEXT, "en", SignatureConfig(seed=2)) != values
    assert value_type(CONFIG) == "<u4"


def test_signature_by_its_definition() -> None:
    words = word_keys(normal_words(TEXT))
    factors = draw_odd_numbers(1, "shingle", 5).tolist()
    sums = [
        sum(int(key) * factor for key, factor in zip(words[start : start + 5], factors)) % (1 << 64)
        for start in range(len(words) - 4)
    ]
    hashes = mix_bits(np.array(sums, np.uint64))
    assert shingles(words, 5, seed=1).tolist() == hashes.tolist()
    permutations = (draw_odd_numbers(1, "permutation", 112) % np.uint64(1 << 32)).tolist()
    high = [int(code) >> 32 for code in hashes]
    expected = [min(factor * code % (1 << 32) for code in high) for factor in permutations]
    assert as_matrix([signature(TEXT, "en", CONFIG)])[0].tolist() == expected


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 17])
def test_a_signature_does_not_depend_on_blocks(count: int) -> None:
    hashes = np.random.default_rng(count).integers(0, 1 << 64, count, dtype=np.uint64)
    size = np.getbufsize()
    parts = [sketch(part, CONFIG) for part in np.array_split(hashes, min(count, 9))]
    assert sketch(hashes, CONFIG).tolist() == np.min(parts, axis=0).tolist()
    assert np.getbufsize() == size


@pytest.mark.parametrize("config", EVERY_FAMILY, ids=lambda config: config.family)
@pytest.mark.parametrize("text", ["one two three four", "one", "?!", "", "\ud800 \udfff", "中"])
def test_a_text_shorter_than_a_shingle_is_one(text: str, config: SignatureConfig) -> None:
    longer = config.model_copy(update={"shingle_words": 9})
    assert signature(text, "en", config) == signature(text, "en", longer)
    assert signature(text, "en", config) != signature(text + " five!", "en", config)
    assert len(shingle_hashes(text, "en", config)) == 1


@pytest.mark.parametrize("config", EVERY_FAMILY, ids=lambda config: config.family)
def test_a_text_of_one_word_over_and_over_is_one_shingle(config: SignatureConfig) -> None:
    once, often = "buy buy buy buy buy", "buy " * 1000
    assert signature(once, "en", config) == signature(often, "en", config)
    assert shingle_hashes(once, "en", config).tolist() == shingle_hashes(often, "en", config).tolist()


def test_characters_are_the_units_where_words_are_not_spaced() -> None:
    spaced = " ".join(CHINESE)
    assert signature(CHINESE, "zh", CONFIG) == signature(spaced, "zh", CONFIG)
    assert signature(CHINESE, "en", CONFIG) != signature(spaced, "en", CONFIG)
    changed = as_matrix([signature(t, "zh", CONFIG) for t in (CHINESE, CHINESE.replace("下午", "上午"))])
    assert 0.3 < similarity(changed[:1], changed[1:])[0] < 0.95  # 18 of 21 five-character runs remain of each: 0.75
    assert signature(CHINESE, "zh", CONFIG) != signature(CHINESE, "zh", SignatureConfig(shingle_chars=3))


@pytest.mark.parametrize("config", EVERY_FAMILY, ids=lambda config: config.family)
def test_every_family_honours_the_unit(config: SignatureConfig) -> None:
    chars, words = (config.model_copy(update={"unit": unit}) for unit in ("chars", "words"))
    assert signature(CHINESE, "zh", config) == signature(CHINESE, "zh", chars) == signature(CHINESE, "en", chars)
    assert signature(TEXT, "en", config) == signature(TEXT, "en", words)
    assert signature(CHINESE, "zh", config) != signature(CHINESE, "zh", words)
    assert len(shingle_hashes("今天下午有一个讲座", "zh", words)) == 1  # 今天 下午 有 一个 讲座
    assert shingle_hashes("今天下午有。", "zh", words).tolist() == shingle_hashes("今天 下午 有", "zh", words).tolist()
    assert signature(TEXT, "en", config) != signature(TEXT, "en", chars)
    # "abcabc" has the runs abcab and bcabc; spaces do not count
    assert shingle_hashes("abc abc", "en", chars).tolist() == shingle_hashes("ABCABC", "en", chars).tolist()
    assert len(shingle_hashes("abc abc", "en", chars)) == 2


@settings(deadline=None, max_examples=60)
@given(st.text())
def test_words_handed_over_give_the_same_signature(text: str) -> None:
    vocabulary = Vocabulary(split_english)
    keys = vocabulary.keys(vocabulary.numbers(text.split()))
    assert signature(text, "en", CONFIG, keys) == signature(text, "en", CONFIG)


@pytest.mark.parametrize("config", EVERY_FAMILY, ids=lambda config: config.family)
def test_shingle_hashes_are_a_sorted_set_with_true_similarity(config: SignatureConfig) -> None:
    base = "a b c d e f g h i j a b c d e"  # 11 shingles, of which `a b c d e` occurs twice: 10
    other = "a b c d e f g h x"  # 5 shingles, of which 4 are among the 10: similarity 4 / 11
    left, right = (shingle_hashes(text, "de", config) for text in (base, other))
    assert (len(left), len(right), left.dtype) == (10, 5, np.uint64)
    assert left.tolist() == sorted(set(left.tolist()))
    assert jaccard(left, right) == jaccard(right, left) == 4 / 11
    assert jaccard(left, left) == 1.0


def test_jaccard_of_sets() -> None:
    some, none = np.array([3, 9, 2**63], np.uint64), np.zeros(0, np.uint64)
    assert (jaccard(some, none), jaccard(none, none), jaccard(some, some[1:])) == (0.0, 1.0, 2 / 3)
    assert jaccard(np.frombuffer(some.astype("<u8").tobytes(), "<u8"), some) == 1.0


@pytest.mark.parametrize("config", EVERY_FAMILY, ids=lambda config: config.family)
def test_a_huge_document_takes_bounded_memory(config: SignatureConfig) -> None:
    generator = np.random.default_rng(0)
    names = ["".join(chr(97 + letter) for letter in generator.integers(0, 26, 6)) for _ in range(5000)]
    text = " ".join(names[place] for place in generator.integers(0, 5000, 100_000))
    signature(text, "en", config)
    tracemalloc.start()
    signature(text, "en", config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 14_000_000  # 140 bytes a word; a matrix of all permutations would take 45 MB at least


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("Hello  World\n", "hello world", True),
        ("ﬁne　text", "FINE text", True),
        ("hello, world", "hello world", False),
        ("na\u00efve", "nai\u0308ve", True),
        ("naïve", "naive", False),
        ("a\x1c\x85b", "A b", True),
        ("a\tb\x0b \x0c c" + " " * 1000, "a b c", True),
        ("a b", "ab", False),
        (" ", "", True),
        ("a\x00b", "a b", False),
    ],
)
def test_text_digest(left: str, right: str, equal: bool) -> None:
    assert (text_digest(left) == text_digest(right)) is equal
    assert len(text_digest(left)) == 16


@settings(deadline=None)
@given(st.text(st.characters(max_codepoint=127)) | st.text())
def test_text_digest_by_its_definition(text: str) -> None:
    normal = " ".join(unicodedata.normalize("NFKC", text).lower().split())
    assert text_digest(text) == hashlib.sha256(normal.encode("utf-8", "surrogatepass")).digest()[:16]


def test_raw_digest_by_its_definition() -> None:
    assert raw_digest("") == bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb924")
    assert raw_digest("abc").hex() == "ba7816bf8f01cfea414140de5dae2223"
    assert raw_digest("é\ud800") == hashlib.sha256(b"\xc3\xa9\xed\xa0\x80").digest()[:16]
    assert raw_digest("Abc") != raw_digest("abc")


def test_band_keys_tell_bands_apart() -> None:
    matrix = np.tile(np.arange(8, dtype=np.uint32), (2, 14))
    matrix[1, 20] += 1
    keys = band_keys(matrix)
    assert keys.shape == (2, 14)
    assert len(set(keys[0].tolist())) == 14
    assert (keys[0] == keys[1]).tolist() == [band != 2 for band in range(14)]
    assert band_keys(matrix[:0]).shape == (0, 14)


def test_values_beyond_the_bands_are_not_used() -> None:
    matrix = np.arange(112, dtype=np.uint32)[None].repeat(2, axis=0)
    matrix[1, 108:] += 1
    keys = band_keys(matrix, 9, 12)
    assert keys.shape == (2, 9)
    assert keys[0].tolist() == keys[1].tolist() == band_keys(matrix[:1, :108], 9, 12)[0].tolist()


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ContractError, match=r"expected at least 14 x 8 = 112 values, got 111"):
        band_keys(np.zeros((1, 111), np.uint32))


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"family": "simhash", "permutations": 112}, r"permutations: .*with family = 'simhash', .*got 112\. Remove"),
        ({"unit": "chars", "shingle_words": 5}, r"shingle_words: .* unit = 'chars', .*got 5\. Remove"),
        ({"unit": "words", "shingle_chars": 5}, r"shingle_chars: .* unit = 'words', .*got 5\. Remove"),
        ({"datasketch_hash": "sha1"}, r"datasketch_hash: .* family = 'fast', .*got 'sha1'\. Remove"),
        (
            {"family": "datatrove", "datasketch_scheme": "legacy"},
            r"family = 'datatrove', which ignores it, got 'legacy'\. Remove signature\.datasketch_scheme\.",
        ),
        ({"permutations": 1}, r"greater than or equal to 2"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(given_settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SignatureConfig(**given_settings)


@pytest.mark.parametrize("config", EVERY_FAMILY, ids=lambda config: config.family)
def test_stage_adds_its_columns_and_drops_nothing(config: SignatureConfig) -> None:
    row = {"_body": TEXT, "language": "en", "_words": word_keys(normal_words(TEXT))}
    assert make(config, {})(row) is None
    assert row["signature"] == signature(TEXT, "en", config)
    assert (row["raw_digest"], row["text_digest"]) == (raw_digest(TEXT), text_digest(TEXT))
    assert row["anchor"] == anchor(FAMILIES[config.family].hashes(TEXT, "en", None, config), config.seed)
    assert type(row["anchor"]) is int
    assert 0 <= row["anchor"] < 1 << 63
    assert (set(SIGNATURE.reads) | set(SIGNATURE.adds), dict(SIGNATURE.reasons)) == (set(row), {})
