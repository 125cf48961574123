"""The signature family `fast`: shingles of word keys, and 32-bit multiplicative permutations as array operations.

Each permutation multiplies every shingle hash by an odd number modulo 2^32 and keeps the smallest product. The hashes
have 32 bits because vector instructions multiply these fast, and because a signature stores no more.
"""

from functools import lru_cache

import numpy as np

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.permutations import VALUE, Values, draw_odd_numbers, permuted_minima
from pipeline.minhash.shingles import hashes
from pipeline.text.words import Codes

__all__ = ["VALUE", "hashes", "sketch"]


def sketch(codes: Codes, config: SignatureConfig) -> Values:
    """Return the signature of one or more shingle hashes: the smallest hash under each permutation (permutations,)."""
    return permuted_minima((codes >> np.uint64(32)).astype(np.uint32), _factors(config.seed, config.permutations))


@lru_cache(maxsize=16)
def _factors(seed: int, count: int) -> Values:
    """Return one odd factor for each permutation (count, 1)."""
    return draw_odd_numbers(seed, "permutation", count).astype(np.uint32)[:, None]
