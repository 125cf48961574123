"""Unicode normalization in time that is linear in the length of any text.

Python's own sorts runs of combining marks by insertion, so that 80,000 marks after one letter take 20 s. Long runs are
sorted here first, by the stable sort that the Unicode Standard defines (section 3.11, canonical ordering algorithm).
The results are those of `unicodedata.normalize` for every text.
"""

import unicodedata
from functools import cache
from typing import Literal

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]

LONG_RUN = 256
"""Number of marks from which a run is sorted here [code points]. Python takes 0.1 ms for as many."""
_LAST_MARK = 0x1F000
"""No mark has a code point from here on."""


def normalize(form: Form, text: str) -> str:
    """Return the text in a Unicode normal form, exactly as `unicodedata.normalize` does."""
    if len(text) >= LONG_RUN and not text.isascii():
        decomposed: Form = "NFKD" if "K" in form else "NFD"
        # One of the characters that are compared is in each long run.
        if not _marks(decomposed).isdisjoint(text[::LONG_RUN]):
            text = _with_sorted_runs(decomposed, text)
    return unicodedata.normalize(form, text)


@cache
def _marks(form: Form) -> frozenset[str]:
    """Return the characters whose decompositions begin with a combining mark."""
    chars = map(chr, range(0x80, _LAST_MARK))
    return frozenset(char for char in chars if unicodedata.combining(unicodedata.normalize(form, char)[0]))


def _with_sorted_runs(form: Form, text: str) -> str:
    marks = _marks(form)
    parts, done = [], 0
    for position in range(0, len(text), LONG_RUN):
        if position < done or text[position] not in marks:
            continue
        start, end = position, position + 1
        while start > done and text[start - 1] in marks:
            start -= 1
        while end < len(text) and text[end] in marks:
            end += 1
        if end - start >= LONG_RUN:
            run = "".join([unicodedata.normalize(form, mark) for mark in text[start:end]])
            parts += [text[done:start], *sorted(run, key=unicodedata.combining)]
            done = end
    return "".join([*parts, text[done:]])
