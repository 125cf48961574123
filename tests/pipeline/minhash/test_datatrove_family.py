"""Tests of the family datatrove: its shingles and permutations by their definition, and its bands of real pages."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from pydantic import ValidationError

from pipeline.minhash.datatrove_family import factors, hashes, sketch
from pipeline.minhash.permutations import PRIME
from pipeline.minhash.stage import SignatureConfig, as_matrix, band_keys, signature, similarity, value_type
from schemas.errors import ContractError

CONFIG = SignatureConfig(family="datatrove")
TEXT = "I cannot say: the 3.5 café-owners didn’t win 1,000 dollars."


def hashed(texts: list[str]) -> list[int]:
    return [xxhash.xxh64_intdigest(text.encode()) for text in texts]


def bands_of(values: bytes) -> list[str]:
    """Return the digest of each band of eight 64-bit values, as the known answers hold it."""
    return [hashlib.blake2b(values[at : at + 64], digest_size=8).hexdigest() for at in range(0, len(values), 64)]


def test_shingles_by_their_definition() -> None:
    config = SignatureConfig(family="datatrove", shingle_words=2)
    expected = hashed(["i can", "can not", "not say", "say the", "the 0", "0 cafe", "cafe owners"])
    assert hashes("I cannot say:\n\tthe 3.5 CAFÉ-owners", "en", None, config).tolist() == expected


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("one two three four five", "en", ["one two three four five"]),
        ("one two three four five six", "en", ["one two three four five", "two three four five six"]),
        ("One, two!", "en", ["one two"]),
        ("?!", "en", ["?!"]),
        ("", "en", [""]),
        ("we dont a b c", "en", ["we do nt a b", "do nt a b c"]),
        ("we dont a b c", "de", ["we dont a b c"]),
        ("中文，字符 a!", "zh", ["中 文 字 符 a"]),
        ("中文字符两个", "ja", ["中 文 字 符 两", "文 字 符 两 个"]),
    ],
)
def test_shingles_of_short_and_foreign_texts(text: str, language: str, expected: list[str]) -> None:
    assert hashes(text, language, None, CONFIG).tolist() == hashed(expected)


def test_a_lone_surrogate_is_signed() -> None:
    assert len(signature("a \ud800 b", "en", CONFIG)) == 112 * 8


def test_permutations_by_their_definition() -> None:
    a, b = factors(1, 112)
    hashes = np.random.default_rng(5).integers(0, 1 << 64, 700, dtype=np.uint64)
    hashes[:3] = [0, (1 << 64) - 1, (1 << 61) - 1]
    wrapped = [[(int(x) * int(f) + int(t)) % (1 << 64) % int(PRIME) for x in hashes] for f, t in zip(a[:, 0], b[:, 0])]
    assert sketch(hashes, CONFIG).tolist() == [min(row) for row in wrapped]
    alone = [sketch(hashes[i : i + 1], CONFIG)[0] for i in range(3)]
    assert alone == wrapped[0][:3]


def test_signature_holds_64_bit_values() -> None:
    left, right = (signature(text, "en", CONFIG) for text in (TEXT, TEXT.replace("win", "lose")))
    assert (len(left), value_type(CONFIG)) == (112 * 8, "<u8")
    matrix = as_matrix([left, right], value_type(CONFIG))
    assert (matrix.shape, matrix.dtype) == ((2, 112), np.uint64)
    assert int(matrix.max()) < int(PRIME)
    assert similarity(matrix[:1], matrix[:1]).tolist() == [1.0]
    assert similarity(matrix[:1], matrix[1:])[0] < 0.9


def test_band_keys_are_equal_exactly_where_bands_are() -> None:
    original = as_matrix([signature(TEXT, "en", CONFIG)], "<u8").copy()
    changed = original.copy()
    changed[0, 8] ^= np.uint64(1 << 40)  # beyond 32 bits, in the second band
    same = (band_keys(original) == band_keys(changed))[0]
    assert same.tolist() == [True, False, *[True] * 12]
    assert band_keys(original.astype(">u8")).tolist() == band_keys(original).tolist()
    with pytest.raises(ContractError, match=r"expected at least 12 x 10 = 120 values, got 112"):
        band_keys(original, 12, 10)


def test_families_differ_and_every_setting_is_used() -> None:
    fast = signature(TEXT, "en", SignatureConfig())
    assert len(fast) == 448
    others = [{"seed": 2}, {"shingle_words": 4}, {"permutations": 56}, {"unit": "chars"}]
    signatures = {signature(TEXT, "en", SignatureConfig(family="datatrove", **setting)) for setting in others}
    assert len(signatures | {signature(TEXT, "en", CONFIG)}) == 5
    zh = "今天下午有一个讲座"
    assert signature(zh, "zh", CONFIG) != signature(zh, "zh", SignatureConfig(family="datatrove", shingle_chars=3))
    words = SignatureConfig(family="datatrove", unit="words", shingle_words=2)
    assert hashes(zh, "zh", None, words).tolist() == hashed(["今天 下午", "下午 有", "有 一个", "一个 讲座"])


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_its_generator_does_not_take_is_refused(seed: int) -> None:
    with pytest.raises(ValidationError, match=rf"expected 0 to 4294967295 with family 'datatrove', got {seed}\."):
        SignatureConfig(family="datatrove", seed=seed)
    assert SignatureConfig(seed=seed).seed == seed


def known_answers(shared_data: Path) -> Iterator[tuple[str, dict]]:
    """Yield the text of every page with datatrove's answer."""
    folder = shared_data.parent / "peers"
    if not folder.is_dir():
        pytest.skip("datatrove's known answers are not beside the data")
    with gzip.open(folder / "filters_in.jsonl.gz") as texts, gzip.open(folder / "filters_out.jsonl.gz") as answers:
        for text, answer in zip(texts, answers, strict=True):
            yield json.loads(text)["text"], json.loads(answer)["minhash"]


@pytest.mark.slow
def test_bands_of_real_pages(shared_data: Path) -> None:
    pages = list(known_answers(shared_data))
    different = [
        number
        for number, (text, answer) in enumerate(pages)
        if answer["n"]
        and (bands_of(signature(text, "en", CONFIG)), len(hashes(text, "en", None, CONFIG)))
        != (answer["bands"], answer["n"])
    ]
    assert (len(pages), different) == (1689, [])
    assert sum(not answer["n"] for _, answer in pages) == 2  # shorter than a shingle: datatrove signs no such text


def test_bands_of_every_twentieth_page(shared_data: Path) -> None:
    pages = [(text, answer) for text, answer in known_answers(shared_data) if answer["n"]][::20]
    assert len(pages) == 85
    for text, answer in pages:
        assert bands_of(signature(text, "en", CONFIG)) == answer["bands"]
