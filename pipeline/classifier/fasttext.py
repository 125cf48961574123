"""fastText classifiers: score texts with a supervised model, or train one, which is not deterministic.

fastText 0.9.3 initializes its input matrix in ten slices, rounded down, one per thread, so fewer than eleven threads
leave the last rows uninitialized. In memory that was filled with NaN, 18 of 20 trainings in 16 dimensions failed with
ten threads and none with eleven. Threads race, so two trainings write different files. A run identifies a model by its
digest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline.text.fasttext_model import load_model, probability_of, readable
from schemas.config import suggest_name
from schemas.errors import ConfigError, ContractError

GOOD_LABEL, BAD_LABEL = "__label__good", "__label__bad"
MIN_THREADS = 11
PREFIX = "__label__"


def one_line(text: str) -> str:
    """Return the text as one line of fastText's input format, without the marks of labels and of its end."""
    return readable(" ".join(text.split()).replace(PREFIX, "label "))


def write_example(stream: IO[bytes], text: str, good: bool) -> None:
    """Append a text with the label of its class as one line of training data."""
    stream.write(f"{GOOD_LABEL if good else BAD_LABEL} {one_line(text)}\n".encode("utf-8", "replace"))


def train_fasttext(examples: Path, model: Path, settings: dict[str, Any]) -> None:
    """Train on a file of examples and write the model.

    Raises ContractError if training fails or a weight is not finite.
    """
    import fasttext

    try:
        trained = fasttext.train_supervised(input=str(examples), verbose=0, loss="softmax", **settings)
    except RuntimeError as error:
        raise ContractError(
            f"fasttext: expected a model, got the error {error}. Lower train_classifier.learning_rate."
        ) from error
    for name, matrix in (("input", trained.get_input_matrix()), ("output", trained.get_output_matrix())):
        num_invalid = int(np.count_nonzero(~np.isfinite(matrix)))
        if num_invalid:
            raise ContractError(
                f"fasttext: expected finite weights, got {num_invalid} NaN or infinite weights in the {name} matrix. "
                "Lower train_classifier.learning_rate."
            )
    trained.save_model(str(model))


def load_fasttext(path: str, label: str, where: str) -> Callable[[str], float]:
    """Return a function from a text to the probability of the label.

    Raises ConfigError if the file is not a fastText model or the model does not have the label.
    """
    try:
        model = load_model(path)
    except ValueError as error:
        raise ConfigError(
            f"{where}: expected a linear or fastText model, got a file that cannot be loaded ({error}). "
            f"Set {where} to the path of such a model."
        ) from error
    labels = model.labels()
    if label not in labels:
        raise ConfigError(
            f"{where}: expected a model with the label {label!r}, got one without it{suggest_name(label, labels)}. "
            "Set this model's entry in classifier.labels to the label that the model gives to good documents."
        )
    score = probability_of(model, label, f"{where}: {path}")
    return lambda text: score(one_line(text).encode("utf-8", "replace").decode())
