"""Cuts from repeated passages: one run of the whitespace in and around a passage is kept, so that words stay separate.

The text itself is never rewritten; every cut names the kind of unit that caused it. Whitespace alone is never cut.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.text.spans import Span, append_span, map_visible_spans, union

Cut = tuple[int, int, str]
_SPACE = re.compile(r"\s+")


def cuts_of(text: str, passages: Sequence[tuple[str, Sequence[Span]]]) -> list[Cut]:
    """Return the cuts that remove passages from a text; passages are given by kind, in descending precedence.

    Of all whitespace in and around a passage, the run with the most line breaks is kept, the first of equal runs. At
    the start and the end of the text none is kept.
    """
    spans = [span for _, kind_spans in passages for span in kind_spans]
    if not spans:
        return []
    owner = np.zeros(len(text), np.uint8)
    for number, (_, kind_spans) in reversed(list(enumerate(passages, 1))):
        for start, end in kind_spans:
            owner[start:end] = number
    cuts: list[Cut] = []
    for start, end in regions(text, spans):
        spaces = [match.span() for match in _SPACE.finditer(text, start, end)]
        for low, high in spaces:
            owner[low:high] = 0
        for low, high in _around_separator(text, (start, end), spaces) if owner[start:end].any() else ():
            cuts += [(low + a, low + b, passages[number - 1][0]) for a, b, number in _by_owner(owner[low:high])]
    return cuts


def regions(text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the spans extended by the whitespace around them, and joined if they touch."""
    wide: list[Span] = []
    for start, end in union(spans, []):
        reached = wide[-1][1] if wide else 0
        while start > reached and text[start - 1].isspace():
            start -= 1
        end = max(end, reached)
        while end < len(text) and text[end].isspace():
            end += 1
        append_span(wide, max(start, reached), end)
    return wide


def _around_separator(text: str, region: Span, spaces: Sequence[Span]) -> list[Span]:
    """Return the spans of a region that are cut: all of it except the whitespace run that is kept."""
    start, end = region
    if start == 0 or end == len(text) or not spaces:
        return [region]
    low, high = max(spaces, key=lambda span: text.count("\n", *span))
    return [span for span in ((start, low), (high, end)) if span[0] < span[1]]


def _by_owner(owner: npt.NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Return runs (start, end, kind) of equal kind; whitespace takes the kind of the text before it, else after it."""
    owned = np.flatnonzero(owner)
    last = np.maximum(np.searchsorted(owned, np.arange(len(owner)), "right") - 1, 0)
    kinds = owner[owned[last]]
    edges = [0, *(np.flatnonzero(np.diff(kinds.astype(np.int16))) + 1).tolist(), len(kinds)]
    return [(start, end, int(kinds[start])) for start, end in pairwise(edges)]


def cuts_in_whole_text(cuts: Sequence[Cut], visible: Sequence[Span]) -> list[Cut]:
    """Return cuts of the visible text as spans of the whole text; `visible` are the visible spans of the whole text."""
    by_kind: dict[str, list[Span]] = {}
    for start, end, kind in cuts:
        by_kind.setdefault(kind, []).append((start, end))
    return sorted((*span, kind) for kind, spans in by_kind.items() for span in map_visible_spans(visible, spans))
