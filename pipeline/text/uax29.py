"""Unicode word segmentation (UAX #29, Unicode 16): the words that start with a letter or digit.

Every character gets a class, characters that extend the previous one are skipped, and there is a boundary wherever no
rule joins two neighbors. Of all whitespace only the narrow no-break space joins words, so a piece is a run without
other whitespace. Emoji sequences with a zero-width joiner are not handled: they form no words.
"""

import re
import unicodedata
from collections.abc import Sequence

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
"""Class → code points with another class than by category and name. Classes: Letter, Hebrew letter, Number,
Katakana, E (connector), X (extends the character before), o (other); `:` joins letters, `,` numbers, `.` and `'` both.
"""
_UNJOINED = (
    *("CJK", "HIRAGANA", "HENTAIGANA", "THAI", "LAO", "MYANMAR", "KHMER", "TAI LE", "NEW TAI", "TAI VIET", "TAI THAM"),
    *("TANGUT", "NUSHU", "KHITAN", "AHOM"),
)
"""Name prefixes of letters that do not join others."""
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
    """Code point → class, computed on first access."""

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
_JOINS = re.compile(
    r"(?<=[LH])(?=[LHN]|[:.'][LH])|(?<=[LH][:.'])(?=[LH])|(?<=H)(?='|\"H)|(?<=H\")(?=H)"
    r"|(?<=N)(?=[NLH]|[,.']N)|(?<=N[,.'])(?=N)|(?<=K)(?=K)|(?<=[LHNKE])(?=E)|(?<=E)(?=[LHNK])"
)
"""Positions between two classes without a boundary."""
_ASCII_WORD = re.compile(r"(?:[A-Za-z0-9_]|(?<=[A-Za-z])[:.'](?=[A-Za-z])|(?<=[0-9])[,;.'](?=[0-9]))+")


NARROW_SPACE = "\u202f"
_WIDER = re.compile(rf"[^\S{NARROW_SPACE}]+")


def pieces_of(text: str) -> list[str]:
    """Return the pieces of a text that `unicode_words` requires."""
    return [piece for piece in _WIDER.split(text) if piece] if NARROW_SPACE in text else text.split()


def unicode_words(piece: str) -> Sequence[str]:
    """Return the words of a piece that start with a letter or digit, in order."""
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
    """Return the words of a piece in which characters extend the previous one: all rules skip these."""
    places = [place for place, kind in enumerate(classes) if kind != "X" or place == 0]
    joined = {match.start() for match in _JOINS.finditer("".join(classes[place] for place in places))}
    starts = [place for number, place in enumerate(places) if number not in joined]
    return [piece[a:b] for a, b in zip(starts, [*starts[1:], len(piece)]) if piece[a].isalnum()]
