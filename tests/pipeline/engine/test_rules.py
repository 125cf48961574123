"""Judging: both sides of a limit, limits by language, nulls, computed values, and which check comes first."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.engine.rules import KEPT, RowChecks, columns_of, evaluate_checks, evaluate_row
from pipeline.engine.stage import EVERY, Check
from schemas.entries import entries_of
from schemas.errors import ContractError

SHORT = Check("short", "words", "min_words", {EVERY: 50, "ja": 10})
HASHES = Check("hashes", "ratio", "max_ratio", {"en": 0.3})


def batch(**columns):
    kinds = {"words": pa.int32(), "ratio": pa.float32(), "language": pa.string(), "source": pa.string()}
    return pa.RecordBatch.from_arrays([pa.array(v, kinds[k]) for k, v in columns.items()], list(columns))


def firsts(checks, **columns):
    return evaluate_checks(checks, batch(**columns)).first.tolist()


def test_a_minimum_and_a_maximum_are_inclusive_to_keep():
    assert firsts([SHORT], words=[49, 50], language=["en", "en"]) == [0, KEPT]
    assert firsts([HASHES], ratio=[0.3, 0.30000004], language=["en", "en"]) == [KEPT, 0]


def test_both_sides_are_compared_as_float32():
    # 3/10 as a stored share is 0.30000001192…, which is above the double 0.3 and not above its float32
    assert float(np.float32(0.3)) > 0.3
    assert evaluate_row([HASHES], {"ratio": 0.3, "language": "en"}) is None


def test_a_limit_holds_for_its_language_and_every_for_the_others():
    assert firsts([SHORT], words=[20, 20, 20], language=["ja", "en", None]) == [KEPT, 0, 0]
    assert firsts([HASHES], ratio=[0.9, 0.9], language=["en", "de"]) == [0, KEPT]


def test_what_was_not_measured_breaks_nothing():
    assert firsts([SHORT, HASHES], words=[None], ratio=[None], language=["en"]) == [KEPT]


def test_the_first_broken_check_names_the_verdict():
    row = {"words": 3, "ratio": 0.5, "language": "en"}
    assert evaluate_row([SHORT, HASHES], row) == ("short", 3, 50)
    assert evaluate_row([HASHES, SHORT], row) == ("hashes", 0.5, pytest.approx(0.3))
    judgement = evaluate_checks([SHORT, HASHES], batch(words=[3], ratio=[0.5], language=["en"]))
    assert judgement.broken.tolist() == [[True], [True]]


def test_a_computed_value_is_compared_and_shown():
    def doubled(rows):
        return rows.column("words").to_numpy() * 2.0

    check = Check("twice", "words", "max_twice", {EVERY: 10}, doubled, ("words",))
    assert columns_of([check, HASHES]) == ["language", "words", "ratio"]
    assert evaluate_row([check], {"words": 6, "language": "en"}) == ("twice", 12, 10)
    assert evaluate_row([check], {"words": 5, "language": "en"}) is None


KINDS = {"words": pa.int32(), "ratio": pa.float32(), "language": pa.string(), "repairs": entries_of(pa.int32())}


def test_checks_of_one_document_have_the_results_of_a_batch():
    def is_long(rows):
        return np.array([words is not None and words % 7 == 0 for words in rows.column("words").to_pylist()])

    def doubled(rows):
        return rows.column("words").cast(pa.float64()).to_numpy(zero_copy_only=False) * 2

    decided = Check("sevens", "", "sevens", {}, needs=("words",), drops=is_long)
    computed = Check("twice", "twice", "max_twice", {EVERY: 120}, doubled, ("words",))
    random = np.random.default_rng(3)
    edges = [0.3, float(np.float32(0.3)), float(np.nextafter(np.float32(0.3), 1)), None, 0.0, True]
    rows = [
        {
            "words": None if number % 11 == 0 else int(random.integers(0, 70)),
            "ratio": edges[number % len(edges)],
            "language": ("en", "ja", "xx", None, "")[number % 5],
        }
        for number in range(400)
    ]
    for checks in ([SHORT, HASHES], [HASHES, decided, SHORT], [computed, HASHES, decided], []):
        one = RowChecks(checks, KINDS)
        columns = {name: [row[name] for row in rows] for name in ("words", "ratio", "language")}
        assert [one.first_broken(row) for row in rows] == firsts(checks, **columns)


def test_checks_of_one_document_read_entries_as_they_are_stored():
    def has_repairs(rows):
        return np.array([bool(value) for value in rows.column("repairs").to_pylist()])

    checks = RowChecks([Check("repaired", "", "", {}, needs=("repairs",), drops=has_repairs)], KINDS)
    assert checks.first_broken({"repairs": {"entity": 2}, "language": "en"}) == 0
    assert checks.first_broken({"repairs": {}, "language": "en"}) == KEPT


def test_no_checks_keep_everything():
    assert firsts([], words=[1, 2], language=["en", "en"]) == [KEPT, KEPT]


def test_a_setting_that_tells_no_side_is_refused():
    with pytest.raises(ContractError, match="expected a setting whose name starts with min_ or max_, got 'words'"):
        evaluate_checks([Check("short", "words", "words", {EVERY: 50})], batch(words=[1], language=["en"]))


def test_a_check_of_some_sources_applies_to_their_documents_alone():
    own = replace(SHORT, limits={EVERY: 5}, sources=frozenset(("books",)))
    shared = replace(SHORT, sources=frozenset(("web", "news")))
    rows = {"words": [4, 6, 6, 60], "language": ["en"] * 4, "source": ["books", "books", "web", "news"]}
    assert "source" in columns_of([own, shared])
    assert "source" not in columns_of([SHORT])
    assert firsts([own, shared], **rows) == [0, KEPT, 1, KEPT]
    result = evaluate_checks([own, shared], batch(**rows))
    assert np.isnan(result.limits).tolist() == [[False, False, True, True], [True, True, False, False]]
    rule = replace(HASHES, drops=lambda batch: np.ones(batch.num_rows, bool), sources=frozenset(("news",)))
    ratios = {"ratio": [0.1] * 2, "language": ["en"] * 2, "source": ["web", "news"]}
    assert firsts([rule], **ratios) == [KEPT, 0]
    assert firsts([replace(rule, sources=frozenset(("none",)))], **ratios) == [KEPT, KEPT]
