"""Repeated nested cross-validation of a classifier: probabilities of texts that the model was not trained on.

Each text is measured once in a repetition. Its model's penalty and calibration are chosen by an inner cross-validation
of the other folds, so nothing is chosen on the texts that are measured. Folds follow from the hashes of the texts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.classifier.linear import fit_platt, logistic
from schemas.ids import shuffle_key

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

Margins = Callable[[Ints, Ints, float], Floats]
"""Function (training texts, other texts, l2) that trains a model on the former and returns the margins of the latter.
Texts are given by number."""


@dataclass(frozen=True)
class Folds:
    """How texts are divided: each class is shuffled by hash and dealt out to the folds in turn."""

    digests: Sequence[bytes]
    """Hash of each text."""
    labels: Labels
    num: int
    """Number of folds, at least 2."""
    seed: int

    def of(self, texts: Ints, repeat: int, level: bytes) -> Ints:
        """Return the fold of each of the texts, 0 to num - 1. `level` separates inner from outer divisions."""
        prefix = level + repeat.to_bytes(4, "big")
        keys = [(shuffle_key(self.seed, prefix + self.digests[text]), self.digests[text]) for text in texts]
        fold = np.zeros(len(texts), np.int64)
        for label in (False, True):
            members = sorted(np.flatnonzero(self.labels[texts] == label).tolist(), key=lambda place: keys[place])
            fold[members] = np.arange(len(members)) % self.num
        return fold


@dataclass(frozen=True)
class Choice:
    """The penalty with the lowest loss in a cross-validation, and the calibration of its margins."""

    l2: float
    scale: float
    offset: float
    loss: float
    """Mean logistic loss of the calibrated margins."""


def choose(margins: Margins, folds: Folds, texts: Ints, l2s: Sequence[float], repeat: int) -> Choice:
    """Return the best of the penalties by one cross-validation of the texts; the first one of equals."""
    fold = folds.of(texts, repeat, b"inner")
    labels = folds.labels[texts]
    choices = []
    for l2 in l2s:
        margin = np.zeros(len(texts))
        for number in range(folds.num):
            inside = fold == number
            margin[inside] = margins(texts[~inside], texts[inside], l2)
        scale, offset = fit_platt(margin.tolist(), labels.tolist())
        logits = np.where(labels, 1.0, -1.0) * (scale * margin + offset)
        choices.append(Choice(l2, scale, offset, float(np.add.reduce(np.logaddexp(0.0, -logits))) / len(texts)))
    return min(choices, key=lambda choice: choice.loss)


@dataclass(frozen=True)
class CrossValidated:
    """The result of a nested cross-validation."""

    probabilities: Floats
    """Probability of the good class; shape (repetitions, texts)."""
    chosen: Counter[float] = field(default_factory=Counter)
    """How often each penalty was chosen."""


def cross_validate(margins: Margins, folds: Folds, l2s: Sequence[float], repeats: int) -> CrossValidated:
    """Return the probability of each text by models that were trained, chosen and calibrated without it."""
    texts = np.arange(len(folds.labels))
    result = CrossValidated(np.zeros((repeats, len(texts))))
    for repeat in range(repeats):
        fold = folds.of(texts, repeat, b"outer")
        for number in range(folds.num):
            train, held_out = texts[fold != number], texts[fold == number]
            choice = choose(margins, folds, train, l2s, repeat)
            result.chosen[choice.l2] += 1
            margin = margins(train, held_out, choice.l2)
            result.probabilities[repeat, held_out] = logistic(choice.scale * margin + choice.offset)
    return result


def bootstrap_interval(measure: Callable[[Ints], float | None], num: int, samples: int = 1_000) -> tuple[float, float]:
    """Return the 95 % interval of a metric: its quantiles .025 and .975 over bootstrap samples of `num` documents.

    `measure` takes the numbers of the sampled documents. Samples for which it returns None are left out.
    """
    chooser = np.random.default_rng(0)
    drawn = [measure(chooser.integers(0, num, num)) for _ in range(samples)]
    low, high = np.quantile([value for value in drawn if value is not None], [0.025, 0.975])
    return float(low), float(high)
