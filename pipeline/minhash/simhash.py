"""The signature family `simhash`: 64-bit signatures, of which near copies differ in few bits, and keys that find these.

Every occurrence of a shingle votes with the bits of its hash, so a shingle's weight is its number of occurrences.
Source: Charikar 2002, "Similarity estimation techniques from rounding algorithms"; tables: Manku, Jain and Das Sarma
2007, "Detecting near-duplicates for web crawling", section 3.
"""

from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.permutations import draw_odd_numbers, mix_bits
from pipeline.minhash.shingles import hashes
from pipeline.text.words import Codes
from schemas.errors import ConfigError

__all__ = ["BITS", "VALUE", "distance", "hashes", "sketch", "table_keys"]

VALUE = "<u8"
"""NumPy type of the single value of a stored signature."""
BITS = 64
"""Number of bits in a signature."""

_BLOCK = 255  # shingles counted at a time, so that every count fits in a byte


def sketch(codes: Codes, config: SignatureConfig) -> Codes:
    """Return the signature, (1,), of one or more shingle hashes: a bit is 1 if more than half of the hashes have it
    set."""
    votes = np.zeros(BITS, np.int64)
    for start in range(0, len(codes), _BLOCK):
        octets = codes[start : start + _BLOCK].astype("<u8").view(np.uint8).reshape(-1, 8)
        votes += np.unpackbits(octets, axis=1, bitorder="little").sum(axis=0, dtype=np.uint8)
    return np.packbits(2 * votes > len(codes), bitorder="little").view("<u8").astype(np.uint64)


def distance(left: Codes, right: Codes) -> npt.NDArray[np.int64]:
    """Return the number of bits in which signature i of `left` and signature i of `right` differ, for every i: 0 to
    64."""
    bits: npt.NDArray[np.int64] = np.bitwise_count(left ^ right).astype(np.int64)
    return bits


def table_keys(signatures: Codes, blocks: int, max_distance: int) -> Codes:
    """Return the keys of every signature, one for each table (signatures, binomial(blocks, max_distance)).

    Two signatures that differ in at most `max_distance` bits have at least one common key. Raises ConfigError unless
    max_distance < blocks <= 64.
    """
    masks, salts = _tables(blocks, max_distance)
    return mix_bits((signatures[:, None] & masks) + salts)


@lru_cache(maxsize=16)
def _tables(blocks: int, max_distance: int) -> tuple[Codes, Codes]:
    """Return a bit mask and a salt for each table. The salt makes keys of different tables differ."""
    if not 0 <= max_distance < blocks <= BITS:
        raise ConfigError(
            f"dedup.blocks: expected more blocks than max_distance and at most {BITS}, got blocks = {blocks} and "
            f"max_distance = {max_distance}. Set dedup.blocks to between max_distance + 1 and {BITS}."
        )
    # A table for every choice of blocks - max_distance blocks of bits. Signatures that differ in at most `max_distance`
    # bits agree in all blocks of at least one choice.
    edges = [BITS * block // blocks for block in range(blocks + 1)]
    parts = [(1 << end) - (1 << start) for start, end in pairwise(edges)]
    masks = np.array([sum(chosen) for chosen in combinations(parts, blocks - max_distance)], np.uint64)
    return masks, draw_odd_numbers(0, "table", len(masks))
