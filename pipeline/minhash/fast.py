"""The family `fast`: shingles from word keys and 32-bit multiplicative permutations, one array operation each.

Every hash of a shingle is multiplied by one odd number a permutation, modulo 2^32, and the smallest product stays. Of
32 bits because the vector units of a processor multiply those, and because a signature stores no more. Source: Broder
1997, "On the resemblance and containment of documents"; permutations: Dietzfelbinger et al. 1997.
"""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.shingles import shingle_units
from pipeline.text.words import Codes

VALUE = "<u4"
"""How a permutation's value lies in a stored signature."""

Values = npt.NDArray[np.uint32]
BLOCK = 2048  # shingles permuted at a time: 112 x 2048 x 4 bytes stay in a core's own cache
NARROW = 64  # elements; see `permuted_minima`


@lru_cache(maxsize=64)
def draw_odd_numbers(seed: int, purpose: str, count: int) -> Codes:
    """`count` odd 64-bit numbers that are a function of the seed and nothing else, on every machine."""
    stream = hashlib.shake_128(f"minhash {purpose} {seed}".encode()).digest(8 * count)
    return np.frombuffer(stream, "<u8").astype(np.uint64) | np.uint64(1)


def mix_bits(codes: Codes) -> Codes:
    """The codes with every bit of input spread over the output. Source: Steele et al. 2014, finaliser of SplitMix64."""
    codes = codes ^ (codes >> np.uint64(30))
    codes *= np.uint64(0xBF58476D1CE4E5B9)
    codes ^= codes >> np.uint64(27)
    codes *= np.uint64(0x94D049BB133111EB)
    codes ^= codes >> np.uint64(31)
    return codes


def shingles(units: Codes, size: int, seed: int) -> Codes:
    """The hashes of all runs of `size` units; of the whole text if it is shorter."""
    size = min(size, len(units))
    return mix_bits(np.correlate(units, draw_odd_numbers(seed, "shingle", size), "valid"))


def hashes(text: str, language: str, words: Codes | None, config: SignatureConfig) -> Codes:
    """The hash of every shingle of a text, in their order; `words` are the keys of its normal words if known.

    A text shorter than a shingle has one, all of it; a text of mere punctuation has its own hash.
    """
    return shingles(*shingle_units(text, language, words, config), config.seed)


def permuted_minima(numbers: Values, factors: Values, terms: Values | None = None) -> Values:
    """The smallest factor x number + term modulo 2^32 over at least one number (permutations,); the factors and the
    terms are (permutations, 1).

    NumPy expands short rows that are broadcast into a buffer of 8,192 elements, which costs twice the multiplication
    (22 against 14 µs for 600 numbers); it leaves them alone where the buffer is smaller than a row.
    """
    smallest: Values | None = None
    with np.errstate():  # gives the buffer its size back
        np.setbufsize(NARROW)
        for start in range(0, len(numbers), BLOCK):
            values = factors * numbers[start : start + BLOCK]
            if terms is not None:
                values += terms
            found: Values = np.minimum.reduce(values, axis=1)
            smallest = found if smallest is None else np.minimum(smallest, found)
    if smallest is None:
        raise ValueError("expected at least one number, got none")
    return smallest


def sketch(codes: Codes, config: SignatureConfig) -> Values:
    """The signature of at least one shingle hash: the smallest value under each permutation (permutations,)."""
    return permuted_minima((codes >> np.uint64(32)).astype(np.uint32), _factors(config.seed, config.permutations))


@lru_cache(maxsize=16)
def _factors(seed: int, count: int) -> Values:
    """One odd factor a permutation (count, 1)."""
    return draw_odd_numbers(seed, "permutation", count).astype(np.uint32)[:, None]
