"""Spans [start, end) of a text: sorted, disjoint, none empty; what is cut, what stays, and how one becomes the other.

A text is never rewritten: its cuts are stored beside it, and text minus cuts is what the next stage reads.
"""

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def append_span(spans: list[Span], start: int, end: int) -> None:
    """Append a span that begins no earlier than the last ends, joined to it if they touch; an empty one is left out."""
    if start >= end:
        return
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((start, end))


def complement(spans: Iterable[Span], size: int) -> list[Span]:
    """What lies between sorted spans in a text of this size: sorted, disjoint, none empty."""
    edges = [0, *(edge for span in spans for edge in span), size]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2]) if start < end]


def map_visible_spans(visible: Sequence[Span], wanted: Iterable[Span]) -> list[Span]:
    """The spans of a text that hold the wanted spans of what is visible of it; both sorted and disjoint."""
    selected: list[Span] = []
    at = passed = 0  # the visible span under look, and the visible code points before it
    for start, end in wanted:
        while start < end:
            low, high = visible[at]
            if start >= passed + high - low:
                at, passed = at + 1, passed + high - low
                continue
            stop = min(end, passed + high - low)
            append_span(selected, low + start - passed, low + stop - passed)
            start = stop
    return selected


def union(cuts: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """What either of two lists of cuts asks for: sorted, disjoint, not adjacent."""
    joined: list[Span] = []
    for start, end in sorted([*cuts, *others]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(text: str, cuts: Sequence[Span]) -> str:
    """The text minus its cuts."""
    if not cuts:
        return text
    edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
    return "".join([text[start:end] for start, end in zip(edges[::2], edges[1::2])])


def trim(text: str, spans: list[Span]) -> list[Span]:
    """The spans without the whitespace that their text would begin and end with; changed in place."""
    while spans:
        start, stop = spans[0]
        size = len(text[start:stop].lstrip())
        if size:
            spans[0] = (stop - size, stop)
            break
        del spans[0]
    while spans:
        start, stop = spans[-1]
        size = len(text[start:stop].rstrip())
        if size:
            spans[-1] = (start, start + size)
            break
        del spans[-1]
    return spans
