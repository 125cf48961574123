"""Tests of classifiers over quality signals: features by hand, fit, model files, scores in the stage."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.classifier.linear import model_kind, write_model
from pipeline.classifier.signals import (
    SIGNAL_KIND,
    SignalMeter,
    SignalModel,
    calibrated,
    fit_signals,
    load_signals,
    save_signals,
    standardize,
)
from pipeline.classifier.stage import CLASSIFIER, ClassifierConfig
from schemas.errors import ConfigError

METER = SignalMeter()
PROSE = "The river is the longest of the island. It has a mouth in the west, and two towns are on its banks.\n"
LIST = "Home\nLogin\n# # #\nCART 3\n$ 12\nHome\n"


def feature(text: str, name: str) -> float:
    return float(METER.features(text)[METER.names.index(name)])


def by_name(**weights: float) -> SignalModel:
    """A model with these weights, without standardization: mean 0 and deviation 1."""
    weight = np.array([weights.get(name, 0.0) for name in METER.names])
    return SignalModel(METER.names, np.zeros(len(weight)), np.ones(len(weight)), weight)


def test_counts_are_logarithms_and_ratios_are_roots() -> None:
    assert feature("One two three four.", "gopher_num_words") == pytest.approx(math.log1p(4))
    assert feature("a # b #", "gopher_hash_ratio") == pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert feature(PROSE, "gopher_stop_words") == pytest.approx(math.log1p(3))  # the, of, and
    assert np.isfinite(METER.features(PROSE)).all()


def test_every_published_family_is_a_feature() -> None:
    prefixes = {name.split("_")[0] for name in METER.names}
    assert prefixes == {"ccnet", "gopher", "c4", "fineweb", "dclm", "dolma", "rps", "refinedweb"}
    assert len(METER.names) == len(set(METER.names)) > 70


@pytest.mark.parametrize("text", ["", " \n", "\ud800", "x" * 50_000, "\n" * 1000])
def test_any_text_has_a_probability(text: str) -> None:
    probability = by_name(gopher_num_words=1.0).probability(METER.features(text))
    assert 0 <= probability <= 1


def test_standardized_features_are_limited_and_scaled() -> None:
    features = np.array([[1.0, 100.0, np.nan, 7.0]])
    result = standardize(features, np.array([0.0, 0.0, 5.0, 5.0]), np.array([2.0, 2.0, 1.0, 0.0]))
    assert result.tolist() == [[0.25, 1.5, 0.0, 0.0]]  # 1/2 and the limit 3, over the root of 4; NaN; deviation 0


def test_the_fit_is_the_minimum_and_separates() -> None:
    chooser = np.random.default_rng(1)
    labels = np.arange(60) % 2 == 0
    features = chooser.normal(size=(60, 3))
    features[:, 0] += 2.0 * labels
    features[:, 2] = 4.0
    model, minimum = fit_signals(("a", "b", "c"), features, labels, 1e-2)
    assert minimum.gradient <= 1e-6
    assert model.weight[0] > 5 * abs(model.weight[1])
    assert (model.deviation[2], model.weight[2]) == (0.0, 0.0)
    margins = model.margins(features)
    assert margins[labels].mean() > margins[~labels].mean() + 1
    again, _ = fit_signals(("a", "b", "c"), features, labels, 1e-2)
    assert again.weight.tobytes() == model.weight.tobytes()


def test_a_model_file_holds_the_model(tmp_path: Path) -> None:
    model = calibrated(by_name(gopher_num_words=2.5, c4_num_sentences=-1.0), 1.5, -0.25)
    for name in ("a", "b"):
        save_signals(model, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert model_kind(str(tmp_path / "a")) == SIGNAL_KIND
    loaded = load_signals(str(tmp_path / "a"), "x")
    features = METER.features(PROSE)
    margin = (2.5 * min(feature(PROSE, "gopher_num_words"), 3.0) - min(feature(PROSE, "c4_num_sentences"), 3.0)) / (
        math.sqrt(len(METER.names))
    )
    assert loaded.probability(features) == pytest.approx(1 / (1 + math.exp(0.25 - 1.5 * margin)), rel=1e-12)


def test_a_model_of_other_signals_is_refused(tmp_path: Path) -> None:
    header = {"names": ["gone"], "scale": 1.0, "offset": 0.0}
    write_model(tmp_path / "x", SIGNAL_KIND, header, {name: np.ones(1) for name in ("mean", "deviation", "weight")})
    with pytest.raises(ConfigError, match=r"x: expected a model of the signals that this version measures, got .*/x"):
        load_signals(str(tmp_path / "x"), "x")
    assert model_kind(__file__) is None


def test_the_stage_scores_english_only(tmp_path: Path) -> None:
    save_signals(by_name(dclm_stop_words=3.0), tmp_path / "q.arrow")
    config = ClassifierConfig.model_validate({"models": {"q": "q"}, "min_score": {"q": 0.5}})
    classify = CLASSIFIER.make(config, {"q": str(tmp_path / "q.arrow")})
    rows: list[dict[str, Any]] = [
        {"_body": PROSE * 3, "language": "en"},
        {"_body": LIST, "language": "en"},
        {"_body": PROSE * 3, "language": "de"},
    ]
    for row in rows:
        assert classify(row) is None
    prose, furniture, german = (row["classifier_scores"] for row in rows)
    assert prose["q"] > furniture["q"] == 0.5
    assert german is None


def test_a_label_of_a_signal_model_is_refused(tmp_path: Path) -> None:
    save_signals(by_name(), tmp_path / "q.arrow")
    config = ClassifierConfig.model_validate({"models": {"q": "q"}, "labels": {"q": "good"}})
    with pytest.raises(ConfigError, match=r"classifier\.labels\.q: expected a fastText model"):
        CLASSIFIER.make(config, {"q": str(tmp_path / "q.arrow")})
