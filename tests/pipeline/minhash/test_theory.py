"""Tests of MinHash against theory: bias, variance and band collisions at known similarities, and datasketch."""

from functools import partial

import numpy as np
import pytest
from datasketch import MinHash

from pipeline.minhash.stage import FAMILIES, SignatureConfig, anchor, as_matrix, band_keys, signature, similarity

TRIALS = {20: 1500, 100: 1500, 700: 600, 5000: 100}
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
CONFIGS = [SignatureConfig(family=family) for family in ("fast", "datasketch", "datatrove")]


def sets(level: float, size: int, trials: int) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Return pairs of sets of shingle hashes with `size` members in their union, and their Jaccard similarity."""
    unions = np.random.default_rng([size, round(100 * level)]).integers(0, 1 << 64, (trials, size), dtype=np.uint64)
    shared = round(level * size)
    middle = shared + (size - shared) // 2
    right = [np.concatenate([union[:shared], union[middle:]]) for union in unions]
    return [union[:middle] for union in unions], right, shared / size


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
@pytest.mark.parametrize("size", TRIALS)
def test_estimates_and_collisions_follow_theory(size: int, config: SignatureConfig) -> None:
    trials = TRIALS[size] if config.family == "fast" else TRIALS[size] // 5
    sketch = partial(FAMILIES[config.family].sketch, config=config)
    squares = []
    for level in LEVELS:
        left, right, true = sets(level, size, trials)
        first, second = np.array([*map(sketch, left)]), np.array([*map(sketch, right)])
        errors = similarity(first, second) - true
        variance = true * (1 - true) / 112
        assert abs(errors.mean()) < 4 * (variance / trials) ** 0.5
        squares.append((errors**2).mean() / variance)
        for bands, rows in ((14, 8), (20, 5), (9, 12)):
            expected = 1 - (1 - true**rows) ** bands
            measured = (band_keys(first, bands, rows) == band_keys(second, bands, rows)).any(axis=1).mean()
            assert abs(measured - expected) < 4 * (expected * (1 - expected) / trials) ** 0.5 + 2 / trials
    # of a chi-squared variable with one degree of freedom a trial
    assert np.mean(squares) == pytest.approx(1, abs=4 * (2 / trials / len(LEVELS)) ** 0.5)


def test_no_worse_than_datasketch_on_the_same_sets() -> None:
    config = SignatureConfig()
    ours, theirs, trials = [], [], 100
    for size in (20, 100, 700):
        for level in (0.3, 0.5, 0.7, 0.85):
            left, right, true = sets(level, size, trials)
            scale = (true * (1 - true) / 112) ** 0.5
            for pair in zip(left, right):
                values = np.array([FAMILIES["fast"].sketch(hashes, config) for hashes in pair])
                sketches = [MinHash(num_perm=112, hashfunc=int) for _ in pair]
                for made, hashes in zip(sketches, pair):
                    made.update_batch((hashes >> np.uint64(32)).tolist())
                ours.append((float(similarity(values[:1], values[1:])[0]) - true) / scale)
                theirs.append((sketches[0].jaccard(sketches[1]) - true) / scale)
    assert abs(np.mean(ours)) < 4 / len(ours) ** 0.5
    assert abs(np.mean(theirs)) < 4 / len(theirs) ** 0.5
    assert np.mean(np.square(ours)) < np.mean(np.square(theirs)) + 4 * (4 / len(ours)) ** 0.5


def test_estimates_from_texts_are_not_biased() -> None:
    generator, config = np.random.default_rng(3), SignatureConfig()
    words = np.array([a + b + c for a in "bcdfghjklmnp" for b in "aeiouy" for c in "bdfgklmnprst"])
    errors = []
    for _ in range(300):
        base = generator.choice(words, 300)
        changed = base.copy()
        changed[generator.choice(300, 12, replace=False)] = "new"
        runs = [{" ".join(text[i : i + 5]) for i in range(296)} for text in (base, changed)]
        true = len(runs[0] & runs[1]) / len(runs[0] | runs[1])
        mine = as_matrix([signature(" ".join(text), "en", config) for text in (base, changed)])
        errors.append((float(similarity(mine[:1], mine[1:])[0]) - true) / (true * (1 - true) / 112) ** 0.5)
    assert abs(np.mean(errors)) < 4 / 300**0.5
    assert np.mean(np.square(errors)) == pytest.approx(1, abs=4 * (2 / 300) ** 0.5)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.85])
def test_anchors_are_shared_with_the_probability_of_the_similarity(level: float) -> None:
    left, right, true = sets(level, 100, 4000)
    shared = np.array([anchor(first, 1) == anchor(second, 1) for first, second in zip(left, right)])
    assert abs(shared.mean() - true) < 4 * (true * (1 - true) / 4000) ** 0.5


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
def test_an_anchor_is_independent_of_the_signature(config: SignatureConfig) -> None:
    left, right, true = sets(0.7, 60, 1500)
    sketch = partial(FAMILIES[config.family].sketch, config=config)
    estimates = similarity(np.array([*map(sketch, left)]), np.array([*map(sketch, right)]))
    shared = np.array([anchor(first, config.seed) == anchor(second, config.seed) for first, second in zip(left, right)])
    assert abs(np.corrcoef(estimates, shared)[0, 1]) < 4 / 1500**0.5
    error = (true * (1 - true) / 112 * (1 / shared.sum() + 1 / (~shared).sum())) ** 0.5
    assert abs(estimates[shared].mean() - estimates[~shared].mean()) < 4 * error
