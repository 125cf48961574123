"""The stage `importance`: importance resampling by the likelihood ratio of a target corpus and a raw sample.

The log importance weight of a document is the sum of ln p - ln q over its word 1- and 2-grams, hashed to buckets: p is
the bucket's share of the target's n-grams, q its share of the raw sample's. The stored value is the log weight divided
by the number of words. Source: Xie et al. 2023 (DSIR), arXiv 2302.03169, section 3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import model_validator

from pipeline.classifier.columns import (
    Floats,
    check_model_names,
    check_range,
    column_values,
    entry_values,
    gumbel_draws,
    uniform_draws,
)
from pipeline.classifier.linear import hash_buckets, keys_of_row, new_vocabulary, ngram_codes, read_model, write_model
from pipeline.engine.stage import EVERY, Check, Cutoffs, Drop, PerDocument, Quantile, Row, RowFunction
from pipeline.text.words import Codes
from schemas.config import Section, decision, location

KIND = "importance weights"
FLOOR = 1e-8
"""Constant that RedPajama-V2 adds to both probabilities of a length."""
COLUMN, WORDS = "importance", "importance_words"
Counts = npt.NDArray[np.int64]


class ImportanceConfig(Section):
    """The section `[importance]` of a recipe: models that compare a document with a target corpus, and their limits."""

    models: dict[str, str] = location({})
    """Name in the model store, or path, of the model of each target corpus, by a name for its weights. Empty computes
    no weights."""
    length_correction: bool = False
    """True to add to the log weight the log ratio of two probabilities of the text's number of words: Poisson
    distributions with the mean lengths of target and raw sample. The `_length_correction` signals of RedPajama-V2 do
    this with characters."""
    min_importance: dict[str, float] = decision({})
    """Minimum log weight per word of a kept document, by name in `models` [nats per word]."""
    min_quantile: dict[str, float] = decision({})
    """Share of each language's documents to drop, by name in `models`: those with the lowest log weights per word."""
    min_gumbel_quantile: dict[str, float] = decision({})
    """Share of each language's documents that resampling drops, by name in `models`. The others are a sample without
    replacement by importance weight: those with the largest log weight + Gumbel noise."""
    seed: int = decision(10, ge=0, lt=1 << 63)
    """Seed of the Gumbel noise."""

    @model_validator(mode="after")
    def _used(self) -> "ImportanceConfig":
        check_model_names(self, self.models, ("min_importance", "min_quantile", "min_gumbel_quantile"))
        check_range(
            self, ("min_quantile", "min_gumbel_quantile"), lambda value: 0 < value < 1, "a share between 0 and 1"
        )
        if "seed" in self.model_fields_set and not self.min_gumbel_quantile:
            raise ValueError("seed would be ignored without min_gumbel_quantile. Remove importance.seed.")
        if self.length_correction and not self.models:
            raise ValueError("length_correction would be ignored without models. Remove importance.length_correction.")
        return self


@dataclass(frozen=True)
class NgramCounts:
    """The exact n-gram counts of a corpus by hash bucket, and its numbers of words and documents."""

    counts: Counts
    """Number of n-grams in each hash bucket; shape (buckets,)."""
    words: int
    documents: int

    @property
    def mean_words(self) -> float:
        """The mean number of words per document."""
        return self.words / self.documents


@dataclass(frozen=True)
class ImportanceModel:
    """The n-gram counts of a target corpus and of a raw sample."""

    target: NgramCounts
    raw: NgramCounts
    max_n: int
    """Longest n-gram [words]."""
    smoothing: float
    """Constant that is added to every count, so that no bucket has probability 0."""

    def log_ratios(self) -> Floats:
        """Return ln(p / q) of each hash bucket (buckets,).

        p is the bucket's share of all n-grams in the target, and q its share in the raw sample. A share is (count +
        smoothing) / (sum of counts + smoothing x number of buckets).
        """
        target, raw = (_log_shares(bag.counts, self.smoothing) for bag in (self.target, self.raw))
        return target - raw


def _log_shares(counts: Counts, smoothing: float) -> Floats:
    shares: Floats = np.log(counts + smoothing) - math.log(int(counts.sum()) + smoothing * len(counts))
    return shares


def poisson_log_ratio(words: int, target: float, raw: float) -> float:
    """Return ln(P / Q), where P and Q are the probabilities that a text has `words` words.

    P is a Poisson probability with the mean `target`, Q one with the mean `raw`. FLOOR is added to both.
    """

    def log_probability(mean: float) -> float:
        exact = words * math.log(mean) - mean - math.lgamma(words + 1)
        return math.log(math.exp(exact) + FLOOR)

    return log_probability(target) - log_probability(raw)


def log_weight(keys: Codes, ratios: Floats, max_n: int) -> float:
    """Return the log importance weight of a document: the sum of its n-grams' log ratios [nats].

    `keys` are the keys of its words, `ratios` the log ratios of the hash buckets.
    """
    return float(np.add.reduce(ratios[hash_buckets(ngram_codes(keys, max_n), len(ratios))]))


def save_importance(model: ImportanceModel, path: Path) -> None:
    """Write the model to a file; equal models give equal bytes."""
    bags = {"target": model.target, "raw": model.raw}
    sizes = {name: {"words": bag.words, "documents": bag.documents} for name, bag in bags.items()}
    header = {"max_n": model.max_n, "smoothing": model.smoothing, **sizes}
    write_model(path, KIND, header, {name: bag.counts for name, bag in bags.items()})


def load_importance(path: str, where: str) -> ImportanceModel:
    """Read the model in a file. Raises ConfigError if the file is not an importance model."""
    header, columns = read_model(path, KIND, where)
    target, raw = (NgramCounts(columns[name], **header[name]) for name in ("target", "raw"))
    return ImportanceModel(target, raw, header["max_n"], header["smoothing"])


def make_importance(config: ImportanceConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that adds the log weight per word of each model to a row; None for a text without words."""
    vocabulary = new_vocabulary()
    loaded = {name: load_importance(models[name], f"importance.models.{name}") for name in config.models}
    ratios = {name: model.log_ratios() for name, model in loaded.items()}

    def weigh(row: Row) -> Drop | None:
        row[COLUMN] = row[WORDS] = None
        if not loaded:
            return None
        keys = keys_of_row(row, vocabulary)
        row[WORDS] = len(keys)
        row[COLUMN] = dict.fromkeys(loaded)
        for name, model in loaded.items() if len(keys) else ():
            total = log_weight(keys, ratios[name], model.max_n)
            if config.length_correction:
                total += poisson_log_ratio(len(keys), model.target.mean_words, model.raw.mean_words)
            row[COLUMN][name] = float(np.float32(total / len(keys)))
        return None

    return weigh


def weight_per_word(name: str) -> Callable[[pa.RecordBatch], Floats]:
    """Return a function from a batch to the stored log weight per word of each document, under one model."""
    return lambda batch: entry_values(batch, COLUMN, name)


def resampling_value(name: str, seed: int) -> Callable[[pa.RecordBatch], Floats]:
    """Return a function from a batch to the log weights of whole documents, plus Gumbel noise derived from doc_id."""
    return lambda batch: (
        entry_values(batch, COLUMN, name) * column_values(batch, WORDS)
        + gumbel_draws(uniform_draws(batch.column("doc_id").to_pylist(), seed, name))
    )


def quantile_name(setting: str, name: str) -> str:
    """Return the key of a model's cut-off: section, setting (such as `min_quantile`) and model name, joined by dots."""
    return f"importance.{setting}.{name}"


def importance_quantiles(config: ImportanceConfig) -> list[Quantile]:
    """Return the quantiles to compute from the data; documents with values below them are dropped."""
    quantiles = [
        Quantile(
            quantile_name("min_quantile", name), COLUMN, share, weight_per_word(name), (COLUMN,), keeps_highest=True
        )
        for name, share in sorted(config.min_quantile.items())
    ]
    return quantiles + [
        Quantile(
            quantile_name("min_gumbel_quantile", name),
            COLUMN,
            share,
            resampling_value(name, config.seed),
            ("doc_id", COLUMN, WORDS),
            keeps_highest=True,
        )
        for name, share in sorted(config.min_gumbel_quantile.items())
    ]


def importance_checks(config: ImportanceConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> list[Check]:
    """Return the checks that the settings enable: those of fixed limits first, then those of quantiles."""
    reasons = {"min_quantile": "importance_quantile", "min_gumbel_quantile": "importance_resampled"}
    checks = [
        Check("importance_low", COLUMN, "min_importance", {EVERY: limit}, weight_per_word(name), (COLUMN,), name)
        for name, limit in sorted(config.min_importance.items())
    ]
    for quantile in importance_quantiles(config):
        _, setting, name = quantile.name.split(".", 2)
        limits = cutoffs.get(quantile.name, {})
        checks.append(Check(reasons[setting], COLUMN, setting, limits, quantile.value, quantile.needs, name))
    return checks


def importance_models(config: ImportanceConfig) -> dict[str, str]:
    """Return the model-store name or path of each model, keyed by its name in `importance.models`."""
    return dict(config.models)


IMPORTANCE = PerDocument(
    name="importance",
    version=3,
    config=ImportanceConfig,
    reads=("_body",),
    adds=(COLUMN, WORDS),
    reasons={},
    make=make_importance,
    models=importance_models,
    ends=False,
    verdicts={
        "importance_low": "the log importance weight per word is below min_importance",
        "importance_quantile": "the log importance weight per word is below the language's min_quantile",
        "importance_resampled": "the sum of log importance weight and Gumbel noise is below the language's "
        "min_gumbel_quantile",
    },
    checks=importance_checks,
    quantiles=importance_quantiles,
    again="rest",
)
