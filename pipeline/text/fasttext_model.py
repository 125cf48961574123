"""Predictions of fastText models by the native module, or by the package where the module is not built.

The module gives the same numbers on every processor with the same C library. The package is compiled for the processor
on which it is installed; there, the last bit of a probability may differ.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.text import native
from schemas.errors import ContractError

END_MARK = "</s>"

Predictions = list[list[tuple[str, float]]]
"""The most probable labels of each text, each with its probability."""


class FastTextModel(Protocol):
    """A supervised model."""

    def labels(self) -> list[str]:
        """Return the labels, such as `__label__en`, in the order of the file."""
        ...

    def predict(self, lines: Sequence[str], most: int, /) -> Predictions:
        """Return the `most` most probable labels of each line, in order; all for 0.

        A probability has the precision of float32 and reaches 1.00001. A line has no label if the model has a vector
        for none of its words, nor for the end of a line. Raises ValueError for a line with a line end.
        """
        ...


class PackageModel:
    """A model by the package `fasttext`, for machines without the native module."""

    def __init__(self, path: str):
        """Raise ValueError if the file is not a model."""
        import fasttext

        self._model: Any = fasttext.load_model(path)

    def labels(self) -> list[str]:
        """Return the labels in the order of the file."""
        return [*self._model.get_labels()]

    def predict(self, lines: Sequence[str], most: int, /) -> Predictions:
        """Return the `most` most probable labels of each line, in order; all for 0."""
        names, scores = self._model.predict([*lines], k=most or -1)  # A bare string fails on numpy 2.
        return [[*zip(name, map(float, score), strict=True)] for name, score in zip(names, scores, strict=True)]


def load_model(path: str) -> FastTextModel:
    """Load a model. Raises ValueError, with the reason, if the file cannot be read or is not a supervised model."""
    if native.module is None:
        return PackageModel(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        model: FastTextModel = native.loaded().FastTextModel(data)
    except ValueError as error:
        raise ValueError(f"{path} is not a supervised fastText model: {error}") from error
    return model


def readable(text: str) -> str:
    """Return a text without the mark of the end of a line, so that fastText reads all of it.

    Pages about language models have the mark, and a page could have it so as to be judged by its first words alone.
    """
    return text.replace(END_MARK, "<s>")


def probability_of(model: FastTextModel, label: str, where: str) -> Callable[[str], float]:
    """Return a function from a line to the probability of a label. It raises ContractError for a model with a NaN.

    `where`: the setting and file of the model, for errors. The function is called once.
    """

    def score(line: str) -> float:
        (found,) = model.predict([line], 0)
        value = dict(found).get(label, 0.0)
        if not 0.0 <= value <= 1.001:  # its float sums reach 1.00001
            raise ContractError(f"{where}: expected a probability, got {value}. Train the model again.")
        return min(1.0, value)

    score("a probe, so that a model with NaN weights stops the run before the first document")
    return score
