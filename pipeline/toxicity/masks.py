"""Masked words: spellings with which people evade word lists, such as `sh1t`, `f u c k` or `f*ck`.

A spelling is replaced by the plain word only if that word is on the list, so that ordinary text stays as it is.
"""

import re
from collections.abc import Callable, Collection, Iterable
from enum import IntFlag

from pipeline.text import native
from pipeline.text.native import loaded
from schemas.normalization import normalize

MAX_MASKED = 40
"""Maximum length of a masked spelling [code points]."""
MIN_LETTERS = 4
"""Minimum length of a word for a spelling with single letters or with hidden letters [code points]."""

_INVISIBLE = re.compile("[\u00ad\u0305\u0332-\u0338\u033f\u034f\u180e\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff]")
"""Characters that are not seen, and lines over, under and through letters."""
_DECOMPOSED = re.compile("[\u0300-\u036f\u0653-\u0655\u093c\u0958-\u095f\u09bc\u09dc-\u09df\u1100-\u11ff\u3099\u309a]")
"""Marks and letters of Korean that NFC joins with the letter before, and letters that it divides."""
# Letters in circles, of double width, in mathematical styles and in squares; NFKC gives plain letters.
_STYLED = re.compile("[\u2460-\u24ff\uff21-\uff3a\uff41-\uff5a\U0001d400-\U0001d7ff\U0001f130-\U0001f189]")
# Signs and digits that stand for letters; `1`, `!` and `|` stand for `i` or `l`.
_LEET = tuple(str.maketrans("0345789@$!|€+1", f"oeastbgas{stroke}{stroke}et{stroke}") for stroke in "il")
# Cyrillic and Greek letters that look like Latin ones, and the reverse.
_CYRILLIC, _CYRILLIC_AS_LATIN = "авекмнорстухіјѕԁԛԝ", "abekmhopctyxijsdqw"
_GREEK, _GREEK_AS_LATIN = "αβεικνορτυχη", "abeiknoptuxn"
_TO_LATIN = str.maketrans(f"{_CYRILLIC}{_GREEK}ı", f"{_CYRILLIC_AS_LATIN}{_GREEK_AS_LATIN}i")
_TO_CYRILLIC = str.maketrans(_CYRILLIC_AS_LATIN, _CYRILLIC)

_SPACED = re.compile(r"(?<![^\W_])[^\W\d_](?:([ .\-_*~/|]{1,2})[^\W_])(?:\1[^\W_]){2,36}(?![^\W_])")
# Signs between two letters, at most 8, or `$` before a letter. The rare sign comes first, which the search finds fast.
_HIDDEN = re.compile(r"[0-9@$!|€+*#](?<=[^\W\d_].)[0-9@$!|€+*#]{0,7}(?=[^\W\d_])|\$(?=[^\W\d_])", re.DOTALL)
_MIXED = re.compile("[a-z][\u0370-\u052f]|[\u0370-\u052f][a-z]")
_TRIPLE, _DOUBLE = re.compile(r"([^\W\d_])\1\1+"), re.compile(r"([^\W\d_])\1+")
_GAP = re.compile("[ .*_\\-~/|·]{1,2}")
_WIDE = "[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]"
_GAPS = re.compile(f"{_WIDE}(?:{_GAP.pattern}{_WIDE}){{1,7}}(?!{_WIDE})")
_IN_TOKEN = frozenset("@$!|€+*#")


class Sign(IntFlag):
    """What a text must have so that it can have masked words of one kind."""

    SPACED = 1
    """Four single letters or digits with short gaps."""
    HIDDEN = 2
    """A sign or digit before a letter."""
    TRIPLE = 4
    """The same letter three times."""
    MIXED = 8
    """A Latin letter beside a Greek or Cyrillic one."""
    UNUSUAL = 16
    """Invisible or styled characters, decomposed letters, or scripts without spaces between words."""


EVERY_SIGN = Sign(31)


class Unmasker:
    """Replaces masked spellings of the listed words in a text."""

    def __init__(self, words: Iterable[str], prefixes: Collection[str]):
        """`words` are casefolded words; `prefixes` are the beginnings of further words."""
        self._words = frozenset(words)
        self._prefixes = frozenset(prefixes)
        self._sizes = tuple(sorted({len(prefix) for prefix in prefixes}))
        self._hidden: dict[str, str] = {}
        for word in sorted(self._words):
            if MIN_LETTERS <= len(word) <= MAX_MASKED and word.isalpha():
                for start in range(1, len(word) - 1):
                    for stop in range(start + 1, len(word)):
                        self._hidden.setdefault(f"{word[:start]}{'*' * (stop - start)}{word[stop:]}", word)

    def unmask(self, folded: str) -> str:
        """Return a casefolded text with the listed words that were masked in plain spelling."""
        signs = EVERY_SIGN if native.module is None else Sign(loaded().mask_signs(folded))
        if not signs:
            return folded
        if Sign.UNUSUAL in signs:
            plain = _INVISIBLE.sub("", folded)
            if _DECOMPOSED.search(plain):
                plain = normalize("NFC", plain)
            if _STYLED.search(plain):
                plain = normalize("NFKC", plain).casefold()
            if plain != folded:
                folded, signs = plain, EVERY_SIGN
            folded = _GAPS.sub(self._without_gaps, folded)
        if Sign.MIXED in signs:
            folded = _replaced(folded, _MIXED, self._one_script)
        if Sign.SPACED in signs:
            folded = _SPACED.sub(self._joined, folded)
        if Sign.HIDDEN in signs:
            folded = _replaced(folded, _HIDDEN, self._revealed)
        return _replaced(folded, _TRIPLE, self._shortened) if Sign.TRIPLE in signs else folded

    def _listed(self, *words: str) -> str | None:
        """Return the first of the words that is on the list."""
        for word in words:
            if word in self._words or any(word[:size] in self._prefixes for size in self._sizes):
                return word
        return None

    def _joined(self, match: re.Match[str]) -> str:
        word = match.group().replace(match[1], "")
        if len(word) < MIN_LETTERS:
            return match.group()
        return self._listed(word, *map(word.translate, _LEET)) or match.group()

    def _without_gaps(self, match: re.Match[str]) -> str:
        joined = _GAP.sub("", match.group())
        parts = (joined[at:end] for at in range(len(joined)) for end in range(at + 2, len(joined) + 1))
        return joined if any(part in self._words for part in parts) else match.group()

    def _revealed(self, written: str) -> str:
        core = written.strip("*#!|+@")
        plain = self._listed(*map(core.translate, _LEET), self._hidden.get(core.replace("#", "*"), ""))
        return written if plain is None else plain

    def _one_script(self, word: str) -> str:
        return self._listed(word.translate(_TO_LATIN), word.translate(_TO_CYRILLIC)) or word

    def _shortened(self, word: str) -> str:
        shorter = _TRIPLE.sub(r"\1\1", word), _TRIPLE.sub(r"\1", word), _DOUBLE.sub(r"\1", word)
        return self._listed(word, *shorter) or word


def _replaced(text: str, sign: re.Pattern[str], plain: Callable[[str], str]) -> str:
    """Replace each word of at most MAX_MASKED characters in which the pattern `sign` matches by `plain` of it."""
    pieces: list[str] = []
    end = 0
    for match in sign.finditer(text):
        if match.start() < end:
            continue
        start, stop = match.span()
        while start > end and match.start() - start <= MAX_MASKED and _is_inside(text[start - 1]):
            start -= 1
        while stop < len(text) and stop - match.end() <= MAX_MASKED and _is_inside(text[stop]):
            stop += 1
        if stop - start <= MAX_MASKED:
            pieces += (text[end:start], plain(text[start:stop]))
            end = stop
    return "".join(pieces) + text[end:] if pieces else text


def _is_inside(char: str) -> bool:
    return char.isalnum() or char in _IN_TOKEN
