"""`penstock train-lm`, `train-classifier`, `train-importance`, `derive-profiles`: what is learnt from text."""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from jobs.recipe import read_values
from jobs.spark_session import SparkConfig, open_session
from pipeline.fit.classifier import TrainClassifierConfig, summary, train_classifier
from pipeline.fit.importance import TrainImportanceConfig, train_importance
from pipeline.fit.language_model import LmConfig, checked_target, describe_model, make_language_model
from pipeline.models import ModelsConfig
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.text.derive_profiles import DeriveConfig, derive_profiles
from schemas.config import Recipe, Section, load_recipe
from schemas.manifest import open_table
from schemas.storage import Store

Arguments = argparse.Namespace
Sections = Mapping[str, type[Section]]
SHARED: Sections = {"spark": SparkConfig, "models": ModelsConfig}


def read_settings(arguments: Arguments, sections: Sections) -> Recipe:
    """The settings of a job: those of its TOML file, if one is named, with overrides on top. Raises ConfigError."""
    values = read_values(arguments.recipe) if arguments.recipe else {}
    return load_recipe(values, arguments.overrides, {**sections, **SHARED}, arguments.recipe or "settings")


def with_spark(recipe: Recipe, name: str, work: Callable[[Any], Any]) -> Any:
    """What `work` returns, given a session that is closed afterwards."""
    spark = open_session(recipe.section("spark", SparkConfig), name)
    try:
        return work(spark)
    finally:
        spark.stop()


def train_lm_command(arguments: Arguments) -> int:
    """Train an n-gram language model on the clean text of a run (or on words of your own), for perplexities."""
    recipe = read_settings(arguments, {"lm": LmConfig, "train_lm": TrainLmConfig})
    config, training = recipe.section("lm", LmConfig), recipe.section("train_lm", TrainLmConfig)
    checked_target(config, training, arguments.out)
    made = with_spark(recipe, "train-lm", lambda spark: make_language_model(spark, config, training, arguments.out))
    print(f"{arguments.out}: {describe_model(made)}")
    use = f"--set perplexity.scorer=ngram --set 'perplexity.models={{{config.language}=\"{arguments.out}\"}}'"
    print(f"to use it: penstock run RECIPE --out RUN {use}")
    return 0


def train_classifier_command(arguments: Arguments) -> int:
    """Train a quality classifier, measure it on texts held out, and put it into the model store."""
    recipe = read_settings(arguments, {"train_classifier": TrainClassifierConfig})
    config, models = recipe.section("train_classifier", TrainClassifierConfig), recipe.section("models", ModelsConfig)
    runs = config.positives.run or config.negatives.run
    print(
        summary(_maybe_with_spark(recipe, runs, lambda spark: train_classifier(config, arguments.out, spark, models)))
    )
    return 0


def train_importance_command(arguments: Arguments) -> int:
    """Count the n-grams of a target and of a raw sample (DSIR), and put the model into the model store."""
    recipe = read_settings(arguments, {"train_importance": TrainImportanceConfig})
    config, models = recipe.section("train_importance", TrainImportanceConfig), recipe.section("models", ModelsConfig)
    runs = config.target.run or config.raw.run
    made = _maybe_with_spark(recipe, runs, lambda spark: train_importance(config, arguments.out, spark, models))
    print(json.dumps(made["counted"], indent=1))
    return 0


def derive_profiles_command(arguments: Arguments) -> int:
    """Derive stop words and thresholds of each language from clean reference text."""
    recipe = read_settings(arguments, {"derive": DeriveConfig})
    config = recipe.section("derive", DeriveConfig)
    found = _maybe_with_spark(recipe, config.run, lambda spark: derive_profiles(config, arguments.out, spark))
    print(f"{arguments.out}: profiles of {len(found)} languages: {', '.join(sorted(found))}")
    return 0


def _maybe_with_spark(recipe: Recipe, run: str | None, work: Callable[[Any], Any]) -> Any:
    """What `work` returns, given a session where a run is read, whose parts are spread over workers.

    Raises ContractError before Spark starts if the run has no clean text.
    """
    if run is None:
        return work(None)
    open_table(Store(run), "clean")
    return with_spark(recipe, "penstock", work)
