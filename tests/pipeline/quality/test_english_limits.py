"""Tests of the derived limits of English: which limits hold, and how they are derived from pages and labels."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.engine.stage import EVERY, Check
from pipeline.quality.config import QualityConfig
from pipeline.quality.rules import DEFAULT_RULES, RULES, QualityLimits
from pipeline.quality.stage import QUALITY, checks, make
from pipeline.text.profiles import ENGLISH_LIMITS, load_profiles
from tests.derive_english import Measured, derive, first_limits, mean_kappa, rounded, toml_of

PUBLISHED = {rule.setting: rule.limit for name in DEFAULT_RULES["datatrove"] for rule in RULES["datatrove"][name]}


def limits_of(**fields: Any) -> dict[str, dict[str, float]]:
    """The limits of each setting by language."""
    return {check.setting: dict(check.limits) for check in checks(QualityConfig(**fields), {}, {})}


def test_derived_limits_replace_those_of_english_alone() -> None:
    derived = load_profiles(str(ENGLISH_LIMITS))
    assert {*derived} == {"en"}
    own = derived["en"].limits
    assert own.keys() <= QualityLimits.model_fields.keys()
    assert all(limit != PUBLISHED[setting] for setting, limit in own.items())
    published, limits = limits_of(), limits_of(english_limits="derived")
    for setting, by_language in limits.items():
        assert by_language == {**published[setting], "en": own.get(setting, PUBLISHED[setting])}
    assert limits["max_dup_line_frac"][EVERY] == 0.3


def test_the_recipe_overrides_derived_limits() -> None:
    assert limits_of(english_limits="derived", min_words=30)["min_words"]["en"] == 30
    by_language = {"en": {"min_words": 20}}
    assert limits_of(english_limits="derived", min_words=30, by_language=by_language)["min_words"]["en"] == 20


def test_published_limits_are_no_decision_to_store_and_the_signals_are_the_same() -> None:
    plain, derived = QualityConfig(), QualityConfig(english_limits="derived")
    assert "english_limits" not in plain.decisions()
    assert derived.decisions()["english_limits"] == "derived"
    assert plain.content() == derived.content()
    rows: list[dict[str, Any]] = [{"text": "The dog and the man have to sleep.", "language": "en"} for _ in range(2)]
    for row, config in zip(rows, (plain, derived)):
        make(config, QUALITY.models(config))(row)
    assert rows[0]["gopher_stop_words"] == rows[1]["gopher_stop_words"] == 4


@pytest.mark.parametrize(
    ("fields", "got"),
    [({"dialect": "dolma"}, "the dialect 'dolma'"), ({"profiles": "own.toml"}, "profiles 'own.toml'")],
)
def test_derived_limits_are_refused_where_they_do_not_apply(fields: dict[str, Any], got: str) -> None:
    with pytest.raises(ValidationError, match=f"without profiles for 'derived', got {got}. Remove quality.english"):
        QualityConfig(english_limits="derived", **fields)


# How they are derived. A text has two signals here: a share that is limited above, and a number of words.

CHECKS = [
    Check("gopher_bullet_lines", "gopher_bullet_lines", "max_bullet_lines", {"en": 0.9}),
    Check("gopher_short_doc", "gopher_num_words", "min_words", {"en": 50}),
    Check("gopher_short_words", "gopher_mean_word_length", "min_mean_word_length", {"en": 3.0}),
]


def texts(bullets: list[float], words: list[float], lengths: list[float]) -> Measured:
    """Texts with these values."""
    values = {
        "max_bullet_lines": bullets,
        "min_words": [-x for x in words],
        "min_mean_word_length": [-x for x in lengths],
    }
    none = np.zeros(len(bullets))
    return Measured({name: np.array(column) for name, column in values.items()}, none, none > 0)


def test_a_limit_starts_at_a_percentile_with_a_margin_and_is_never_stricter_than_published() -> None:
    # 201 pages: the percentile of 0.005 is the second value from the end.
    many = texts([0.0] * 199 + [0.96, 1.0], [300.0] * 201, [4.0] * 199 + [2.0, 1.0])
    first = first_limits(many, np.ones(201, bool), CHECKS)
    assert first["max_bullet_lines"] == pytest.approx(0.96 + 0.25 * 0.04)
    assert first["min_mean_word_length"] == pytest.approx(-(2.0 - 0.25 * 2.0))
    assert first["min_words"] == -50  # as published
    calm = texts([0.1] * 201, [300.0] * 201, [5.0] * 201)
    assert first_limits(calm, np.ones(201, bool), CHECKS) == {
        "max_bullet_lines": 0.9,
        "min_words": -50,
        "min_mean_word_length": -3.0,
    }


@pytest.mark.parametrize(("short_good", "stricter"), [(10, False), (9, True)])
def test_labels_make_the_limit_stricter_that_drops_bad_documents_and_few_pages(short_good: int, stricter: bool) -> None:
    pages = texts([i / 2000 for i in range(1000)], [100.0 + i for i in range(1000)], [5.0] * 1000)
    # Five bad documents are lists, and five are short. GOOD_WEIGHT is a half: ten good ones are worth them.
    long_good = 15 - short_good
    judged = texts([0.7] * 5 + [0.0] * 20, [500.0] * 5 + [80.0] * (5 + short_good) + [500.0] * long_good, [5.0] * 25)
    good = np.array([False] * 10 + [True] * 15)
    everything, nothing = np.ones(25, bool), np.zeros(25, bool)
    limits = derive(pages, np.ones(1000, bool), judged, (everything, good), CHECKS)
    assert 0.49 < limits["max_bullet_lines"] < 0.7
    # The percentile 0.001 of 100, 101, … 1,099 words is 100.999: no page is between it and the published limit.
    assert limits["min_words"] == pytest.approx(-100.999 if stricter else -50)
    assert limits["min_mean_word_length"] == -3.0
    assert judged.breaks(limits).sum() == 5 + (5 + short_good) * stricter
    assert pages.breaks(limits).mean() <= 0.08
    unlabelled = derive(pages, np.ones(1000, bool), judged, (nothing, good), CHECKS)
    assert unlabelled == first_limits(pages, np.ones(1000, bool), CHECKS)


def test_limits_are_rounded_in_the_direction_that_is_less_strict() -> None:
    limits = rounded({"max_bullet_lines": 0.12341, "min_words": -99.5, "min_mean_word_length": -3.4567}, CHECKS)
    assert limits == {"max_bullet_lines": 0.124, "min_mean_word_length": 3.456, "min_words": 99}
    text = toml_of(limits, {"max_bullet_lines": 0.9, "min_words": 99, "min_mean_word_length": 3}, 10, 20)
    assert text.endswith('script = "Latn"\n[en.limits]\nmax_bullet_lines = 0.124\nmin_mean_word_length = 3.456\n')
    assert "10 English pages" in text


def test_lost_texts_and_low_scores_break_the_limits() -> None:
    one = texts([0.0, 0.0, 0.0, 1.0], [300.0] * 4, [5.0] * 4)
    measured = Measured(one.values, np.array([0.0, 0.2, 0.3, 0.3]), np.array([True, False, False, False]))
    limits = {"max_bullet_lines": 0.9}
    assert measured.breaks(limits).tolist() == [True, False, False, True]
    assert measured.breaks(limits, 0.3).tolist() == [True, True, False, True]


def test_kappa_of_shares_is_that_of_decisions() -> None:
    good = np.array([True, True, True, False])
    # Kept: two of three good and one bad. Agreed .5; by chance .75 * .75 + .25 * .25 = .625.
    assert mean_kappa(np.array([0.0, 0.0, 1.0, 0.0]), good) == pytest.approx((0.5 - 0.625) / 0.375)
    assert mean_kappa(np.array([0.0, 0.0, 0.0, 1.0]), good) == 1
