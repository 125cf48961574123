"""`penstock train-importance`: counts the hashed n-grams of a target corpus and of a raw sample, exactly.

The counts do not depend on the order of the texts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from pipeline.classifier.importance import ImportanceModel, NgramCounts, save_importance
from pipeline.classifier.linear import FEATURES, MAX_NGRAM, hash_buckets, new_vocabulary, ngram_codes, word_keys_of
from pipeline.fit.corpus import Clock, Corpus, Reading, TrainingText, commit_model, gather_corpora
from pipeline.models import ModelsConfig
from schemas.config import Section
from schemas.errors import ContractError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class TrainImportanceConfig(Section):
    """The section `[train_importance]`: a target corpus, a raw sample, and the settings of the n-gram counts."""

    name: str = Field("target", pattern=NAME)
    """Name of the model: its file name, and its name in the model store."""
    target: Corpus = Corpus.model_validate({})
    """The target corpus: texts that the selected documents should resemble."""
    raw: Corpus = Corpus.model_validate({})
    """The raw sample: a sample of the texts to select from."""
    reading: Reading = Reading.model_validate({})
    """Name of the text field in the files."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the samples."""
    buckets: int = Field(10_000, ge=2, le=1 << 28)
    """Number of hash buckets of n-grams. Default: DSIR's."""
    ngrams: int = Field(2, ge=1, le=MAX_NGRAM)
    """Longest n-gram [words]. Default: DSIR's."""
    smoothing: float = Field(1.0, gt=0)
    """Constant added to the count of every bucket (Laplace). DSIR adds 1e-8 to the shares instead, so that one n-gram
    in a bucket without counts weighs as much as a whole page."""

    @model_validator(mode="after")
    def _used(self) -> "TrainImportanceConfig":
        if not (self.target.given and self.raw.given):
            raise ValueError(
                "expected texts in train_importance.target and in train_importance.raw, got none in one or both. "
                "Set `files` or `run` in each of the two."
            )
        return self

    def settings(self) -> dict[str, Any]:
        """Return all settings that change the model, for its manifest."""
        return {**self.content(), "target": self.target.content(), "raw": self.raw.content()}


def train_importance(
    config: TrainImportanceConfig, out: str, spark: Any = None, models: ModelsConfig | None = None
) -> dict[str, Any]:
    """Count n-grams and write `<out>/<name>.arrow` and its manifest `<out>/<name>.json`; return the manifest.

    With `models`, also add the model to that model store. Raises ConfigError if files do not exist, ContractError if a
    corpus has no words.
    """
    clock = Clock()
    gathered = gather_corpora({"target": config.target, "raw": config.raw}, (), config.reading, config.seed, spark)
    bags = {name: count_corpus(gathered.texts[name], config) for name in ("target", "raw")}
    for name, bag in bags.items():
        if not bag.words:
            raise ContractError(
                f"train_importance: expected texts with words in {name}, got none. "
                f"Set train_importance.{name}.files to files that contain words."
            )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.name}.arrow"
    model = ImportanceModel(bags["target"], bags["raw"], config.ngrams, config.smoothing)
    save_importance(model, path)
    content = {
        "kind": "importance",
        "deterministic": True,
        "features": FEATURES,
        "settings": config.settings(),
        "inputs": gathered.inputs,
        "counted": {name: figures_of(bag) for name, bag in bags.items()},
        "left_out": dict(sorted(gathered.left_out.items())),
    }
    return commit_model(path, content, clock, models)


def count_corpus(texts: Sequence[TrainingText], config: TrainImportanceConfig) -> NgramCounts:
    """Count the n-grams of the texts by hash bucket; also count the words and the texts."""
    vocabulary = new_vocabulary()
    counts, words = np.zeros(config.buckets, np.int64), 0
    for text in texts:
        keys = word_keys_of(text.text, vocabulary)
        words += len(keys)
        counts += np.bincount(hash_buckets(ngram_codes(keys, config.ngrams), config.buckets), minlength=config.buckets)
    return NgramCounts(counts, words, len(texts))


def figures_of(bag: NgramCounts) -> dict[str, int]:
    """Return the numbers of documents, words, n-grams and empty hash buckets, for the manifest."""
    return {
        "documents": bag.documents,
        "words": bag.words,
        "ngrams": int(bag.counts.sum()),
        "empty_buckets": int((bag.counts == 0).sum()),
    }
