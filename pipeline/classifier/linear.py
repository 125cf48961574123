"""A linear classifier over hashed word n-grams: logistic regression, deterministic, one memory-mappable file.

A document is the unit vector of 1 + ln(count) over the buckets of its n-grams; the probability is the logistic function
of a line (Platt 1999) in its product with the weights, both fitted on documents that the other has not seen.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.classifier.features import buckets_of, ngram_codes
from pipeline.classifier.model_file import read_model, write_model
from pipeline.classifier.solver import Minimum, dot, minimise
from pipeline.text.words import Codes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KIND = "linear classifier"
TOLERANCE = 1e-6
"""Of the gradient of the mean loss: margins are then far closer to their limits than the figures that are printed."""
MAX_STEPS = 500


def vector_of(keys: Codes, num_buckets: int, max_n: int) -> tuple[Ints, Floats]:
    """The buckets of a document's n-grams, ascending, and its values there; of length 1, or empty."""
    buckets, counts = np.unique(buckets_of(ngram_codes(keys, max_n), num_buckets), return_counts=True)
    values = 1.0 + np.log(counts)
    return buckets, values / np.sqrt(np.add.reduce(values * values)) if len(values) else values


@dataclass(frozen=True)
class LinearModel:
    """A trained classifier."""

    weights: npt.NDArray[np.float32]
    """(buckets,)"""
    max_n: int
    """Longest n-gram [words]."""
    scale: float
    offset: float
    """The probability is logistic(scale * margin + offset)."""

    def margin(self, keys: Codes) -> float:
        """The product of the weights with the document's vector; 0 for a text without words."""
        buckets, values = vector_of(keys, len(self.weights), self.max_n)
        return float(np.add.reduce(self.weights[buckets] * values))

    def probability(self, keys: Codes) -> float:
        """The probability of the good class, given the mix of classes it was trained on."""
        return float(logistic(np.array([self.scale * self.margin(keys) + self.offset]))[0])


def logistic(logits: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


def save_linear(model: LinearModel, path: Path) -> None:
    """Write the model; equal models give equal bytes."""
    header = {"max_n": model.max_n, "scale": model.scale, "offset": model.offset}
    write_model(path, KIND, header, {"weight": model.weights})


def load_linear(path: str, where: str) -> LinearModel:
    """The model in a file, its weights mapped into memory. Raises ConfigError if it is none."""
    header, columns = read_model(path, KIND, where)
    return LinearModel(columns["weight"], header["max_n"], header["scale"], header["offset"])


class Examples:
    """Documents as sparse vectors, gathered one by one; text is not kept."""

    def __init__(self, num_buckets: int, max_n: int):
        self.num_buckets, self.max_n = num_buckets, max_n
        self._buckets: list[npt.NDArray[np.int32]] = []
        self._values: list[npt.NDArray[np.float32]] = []
        self.labels: list[bool] = []

    def add(self, keys: Codes, label: bool) -> None:
        """Gather one document."""
        buckets, values = vector_of(keys, self.num_buckets, self.max_n)
        self._buckets.append(buckets.astype(np.int32))
        self._values.append(values.astype(np.float32))
        self.labels.append(label)

    def columns(self) -> Ints:
        """The buckets that occur, ascending."""
        seen = np.zeros(self.num_buckets, bool)
        for buckets in self._buckets:
            seen[buckets] = True
        return np.flatnonzero(seen)

    def matrix(self, columns: Ints) -> Any:
        """(documents, len(columns)) scipy CSR matrix over these buckets."""
        from scipy.sparse import csr_matrix

        place = np.zeros(self.num_buckets, np.int32)
        place[columns] = np.arange(len(columns), dtype=np.int32)
        ends = np.cumsum([0, *map(len, self._buckets)])
        indices = place[np.concatenate(self._buckets)]
        values = np.concatenate(self._values).astype(np.float64)
        return csr_matrix((values, indices, ends), shape=(len(self._buckets), len(columns)))


def fit_weights(examples: Examples, l2: float) -> tuple[npt.NDArray[np.float32], Minimum]:
    """The weights (buckets,) of least mean logistic loss + l2 / 2 |weights|^2, an unpenalised intercept beside them.

    The intercept is left to calibration, which fits its own.
    """
    columns = examples.columns()
    matrix = examples.matrix(columns)
    transposed = matrix.T  # a view, no copy
    signs = np.where(np.array(examples.labels), 1.0, -1.0)

    def loss(point: Floats) -> tuple[float, Floats]:
        weights, intercept = point[:-1], point[-1]
        margins = signs * (matrix @ weights + intercept)
        slopes = -signs * logistic(-margins) / len(signs)
        value = float(np.add.reduce(np.logaddexp(0.0, -margins))) / len(signs) + l2 / 2 * dot(weights, weights)
        gradient = np.append(transposed @ slopes + l2 * weights, np.add.reduce(slopes))
        return value, gradient

    found = minimise(loss, np.zeros(len(columns) + 1), TOLERANCE, MAX_STEPS)
    weights = np.zeros(examples.num_buckets, np.float32)
    weights[columns] = found.point[:-1].astype(np.float32)
    return weights, found


def fit_line(margins: Iterable[float], labels: Iterable[bool]) -> tuple[float, float]:
    """Scale and offset that make logistic(scale * margin + offset) fit the labels best.

    Targets are those of Platt 1999: (good + 1) / (good + 2) and 1 / (bad + 2), so separable margins stay finite.
    """
    margin, label = np.array(list(margins), np.float64), np.array(list(labels), bool)
    good = int(label.sum())
    targets = np.where(label, (good + 1) / (good + 2), 1 / (len(label) - good + 2))

    def loss(point: Floats) -> tuple[float, Floats]:
        logits = point[0] * margin + point[1]
        value = np.add.reduce(np.logaddexp(0.0, logits) - targets * logits) / len(label)
        slopes = (logistic(logits) - targets) / len(label)
        return float(value), np.array([dot(slopes, margin), float(np.add.reduce(slopes))])

    found = minimise(loss, np.array([1.0, 0.0]), 1e-10, MAX_STEPS)
    return float(found.point[0]), float(found.point[1])
