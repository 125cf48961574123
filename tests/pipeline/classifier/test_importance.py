"""Tests of importance weights: values by hand, the stage and its checks, resampling, and deterministic models."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from pipeline.classifier.columns import gumbel_draws, uniform_draws
from pipeline.classifier.importance import (
    IMPORTANCE,
    ImportanceConfig,
    ImportanceModel,
    NgramCounts,
    load_importance,
    poisson_log_ratio,
    save_importance,
)
from pipeline.classifier.linear import hash_buckets, new_vocabulary, ngram_codes, word_keys_of
from pipeline.engine.rules import FINE, count_bins, evaluate_checks, quantile
from pipeline.fit.importance import TrainImportanceConfig, train_importance
from pipeline.models import ModelsConfig, ensure_model
from schemas.config import build_recipe
from schemas.entries import to_entries
from schemas.errors import ConfigError, ContractError
from schemas.tables import SCORES

KIND = SCORES.field("importance").type
BUCKETS = 1 << 16


def buckets(text: str, max_n: int = 2, count: int = BUCKETS) -> list[int]:
    return hash_buckets(ngram_codes(word_keys_of(text, new_vocabulary()), max_n), count).tolist()


def bag(*texts: str) -> NgramCounts:
    counts = np.bincount([b for text in texts for b in buckets(text)], minlength=BUCKETS)
    return NgramCounts(counts, sum(len(text.split()) for text in texts), len(texts))


MODEL = ImportanceModel(bag("a b a"), bag("b c", "b"), 2, 0.5)
# target: a 2, b 1, ab 1, ba 1 of 5; raw: b 2, c 1, bc 1 of 4; smoothing 0.5 in each of 65,536 buckets
LOG_TOTALS = math.log(5 + 0.5 * BUCKETS) - math.log(4 + 0.5 * BUCKETS)


def ratio(target: int, raw: int) -> float:
    return math.log(target + 0.5) - math.log(raw + 0.5) - LOG_TOTALS


def config(**values: Any) -> ImportanceConfig:
    return ImportanceConfig.model_validate({"models": {"books": "books"}, **values})


@pytest.fixture
def books(tmp_path: Path) -> str:
    save_importance(MODEL, tmp_path / "books.arrow")
    return str(tmp_path / "books.arrow")


def weigh(config: ImportanceConfig, models: dict[str, str], body: str) -> dict[str, Any]:
    row: dict[str, Any] = {"_body": body}
    assert IMPORTANCE.make(config, models)(row) is None
    return row


@pytest.mark.parametrize(
    ("body", "words", "total"),
    [
        ("a", 1, ratio(2, 0)),
        ("b", 1, ratio(1, 2)),
        ("A b!", 2, ratio(2, 0) + ratio(1, 2) + ratio(1, 0)),
        ("b c", 2, ratio(1, 2) + ratio(0, 1) + ratio(0, 1)),
        ("never seen", 2, 3 * ratio(0, 0)),
        ("a\na", 2, 2 * ratio(2, 0) + ratio(0, 0)),
    ],
)
def test_weights_by_hand(books: str, body: str, words: int, total: float) -> None:
    assert len(set(buckets("a b a c never seen", 1))) == 5  # no two of these words share a bucket
    row = weigh(config(), {"books": books}, body)
    assert row["importance_words"] == words
    assert row["importance"]["books"] == pytest.approx(total / words, abs=1e-6)
    assert float(np.float32(row["importance"]["books"])) == row["importance"]["books"]


def test_a_text_without_words_has_no_weight_per_word(books: str) -> None:
    row = weigh(config(), {"books": books}, " ... ")
    assert (row["importance"], row["importance_words"]) == ({"books": None}, 0)
    stored = pa.array([to_entries(row["importance"])], KIND)
    batch = pa.RecordBatch.from_arrays([pa.array(["en"]), stored], ["language", "importance"])
    assert not evaluate_checks(IMPORTANCE.checks(config(min_importance={"books": 5}), {}, {}), batch).broken.any()


def test_without_a_model_nothing_is_measured() -> None:
    row = weigh(ImportanceConfig.model_validate({}), {}, "a")
    assert (row["importance"], row["importance_words"]) == (None, None)


def test_log_shares_are_those_of_the_counts() -> None:
    target, raw = NgramCounts(np.array([3, 0, 1]), 4, 1), NgramCounts(np.array([1, 1, 2]), 4, 2)
    ratios = ImportanceModel(target, raw, 1, 1.0).log_ratios()
    assert ratios == pytest.approx(np.log(np.array([4 / 7, 1 / 7, 2 / 7]) / np.array([2 / 7, 2 / 7, 3 / 7])))


@pytest.mark.parametrize(
    ("words", "target", "raw"), [(3, 3.0, 1.5), (1, 3.0, 1.5), (50, 20.0, 60.0), (10_000, 3.0, 900.0)]
)
def test_the_length_correction_is_the_floored_poisson_ratio(words: int, target: float, raw: float) -> None:
    expected = math.log(stats.poisson.pmf(words, target) + 1e-8) - math.log(stats.poisson.pmf(words, raw) + 1e-8)
    assert poisson_log_ratio(words, target, raw) == pytest.approx(expected, abs=1e-9)


def test_length_correction_adds_to_the_whole_weight(books: str) -> None:
    plain, corrected = (
        weigh(config(length_correction=on), {"books": books}, "a b")["importance"]["books"] for on in (False, True)
    )
    assert corrected - plain == pytest.approx(poisson_log_ratio(2, 3.0, 1.5) / 2, abs=1e-6)


def batch_of(weights: list[float], words: list[int]) -> pa.RecordBatch:
    columns = {
        "doc_id": pa.array([number.to_bytes(16, "big") for number in range(len(weights))], pa.binary(16)),
        "language": pa.array(["en"] * len(weights)),
        "importance": pa.array([[("books", weight)] for weight in weights], KIND),
        "importance_words": pa.array(words, pa.int32()),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def test_thresholds_and_quantiles_compare_the_weight_per_word() -> None:
    settings = config(min_importance={"books": 0.25}, min_quantile={"books": 0.5})
    (cutoff,) = IMPORTANCE.quantiles(settings)
    checks = IMPORTANCE.checks(settings, {}, {cutoff.name: {"en": 0.5}})
    batch = batch_of([0.25, 0.2499, 0.5, 0.4999], [10] * 4)
    verdict = evaluate_checks(checks, batch)
    assert [check.reason for check in checks] == ["importance_low", "importance_quantile"]
    assert verdict.broken.tolist() == [[False, True, False, False], [True, True, False, True]]


def test_resampling_draws_in_proportion_to_the_weights() -> None:
    """Documents have odds 1 or e^2; the second kind is drawn as often as in sampling without replacement."""
    number, share = 4000, 0.75
    weights, words = [0.0, 1.0] * (number // 2), [2] * number
    settings = config(min_gumbel_quantile={"books": share})
    (setting,) = IMPORTANCE.quantiles(settings)
    batch = batch_of(weights, words)
    values = setting.value(batch)
    doc_ids = batch.column("doc_id").to_pylist()
    noise = gumbel_draws(uniform_draws(doc_ids, settings.seed, "books"))
    assert values == pytest.approx(np.array(weights) * 2 + noise)
    cutoff = quantile(count_bins(values, FINE), share, FINE)
    (check,) = IMPORTANCE.checks(settings, {}, {setting.name: {"en": cutoff}})
    kept = ~evaluate_checks([check], batch).broken[0]
    assert check.reason == "importance_resampled"
    assert kept.sum() == pytest.approx(number * (1 - share), abs=5)
    # expected: times t with a share exp(-w t) left of each kind until a quarter is drawn; then the kind's share drawn
    times = np.linspace(0, 5, 200_001)
    drawn = (1 - np.exp(-times) + 1 - np.exp(-math.exp(2) * times)) / 2
    expected = 1 - math.exp(-math.exp(2) * times[np.searchsorted(drawn, 1 - share)])
    assert kept[1::2].mean() == pytest.approx(expected, abs=0.03)


def test_resampling_compares_whole_weights_not_weights_per_word() -> None:
    value = IMPORTANCE.quantiles(config(min_gumbel_quantile={"books": 0.5}))[0].value
    short, long = value(batch_of([0.5], [10])), value(batch_of([0.5], [1000]))
    assert long - short == pytest.approx(0.5 * 990)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_importance": {"x": 0}}, r"min_importance\.x: expected a name in `models`, got 'x' \(valid: books\)"),
        ({"min_quantile": {"books": 1.0}}, r"min_quantile\.books: expected a share between 0 and 1, got 1\.0"),
        ({"min_gumbel_quantile": {"books": -1}}, r"min_gumbel_quantile\.books: expected a share between 0 and 1"),
        ({"seed": 4}, "seed would be ignored without min_gumbel_quantile"),
        ({"models": {}, "length_correction": True}, "length_correction would be ignored without models"),
    ],
)
def test_invalid_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    raw = {"importance": {"models": {"books": "books"}, **values}}
    with pytest.raises(ConfigError, match=message):
        build_recipe(raw, {"importance": ImportanceConfig}, "test")


def test_every_reason_is_a_declared_one() -> None:
    settings = config(min_importance={"books": 0}, min_quantile={"books": 0.1}, min_gumbel_quantile={"books": 0.1})
    assert {check.reason for check in IMPORTANCE.checks(settings, {}, {})} == set(IMPORTANCE.verdicts)


def write_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def trained(folder: Path, target: list[str], raw: list[str], **values: Any) -> dict[str, Any]:
    files = {
        name: {"files": [write_lines(folder / f"{name}.jsonl", texts)]}
        for name, texts in (("target", target), ("raw", raw))
    }
    store = ModelsConfig.model_validate({"cache": str(folder / "cache"), "offline": True})
    settings = TrainImportanceConfig.model_validate({**files, "name": "books", **values})
    return train_importance(settings, str(folder / "out"), models=store)


def test_training_counts_exactly_and_in_any_order(tmp_path: Path) -> None:
    target, raw = ["a b a", "d"], ["b c", "b"]
    first = trained(tmp_path, target, raw, buckets=BUCKETS, smoothing=0.5)["content"]
    first_bytes = (tmp_path / "out/books.arrow").read_bytes()
    second = trained(tmp_path, target[::-1], raw[::-1], buckets=BUCKETS, smoothing=0.5)["content"]
    assert (tmp_path / "out/books.arrow").read_bytes() == first_bytes
    assert first["model"] == second["model"]
    assert first["counted"] == {
        "target": {"documents": 2, "words": 4, "ngrams": 6, "empty_buckets": BUCKETS - 5},
        "raw": {"documents": 2, "words": 3, "ngrams": 4, "empty_buckets": BUCKETS - 3},
    }
    model = load_importance(str(tmp_path / "out/books.arrow"), "here")
    assert model.target.counts.tolist() == bag(*target).counts.tolist()
    assert model.raw.counts.tolist() == MODEL.raw.counts.tolist()
    assert (model.smoothing, model.max_n, model.target.mean_words, model.raw.mean_words) == (0.5, 2, 2.0, 1.5)
    store = ModelsConfig.model_validate({"cache": str(tmp_path / "cache"), "offline": True})
    assert ensure_model("books", store).sha256 == first["model"]["sha256"]


def test_training_without_words_or_without_raw_texts_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="expected texts with words in target, got none"):
        trained(tmp_path, ["..."], ["a"])
    with pytest.raises(ConfigError, match=r"expected texts in train_importance\.target and in .*raw, got none"):
        build_recipe(
            {"train_importance": {"target": {"files": ["x"]}}}, {"train_importance": TrainImportanceConfig}, "test"
        )


def test_a_model_of_another_kind_is_rejected(books: str) -> None:
    from pipeline.classifier.stage import CLASSIFIER, ClassifierConfig

    with pytest.raises(
        ConfigError, match=r"models\.x: expected a linear classifier model, got .*arrow of kind 'importance weights'"
    ):
        CLASSIFIER.make(ClassifierConfig(models={"x": "x"}), {"x": books})
