"""Errors of stages: counts, examples that no order of parts changes, texts, and the limit that ends a step."""

import itertools

import pytest

from pipeline.engine.failures import CALLS, FAILURE, Failure, FailureCounts
from schemas.errors import ConfigError


def row(document: int, place: int | None = None, message: str = "") -> dict:
    """A row on which the stage `long` was called, and which it failed on in a line of code."""
    failure = {} if place is None else {FAILURE: Failure("long", "ValueError", f"my.py:{place}", message)}
    return {"doc_id": bytes([document]), CALLS: ["long"], **failure}


def counted(*rows: dict) -> FailureCounts:
    counts = FailureCounts()
    for each in rows:
        counts.see(each)
    return counts


def test_the_example_is_the_smallest_id_in_any_order() -> None:
    rows = [row(3, 3, "c"), row(1, 3, "a"), row(2, 3, "b"), row(4)]
    for order in itertools.permutations(rows):
        total = counted(*order[:2])
        total.add(counted(*order[2:]))
        assert total.errors == {"long: ValueError at my.py:3": {"count": 3, "document": "01", "message": "a"}}
        assert total.calls == {"long": 4}
    assert total.warnings() == [
        "stage long failed on 3 of 4 document(s): ValueError: a (my.py:3), 3 document(s), such as 01"
    ]


def test_at_most_five_kinds_are_kept() -> None:
    counts = counted(*(row(number, number) for number in range(1, 9)), row(9, 2))
    assert counts.errors["long: other errors"] == {"count": 3, "document": "06", "message": ""}
    counts.add(counted(*(row(number, 8) for number in range(20, 24))))
    kept = counts.most_frequent()
    assert {kind: entry["count"] for kind, entry in kept.items()} == {
        "long: ValueError at my.py:8": 4,
        "long: ValueError at my.py:2": 2,
        "long: ValueError at my.py:1": 1,
        "long: ValueError at my.py:3": 1,
        "long: ValueError at my.py:4": 1,
        "long: other errors": 4,
    }
    assert sum(entry["count"] for entry in kept.values()) == counts.failed("long") == 13


@pytest.mark.parametrize(
    ("failed", "calls", "limit", "ends"),
    [(1, 100, 0.01, False), (2, 100, 0.01, True), (99, 99, 0.01, False), (100, 100, 1.0, False), (1, 100, 0.0, True)],
)
def test_a_step_ends_above_the_limit_of_at_least_100_documents(failed, calls, limit, ends) -> None:
    counts = counted(*(row(number, 3 if number < failed else None, "boom") for number in range(calls)))
    if not ends:
        counts.check({"long": limit}, is_complete=True)
        return
    with pytest.raises(ConfigError) as error:
        counts.check({"long": limit}, is_complete=True)
    assert str(error.value) == (
        f"[[stage]] long: expected the function to fail on at most {100 * limit:g} % of the documents, got errors on "
        f"{failed} of {calls}: ValueError: boom (my.py:3), {failed} document(s), such as 00. Correct the function, or "
        "raise `max_failed_share` of the stage."
    )


def test_a_part_ends_at_once_if_every_document_fails() -> None:
    counts = FailureCounts()
    for number in range(99):
        counts.see(row(number, 3))
        counts.check({"long": 0.5}, is_complete=False)
    counts.see(row(99, 3))
    counts.check({"long": 1.0}, is_complete=False)
    with pytest.raises(ConfigError, match="got errors on 100 of 100"):
        counts.check({"long": 0.5}, is_complete=False)
    others = counted(*(row(number, 3 if number else None) for number in range(100)))
    others.check({"long": 0.5}, is_complete=False)
