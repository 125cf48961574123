"""What the dialects take for a word: readers that a vocabulary asks once of every piece it meets.

The datatrove dialect has the words of the language's splitter. DCLM and dolma take the pieces between whitespace, DCLM
for n-grams Unicode's words; RedPajama-V2 takes runs of word characters and of others, and for most of its signals the
pieces in lower case without ASCII punctuation.
"""

import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.text.uax29 import unicode_words
from pipeline.text.words import Codes, Ints, Reader, Vocabulary, Words, token_codes, words_of

Arrays = tuple[npt.NDArray[Any], ...]

LETTER, SYMBOL, ALNUM_FIRST = 1, 2, 4
"""Flags of a piece: has a letter; has one of dolma's symbols; begins with a letter or digit."""
ASCII_LETTER, CAPITALS = 1, 2
"""Flags of a raw word of RedPajama-V2: has an ASCII letter; is in upper case."""
JAVASCRIPT, LOREM = 1, 2
"""Flags of a normal word of RedPajama-V2: is `javascript`; ends like the first word of the placeholder text."""
DOLMA_SYMBOLS = ("#", "…")

_RAW_WORD = re.compile(r"\w+|\W+")
_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))


def word_lengths(words: Sequence[str]) -> Ints:
    """Length of each word [code points]."""
    return np.fromiter(map(len, words), np.int64, len(words))


def _flags(values: Iterable[int], size: int) -> npt.NDArray[np.uint8]:
    return np.fromiter(values, np.uint8, size)


def read_pieces(pieces: Sequence[str]) -> Arrays:
    """The pieces themselves: lengths, flags, codes, and the codes of their lower case."""
    lengths, lowered = word_lengths(pieces), [piece.lower() for piece in pieces]
    flags = _flags(map(_piece_flags, pieces), len(pieces))
    lower_codes = token_codes(lowered, word_lengths(lowered))
    return np.ones(len(pieces), np.int64), lengths, flags, token_codes(pieces, lengths), lower_codes


def _piece_flags(piece: str) -> int:
    if piece.isalpha():
        return LETTER | ALNUM_FIRST
    symbols = SYMBOL if any(symbol in piece for symbol in DOLMA_SYMBOLS) else 0
    return symbols | (LETTER if any(map(str.isalpha, piece)) else 0) | (ALNUM_FIRST if piece[0].isalnum() else 0)


def normal_piece(piece: str) -> str:
    """A piece as RedPajama-V2 normalises it: no ASCII punctuation, lower case, NFD."""
    if piece.isascii() and piece.isalpha():
        return piece.lower()
    return unicodedata.normalize("NFD", piece.translate(_NO_PUNCTUATION).lower())


def read_normal_pieces(pieces: Sequence[str]) -> Arrays:
    """What normalisation leaves of each piece, one word or none: lengths, flags, codes, numeric characters."""
    normal = [normal_piece(piece) for piece in pieces]
    words = [word for word in normal if word]
    lengths = word_lengths(words)
    flags = _flags((JAVASCRIPT * (word == "javascript") | LOREM * word.endswith("lorem") for word in words), len(words))
    numeric = np.fromiter(
        (0 if word.isascii() and word.isalpha() else sum(map(str.isnumeric, word)) for word in words), np.int64
    )
    counts = np.fromiter(map(bool, normal), np.int64, len(normal))
    return counts, lengths, flags, token_codes(words, lengths), numeric


def _raw_words(piece: str) -> Sequence[str]:
    return (piece,) if piece.isalnum() else _RAW_WORD.findall(piece)


def _raw_flags(word: str) -> int:
    if word.isascii():
        letter = word.isalpha() or any(map(str.isalpha, word))
    else:
        letter = any("a" <= char <= "z" or "A" <= char <= "Z" for char in word)
    return ASCII_LETTER * letter | CAPITALS * word.isupper()


def _no_flags(word: str) -> int:
    return 0


read_raw_words = words_of(_raw_words, _raw_flags)
"""The words of RedPajama-V2's raw text: runs of word characters, and runs of others, of a piece."""
read_unicode_words = words_of(unicode_words, _no_flags)
"""The words of DCLM's n-grams."""


def count_known(codes: Codes, known: Codes) -> int:
    """How many of the words are among the known ones, repetitions counted; both by their codes, `known` sorted."""
    if not len(known):
        return 0
    places = np.searchsorted(known, codes)
    places[places == len(known)] = 0
    return int(np.count_nonzero(known[places] == codes))


# The parts of one text that its signals are taken from: lines, pieces between whitespace, words; each found once.


class TextView:
    """A text and what it falls into, as far as somebody asks."""

    def __init__(self, text: str, vocabulary: Vocabulary):
        self.text = text
        self.vocabulary = vocabulary
        self._read: dict[Reader, list[npt.NDArray[Any]]] = {}

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their ends, as `splitlines` finds them."""
        return self.text.splitlines(keepends=True)

    @cached_property
    def _pieces(self) -> tuple[list[int], Ints]:
        pieces = [line.split() for line in self.lines]
        return list(map(len, pieces)), self.vocabulary.numbers(list(chain.from_iterable(pieces)))

    @property
    def counts(self) -> list[int]:
        """Number of pieces on each line."""
        return self._pieces[0]

    @property
    def numbers(self) -> Ints:
        """The vocabulary's number of each piece."""
        return self._pieces[1]

    @cached_property
    def words(self) -> Words:
        """The words of the language."""
        return self.vocabulary.words(self.numbers)

    @cached_property
    def lowered(self) -> str:
        """The text in lower case."""
        return self.text.lower()

    def read(self, reader: Reader) -> list[npt.NDArray[Any]]:
        """What a reader says of the pieces, asked once."""
        found = self._read.get(reader)
        if found is None:
            found = self._read[reader] = self.vocabulary.look_up(reader, self.numbers)[1]
        return found

    def only(self, lines: Sequence[int], text: str) -> "Parts":
        """The parts of `text`, which holds these lines and no others, pieces and all."""
        rest = TextView(text, self.vocabulary)
        counts = [self.counts[line] for line in lines]
        if sum(counts) == len(self.numbers):
            rest.__dict__ |= {"_pieces": (counts, self.numbers), "words": self.words}
            return rest
        keep = np.zeros(len(self.counts), bool)
        keep[lines] = True
        rest.__dict__["_pieces"] = counts, self.numbers[np.repeat(keep, self.counts)]
        return rest
