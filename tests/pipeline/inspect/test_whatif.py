"""What-if without Spark: the settings that may be changed, the sensitivity curves, and the token counts."""

import re

import numpy as np
import pytest

from jobs.recipe import recipe_sections
from pipeline.engine.rules import count_bins
from pipeline.inspect.whatif import Prediction, PredictionCell, format_prediction, kept_tokens, token_rates
from pipeline.inspect.whatif_limits import CUT_BITS, SensitivityCurve, changed_settings, points
from schemas.errors import ConfigError
from schemas.overrides import load_recipe


def recipe(*overrides):
    return load_recipe({"source": {"paths": ["x.warc.gz"]}}, overrides, recipe_sections(), "test")


def test_settings_that_only_decide_are_named_with_both_values():
    changed = changed_settings(
        recipe("quality.min_words=50"), recipe("quality.min_words=30", "toxicity.max_words=0", 'dedup.keep=["longest"]')
    )
    assert changed["quality.min_words"] == (50, 30)
    assert changed["toxicity.max_words"] == (None, 0)
    assert changed["dedup.keep"] == (["source_rank", "longest", "earliest"], ["longest"])
    assert changed_settings(recipe(), recipe()) == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("quality.c4_min_line_words=5", "quality.c4_min_line_words: it changes what is measured, or the text itself"),
        ("language.min_score=0.9", "language.min_score: it changes what is measured, or the text itself"),
        ("signature.seed=2", "signature.seed: it changes what is measured, or the text itself"),
        ("dedup.min_similarity=0.9", "dedup.min_similarity: it changes which documents are copies of one another"),
        ("pii.types=[]", "pii.types: it changes the text that is kept, not which documents are"),
        ("tokenizer.vocab_size=999", "tokenizer.vocab_size: it has no part in which documents are kept"),
        ("spark.partitions=9", "spark.partitions: it has no effect on what is kept"),
        ("dedup.finish_edges=9", "dedup.finish_edges: it has no effect on what is kept"),
    ],
)
def test_settings_that_change_more_are_rejected_with_the_reason(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        changed_settings(recipe(), recipe(override))


def test_every_rejected_setting_is_named_at_once():
    with pytest.raises(ConfigError, match=r"signature\.seed") as error:
        changed_settings(recipe(), recipe("signature.seed=2", "language.min_score=0.9", "quality.min_words=9"))
    assert "language.min_score" in str(error.value)
    assert "min_words" not in str(error.value)


def stored(committed, *overrides):
    """Return the recipe as a run stores it, with overrides applied."""
    return load_recipe(committed.to_json(), overrides, recipe_sections(), "run.json")


def test_another_dialect_is_tried_where_its_signals_were_measured():
    families = '["gopher_repetition","gopher_quality","c4","fineweb","dclm","dolma","refinedweb"]'
    committed = recipe(f"quality.families={families}")
    changed = changed_settings(committed, stored(committed, "quality.dialect=dolma"))
    assert changed == {"quality.dialect": ("datatrove", "dolma")}
    with pytest.raises(ConfigError, match="expected the family 'redpajama', which the rules compare"):
        stored(committed, "quality.dialect=redpajama")


def test_cutting_where_the_run_dropped_is_rejected():
    committed = recipe('decontaminate.evaluation_sets={exam="exam.jsonl"}')
    assert changed_settings(committed, stored(committed, "decontaminate.action=measure"))
    with pytest.raises(ConfigError, match=r"decontaminate\.cut: would become True \(now False\)"):
        changed_settings(committed, stored(committed, "decontaminate.action=cut"))


@pytest.mark.parametrize("minimum", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_curve_gives_the_exact_count_kept_at_each_limit(minimum, whole):
    values = np.random.default_rng(1).integers(0, 900, 500).astype(float) / (1 if whole else 1000)
    values = values.astype(np.float32).astype(float)
    bins = {str(key): count for key, count in count_bins(values, CUT_BITS).items()}
    curve = points(bins, 7, minimum, whole)
    assert len(curve) > 5
    for limit, kept in curve:
        assert kept == 7 + ((values >= limit) if minimum else (values <= limit)).sum()
    assert max(kept for _, kept in curve) == 507


def test_a_check_without_compared_values_has_no_curve():
    assert points({}, 3, True, False) == ()


CELLS = (
    PredictionCell("kept", "kept", "en", "web", 10, 1000, 250, 0),
    PredictionCell("kept", "quality/short", "en", "web", 2, 100, 30, 0),
    PredictionCell("quality/short", "kept", "en", "web", 1, 110, 0, 110),
    PredictionCell("quality/short", "kept", "de", "web", 1, 55, 0, 55),
    PredictionCell("quality/short", "quality/short", "en", "web", 5, 200, 0, 200),
)


RATES = token_rates(CELLS)


def test_tokens_in_the_dataset_are_counted_and_others_estimated():
    assert kept_tokens(CELLS, False, RATES) == (280, False)
    # 280 tokens on 1,100 characters; German has no rate, so that of all documents is used
    assert kept_tokens(CELLS, True, RATES) == (250 + round(165 * 280 / 1100), True)
    assert kept_tokens(CELLS[:2], True, RATES) == (250, False)


def test_the_text_shows_the_changes():
    curve = SensitivityCurve("quality.min_words", "short", {"*": 50.0, "de": 40.0}, ((30, 12), (50, 10)))
    line = "quality.min_words: 50 (default of the dialect datatrove) -> 30"
    text = format_prediction(Prediction(CELLS, (curve,), True), {"quality.min_words": (None, 30)}, [line])
    assert text.startswith(f"{line}\n\nkept ")
    assert "all          12  (same)       1,165  (+65)    ≈292  (+12)" in text
    assert "quality/short          7  (same)         300  (-65)" in text
    assert "quality.min_words (short) = 40 to 50: 30 → 12  50 → 10" in text
    assert "tokens" in text
    assert "before repeated passages are cut" not in text
    assert "before repeated passages are cut" in format_prediction(Prediction(CELLS, (), True, cuts_repeats=True), {})
    assert "≈" not in format_prediction(Prediction(CELLS[:2], (curve,), True), {})


def test_the_text_states_what_the_numbers_of_tokens_are():
    estimated = "\n≈: the tokens of the documents that enter are estimated from their numbers of characters\n"
    another = "\ntokens: as the present tokenizer counts them; a run with these settings trains another one on its own "
    trained = format_prediction(Prediction(CELLS, (), True, trains_tokenizer=True), {})
    assert estimated in trained
    assert another in trained
    given = format_prediction(Prediction(CELLS, (), True), {})
    assert estimated in given
    assert "tokenizer" not in given
    fewer = format_prediction(Prediction(CELLS[:2], (), True, trains_tokenizer=True), {})
    assert "≈" not in fewer
    assert another in fewer
    # Without a change, or without a dataset, there is nothing to explain.
    assert "tokenizer" not in format_prediction(Prediction(CELLS[:1], (), True, trains_tokenizer=True), {})
    assert "tokenizer" not in format_prediction(Prediction(CELLS, (), False, trains_tokenizer=True), {})
