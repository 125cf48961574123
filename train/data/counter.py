"""Random numbers by counter: a number is a hash of what it is for, so it is the same whoever asks for it, and when."""

import hashlib

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: Bits) -> Bits:
    """The finaliser of SplitMix64. Source: Steele, Lea and Flood 2014, with the constants of Stafford's Mix13."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def key_of(*parts: int | str) -> np.uint64:
    """A key for a purpose: the parts name it."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def keys_of(key: np.uint64, index: Ints) -> Bits:
    """A key for each index under a key."""
    return mix(np.full(index.shape, key) + GOLDEN * (index + 1).astype(np.uint64))


def random_bits(keys: Bits, number: int) -> Bits:
    """The first `number` random 64-bit numbers of each key (B, number). Source: Steele et al. 2014, SplitMix64."""
    steps = GOLDEN * np.arange(1, number + 1, dtype=np.uint64)
    return mix(keys[:, None] + steps)
