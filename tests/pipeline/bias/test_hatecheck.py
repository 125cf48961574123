"""Cases of a hate-speech test that are not hateful: how many the toxicity stage would drop, by whom they name."""

from pathlib import Path

import pytest

from bench.whom_filters_hit import HATEFUL, NOT_HATEFUL, Case, judge_cases, levels_of, lines_of, read_cases
from jobs.recipe import read_recipe

NEUTRAL = ("ident_neutral_nh", "ident_pos_nh")
"""Kinds of cases that state or praise who people are."""
BY_WORDS = "toxicity.max_toxic_share=1.0"
"""A limit beyond which no document is, so that word lists alone flag."""


def recipe(*overrides):
    return read_recipe("web", ['source.paths=["none"]', "toxicity.max_words=0", *overrides])


def test_cases_are_flagged_by_the_limits_of_the_recipe(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("muslims\n")
    lists = f'toxicity.wordlists={{en="{words}"}}'
    rows = [
        {"text": "Muslims are people.", "label": NOT_HATEFUL, "target": "Muslims", "lang": "en"},
        {"text": "Women are people.", "label": NOT_HATEFUL, "target": "women", "lang": "en"},
        {"text": "Muslims …", "label": HATEFUL, "target": "Muslims", "lang": "en"},
        {"text": "Les muslims", "label": NOT_HATEFUL, "target": "Muslims", "lang": "fr"},
    ]
    cases = judge_cases(iter(rows), recipe(lists, BY_WORDS))
    assert [(case.is_measured, case.is_flagged) for case in cases] == [
        (True, True),
        (True, False),
        (True, True),
        (True, False),
    ]
    assert lines_of(cases[:3], "target") == [("Muslims", 1, 1, 1, 1), ("women", 1, 0, 0, 0)]


def test_a_target_that_is_flagged_more_often_is_found() -> None:
    def cases(target, flagged):
        return [Case("en", target, NOT_HATEFUL, "", True, number < flagged) for number in range(100)]

    levels = levels_of([*cases("a", 30), *cases("b", 5), *cases("c", 5), *cases("none", 90)])
    assert levels["a"] < 1e-4
    assert set(levels) == {"a", "b", "c"}
    equal = levels_of([*cases("a", 5), *cases("b", 5), *cases("c", 6)])
    assert min(equal.values()) > 0.9


@pytest.fixture(scope="module")
def hatecheck(shared_data: Path) -> list[Case]:
    path = shared_data / "toxicity/hatecheck_multilingual.jsonl.gz"
    if not path.exists():
        pytest.skip("Multilingual HateCheck is not among the real data")
    return [case for case in judge_cases(read_cases(str(path)), recipe()) if case.is_measured]


def test_neutral_statements_about_people_are_not_toxic(hatecheck: list[Case]) -> None:
    neutral = [case for case in hatecheck if case.functionality in NEUTRAL]
    assert len(neutral) > 200
    # The classifier has seen these cases in training, so this is the least that it flags.
    assert sum(case.is_flagged for case in neutral) <= 0.05 * len(neutral)


def test_no_neutral_statement_has_a_listed_word(shared_data: Path) -> None:
    path = shared_data / "toxicity/hatecheck_multilingual.jsonl.gz"
    cases = judge_cases(read_cases(str(path)), recipe(BY_WORDS))
    assert [case for case in cases if case.functionality in NEUTRAL and case.is_flagged] == []


def test_no_people_are_flagged_more_often_than_others(hatecheck: list[Case]) -> None:
    levels = levels_of(hatecheck)
    assert len(levels) >= 7
    assert min(levels.values()) > 0.05
