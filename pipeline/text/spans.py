"""Operations on lists of spans [start, end) of a text, such as cuts; the spans are sorted, disjoint and not empty.

The stored text is never rewritten: cuts are stored with it, and later stages read the text without them.
"""

from collections.abc import Collection, Iterable, Sequence

Span = tuple[int, int]


def append_span(spans: list[Span], start: int, end: int) -> None:
    """Append a span that starts at or after the end of the last one; adjacent spans are merged, empty ones ignored."""
    if start >= end:
        return
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((start, end))


def complement(spans: Iterable[Span], size: int) -> list[Span]:
    """Return the spans of a text of this size that are not covered by the given, sorted spans."""
    edges = [0, *(edge for span in spans for edge in span), size]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2]) if start < end]


def map_visible_spans(visible: Sequence[Span], chosen: Iterable[Span]) -> list[Span]:
    """Convert the spans `chosen` of a shortened text to spans of the whole text.

    The shortened text consists of the spans `visible` of the whole text. Both lists are sorted and disjoint.
    """
    selected: list[Span] = []
    at = passed = 0  # Index of the current visible span, and number of visible code points before it.
    for start, end in chosen:
        while start < end:
            low, high = visible[at]
            if start >= passed + high - low:
                at, passed = at + 1, passed + high - low
                continue
            stop = min(end, passed + high - low)
            append_span(selected, low + start - passed, low + stop - passed)
            start = stop
    return selected


def lines_without(lines: Sequence[str], cut: Collection[int]) -> list[Span]:
    """Return the spans of a text that remain without the lines of these indices, and without outer blank lines.

    `lines` are the text's lines with their line ends. Blank lines stay. Where lines are cut, the first blank line stays
    of those between the kept lines on both sides, so that a run of cut lines leaves at most one paragraph break.
    """
    spans: list[Span] = []
    blank: list[Span] = []
    is_cut = False
    start = end = 0
    for number, line in enumerate(lines):
        start, end = end, end + len(line)
        if number in cut:
            is_cut = True
        elif not line or line.isspace():
            blank.append((start, end))
        else:
            for span in () if not spans else blank[:1] if is_cut else blank:
                append_span(spans, *span)
            append_span(spans, start, end)
            blank, is_cut = [], False
    return spans


def union(cuts: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the union of two lists of cuts as sorted spans that neither overlap nor touch."""
    joined: list[Span] = []
    for start, end in sorted([*cuts, *others]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def difference(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return the parts of sorted, disjoint spans that sorted, disjoint others do not cover."""
    left: list[Span] = []
    rest = list(others)
    for start, end in spans:
        for low, high in rest:
            if low < end and start < high:
                append_span(left, start, min(low, end))
                start = max(start, high)
        append_span(left, start, end)
    return left


def without(text: str, cuts: Sequence[Span]) -> str:
    """Return the text without the spans in `cuts`."""
    if not cuts:
        return text
    edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
    return "".join([text[start:end] for start, end in zip(edges[::2], edges[1::2])])


def trim(text: str, spans: list[Span]) -> list[Span]:
    """Shorten the spans in place, so that their joined text has no whitespace at its ends. Return the spans."""
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
