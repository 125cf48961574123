"""Tests of the classifier stage: scores of both kinds of models, the three kinds of checks, and invalid settings."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.classifier.columns import entry_values, gumbel_draws, log_odds, pareto_shape, uniform_draws
from pipeline.classifier.linear import LinearModel, hash_buckets, new_vocabulary, ngram_codes, save_linear, word_keys_of
from pipeline.classifier.stage import CLASSIFIER, ClassifierConfig
from pipeline.engine.rules import evaluate_checks
from schemas.config import build_recipe
from schemas.entries import to_entries, to_mapping
from schemas.errors import ConfigError, ContractError
from schemas.ids import shuffle_key
from schemas.tables import SCORES

KIND = SCORES.field("classifier_scores").type


def config(**values: Any) -> ClassifierConfig:
    return ClassifierConfig.model_validate({"models": {"wiki": "wiki"}, **values})


@pytest.fixture
def wiki(tmp_path: Path) -> str:
    """Write a model that gives `good` a logit of 2 and `bad` a logit of -2; return its path."""
    weights = np.zeros(1 << 10, np.float32)
    for word, weight in (("good", 2.0), ("bad", -2.0)):
        codes = ngram_codes(word_keys_of(word, new_vocabulary()), 1)
        weights[hash_buckets(codes, len(weights))] = weight
    save_linear(LinearModel(weights, 1, 1.0, 0.0), tmp_path / "wiki.arrow")
    return str(tmp_path / "wiki.arrow")


def score(config: ClassifierConfig, models: dict[str, str], body: str) -> dict[str, float] | None:
    row: dict[str, Any] = {"_body": body}
    assert CLASSIFIER.make(config, models)(row) is None
    return row["classifier_scores"]


def batch_of(scores: Sequence[dict[str, float] | None], doc_ids: Sequence[bytes] | None = None) -> pa.RecordBatch:
    doc_ids = doc_ids or [number.to_bytes(16, "big") for number in range(len(scores))]
    stored = pa.array(map(to_entries, scores), KIND)
    columns = [pa.array(doc_ids, pa.binary(16)), pa.array(["en"] * len(scores)), stored]
    return pa.RecordBatch.from_arrays(columns, ["doc_id", "language", "classifier_scores"])


@pytest.mark.parametrize(
    ("body", "logit"),
    [("Good.", 2), ("bad, BAD!", -2), ("good bad", 0), ("", 0), ("word", 0), ("\ud800", 0), ("good " * 100_000, 2)],
)
def test_scores_are_probabilities_as_float32(wiki: str, body: str, logit: float) -> None:
    scores = score(config(), {"wiki": wiki}, body)
    expected = np.float32(1 / (1 + math.exp(-logit)))
    assert scores == {"wiki": pytest.approx(expected, abs=1e-6)}
    assert float(np.float32(scores["wiki"])) == scores["wiki"]


def test_without_a_model_nothing_is_measured() -> None:
    assert score(ClassifierConfig.model_validate({}), {}, "text") is None
    assert CLASSIFIER.models(ClassifierConfig.model_validate({})) == {}


def test_scores_fit_the_table(wiki: str) -> None:
    two = ClassifierConfig.model_validate({"models": {"wiki": "wiki", "other": "x"}})
    scores = score(two, {"wiki": wiki, "other": wiki}, "good")
    stored = pa.array(map(to_entries, (scores, None)), KIND)
    assert list(map(to_mapping, stored.to_pylist())) == [scores, None]


def test_a_file_that_is_not_a_model_and_a_label_of_a_linear_model(wiki: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"not fastText")
    with pytest.raises(
        ConfigError, match=r"classifier\.models\.wiki: expected a linear or fastText model, got .*x\.bin"
    ):
        CLASSIFIER.make(config(), {"wiki": str(tmp_path / "x.bin")})
    with pytest.raises(ConfigError, match=r"classifier\.labels\.wiki: .*arrow, a linear model without labels\. Remove"):
        CLASSIFIER.make(config(labels={"wiki": "__label__hq"}), {"wiki": wiki})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"min_score": {"wkii": 0.5}},
            r"min_score\.wkii: expected a name in `models`, got 'wkii' \(did you mean 'wiki'\?\)\. Correct the",
        ),
        ({"min_quantile": {"x": 0.5}}, r"min_quantile\.x: expected a name in `models`, got 'x' \(valid: wiki\)"),
        ({"min_alpha": {"x": 9}}, r"min_alpha\.x: expected a name in `models`, got 'x'"),
        ({"labels": {"x": "y"}}, r"labels\.x: expected a name in `models`, got 'x'"),
        ({"models": {}, "min_score": {"wiki": 0.5}}, r"min_score\.wiki: .* got 'wiki', but models is empty"),
        ({"min_score": {"wiki": 1.5}}, r"min_score\.wiki: expected a probability in 0\.\.1, got 1\.5"),
        ({"min_quantile": {"wiki": 1}}, r"min_quantile\.wiki: expected a share between 0 and 1, got 1"),
        ({"min_quantile": {"wiki": 0}}, r"min_quantile\.wiki: expected a share between 0 and 1, got 0"),
        ({"min_alpha": {"wiki": 0}}, r"min_alpha\.wiki: expected a positive shape of at most 1e6, got 0"),
        ({"seed": 3}, "seed would be ignored without min_alpha"),
    ],
)
def test_invalid_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    raw = {"classifier": {"models": {"wiki": "wiki"}, **values}}
    with pytest.raises(ConfigError, match=message):
        build_recipe(raw, {"classifier": ClassifierConfig}, "test")


def test_only_decisions_can_be_tried_again() -> None:
    assert ClassifierConfig.fields_of("content") == {"labels"}
    assert ClassifierConfig.fields_of("location") == {"models"}
    assert ClassifierConfig.fields_of("decision") == {"min_score", "min_quantile", "min_alpha", "seed"}


@pytest.mark.parametrize(
    ("value", "broken"), [(0.5, False), (0.25, True), (float(np.float32(0.3)), False), (0.2999, True), (None, False)]
)
def test_a_threshold_is_inclusive_and_null_breaks_nothing(value: float | None, broken: bool) -> None:
    limit = 0.5 if value in (0.5, 0.25) else 0.3
    checks = CLASSIFIER.checks(config(min_score={"wiki": limit}), {}, {})
    scores = {"other": 0.0} if value is None else {"wiki": value}
    verdict = evaluate_checks(checks, batch_of([scores, None]))
    assert verdict.broken.tolist() == [[broken, False]]
    assert checks[0].reason == "classifier_score"


def test_a_quantile_compares_log_odds_with_the_language_s_cut_off() -> None:
    settings = config(min_quantile={"wiki": 0.9})
    (quantile,) = CLASSIFIER.quantiles(settings)
    assert (quantile.share, quantile.column) == (0.9, "classifier_scores")
    cutoffs = {quantile.name: {"en": math.log(3)}}  # the odds of 0.75
    (check,) = CLASSIFIER.checks(settings, {}, cutoffs)
    verdict = evaluate_checks([check], batch_of([{"wiki": 0.7499}, {"wiki": 0.7501}]))
    assert verdict.broken.tolist() == [[True, False]]
    assert check.reason == "classifier_quantile"
    assert quantile.keeps_highest  # as many scores of 1.0 as there are
    (check,) = CLASSIFIER.checks(settings, {}, {})  # no document of any language was measured
    assert check.limits == {}


def test_log_odds_are_finite_and_separate_probabilities_close_to_one() -> None:
    values = np.array([0.0, 0.5, 0.9999, 0.99999, 1.0])
    odds = log_odds(values)
    assert np.isfinite(odds).all()
    assert (np.diff(odds) > 0.5).all()
    assert odds[1] == 0
    assert odds[2] == pytest.approx(math.log(9999), rel=1e-9)


def test_the_draw_is_gpt3s_rule() -> None:
    """The published rule, a Pareto draw above 1 - score, decides as the stored comparison does."""
    random = np.random.default_rng(0)
    scores, uniforms = random.random(20_000), random.random(20_000)
    shapes = pareto_shape(scores, uniforms)
    for alpha in (0.5, 3.0, 9.0):
        draws = uniforms ** (-1 / alpha) - 1
        assert ((draws > 1 - scores) == (shapes >= alpha)).mean() == 1.0
    # and such a draw has the distribution of numpy's pareto: P(X > x) = (1 + x)^-alpha
    ours, theirs = uniforms ** (-1 / 9) - 1, random.pareto(9, 20_000)
    assert np.quantile(ours, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(theirs, [0.1, 0.5, 0.9]), rel=0.05)


@pytest.mark.parametrize("score", [0.0, 0.3, 0.8, 0.95, 1.0])
def test_documents_are_kept_with_the_theoretical_probability(score: float) -> None:
    number = 20_000
    (check,) = CLASSIFIER.checks(config(min_alpha={"wiki": 9}), {}, {})
    verdict = evaluate_checks([check], batch_of([{"wiki": score}] * number))
    expected = (2 - float(np.float32(score))) ** -9
    error = math.sqrt(expected * (1 - expected) / number)
    assert abs((~verdict.broken[0]).mean() - expected) <= 4 * error
    assert check.reason == "classifier_sampled"


def test_draws_follow_from_doc_id_seed_and_name_alone() -> None:
    doc_ids = [number.to_bytes(16, "big") for number in range(1000)]
    first = uniform_draws(doc_ids, 1, "a")
    assert first.tolist() == [(shuffle_key(1, doc_id + b"a") + 0.5) / 2**63 for doc_id in doc_ids]
    assert uniform_draws(doc_ids[::-1], 1, "a").tolist() == first[::-1].tolist()
    assert ((first > 0) & (first < 1)).all()
    for other in (uniform_draws(doc_ids, 2, "a"), uniform_draws(doc_ids, 1, "b")):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.15
    assert abs(gumbel_draws(first).mean() - 0.5772) < 4 * math.pi / math.sqrt(6 * 1000)


def test_a_smaller_alpha_keeps_every_document_that_a_larger_alpha_keeps() -> None:
    random = np.random.default_rng(5)
    batch = batch_of([{"wiki": value} for value in random.random(2000)])
    broken = [
        evaluate_checks(CLASSIFIER.checks(config(min_alpha={"wiki": alpha}), {}, {}), batch).broken[0]
        for alpha in (2.0, 9.0)
    ]
    assert (broken[1] | ~broken[0]).all()
    assert 0 < broken[0].sum() < broken[1].sum()


def test_checks_have_a_fixed_order() -> None:
    settings = ClassifierConfig.model_validate(
        {
            "models": {"b": "b", "a": "a"},
            "min_alpha": {"a": 9},
            "min_score": {"b": 0.1, "a": 0.2},
            "min_quantile": {"b": 0.5},
        }
    )
    checks = CLASSIFIER.checks(settings, {}, {"classifier.min_quantile.b": {"en": 1.0}})
    assert [(check.reason, dict(check.limits)) for check in checks] == [
        ("classifier_score", {"*": 0.2}),
        ("classifier_score", {"*": 0.1}),
        ("classifier_quantile", {"en": 1.0}),
        ("classifier_sampled", {"*": 9.0}),
    ]
    assert {check.reason for check in checks} == set(CLASSIFIER.verdicts)


def test_the_stored_score_is_compared() -> None:
    checks = CLASSIFIER.checks(config(min_score={"wiki": 0.5}), {}, {})
    batch = batch_of([{"wiki": 0.25}])
    assert entry_values(batch, "classifier_scores", "wiki").tolist() == [0.25]
    assert evaluate_checks(checks, batch).values.tolist() == [[0.25]]


@pytest.mark.slow
def test_a_fasttext_model_scores_by_its_label(tmp_path: Path) -> None:
    fasttext = pytest.importorskip("fasttext")
    lines = ["__label__hq fine words here", "__label__cc click buy now"] * 200
    (tmp_path / "train.txt").write_text("\n".join(lines))
    model = fasttext.train_supervised(str(tmp_path / "train.txt"), thread=11, dim=8, epoch=25, verbose=0, bucket=100)
    model.save_model(str(tmp_path / "m.bin"))
    models = {"wiki": str(tmp_path / "m.bin")}
    with pytest.raises(ConfigError, match="expected a model with the label '__label__good', got one without it"):
        CLASSIFIER.make(config(), models)
    settings = config(labels={"wiki": "__label__hq"})
    assert score(settings, models, "fine\nwords\n__label__cc")["wiki"] > 0.8
    assert score(settings, models, "click buy")["wiki"] < 0.2
    assert 0 <= score(settings, models, "")["wiki"] <= 1
    assert 0 <= score(settings, models, "\ud800")["wiki"] <= 1


@pytest.mark.slow
def test_a_fasttext_model_of_nan_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fasttext = pytest.importorskip("fasttext")

    class Broken:
        def get_labels(self) -> list[str]:
            return ["__label__good"]

        def predict(self, texts: list[str], k: int) -> tuple[list[list[str]], list[list[float]]]:
            return [["__label__good"]], [[math.nan]]

    monkeypatch.setattr(fasttext, "load_model", lambda path: Broken())
    (tmp_path / "m.bin").write_bytes(b"anything")
    with pytest.raises(ContractError, match=r"expected a probability, got nan from .*m\.bin\. Train the model"):
        CLASSIFIER.make(config(), {"wiki": str(tmp_path / "m.bin")})
