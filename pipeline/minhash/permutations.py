"""Random numbers, bit mixing and permutations, as array operations that the signature families share.

A permutation of hashes is a linear function modulo 2^32 or 2^61 - 1. A signature keeps the smallest hash under each
permutation. Source: Broder 1997, "On the resemblance and containment of documents"; permutations: Dietzfelbinger et al.
1997.
"""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.text.words import Codes

VALUE = "<u4"
"""NumPy type of each value of a stored signature with 32-bit values."""
Values = npt.NDArray[np.uint32]
BLOCK = 2048  # shingles permuted at a time: 112 x 2048 x 4 bytes stay in a core's own cache
NARROW = 64  # elements in NumPy's buffer; see `permuted_minima`
PRIME = np.uint64((1 << 61) - 1)
MERSENNE_BITS = np.uint64(61)
# Shingles permuted at a time. For larger arrays malloc requests new memory each time: 430 instead of 137 µs for 600.
MERSENNE_BLOCK = 128


@lru_cache(maxsize=64)
def draw_odd_numbers(seed: int, purpose: str, count: int) -> Codes:
    """Return `count` odd 64-bit numbers that depend on seed and purpose alone, so they are equal on every machine."""
    stream = hashlib.shake_128(f"minhash {purpose} {seed}".encode()).digest(8 * count)
    return np.frombuffer(stream, "<u8").astype(np.uint64) | np.uint64(1)


def mix_bits(codes: Codes) -> Codes:
    """Return a hash of each 64-bit number in which every input bit affects all output bits. Source: Steele et al. 2014,
    SplitMix64."""
    codes = codes ^ (codes >> np.uint64(30))
    codes *= np.uint64(0xBF58476D1CE4E5B9)
    codes ^= codes >> np.uint64(27)
    codes *= np.uint64(0x94D049BB133111EB)
    codes ^= codes >> np.uint64(31)
    return codes


def permuted_minima(numbers: Values, factors: Values, terms: Values | None = None) -> Values:
    """Return for each permutation the smallest (factor x number + term) mod 2^32 over the numbers (permutations,).

    `factors` and `terms` are (permutations, 1). Raises ValueError if there is no number.
    """
    smallest: Values | None = None
    with np.errstate():  # restores the buffer size at the end
        # NumPy copies short broadcast rows into a buffer of 8,192 elements, which costs twice the multiplication (22
        # against 14 µs for 600 numbers). It does not copy if the buffer is shorter than a row.
        np.setbufsize(NARROW)
        for start in range(0, len(numbers), BLOCK):
            values = factors * numbers[start : start + BLOCK]
            if terms is not None:
                values += terms
            block: Values = np.minimum.reduce(values, axis=1)
            smallest = block if smallest is None else np.minimum(smallest, block)
    if smallest is None:
        raise ValueError("signature: expected at least one shingle hash, got none. Hash at least one shingle.")
    return smallest


def mersenne_minima(codes: Codes, a: Codes, b: Codes, low: np.uint64 = PRIME) -> Codes:
    """Return for each permutation the smallest (a x + b) mod 2^61 - 1 over the hashes x (permutations,).

    `a` and `b` are (permutations, 1). `low` is a bit mask that is applied to each value before the smallest is chosen.
    """
    least = np.full(len(a), low, np.uint64)
    for start in range(0, len(codes), MERSENNE_BLOCK):
        values = a * codes[start : start + MERSENNE_BLOCK]
        values += b
        # 2^61 is 1 modulo the prime: the high bits are added to the low ones, and the sum is below the prime + 8
        high = values >> MERSENNE_BITS
        values &= PRIME
        values += high
        np.subtract(values, PRIME, out=high)  # wraps to a large number if the value is below the prime already
        np.minimum(values, high, out=values)
        if low != PRIME:
            values &= low
        np.minimum(least, values.min(axis=1), out=least)
    return least
