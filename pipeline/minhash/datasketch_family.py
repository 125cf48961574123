"""The family `datasketch`: that library's permutations, so that its hash values come out bit for bit.

The bytes of a shingle are the UTF-8 of its words joined by one space, or of its characters with nothing between them; a
text without a word is its own shingle. Source: datasketch 2.0.0, MinHash. Schemes: `affine32` permutes the mixed hash x
as a x + b modulo 2^32 with odd a; `legacy`, the only one before 2.0, takes the low 32 bits of a x + b modulo 2^61 - 1.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import xxhash

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.datatrove_family import PRIME, mersenne_minima
from pipeline.minhash.fast import VALUE, Values, permuted_minima
from pipeline.minhash.shingles import iterate_runs, uses_characters, words_of
from pipeline.text.words import Codes, normal_words

__all__ = ["VALUE", "hashes", "shingles", "sketch"]

_LOW = np.uint64((1 << 32) - 1)


def shingles(text: str, language: str, config: SignatureConfig) -> Iterator[bytes]:
    """The bytes of every shingle, in their order: what that library is to be updated with."""
    by_words = not uses_characters(language, config)
    words = words_of(text, language) if by_words else normal_words(text)
    if not words:
        return iter([text.encode("utf-8", "surrogatepass")])
    if by_words:
        return iterate_runs(" ".join(words).encode("utf-8", "surrogatepass"), config.shingle_words)
    letters, size = "".join(words), config.shingle_chars
    starts = range(max(1, len(letters) - size + 1))
    return (letters[start : start + size].encode("utf-8", "surrogatepass") for start in starts)


def hashes(text: str, language: str, words: Codes | None, config: SignatureConfig) -> Codes:
    """The hash of every shingle, whose low 32 bits are permuted: the first 8 bytes of its SHA-1, or its xxh32.

    The keys of its words are of no use here, because shingles are made of their letters.
    """
    found = shingles(text, language, config)
    if config.datasketch_hash == "xxh32":
        return np.fromiter(map(xxhash.xxh32_intdigest, found), np.uint64)
    digests = (hashlib.sha1(shingle, usedforsecurity=False).digest()[:8] for shingle in found)
    return np.fromiter(digests, "S8").view("<u8").astype(np.uint64)


def sketch(codes: Codes, config: SignatureConfig) -> Values:
    """That library's hash values of at least one shingle hash (permutations,)."""
    if config.datasketch_scheme == "legacy":
        return mersenne_minima(codes & _LOW, *_legacy_factors(config.seed, config.permutations), _LOW).astype(np.uint32)
    factors, terms = _affine_factors(config.seed, config.permutations)
    return permuted_minima(_mixed32(codes.astype(np.uint32)), factors, terms)


def _mixed32(numbers: Values) -> Values:
    """The numbers, each bit of input spread over the output. Source: Appleby, MurmurHash3, 32-bit finaliser."""
    numbers = (numbers ^ (numbers >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    numbers = (numbers ^ (numbers >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return numbers ^ (numbers >> np.uint32(16))


@lru_cache(maxsize=16)
def _affine_factors(seed: int, count: int) -> tuple[Values, Values]:
    """The factors a and the terms b of `affine32`, each (count, 1), as NumPy's RandomState draws them."""
    generator = np.random.RandomState(seed)
    factors = generator.randint(0, 1 << 31, (count, 1), np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, generator.randint(0, 1 << 32, (count, 1), np.uint32)


@lru_cache(maxsize=16)
def _legacy_factors(seed: int, count: int) -> tuple[Codes, Codes]:
    """The factors a and the terms b of `legacy`, each (count, 1), drawn in turns."""
    generator, last = np.random.RandomState(seed), int(PRIME)
    pairs = [[generator.randint(low, last, dtype=np.uint64) for low in (1, 0)] for _ in range(count)]
    factors, terms = np.array(pairs, np.uint64).T[:, :, None]
    return factors, terms
