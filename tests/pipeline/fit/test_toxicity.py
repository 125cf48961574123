"""Training of the toxicity classifier: files, thresholds, equal bytes, what is left out, and the shipped model."""

import gzip
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.fit.toxicity import TrainToxicityConfig, best_threshold, read_examples, scores, summary, train_toxicity
from pipeline.models import REGISTRY, ModelsConfig, ensure_model
from pipeline.toxicity.model import load_toxicity
from schemas.errors import ConfigError, ContractError

SHIPPED = Path(__file__).parents[3] / "pipeline" / "toxicity"


def texts(words: list[str], count: int, seed: int) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join(chooser.choices([*words, "the", "of", "and"], k=12)) for _ in range(count)]


@pytest.fixture
def data(tmp_path: Path) -> list[dict[str, Any]]:
    nasty, calm = texts(["nasty", "fool", "scum"], 60, 1), texts(["river", "music", "island"], 60, 2)
    rows = [{"text": text, "lang": "en", "label": "bad"} for text in nasty]
    rows += [{"text": text, "lang": "en", "label": ["good"]} for text in calm]
    rows += [{"text": "un texte", "lang": "fr", "label": "bad"}, {"text": "left out", "lang": "en", "label": "unsure"}]
    with gzip.open(tmp_path / "labelled.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    plain = [{"text": text, "lang": "en"} for text in texts(["tree", "house", "road"], 60, 3)]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain), encoding="utf-8")
    return [
        {"path": str(tmp_path / "labelled.jsonl.gz"), "licence": "CC0", "origin": "made here"}
        | {"toxic": ["bad"], "hate": ["bad"], "ignored": ["unsure"]},
        {"path": str(tmp_path / "plain.jsonl"), "licence": "CC0", "origin": "made here", "ordinary": True},
    ]


def config(data: list[dict[str, Any]], **values: Any) -> TrainToxicityConfig:
    small = {"buckets": 1 << 12, "min_texts": 50, "min_ordinary": 10, "min_rows": 1, "folds": 3}
    return TrainToxicityConfig.model_validate({"name": "small", "data": data} | small | values)


def test_a_model_is_trained_and_described(data: list[dict[str, Any]], tmp_path: Path) -> None:
    store = ModelsConfig(cache=str(tmp_path / "store"))
    manifest = train_toxicity(config(data), str(tmp_path / "a"), store)
    again = train_toxicity(config(data), str(tmp_path / "b"), None)
    assert (tmp_path / "a" / "small.arrow").read_bytes() == (tmp_path / "b" / "small.arrow").read_bytes()
    assert manifest["content"] == again["content"]
    assert str(tmp_path) not in json.dumps(manifest["content"])
    model = load_toxicity(str(ensure_model("small", store).path), "toxicity.classifier")
    assert list(model.languages) == ["en"]  # of French there is one text
    found = model.toxic_sentences(["nasty fool and scum", "the river and the island"], "en")
    assert {label: flags.tolist() for label, flags in found.items()} == {"toxic": [True, False], "hate": [True, False]}
    described = manifest["content"]["data"]
    assert [(row["texts"], row["toxic"], row["ordinary"]) for row in described] == [
        ({"en": 120}, 60, False),
        ({"en": 60}, 0, True),
    ]
    assert described[1]["sha256"] == hashlib.sha256(Path(data[1]["path"]).read_bytes()).hexdigest()
    (row,) = manifest["content"]["figures"]["toxic"]["sets"]
    assert (row["num_texts"], row["texts"]["f1"], row["groups"]["balanced_accuracy"]) == (120, 1.0, 1.0)
    assert manifest["content"]["figures"]["toxic"]["languages"]["en"]["ordinary_alarms"] <= 0.025
    assert "made here en" in summary(manifest)


def test_thresholds_by_hand() -> None:
    probabilities = np.array([0.9, 0.6, 0.4, 0.1])
    labels = np.array([True, True, False, False])
    assert best_threshold([(probabilities, labels)], np.array([]), 0.0) == 0.6  # the highest of equal ones
    assert best_threshold([(probabilities, labels)], np.array([0.7]), 0.0) == 0.9
    assert best_threshold([(probabilities, labels)], np.array([0.7]), 1.0) == 0.6
    assert best_threshold([(probabilities, labels)], np.array([1.0]), 0.0) == 1.0


def test_scores_by_hand() -> None:
    flagged, labels = np.array([True, True, False, False, False]), np.array([True, False, True, False, False])
    assert scores(flagged, labels) == {
        "f1": 0.5,
        "macro_f1": 0.5833,
        "precision": 0.5,
        "recall": 0.5,
        "specificity": 0.6667,
        "balanced_accuracy": 0.5833,
    }
    none = np.array([False])
    assert scores(none, none)["f1"] is None
    assert scores(none, none)["balanced_accuracy"] is None


def test_what_is_wrong_is_named(data: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a language with at least 5000 labelled texts, .* got \{'en': 120"):
        train_toxicity(config(data, min_texts=5000), str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"and 61 ordinary ones, got .*\{'en': 60\}"):
        train_toxicity(config(data, min_ordinary=61), str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"train_toxicity\.data: expected JSON lines, got /nowhere"):
        read_examples(config([data[0] | {"path": "/nowhere"}]))
    with pytest.raises(ConfigError, match="got no new one in"):
        read_examples(config([data[0], data[0]]))
    with pytest.raises(ContractError, match=r"line 1: expected an object .* got KeyError 'body'"):
        read_examples(config([data[0] | {"text_field": "body"}]))
    with pytest.raises(ValidationError, match="expected a power of 2, got 5000"):
        config(data, buckets=5000)
    with pytest.raises(ValidationError, match="expected letters, digits"):
        config(data, name="a/b")


def test_the_shipped_model_its_card_and_its_entry_agree() -> None:
    entry = REGISTRY["toxic-multi"]
    content = (SHIPPED / "toxic-multi.arrow").read_bytes()
    manifest = json.loads((SHIPPED / "toxic-multi.json").read_text(encoding="utf-8"))["content"]
    digest = hashlib.sha256(content).hexdigest()
    assert manifest["model"] == {"file": "toxic-multi.arrow", "bytes": len(content), "sha256": digest}
    assert (entry.sha256, entry.num_bytes) == (digest, len(content))
    assert len(content) <= 20_000_000
    card = (SHIPPED / "toxic-multi.md").read_text(encoding="utf-8")
    assert digest in card
    for row in manifest["figures"]["toxic"]["sets"]:
        assert f"| {row['origin']} | {row['language']} | {row['num_texts']:,} |" in card
    model = load_toxicity(str(SHIPPED / "toxic-multi.arrow"), "toxicity.classifier")
    assert sorted(model.languages) == ["ar", "de", "en", "es", "fr", "hi", "it", "ko", "pl", "pt", "zh"]


@pytest.mark.slow
def test_the_shipped_model_is_trained_again(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    settings = tomllib.loads((SHIPPED.parents[1] / "bench" / "toxicity.toml").read_text(encoding="utf-8"))
    monkeypatch.chdir(shared_data)
    train_toxicity(TrainToxicityConfig.model_validate(settings["train_toxicity"]), str(tmp_path), None)
    shipped, again = (load_toxicity(str(path / "toxic-multi.arrow"), "x") for path in (SHIPPED, tmp_path))
    for label, weights in shipped.weights.items():
        differences = np.abs(weights.astype(int) - again.weights[label])
        assert differences.max() <= 3
        assert np.count_nonzero(differences) <= 0.01 * len(weights)  # sums of floats round otherwise on another machine
        assert again.scales[label] == pytest.approx(shipped.scales[label], rel=0.01)
    for language, labels in shipped.languages.items():
        for label, values in labels.items():
            found = again.languages[language][label]
            assert found["threshold"] == pytest.approx(values["threshold"], abs=0.1)
            assert found["bias"] == pytest.approx(values["bias"], abs=0.3)
