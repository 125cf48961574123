"""The words of whole texts by the native module: what the module asks of Python, and its answers as arrays.

The module has rules of its own only for the pieces that most texts consist of. It asks Python about every character and
every other piece that it meets for the first time, so the properties of characters are those of the running Python.
The functions here need the module; where it is not used, `pipeline.text.native.module` is None.
"""

import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.text import native, spacy_tokens
from pipeline.text.native import loaded
from pipeline.text.spacy_tokens import split_english, split_neutral, split_unspaced
from pipeline.text.words import (
    DIGIT_SEPARATORS,
    PUNCTUATION,
    SENTENCE_ENDS,
    Codes,
    Words,
    is_letter_of_words,
    normal_text,
    normal_words,
)
from schemas.normalization import normalize

if TYPE_CHECKING:
    from pipeline.text import _native

_SYMBOLS = SENTENCE_ENDS.union(PUNCTUATION)
_SIGMA = "\N{GREEK CAPITAL LETTER SIGMA}"
_TYPES = {"i": np.int64, "f": np.uint8, "c": np.uint64}


def arrays_of(parts: Sequence[bytes], types: str) -> list[npt.NDArray[Any]]:
    """Return the bytes that the module returned as arrays. `types` has a letter for each: ints, flags or codes."""
    return [np.frombuffer(part, _TYPES[kind]) for part, kind in zip(parts, types, strict=True)]


def properties_of(code: int) -> int:
    """Return the properties of a character, given its code point, as bits of the native module."""
    bits, char = loaded(), chr(code)
    lower, upper = spacy_tokens.case_of(char)
    properties = {
        bits.SPACE: char.isspace(),
        bits.BREAK: len(f"{char} ".splitlines()) == 2,
        bits.ALPHA: char.isalpha(),
        bits.ALNUM: char.isalnum(),
        bits.NUMERIC: char.isnumeric(),
        bits.SENTENCE_END: char in SENTENCE_ENDS,
        bits.SYMBOL: char in _SYMBOLS,
        bits.PUNCTUATION: unicodedata.category(char)[0] == "P",
        bits.UNSPACED: spacy_tokens.is_unspaced(char),
        bits.HEAD: char in spacy_tokens.HEADS,
        bits.TAIL: char in spacy_tokens.TAILS,
        bits.STOP: char in spacy_tokens.STOPS,
        bits.LOWER: lower,
        bits.UPPER: upper,
        bits.MEASURE_END: char in spacy_tokens.MEASURE_ENDS,
        bits.UPPERCASE: char.isupper(),
        bits.OTHER_CASE: char.islower() or (char.istitle() and not char.isupper()),
        bits.LOWERED: char.lower() != char,
        bits.DECOMPOSED: normalize("NFD", char) != char or unicodedata.combining(char) > 0,
        bits.JOINED: not char.isascii() and is_letter_of_words(code),
    }
    return sum(bit for bit, holds in properties.items() if holds)


# The tokens of a text by the tokenizer of its language.


_DIALECTS: dict[Callable[[str], Sequence[str]], str] = {
    split_english: "ENGLISH",
    split_neutral: "NEUTRAL",
    split_unspaced: "UNSPACED_WORDS",
}
"""The tokenizers that the module knows, and its constants for them."""


@cache
def _tokenizer(split: Callable[[str], Sequence[str]]) -> "_native.Tokenizer":
    """Return the native tokenizer of a function that splits pieces, which has a cache of its own."""
    forms = (spacy_tokens.FORMS, spacy_tokens.JOINABLE) if split is split_english else ({}, {})
    dialect = getattr(loaded(), _DIALECTS[split])
    tokenizer: _native.Tokenizer = loaded().Tokenizer(dialect, properties_of, split, *forms)
    return tokenizer


def is_native(split: Callable[[str], Sequence[str]]) -> bool:
    """Return True if `tokenize` has the tokens of this function: the module is used, and knows its rules."""
    return native.module is not None and split in _DIALECTS


def tokenize(split: Callable[[str], Sequence[str]], text: str) -> tuple[list[int], Words]:
    """Return the number of pieces on each line of a text, and its tokens. `is_native` must hold for the tokenizer."""
    lines, counts, lengths, flags, codes = arrays_of(_tokenizer(split).words(text), "iiifc")
    return lines.tolist(), Words(lengths, flags, codes, counts)


def forget() -> None:
    """Clear the caches of the native module, so that a measurement of time begins as a new worker does."""
    _tokenizer.cache_clear()
    _normal.cache_clear()


# The normal words of a text, for shingles.


def expand(keep_numbers: bool, code: int) -> tuple[str | None, bool, bool]:
    """Return what a character contributes to normal words, whether it is a digit, and whether it may join digits.

    The contribution is a space where the character ends a word, and None where it depends on other characters.
    """
    char = chr(code)
    text = normal_text(char.lower(), keep_numbers)
    # The lower case of a sigma depends on its place in the word, and marks that are kept may change places.
    depends = char == _SIGMA or any(map(unicodedata.combining, text))
    depends = depends or (any(map(str.isspace, text)) and not text.isspace())
    return None if depends else text, char.isdecimal(), char in DIGIT_SEPARATORS


@cache
def _normal(keep_numbers: bool) -> "_native.Normal":
    words = partial(normal_words, keep_numbers=keep_numbers)
    normal: _native.Normal = loaded().Normal(properties_of, partial(expand, keep_numbers), words, not keep_numbers)
    return normal


def normal_keys(text: str, keep_numbers: bool) -> Codes:
    """Return the key of each normalized word of a text, as `word_keys` returns it for `normal_words`."""
    return np.frombuffer(_normal(keep_numbers).keys(text), np.uint64)


def normal_points(text: str, keep_numbers: bool) -> Codes:
    """Return the code points of the normalized words of a text, without separators."""
    return np.frombuffer(_normal(keep_numbers).points(text), np.uint64)
