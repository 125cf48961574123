"""Candidates: the few windows of a text where personal data can stand, found by cheap searches over its ASCII form.

The form has the length of the text, so positions hold in both. Word boundaries of patterns work in it beside scripts
without spaces (there is none in `号138…`), and digits, dashes and spaces of other scripts are those of ASCII.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import regex

JOIN = " \0 "
"""Stands between joined windows; no pattern of personal data crosses it."""
NEAR_BEFORE, NEAR_AFTER = 60, 25
"""How far a word that names a value may stand before and behind it [characters]."""
MAX_VALUE, MAX_WINDOW, MAX_JOINED = 512, 1 << 12, 1 << 14
"""Longest value, longest window, about the longest text a pattern runs over at once: bounds its time [characters]."""


def _numeric_forms() -> dict[str, str]:
    """Characters that other scripts and typography put inside numbers and addresses, by their ASCII form."""
    zeros = (0x0660, 0x06F0, 0x0966, 0x09E6, 0x0A66, 0x0AE6, 0x0BE6, 0x0C66, 0x0CE6, 0x0D66, 0x0E50, 0xFF10)
    table = {chr(zero + digit): str(digit) for zero in zeros for digit in range(10)}
    wide = (*range(0x41, 0x5B), *range(0x61, 0x7B), *map(ord, "@+-.:/()_"))
    table |= {chr(0xFEE0 + code): chr(code) for code in wide}
    table |= dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63", "-")
    return table | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " ")


def _letter_forms() -> dict[str, str]:
    """Latin letters with marks, by their bare letter."""
    letters = [chr(code) for code in (*range(0xC0, 0x250), *range(0x1E00, 0x1F00))]
    return {letter: base for letter in letters if (base := unicodedata.normalize("NFD", letter)[0]).isascii()}


FORMS = _numeric_forms() | _letter_forms()
# `re` or `regex`, here and below: whichever was faster by measurement, up to ten times on this kind of search.
_FOLDABLE = re.compile(f"[{re.escape(''.join(FORMS))}]")


def fold(text: str) -> str:
    """The ASCII form of a text, of the same length; `?` where a character has none."""
    if text.isascii():
        return text
    text = _FOLDABLE.sub(lambda match: FORMS[match.group()], text)
    return text.encode("ascii", "replace").decode("ascii")


@dataclass(frozen=True)
class CandidateFamily:
    """Types of values that one search finds: what to look for, and how far a value may reach beyond it [characters]."""

    pattern: Any
    before: int
    after: int


FAMILIES = {
    "at": CandidateFamily(re.compile("@"), 130, 260),
    "percent": CandidateFamily(re.compile("%(?:25)?40"), 130, 260),
    "digits": CandidateFamily(regex.compile(r"[0-9](?:[ \-./()]{0,3}+[0-9]){6,}+"), 3, 3),
    "dots": CandidateFamily(regex.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}"), 2, 2),
    "colons": CandidateFamily(regex.compile(r":[0-9A-Fa-f]{0,4}:"), 6, 42),
    "codes": CandidateFamily(
        regex.compile(
            r"[A-Z]{2}(?:[0-9]{2}(?:[ -]?[A-Z0-9]{3,4}){2,9}+|[A-Z]{4}[0-9L-V]{2}[A-Z]|[A-Z]{3}[0-9]{4}[A-Z]"
            r"| ?[0-9]{2} ?[0-9]{2} ?[0-9]{2} ?[A-D])"
        ),
        2,
        12,
    ),
    "coins": CandidateFamily(re.compile(r"[13b][a-zA-HJ-NP-Z0-9]{25,}+"), 2, 2),
}


def candidate_windows(folded: str, family: CandidateFamily) -> list[tuple[int, int]]:
    """Spans [start, end) of the ASCII form that may hold a value of the family, in order; close ones are one span."""
    spans: list[tuple[int, int]] = []
    for match in family.pattern.finditer(folded):
        start, end = max(0, match.start() - family.before), min(len(folded), match.end() + family.after)
        if spans and start <= spans[-1][1] and end - spans[-1][0] <= MAX_WINDOW:
            spans[-1] = spans[-1][0], end
        else:  # a longer run than any value is cut so that every value lies in one of the pieces
            spans += [(at, min(end, at + MAX_WINDOW)) for at in range(start, end, MAX_WINDOW - MAX_VALUE)]
    return spans


@dataclass(frozen=True)
class Joined:
    """Some windows as one text, so that a pattern runs once over all of them."""

    text: str
    starts: list[int]
    origins: list[int]

    def origin(self, position: int) -> int:
        """The position in the whole text of a position in the joined one."""
        window = bisect_right(self.starts, position) - 1
        return self.origins[window] + position - self.starts[window]


def join_windows(folded: str, spans: list[tuple[int, int]]) -> Iterator[Joined]:
    """The windows as joined texts of bounded size."""
    first, size = 0, 0
    for last, (start, end) in enumerate(spans, 1):
        size += end - start
        if size > MAX_JOINED or last == len(spans):
            chosen = spans[first:last]
            pieces = [folded[start:end] for start, end in chosen]
            starts = [0]
            for piece in pieces[:-1]:
                starts.append(starts[-1] + len(piece) + len(JOIN))
            yield Joined(JOIN.join(pieces), starts, [start for start, _ in chosen])
            first, size = last, 0


def any_of(*words: str) -> str:
    """The pattern of any of the words; those of scripts with spaces are whole words."""
    return "|".join(rf"\b{re.escape(word)}\b" if ord(word[0]) < 0xE00 else re.escape(word) for word in words)
