"""A language model of either kind: a compiled file of ours, or a KenLM binary beside its SentencePiece model."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.perplexity.model import MAGIC, LanguageModel, Scores, score_lines
from pipeline.perplexity.text import load_pieces, normalise, words
from schemas.errors import ConfigError

KENLM_MAGIC = b"mmap lm http://kheafield.com/code"
ARPA_START = b"\\data\\"
MARKERS = frozenset(("<s>", "</s>"))


class Scorer(Protocol):
    """What the perplexity stage asks of a model."""

    def score_text(self, text: str) -> Scores:
        """The scores of each line of a text; a line without words is not scored."""


class KenlmModel:
    """A model that the kenlm package reads: a binary, mapped so that workers share it, or an ARPA file.

    Lines are normalised and cut as CCNet does for its published models; `spm` None: their words stand between spaces.
    """

    def __init__(self, path: str, spm: str | None):
        require_kenlm(path)
        import kenlm

        config = kenlm.Config()
        config.load_method = kenlm.LoadMethod.LAZY
        config.show_progress = False
        try:
            self._model = kenlm.Model(path, config)
        except OSError as error:
            raise ConfigError(f"{path}: promised a model that kenlm reads, found {error}; give another file") from error
        self._cut = words if spm is None else load_pieces(Path(spm).read_bytes(), spm)

    def score_text(self, text: str) -> Scores:
        """The scores of each line of a text; a line without words is not scored."""
        return score_lines(self, normalise(text).split("\n"))

    def cut(self, lines: Sequence[str]) -> list[list[str]]:
        """The words that the model knows lines by."""
        return self._cut(lines)

    def score(self, sentences: Sequence[Sequence[str]]) -> Scores:
        """The scores of sentences given as words; kenlm adds them up as float32."""
        lines = (" ".join("<unk>" if word in MARKERS else word for word in sentence) for sentence in sentences)
        log10 = np.fromiter((self._model.score(line, bos=True, eos=True) for line in lines), np.float64, len(sentences))
        return Scores(log10, np.fromiter(map(len, sentences), np.int64, len(sentences)) + 1)


def require_kenlm(path: str) -> None:
    """Raises ConfigError if the package that reads KenLM binaries is not installed."""
    if find_spec("kenlm") is None:
        raise ConfigError(
            f"{path}: promised a language model, found a KenLM binary and no package to read it; "
            "run `pip install kenlm==0.3.0`, or train a model with `penstock train-lm`"
        )


def open_model(path: str, spm: str | None, alone: bool = False) -> Scorer:
    """The model in a file, by what the file holds; a KenLM binary wants `spm`, or `alone`: its words are plain.

    Raises ConfigError if it is another file, and if the pieces lack or are given to a model that has its own.
    """
    with Path(path).open("rb") as stream:
        start = stream.read(len(MAGIC))
    if start.startswith(ARPA_START):
        raise ConfigError(f"{path}: promised a compiled language model, found an ARPA file; compile it first")
    if not start.startswith(KENLM_MAGIC):
        if spm is not None or alone:
            raise ConfigError(f"{path}: promised a model that needs pieces, found one with its own; give no pieces")
        return LanguageModel(path)
    if spm is None and not alone:
        raise ConfigError(f"{path}: promised the pieces of a KenLM binary, found none; give its SentencePiece model")
    return KenlmModel(path, spm)
