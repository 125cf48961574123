"""Importance resampling as a stage: how much likelier a text's words are under a target than under the raw sample.

The log importance weight of a document is the sum over its word 1- and 2-grams, hashed to buckets, of ln p - ln q: p is
the target's share of the bucket, q the raw sample's. It is stored over the number of words. Source: Xie et al. 2023
(DSIR), arXiv 2302.03169, section 3.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import model_validator

from pipeline.classifier.columns import Floats, column_values, entry_values, gumbel_draws, uniform_draws
from pipeline.classifier.linear import hash_buckets, keys_of_row, new_vocabulary, ngram_codes, read_model, write_model
from pipeline.classifier.stage import check_model_names, check_range
from pipeline.engine.stage import EVERY, Check, Cutoffs, Drop, PerDocument, Quantile, Row, RowFunction
from pipeline.text.words import Codes
from schemas.config import Section, decision, location

KIND = "importance weights"
FLOOR = 1e-8
"""What RedPajama-V2 adds to the two probabilities of a length."""
COLUMN, WORDS = "importance", "importance_words"
Counts = npt.NDArray[np.int64]


class ImportanceConfig(Section):
    """The section `[importance]` of a recipe."""

    models: dict[str, str] = location({})
    """Name in the model store, or path, of each target's model, by the name its weights have; empty: none is taken."""
    length_correction: bool = False
    """Whether the weight also has the log ratio of the probabilities of the text's number of words, Poisson with the
    means of target and raw sample, as the `_length_correction` signals of RedPajama-V2 (which take characters)."""
    min_importance: dict[str, float] = decision({})
    """Log weight per word from which a document stays, by target [nats per word]."""
    min_quantile: dict[str, float] = decision({})
    """Share of each language's documents, counted from the lowest weight per word, that goes, by target."""
    min_gumbel_quantile: dict[str, float] = decision({})
    """Share of each language's documents that resampling leaves out, by target: the others are drawn without
    replacement by their whole weights (the top of log weight + Gumbel noise)."""
    seed: int = decision(10, ge=0, lt=1 << 63)
    """Seed of that noise."""

    @model_validator(mode="after")
    def _used(self) -> "ImportanceConfig":
        check_model_names(self, self.models, ("min_importance", "min_quantile", "min_gumbel_quantile"))
        check_range(
            self, ("min_quantile", "min_gumbel_quantile"), lambda value: 0 < value < 1, "a share between 0 and 1"
        )
        if "seed" in self.model_fields_set and not self.min_gumbel_quantile:
            raise ValueError("seed would be ignored without min_gumbel_quantile; leave it out")
        if self.length_correction and not self.models:
            raise ValueError("length_correction would be ignored without models; leave it out")
        return self


@dataclass(frozen=True)
class NgramCounts:
    """The n-grams of some texts by bucket, counted exactly."""

    counts: Counts
    """(buckets,)"""
    words: int
    documents: int

    @property
    def mean_words(self) -> float:
        """Words of a document."""
        return self.words / self.documents


@dataclass(frozen=True)
class ImportanceModel:
    """What tells a target from the raw sample."""

    target: NgramCounts
    raw: NgramCounts
    max_n: int
    """Longest n-gram [words]."""
    smoothing: float
    """Added to every count, so that no bucket has probability 0."""

    def log_ratios(self) -> Floats:
        """(buckets,) ln p - ln q, where p and q are (count + smoothing) / (sum of counts + smoothing x buckets)."""
        target, raw = (_log_shares(bag.counts, self.smoothing) for bag in (self.target, self.raw))
        return target - raw


def _log_shares(counts: Counts, smoothing: float) -> Floats:
    shares: Floats = np.log(counts + smoothing) - math.log(int(counts.sum()) + smoothing * len(counts))
    return shares


def poisson_log_ratio(words: int, target: float, raw: float) -> float:
    """ln of the probability of a number of words under a mean over that under another, each with FLOOR added."""

    def log_probability(mean: float) -> float:
        exact = words * math.log(mean) - mean - math.lgamma(words + 1)
        return math.log(math.exp(exact) + FLOOR)

    return log_probability(target) - log_probability(raw)


def log_weight(keys: Codes, ratios: Floats, max_n: int) -> float:
    """The log importance weight of a document: the sum of its n-grams' log ratios [nats]."""
    return float(np.add.reduce(ratios[hash_buckets(ngram_codes(keys, max_n), len(ratios))]))


def save_importance(model: ImportanceModel, path: Path) -> None:
    """Write the model; equal models give equal bytes."""
    bags = {"target": model.target, "raw": model.raw}
    sizes = {name: {"words": bag.words, "documents": bag.documents} for name, bag in bags.items()}
    header = {"max_n": model.max_n, "smoothing": model.smoothing, **sizes}
    write_model(path, KIND, header, {name: bag.counts for name, bag in bags.items()})


def load_importance(path: str, where: str) -> ImportanceModel:
    """The model in a file. Raises ConfigError if it is none."""
    header, columns = read_model(path, KIND, where)
    target, raw = (NgramCounts(columns[name], **header[name]) for name in ("target", "raw"))
    return ImportanceModel(target, raw, header["max_n"], header["smoothing"])


def make_importance(config: ImportanceConfig, models: Mapping[str, str]) -> RowFunction:
    """The function that adds the weights per word; null for a text without words, as there is nothing to weigh."""
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
    """The stored log weights per word."""
    return lambda batch: entry_values(batch, COLUMN, name)


def resampling_value(name: str, seed: int) -> Callable[[pa.RecordBatch], Floats]:
    """The whole log weights with Gumbel noise that follows from doc_id."""
    return lambda batch: (
        entry_values(batch, COLUMN, name) * column_values(batch, WORDS)
        + gumbel_draws(uniform_draws(batch.column("doc_id").to_pylist(), seed, name))
    )


def quantile_name(setting: str, name: str) -> str:
    """What the cut-off of a target is called."""
    return f"importance.{setting}.{name}"


def importance_quantiles(config: ImportanceConfig) -> list[Quantile]:
    """The cut-offs below which the shares that go lie."""
    found = [
        Quantile(quantile_name("min_quantile", name), COLUMN, share, weight_per_word(name), (COLUMN,))
        for name, share in sorted(config.min_quantile.items())
    ]
    return found + [
        Quantile(
            quantile_name("min_gumbel_quantile", name),
            COLUMN,
            share,
            resampling_value(name, config.seed),
            ("doc_id", COLUMN, WORDS),
        )
        for name, share in sorted(config.min_gumbel_quantile.items())
    ]


def importance_checks(config: ImportanceConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> list[Check]:
    """Thresholds first, then the cut-offs of the quantiles."""
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
    """The model files."""
    return dict(config.models)


IMPORTANCE = PerDocument(
    name="importance",
    version=2,
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
        "importance_resampled": "log importance weight and Gumbel noise together are below the language's "
        "min_gumbel_quantile",
    },
    checks=importance_checks,
    quantiles=importance_quantiles,
    again="rest",
)
