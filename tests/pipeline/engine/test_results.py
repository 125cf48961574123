"""What the driver gets of a task: a small answer, and the sums of its counts."""

import json

import pytest

from pipeline.engine.failures import FailureCounts
from pipeline.engine.parquet import WrittenFile
from pipeline.engine.part import PartResult
from pipeline.engine.results import RESULTS, SUMMED, answer_of_part, gather, result_rows, results_of_one
from pipeline.engine.step import PartSources
from schemas.manifest import Counts
from tests.support.step_run import added_up, gathered


def test_counts_are_added_name_by_name_and_empty_ones_stay():
    parts = [
        {"by": {"en": {"5": 1}, "de": {}}, "of": {}, "n": 1},
        {"by": {"en": {"5": 2, "6": 1}, "fr": {"?": 4}}, "of": {}, "n": 2},
        {},
    ]
    expected = {"by": {"en": {"5": 3, "6": 1}, "de": {}, "fr": {"?": 4}}, "of": {}, "n": 3}
    assert added_up(parts) == added_up(parts[::-1]) == expected
    assert added_up([{}]) == {}
    hostile = {'a"]': {"": 1, '["x", 2]': 2}, "é\n\x1b": 3}
    assert added_up([hostile, hostile]) == {'a"]': {"": 2, '["x", 2]': 4}, "é\n\x1b": 6}


@pytest.mark.parametrize("value", [0.5, "x", None, [1]])
def test_what_cannot_be_added_in_any_order_is_refused(value):
    with pytest.raises(TypeError):
        result_rows(0, {SUMMED: {"share": value}})


def test_answers_have_the_order_of_their_tasks_and_no_counts():
    rows = [row for at in (2, 0, 1) for row in result_rows(at, {"at": at, SUMMED: {"n": 1}}).to_pylist()]
    results = gather(rows)
    assert results.answers == [{"at": 0}, {"at": 1}, {"at": 2}]
    assert results.summed == {"n": 3}


def failed(document: str, message: str, count: int = 1) -> FailureCounts:
    return FailureCounts({"mine: ValueError at x.py:1": {"count": count, "document": document, "message": message}})


def part(number: int, failures: FailureCounts, cpu: float = 0.25) -> PartResult:
    return PartResult(
        {"t": WrittenFile(f"part-{number}", "", 10, 3, "0" * 64)},
        Counts(rows_in=3, rows_kept=2, dropped={"a/b": 1, "a/c": 0}),
        {"kept_chars": 7, "by": {"en": 1}},
        failures,
        cpu,
        {"quality": {"seconds": 0.125, "rows": 3}},
        [{"name": f"file-{number}", "bytes": 5, "sha256": "1" * 64}],
        ends={"worker": number},
    )


def test_the_results_of_parts_are_those_of_a_sum_in_one_process():
    failures = [failed("ff", "last"), failed("", "of no document", 2), failed("0a", "first")]
    results = gathered([part(number, each) for number, each in enumerate(failures)], PartSources((0, 2), ("w", "b")))
    total = FailureCounts()
    for each in failures:
        total.add(each)
    assert results.failures == total
    assert results.failures.errors["mine: ValueError at x.py:1"] == {"count": 4, "document": "0a", "message": "first"}
    assert results.counts == Counts(rows_in=9, rows_kept=6, dropped={"a/b": 3, "a/c": 0})
    assert results.figures == {"kept_chars": 21, "by": {"en": 3}}
    assert (results.cpu_seconds, results.cpu) == (0.75, {"quality": {"seconds": 0.375, "rows": 9}})
    assert results.ends == {"worker": 3}
    assert [(each.files["t"].key, each.sources[0]["name"]) for each in results.parts] == [
        (f"part-{number}", f"file-{number}") for number in range(3)
    ]
    assert {name: counts["rows_in"] for name, counts in results.by_source.items()} == {"w": 6, "b": 3}


def test_an_error_on_no_document_has_no_example():
    results = gathered([part(0, failed("", "b")), part(1, failed("", "a"))])
    assert results.failures.errors["mine: ValueError at x.py:1"] == {"count": 2, "document": "", "message": "a"}


def test_the_figures_of_a_single_part_may_be_of_any_kind():
    own = PartResult({}, Counts(rows_in=0, rows_kept=0), {"recall": {"share": 0.5, "interval": [0, 1]}})
    assert results_of_one(own).figures == {"recall": {"share": 0.5, "interval": [0, 1]}}


def test_an_answer_is_small_whatever_the_languages():
    languages = {f"l{number}": {str(edge): 1 for edge in range(100)} for number in range(176)}
    result = part(0, failed("0a", "x"))
    large = answer_of_part(PartResult(result.files, result.counts, {"by": languages}), "web")
    rows = result_rows(0, large)
    assert rows.schema == RESULTS
    assert rows.num_rows > 17_600
    answer = rows.column("answer").to_pylist()[0]
    assert json.loads(answer)["rows"] == 3
    assert len(answer) < 500
