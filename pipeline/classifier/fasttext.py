"""fastText classifiers: any supervised model scores, and one can be trained here, which is not deterministic.

fastText 0.9.3 initialises its input matrix in tenths rounded down, one per thread, so below eleven threads a part stays
as the memory was: where that had been filled with NaN, 18 of 20 trainings in 16 dimensions failed with ten threads and
none with eleven. Threads race, so two trainings give two files: the model is an input by digest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from schemas.config import suggest_name
from schemas.errors import ConfigError, ContractError

GOOD_LABEL, BAD_LABEL = "__label__good", "__label__bad"
MIN_THREADS = 11
PREFIX = "__label__"


def one_line(text: str) -> str:
    """The text as fastText wants it: one line, nothing in it that reads as a label."""
    return " ".join(text.split()).replace(PREFIX, "label ")


def write_example(stream: IO[bytes], text: str, good: bool) -> None:
    """Append a line of training data."""
    stream.write(f"{GOOD_LABEL if good else BAD_LABEL} {one_line(text)}\n".encode("utf-8", "replace"))


def train_fasttext(examples: Path, model: Path, settings: dict[str, Any]) -> None:
    """Train on a file of examples and write the model. Raises ContractError if it holds what is no number."""
    import fasttext

    try:
        trained = fasttext.train_supervised(input=str(examples), verbose=0, loss="softmax", **settings)
    except RuntimeError as error:
        raise ContractError(f"fasttext: expected a model, got {error}. Train with a lower learning_rate.") from error
    for name, matrix in (("input", trained.get_input_matrix()), ("output", trained.get_output_matrix())):
        wrong = int(np.count_nonzero(~np.isfinite(matrix)))
        if wrong:
            raise ContractError(
                f"fasttext: expected numbers, got {wrong} that are none in the {name} matrix. Lower learning_rate."
            )
    trained.save_model(str(model))


def load_fasttext(path: str, label: str, where: str) -> Callable[[str], float]:
    """The probability of the label as a function of the text. Raises ConfigError if the model does not have it."""
    import fasttext

    try:
        model = fasttext.load_model(path)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a linear or fastText model, got {error}. Give another file.") from error
    labels = model.get_labels()
    if label not in labels:
        raise ConfigError(f"{where}: expected a model with the label {label!r}, got none{suggest_name(label, labels)}")

    def score(text: str) -> float:
        # a list: a bare string fails on numpy 2; k=-1: every label
        names, values = model.predict([one_line(text).encode("utf-8", "replace").decode()], k=-1)
        value = float(dict(zip(names[0], values[0])).get(label, 0.0))
        if not 0.0 <= value <= 1.001:  # its float sums reach 1.00001
            raise ContractError(f"{where}: {path} expected a probability, got {value}. Train it again.")
        return min(1.0, value)

    score("a probe, so that a model of no numbers stops the run before the first document")
    return score
