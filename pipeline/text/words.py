"""Words of a text: a cache, the vocabulary, of the words in each whitespace-separated piece and of their properties.

A token never contains whitespace, so the properties of a document's words (length, letters, sentence ends, codes for
n-grams, the normalized form for shingles) are computed per piece. Pieces follow Zipf's law: after 1,200 pages, 94 % of
those of a new English page are cached. A document then costs a dictionary lookup per piece and a few array operations.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2s
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.normalization import normalize

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.uint8]

CAPACITY = 1 << 17  # number of cached pieces above which the vocabulary is cleared; they take 50 MB


def _characters(ranges: str) -> str:
    """Return the characters of hexadecimal code point ranges such as `21 3F 61D-61F`."""
    bounds = ((part + "-" + part).split("-")[:2] for part in ranges.split())
    return "".join(chr(code) for first, last in bounds for code in range(int(first, 16), int(last, 16) + 1))


SENTENCE_ENDS = frozenset(
    _characters(
        "21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736 "
        "17D4-17D6 17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F "
        "203C-203D 2047-2049 2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 "
        "AA5D-AA5F AAF0-AAF1 ABEB FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 "
        "11047-11048 110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 "
        "1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C "
        "11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38 16B44 16E98 1BC9F 1DA88"
    )
)
"""Characters that end a sentence: Unicode's Sentence_Terminal, as in the dialect "datatrove"."""

PUNCTUATION = (
    string.punctuation
    + _characters("0-8 B-1F 7F-9F AB B4 BB 2013-2014 2019 201C-201E 2026 2236 2501 25BA 3001-3002 3008-300D 3010-3011")
    + _characters("FF01 FF05 FF08-FF09 FF0C FF0E FF11 FF1A-FF1B FF1F FF5E")
)
"""Characters that shingles ignore and that, like SENTENCE_ENDS, form no word: datatrove's list, with full-width 1."""

WORD, ALPHABETIC, ENDS_SENTENCE, MARK = 1, 2, 4, 8
"""Bits of a token's flags: is more than punctuation, contains a letter, ends a sentence, is other punctuation."""

_SYMBOLS = re.compile(f"[{re.escape(PUNCTUATION + ''.join(sorted(SENTENCE_ENDS)))}]*")
DIGIT_SEPARATORS = ".,\u066b\u060c\u2396\u2397\u2398"
"""Characters that may join the digits on both sides to one number."""
_NUMBER = re.compile(rf"\d+(?:[{DIGIT_SEPARATORS}]\d+)?")
_FOREIGN_DIGIT = re.compile(r"[^\D0-9]")
_ASCII_WORDS = re.compile(r"[a-z0-9]+")
_TO_SPACE = dict.fromkeys(map(ord, PUNCTUATION), " ")
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


def token_flags(token: str) -> int:
    """Return the flags of a token: WORD | ALPHABETIC | ENDS_SENTENCE | MARK."""
    return WORD | ALPHABETIC if token.isalpha() else _other_flags(token)


@lru_cache(maxsize=1 << 12)
def _other_flags(token: str) -> int:
    if token in SENTENCE_ENDS:
        return ENDS_SENTENCE
    flags = 0 if _SYMBOLS.fullmatch(token) else WORD
    if any(map(str.isalpha, token)):
        return flags | ALPHABETIC
    return flags | (MARK if all(unicodedata.category(char)[0] == "P" for char in token) else 0)


def normal_words(text: str, keep_numbers: bool = False) -> list[str]:
    """Return the words of a text, normalized for shingles: lower case, numbers as 0, no punctuation, no accents.

    With `keep_numbers`, numbers keep their digits, written as 0 to 9 for every script. Points and commas split them.
    """
    text = text.lower()
    if text.isascii():  # where everything but letters and digits is punctuation or space
        return [text] if text.isalpha() else _ASCII_WORDS.findall(text if keep_numbers else _NUMBER.sub("0", text))
    return normal_text(text, keep_numbers).split()


def normal_text(text: str, keep_numbers: bool) -> str:
    """Return the normal words of a lower-case text, with whitespace between them; see `normal_words`."""
    text = _FOREIGN_DIGIT.sub(_ascii_digit, text) if keep_numbers else _NUMBER.sub("0", text)
    text = text.translate(_TO_SPACE)
    return "".join(char for char in normalize("NFD", text) if unicodedata.category(char) != "Mn")


def _ascii_digit(match: re.Match[str]) -> str:
    return str(unicodedata.decimal(match[0]))


@lru_cache(maxsize=4)
def _power_table(size: int) -> tuple[Codes, Codes]:
    inverse = pow(BASE, -1, 1 << 64)
    tables = []
    for base in (BASE, inverse):
        factors = np.full(size, base, np.uint64)
        factors[0] = 1
        tables.append(np.multiply.accumulate(factors))
    return tables[0], tables[1]


def powers(count: int) -> tuple[Codes, Codes]:
    """Return the powers of BASE and the powers of its inverse, modulo 2^64.

    Both arrays start at exponent 0 and have at least `count` entries.
    """
    bits = count.bit_length()
    return _power_table(1 << (16 if bits <= 16 else max(20, bits)))


def token_codes(tokens: Sequence[str], lengths: Ints) -> Codes:
    """Return a 64-bit code of each token: the polynomial in BASE of its code points, modulo 2^64.

    No token may be empty.
    """
    if not len(tokens):
        return np.zeros(0, np.uint64)
    points = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    starts = np.cumsum(lengths) - lengths
    offsets = np.arange(len(points)) - np.repeat(starts, lengths)
    return np.add.reduceat(points * powers(int(lengths.max()))[0][offsets], starts)


def word_keys(words: Iterable[str]) -> Codes:
    """Return the first 8 bytes of the BLAKE2s hash of each word in UTF-8, as a little-endian number.

    Pages are written by strangers. With a hash that can be inverted, such as xxh64, a page without a word of another
    one could have all its keys, and would remove it as a copy.
    """
    return np.frombuffer(b"".join([word_key(word.encode("utf-8", "surrogatepass")) for word in words]), "<u8")


def word_key(word: bytes) -> bytes:
    """Return the key of a word in UTF-8, as `word_keys` returns it, in its 8 bytes."""
    return blake2s(word, digest_size=8).digest()


class _Ragged:
    """A growing table with one row for each piece of text. Rows have different lengths."""

    def __init__(self) -> None:
        self.size = self.used = 0
        self.single = True
        self.counts = np.zeros(1024, np.int64)
        self.starts = np.zeros(1024, np.int64)
        self.columns: list[npt.NDArray[Any]] = []

    def append(self, counts: Ints, *values: npt.NDArray[Any]) -> None:
        """Append rows. `counts` is the number of values in each row; `values` are the columns, row after row."""
        size, used = self.size + len(counts), self.used + len(values[0])
        if not self.columns:
            self.columns = [np.zeros(1024, column.dtype) for column in values]
        if size > len(self.counts):
            self.counts, self.starts = np.resize(self.counts, 2 * size), np.resize(self.starts, 2 * size)
        if used > len(self.columns[0]):
            self.columns = [np.resize(column, 2 * used) for column in self.columns]
        self.counts[self.size : size] = counts
        self.starts[self.size : size] = self.used + np.cumsum(counts) - counts
        for column, new in zip(self.columns, values):
            column[self.used : used] = new
        self.size, self.used = size, used
        self.single = self.single and bool((counts == 1).all())

    def positions(self, rows: Ints) -> Ints:
        """Return the indices of the values of these rows in the arrays `columns`, row after row."""
        if self.single:
            return rows
        counts = self.counts.take(rows)
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return np.repeat(self.starts.take(rows) - ends + counts, counts) + np.arange(total)


class _PieceNumbers(dict[str, int]):
    """Maps each piece to its index, in order of first occurrence; `pieces` lists the pieces in this order."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def __missing__(self, piece: str) -> int:
        number = self[piece] = len(self)
        self.pieces.append(piece)
        return number


@dataclass(frozen=True, slots=True)
class Words:
    """The tokens of a text as arrays; different tokens have equal codes with probability 2^-64."""

    lengths: Ints
    """Length of each token [code points]."""
    flags: Flags
    """Bits WORD, ALPHABETIC, ENDS_SENTENCE and MARK of each token."""
    codes: Codes
    """64-bit code of each token, as `token_codes` returns it."""
    counts: Ints
    """Number of tokens of each whitespace-separated piece of the text."""

    def of_pieces(self, keep: npt.NDArray[np.bool_]) -> "Words":
        """Return the tokens of those pieces for which `keep` is true."""
        tokens = np.repeat(keep, self.counts)
        return Words(self.lengths[tokens], self.flags[tokens], self.codes[tokens], self.counts[keep])


Reader = Callable[[Sequence[str]], tuple[npt.NDArray[Any], ...]]
"""Function from pieces to arrays: the number of words of each piece, then properties of these words, piece after piece.
"""


def words_of(split: Callable[[str], Sequence[str]], flags_of: Callable[[str], int]) -> Reader:
    """Return a function that splits pieces of text into tokens with `split`.

    The function returns four arrays: the number of tokens in each piece, then length, flags and code of each token.
    """

    def read(pieces: Sequence[str]) -> tuple[npt.NDArray[Any], ...]:
        split_pieces = [split(piece) for piece in pieces]
        tokens = list(chain.from_iterable(split_pieces))
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        flags = np.fromiter(map(flags_of, tokens), np.uint8, len(tokens))
        counts = np.fromiter(map(len, split_pieces), np.int64, len(pieces))
        return counts, lengths, flags, token_codes(tokens, lengths)

    return read


def read_keys(pieces: Sequence[str]) -> tuple[npt.NDArray[Any], ...]:
    """Return two arrays: the number of normalized words in each piece, and the key of each of these words."""
    words = [normal_words(piece) for piece in pieces]
    return np.fromiter(map(len, words), np.int64, len(words)), word_keys(chain.from_iterable(words))


def read_number_keys(pieces: Sequence[str]) -> tuple[npt.NDArray[Any], ...]:
    """Return the same as `read_keys`, of words whose numbers keep their digits."""
    words = [normal_words(piece, keep_numbers=True) for piece in pieces]
    return np.fromiter(map(len, words), np.int64, len(words)), word_keys(chain.from_iterable(words))


class Vocabulary:
    """A cache of the words in pieces of text and of their properties; results do not depend on what is cached."""

    def __init__(self, split: Callable[[str], Sequence[str]], capacity: int = CAPACITY):
        self.split = split
        self._tokens = words_of(split, token_flags)
        self._capacity = capacity
        self._forget()

    def _forget(self) -> None:
        self._numbers = _PieceNumbers()
        self._tables: dict[Reader, _Ragged] = {}
        self._learning = False

    def trim(self) -> None:
        """Clear the cache if it exceeds its capacity; indices that `numbers` returned before are then invalid."""
        full = len(self._numbers) > self._capacity
        full = full or any(table.used > 4 * self._capacity for table in self._tables.values())
        # The cache is also cleared if an exception interrupted an update.
        if full or self._learning or len(self._numbers) != len(self._numbers.pieces):
            self._forget()

    def numbers(self, pieces: Sequence[str]) -> Ints:
        """Return the index of each piece in the cache; new pieces are added."""
        return np.fromiter(map(self._numbers.__getitem__, pieces), np.int64, len(pieces))

    def look_up(self, reader: Reader, numbers: Ints) -> tuple[Ints, list[npt.NDArray[Any]]]:
        """Return the number of words in each piece, and the arrays of word properties that `reader` computes.

        `numbers` are the pieces' indices in the cache.
        """
        table = self._tables.get(reader)
        if table is None:
            table = self._tables[reader] = _Ragged()
        if table.size < len(self._numbers.pieces) or not table.columns:
            # `reader` runs only on pieces for which it has not run before.
            self._learning = True
            table.append(*reader(self._numbers.pieces[table.size :]))
            self._learning = False
        positions = table.positions(numbers)
        return table.counts[numbers], [column.take(positions) for column in table.columns]

    def words(self, numbers: Ints, reader: Reader | None = None) -> Words:
        """Return the tokens of pieces, given the indices of the pieces in the cache.

        `reader` is a function that `words_of` returned. None = the tokenizer of the vocabulary.
        """
        counts, columns = self.look_up(reader or self._tokens, numbers)
        return Words(columns[0], columns[1], columns[2], counts)

    def keys(self, numbers: Ints, keep_numbers: bool = False) -> Codes:
        """Return the key of each normalized word of pieces, given their indices; see `normal_words`."""
        return self.look_up(read_number_keys if keep_numbers else read_keys, numbers)[1][0]


# Unicode word segmentation (UAX #29, Unicode 16): the words that start with a letter or digit.
#
# Every character gets a class, and characters that extend the previous one are skipped. There is a word boundary
# between two neighbors unless a rule joins them. The narrow no-break space is the only whitespace that can be inside a
# word, so these pieces may contain it. Emoji sequences with a zero-width joiner are not handled: they contain no words.

_EXCEPTIONS = {
    ":": "3A B7 387 55F 5F4 2027 FE13 FE55 FF1A",
    ".": "2E 2018-2019 2024 FE52 FF07 FF0E",
    ",": "2C 3B 37E 589 60C-60D 66C 7F8 2044 FE50 FE54 FF0C FF1B",
    "'": "27",
    '"': "22",
    "L": (
        "2C2-2C5 2D2-2D7 2DE-2DF 2E5-2EB 2ED 2EF-2FF 55A-55C 55E 58A 5F3 70F 24B6-24E9 A708-A716 A720-A721 A789-A78A "
        "AB5B 16FE0-16FE1 1F130-1F149 1F150-1F169 1F170-1F189"
    ),
    "N": "600-605 66B 6DD 890-891 8E2 19DA 110BD 110CD",
    "K": "3031-3035 309B-309C 30A0 32D0-32FE 3300-3357",
    "X": "200C-200D FF9E-FF9F 1F3FB-1F3FF E0020-E007F",
    "E": "202F",
    "o": "200B 3006-3007 3021-3029 3038-303A 17000-187F7 18D00-18D08",
}
"""Class → code points whose class does not follow from their category and name. Classes: Letter, Hebrew letter, Number,
Katakana, E (connector), X (extends the character before), o (other); `:` joins letters, `,` numbers, `.` and `'` both.
"""
_UNJOINED = (
    *("CJK", "HIRAGANA", "HENTAIGANA", "THAI", "LAO", "MYANMAR", "KHMER", "TAI LE", "NEW TAI", "TAI VIET", "TAI THAM"),
    *("TANGUT", "NUSHU", "KHITAN", "AHOM"),
)
"""Prefixes of the Unicode names of letters that are not joined to a neighbor."""
_KATAKANA = ("KATAKANA", "HALFWIDTH KATAKANA", "CIRCLED KATAKANA", "SQUARE")
_BY_CATEGORY = {"Mn": "X", "Me": "X", "Mc": "X", "Cf": "X", "Nd": "N", "Pc": "E"}


def _class_of(char: str) -> str:
    category = unicodedata.category(char)
    if category in _BY_CATEGORY:
        return _BY_CATEGORY[category]
    if category[0] != "L" and category != "Nl":
        return "o"
    name = unicodedata.name(char, "")
    if name.startswith("HEBREW"):
        return "H"
    if name.startswith(_KATAKANA):
        return "K"
    return "o" if name.startswith(_UNJOINED) else "L"


class _Classes(dict[int, str]):
    """Maps a code point to its class in the rules for word boundaries (UAX #29), computed on first access."""

    def __missing__(self, code: int) -> str:
        kind = self[code] = _class_of(chr(code))
        return kind


def _exceptions() -> _Classes:
    classes = _Classes()
    for kind, ranges in _EXCEPTIONS.items():
        for part in ranges.split():
            first, last = (int(bound, 16) for bound in (part + "-" + part).split("-")[:2])
            classes.update(dict.fromkeys(range(first, last + 1), kind))
    return classes


_CLASSES = _exceptions()


def is_letter_of_words(code: int) -> bool:
    """Return True if a character is of the class L: no boundary is between two of these, or between one and a digit."""
    return _CLASSES[code] == "L"


_JOINS = re.compile(
    r"(?<=[LH])(?=[LHN]|[:.'][LH])|(?<=[LH][:.'])(?=[LH])|(?<=H)(?='|\"H)|(?<=H\")(?=H)"
    r"|(?<=N)(?=[NLH]|[,.']N)|(?<=N[,.'])(?=N)|(?<=K)(?=K)|(?<=[LHNKE])(?=E)|(?<=E)(?=[LHNK])"
)
"""Matches the positions between two characters, given as classes, at which there is no word boundary."""
_ASCII_WORD = re.compile(r"(?:[A-Za-z0-9_]|(?<=[A-Za-z])[:.'](?=[A-Za-z])|(?<=[0-9])[,;.'](?=[0-9]))+")


NARROW_SPACE = "\u202f"
_WIDER = re.compile(rf"[^\S{NARROW_SPACE}]+")


def pieces_of(text: str) -> list[str]:
    """Split a text at whitespace, except at narrow no-break spaces. Return the pieces for `unicode_words`."""
    return [piece for piece in _WIDER.split(text) if piece] if NARROW_SPACE in text else text.split()


def unicode_words(piece: str) -> Sequence[str]:
    """Return the words of a piece, by UAX #29, that start with a letter or digit, in order."""
    if piece.isascii():
        if piece.isalnum():
            return (piece,)
        return [word for word in _ASCII_WORD.findall(piece) if word[0] != "_"]
    classes = piece.translate(_CLASSES)
    if "X" in classes:
        return _extended(piece, classes)
    joined = {match.start() for match in _JOINS.finditer(classes)}
    starts = [place for place in range(len(piece)) if place not in joined]
    return [piece[a:b] for a, b in zip(starts, [*starts[1:], len(piece)]) if piece[a].isalnum()]


def _extended(piece: str, classes: str) -> list[str]:
    """Return the words of a piece that contains characters of the class X, such as accents."""
    # The rules for word boundaries skip characters of the class X.
    places = [place for place, kind in enumerate(classes) if kind != "X" or place == 0]
    joined = {match.start() for match in _JOINS.finditer("".join(classes[place] for place in places))}
    starts = [place for number, place in enumerate(places) if number not in joined]
    return [piece[a:b] for a, b in zip(starts, [*starts[1:], len(piece)]) if piece[a].isalnum()]
