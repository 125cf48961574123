"""Lines that repeat an earlier line of the same page: later occurrences are cut before any signal is measured.

A teaser, an offer or a notice that a page shows twice is content once. Rules on repeated lines would drop the page for
it. Only long lines of prose are cut, because short ones are as often headings, labels and cells that people keep.

Measured on 1,912 pages with a main text by people, with the text of the extractor `penstock`. Of the later occurrences
of lines below 30 characters, 68 % are in the main text by people; from 50 characters, 17 %. Lines of a verse or
chorus, cells, prices and dates are shorter than that, and lines of code and rows of tables are left out by their signs.
"""

import re
from collections.abc import Sequence

from pipeline.quality.text import may_repeat_lines
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES
from pipeline.text.spans import Span, complement, lines_without, trim

MIN_CHARS = 50
"""Minimum length of a line that may be cut, with single spaces [code points]."""
MIN_CHARS_UNSPACED = 20
"""The same in languages without spaces between words, whose characters say more."""
MIN_LETTERS = 0.65
"""Minimum share of letters among the characters other than white space: a line of numbers is no prose."""
MAX_CUT = 0.5
"""Maximum share of a text that is cut [code points]: that of an article which the page has twice. A page above it is
repetition: nothing is cut, so that the rules see it. Of the 235 lines that only this limit cuts, and a fifth does not,
93 % are not in the main text by people."""

_NO_PROSE = re.compile(r"[|{}<>;=\\]|&&|\(\)|::|//|^[#$@.]|\)$")
"""A sign of code, of an address or of a row of a table."""


def repeated_line_cuts(text: str, lines: Sequence[str], language: str) -> tuple[list[Span], int]:
    """Return the spans of later occurrences of long lines of prose, and the number of these lines.

    `lines` are the text's lines with their line ends. Lines are compared without outer white space, and with single
    spaces between words. Where lines are cut, at most one paragraph break stays between those on both sides.
    """
    least = MIN_CHARS_UNSPACED if language in UNSPACED_LANGUAGES else MIN_CHARS
    if not may_repeat_lines(text, least):
        return [], 0
    known: set[str] = set()
    cut: dict[int, int] = {}
    for number, line in enumerate(lines):
        if len(line) < least:
            continue
        words = " ".join(line.split())
        if words in known:
            cut[number] = len(line)
        elif len(words) >= least and is_prose(words):
            known.add(words)
    if not cut or sum(cut.values()) > MAX_CUT * len(text):
        return [], 0
    return complement(trim(text, lines_without(lines, cut)), len(text)), len(cut)


def is_prose(line: str) -> bool:
    """Return True if a line has mostly letters, and no sign of code, of an address or of a row of a table."""
    visible = len(line) - line.count(" ")
    return sum(map(str.isalpha, line)) >= MIN_LETTERS * visible and _NO_PROSE.search(line) is None


def spans_in_whole_text(cuts: Sequence[Span], size: int, lines: Sequence[Span]) -> list[Span]:
    """Convert spans of lines of a text without the cuts to spans of the whole text, which has `size` code points.

    The cuts remove whole lines, and may remove white space at both ends of the text.
    """
    spans: list[Span] = []
    visible = complement(cuts, size)
    at = passed = 0  # Index of the current visible span, and number of visible code points before it.
    for start, end in lines:
        while start >= passed + visible[at][1] - visible[at][0]:
            passed += visible[at][1] - visible[at][0]
            at += 1
        moved = visible[at][0] - passed
        spans.append((start + moved, end + moved))
    return spans
