"""Shingles of a text and their hashes; a shingle is an n-gram of normalized words, or of their characters.

A word is represented by its key; see `word_keys`. Most texts are ASCII or nearly so. These are split by array
operations, without a Python string for each word: a letter is a digit in base 29, so each word has a number, and a
cache maps the number to the word's key. Other texts, and all texts whose numbers keep their digits, are split at
whitespace, and their words are looked up in a vocabulary. Both methods return the keys of the words of `normal_words`.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.permutations import draw_odd_numbers, mix_bits
from pipeline.text import native
from pipeline.text.native_words import normal_keys, normal_points
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, split_neutral, split_unspaced
from pipeline.text.words import PUNCTUATION, Codes, Vocabulary, normal_words, word_key, word_keys

_BASE = 29  # odd, so that it has an inverse modulo 2^64, and above the codes of letters
_LONGEST = 13  # most letters of a word whose number belongs to no other word: 29^13 < 2^64
_SPAN = 1 << 16  # bytes that are split into words at a time
_SLOT_BITS = 17
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_TOO_LONG, _FREE = np.uint64(0), np.uint64((1 << 64) - 1)  # numbers of no word: marks of a longer word and a free slot
_ZERO, _POINT = 27, 28  # codes of every digit, and of the separators inside a decimal number


def _code(char: str) -> int:
    if char.isascii() and char.isalpha():
        return ord(char.lower()) - 96
    return _ZERO if char in "0123456789" else _POINT if char in ".," else 0


_CODES = bytes(_code(chr(byte)) for byte in range(256))
_LETTERS = bytes([0, *range(97, 123), ord("0"), *range(228)])
# The pattern begins with a literal: a search for a literal is ten times as fast as a search for a character class.
_NUMBER = re.compile(rb"\x1b\x1b*(?:\x1c\x1b\x1b*)?")


def uses_characters(language: str, config: SignatureConfig) -> bool:
    """Return True if shingles of this language consist of characters rather than words."""
    return config.unit == "chars" or (config.unit == "auto" and language in UNSPACED_LANGUAGES)


def words_of(text: str, language: str, keep_numbers: bool = False) -> list[str]:
    """Return the normalized words of a text; a dictionary splits text of languages that do not separate words."""
    words = normal_words(text, keep_numbers)
    return [part for word in words for part in split_unspaced(word)] if language in UNSPACED_LANGUAGES else words


def shingle_units(text: str, language: str, words: Codes | None, config: SignatureConfig) -> tuple[Codes, int]:
    """Return the units of a text's shingles (word keys or code points), and the number of units in a shingle.

    There is at least one unit. `words` are the hash keys of the text's normalized words with numbers as 0; None =
    compute them. They are ignored if numbers are kept.
    """
    size = config.shingle_words
    if uses_characters(language, config):
        units, size = text_points(text, config.keep_numbers), config.shingle_chars
    elif language in UNSPACED_LANGUAGES:
        units = word_keys(words_of(text, language, config.keep_numbers))
    elif config.keep_numbers:
        units = _vocabulary_keys(text, keep_numbers=True)
    else:
        units = text_keys(text) if words is None else words
    return (units if len(units) else word_keys([text])), size


def text_points(text: str, keep_numbers: bool) -> Codes:
    """Return the code points of the normalized words of the text, in text order."""
    if native.module is not None:
        return normal_points(text, keep_numbers)
    letters = "".join(normal_words(text, keep_numbers)).encode("utf-32-le", "surrogatepass")
    return np.frombuffer(letters, "<u4").astype(np.uint64)


def text_keys(text: str) -> Codes:
    """Return the key of each normalized word of the text, in text order."""
    if native.module is not None:
        return normal_keys(text, keep_numbers=False)
    plain = text if text.isascii() else _as_ascii(text)
    keys = None if plain is None else _ascii_keys(plain)
    return _vocabulary_keys(text, keep_numbers=False) if keys is None else keys


def _vocabulary_keys(text: str, keep_numbers: bool) -> Codes:
    if native.module is not None:
        return normal_keys(text, keep_numbers)
    _VOCABULARY.trim()
    return _VOCABULARY.keys(_VOCABULARY.numbers(text.split()), keep_numbers)


def _as_ascii(text: str) -> str | None:
    """Return an ASCII text with the same normalized words as `text`.

    None if no such text exists, or if more than an eighth of the characters are not ASCII.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    foreign = points[points > 127]
    if 8 * len(foreign) > len(text):
        return None
    for char in map(chr, set(foreign.tolist())):
        plain = _plain(char)
        if plain is None:
            return None
        text = text.replace(char, plain)
    return text


@lru_cache(maxsize=1 << 12)
def _plain(char: str) -> str | None:
    """Return ASCII text that can replace a character without changing any normalized word; None if there is none."""
    if char.isdecimal():
        return "0"
    if char in PUNCTUATION or char.isspace():
        return " "
    parts = unicodedata.normalize("NFD", char.lower())
    plain = "".join(part for part in parts if unicodedata.category(part) != "Mn")
    return plain if plain.isascii() and plain.isalpha() else None


def _ascii_keys(text: str) -> Codes | None:
    """Return the key of each word of an ASCII text, or None if a word does not fit into _SPAN bytes."""
    body = _NUMBER.sub(b"\x1b", text.encode().translate(_CODES)).replace(b"\x1c", b"\0") + b"\0"
    keys, start = [], 0
    while start < len(body):
        end = body.rfind(b"\0", start, start + _SPAN) + 1
        if not end:
            return None
        keys.append(_span_keys(b"\0" + body[start:end] + b"\1"))
        start = end
    return keys[0] if len(keys) == 1 else np.concatenate(keys)


def _span_keys(span: bytes) -> Codes:
    """Return the key of each word in a span of encoded text.

    The span has the code of each letter (see `_CODES`) and a 0 between words. It begins with a 0, and ends with a 0 and
    a 1.
    """
    letters = np.frombuffer(span, np.uint8)
    inside = letters != 0
    before = (inside[1:] > inside[:-1]).nonzero()[0]  # the index before each word, and before the mark at the end
    up, down = _powers()
    sums = np.add.accumulate(letters * up[: len(span)]).take(before)
    numbers = (sums[1:] - sums[:-1]) * down.take(before[:-1])
    numbers *= before[1:] - before[:-1] <= _LONGEST + 1  # 0, which is _TOO_LONG, where that is false

    def word_at(index: int) -> bytes:
        start = int(before[index]) + 1
        return span[start : span.index(b"\0", start)].translate(_LETTERS)

    return _KNOWN.keys(numbers, word_at)


@lru_cache(maxsize=1)
def _powers() -> tuple[Codes, Codes]:
    """Return _BASE^0, _BASE^1, … and _BASE^-1, _BASE^-2, … modulo 2^64, as many as the longest span needs."""
    bases = np.array([[_BASE], [pow(_BASE, -1, 1 << 64)]], np.uint64).repeat(_SPAN + 2, axis=1)
    bases[0, 0] = 1
    up, down = np.multiply.accumulate(bases, axis=1)
    return up, down


class _KnownWords:
    """A cache of the keys of words, found by the number that a word's letters make in base 29.

    A number belongs to one word alone, so results never depend on earlier calls.
    """

    def __init__(self) -> None:
        self._entries = np.full((1 << _SLOT_BITS, 2), _FREE)

    def keys(self, numbers: Codes, word_at: Callable[[int], bytes]) -> Codes:
        """Return the key of each word.

        `numbers` are the words' numbers in base 29, or _TOO_LONG for a word too long to have a number. `word_at(i)`
        returns the letters of word i.
        """
        slots = ((numbers * _SPREAD) >> np.uint64(64 - _SLOT_BITS)).astype(np.intp)
        entries = self._entries.take(slots, axis=0)
        keys: Codes = entries[:, 1].copy()
        for index in (entries[:, 0] != numbers).nonzero()[0].tolist():
            keys[index] = int.from_bytes(word_key(word_at(index)), "little")
            if numbers[index] != _TOO_LONG:
                self._entries[slots[index]] = numbers[index], keys[index]
        return keys


_KNOWN, _VOCABULARY = _KnownWords(), Vocabulary(split_neutral)
# All documents share these caches. Their results depend on the text alone, so sharing cannot change a signature.


# Hashes of shingles from the keys of their units, and shingles as bytes for the families that hash text.


def shingles(units: Codes, size: int, seed: int) -> Codes:
    """Return the hash of every run of `size` consecutive units; if there are fewer units, one hash of all units."""
    size = min(size, len(units))
    return mix_bits(np.correlate(units, draw_odd_numbers(seed, "shingle", size), "valid"))


def hashes(text: str, language: str, words: Codes | None, config: SignatureConfig) -> Codes:
    """Return the hash of every shingle of a text, in text order.

    `words` are the hash keys of the text's normalized words; None = compute them. A text shorter than a shingle is one
    shingle. A text of punctuation alone is hashed as a whole.
    """
    return shingles(*shingle_units(text, language, words, config), config.seed)


def iterate_runs(joined: bytes, size: int) -> Iterator[bytes]:
    """Yield every run of `size` consecutive units of `joined`, in which single spaces separate the units.

    If there are fewer units, yield `joined` as a whole.
    """
    ends = np.flatnonzero(np.frombuffer(joined + b" ", np.uint8) == ord(" "))
    size = min(size, len(ends))
    starts = np.concatenate(([0], ends[: len(ends) - size] + 1))
    for start, end in zip(starts.tolist(), ends[size - 1 :].tolist()):
        yield joined[start:end]
