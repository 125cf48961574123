"""N-grams of a text as 64-bit numbers: of its words, or of its characters where writing does not separate words.

The number of an n-gram is the polynomial of its units' keys, taken for all runs at once from prefix sums. Keys are
xxh64, so an n-gram that is in no set of N n-grams is taken for one of them with probability N / 2^64 (up to the factor
of 8 that exchanged words may cost): for 10^7 n-grams and a corpus of 10^12 words, 0.5 expected false hits in all of it.
"""

import re

import numpy as np

from pipeline.text.spacy_tokens import UNSPACED
from pipeline.text.words import Codes, Ints, normal_words, powers, word_keys

_UNSPACED = re.compile(f"[{UNSPACED}]")
PIECE = re.compile(r"\S+")
TOKEN = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
"""A character of a script that does not separate words, or a run of others: the least that is cut from a text."""


def prefix_sums(keys: Codes) -> Codes:
    """The polynomials of the first 0, 1, … keys modulo 2^64 (len(keys) + 1,)."""
    sums = np.zeros(len(keys) + 1, np.uint64)
    np.cumsum(keys * powers(len(keys))[0][: len(keys)], out=sums[1:])
    return sums


def ngrams(sums: Codes, size: int) -> Codes:
    """The number of every run of `size` units, given the prefix sums of their keys; empty if there are fewer."""
    count = max(0, len(sums) - size)
    return (sums[size:] - sums[:count]) * powers(len(sums))[1][:count]


def has_unspaced(text: str) -> bool:
    """Whether the text has a character of a script that does not separate words."""
    return not text.isascii() and _UNSPACED.search(text) is not None


def is_unspaced(text: str) -> bool:
    """Whether most characters of the text's words belong to such scripts."""
    letters = "".join(normal_words(text))
    return has_unspaced(letters) and 2 * len(_UNSPACED.findall(letters)) > len(letters)


def character_keys(text: str) -> Codes:
    """The key of each character of the text's words, spaces and punctuation left out: that of a word of one letter."""
    letters = "".join(normal_words(text)).encode("utf-32-le", "surrogatepass")
    points, places = np.unique(np.frombuffer(letters, "<u4"), return_inverse=True)
    return word_keys(map(chr, points.tolist()))[places]


def located_words(text: str) -> tuple[Codes, Ints]:
    """The key of each word, and start and end of the piece of text that it stands in (2, words) [code points]."""
    words: list[str] = []
    spans: list[tuple[int, int]] = []
    for piece in PIECE.finditer(text):
        found = normal_words(piece.group())
        words += found
        spans += [piece.span()] * len(found)
    return word_keys(words), np.array(spans, np.int64).reshape(-1, 2).T


def located_characters(text: str) -> tuple[Codes, Ints]:
    """The key of each character of the text's words, and start and end of its token (2, characters) [code points].

    Where a token's characters depend on its neighbours, as in a number, its span is that of the whole piece.
    """
    spans: list[tuple[int, int]] = []
    for piece in PIECE.finditer(text):
        whole = "".join(normal_words(piece.group()))
        tokens = [(token.span(), "".join(normal_words(token.group()))) for token in TOKEN.finditer(text, *piece.span())]
        if "".join(letters for _, letters in tokens) != whole:
            tokens = [(piece.span(), whole)]
        for span, letters in tokens:
            spans += [span] * len(letters)
    return character_keys(text), np.array(spans, np.int64).reshape(-1, 2).T
