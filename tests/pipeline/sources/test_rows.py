"""The parents of a row: ids and URLs, one or many, and what is refused."""

from typing import Any

import pytest

from pipeline.engine.stage import Drop
from pipeline.sources.rows import MAX_PARENTS, set_parents

ID = "0123456789abcdef" * 2
URL = "http://example.com/a"


def parents_of(value: Any) -> Any:
    """The parents that a value sets, or the Drop for which it is refused."""
    row: dict[str, Any] = {}
    return set_parents(row, value) or row.get("parents")


@pytest.mark.parametrize(
    ("value", "parents"),
    [
        (None, None),
        ("", None),
        ([], None),
        (ID, [ID]),
        (ID.upper(), [ID]),
        (f" {URL}\n", [URL]),
        ([ID, URL, ID], [ID, URL]),
        ((URL,), [URL]),
        (f"{URL}\0", [f"{URL}\ufffd"]),
    ],
)
def test_ids_and_urls_are_kept_in_their_order(value: Any, parents: list[str] | None) -> None:
    assert parents_of(value) == parents


@pytest.mark.parametrize(
    "value",
    ["zz", ID[1:], f"{ID}0", 7, True, 1.5, {"id": ID}, [ID, None], [[ID]], [ID, ""], "http://", "://x", "a" * 10**6],
)
def test_other_values_are_refused(value: Any) -> None:
    assert parents_of(value) == Drop("bad_parents")


def test_the_number_of_parents_is_bounded() -> None:
    ids = [f"{number:032x}" for number in range(MAX_PARENTS + 1)]
    assert parents_of(ids[1:]) == ids[1:]
    assert parents_of(ids) == Drop("too_many_parents", MAX_PARENTS + 1.0, float(MAX_PARENTS))
    assert parents_of([ID] * 10**6) == Drop("too_many_parents", 1e6, float(MAX_PARENTS))
