"""`penstock train-importance`: the hashed n-gram counts of a target and of a raw sample, exact and order-free."""

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
    """The section `[train_importance]`: a target, the raw sample it is told from, and how n-grams are counted."""

    name: str = Field("target", pattern=NAME)
    """Name of the target, of the model's file and in the model store."""
    target: Corpus = Corpus.model_validate({})
    """Texts that the data shall come to resemble."""
    raw: Corpus = Corpus.model_validate({})
    """A sample of the data that is to be chosen from."""
    reading: Reading = Reading.model_validate({})
    """Which fields of the files are read."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the samples."""
    buckets: int = Field(10_000, ge=2, le=1 << 28)
    """Number of buckets n-grams are hashed to; DSIR's."""
    ngrams: int = Field(2, ge=1, le=MAX_NGRAM)
    """Longest n-gram [words]; DSIR's."""
    smoothing: float = Field(1.0, gt=0)
    """Added to the count of every bucket (Laplace). DSIR adds 1e-8 to the shares, which makes one unseen bucket weigh
    as much as a whole page."""

    @model_validator(mode="after")
    def _used(self) -> "TrainImportanceConfig":
        if not (self.target.given and self.raw.given):
            raise ValueError("expected texts of the target and raw ones, got only one of them or none. Name both.")
        return self

    def settings(self) -> dict[str, Any]:
        """The content settings, those of the corpora included."""
        return {**self.content(), "target": self.target.content(), "raw": self.raw.content()}


def train_importance(
    config: TrainImportanceConfig, out: str, spark: Any = None, models: ModelsConfig | None = None
) -> dict[str, Any]:
    """Count and write `<out>/<name>.arrow` and its manifest `<out>/<name>.json`, which is returned.

    With `models` the model is put into that store under its name. Raises ConfigError, ContractError.
    """
    clock = Clock()
    found = gather_corpora({"target": config.target, "raw": config.raw}, (), config.reading, config.seed, spark)
    bags = {name: count_corpus(found.texts[name], config) for name in ("target", "raw")}
    for name, bag in bags.items():
        if not bag.words:
            raise ContractError(f"train_importance: expected texts with words in {name}, got none. Name other files.")
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
        "inputs": found.inputs,
        "counted": {name: figures_of(bag) for name, bag in bags.items()},
        "left_out": dict(sorted(found.left_out.items())),
    }
    return commit_model(path, content, clock, models)


def count_corpus(texts: Sequence[TrainingText], config: TrainImportanceConfig) -> NgramCounts:
    """The n-grams of the texts by bucket."""
    vocabulary = new_vocabulary()
    counts, words = np.zeros(config.buckets, np.int64), 0
    for text in texts:
        keys = word_keys_of(text.text, vocabulary)
        words += len(keys)
        counts += np.bincount(hash_buckets(ngram_codes(keys, config.ngrams), config.buckets), minlength=config.buckets)
    return NgramCounts(counts, words, len(texts))


def figures_of(bag: NgramCounts) -> dict[str, int]:
    """Documents, words, n-grams and empty buckets."""
    return {
        "documents": bag.documents,
        "words": bag.words,
        "ngrams": int(bag.counts.sum()),
        "empty_buckets": int((bag.counts == 0).sum()),
    }
