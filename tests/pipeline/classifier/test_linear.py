"""Tests of features, solver, linear model and metrics of classifiers, against values by hand or by brute force."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import xxhash

from pipeline.classifier.linear import (
    Examples,
    LinearModel,
    document_vector,
    fit_platt,
    fit_weights,
    hash_buckets,
    is_arrow,
    keys_of_row,
    load_linear,
    logistic,
    minimize,
    new_vocabulary,
    ngram_codes,
    read_model,
    save_linear,
    word_keys_of,
    write_model,
)
from pipeline.fit.classifier import auc, calibration, confusion, heldout_figures, kappa, precision_recall
from schemas.errors import ConfigError, ContractError

MASK = (1 << 64) - 1
FACTORS = (0xB7E151628AED2A6B, 0x243F6A8885A308D3, 0x6A09E667F3BCC909)


def keys(text: str) -> list[int]:
    return word_keys_of(text, new_vocabulary()).tolist()


def xx(*words: str) -> list[int]:
    return [xxhash.xxh64_intdigest(word.encode("utf-8", "surrogatepass")) for word in words]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \n\t", []),
        ("... !?", []),
        ("One", ["one"]),
        ("The CAT's 3.14 café,\nend", ["the", "cat", "s", "0", "cafe", "end"]),
        ("日本 語。", ["日", "本", "語"]),
        ("abc日def", ["abc", "日", "def"]),
        ("한국어 문장", None),
        ("\ud800 x", ["\ud800", "x"]),
    ],
)
def test_words_are_normalized_words_and_unspaced_characters(text: str, words: list[str] | None) -> None:
    assert keys(text) == xx(*words) if words is not None else len(keys(text)) == 2


def mixed(code: int) -> int:
    code = (code ^ code >> 30) * 0xBF58476D1CE4E5B9 & MASK
    code = (code ^ code >> 27) * 0x94D049BB133111EB & MASK
    return code ^ code >> 31


def test_codes_of_ngrams_do_not_change() -> None:
    """Model files depend on the codes: every change of the definition requires another FEATURES."""
    first, second, third = xx("a", "b", "c")
    words = np.array([first, second, third], np.uint64)
    singles = [mixed(key * FACTORS[0] & MASK) for key in (first, second, third)]
    pairs = [mixed((a * FACTORS[0] + b * FACTORS[1]) & MASK) for a, b in ((first, second), (second, third))]
    triple = mixed((first * FACTORS[0] + second * FACTORS[1] + third * FACTORS[2]) & MASK)
    assert ngram_codes(words, 1).tolist() == singles
    assert ngram_codes(words, 3).tolist() == [*singles, *pairs, triple]
    assert ngram_codes(words[:1], 3).tolist() == singles[:1]
    assert ngram_codes(words[:0], 3).tolist() == []
    assert hash_buckets(np.array(pairs, np.uint64), 10_000).tolist() == [(p >> 32) * 10_000 >> 32 for p in pairs]
    assert keys("a b c") == [first, second, third]
    assert first == 0xD24EC4F1A98C6E5B  # published: XXH64("a")


def test_buckets_fill_evenly_and_stay_in_range() -> None:
    codes = ngram_codes(np.array(xx(*(f"w{i}" for i in range(20_000))), np.uint64), 1)
    counts = np.bincount(hash_buckets(codes, 100), minlength=100)
    assert len(counts) == 100
    assert abs(counts - 200).max() < 5 * math.sqrt(200)
    assert hash_buckets(np.array([0, MASK], np.uint64), 7).tolist() == [0, 6]


def test_keys_of_a_row_are_computed_once() -> None:
    row = {"_body": "a b"}
    first = keys_of_row(row, new_vocabulary())
    row["_body"] = "other"
    assert keys_of_row(row, new_vocabulary()) is first


def test_the_vector_has_length_one_and_dampened_counts() -> None:
    buckets, values = document_vector(np.array(xx("a", "a", "a", "b"), np.uint64), 1 << 20, 1)
    assert len(buckets) == 2
    norm = math.hypot(1 + math.log(3), 1)
    assert sorted(values.tolist()) == pytest.approx([1 / norm, (1 + math.log(3)) / norm])
    assert [array.tolist() for array in document_vector(np.zeros(0, np.uint64), 8, 2)] == [[], []]


def test_a_probability_by_hand() -> None:
    words = np.array(xx("a", "b"), np.uint64)
    first, second = hash_buckets(ngram_codes(words, 1), 64).tolist()
    assert first != second
    weights = np.zeros(64, np.float32)
    weights[first], weights[second] = 3.0, -1.0
    model = LinearModel(weights, 1, 2.0, 0.5)
    assert model.margin(words) == pytest.approx((3 - 1) / math.sqrt(2))
    assert model.probability(words) == pytest.approx(1 / (1 + math.exp(-(2 * math.sqrt(2) + 0.5))))
    assert model.probability(words[:0]) == pytest.approx(1 / (1 + math.exp(-0.5)))  # no words: the intercept alone


def test_logistic_does_not_overflow() -> None:
    assert logistic(np.array([-1000.0, 0.0, 1000.0])).tolist() == [0.0, 0.5, 1.0]


def test_the_solver_finds_a_known_minimum() -> None:
    scale = np.array([1.0, 10.0, 100.0])

    def bowl(point: np.ndarray) -> tuple[float, np.ndarray]:
        offset = point - np.array([1.0, -2.0, 3.0])
        return float((scale * offset**2).sum()) / 2, scale * offset

    minimum = minimize(bowl, np.zeros(3), 1e-9, 100)
    assert minimum.point == pytest.approx([1, -2, 3], abs=1e-8)
    assert minimum.gradient <= 1e-9
    assert minimize(bowl, np.zeros(3), 1e-9, 2).steps == 2
    assert minimize(bowl, np.array([1.0, -2.0, 3.0]), 1e-9, 100).steps == 0


def test_weights_match_scipys_minimum_and_are_the_same_bits_twice() -> None:
    from scipy import optimize

    random = np.random.default_rng(3)
    examples = Examples(256, 1)
    for label in random.random(80) < 0.5:
        words = random.integers(0, 40, 30) + 10 * label
        examples.add(np.array(xx(*map(str, words)), np.uint64), bool(label))
    weights, minimum = fit_weights(examples, 1e-2)
    repeated, _ = fit_weights(examples, 1e-2)
    assert weights.tobytes() == repeated.tobytes()

    dense = examples.matrix(np.arange(256)).toarray()
    signs = np.where(examples.labels, 1.0, -1.0)

    def loss(point: np.ndarray) -> float:
        margins = signs * (dense @ point[:-1] + point[-1])
        return np.logaddexp(0, -margins).mean() + 1e-2 / 2 * point[:-1] @ point[:-1]

    oracle = optimize.minimize(loss, np.zeros(257), method="BFGS", options={"maxiter": 60})
    assert minimum.value <= oracle.fun + 1e-7
    assert weights == pytest.approx(oracle.x[:-1], abs=5e-3)


def test_a_line_through_overlapping_margins_and_through_separable_ones() -> None:
    # margins in {-1, 1}; 3 of 4 on each side agree: targets are smoothed, so the odds at 1 are below 3
    margins = [1.0] * 4 + [-1.0] * 4
    labels = [True, True, True, False, False, False, False, True]
    scale, offset = fit_platt(margins, labels)
    high, low = 5 / 6, 1 / 6
    expected = (3 * high + low) / 4
    assert offset == pytest.approx(0, abs=1e-9)
    assert scale == pytest.approx(math.log(expected / (1 - expected)), abs=1e-6)
    scale, offset = fit_platt([2.0, 3.0, -2.0], [True, True, False])
    assert math.isfinite(scale)
    assert scale > 0


def test_a_model_file_is_equal_for_equal_models_and_mapped(tmp_path: Path) -> None:
    model = LinearModel(np.arange(300, dtype=np.float32), 2, 1.5, -0.25)
    for name in "ab":
        save_linear(model, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = load_linear(str(tmp_path / "a"), "here")
    assert (loaded.max_n, loaded.scale, loaded.offset) == (2, 1.5, -0.25)
    assert loaded.weights.tolist() == model.weights.tolist()
    assert not loaded.weights.flags.writeable  # mapped, not read
    assert is_arrow(str(tmp_path / "a"))


def test_files_that_are_not_models(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(b"ARROW1 and then nothing of the kind")
    expected = "there: expected a linear classifier model, got"
    with pytest.raises(ConfigError, match=rf"{expected} .*x\.arrow, which is not one \(.*\)\. Set there to"):
        load_linear(str(path), "there")
    write_model(path, "importance weights", {}, {"weight": np.zeros(2, np.float32)})
    with pytest.raises(ConfigError, match=rf"{expected} .*x\.arrow of kind 'importance weights'\. Set there to"):
        load_linear(str(path), "there")
    import pyarrow as pa

    metadata = {b"penstock": json.dumps({"kind": "linear classifier", "features": 99}).encode()}
    schema = pa.schema([("weight", pa.float32())], metadata=metadata)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([1.0], pa.float32())], schema=schema))
    with pytest.raises(
        ConfigError, match=r"expected a model with features of version 1, got 99 in .*x\.arrow\. Train the model again"
    ):
        read_model(str(path), "linear classifier", "there")


def brute_auc(scores: list[float], labels: list[bool]) -> float:
    good = [s for s, label in zip(scores, labels) if label]
    bad = [s for s, label in zip(scores, labels) if not label]
    won = sum((g > b) + (g == b) / 2 for g, b in itertools.product(good, bad))
    return won / (len(good) * len(bad))


def test_auc_is_the_share_of_won_pairs() -> None:
    random = np.random.default_rng(0)
    for levels in (2, 5, 1000):
        scores = random.integers(0, levels, 200) / levels
        labels = random.random(200) < 0.3
        assert auc(scores, labels) == pytest.approx(brute_auc(scores.tolist(), labels.tolist()), abs=1e-12)
    assert auc(np.array([0.1, 0.2, 0.2, 0.9]), np.array([False, True, False, True])) == 3.5 / 4
    with pytest.raises(ContractError, match=r"expected documents of two classes, got 2 good and 0 bad\. Add"):
        auc(np.zeros(2), np.ones(2, bool))


def test_counts_precision_recall_and_kappa_by_hand() -> None:
    labels = np.array([1, 1, 1, 0, 0, 0, 0, 0], bool)
    kept = np.array([1, 1, 0, 1, 0, 0, 0, 0], bool)
    assert confusion(kept, labels) == {"good_kept": 2, "good_dropped": 1, "bad_kept": 1, "bad_dropped": 4}
    assert precision_recall(kept, labels) == {"precision": 2 / 3, "recall": 2 / 3}
    # agreement 6/8; by chance (3 x 3 + 5 x 5) / 64 = 34/64
    assert kappa(kept, labels) == pytest.approx((6 / 8 - 34 / 64) / (1 - 34 / 64))
    assert precision_recall(np.zeros(8, bool), labels) == {"precision": None, "recall": 0.0}
    assert kappa(np.ones(8, bool), np.ones(8, bool)) is None
    assert kappa(labels, labels) == 1.0


def test_calibration_bins_by_hand() -> None:
    probabilities = np.array([0.0, 0.05, 0.1, 0.95, 1.0, 0.95])
    labels = np.array([0, 1, 0, 1, 1, 0], bool)
    metrics = calibration(probabilities, labels)
    assert [(b["from"], b["documents"], b["good_share"]) for b in metrics["bins"]] == [
        (0.0, 2, 0.5),
        (0.1, 1, 0.0),
        (0.9, 3, 2 / 3),
    ]
    assert [b["mean_probability"] for b in metrics["bins"]] == pytest.approx([0.025, 0.1, 2.9 / 3])
    assert metrics["expected_calibration_error"] == pytest.approx((2 * 0.475 + 0.1 + 3 * 0.3) / 6)
    assert metrics["brier"] == pytest.approx((0 + 0.95**2 + 0.1**2 + 0.05**2 + 0 + 0.95**2) / 6)


def test_figures_do_not_depend_on_the_order_of_documents() -> None:
    random = np.random.default_rng(1)
    probabilities, labels = random.random(500), random.random(500) < 0.5
    order = random.permutation(500)
    assert heldout_figures(probabilities, labels) == heldout_figures(probabilities[order], labels[order])
