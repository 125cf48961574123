"""Spans: what is cut and what stays, by hand and as laws over any text."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.text.spans import append_span, complement, difference, map_visible_spans, trim, union, without

EDGES = st.lists(st.integers(0, 40), max_size=12, unique=True).map(sorted)


def spans_of(edges: list[int]) -> list[tuple[int, int]]:
    return list(zip(edges[::2], edges[1::2]))


def test_between():
    assert complement([], 5) == [(0, 5)]
    assert complement([], 0) == []
    assert complement([(0, 2), (4, 5)], 5) == [(2, 4)]
    assert complement([(1, 2), (2, 3)], 5) == [(0, 1), (3, 5)]


def test_select():
    assert map_visible_spans([(2, 5), (7, 9)], [(0, 1), (2, 5)]) == [(2, 3), (4, 5), (7, 9)]
    assert map_visible_spans([(2, 5), (5, 9)], [(1, 6)]) == [(3, 8)]
    assert map_visible_spans([], []) == []


def test_append_joins_what_touches_and_leaves_out_what_is_empty():
    spans: list[tuple[int, int]] = []
    for start, end in [(0, 0), (1, 2), (2, 4), (4, 4), (6, 7)]:
        append_span(spans, start, end)
    assert spans == [(1, 4), (6, 7)]


def test_union():
    assert union([(0, 2), (5, 7)], [(2, 3), (6, 9)]) == [(0, 3), (5, 9)]
    assert union([(3, 4)], [(0, 9)]) == [(0, 9)]


def test_difference():
    assert difference([(0, 9)], [(2, 3), (5, 7)]) == [(0, 2), (3, 5), (7, 9)]
    assert difference([(0, 3), (5, 8)], [(2, 6)]) == [(0, 2), (6, 8)]
    assert difference([(3, 5)], [(0, 9)]) == []
    assert difference([(3, 5)], []) == [(3, 5)]
    assert difference([(3, 5)], [(0, 3), (5, 6)]) == [(3, 5)]


@given(EDGES, EDGES)
def test_difference_is_the_cover_of_one_list_alone(edges: list[int], others: list[int]):
    spans, removed = spans_of(edges), spans_of(others)

    def points(chosen: list[tuple[int, int]]) -> set[int]:
        return {point for start, end in chosen for point in range(start, end)}

    assert points(difference(spans, removed)) == points(spans) - points(removed)


def test_trim():
    assert trim("  a b \n", [(0, 3), (4, 7)]) == [(2, 3), (4, 5)]
    assert trim(" a ", [(0, 1), (2, 3)]) == []


@given(EDGES, EDGES)
def test_cuts_of_the_rest_are_cuts_of_the_text(first: list[int], second: list[int]) -> None:
    text = "".join(chr(65 + place) for place in range(40))
    cuts = spans_of(first)
    body = without(text, cuts)
    later = spans_of([edge for edge in second if edge <= len(body)])
    visible = complement(cuts, len(text))
    assert "".join(text[start:end] for start, end in visible) == body
    both = union(cuts, map_visible_spans(visible, later))
    assert without(text, both) == without(body, later)
    assert complement(complement(both, len(text)), len(text)) == both
