"""Candidate windows: the few spans of a text that may contain personal data, found by fast searches of its ASCII form.

The ASCII form is as long as the text, so offsets are valid in both. It has ASCII digits, dashes and spaces for those of
other scripts. A pattern's word boundary `\\b` also matches in it next to Chinese, as in `号138…`.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

JOIN = " \0 "
"""Separator of joined windows; no pattern of personal data matches across it."""
NEAR_BEFORE, NEAR_AFTER = 60, 25
"""Maximum distance at which a word that names the type, such as `phone`, counts before and after a value [characters].
"""
MAX_VALUE, MAX_WINDOW, MAX_JOINED = 512, 1 << 12, 1 << 14
"""Maximum length of a value and of a window, and approximate maximum length of the joined windows of one search
[characters]. They limit the time of a search."""


def _numeric_forms() -> dict[str, str]:
    """Return a table from non-ASCII characters of numbers and addresses to their ASCII forms."""
    zeros = (0x0660, 0x06F0, 0x0966, 0x09E6, 0x0A66, 0x0AE6, 0x0BE6, 0x0C66, 0x0CE6, 0x0D66, 0x0E50, 0xFF10)
    table = {chr(zero + digit): str(digit) for zero in zeros for digit in range(10)}
    wide = (*range(0x41, 0x5B), *range(0x61, 0x7B), *map(ord, "@+-.:/()_"))
    table |= {chr(0xFEE0 + code): chr(code) for code in wide}
    table |= dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63", "-")
    return table | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " ")


def _letter_forms() -> dict[str, str]:
    """Return a table from Latin letters with diacritics to their ASCII base letters."""
    letters = [chr(code) for code in (*range(0xC0, 0x250), *range(0x1E00, 0x1F00))]
    return {letter: base for letter in letters if (base := unicodedata.normalize("NFD", letter)[0]).isascii()}


FORMS = _numeric_forms() | _letter_forms()
# Here and below, `re` or `regex` is used, whichever was measured to be faster: by up to ten times for such searches.
_FOLDABLE = re.compile(f"[{re.escape(''.join(FORMS))}]")


def fold(text: str) -> str:
    """Return the ASCII form of a text, with `?` for characters without one. The length stays the same."""
    if text.isascii():
        return text
    text = _FOLDABLE.sub(lambda match: FORMS[match.group()], text)
    return text.encode("ascii", "replace").decode("ascii")


_EMPHASIS = re.compile(
    r"(?<![\w.%+'@-])_++(?=[0-9A-Za-z+(])|(?<=[0-9A-Za-z)])_++(?=[\s,;:!?)\]}>\"'|*~`]|\.(?:\s|\Z)|\Z)"
)


def without_emphasis(folded: str) -> str:
    """Return the ASCII form of a text with blanks for the underscores around words, as in `_word_`.

    Patterns take an underscore for a letter of the value beside it.
    """
    return _EMPHASIS.sub(lambda match: " " * len(match.group()), folded) if "_" in folded else folded


@dataclass(frozen=True)
class CandidateFamily:
    """A pattern whose matches may be personal data, and the size of the window to search around a match."""

    pattern: Any
    before: int
    """Length of the window before the match [characters]."""
    after: int
    """Length of the window after the match [characters]."""


FAMILIES = {
    "at": CandidateFamily(re.compile("@"), 130, 260),
    "digits": CandidateFamily(regex.compile(r"[0-9](?:[ \-./()]{0,3}+[0-9]){6,}+"), 3, 3),
    # One search for two subjects, since looking at every digit is most of its time.
    "dots": CandidateFamily(regex.compile(r"[0-9]{1,3}(?:(?:\.[0-9]{1,3}){3}|[0-9]{3}[A-F+U-Y(][0-9A])"), 20, 5),
    "colons": CandidateFamily(regex.compile(r":[0-9A-Fa-f]{0,4}:"), 6, 42),
    "codes": CandidateFamily(
        regex.compile(
            r"[A-Z]{2}(?:[0-9]{2}(?:[ -]?[A-Z0-9]{3,4}){2,9}+|[A-Z]{4}[0-9L-V]{2}[A-Z]|[A-Z]{3}[0-9]{4}[A-Z]"
            r"|[A-Z]{2}[0-9]{6}[HMX][A-Z]{5}"
            r"| ?[0-9]{2} ?[0-9]{2} ?[0-9]{2} ?[A-D])"
        ),
        2,
        12,
    ),
    # Searches for what is rare in texts: the words of settings themselves take 50 times as long.
    "joined_tokens": CandidateFamily(re.compile(r"[_.:-][A-Za-z0-9_-]{16,}"), 24, 300),
    "access_keys": CandidateFamily(re.compile(r"A(?:KIA|SIA|ROA|IDA|Iza|TATT3)[A-Za-z0-9_-]{12}"), 2, 260),
    "web_tokens": CandidateFamily(re.compile(r"\.eyJ[A-Za-z0-9_-]{8}"), 518, 1740),
    "hooks": CandidateFamily(re.compile("hooks\\.slack"), 2, 90),
    "account_keys": CandidateFamily(re.compile("AccountKey="), 2, 90),
    "settings": CandidateFamily(re.compile(r"(?:=>|:=|=|:)[ \t]{0,4}+[\"'`]?[^\s\"'`]{12}"), 80, 210),
    "keys": CandidateFamily(re.compile(r"-----BEGIN [A-Z0-9 ]{0,24}PRIVATE KEY"), 0, 3900),
    "coins": CandidateFamily(re.compile(r"[13LMTDX][a-zA-HJ-NP-Z0-9]{24,}+"), 2, 2),
    "segwit": CandidateFamily(re.compile(r"c1[ac-hj-np-z02-9]{11,}+"), 4, 2),
    "hex": CandidateFamily(re.compile(r"0x[0-9a-fA-F]{40}"), 1, 1),
    "codes_on_request": CandidateFamily(regex.compile(r"[0-9]{4}|[0-9]{2}[A-Z][0-9]{2}"), 16, 16),
    "travel_zone": CandidateFamily(re.compile(r"[0-9]{7}[MFX<][0-9]{7}"), 62, 18),
    "plates": CandidateFamily(regex.compile(r"[A-Z0-9?][ .?-]?[0-9]{1,4}|[0-9][ -]?[A-Z]"), 10, 10),
    "hyphens": CandidateFamily(re.compile(r"-[0-9A-Fa-f]{2}-"), 6, 18),
    "degrees": CandidateFamily(regex.compile(r"[0-9]\.[0-9]{4}|[0-9]\?? ?[NS]|[0-9][?'] ?[0-9]"), 12, 48),
    "handles": CandidateFamily(regex.compile(r"@[A-Za-z0-9_]|[/=][A-Za-z@]|(?i:user|login|nick|handle)"), 30, 60),
}


@lru_cache(maxsize=1)  # The types of numbers and the telephone numbers of a text ask for the same runs.
def digit_runs(folded: str) -> list[tuple[int, int]]:
    """Return the spans of the runs of digits in the ASCII form of a text."""
    return [match.span() for match in FAMILIES["digits"].pattern.finditer(folded)]


def candidate_windows(folded: str, family: CandidateFamily) -> list[tuple[int, int]]:
    """Return the windows around the matches of the family's pattern, as spans (start, end) of `folded`.

    `folded` is the ASCII form of a text. A window has at most MAX_WINDOW characters.
    """
    spans: list[tuple[int, int]] = []
    is_digits = family is FAMILIES["digits"]
    matches = digit_runs(folded) if is_digits else [match.span() for match in family.pattern.finditer(folded)]
    for first, last in matches:
        start, end = max(0, first - family.before), min(len(folded), last + family.after)
        if spans and start <= spans[-1][1] and end - spans[-1][0] <= MAX_WINDOW:  # Overlapping windows are merged.
            spans[-1] = spans[-1][0], end
        else:  # A span above the maximum length is split into windows with overlap, so that no value is cut.
            spans += [(at, min(end, at + MAX_WINDOW)) for at in range(start, end, MAX_WINDOW - MAX_VALUE)]
    return spans


@dataclass(frozen=True)
class Joined:
    """Parts of a text, such as windows, joined into one text so that one search covers all of them."""

    text: str
    starts: list[int]
    """Offset of each part in the joined text."""
    origins: list[int]
    """Offset of each part in the whole text."""

    def origin(self, position: int) -> int:
        """Return the offset in the whole text that corresponds to an offset in the joined text."""
        part = bisect_right(self.starts, position) - 1
        return self.origins[part] + position - self.starts[part]


def join_windows(folded: str, spans: list[tuple[int, int]]) -> Iterator[Joined]:
    """Yield the windows of a text, joined into texts of about MAX_JOINED characters or fewer.

    `folded` is the ASCII form of the text. `spans` are the windows in `folded`.
    """
    first, size = 0, 0
    for last, (start, end) in enumerate(spans, 1):
        size += end - start
        if size > MAX_JOINED or last == len(spans):
            chosen = spans[first:last]
            texts = [folded[start:end] for start, end in chosen]
            starts = [0]
            for text in texts[:-1]:
                starts.append(starts[-1] + len(text) + len(JOIN))
            yield Joined(JOIN.join(texts), starts, [start for start, _ in chosen])
            first, size = last, 0


# Before and after a number that may be a decimal or the decimals of one. A number between two commas is in a list.
_UNITS, _DECIMALS = re.compile(r"(?<![0-9])[0-9]{1,6},\Z"), re.compile(r",[0-9]{1,6}(?![0-9])")
_UNGROUPED = re.compile(r"[0-9]++|[0-9]{1,3}(?:([ .])[0-9]{3})(?:\1[0-9]{3})*+")
"""A number as it may be before a decimal comma: digits alone, or in groups of three."""


def is_decimal(folded: str, start: int, end: int) -> bool:
    """Return True if the number at folded[start:end] may have decimals, or be the decimals of another one.

    Decimals are after a comma, as in `123456789,50`. Numbers such as 521-09-9997 have none, so that a comma beside them
    separates the fields of a line.
    """
    if not _UNGROUPED.fullmatch(folded, start, end):
        return False
    before, after = folded.startswith(",", start - 1) if start else False, folded.startswith(",", end)
    return (before and not after and _UNITS.search(folded, max(0, start - 8), start) is not None) or (
        after and not before and _DECIMALS.match(folded, end) is not None
    )


ESCAPES = 2
"""Number of times that a value may be escaped, as the at sign in `%2540`."""
_ESCAPED = re.compile("(?:%[0-9A-Fa-f]{2})++")
_PARAMETER = re.compile(r"[?&][^\s?&=#]{1,100}=([^\s?&#]*)")
_PLUS = re.compile(r"(?<=[0-9A-Za-z)])\+(?=[0-9A-Za-z(%])")


def unescape(text: str) -> Joined | None:
    """Return the text without percent-encoding, and with a blank for each plus sign between words of a parameter.

    Addresses have values in this form, as in `?phone=%2B49+30+901820`. None if the text has nothing like it.
    """
    escapes = [(*match.span(), match.group()) for match in _ESCAPED.finditer(text)] if "%" in text else []
    if "+" in text:
        values = (match.span(1) for match in _PARAMETER.finditer(text))
        escapes += [(*match.span(), "+") for value in values for match in _PLUS.finditer(text, *value)]
    if not escapes:
        return None
    pieces: list[str] = []
    starts, origins = [0], [0]
    size = end = 0
    for start, stop, escape in sorted(escapes):
        pieces.append(text[end:start])
        size, place, end = size + start - end, start, stop
        for char in " " if escape == "+" else bytes.fromhex(escape.replace("%", "")).decode("utf-8", "surrogateescape"):
            starts.append(size)
            origins.append(place)
            pieces.append(char)
            size, place = size + 1, place + 3 * (1 if "\udc80" <= char <= "\udcff" else len(char.encode()))
        starts.append(size)
        origins.append(stop)
    return Joined("".join([*pieces, text[end:]]), starts, origins)


def plain_value(value: str) -> str:
    """Return a value without percent-encoding."""
    for _ in range(ESCAPES):
        plain = unescape(value)
        value = value if plain is None else plain.text
    return value


def any_of(*words: str) -> str:
    """Return a regular expression that matches any of the words.

    A word of a script that separates words by spaces matches only as a whole word.
    """
    return "|".join(rf"\b{re.escape(word)}\b" if ord(word[0]) < 0xE00 else re.escape(word) for word in words)
