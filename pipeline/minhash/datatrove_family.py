"""The signature family `datatrove`, which reproduces the bands of the library datatrove bit for bit for English text.

A shingle is the text of five English tokens of the normalized text, joined by spaces. Its xxh64 x is permuted as (a x +
b) mod 2^61 - 1, where a x + b wraps at 2^64. Source: datatrove 0.10.1, MinhashDedupSignature. There are two
differences. A text shorter than a shingle is one shingle, where datatrove computes no signature. Languages other than
English use our own splitters, or characters, in place of datatrove's.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import xxhash

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.permutations import PRIME, mersenne_minima
from pipeline.minhash.shingles import iterate_runs, uses_characters
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, split_english, split_neutral, split_unspaced
from pipeline.text.words import CAPACITY, Codes, normal_words

VALUE = "<u8"
"""NumPy type of each value of a stored signature."""


class _Tokens(dict[str, str]):
    """A cache: text without whitespace → its normalized tokens, each followed by a space."""

    def __init__(self, split: Callable[[str], Sequence[str]], keep_numbers: bool):
        super().__init__()
        self._split = split
        self._keep_numbers = keep_numbers

    def __missing__(self, text: str) -> str:
        if len(self) >= CAPACITY:
            self.clear()
        words = normal_words(text, self._keep_numbers)
        tokens = "".join(f"{token} " for word in words for token in self._split(word))
        self[text] = tokens
        return tokens


_ENGLISH, _NEUTRAL, _UNSPACED = (
    {keep_numbers: _Tokens(split, keep_numbers) for keep_numbers in (False, True)}
    for split in (split_english, split_neutral, split_unspaced)
)
# All documents share these caches. Their values depend on the text alone, so sharing cannot change a signature.


def shingles(text: str, language: str, config: SignatureConfig) -> Iterator[bytes]:
    """Return the text of every shingle in UTF-8, in text order, or the whole text if it has no token."""
    if uses_characters(language, config):
        size = config.shingle_chars
        tokens = "".join(f"{char} " for word in normal_words(text, config.keep_numbers) for char in word)
    else:
        size = config.shingle_words
        cache = _ENGLISH if language == "en" else _UNSPACED if language in UNSPACED_LANGUAGES else _NEUTRAL
        tokens = "".join(map(cache[config.keep_numbers].__getitem__, text.split()))
    if not tokens:
        return iter([text.encode("utf-8", "surrogatepass")])
    return iterate_runs(tokens[:-1].encode("utf-8", "surrogatepass"), size)


def hashes(text: str, language: str, words: Codes | None, config: SignatureConfig) -> Codes:
    """Return the xxh64 of every shingle in text order; `words` is ignored."""
    return np.fromiter(map(xxhash.xxh64_intdigest, shingles(text, language, config)), np.uint64)


@lru_cache(maxsize=16)
def factors(seed: int, count: int) -> tuple[Codes, Codes]:
    """Return the factors and the terms of `count` permutations, each (count, 1), as NumPy's RandomState draws them."""
    generator = np.random.RandomState(seed)
    a = generator.randint(1, int(PRIME), dtype=np.uint64, size=(count, 1))
    return a, generator.randint(0, int(PRIME), dtype=np.uint64, size=(count, 1))


def sketch(codes: Codes, config: SignatureConfig) -> Codes:
    """Return the signature of one or more shingle hashes: the smallest hash under each permutation (permutations,)."""
    return mersenne_minima(codes, *factors(config.seed, config.permutations))
