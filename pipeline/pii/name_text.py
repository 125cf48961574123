"""Texts as names are searched in them: with even blanks, unbroken names, and names in capitals as others are written.

Web pages separate the words of a name by blanks of many widths and by line breaks, write names beside letters of a
script without capitals, and print bylines in capitals. A pipeline was trained on none of these.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass

import regex

from pipeline.pii.name_windows import CASED, FIRST_NAMES, SPEECH, THINGS, TITLES

MAX_SHORT_LINE = 3
"""Maximum number of words of a line in capitals that may be a name although no word is a known first name."""
_ODD = "\t\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"
_UNEVEN = re.compile(f" [ {_ODD}]++|[{_ODD}][ {_ODD}]*+")
_GAP = re.compile(f" (?=[ {_ODD}\n])[ {_ODD}]*+\n?[ {_ODD}]*+|[{_ODD}][ {_ODD}]*+\n?[ {_ODD}]*+|\n[ {_ODD}]*+(?!\n)")
_BROKEN = regex.compile(rf"(?<![{CASED}])(\p{{Lu}}[{CASED}]*+(?:-[{CASED}]++)?+\.?) ?\n ?(?=\p{{Lu}}[{CASED}.])")
_SEVERAL = rf"\p{{Lu}}[{CASED}]++(?: \p{{Lu}}[{CASED}]++){{1,4}}+"
_BESIDE = regex.compile(rf"(?<=\p{{Lo}}){_SEVERAL}|(?<![{CASED}]){_SEVERAL}(?=\p{{Lo}})")
_CAPITAL = rf"\p{{Lu}}[\p{{Lu}}\p{{M}}]*+(?:['’-]\p{{Lu}}[\p{{Lu}}\p{{M}}]*+)*+(?![{CASED}\p{{N}}_])\.?+"
_CAPITALS = regex.compile(
    rf"(?<![{CASED}\p{{N}}_@./-])(?<!\p{{Lu}}['’]){_CAPITAL}(?: {_CAPITAL}){{1,60}}+(?!@|\.\p{{L}})"
)
_SIGN_OF_NAME = regex.compile(
    rf"(?<![\w.@/-])_(?=\p{{Lu}}[{CASED} .'’-]{{0,80}}+_(?![\w@]))|(?<=[{CASED}.])_(?![\w@])"
    rf"|(?<=[{CASED}])(?:\p{{No}}++|\[[0-9]{{1,3}}\])|[|~•→†‡\p{{So}}]"
    rf"|(?<=[{CASED}\p{{N}}])([,;])(?=\p{{Lu}})"
)
"""Signs beside a name that a pipeline takes for a part of it."""
_LAST_IN_CAPITALS = regex.compile(rf"(?<![{CASED}])(\p{{Lu}}\p{{Ll}}++) (\p{{Lu}}{{3,}}+)(?![{CASED}\p{{N}}_@])")
_PARTICLE_WORDS = """
    de da do dos del della di du la le van von der den ter bin ibn ben al el zu
"""
_PARTICLES = frozenset(_PARTICLE_WORDS.split())


@dataclass(frozen=True)
class EvenText:
    """A text with one space in place of each run of blanks with at most one line break."""

    text: str
    ends: tuple[int, ...]
    """Offsets in `text` at which the runs that became shorter end, in ascending order."""
    removed: tuple[int, ...]
    """For each of these offsets, the number of characters that are missing before it."""

    def origin(self, at: int) -> int:
        """Return the offset in the original text of a character of `text` that is no blank."""
        before = bisect_right(self.ends, at)
        return at + (self.removed[before - 1] if before else 0)


def even_text(text: str) -> EvenText:
    """Return the text with even blanks, in which the words of a name have one space between them."""
    pieces: list[str] = []
    ends: list[int] = []
    removed: list[int] = []
    end = missing = 0
    for gap in _GAP.finditer(text):
        pieces += (text[end : gap.start()], " ")
        end = gap.end()
        if end - gap.start() > 1:
            missing += end - gap.start() - 1
            ends.append(end - missing)
            removed.append(missing)
    return EvenText("".join((*pieces, text[end:])), tuple(ends), tuple(removed))


def even_lines(text: str) -> str:
    """Return the text with one space for each run of blanks in a line, and without line breaks inside of names.

    A line break is inside of a name if a known first name, a title or an initial is before it and a capital after it.
    """
    joined: str = _BROKEN.sub(_joined, _UNEVEN.sub(" ", text))
    return joined


def as_usually_written(text: str) -> str:
    """Return a text with even blanks as a pipeline reads it best: names in capitals get small letters.

    Of other words in capitals beside such a name, all letters become small. A name of several words beside letters of
    a script without capitals is separated from them. Underscores around a name, bars, symbols and signs of notes are
    blanks, and a blank is after each comma.
    """
    text = _CAPITALS.sub(_in_small_letters, _SIGN_OF_NAME.sub(_blank, text))
    text = _LAST_IN_CAPITALS.sub(lambda at: f"{at[1]} {at[2].title()}" if at[1].lower() in FIRST_NAMES else at[0], text)
    text = _BESIDE.sub(r" \g<0> ", text)
    return text


def _blank(sign: regex.Match[str]) -> str:
    return f"{sign[1]} " if sign[1] else " "


def _joined(broken: regex.Match[str]) -> str:
    word = broken[1].strip(".").lower()
    is_of_name = len(word) == 1 or word in TITLES or word.partition("-")[0] in FIRST_NAMES
    return f"{broken[1]} " if is_of_name else broken[0]


def _in_small_letters(run: regex.Match[str]) -> str:
    """Return several words in capitals with a capital for each word of a name only; unchanged if none is a name."""
    words = run[0].split(" ")
    folded = [word.strip(".").lower() for word in words]
    of_name: set[int] = set()
    for first, word in enumerate(folded):
        if word.partition("-")[0] in FIRST_NAMES or (len(word) > 2 and word in TITLES) or word in ("mr", "ms", "dr"):
            last = first + 1
            while last < len(words) and (len(folded[last]) == 1 or folded[last] in FIRST_NAMES | _PARTICLES):
                last += 1
            if last < len(words) and folded[last] not in THINGS and folded[last] not in SPEECH:
                of_name |= {*range(first, last + 1)}
    if not of_name and len(words) <= MAX_SHORT_LINE and THINGS.isdisjoint(folded) and _is_line(run):
        of_name = {*range(len(words))}
    if not of_name:
        return str(run[0])
    return " ".join(
        word.title() if at in of_name and folded[at] not in _PARTICLES else word.lower()
        for at, word in enumerate(words)
    )


def _is_line(match: regex.Match[str]) -> bool:
    """Return True if a match is a whole line."""
    text, start, end = match.string, match.start(), match.end()
    return text[max(0, start - 1) : start] in ("", "\n") and text[end : end + 1] in ("", "\n")
