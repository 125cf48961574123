"""Tests of the exchange with datasketch: equal near pairs by its index and by our band keys, and refusals."""

from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from datasketch import MinHash, MinHashLSH

from pipeline.minhash.datasketch_family import shingles
from pipeline.minhash.exchange import build_lsh, read_band_keys, to_minhash
from pipeline.minhash.stage import SignatureConfig, as_matrix, band_keys, signature, value_type
from schemas.errors import ConfigError

CONFIGS = [
    SignatureConfig(),
    SignatureConfig(family="datasketch"),
    SignatureConfig(family="datasketch", datasketch_scheme="legacy", seed=7),
]
BANDS, ROWS = 14, 8


def texts() -> list[str]:
    """Return 60 texts of 80 words: 12 originals with four copies each, of which 0 to 12 words are replaced."""
    generator = np.random.default_rng(4)
    words = np.array([a + b + c for a in "bcdfgklmnp" for b in "aeiou" for c in "dfgklmnrst"])
    documents = []
    for _ in range(12):
        original = generator.choice(words, 80)
        for replaced in (0, 0, 2, 5, 12):
            copy = original.copy()
            copy[generator.choice(80, replaced, replace=False)] = generator.choice(words, replaced)
            documents.append(" ".join(copy))
    return documents


def batches_of(config: SignatureConfig, size: int = 17) -> list[pa.RecordBatch]:
    """Return the documents in batches, with one that has no signature."""
    rows = [
        {"doc_id": number.to_bytes(16, "big"), "signature": signature(text, "en", config)}
        for number, text in enumerate(texts())
    ]
    rows.insert(5, {"doc_id": b"n" * 16, "signature": None})
    schema = pa.schema([("doc_id", pa.binary(16)), ("signature", pa.binary())])
    return [
        pa.RecordBatch.from_pylist(rows[start : start + size], schema=schema) for start in range(0, len(rows), size)
    ]


def own_keys(config: SignatureConfig) -> np.ndarray:
    """Return our band keys of every text (texts, bands)."""
    return band_keys(as_matrix([signature(text, "en", config) for text in texts()], value_type(config)), BANDS, ROWS)


def pairs_of(keys: np.ndarray) -> set[tuple[int, int]]:
    """Return the pairs of rows that share a key."""
    return {(a, b) for a, b in combinations(range(len(keys)), 2) if (keys[a] == keys[b]).any()}


@pytest.mark.parametrize("config", CONFIGS)
def test_an_exported_index_has_the_pairs_of_our_band_keys(config: SignatureConfig) -> None:
    index = build_lsh(batches_of(config), config, BANDS, ROWS)
    assert (index.b, index.r, len(index.keys.keys())) == (BANDS, ROWS, 60)
    near = set()
    for number, text in enumerate(texts()):
        values = np.frombuffer(signature(text, "en", config), value_type(config))
        hits = {int.from_bytes(doc_id, "big") for doc_id in index.query(to_minhash(values, config))}
        assert number in hits
        near |= {(number, hit) for hit in hits if hit > number}
    expected = pairs_of(own_keys(config))
    assert near == expected
    assert 24 < len(expected) < 120  # 12 exact pairs of 120 near pairs, and some but not all of the others


@pytest.mark.parametrize("config", CONFIGS)
def test_band_keys_read_back_are_ours(config: SignatureConfig) -> None:
    names, keys = read_band_keys(build_lsh(batches_of(config), config, BANDS, ROWS))
    assert [int.from_bytes(name, "big") for name in names] == list(range(60))
    assert np.array_equal(keys, own_keys(config))


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_an_index_that_the_library_makes_from_text_has_our_band_keys(config: SignatureConfig) -> None:
    index = MinHashLSH(num_perm=112, params=(BANDS, ROWS))
    for number, text in enumerate(texts()):
        made = MinHash(112, config.seed, scheme=config.datasketch_scheme)
        made.update_batch(shingles(text, "en", config))
        index.insert(f"text {number}", made)
    names, keys = read_band_keys(index)
    assert names == [f"text {number}" for number in range(60)]
    assert np.array_equal(keys, own_keys(config))
    exported = build_lsh(batches_of(config), config, BANDS, ROWS)
    assert set(exported.query(made)) >= {(59).to_bytes(16, "big")}


def test_an_empty_index_has_no_keys() -> None:
    names, keys = read_band_keys(build_lsh([], SignatureConfig(), BANDS, ROWS))
    assert (names, keys.shape) == ([], (0, BANDS))


@pytest.mark.parametrize("family", ["datatrove", "simhash"])
def test_families_without_32_bit_values_are_refused(family: str) -> None:
    config = SignatureConfig(family=family)
    with pytest.raises(ConfigError, match=rf"expected 'fast' or 'datasketch' .*got '{family}'.*Set signature\.family"):
        build_lsh(batches_of(config), config, BANDS, ROWS)


@pytest.mark.parametrize(("bands", "rows"), [(1, 8), (15, 8)])
def test_layouts_that_the_library_rejects_are_refused(bands: int, rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"at least 2 bands and at most 112 values .*got {bands} x {rows}\."):
        build_lsh([], SignatureConfig(), bands, rows)


def test_an_index_of_hashed_bands_is_refused() -> None:
    index = MinHashLSH(num_perm=112, params=(BANDS, ROWS), hashfunc=bytes)
    with pytest.raises(ConfigError, match=r"got an index with a hashfunc\. Build"):
        read_band_keys(index)
