"""The stage `signature`: digests that exact copies share, and signatures that estimate the similarity of two texts.

A text is compared as the set of its shingles, which are n-grams of words or characters. The share of equal values in
two MinHash signatures estimates the Jaccard similarity of the two sets. SimHash signatures of near copies differ in few
bits. A family defines how shingles are hashed and how the hashes become a signature. Each family has a module here and
an entry in FAMILIES.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.engine.stage import PerDocument, Row, RowFunction
from pipeline.minhash import datasketch_family as datasketch
from pipeline.minhash import datatrove_family as datatrove
from pipeline.minhash import fast, simhash
from pipeline.minhash.bands import Signatures, as_matrix, band_keys, similarity
from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.permutations import draw_odd_numbers
from pipeline.text.words import Codes, word_key
from schemas.normalization import normalize

__all__ = [
    "FAMILIES",
    "SIGNATURE",
    "SignatureConfig",
    "Signatures",
    "anchor",
    "as_matrix",
    "band_keys",
    "jaccard",
    "make",
    "raw_digest",
    "shingle_hashes",
    "signature",
    "similarity",
    "text_digest",
    "value_type",
]

DIGEST_BYTES = 16
_SPACES = bytes(32 if chr(byte).isspace() else byte for byte in range(128)) + bytes(range(128, 256))


@dataclass(frozen=True)
class SignatureFamily:
    """The functions that compute the signatures of one family, and the type of their values."""

    hashes: Callable[[str, str, Codes | None, SignatureConfig], Codes]
    """Function (text, language, keys of its normalized words or None, config) → the hash of every shingle, at least
    one."""
    sketch: Callable[[Codes, SignatureConfig], npt.NDArray[Any]]
    """Function (shingle hashes, config) → the values of the signature."""
    value: str
    """NumPy type of the signature's values."""
    shingles: Callable[[str, str, SignatureConfig], Iterator[bytes]] | None = None
    """Function (text, language, config) → the bytes of every shingle, for a family whose hashes can be inverted. None:
    texts are compared by the hashes."""


FAMILIES: Mapping[str, SignatureFamily] = {
    "fast": SignatureFamily(fast.hashes, fast.sketch, fast.VALUE),
    "datasketch": SignatureFamily(datasketch.hashes, datasketch.sketch, datasketch.VALUE, datasketch.shingles),
    "datatrove": SignatureFamily(datatrove.hashes, datatrove.sketch, datatrove.VALUE, datatrove.shingles),
    "simhash": SignatureFamily(simhash.hashes, simhash.sketch, simhash.VALUE),
}


def value_type(config: SignatureConfig) -> str:
    """Return the NumPy type of the values of stored signatures, such as `<u4`."""
    return FAMILIES[config.family].value


def signature(text: str, language: str, config: SignatureConfig, words: Codes | None = None) -> bytes:
    """Return the signature of a text as the bytes of little-endian numbers.

    `words` are the keys of the text's normalized words with numbers as 0; if None, they are computed here.
    """
    family = FAMILIES[config.family]
    return (
        family.sketch(family.hashes(text, language, words, config), config).astype(family.value, copy=False).tobytes()
    )


def shingle_hashes(text: str, language: str, config: SignatureConfig, words: Codes | None = None) -> Codes:
    """Return the keys of the text's distinct shingles, by which texts are compared, sorted.

    Equal shingles have equal keys, and different ones have equal keys with probability 2^-64. The keys are no hashes of
    libraries: a page could be made without a shingle of another one that has all of its hashes.
    """
    family = FAMILIES[config.family]
    if family.shingles is None:
        return np.unique(family.hashes(text, language, words, config))
    keys = b"".join(map(word_key, family.shingles(text, language, config)))
    return np.unique(np.frombuffer(keys, "<u8").astype(np.uint64))


def jaccard(left: Codes, right: Codes) -> float:
    """Return the Jaccard similarity of two sets of shingle hashes, each sorted and distinct; 1 if both are empty."""
    union = np.concatenate([left, right])
    union.sort()
    shared = int(np.count_nonzero(union[1:] == union[:-1]))
    return shared / (len(union) - shared) if len(union) else 1.0


def anchor(hashes: Codes, seed: int) -> int:
    """Return the smallest of a text's shingle hashes under a permutation that no signature uses (0 to 2^63 - 1).

    Two documents of Jaccard similarity s have the same anchor with probability s, independently of their signatures.
    """
    values = (hashes ^ (hashes >> np.uint64(32))) * draw_odd_numbers(seed, "anchor", 1)
    return int(values.min()) >> 1


def raw_digest(text: str) -> bytes:
    """Return the first 16 bytes of the SHA-256 of the unchanged text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:DIGEST_BYTES]


def text_digest(text: str) -> bytes:
    """Return the first 16 bytes of the SHA-256 of the text after NFKC, lower case and single spaces."""
    if text.isascii():
        normal = text.lower().encode().translate(_SPACES)
        while b"  " in normal:  # a third of the cost of splitting into words and joining them
            normal = normal.replace(b"  ", b" ")
        normal = normal.strip(b" ")
    else:
        words = normalize("NFKC", text).lower().split()
        normal = " ".join(words).encode("utf-8", "surrogatepass")
    return hashlib.sha256(normal).digest()[:DIGEST_BYTES]


def make(config: SignatureConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that adds digests, signature and anchor to the row of a document; it drops no document."""
    family = FAMILIES[config.family]

    def sign(row: Row) -> None:
        text = row["_body"]
        hashes = family.hashes(text, row["language"], row["_words"], config)
        row["raw_digest"], row["text_digest"] = raw_digest(text), text_digest(text)
        row["signature"] = family.sketch(hashes, config).astype(family.value, copy=False).tobytes()
        row["anchor"] = anchor(hashes, config.seed)

    return sign


SIGNATURE = PerDocument(
    name="signature",
    version=3,
    config=SignatureConfig,
    reads=("_body", "_words", "language"),
    adds=("raw_digest", "text_digest", "signature", "anchor"),
    reasons={},
    make=make,
    ends=False,
)
