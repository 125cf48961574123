"""From repeated passages to cuts: of the whitespace in and around them one run stays, so that no words run together.

The text itself is never rewritten; every cut says which kind of unit asked for it. Whitespace alone is never cut.
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
    """The cuts that take passages out of a text, given by kind, the kind that names a shared place first.

    Of all whitespace in a cut passage and around it the run with the most line breaks stays, the first of them; at the
    ends of the text none does.
    """
    spans = [span for _, found in passages for span in found]
    if not spans:
        return []
    owner = np.zeros(len(text), np.uint8)
    for number, (_, found) in reversed(list(enumerate(passages, 1))):
        for start, end in found:
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
    """The spans with the whitespace around them, joined where they then touch."""
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
    """What goes of a region: all but the one of its spaces that is to stay."""
    start, end = region
    if start == 0 or end == len(text) or not spaces:
        return [region]
    low, high = max(spaces, key=lambda span: text.count("\n", *span))
    return [span for span in ((start, low), (high, end)) if span[0] < span[1]]


def _by_owner(owner: npt.NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Runs (start, end, kind) of one kind; whitespace, which has none, goes with what is before it, else behind."""
    told = np.flatnonzero(owner)
    last = np.maximum(np.searchsorted(told, np.arange(len(owner)), "right") - 1, 0)
    kinds = owner[told[last]]
    edges = [0, *(np.flatnonzero(np.diff(kinds.astype(np.int16))) + 1).tolist(), len(kinds)]
    return [(start, end, int(kinds[start])) for start, end in pairwise(edges)]


def cuts_in_whole_text(cuts: Sequence[Cut], visible: Sequence[Span]) -> list[Cut]:
    """The cuts as places of the text of which the visible spans are all that they were made in."""
    by_kind: dict[str, list[Span]] = {}
    for start, end, kind in cuts:
        by_kind.setdefault(kind, []).append((start, end))
    return sorted((*span, kind) for kind, wanted in by_kind.items() for span in map_visible_spans(visible, wanted))
