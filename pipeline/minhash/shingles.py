"""The units of shingles: keys of a text's normalized words, code points of their letters, or runs of bytes.

Most texts are ASCII or nearly so. These are split by array operations, without a string for each word: letters are
digits of a number in base 29, a word is a span of digits, and a table maps this number to the word's key. Other texts
are split at whitespace and looked up in a vocabulary. Both paths return the keys of `normal_words`.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import xxhash

from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.permutations import draw_odd_numbers, mix_bits
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, split_neutral, split_unspaced
from pipeline.text.words import PUNCTUATION, Codes, Vocabulary, normal_words, word_keys

_BASE = 29  # odd, so that it has an inverse modulo 2^64, and above the codes of letters
_LONGEST = 13  # letters of the longest word whose number is its own: 29^13 < 2^64
_SPAN = 1 << 16  # bytes cut at a time
_SLOT_BITS = 17
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_TOO_LONG, _FREE = np.uint64(0), np.uint64((1 << 64) - 1)  # no word has these numbers
_ZERO, _POINT = 27, 28  # codes of every digit, and of the separators inside a decimal number


def _code(char: str) -> int:
    if char.isascii() and char.isalpha():
        return ord(char.lower()) - 96
    return _ZERO if char in "0123456789" else _POINT if char in ".," else 0


_CODES = bytes(_code(chr(byte)) for byte in range(256))
_LETTERS = bytes([0, *range(97, 123), ord("0"), *range(228)])
# begins with a literal, because a search for a literal is ten times as fast as one for a character class
_NUMBER = re.compile(rb"\x1b\x1b*(?:\x1c\x1b\x1b*)?")


def uses_characters(language: str, config: SignatureConfig) -> bool:
    """Return True if shingles of this language consist of characters rather than words."""
    return config.unit == "chars" or (config.unit == "auto" and language in UNSPACED_LANGUAGES)


def words_of(text: str, language: str) -> list[str]:
    """Return the normalized words of a text, split by a dictionary where the language does not separate words."""
    words = normal_words(text)
    return [part for word in words for part in split_unspaced(word)] if language in UNSPACED_LANGUAGES else words


def shingle_units(text: str, language: str, words: Codes | None, config: SignatureConfig) -> tuple[Codes, int]:
    """Return the units of a text, at least one, and the number of units in a shingle.

    `words` are the keys of the text's normalized words, None if not known.
    """
    size = config.shingle_words
    if uses_characters(language, config):
        letters = "".join(normal_words(text)).encode("utf-32-le", "surrogatepass")
        units, size = np.frombuffer(letters, "<u4").astype(np.uint64), config.shingle_chars
    elif language in UNSPACED_LANGUAGES:
        units = word_keys(words_of(text, language))
    else:
        units = text_keys(text) if words is None else words
    return (units if len(units) else word_keys([text])), size


def text_keys(text: str) -> Codes:
    """Return the xxh64 of each normalized word of the text."""
    plain = text if text.isascii() else _as_ascii(text)
    keys = None if plain is None else _ascii_keys(plain)
    if keys is None:
        _VOCABULARY.trim()
        keys = _VOCABULARY.keys(_VOCABULARY.numbers(text.split()))
    return keys


def _as_ascii(text: str) -> str | None:
    """Return an ASCII text that has the same normalized words, or None if no such text exists."""
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
    """Return the ASCII that can replace a character in any context, or None if no such ASCII exists."""
    if char.isdecimal():
        return "0"
    if char in PUNCTUATION or char.isspace():
        return " "
    parts = unicodedata.normalize("NFD", char.lower())
    plain = "".join(part for part in parts if unicodedata.category(part) != "Mn")
    return plain if plain.isascii() and plain.isalpha() else None


def _ascii_keys(text: str) -> Codes | None:
    """Return the keys of the words of an ASCII text, or None if a word fills a whole span."""
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
    """Return the keys of the words of a span that begins before a word and ends with a mark in place of the next."""
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
    """Return the powers 0, 1, … and -1, -2, … of the base modulo 2^64, for one span and its ends."""
    bases = np.array([[_BASE], [pow(_BASE, -1, 1 << 64)]], np.uint64).repeat(_SPAN + 2, axis=1)
    bases[0, 0] = 1
    up, down = np.multiply.accumulate(bases, axis=1)
    return up, down


class _KnownWords:
    """A cache from word numbers to word keys; a missing word is hashed, and replaces another in its slot.

    A number belongs to one word alone, so results never depend on earlier calls.
    """

    def __init__(self) -> None:
        self._entries = np.full((1 << _SLOT_BITS, 2), _FREE)

    def keys(self, numbers: Codes, word_at: Callable[[int], bytes]) -> Codes:
        """Return the xxh64 of each word; `word_at(i)` returns the letters of word i, whose number may be _TOO_LONG."""
        slots = ((numbers * _SPREAD) >> np.uint64(64 - _SLOT_BITS)).astype(np.intp)
        entries = self._entries.take(slots, axis=0)
        keys: Codes = entries[:, 1].copy()
        for index in (entries[:, 0] != numbers).nonzero()[0].tolist():
            keys[index] = xxhash.xxh64_intdigest(word_at(index))
            if numbers[index] != _TOO_LONG:
                self._entries[slots[index]] = numbers[index], keys[index]
        return keys


_KNOWN, _VOCABULARY = _KnownWords(), Vocabulary(split_neutral)
# their results depend on the text alone, so sharing them cannot change a signature


# Hashes of shingles of word keys, and shingles as bytes, for families that hash text rather than word keys.


def shingles(units: Codes, size: int, seed: int) -> Codes:
    """Return the hashes of all runs of `size` units, or of the whole text if it is shorter."""
    size = min(size, len(units))
    return mix_bits(np.correlate(units, draw_odd_numbers(seed, "shingle", size), "valid"))


def hashes(text: str, language: str, words: Codes | None, config: SignatureConfig) -> Codes:
    """Return the hash of every shingle in text order; `words` are the keys of the normalized words, None if not known.

    A text shorter than a shingle is one shingle. A text of punctuation alone is hashed as a whole.
    """
    return shingles(*shingle_units(text, language, words, config), config.seed)


def iterate_runs(joined: bytes, size: int) -> Iterator[bytes]:
    """Yield every run of `size` units of a text whose units are separated by one space; all of it if it has fewer."""
    ends = np.flatnonzero(np.frombuffer(joined + b" ", np.uint8) == ord(" "))
    size = min(size, len(ends))
    starts = np.concatenate(([0], ends[: len(ends) - size] + 1))
    for start, end in zip(starts.tolist(), ends[size - 1 :].tolist()):
        yield joined[start:end]
