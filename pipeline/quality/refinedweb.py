"""RefinedWeb's line rules as DCLM implements them, as spans to cut, and the share of words that they cost.

Cut are lines in capitals, of digits alone, counters such as `3 likes`, and of a single word; from lines of at most ten
words also three phrases of shops and blogs. What the phrases and the line breaks leave is not stripped line by line but
as a whole. Source: Penedo et al. 2023, arXiv 2306.01116, appendix G.2; Li et al. 2024, arXiv 2406.11794.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.quality.dclm_dolma import ASCII_SPACE, num_words
from pipeline.quality.redpajama import LineCounts
from pipeline.quality.text import TextView
from pipeline.text.spans import Span, complement, trim, union, without

MAX_DIGITS = 0.999999
PHRASE_WORDS = 10
PHRASES = (
    re.compile(r"\s?items in cart", re.IGNORECASE),
    re.compile(r"\s?read more...$", re.IGNORECASE),
    re.compile(r"^sign-in\s?", re.IGNORECASE),
)
"""Taken out one after the other. The dots stand for any character: so does DCLM's pattern."""
_PHRASES = ("items in cart", "read more", "sign-in")


@dataclass(frozen=True, slots=True)
class RefinedWebRules:
    """The settings of the line rules."""

    max_uppercase: float = 0.5
    """Share of upper case among the characters of a line."""
    min_words: int = 2
    """Words between whitespace that a line needs; empty lines stay."""


def apply_refinedweb(lines: LineCounts, rules: RefinedWebRules, english: bool) -> tuple[list[Span], int]:
    """What to cut from a text, and how many lines go whole; in other languages by capitals and digits alone."""
    text, edges = lines.whole.text, lines.edges
    lengths = lines.lengths()
    keep = lines.upper <= rules.max_uppercase * lengths
    keep &= ~_numbers(lines, keep)
    if english:
        keep &= ~lines.counters() & ((lines.counts >= rules.min_words) | (lengths == 0))
    cuts = [(int(edges[number]), int(edges[number + 1])) for number in np.flatnonzero(~keep).tolist()]
    num_cut = len(cuts)
    if english and any(phrase in lines.whole.lowered for phrase in _PHRASES):
        for number in np.flatnonzero(keep & (lines.counts <= PHRASE_WORDS)).tolist():
            line = lines.texts[number]
            if not any(phrase in line.lower() for phrase in _PHRASES):
                continue
            start, stop = int(edges[number]), int(edges[number] + lengths[number])
            found, left = _phrases_in(text[start:stop])
            num_cut += not left.strip()
            cuts += [(start + a, start + b) for a, b in found] if left.strip() else [(start, int(edges[number + 1]))]
    rest = complement(union(cuts, []), len(text))
    return complement(trim(text, rest), len(text)), num_cut


def _numbers(lines: LineCounts, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The lines of digits alone; the text's own first and last lines are looked at without outer whitespace."""
    lengths = lines.lengths()
    numbers = (lines.digits > 0) & (lines.digits > MAX_DIGITS * lengths)
    filled = np.flatnonzero(kept & (lines.counts > 0))
    for number in {int(filled[0]), int(filled[-1])} if len(filled) else ():
        line = lines.texts[number].strip()
        numbers[number] = lines.digits[number] > MAX_DIGITS * len(line)
    return numbers


def _phrases_in(line: str) -> tuple[list[Span], str]:
    """Where a line holds the phrases, and the line without them."""
    size = len(line)
    places = list(range(size))
    for pattern in PHRASES:
        for match in reversed(list(pattern.finditer(line))):
            line = line[: match.start()] + line[match.end() :]
            del places[match.start() : match.end()]
    return [(place, place + 1) for place in sorted(set(range(size)).difference(places))], line


def share_of_words(whole: TextView, cuts: Sequence[Span]) -> float:
    """Words that the cuts take away over words, as DCLM counts them; 1 if nothing is left."""
    text = whole.text
    before = num_words(whole)
    left = len(text) - sum(end - start for start, end in cuts)
    if not before or not left:
        return 1.0
    apart = all(_parted(text, start) and _parted(text, end) for start, end in cuts)
    if apart:  # no word is cut in two, so those that go are those of what is cut
        return num_words(TextView("\n".join([text[start:end] for start, end in cuts]), whole.vocabulary)) / before
    return (before - num_words(TextView(without(text, cuts), whole.vocabulary))) / before


def _parted(text: str, place: int) -> bool:
    """Whether no word of DCLM's can lie on both sides of this place."""
    return place in (0, len(text)) or text[place - 1] in ASCII_SPACE or text[place] in ASCII_SPACE
