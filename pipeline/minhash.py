"""MinHash: a digest that exact copies share and a signature whose agreement estimates the similarity of near copies.

The share of equal positions in two signatures estimates the Jaccard similarity s of the two texts' shingle sets. Bands
of a signature are hashed to keys; texts that share a key are candidates, with probability 1 - (1 - s^rows)^bands.
Source: Broder 1997, "On the resemblance and containment of documents"; permutations: multiply-shift of Dietzfelbinger
et al. 1997.
"""

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from pipeline.pieces import UNSPACED_LANGUAGES
from pipeline.stage import Drop, PerDocument, Row, RowFunction
from pipeline.words import Codes, normal_words, word_keys
from schemas.config import Section
from schemas.errors import ContractError

Signatures = npt.NDArray[np.uint32]

_BLOCK = 2048  # shingles permuted at a time: 112 x 2048 x 8 bytes stay in the cache


class MinHashConfig(Section):
    """How similarity is measured; the defaults are datatrove's and FineWeb's."""

    shingle_words: int = Field(5, ge=1)
    """Words of a shingle."""
    shingle_chars: int = Field(5, ge=1)
    """Characters of a shingle in languages whose writing does not separate words."""
    permutations: int = Field(112, ge=1)
    """Length of a signature [uint32]."""
    bands: int = Field(14, ge=1)
    """Number of bands; with 14 bands of 8 rows half of the pairs of similarity 0.69 become candidates."""
    rows: int = Field(8, ge=1)
    """Positions of the signature in a band."""
    seed: int = 1
    """Seed of the permutations."""

    @model_validator(mode="after")
    def _bands_cover(self) -> "MinHashConfig":
        if self.bands * self.rows != self.permutations:
            raise ValueError(
                f"bands x rows must be the number of permutations, found {self.bands} x {self.rows} = "
                f"{self.bands * self.rows} and {self.permutations}"
            )
        return self


@lru_cache(maxsize=64)
def _odd(seed: int, purpose: str, count: int) -> Codes:
    """`count` odd 64-bit numbers that are a function of the seed and nothing else, on every machine."""
    stream = hashlib.shake_128(f"minhash {purpose} {seed}".encode()).digest(8 * count)
    return np.frombuffer(stream, "<u8").astype(np.uint64) | np.uint64(1)


def _mixed(codes: Codes) -> Codes:
    """The codes with every bit of input spread over the output. Source: Steele et al. 2014, finaliser of SplitMix64."""
    codes = (codes ^ (codes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    codes = (codes ^ (codes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return codes ^ (codes >> np.uint64(31))


def shingles(units: Codes, size: int, seed: int) -> Codes:
    """The hashes of all runs of `size` units; of the whole text if it is shorter."""
    size = min(size, len(units))
    factors = _odd(seed, "shingle", size)
    total = np.zeros(len(units) - size + 1, np.uint64)
    for position in range(size):
        total += units[position : len(units) - size + 1 + position] * factors[position]
    return _mixed(total)


def sketch(hashes: Codes, config: MinHashConfig) -> Signatures:
    """The signature of at least one shingle hash: the smallest value under each permutation (permutations,)."""
    factors = _odd(config.seed, "permutation", config.permutations)[:, None]
    smallest = np.full(config.permutations, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(hashes), _BLOCK):
        np.minimum(smallest, (factors * hashes[start : start + _BLOCK]).min(axis=1), out=smallest)
    # the shift is monotonic, so it may follow the minimum
    return (smallest >> np.uint64(32)).astype(np.uint32)


def signature(text: str, language: str, config: MinHashConfig, words: Codes | None = None) -> bytes:
    """The signature of a text as little-endian uint32; `words` are the keys of its normal words if they are known.

    Shingles are runs of normal words, or of characters where the language's writing does not separate words. A text
    shorter than a shingle has one, all of it; a text of mere punctuation has its own hash.
    """
    if language in UNSPACED_LANGUAGES:
        units = np.array(list(map(ord, "".join(normal_words(text)))), np.uint64)
        size = config.shingle_chars
    else:
        units = word_keys(normal_words(text)) if words is None else words
        size = config.shingle_words
    if not len(units):
        units = word_keys([text])
    return sketch(shingles(units, size, config.seed), config).astype("<u4").tobytes()


def text_digest(text: str) -> bytes:
    """The first 16 bytes of the SHA-256 of the text in NFKC, lower case, every run of whitespace one space."""
    normal = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return hashlib.sha256(" ".join(normal.lower().split()).encode("utf-8", "surrogatepass")).digest()[:16]


def as_matrix(signatures: Sequence[bytes]) -> Signatures:
    """Signatures of one length as a matrix (n, permutations)."""
    return np.frombuffer(b"".join(signatures), "<u4").astype(np.uint32).reshape(len(signatures), -1)


def band_keys(signatures: bytes | Signatures, bands: int = 14, rows: int = 8) -> Codes:
    """The key of every band of every signature (n, bands); equal when number and rows of the band are, up to 2^-64."""
    matrix = as_matrix([signatures]) if isinstance(signatures, bytes) else signatures
    if matrix.shape[1] != bands * rows:
        raise ContractError(
            f"signature: promised {bands} x {rows} values, found {matrix.shape[1]}; use one [minhash] section"
        )
    parts = matrix.astype(np.uint64).reshape(len(matrix), bands, rows)
    sums: Codes = (parts * _odd(0, "row", rows)).sum(axis=2, dtype=np.uint64)
    return _mixed(sums + _odd(0, "band", bands))


def similarity(left: Signatures, right: Signatures) -> npt.NDArray[np.float64]:
    """The estimated Jaccard similarity of row i of one matrix and row i of the other (n,), 0 to 1.

    Its standard error is sqrt(s (1 - s) / permutations): 0.04 at s = 0.7 with 112.
    """
    shares: npt.NDArray[np.float64] = np.equal(left, right).mean(axis=1)
    return shares


def make(config: MinHashConfig, models: Mapping[str, str]) -> RowFunction:
    """The function that adds a document's digest and signature; it drops nothing."""

    def minhash(row: Row) -> Drop | None:
        row["text_digest"] = text_digest(row["_body"])
        row["signature"] = signature(row["_body"], row["language"], config, row["_words"])
        return None

    return minhash


MINHASH = PerDocument(
    name="minhash",
    version=1,
    config=MinHashConfig,
    reads=("_body", "_words", "language"),
    adds=("text_digest", "signature"),
    reasons={},
    make=make,
    ends=False,
)
