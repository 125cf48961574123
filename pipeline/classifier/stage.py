"""The stage `classifier`: quality classifiers score each text, and three kinds of checks drop documents by the scores.

Scores are stored, so the checks can be repeated later with other settings. A check compares a score with a threshold,
with a quantile of its language, or with a random draw derived from doc_id (GPT-3's rule). Models are linear classifiers
of this package or supervised fastText files; `penstock train-classifier` writes both.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from pipeline.classifier.columns import (
    MAX_SHAPE,
    Floats,
    check_model_names,
    check_range,
    entry_values,
    log_odds,
    pareto_shape,
    uniform_draws,
)
from pipeline.classifier.fasttext import GOOD_LABEL, load_fasttext
from pipeline.classifier.linear import is_arrow, keys_of_row, load_linear, model_kind, new_vocabulary
from pipeline.classifier.signals import LANGUAGE, SIGNAL_KIND, SignalMeter, load_signals
from pipeline.engine.stage import EVERY, Check, Cutoffs, Drop, PerDocument, Quantile, Row, RowFunction
from pipeline.text.words import Vocabulary
from schemas.config import Section, decision, location
from schemas.errors import ConfigError

SCORES = "classifier_scores"


class ClassifierConfig(Section):
    """The section `[classifier]` of a recipe: classifiers that score documents, and limits of their scores."""

    models: dict[str, str] = location({})
    """Name in the model store, or path, of each classifier, by a name for its scores. Empty scores no text."""
    labels: dict[str, str] = Field(default={})
    """Label of the good class, by classifier; required for a fastText model without the label `__label__good`."""
    min_score: dict[str, float] = decision({})
    """Minimum probability of the good class of a kept document, by classifier, 0..1."""
    min_quantile: dict[str, float] = decision({})
    """Share of each language's documents to drop, by classifier: those with the lowest scores. 0.9 keeps the top
    tenth, as DCLM does (Li et al. 2024, arXiv 2406.11794), and all documents that share the highest score."""
    min_alpha: dict[str, float] = decision({})
    """Parameter alpha of GPT-3's rule, by classifier: a document is kept with probability (2 - score)^-alpha. GPT-3
    uses 9."""
    seed: int = decision(9, ge=0, lt=1 << 63)
    """Seed of the random draws of GPT-3's rule."""

    @model_validator(mode="after")
    def _used(self) -> "ClassifierConfig":
        check_model_names(self, self.models, ("labels", "min_score", "min_quantile", "min_alpha"))
        check_range(self, ("min_score",), lambda value: 0 <= value <= 1, "a probability in 0..1")
        check_range(self, ("min_quantile",), lambda value: 0 < value < 1, "a share between 0 and 1")
        check_range(self, ("min_alpha",), lambda value: 0 < value <= MAX_SHAPE, "a positive shape of at most 1e6")
        if "seed" in self.model_fields_set and not self.min_alpha:
            raise ValueError("seed would be ignored without min_alpha. Remove classifier.seed.")
        return self


def load_scorer(path: str, label: str | None, name: str, vocabulary: Vocabulary) -> Callable[[Row], float | None]:
    """Load a classifier and return a function from a row to the probability of the good class.

    The function returns None for a text in a language that the classifier does not score. Raises ConfigError if the
    file is not a classifier, or if a label is set for a linear model.
    """
    where = f"classifier.models.{name}"
    if is_arrow(path):
        if label is not None:
            raise ConfigError(
                f"classifier.labels.{name}: expected a fastText model, got {path}, a linear model without labels. "
                f"Remove classifier.labels.{name}."
            )
        if model_kind(path) == SIGNAL_KIND:
            return signal_scorer(path, where)
        linear = load_linear(path, where)
        return lambda row: linear.probability(keys_of_row(row, vocabulary))
    score = load_fasttext(path, label or GOOD_LABEL, where)
    return lambda row: score(row["_body"])


def signal_scorer(path: str, where: str) -> Callable[[Row], float | None]:
    """Load a classifier over signals; return a function from a row to its probability, or to None if not English."""
    model, meter = load_signals(path, where), SignalMeter()

    def score(row: Row) -> float | None:
        return model.probability(meter.features(row["_body"])) if row["language"] == LANGUAGE else None

    return score


def make_classifier(config: ClassifierConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that adds scores to a row: a dict by classifier name, or None if no classifier gives one."""
    vocabulary = new_vocabulary()
    scorers = {name: load_scorer(models[name], config.labels.get(name), name, vocabulary) for name in config.models}

    def classify(row: Row) -> Drop | None:
        scores = {name: score(row) for name, score in scorers.items()}
        row[SCORES] = {name: float(np.float32(value)) for name, value in scores.items() if value is not None} or None
        return None

    return classify


def score_of(name: str) -> Callable[[pa.RecordBatch], Floats]:
    """Return a function from a batch to the stored scores of a classifier."""
    return lambda batch: entry_values(batch, SCORES, name)


def odds_of(name: str) -> Callable[[pa.RecordBatch], Floats]:
    """Return a function from a batch to the log odds of a classifier's scores."""
    return lambda batch: log_odds(entry_values(batch, SCORES, name))


def shape_of(name: str, seed: int) -> Callable[[pa.RecordBatch], Floats]:
    """Return a function from a batch to the largest alpha at which GPT-3's rule keeps each document."""
    return lambda batch: pareto_shape(
        entry_values(batch, SCORES, name), uniform_draws(batch.column("doc_id").to_pylist(), seed, name)
    )


def quantile_name(name: str) -> str:
    """Return the key of a classifier's cut-off: `classifier.min_quantile.` and its name."""
    return f"classifier.min_quantile.{name}"


def classifier_checks(config: ClassifierConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> list[Check]:
    """Return the checks against thresholds, then quantiles, then random draws, each sorted by classifier name."""
    checks = [
        Check("classifier_score", SCORES, "min_score", {EVERY: limit}, score_of(name), (SCORES,), name)
        for name, limit in sorted(config.min_score.items())
    ]
    checks += [
        Check(
            "classifier_quantile",
            SCORES,
            "min_quantile",
            cutoffs.get(quantile_name(name), {}),
            odds_of(name),
            (SCORES,),
            name,
        )
        for name in sorted(config.min_quantile)
    ]
    checks += [
        Check(
            "classifier_sampled",
            SCORES,
            "min_alpha",
            {EVERY: alpha},
            shape_of(name, config.seed),
            ("doc_id", SCORES),
            name,
        )
        for name, alpha in sorted(config.min_alpha.items())
    ]
    return checks


def classifier_quantiles(config: ClassifierConfig) -> list[Quantile]:
    """Return the quantiles of log odds to compute from the data; documents with log odds below them are dropped."""
    # not of probabilities: one bin of a histogram of them would merge values close to 1
    return [
        Quantile(quantile_name(name), SCORES, share, odds_of(name), (SCORES,), keeps_highest=True)
        for name, share in sorted(config.min_quantile.items())
    ]


def classifier_models(config: ClassifierConfig) -> dict[str, str]:
    """Return the model-store name or path of each model, keyed by its name in `classifier.models`."""
    return dict(config.models)


CLASSIFIER = PerDocument(
    name="classifier",
    version=4,
    config=ClassifierConfig,
    reads=("_body", "language"),
    adds=(SCORES,),
    reasons={},
    make=make_classifier,
    models=classifier_models,
    ends=False,
    verdicts={
        "classifier_score": "a classifier gives the text a lower probability than min_score",
        "classifier_quantile": "the log odds of a classifier's score are below the language's min_quantile",
        "classifier_sampled": "the random draw of GPT-3's rule drops the text: it is kept only at a shape alpha up to "
        "its value",
    },
    checks=classifier_checks,
    quantiles=classifier_quantiles,
    again="rest",
)
