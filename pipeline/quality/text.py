"""The lines and words of a text as each dialect defines words.

A piece is a maximal run of characters without whitespace; a vocabulary caches the words of each distinct piece. The
dialect datatrove uses the tokens of the language's tokenizer. DCLM and dolma use pieces as words, but DCLM's n-grams
use Unicode words. RedPajama-V2 uses runs of word characters and of other characters; most of its signals use
lower-case pieces without ASCII punctuation.
"""

import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from pipeline.text import native
from pipeline.text.native import loaded
from pipeline.text.native_words import arrays_of, is_native, properties_of, tokenize
from pipeline.text.words import Codes, Ints, Reader, Vocabulary, Words, token_codes, unicode_words, words_of
from schemas.normalization import normalize

if TYPE_CHECKING:
    from pipeline.text import _native

Arrays = tuple[npt.NDArray[Any], ...]

LETTER, SYMBOL, ALNUM_FIRST = 1, 2, 4
"""Flags of a piece: contains a letter; contains one of dolma's symbols; starts with a letter or digit."""
ASCII_LETTER, CAPITALS = 1, 2
"""Flags of a word of RedPajama-V2's raw text: contains an ASCII letter; is in upper case."""
JAVASCRIPT, LOREM = 1, 2
"""Flags of a normalized word of RedPajama-V2: is `javascript`; ends like the first word of the placeholder text."""
DOLMA_SYMBOLS = ("#", "…")

_RAW_WORD = re.compile(r"\w+|\W+")
_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))


def word_lengths(words: Sequence[str]) -> Ints:
    """Return the length of each word [code points]."""
    return np.fromiter(map(len, words), np.int64, len(words))


def _flags(values: Iterable[int], size: int) -> npt.NDArray[np.uint8]:
    return np.fromiter(values, np.uint8, size)


def read_pieces(pieces: Sequence[str]) -> Arrays:
    """Return arrays of properties of whitespace-separated pieces of text. Each piece counts as one word.

    The first array is the number of words in each piece (always 1). The other arrays have one value per word: length,
    flags, code, and code of the lower-case form.
    """
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
    """Return a word as RedPajama-V2 normalizes it: without ASCII punctuation, in lower case and NFD."""
    if piece.isascii() and piece.isalpha():
        return piece.lower()
    return normalize("NFD", piece.translate(_NO_PUNCTUATION).lower())


def read_normal_pieces(pieces: Sequence[str]) -> Arrays:
    """Return arrays of properties of whitespace-separated pieces of text, normalized as in RedPajama-V2.

    The first array is the number of words in each piece: 0 if nothing is left of the piece, else 1. The other arrays
    have one value per word: length, flags, code, and number of numeric characters.
    """
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
"""Splits pieces into the words of RedPajama-V2's raw text: runs of word characters, and runs of other characters."""
read_unicode_words = words_of(unicode_words, _no_flags)
"""Splits pieces into the words of DCLM's n-grams."""


@cache
def native_pieces() -> "_native.Pieces":
    """Return the reader of pieces of the native module, which has caches of its own."""
    pieces: _native.Pieces = loaded().Pieces(properties_of, normal_piece, unicode_words)
    return pieces


def read_natively(reader: Reader, text: str) -> Arrays | None:
    """Return what `reader` returns for the pieces of a text, by the native module; None if it is not used."""
    if native.module is None:
        return None
    pieces = native_pieces()
    methods = {
        read_pieces: (pieces.plain, "iifcc"),
        read_normal_pieces: (pieces.normal, "iifci"),
        read_raw_words: (pieces.raw, "iifc"),
        read_unicode_words: (pieces.unicode, "iifc"),
    }
    if reader not in methods:
        return None
    method, types = methods[reader]
    return tuple(arrays_of(method(text), types))


def may_repeat_lines(text: str, least: int) -> bool:
    """Return False only if no two lines of at least `least` code points are equal, with single spaces between words."""
    return native.module is None or native_pieces().may_repeat(text, least)


def count_known(codes: Codes, known: Codes) -> int:
    """Return how many words of a text are known words, repetitions included.

    `codes` has the codes of the text's words. `known` has the sorted codes of the known words.
    """
    if not len(known):
        return 0
    indices = np.searchsorted(known, codes)
    indices[indices == len(known)] = 0
    return int(np.count_nonzero(known[indices] == codes))


# The lines, pieces and words of one text, each computed at most once.


class TextView:
    """A text with its lines, whitespace-separated pieces and words, which are computed on first use."""

    def __init__(self, text: str, vocabulary: Vocabulary):
        self.text = text
        self.vocabulary = vocabulary
        self._read: dict[Reader, Arrays] = {}

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their line ends, as `splitlines` splits them."""
        return self.text.splitlines(keepends=True)

    @cached_property
    def _native(self) -> bool:
        return is_native(self.vocabulary.split)

    @cached_property
    def _tokenized(self) -> tuple[list[int], Words]:
        return tokenize(self.vocabulary.split, self.text)

    @cached_property
    def _pieces(self) -> tuple[list[int], Ints]:
        pieces = [line.split() for line in self.lines]
        return list(map(len, pieces)), self.vocabulary.numbers(list(chain.from_iterable(pieces)))

    @cached_property
    def counts(self) -> list[int]:
        """Number of whitespace-separated pieces on each line."""
        return self._tokenized[0] if self._native else self._pieces[0]

    @property
    def numbers(self) -> Ints:
        """The index in the vocabulary of each piece of the text, in order."""
        return self._pieces[1]

    @cached_property
    def words(self) -> Words:
        """The tokens of the text by the language's tokenizer."""
        return self._tokenized[1] if self._native else self.vocabulary.words(self.numbers)

    @cached_property
    def lowered(self) -> str:
        """The text in lower case."""
        return self.text.lower()

    @property
    def keys(self) -> Codes | None:
        """The keys of the normalized words; None if the native module computes them where they are used."""
        return None if self._native else self.vocabulary.keys(self.numbers)

    def read(self, reader: Reader) -> Arrays:
        """Return the arrays that `reader`, such as `read_pieces`, computes for the text.

        The first array has the number of words in each piece, and the others have the properties of the words.
        """
        arrays = self._read.get(reader)
        if arrays is None:
            arrays = read_natively(reader, self.text)
            if arrays is None:
                counts, columns = self.vocabulary.look_up(reader, self.numbers)
                arrays = counts, *columns
            self._read[reader] = arrays
        return arrays

    def only(self, lines: Sequence[int], text: str) -> Self:
        """Return a view of `text`, which must consist of the lines with these indices."""
        rest = type(self)(text, self.vocabulary)
        counts = [self.counts[line] for line in lines]
        rest.__dict__["counts"] = counts
        if sum(counts) == sum(self.counts):
            rest.__dict__["words"] = self.words
            if not self._native:
                rest.__dict__["_pieces"] = counts, self.numbers
            return rest
        keep = np.zeros(len(self.counts), bool)
        keep[lines] = True
        pieces = np.repeat(keep, self.counts)
        if self._native:
            rest.__dict__["words"] = self.words.of_pieces(pieces)
        else:
            rest.__dict__["_pieces"] = counts, self.numbers[pieces]
        return rest


# Recurring word n-grams of a text, for the dialects that count every occurrence of a repeated n-gram.
#
# A recurring n-gram starts where a recurring (n-1)-gram starts. So for each n, only the positions of recurring
# (n-1)-grams are checked: few in most texts.

SIZES = range(2, 11)
TOP_SIZES, REPEATED_SIZES = (2, 3, 4), (5, 6, 7, 8, 9, 10)
_MIX = np.uint64(0xD6E8FEB86659FD93)  # Odd; makes the code of ("ab", "c") differ from that of ("a", "bc").


@dataclass(frozen=True, slots=True)
class RecurringNgrams:
    """The word n-grams of a text, for one `n`, that occur more than once."""

    n: int
    places: Ints
    """Index of the first word of each occurrence, ascending."""
    most: int
    """Number of occurrences of the most frequent n-gram; 1 if none recurs."""
    firsts: Ints
    """Index of the first word of the first occurrence of each n-gram that occurs `most` times; empty if none recurs."""


def recurring_ngrams(codes: Codes) -> Iterator[RecurringNgrams]:
    """Yield the recurring n-grams of a text for each n of SIZES. `codes` has the codes of the text's words."""
    if native.module is not None:
        for n, (places, most, firsts) in zip(SIZES, native.module.recurring_ngrams(codes)):
            yield RecurringNgrams(n, np.frombuffer(places, np.int64), most, np.frombuffer(firsts, np.int64))
    else:
        yield from _ranked_ngrams(codes)


def _ranked_ngrams(codes: Codes) -> Iterator[RecurringNgrams]:
    """Yield the same as `recurring_ngrams`, by sorting."""
    places, grams = np.arange(len(codes)), codes
    for n in SIZES:
        inside = places <= len(codes) - n
        places, grams = places[inside], grams[inside]
        grams = grams * _MIX + codes[places + (n - 1)]
        order = np.argsort(grams)
        ranked = grams[order]
        equal = ranked[1:] == ranked[:-1]
        if not equal.any():
            for size in range(n, SIZES.stop):
                yield RecurringNgrams(size, places[:0], 1, places[:0])
            return
        bounds = np.concatenate(([0], np.flatnonzero(~equal) + 1, [len(grams)]))
        counts = bounds[1:] - bounds[:-1]
        recurs = np.zeros(len(grams), bool)
        recurs[order[np.repeat(counts > 1, counts)]] = True
        most = int(counts.max())
        firsts = np.minimum.reduceat(order, bounds[:-1])[counts == most]
        yield RecurringNgrams(n, places[recurs], most, places[firsts])
        places, grams = places[recurs], grams[recurs]


def num_covered_chars(ngrams: RecurringNgrams, offsets: Ints) -> int:
    """Return the number of characters in recurring n-grams. A word in several n-grams counts once.

    `offsets` has the start of each word and the end of the last word, in the text without whitespace [code points].
    """
    if not len(ngrams.places):
        return 0
    edges = np.zeros(len(offsets), np.int64)
    edges[ngrams.places] += 1
    edges[ngrams.places + ngrams.n] -= 1
    within = np.cumsum(edges[:-1]) > 0
    return int((offsets[1:] - offsets[:-1])[within].sum())


def ngram_lengths(places: Ints, n: int, offsets: Ints) -> Ints:
    """Return the number of characters of each n-gram. `places` has the index of each n-gram's first word."""
    return offsets[places + n] - offsets[places]
