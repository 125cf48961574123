"""The family `datatrove`: that library's shingles and permutations, so that its bands come out bit for bit.

A shingle is the text of five English tokens of the normalised text, joined by spaces; its xxh64 x is permuted as
(a x + b) mod 2^61 - 1, where a x + b wraps at 2^64. Source: datatrove 0.10.1, MinhashDedupSignature. Two departures,
where it has no answer to agree with: a text shorter than a shingle has one, all of it, where datatrove signs nothing;
and other languages than English take our own splitters, or characters, in place of its own.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import xxhash

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.shingles import iterate_runs, uses_characters
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, split_english, split_neutral, split_unspaced
from pipeline.text.words import CAPACITY, Codes, normal_words, word_keys

VALUE = "<u8"
"""How a permutation's value lies in a stored signature."""

PRIME = np.uint64((1 << 61) - 1)
_BITS = np.uint64(61)
_BLOCK = 128  # shingles permuted at a time; malloc maps larger arrays anew each time: 430 µs for 600, not 137


class _Tokens(dict[str, str]):
    """Piece without whitespace → its normalised tokens, a space after each; starts anew when it is full."""

    def __init__(self, split: Callable[[str], Sequence[str]]):
        super().__init__()
        self._split = split

    def __missing__(self, piece: str) -> str:
        if len(self) >= CAPACITY:
            self.clear()
        tokens = "".join(f"{token} " for word in normal_words(piece) for token in self._split(word))
        self[piece] = tokens
        return tokens


_ENGLISH, _NEUTRAL, _UNSPACED = _Tokens(split_english), _Tokens(split_neutral), _Tokens(split_unspaced)
# what they answer depends on the piece alone, so sharing them cannot change a signature


def hashes(text: str, language: str, words: Codes | None, config: SignatureConfig) -> Codes:
    """The xxh64 of the text of every run of tokens, in their order; of the whole text if it has none.

    The keys of its words are of no use here, because shingles are made of their letters.
    """
    if uses_characters(language, config):
        size = config.shingle_chars
        tokens = "".join(f"{char} " for word in normal_words(text) for char in word)
    else:
        size = config.shingle_words
        known = _ENGLISH if language == "en" else _UNSPACED if language in UNSPACED_LANGUAGES else _NEUTRAL
        tokens = "".join(map(known.__getitem__, text.split()))
    if not tokens:
        return word_keys([text])
    shingles = iterate_runs(tokens[:-1].encode("utf-8", "surrogatepass"), size)
    return np.fromiter(map(xxhash.xxh64_intdigest, shingles), np.uint64)


@lru_cache(maxsize=16)
def factors(seed: int, count: int) -> tuple[Codes, Codes]:
    """The factors a and the terms b of `count` permutations, each (count, 1), as NumPy's RandomState draws them."""
    generator = np.random.RandomState(seed)
    a = generator.randint(1, int(PRIME), dtype=np.uint64, size=(count, 1))
    return a, generator.randint(0, int(PRIME), dtype=np.uint64, size=(count, 1))


def mersenne_minima(codes: Codes, a: Codes, b: Codes, low: np.uint64 = PRIME) -> Codes:
    """The smallest (a x + b) mod 2^61 - 1 over the codes x, of which only the bits in `low` count (permutations,)."""
    least = np.full(len(a), low, np.uint64)
    for start in range(0, len(codes), _BLOCK):
        values = a * codes[start : start + _BLOCK]
        values += b
        # 2^61 is 1 modulo the prime: the high bits are added to the low ones, and the sum is below the prime + 8
        high = values >> _BITS
        values &= PRIME
        values += high
        np.subtract(values, PRIME, out=high)  # wraps to a large number unless a prime is to be taken off
        np.minimum(values, high, out=values)
        if low != PRIME:
            values &= low
        np.minimum(least, values.min(axis=1), out=least)
    return least


def sketch(codes: Codes, config: SignatureConfig) -> Codes:
    """The signature of at least one shingle hash: the smallest value under each permutation (permutations,)."""
    return mersenne_minima(codes, *factors(config.seed, config.permutations))
