"""Sums on disk: equal to sums in memory at any limit, ranked with ties, and without files left."""

import random
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from schemas.spilled_sums import SCHEMA, SpilledSums


def random_rows(number: int, seed: int) -> list[tuple[str, str, int]]:
    """Rows with values that repeat, an empty value, ties and characters of several bytes."""
    chance = random.Random(seed)
    values = ["", "ä.example", *(f"d{n}.example" for n in range(number // 3))]
    return [(chance.choice(["web", "books"]), chance.choice(values), chance.randint(1, 5)) for _ in range(number)]


def sums_of_rows(rows: list[tuple[str, str, int]], max_rows: int, batch: int = 50) -> SpilledSums:
    sums = SpilledSums(max_rows)
    for begin in range(0, len(rows), batch):
        names = ("source", "value", "tokens")
        part = [dict(zip(names, row, strict=True)) for row in rows[begin : begin + batch]]
        sums.add(pa.Table.from_pylist(part, SCHEMA))
    return sums


@pytest.mark.parametrize("max_rows", [1, 10, 64, 10**6])
@pytest.mark.parametrize("seed", range(3))
def test_sums_are_those_of_a_counter_at_any_limit(max_rows: int, seed: int) -> None:
    rows = random_rows(600 if max_rows >= 64 else 150, seed)  # a file for every row or ten
    sums = sums_of_rows(rows, max_rows)
    counter: Counter[tuple[str, str]] = Counter()
    for source, value, tokens in rows:
        counter[source, value] += tokens
    ranked = sorted(((*key, number) for key, number in counter.items()), key=lambda row: (-row[2], row[0], row[1]))
    assert [*sums.ranked()] == ranked
    for sources in (None, ["web"], ["books", "web"], ["none"]):
        by_value: Counter[str] = Counter()
        for (source, value), number in counter.items():
            if sources is None or source in sources:
                by_value[value] += number
        without = by_value.pop("", 0)
        totals = sums.totals(sources)
        assert (totals.num_values, totals.tokens, totals.without) == (
            len(by_value),
            sum(by_value.values()),
            without,
        )
        best = sorted(by_value.items(), key=lambda item: (-item[1], item[0]))
        for number in (0, 1, 20, 10**6):
            assert sums.largest(number, sources) == best[:number]


def test_rows_may_be_added_after_sums_were_read() -> None:
    rows = random_rows(300, 7)
    sums = sums_of_rows(rows[:200], 20)
    first = sums.totals()
    assert sums.totals() == first
    sums.add(pa.Table.from_pylist([{"source": "web", "value": "late.example", "tokens": 10**9}], SCHEMA))
    assert sums.largest(1) == [("late.example", 10**9)]
    assert sums.totals().num_values == first.num_values + 1


def test_nothing_was_added() -> None:
    sums = SpilledSums()
    assert [*sums.ranked()] == []
    assert sums.largest(3) == []
    assert sums.totals().num_values == 0


def test_a_null_is_an_unknown_value() -> None:
    sums = SpilledSums()
    sums.add(pa.table({"source": ["web", "web"], "value": [None, ""], "tokens": [2, 3]}, SCHEMA))
    assert sums.totals().without == 5


def test_files_are_deleted_with_the_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sums = sums_of_rows(random_rows(200, 1), 10)
    assert [*tmp_path.iterdir()]
    assert len([*sums.ranked()]) > 20
    del sums
    assert [*tmp_path.iterdir()] == []
