"""The fused pass: first verdict wins, measuring continues or ends as declared, a stage that raises drops the row."""

from dataclasses import replace

import pytest

from pipeline.engine import guard as guards
from pipeline.engine.failures import FAILURE
from pipeline.engine.part import DropCounter, reason_names, set_verdict
from pipeline.engine.stage import CPU, Drop, PerDocument
from pipeline.engine.step import add_figures
from pipeline.engine.worker import FusedStages, run_rows
from schemas.config import Section, build_recipe
from schemas.errors import ContractError
from schemas.storage import Store


class Empty(Section):
    pass


def stage(name, function, ends=True, reasons=("low",)):
    return PerDocument(
        name=name,
        version=1,
        config=Empty,
        reads=(),
        adds=(),
        reasons=dict.fromkeys(reasons, "because"),
        make=lambda config, models: function,
        ends=ends,
    )


def run(row, *stages):
    fused = FusedStages(stages, build_recipe({}, {s.name: Empty for s in stages}, "r"), {})
    return fused(row), fused


def mark(name, drop=None):
    def function(row):
        row[name] = True
        return drop

    return function


def test_a_drop_ends_the_pass_when_the_stage_says_so():
    row, _ = run({}, stage("a", mark("a", Drop("low", 1.0, 2.0))), stage("b", mark("b")))
    assert {*row.pop(CPU)} == {"a"}
    assert row == {"a": True, "drop_stage": "a", "drop_rule": "low", "drop_value": 1.0, "drop_limit": 2.0}


def test_measuring_continues_and_the_first_verdict_stays():
    stages = stage("a", mark("a", Drop("low")), ends=False), stage("b", mark("b", Drop("low", 7.0)), ends=False)
    row, _ = run({}, *stages)
    assert (row["a"], row["b"], row["drop_stage"], row["drop_value"]) == (True, True, "a", None)


def test_a_raising_stage_drops_the_row_and_is_counted_without_its_text():
    def bad(row):
        raise ValueError("secret text")

    row, _ = run({}, stage("a", bad), stage("b", mark("b")))
    assert (row["drop_stage"], row["drop_rule"]) == ("a", "failed")
    assert "b" not in row
    failure = row[FAILURE]
    assert failure.kind.startswith("a: ValueError at test_worker.py:")
    assert (failure.error, failure.message) == ("ValueError", "")


def test_errors_are_counted_in_a_child_process_too(tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "WAIT_SECONDS", 0.0)

    def bad(row):
        raise ValueError("secret text")

    stages = (stage("a", bad),)
    fused = FusedStages(stages, build_recipe({}, {"a": Empty}, "r"), {})
    counts = []
    for retried in (False, True):
        books = DropCounter([("a", stages[0].reasons)])
        guard = guards.RecordGuard(fused, (Store(str(tmp_path)), "part-00000"), retried)
        for row in run_rows((({"doc_id": bytes([n])}, None) for n in (2, 1)), guard, ("s", "a")):
            books.enter(row, 0)
        guard.close()
        counts.append(books.failures.errors)
    ((kind, entry),) = counts[0].items()
    assert kind.startswith("a: ValueError at test_worker.py:")
    assert entry == {"count": 2, "document": "01", "message": ""}
    assert counts[1] == counts[0]


def test_a_broken_promise_stops_the_run_and_is_no_drop():
    def broken(row):
        raise ContractError("expected a probability, got 3.5")

    with pytest.raises(ContractError, match=r"got 3\.5"):
        run({}, stage("a", broken))


def test_an_undeclared_reason_is_refused():
    with pytest.raises(ContractError, match="got 'other'"):
        run({}, stage("a", mark("a", Drop("other"))))


def test_books_count_every_row_and_report_zeros():
    books = DropCounter([("a", {"low": "", "high": ""})])
    for drop in (None, Drop("low"), Drop("low")):
        row = {}
        if drop:
            set_verdict(row, "a", drop)
        books.enter(row, 10)
    books.tally("languages", "de")
    assert books.counts.model_dump() == {
        "rows_in": 3,
        "rows_kept": 1,
        "dropped": {"a/low": 2, "a/high": 0, "a/failed": 0, "a/crashed": 0},
    }
    assert books.figures == {"kept_chars": 10, "dropped_chars": {"a/low": 20}, "languages": {"de": 1}}
    assert reason_names("a", {"low": ""}) == ["a/low", "a/failed", "a/crashed"]
    with pytest.raises(ContractError, match="'a/new'"):
        books.enter({"drop_stage": "a", "drop_rule": "new"}, 1)


def test_figures_add_key_by_key():
    assert add_figures({"x": {"a": 1}, "n": 2}, {"x": {"a": 2, "b": 5}, "n": 3}) == {"x": {"a": 3, "b": 5}, "n": 5}


@pytest.mark.parametrize(("text", "is_measured"), [("a text", True), (None, False)])
def test_a_stage_may_run_after_a_drop_if_there_is_a_text(text, is_measured):
    late = replace(stage("c", mark("c", Drop("low"))), after_drops=True)
    stages = stage("a", mark("a", Drop("low", 1.0, 2.0))), stage("b", mark("b")), late, stage("d", mark("d"))
    row, _ = run({"text": text}, *stages)
    assert ("b" in row, "c" in row, "d" in row) == (False, is_measured, False)
    assert (row["drop_stage"], row["drop_value"]) == ("a", 1.0)
