"""Quality classifiers as a stage: the probability that each model gives a text, and three ways to keep by it.

Scores are stored, decisions come later and are replayable: by threshold, by quantile of the language, or by a draw that
follows from doc_id (GPT-3's rule). Models: `linear` (ours) and any supervised fastText file; `train` makes both.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from pipeline.classifier.columns import MAX_SHAPE, Floats, entry_values, log_odds, pareto_shape, uniform_draws
from pipeline.classifier.fasttext import GOOD_LABEL, load_fasttext
from pipeline.classifier.linear import is_arrow, keys_of_row, load_linear, new_vocabulary
from pipeline.engine.stage import EVERY, Check, Cutoffs, Drop, PerDocument, Quantile, Row, RowFunction
from pipeline.text.words import Vocabulary
from schemas.config import Section, decision, location, suggest_name
from schemas.errors import ConfigError

SCORES = "classifier_scores"


class ClassifierConfig(Section):
    """The section `[classifier]` of a recipe."""

    models: dict[str, str] = location({})
    """Name in the model store, or path, of each classifier, by the name its scores have; empty: no text is scored."""
    labels: dict[str, str] = Field(default={})
    """Label of the good class, by classifier, where a fastText model calls it otherwise than `__label__good`."""
    min_score: dict[str, float] = decision({})
    """Probability of the good class from which a document stays, by classifier, 0..1."""
    min_quantile: dict[str, float] = decision({})
    """Share of each language's documents, counted from the lowest score, that goes, by classifier: 0.9 keeps the top
    tenth, as DCLM does (Li et al. 2024, arXiv 2406.11794)."""
    min_alpha: dict[str, float] = decision({})
    """Shape alpha of GPT-3's rule, by classifier: a document stays with probability (2 - score)^-alpha; theirs is 9."""
    seed: int = decision(9, ge=0, lt=1 << 63)
    """Seed of the draws of that rule."""

    @model_validator(mode="after")
    def _used(self) -> "ClassifierConfig":
        check_model_names(self, self.models, ("labels", "min_score", "min_quantile", "min_alpha"))
        check_range(self, ("min_score",), lambda value: 0 <= value <= 1, "a probability in 0..1")
        check_range(self, ("min_quantile",), lambda value: 0 < value < 1, "a share between 0 and 1")
        check_range(self, ("min_alpha",), lambda value: 0 < value <= MAX_SHAPE, "a positive shape of at most 1e6")
        if "seed" in self.model_fields_set and not self.min_alpha:
            raise ValueError("seed would be ignored without min_alpha; leave it out")
        return self


def check_model_names(config: Section, known: Mapping[str, str], fields: tuple[str, ...]) -> None:
    """Raise ValueError if a field of a section names a model that is not among the known ones."""
    wrong = [
        f"{field}.{name}: no such model{suggest_name(name, known) if known else ', models is empty'}"
        for field in fields
        for name in sorted(set(getattr(config, field)) - set(known))
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def check_range(config: Section, fields: tuple[str, ...], right: Callable[[float], bool], promise: str) -> None:
    """Raise ValueError if a value of these fields is outside its range."""
    for field in fields:
        for name, value in sorted(getattr(config, field).items()):
            if not right(value):
                raise ValueError(f"{field}.{name}: expected {promise}, got {value}")


def load_scorer(path: str, label: str | None, name: str, vocabulary: Vocabulary) -> Callable[[Row], float]:
    """The probability of the good class as a function of the row. Raises ConfigError if the file is no classifier."""
    where = f"classifier.models.{name}"
    if is_arrow(path):
        if label is not None:
            raise ConfigError(f"classifier.labels.{name}: {path} is a linear model without labels; leave it out")
        linear = load_linear(path, where)
        return lambda row: linear.probability(keys_of_row(row, vocabulary))
    score = load_fasttext(path, label or GOOD_LABEL, where)
    return lambda row: score(row["_body"])


def make_classifier(config: ClassifierConfig, models: Mapping[str, str]) -> RowFunction:
    """The function that adds the scores; None where there is no model."""
    vocabulary = new_vocabulary()
    scorers = {name: load_scorer(models[name], config.labels.get(name), name, vocabulary) for name in config.models}

    def classify(row: Row) -> Drop | None:
        row[SCORES] = {name: float(np.float32(score(row))) for name, score in scorers.items()} or None
        return None

    return classify


def score_of(name: str) -> Callable[[pa.RecordBatch], Floats]:
    """The stored scores of a classifier."""
    return lambda batch: entry_values(batch, SCORES, name)


def odds_of(name: str) -> Callable[[pa.RecordBatch], Floats]:
    """Their log odds."""
    return lambda batch: log_odds(entry_values(batch, SCORES, name))


def shape_of(name: str, seed: int) -> Callable[[pa.RecordBatch], Floats]:
    """The largest alpha at which GPT-3's rule keeps each document."""
    return lambda batch: pareto_shape(
        entry_values(batch, SCORES, name), uniform_draws(batch.column("doc_id").to_pylist(), seed, name)
    )


def quantile_name(name: str) -> str:
    """What the cut-off of a classifier is called."""
    return f"classifier.min_quantile.{name}"


def classifier_checks(config: ClassifierConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> list[Check]:
    """Thresholds first, then quantiles, then draws; each by the classifiers' names."""
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
    """The log odds below which the share that goes lies."""
    return [
        Quantile(quantile_name(name), SCORES, share, odds_of(name), (SCORES,))
        for name, share in sorted(config.min_quantile.items())
    ]


def classifier_models(config: ClassifierConfig) -> dict[str, str]:
    """The model files."""
    return dict(config.models)


CLASSIFIER = PerDocument(
    name="classifier",
    version=2,
    config=ClassifierConfig,
    reads=("_body",),
    adds=(SCORES,),
    reasons={},
    make=make_classifier,
    models=classifier_models,
    ends=False,
    verdicts={
        "classifier_score": "a classifier gives the text a lower probability than min_score",
        "classifier_quantile": "the log odds of a classifier's score are below the language's min_quantile",
        "classifier_sampled": "the draw of GPT-3's rule went against the text: it stays only up to the shape alpha "
        "that is its value",
    },
    checks=classifier_checks,
    quantiles=classifier_quantiles,
    again="rest",
)
