"""Tests of the family datasketch: the library's own hash values, bit for bit, and its exchange of bytes."""

import struct

import numpy as np
import pytest
import xxhash
from datasketch import LeanMinHash, MinHash, MinHashLSH
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keys import layout
from pipeline.minhash.bands import optimal_bands
from pipeline.minhash.datasketch_family import hashes, library_bands, shingles
from pipeline.minhash.permutations import BLOCK
from pipeline.minhash.stage import SignatureConfig, as_matrix, shingle_hashes, signature, similarity, value_type

TEXT = "The quick brown fox jumps over the lazy dog, 42 times a day; no one knows why it does so."


def theirs(text: str, language: str, config: SignatureConfig) -> MinHash:
    """Return the library's MinHash of the same shingles."""
    hashfunc = xxhash.xxh32_intdigest if config.datasketch_hash == "xxh32" else None
    made = MinHash(config.permutations, config.seed, hashfunc=hashfunc, scheme=config.datasketch_scheme)
    made.update_batch(shingles(text, language, config))
    return made


@pytest.mark.parametrize(
    ("text", "language", "unit", "expected"),
    [
        ("One, two THREE 4.5!", "en", "words", ["one two three", "two three 0"]),
        ("one two", "en", "words", ["one two"]),
        ("naïve café bar", "fr", "auto", ["naive cafe bar"]),
        ("?! ...", "en", "words", ["?! ..."]),
        ("", "zh", "auto", [""]),
        ("中文，字符", "zh", "auto", ["中文字", "文字符"]),
        ("a bc d", "en", "chars", ["abc", "bcd"]),
        ("a\ud800 b", "en", "words", ["a\ud800 b"]),
    ],
)
def test_shingles_by_their_definition(text: str, language: str, unit: str, expected: list[str]) -> None:
    sizes = {"words": ("shingle_words",), "chars": ("shingle_chars",)}.get(unit, ("shingle_words", "shingle_chars"))
    config = SignatureConfig(family="datasketch", unit=unit, **dict.fromkeys(sizes, 3))
    assert [*shingles(text, language, config)] == [run.encode("utf-8", "surrogatepass") for run in expected]


@pytest.mark.parametrize("scheme", ["affine32", "legacy"])
@pytest.mark.parametrize("hash_name", ["sha1", "xxh32"])
@pytest.mark.parametrize(("seed", "permutations"), [(1, 112), (0, 128), (42, 9), (2**32 - 1, 260)])
def test_hash_values_are_the_librarys(scheme: str, hash_name: str, seed: int, permutations: int) -> None:
    config = SignatureConfig(
        family="datasketch",
        datasketch_scheme=scheme,
        datasketch_hash=hash_name,
        seed=seed,
        permutations=permutations,
    )
    generator = np.random.default_rng(seed)
    for size in (1, 4, 5, 6, 300):
        text = " ".join(f"w{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in generator.integers(0, 400, size))
        made = theirs(text, "en", config)
        assert np.frombuffer(signature(text, "en", config), "<u4").tolist() == made.hashvalues.tolist()


@settings(deadline=None, max_examples=60)
@given(st.text(), st.sampled_from(["en", "zh"]), st.sampled_from(["affine32", "legacy"]))
def test_hash_values_of_any_text(text: str, language: str, scheme: str) -> None:
    config = SignatureConfig(family="datasketch", datasketch_scheme=scheme, permutations=16)
    made = theirs(text, language, config)
    assert np.frombuffer(signature(text, language, config), "<u4").tolist() == made.hashvalues.tolist()


def test_more_shingles_than_are_permuted_at_a_time() -> None:
    config = SignatureConfig(family="datasketch")
    text = " ".join("abcdefghij"[n % 10] + "klmnopqrst"[n // 10 % 10] * (n // 100 % 9) for n in range(BLOCK + 100))
    made = theirs(text, "en", config)
    assert np.frombuffer(signature(text, "en", config), "<u4").tolist() == made.hashvalues.tolist()


@pytest.mark.parametrize(("scheme", "head"), [("affine32", ("<qiB", 1, -112, 1)), ("legacy", ("<qi", 1, 112))])
def test_bytes_are_exchanged_with_lean_sketches(scheme: str, head: tuple) -> None:
    config = SignatureConfig(family="datasketch", datasketch_scheme=scheme)
    lean = LeanMinHash(theirs(TEXT, "en", config))
    buffer = bytearray(lean.bytesize("<"))
    lean.serialize(buffer, "<")
    ours = struct.pack(*head) + signature(TEXT, "en", config)
    assert bytes(buffer) == ours
    assert LeanMinHash.deserialize(ours, "<") == lean


def test_similarity_is_the_librarys() -> None:
    config = SignatureConfig(family="datasketch")
    other = TEXT.replace("lazy", "sleepy")
    matrix = as_matrix([signature(text, "en", config) for text in (TEXT, other)], value_type(config))
    expected = theirs(TEXT, "en", config).jaccard(theirs(other, "en", config))
    assert similarity(matrix[:1], matrix[1:])[0] == pytest.approx(expected, abs=1e-12)
    assert 0 < expected < 1


def test_shingle_hashes_have_the_librarys_low_bits() -> None:
    from datasketch.hashfunc import sha1_hash64

    config = SignatureConfig(family="datasketch")
    assert hashes(TEXT, "en", None, config).tolist() == [*map(sha1_hash64, shingles(TEXT, "en", config))]
    assert len(shingle_hashes(TEXT, "en", config)) == len(set(shingles(TEXT, "en", config)))


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.99])
def test_bands_for_a_threshold_are_those_of_an_index_of_the_library(threshold: float) -> None:
    bands, rows = library_bands(threshold, 64)
    assert (bands, rows) == optimal_bands(threshold, 64)
    if bands > 1:  # the class rejects a single band
        index = MinHashLSH(threshold=threshold, num_perm=64)
        assert (index.b, index.r) == (bands, rows)


def test_deduplication_takes_the_bands_of_the_library() -> None:
    dedup = DedupConfig(threshold=0.8)
    families = [SignatureConfig(family=family) for family in ("datasketch", "fast")]
    assert [layout(dedup, signature) for signature in families] == [library_bands(0.8, 112)] * 2


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_its_generator_does_not_take_is_refused(seed: int) -> None:
    with pytest.raises(ValidationError, match=rf"expected 0 to 4294967295 with family 'datasketch', got {seed}\."):
        SignatureConfig(family="datasketch", seed=seed)
