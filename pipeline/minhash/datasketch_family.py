"""The signature family `datasketch`, which reproduces the hash values of the library datasketch bit for bit.

The bytes of a shingle are the UTF-8 of its words joined by one space, or of its characters without separators. A text
without a word is one shingle. Source: datasketch 2.0.0, MinHash. Schemes: `affine32` permutes the mixed hash x as a x +
b modulo 2^32 with odd a; `legacy`, the only one before 2.0, takes the low 32 bits of a x + b modulo 2^61 - 1.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.permutations import VALUE, Values, mersenne_minima, permuted_minima
from pipeline.minhash.shingles import iterate_runs, uses_characters, words_of
from pipeline.text.words import Codes, normal_words

__all__ = ["VALUE", "hashes", "library_bands", "shingles", "sketch"]


_LOW = np.uint64((1 << 32) - 1)


def shingles(text: str, language: str, config: SignatureConfig) -> Iterator[bytes]:
    """Return the bytes of every shingle in text order, as `datasketch.MinHash.update` expects them."""
    by_words, keep = not uses_characters(language, config), config.keep_numbers
    words = words_of(text, language, keep) if by_words else normal_words(text, keep)
    if not words:
        return iter([text.encode("utf-8", "surrogatepass")])
    if by_words:
        return iterate_runs(" ".join(words).encode("utf-8", "surrogatepass"), config.shingle_words)
    letters, size = "".join(words), config.shingle_chars
    starts = range(max(1, len(letters) - size + 1))
    return (letters[start : start + size].encode("utf-8", "surrogatepass") for start in starts)


def hashes(text: str, language: str, words: Codes | None, config: SignatureConfig) -> Codes:
    """Return the hash of every shingle in text order: the first 8 bytes of its SHA-1, or its xxh32.

    `words` is ignored.
    """
    runs_of_bytes = shingles(text, language, config)
    if config.datasketch_hash == "xxh32":
        return np.fromiter(map(xxhash.xxh32_intdigest, runs_of_bytes), np.uint64)
    digests = (hashlib.sha1(shingle, usedforsecurity=False).digest()[:8] for shingle in runs_of_bytes)
    return np.fromiter(digests, "S8").view("<u8").astype(np.uint64)


def sketch(codes: Codes, config: SignatureConfig) -> Values:
    """Return the signature of one or more shingle hashes, equal to `datasketch.MinHash.hashvalues` (permutations,)."""
    factors, terms = _permutations(config.seed, config.permutations, config.datasketch_scheme)
    if config.datasketch_scheme == "legacy":
        return mersenne_minima(codes & _LOW, factors, terms, _LOW).astype(np.uint32)
    return permuted_minima(_mixed32(codes.astype(np.uint32)), factors, terms)


def _mixed32(numbers: Values) -> Values:
    """Apply the 32-bit finalizer of MurmurHash3 (Appleby) to each number."""
    numbers = (numbers ^ (numbers >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    numbers = (numbers ^ (numbers >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return numbers ^ (numbers >> np.uint32(16))


@lru_cache(maxsize=16)
def _permutations(seed: int, count: int, scheme: str) -> tuple[Any, Any]:
    """Return the factors and the terms of `count` permutations, each (count, 1), as datasketch draws them.

    Both are uint32 for the scheme `affine32`, and uint64 for `legacy`.
    """
    from datasketch import MinHash  # imported once per process and only for this family: the import takes 0.8 s

    factors, terms = MinHash(count, seed, scheme=scheme).permutations[:, :, None]
    return factors, terms


@lru_cache(maxsize=64)
def library_bands(threshold: float, permutations: int) -> tuple[int, int]:
    """Return the (bands, rows) that `datasketch.MinHashLSH` chooses for a threshold with its default weights."""
    # Not by the class itself, which rejects a single band. This takes 20 ms for 112 permutations.
    from datasketch.lsh import _optimal_param

    bands, rows = _optimal_param(threshold, permutations, 0.5, 0.5)
    return int(bands), int(rows)
