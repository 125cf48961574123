"""A linear classifier over the quality signals of an English text: features, training and model files.

The features are the signals of eight published rule families, measured on the whole text before any cut. Counts are
taken as ln(1 + x) and ratios as square roots. Each feature is then standardized by its mean and deviation in the
training texts. Few parameters are fitted, so a few hundred labelled texts are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.classifier.linear import Minimum, fit_logistic, logistic, read_model, write_model
from pipeline.quality.stage import ENGLISH, QualityMeasures, measure
from pipeline.text.spacy_tokens import splitter_of
from pipeline.text.words import Vocabulary
from schemas.errors import ConfigError
from schemas.signals import SIGNALS

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]

SIGNAL_KIND = "signal classifier"
LANGUAGE = ENGLISH
"""Language of the texts that a model scores. Stop words and sentence ends differ too much for one model for all."""
MEASURES = QualityMeasures(
    families=frozenset(
        ("gopher_repetition", "gopher_quality", "c4", "fineweb", "dclm", "dolma", "redpajama", "refinedweb")
    ),
    cut_lines=frozenset(),
)
"""What is measured on a text: all published families, without cuts."""
LARGEST = 3.0
"""Largest absolute value of a standardized feature; a rarer value would dominate the sum."""


def signal_vocabulary() -> Vocabulary:
    """Return an empty cache of word properties for `SignalMeter`."""
    return Vocabulary(splitter_of(LANGUAGE))


def _feature_names() -> tuple[str, ...]:
    """Return the names of the signals that MEASURES gives, in the order of the table."""
    measured = measure("One text.", LANGUAGE, MEASURES, signal_vocabulary())
    return tuple(signal.name for signal in SIGNALS if signal.name in measured)


class SignalMeter:
    """Measures the features of texts. One meter caches the properties of words for all its texts."""

    def __init__(self) -> None:
        self._vocabulary = signal_vocabulary()
        self.names = _feature_names()
        """Name of each feature."""
        kinds = {signal.name: signal.kind for signal in SIGNALS}
        self._is_ratio = np.array([kinds[name] == pa.float32() for name in self.names], bool)

    def features(self, text: str) -> Floats:
        """Return the features of a text (features,): roots of ratios, ln(1 + x) of counts, NaN for a null signal."""
        row = measure(text, LANGUAGE, MEASURES, self._vocabulary)
        values = np.array([np.nan if row[name] is None else row[name] for name in self.names], np.float64)
        values = np.maximum(values, 0.0)
        return np.where(self._is_ratio, np.sqrt(values), np.log1p(values))


@dataclass(frozen=True, eq=False)
class SignalModel:
    """A trained classifier over signals. The arrays have one value for each feature."""

    names: tuple[str, ...]
    mean: Floats
    deviation: Floats
    """Standard deviation of each feature in the training texts; 0 leaves the feature out."""
    weight: Floats
    scale: float = 1.0
    offset: float = 0.0
    """The probability is logistic(scale * margin + offset)."""

    def margins(self, features: Floats) -> Floats:
        """Return the margin of each text; `features` has the shape (texts, features)."""
        standardized = standardize(features, self.mean, self.deviation)
        margins: Floats = np.add.reduce(standardized * self.weight, axis=1)
        return margins

    def probability(self, features: Floats) -> float:
        """Return the probability that a text with these features (features,) is good."""
        return float(logistic(self.scale * self.margins(features[np.newaxis]) + self.offset)[0])


def standardize(features: Floats, mean: Floats, deviation: Floats) -> Floats:
    """Return (x - mean) / deviation, limited to LARGEST and divided by the root of the number of features.

    The result is 0 for NaN and for a deviation of 0. The divisor makes `l2` independent of the number of features.
    """
    divisor = np.where(deviation > 0, deviation, np.inf)
    values = np.clip((features - mean) / divisor, -LARGEST, LARGEST)
    standardized: Floats = np.nan_to_num(values, nan=0.0) / np.sqrt(len(mean))
    return standardized


def fit_signals(names: Sequence[str], features: Floats, labels: Labels, l2: float) -> tuple[SignalModel, Minimum]:
    """Return the model that minimizes mean logistic loss + l2 / 2 |weights|^2, not yet calibrated.

    `features` has the shape (texts, features). Equal input gives equal bits.
    """
    from scipy.sparse import csr_matrix

    present = ~np.isnan(features)
    count = np.maximum(present.sum(axis=0), 1)
    mean = np.add.reduce(np.where(present, features, 0.0), axis=0) / count
    deviation = np.sqrt(np.add.reduce(np.where(present, features - mean, 0.0) ** 2, axis=0) / count)
    deviation = np.where(deviation > 1e-9, deviation, 0.0)  # below, a constant feature with rounding errors
    # products of a sparse matrix have a fixed order, those of a dense one change with the threads of BLAS
    minimum = fit_logistic(csr_matrix(standardize(features, mean, deviation)), labels, l2)
    return SignalModel(tuple(names), mean, deviation, minimum.point[:-1]), minimum


def calibrated(model: SignalModel, scale: float, offset: float) -> SignalModel:
    """Return the model with another map from margins to probabilities."""
    return replace(model, scale=scale, offset=offset)


def save_signals(model: SignalModel, path: Path) -> None:
    """Write the model to a file; equal models give equal bytes."""
    header = {"language": LANGUAGE, "names": list(model.names), "scale": model.scale, "offset": model.offset}
    columns = {"mean": model.mean, "deviation": model.deviation, "weight": model.weight}
    write_model(path, SIGNAL_KIND, header, columns)


def load_signals(path: str, where: str) -> SignalModel:
    """Read the model in a file.

    Raises ConfigError if the file is no signal classifier, or if the model has other signals than this version.
    """
    header, columns = read_model(path, SIGNAL_KIND, where)
    if tuple(header["names"]) != _feature_names():
        raise ConfigError(
            f"{where}: expected a model of the signals that this version measures, got {path}, a model of others. "
            "Train the model again with `penstock train-classifier`."
        )
    names, mean, deviation, weight = tuple(header["names"]), columns["mean"], columns["deviation"], columns["weight"]
    return SignalModel(names, mean, deviation, weight, header["scale"], header["offset"])
