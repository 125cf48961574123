"""A linear classifier over hashed word n-grams: logistic regression, deterministic, one memory-mappable file.

A document is the unit vector of 1 + ln(count) over the buckets of its n-grams; the probability is the logistic function
of a line (Platt 1999) in its product with the weights, both fitted on documents that the other has not seen.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.engine.stage import Row
from pipeline.text.spacy_tokens import UNSPACED
from pipeline.text.words import Codes, Vocabulary
from schemas.errors import ConfigError
from schemas.ids import canonical_json

# Features of a text for hashed models: keys of its words, and the buckets that its word n-grams fall into.
#
# Words are the normal words of `languages/words.py` (lower case, numbers as 0, no punctuation, no accents), so a
# model sees what is said and not how it is set. Characters of scripts that do not separate words are words of their
# own. Model files carry FEATURES: whoever changes what a text's buckets are gives it another number.

FEATURES = 1
"""Version of the definition in this module."""
MAX_NGRAM = 3

Buckets = npt.NDArray[np.int64]

_UNSPACED = re.compile(f"[{UNSPACED}]")
_FIRST_UNSPACED = 0x0E00
# odd 64-bit numbers, one for each place in an n-gram: the first digits of the fractional parts of e, pi and sqrt(2)
_PLACES = np.array([0xB7E151628AED2A6B, 0x243F6A8885A308D3, 0x6A09E667F3BCC909], np.uint64)


def new_vocabulary() -> Vocabulary:
    """A vocabulary that is asked for the keys of words alone."""
    return Vocabulary(str.split)


def word_keys_of(text: str, vocabulary: Vocabulary) -> Codes:
    """The 64-bit key of each word of the text, in order."""
    vocabulary.trim()
    if not text.isascii() and _highest(text) >= _FIRST_UNSPACED:
        text = _UNSPACED.sub(r" \g<0> ", text)
    return vocabulary.keys(vocabulary.numbers(text.split()))


def _highest(text: str) -> int:
    # an eighth of the time that the expression takes to look at every character of a Latin text
    return int(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).max())


def keys_of_row(row: Row, vocabulary: Vocabulary) -> Codes:
    """The word keys of the row's text after cuts, taken once however many models ask."""
    keys: Codes | None = row.get("_word_keys")
    if keys is None:
        keys = row["_word_keys"] = word_keys_of(row["_body"], vocabulary)
    return keys


def ngram_codes(keys: Codes, max_n: int) -> Codes:
    """The 64-bit codes of all runs of 1 to `max_n` words, single words first."""
    orders = []
    for n in range(1, min(max_n, len(keys)) + 1):
        total = np.zeros(len(keys) - n + 1, np.uint64)
        for place in range(n):
            total += keys[place : len(keys) - n + 1 + place] * _PLACES[place]
        orders.append(_mixed(total))
    return np.concatenate(orders) if orders else np.zeros(0, np.uint64)


def _mixed(codes: Codes) -> Codes:
    # the high bits choose the bucket, so every bit must reach them. Source: Stafford 2011, variant 13 of MurmurHash3
    codes = (codes ^ (codes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    codes = (codes ^ (codes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return codes ^ (codes >> np.uint64(31))


def hash_buckets(codes: Codes, num_buckets: int) -> Buckets:
    """The bucket of each code, 0 to num_buckets - 1; at most 2^32 buckets."""
    high = codes >> np.uint64(32)
    return ((high * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.int64)


# Files of hashed models: one Arrow IPC file, memory-mappable, whose schema says what the numbers mean.
#
# Metadata keys stand in a fixed order and values are canonical JSON, so equal models are equal bytes.

ARROW_MAGIC = b"ARROW1"
_KEY = b"penstock"


def write_model(path: Path, kind: str, header: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a model of this kind: one row for each bucket."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    metadata = {_KEY: canonical_json({"kind": kind, "features": FEATURES, **header})}
    schema = pa.schema([(name, array.type) for name, array in arrays.items()], metadata=metadata)
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)


def read_model(path: str, kind: str, where: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Header and columns, mapped into memory. Raises ConfigError if the file is no model of this kind and version."""
    try:
        with pa.memory_map(path) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        header = json.loads(batch.schema.metadata[_KEY])
        columns = {name: batch.column(name).to_numpy() for name in batch.schema.names}
    except (pa.ArrowException, KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{where}: expected a {kind} model, got a file that is none ({error}): {path}") from error
    if header.get("kind") != kind:
        raise ConfigError(f"{where}: expected a {kind} model, got one of kind {header.get('kind')!r}: {path}")
    if header.get("features") != FEATURES:
        raise ConfigError(
            f"{where}: expected a model of features {FEATURES}, got {header.get('features')}. Train again: {path}."
        )
    return header, columns


def is_arrow(path: str) -> bool:
    """Whether a file begins as an Arrow IPC file does."""
    with open(path, "rb") as stream:
        return stream.read(len(ARROW_MAGIC)) == ARROW_MAGIC


# L-BFGS for smooth convex functions, in numpy sums of fixed order: the same input gives the same bits.
#
# Library versions call BLAS, whose sums change with the number of threads. Source: Nocedal & Wright 2006, "Numerical
# Optimization", algorithms 7.4 (two-loop recursion) and 3.1 (backtracking).

Vector = npt.NDArray[np.float64]
Objective = Callable[[Vector], tuple[float, Vector]]
"""(point) → value and gradient."""

MEMORY = 10
ARMIJO_SHARE = 1e-4
MAX_HALVINGS = 40
CURVATURE = 1e-12


@dataclass(frozen=True)
class Minimum:
    """Where the search ended."""

    point: Vector
    value: float
    gradient: float
    """Largest absolute component of the gradient there."""
    steps: int


def dot(left: Vector, right: Vector) -> float:
    """The inner product, summed in numpy's own order and never by BLAS."""
    return float(np.add.reduce(left * right))


def minimize(objective: Objective, start: Vector, tolerance: float, max_steps: int) -> Minimum:
    """The minimum of a convex function: steps until no component of the gradient exceeds the tolerance."""
    point = start
    value, gradient = objective(point)
    pairs: deque[tuple[Vector, Vector, float]] = deque(maxlen=MEMORY)
    steps = 0
    while steps < max_steps and np.abs(gradient).max(initial=0.0) > tolerance:
        direction = -_inverse_hessian_times(gradient, pairs)
        slope = dot(direction, gradient)
        length = 1.0 if pairs else 1.0 / max(1.0, dot(gradient, gradient) ** 0.5)
        for _ in range(MAX_HALVINGS):
            new_point = point + length * direction
            new_value, new_gradient = objective(new_point)
            if new_value <= value + ARMIJO_SHARE * length * slope:
                break
            length /= 2
        else:
            break  # no descent left that floating point can see
        moved, turned = new_point - point, new_gradient - gradient
        curvature = dot(moved, turned)
        if curvature > CURVATURE * dot(turned, turned):
            pairs.append((moved, turned, 1.0 / curvature))
        point, value, gradient = new_point, new_value, new_gradient
        steps += 1
    return Minimum(point, value, float(np.abs(gradient).max(initial=0.0)), steps)


def _inverse_hessian_times(gradient: Vector, pairs: deque[tuple[Vector, Vector, float]]) -> Vector:
    result = gradient
    factors = []
    for moved, turned, inverse in reversed(pairs):
        factor = inverse * dot(moved, result)
        factors.append(factor)
        result = result - factor * turned
    if pairs:
        moved, turned, inverse = pairs[-1]
        result = result / (inverse * dot(turned, turned))
    for (moved, turned, inverse), factor in zip(pairs, reversed(factors)):
        result = result + moved * (factor - inverse * dot(turned, result))
    return result


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KIND = "linear classifier"
TOLERANCE = 1e-6
"""Of the gradient of the mean loss: margins are then far closer to their limits than the figures that are printed."""
MAX_STEPS = 500


def document_vector(keys: Codes, num_buckets: int, max_n: int) -> tuple[Ints, Floats]:
    """The buckets of a document's n-grams, ascending, and its values there; of length 1, or empty."""
    buckets, counts = np.unique(hash_buckets(ngram_codes(keys, max_n), num_buckets), return_counts=True)
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
        buckets, values = document_vector(keys, len(self.weights), self.max_n)
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
        buckets, values = document_vector(keys, self.num_buckets, self.max_n)
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

    found = minimize(loss, np.zeros(len(columns) + 1), TOLERANCE, MAX_STEPS)
    weights = np.zeros(examples.num_buckets, np.float32)
    weights[columns] = found.point[:-1].astype(np.float32)
    return weights, found


def fit_platt(margins: Iterable[float], labels: Iterable[bool]) -> tuple[float, float]:
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

    found = minimize(loss, np.array([1.0, 0.0]), 1e-10, MAX_STEPS)
    return float(found.point[0]), float(found.point[1])
