"""A linear classifier over hashed word n-grams: features, model files, L-BFGS, training and calibration.

A document is the unit vector of 1 + ln(count) over the hash buckets of its n-grams. Its margin is the product of that
vector with the weights of a logistic regression; Platt scaling (Platt 1999) maps the margin to a probability. Weights
and calibration are fitted on disjoint documents. Training is deterministic: the same input gives the same bytes.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from pipeline.engine.stage import Row
from pipeline.text.spacy_tokens import UNSPACED
from pipeline.text.words import Codes, Vocabulary, normal_words
from schemas.errors import ConfigError
from schemas.ids import canonical_json

# Features of a text: 64-bit keys of its words, and the hash buckets of its word n-grams.
#
# Words are the normalized words of `pipeline/text/words.py` (lower case, numbers as 0, no punctuation, no accents), so
# a model depends on the words and not on their formatting. Each character of a script without spaces between words is
# one word. FEATURES is stored in model files: increase it with every change that gives a text other hash buckets.

FEATURES = 1
"""Version of the computation of features, stored in every model file."""
MAX_NGRAM = 3
"""Maximum length of an n-gram [words]."""

Buckets = npt.NDArray[np.int64]

_UNSPACED = re.compile(f"[{UNSPACED}]")
_FIRST_UNSPACED = 0x0E00
# odd 64-bit factors, one for each position in an n-gram: the first digits of the fractional parts of e, pi and sqrt(2)
_POSITION_FACTORS = np.array([0xB7E151628AED2A6B, 0x243F6A8885A308D3, 0x6A09E667F3BCC909], np.uint64)


def new_vocabulary() -> Vocabulary:
    """Return an empty cache of word keys."""
    return Vocabulary(str.split)


def word_keys_of(text: str, vocabulary: Vocabulary) -> Codes:
    """Return the xxh64 hash of each normalized word of the text, in order."""
    vocabulary.trim()
    if not text.isascii() and _highest(text) >= _FIRST_UNSPACED:
        text = _UNSPACED.sub(r" \g<0> ", text)
    return vocabulary.look_up(_read_features, vocabulary.numbers(text.split()))[1][0]


def _read_features(pieces: Sequence[str]) -> tuple[npt.NDArray[Any], ...]:
    """Return two arrays: the number of normalized words in each piece, and the xxh64 hash of each of these words."""
    words = [normal_words(piece) for piece in pieces]
    encoded = (word.encode("utf-8", "surrogatepass") for word in chain.from_iterable(words))
    hashes = np.fromiter(map(xxhash.xxh64_intdigest, encoded), np.uint64)
    return np.fromiter(map(len, words), np.int64, len(words)), hashes


def _highest(text: str) -> int:
    # takes an eighth of the time that the regular expression takes for every character of a Latin text
    return int(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).max())


def keys_of_row(row: Row, vocabulary: Vocabulary) -> Codes:
    """Return the word keys of the row's text after cuts. The first call stores them in the row."""
    keys: Codes | None = row.get("_word_keys")
    if keys is None:
        keys = row["_word_keys"] = word_keys_of(row["_body"], vocabulary)
    return keys


def ngram_codes(keys: Codes, max_n: int) -> Codes:
    """Return the 64-bit codes of all n-grams of 1 to `max_n` words, single words first."""
    orders = []
    for n in range(1, min(max_n, len(keys)) + 1):
        total = np.zeros(len(keys) - n + 1, np.uint64)
        for position in range(n):
            total += keys[position : len(keys) - n + 1 + position] * _POSITION_FACTORS[position]
        orders.append(_mixed(total))
    return np.concatenate(orders) if orders else np.zeros(0, np.uint64)


def _mixed(codes: Codes) -> Codes:
    # the high bits choose the bucket, so every bit must reach them. Source: Stafford 2011, variant 13 of MurmurHash3
    codes = (codes ^ (codes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    codes = (codes ^ (codes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return codes ^ (codes >> np.uint64(31))


def hash_buckets(codes: Codes, num_buckets: int) -> Buckets:
    """Return the hash bucket of each code, 0 to num_buckets - 1; num_buckets is at most 2^32."""
    high = codes >> np.uint64(32)
    return ((high * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.int64)


# Files of hashed models: a memory-mappable Arrow IPC file, whose schema metadata holds the model's kind and settings.
#
# Metadata keys have a fixed order and values are canonical JSON, so equal models have equal bytes.

ARROW_MAGIC = b"ARROW1"
_KEY = b"penstock"


def write_model(path: Path, kind: str, header: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a model file with one row for each bucket or signal; `kind` and `header` are stored in its metadata."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    metadata = {_KEY: canonical_json({"kind": kind, "features": FEATURES, **header})}
    schema = pa.schema([(name, array.type) for name, array in arrays.items()], metadata=metadata)
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)


def read_model(path: str, kind: str, where: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the header and the memory-mapped columns of a model file.

    Raises ConfigError if the file is not a model of this kind, or if its features have another version than FEATURES.
    """
    try:
        with pa.memory_map(path) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        header = json.loads(batch.schema.metadata[_KEY])
        columns = {name: batch.column(name).to_numpy() for name in batch.schema.names}
    except (pa.ArrowException, KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{where}: expected a {kind} model, got {path}, which is not one ({error}). "
            f"Set {where} to a file that `penstock train-classifier` or `penstock train-importance` wrote."
        ) from error
    if header.get("kind") != kind:
        raise ConfigError(
            f"{where}: expected a {kind} model, got {path} of kind {header.get('kind')!r}. "
            f"Set {where} to the name or path of a {kind} model."
        )
    if header.get("features") != FEATURES:
        raise ConfigError(
            f"{where}: expected a model with features of version {FEATURES}, got {header.get('features')} in {path}. "
            "Train the model again with `penstock train-classifier` or `penstock train-importance`."
        )
    return header, columns


def model_kind(path: str) -> str | None:
    """Return the kind in the header of an Arrow file; None if the file is no model."""
    try:
        with pa.memory_map(path) as source:
            metadata = pa.ipc.open_file(source).schema.metadata or {}
        return str(json.loads(metadata[_KEY])["kind"])
    except (pa.ArrowException, KeyError, TypeError, ValueError):
        return None


def is_arrow(path: str) -> bool:
    """Return True if a file starts with the magic bytes of Arrow IPC."""
    with open(path, "rb") as stream:
        return stream.read(len(ARROW_MAGIC)) == ARROW_MAGIC


# L-BFGS for smooth convex functions, with numpy sums of fixed order: the same input gives the same bits.
#
# Library implementations call BLAS, whose sums change with the number of threads. Source: Nocedal & Wright 2006,
# "Numerical Optimization", algorithms 7.4 (two-loop recursion) and 3.1 (backtracking).

Vector = npt.NDArray[np.float64]
Objective = Callable[[Vector], tuple[float, Vector]]
"""Function from a point to the objective's value and gradient there."""

MEMORY = 10
"""Number of the latest steps from which the Hessian is approximated."""
ARMIJO_SHARE = 1e-4
"""Minimum share of the linearly predicted decrease that a step must reach (Armijo condition)."""
MAX_HALVINGS = 40
"""Maximum number of halvings of a step in the line search."""
CURVATURE = 1e-12
"""Minimum relative curvature of a step that is used to approximate the Hessian."""


@dataclass(frozen=True)
class Minimum:
    """The result of a minimization: its last point, the value and gradient there, and the number of steps."""

    point: Vector
    value: float
    gradient: float
    """Largest absolute component of the gradient at the point."""
    steps: int


def dot(left: Vector, right: Vector) -> float:
    """Return the inner product of two vectors, summed in a fixed order by numpy and not by BLAS."""
    return float(np.add.reduce(left * right))


def minimize(objective: Objective, start: Vector, tolerance: float, max_steps: int) -> Minimum:
    """Minimize a convex function until no component of the gradient exceeds the tolerance, or max_steps is reached."""
    point = start
    value, gradient = objective(point)
    pairs: deque[tuple[Vector, Vector, float]] = deque(maxlen=MEMORY)
    steps = 0
    while steps < max_steps and np.abs(gradient).max(initial=0.0) > tolerance:
        direction = -_inverse_hessian_times(gradient, pairs)
        slope = dot(direction, gradient)
        step_size = 1.0 if pairs else 1.0 / max(1.0, dot(gradient, gradient) ** 0.5)
        for _ in range(MAX_HALVINGS):
            new_point = point + step_size * direction
            new_value, new_gradient = objective(new_point)
            if new_value <= value + ARMIJO_SHARE * step_size * slope:
                break
            step_size /= 2
        else:
            break  # no further decrease is possible in floating point
        step, gradient_change = new_point - point, new_gradient - gradient
        curvature = dot(step, gradient_change)
        if curvature > CURVATURE * dot(gradient_change, gradient_change):
            pairs.append((step, gradient_change, 1.0 / curvature))
        point, value, gradient = new_point, new_value, new_gradient
        steps += 1
    return Minimum(point, value, float(np.abs(gradient).max(initial=0.0)), steps)


def _inverse_hessian_times(gradient: Vector, pairs: deque[tuple[Vector, Vector, float]]) -> Vector:
    result = gradient
    factors = []
    for step, gradient_change, inverse in reversed(pairs):
        factor = inverse * dot(step, result)
        factors.append(factor)
        result = result - factor * gradient_change
    if pairs:
        step, gradient_change, inverse = pairs[-1]
        result = result / (inverse * dot(gradient_change, gradient_change))
    for (step, gradient_change, inverse), factor in zip(pairs, reversed(factors)):
        result = result + step * (factor - inverse * dot(gradient_change, result))
    return result


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KIND = "linear classifier"
TOLERANCE = 1e-6
"""Largest component of the mean loss's gradient at which training stops; margins are then more exact than printed."""
MAX_STEPS = 500
"""Maximum number of L-BFGS steps."""


def document_vector(keys: Codes, num_buckets: int, max_n: int) -> tuple[Ints, Floats]:
    """Return a document as a sparse unit vector: its hash buckets in ascending order, and the values there.

    Both are empty for a document without words.
    """
    buckets, counts = np.unique(hash_buckets(ngram_codes(keys, max_n), num_buckets), return_counts=True)
    values = 1.0 + np.log(counts)
    return buckets, values / np.sqrt(np.add.reduce(values * values)) if len(values) else values


@dataclass(frozen=True)
class LinearModel:
    """A trained linear classifier."""

    weights: npt.NDArray[np.float32]
    """Weight of each hash bucket; shape (buckets,)."""
    max_n: int
    """Longest n-gram [words]."""
    scale: float
    offset: float
    """The probability is logistic(scale * margin + offset)."""

    def margin(self, keys: Codes) -> float:
        """Return the inner product of the weights and the document's vector; 0 for a text without words."""
        buckets, values = document_vector(keys, len(self.weights), self.max_n)
        return float(np.add.reduce(self.weights[buckets] * values))

    def probability(self, keys: Codes) -> float:
        """Return the probability that a document is good.

        It assumes that good documents are as frequent as among the calibration texts.
        """
        return float(logistic(np.array([self.scale * self.margin(keys) + self.offset]))[0])


def logistic(logits: Floats) -> Floats:
    """Return 1 / (1 + exp(-x)), without overflow."""
    decay = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0 / (1.0 + decay), decay / (1.0 + decay))


def save_linear(model: LinearModel, path: Path) -> None:
    """Write the model to a file; equal models give equal bytes."""
    header = {"max_n": model.max_n, "scale": model.scale, "offset": model.offset}
    write_model(path, KIND, header, {"weight": model.weights})


def load_linear(path: str, where: str) -> LinearModel:
    """Read the model in a file, with memory-mapped weights. Raises ConfigError if the file is not a linear model."""
    header, columns = read_model(path, KIND, where)
    return LinearModel(columns["weight"], header["max_n"], header["scale"], header["offset"])


class Examples:
    """Labeled documents as sparse vectors, added one by one; their texts are not stored."""

    def __init__(self, num_buckets: int, max_n: int):
        self.num_buckets, self.max_n = num_buckets, max_n
        self._buckets: list[npt.NDArray[np.int32]] = []
        self._values: list[npt.NDArray[np.float32]] = []
        self.labels: list[bool] = []

    def add(self, keys: Codes, label: bool) -> None:
        """Add a document's vector and label."""
        buckets, values = document_vector(keys, self.num_buckets, self.max_n)
        self._buckets.append(buckets.astype(np.int32))
        self._values.append(values.astype(np.float32))
        self.labels.append(label)

    def columns(self) -> Ints:
        """Return the hash buckets that occur in any document, in ascending order."""
        occurs = np.zeros(self.num_buckets, bool)
        for buckets in self._buckets:
            occurs[buckets] = True
        return np.flatnonzero(occurs)

    def matrix(self, columns: Ints) -> Any:
        """Return the documents as a scipy CSR matrix, with one column for each of the hash buckets in `columns`."""
        from scipy.sparse import csr_matrix

        column_of = np.zeros(self.num_buckets, np.int32)
        column_of[columns] = np.arange(len(columns), dtype=np.int32)
        ends = np.cumsum([0, *map(len, self._buckets)])
        indices = column_of[np.concatenate(self._buckets)]
        values = np.concatenate(self._values).astype(np.float64)
        return csr_matrix((values, indices, ends), shape=(len(self._buckets), len(columns)))


def fit_weights(examples: Examples, l2: float) -> tuple[npt.NDArray[np.float32], Minimum]:
    """Return the weights (buckets,) that minimize mean logistic loss + l2 / 2 |weights|^2, and the `Minimum` reached.

    An intercept without penalty is fitted too. It is not returned, because calibration fits its own.
    """
    columns = examples.columns()
    minimum = fit_logistic(examples.matrix(columns), np.array(examples.labels, bool), l2)
    weights = np.zeros(examples.num_buckets, np.float32)
    weights[columns] = minimum.point[:-1].astype(np.float32)
    return weights, minimum


def fit_logistic(matrix: Any, labels: npt.NDArray[np.bool_], l2: float) -> Minimum:
    """Return the minimum of mean logistic loss + l2 / 2 |weights|^2; its point is the weights, then the intercept.

    `matrix` is a scipy CSR matrix (documents, features). The intercept has no penalty.
    """
    transposed = matrix.T  # a view, no copy
    signs = np.where(labels, 1.0, -1.0)

    def loss(point: Floats) -> tuple[float, Floats]:
        weights, intercept = point[:-1], point[-1]
        margins = signs * (matrix @ weights + intercept)
        derivatives = -signs * logistic(-margins) / len(signs)
        value = float(np.add.reduce(np.logaddexp(0.0, -margins))) / len(signs) + l2 / 2 * dot(weights, weights)
        gradient = np.append(transposed @ derivatives + l2 * weights, np.add.reduce(derivatives))
        return value, gradient

    return minimize(loss, np.zeros(matrix.shape[1] + 1), TOLERANCE, MAX_STEPS)


def fit_platt(margins: Iterable[float], labels: Iterable[bool]) -> tuple[float, float]:
    """Return the scale and offset for which logistic(scale * margin + offset) fits the labels best (Platt scaling).

    They are finite even if the margins separate the classes. Source: Platt 1999.
    """
    margin, label = np.array(list(margins), np.float64), np.array(list(labels), bool)
    good = int(label.sum())
    # Platt's target probabilities, which are neither 0 nor 1, keep the fit finite
    targets = np.where(label, (good + 1) / (good + 2), 1 / (len(label) - good + 2))

    def loss(point: Floats) -> tuple[float, Floats]:
        logits = point[0] * margin + point[1]
        value = np.add.reduce(np.logaddexp(0.0, logits) - targets * logits) / len(label)
        derivatives = (logistic(logits) - targets) / len(label)
        return float(value), np.array([dot(derivatives, margin), float(np.add.reduce(derivatives))])

    minimum = minimize(loss, np.array([1.0, 0.0]), 1e-10, MAX_STEPS)
    return float(minimum.point[0]), float(minimum.point[1])
