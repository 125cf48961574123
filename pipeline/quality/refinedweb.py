"""RefinedWeb's line rules as DCLM implements them: the spans to cut, and the share of words that they remove.

They cut lines in capitals, lines of digits only, counters such as `3 likes`, and lines of a single word. From lines of
at most ten words they also cut three phrases of shops and blogs. The remaining text is stripped, but not each line.
Source: Penedo et al. 2023, arXiv 2306.01116, appendix G.2; Li et al. 2024, arXiv 2406.11794.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.quality.dclm_dolma import ASCII_SPACE, num_words
from pipeline.quality.redpajama import LineCounts
from pipeline.quality.text import TextView
from pipeline.text.spans import Span, complement, lines_without, trim, union, without

MAX_DIGITS = 0.999999
PHRASE_WORDS = 10
PHRASES = (
    re.compile(r"\s?items in cart", re.IGNORECASE),
    re.compile(r"\s?read more...$", re.IGNORECASE),
    re.compile(r"^sign-in\s?", re.IGNORECASE),
)
"""Patterns whose matches are removed, one pattern after the other. A dot matches any character, as in DCLM's code."""
_PHRASES = ("items in cart", "read more", "sign-in")


@dataclass(frozen=True, slots=True)
class RefinedWebRules:
    """The settings of RefinedWeb's line rules."""

    max_uppercase: float = 0.5
    """Maximum share of upper-case characters of a kept line."""
    min_words: int = 2
    """Minimum number of whitespace-separated words of a kept line [words]; empty lines are kept."""
    keep_structure: bool = False
    """True to keep short lines, and to leave at most one paragraph break where lines are cut."""


def apply_refinedweb(lines: LineCounts, rules: RefinedWebRules, english: bool) -> tuple[list[Span], int]:
    """Return the spans to cut by RefinedWeb's line rules, and the number of lines that are cut completely.

    If `english` is False, only the rules on upper case and digits are applied.
    """
    text, edges = lines.whole.text, lines.edges
    lengths = lines.lengths
    keep = lines.upper <= rules.max_uppercase * lengths
    keep &= ~_numbers(lines, keep)
    if english:
        keep &= ~lines.counters
        keep &= rules.keep_structure | (lines.counts >= rules.min_words) | (lengths == 0)
    cut = set(np.flatnonzero(~keep).tolist())
    cuts: list[Span] = []
    if english and any(phrase in lines.whole.lowered for phrase in _PHRASES):
        for number in np.flatnonzero(keep & (lines.counts <= PHRASE_WORDS)).tolist():
            line = lines.texts[number]
            if not any(phrase in line.lower() for phrase in _PHRASES):
                continue
            start, stop = int(edges[number]), int(edges[number] + lengths[number])
            phrases, left = _phrases_in(text[start:stop])
            if left.strip():
                cuts += [(start + a, start + b) for a, b in phrases]
            else:
                cut.add(number)
    if not rules.keep_structure:
        cuts += [(int(edges[number]), int(edges[number + 1])) for number in cut]
    elif cut:
        with_ends = [text[int(start) : int(end)] for start, end in pairwise(edges)]
        cuts += complement(lines_without(with_ends, cut), len(text))
    elif not cuts:
        return [], 0
    kept = complement(union(cuts, []), len(text))
    return complement(trim(text, kept), len(text)), len(cut)


def _numbers(lines: LineCounts, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return a mask of the lines that consist of digits only."""
    lengths = lines.lengths
    numbers = (lines.digits > 0) & (lines.digits > MAX_DIGITS * lengths)
    # Outer whitespace of the first and the last kept line with words is ignored.
    filled = np.flatnonzero(kept & (lines.counts > 0))
    for number in {int(filled[0]), int(filled[-1])} if len(filled) else ():
        line = lines.texts[number].strip()
        numbers[number] = lines.digits[number] > MAX_DIGITS * len(line)
    return numbers


def _phrases_in(line: str) -> tuple[list[Span], str]:
    """Return the spans of the phrases in PHRASES (such as `read more`) in a line, and the line without them."""
    size = len(line)
    offsets = list(range(size))
    for pattern in PHRASES:
        for match in reversed(list(pattern.finditer(line))):
            line = line[: match.start()] + line[match.end() :]
            del offsets[match.start() : match.end()]
    return [(offset, offset + 1) for offset in sorted(set(range(size)).difference(offsets))], line


def share_of_words(whole: TextView, cuts: Sequence[Span]) -> float:
    """Return the share (0..1) of a text's words that the cuts remove. Words are counted by `num_words`.

    The share is 1 if the text has no words, or if the cuts remove the whole text.
    """
    text = whole.text
    before = num_words(whole)
    left = len(text) - sum(end - start for start, end in cuts)
    if not before or not left:
        return 1.0
    if all(_at_word_boundary(text, start) and _at_word_boundary(text, end) for start, end in cuts):
        # No word is cut in two, so the removed words are the words of the cut spans.
        return num_words(TextView("\n".join([text[start:end] for start, end in cuts]), whole.vocabulary)) / before
    return (before - num_words(TextView(without(text, cuts), whole.vocabulary))) / before


def _at_word_boundary(text: str, offset: int) -> bool:
    """Return True if no word, as `num_words` counts words, can extend over this offset."""
    return offset in (0, len(text)) or text[offset - 1] in ASCII_SPACE or text[offset] in ASCII_SPACE
