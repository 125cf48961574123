"""The verbs that fetch, verify and train models, and the verb that derives language profiles from text."""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from jobs.arguments import Command, add_overrides, add_verbose
from jobs.recipe import read_values
from jobs.spark_session import SparkConfig, spark_session
from pipeline.fit.classifier import TrainClassifierConfig, summary, train_classifier
from pipeline.fit.importance import TrainImportanceConfig, train_importance
from pipeline.fit.language_model import LmConfig, checked_target, describe_model, make_language_model
from pipeline.fit.toxicity import TrainToxicityConfig, train_toxicity
from pipeline.fit.toxicity import summary as toxicity_summary
from pipeline.models import ModelsConfig, fetch_model, list_models, verify_model
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.text.derive_profiles import DeriveConfig, derive_profiles
from schemas.config import Recipe, Section
from schemas.errors import ConfigError
from schemas.manifest import open_table
from schemas.overrides import load_recipe
from schemas.storage import Store

GROUP = "models"
VERBS = {
    "models": "List, fetch or verify the models of the store.",
    "train-lm": "Train an n-gram language model for perplexities. It is trained on the clean text of a run or on "
    "files of text.",
    "train-classifier": "Train a quality classifier for the model store. It is measured on held-out texts.",
    "train-importance": "Train an importance model (DSIR) for the model store. It is trained on a target and a raw "
    "sample.",
    "train-toxicity": "Train a toxicity classifier on labelled texts. It is measured by cross-validation and added "
    "to the model store.",
    "derive-profiles": "Derive stop words and limits of languages from clean text.",
}

Arguments = argparse.Namespace
Sections = Mapping[str, type[Section]]
SHARED: Sections = {"spark": SparkConfig, "models": ModelsConfig}


def read_settings(arguments: Arguments, sections: Sections) -> Recipe:
    """Return the settings of a verb: its TOML file with overrides applied, or only the overrides without a file.

    Raises ConfigError that lists every wrong setting.
    """
    values = read_values(arguments.recipe) if arguments.recipe else {}
    return load_recipe(values, arguments.overrides, {**sections, **SHARED}, arguments.recipe or "settings")


def with_spark(arguments: Arguments, recipe: Recipe, name: str, work: Callable[[Any], Any]) -> Any:
    """Call `work` with a Spark session, close the session, and return the result."""
    with spark_session(recipe.section("spark", SparkConfig), name, arguments.verbose) as spark:
        return work(spark)


def add_fit_settings(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the TOML file with the settings of a model."""
    parser.add_argument("recipe", nargs="?", help="TOML file with the settings; --set can set all of them instead")


def add_model_file(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file that a language model is written to."""
    parser.add_argument("--out", required=True, help="file to write the model to, such as en.lm")


def add_model_folder(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder that a model is written to."""
    parser.add_argument("--out", required=True, help="folder to write the model to")


def add_profiles_file(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file that language profiles are written to."""
    parser.add_argument("--out", required=True, help="TOML file to write")


def train_lm_command(arguments: Arguments) -> int:
    """Train an n-gram language model for perplexities, on the clean text of a run or on files of text."""
    recipe = read_settings(arguments, {"lm": LmConfig, "train_lm": TrainLmConfig})
    config, training = recipe.section("lm", LmConfig), recipe.section("train_lm", TrainLmConfig)
    checked_target(config, training, arguments.out)
    result = with_spark(
        arguments, recipe, "train-lm", lambda spark: make_language_model(spark, config, training, arguments.out)
    )
    print(f"{arguments.out}: {describe_model(result)}")
    use = f"--set perplexity.scorer=ngram --set 'perplexity.models={{{config.language}=\"{arguments.out}\"}}'"
    print(f"to use it: penstock run RECIPE --out RUN {use}")
    return 0


def train_classifier_command(arguments: Arguments) -> int:
    """Train a quality classifier, measure it on held-out texts, and add it to the model store."""
    recipe = read_settings(arguments, {"train_classifier": TrainClassifierConfig})
    config, models = recipe.section("train_classifier", TrainClassifierConfig), recipe.section("models", ModelsConfig)
    runs = config.positives.run or config.negatives.run
    trained = _maybe_with_spark(
        arguments, recipe, runs, lambda spark: train_classifier(config, arguments.out, spark, models)
    )
    print(summary(trained))
    return 0


def train_importance_command(arguments: Arguments) -> int:
    """Train an importance model (DSIR) on a target and a raw sample, and add it to the model store."""
    recipe = read_settings(arguments, {"train_importance": TrainImportanceConfig})
    config, models = recipe.section("train_importance", TrainImportanceConfig), recipe.section("models", ModelsConfig)
    runs = config.target.run or config.raw.run
    importance = _maybe_with_spark(
        arguments, recipe, runs, lambda spark: train_importance(config, arguments.out, spark, models)
    )
    print(json.dumps(importance["content"]["counted"], indent=1))
    return 0


def train_toxicity_command(arguments: Arguments) -> int:
    """Train a toxicity classifier on labelled texts, measure it by cross-validation, and add it to the model store."""
    recipe = read_settings(arguments, {"train_toxicity": TrainToxicityConfig})
    config, models = recipe.section("train_toxicity", TrainToxicityConfig), recipe.section("models", ModelsConfig)
    print(toxicity_summary(train_toxicity(config, arguments.out, models)))
    print(f"to use it: penstock run RECIPE --out RUN --set toxicity.classifier={config.name}")
    return 0


def derive_profiles_command(arguments: Arguments) -> int:
    """Derive the stop words and thresholds of each language from clean reference text."""
    recipe = read_settings(arguments, {"derive": DeriveConfig})
    config = recipe.section("derive", DeriveConfig)
    profiles = _maybe_with_spark(
        arguments, recipe, config.run, lambda spark: derive_profiles(config, arguments.out, spark)
    )
    print(f"{arguments.out}: profiles of {len(profiles)} languages: {', '.join(sorted(profiles))}")
    return 0


def _maybe_with_spark(arguments: Arguments, recipe: Recipe, run: str | None, work: Callable[[Any], Any]) -> Any:
    """Return the result of `work`, called with a Spark session, or with None if `run` is None.

    Raises ContractError before Spark starts if the run has no clean text.
    """
    if run is None:
        return work(None)
    open_table(Store(run), "clean")
    return with_spark(arguments, recipe, "penstock", work)


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `models`."""
    parser.add_argument("action", choices=("list", "fetch", "verify"), help="what to do")
    parser.add_argument("name", nargs="?", help="name of a model, as `penstock models list` prints it")


def models_command(arguments: argparse.Namespace) -> int:
    """List, fetch or verify the models of the store."""
    config = ModelsConfig()
    if arguments.action == "list":
        for row in list_models(config):
            print(row)
        return 0
    if not arguments.name:
        raise ConfigError(
            f"models {arguments.action}: expected a name, got none. Choose one that `penstock models list` prints."
        )
    print((fetch_model if arguments.action == "fetch" else verify_model)(arguments.name, config))
    return 0


COMMANDS = {
    "models": Command((add_models_arguments,), models_command, "models fetch lid.176.ftz"),
    "train-lm": Command(
        (add_fit_settings, add_model_file, add_overrides, add_verbose),
        train_lm_command,
        "train-lm --out en.lm --set lm.run=wiki",
    ),
    "train-classifier": Command(
        (add_fit_settings, add_model_folder, add_overrides, add_verbose),
        train_classifier_command,
        "train-classifier --out models --set 'train_classifier.labelled=[\"pages.jsonl\"]'",
    ),
    "train-importance": Command(
        (add_fit_settings, add_model_folder, add_overrides, add_verbose),
        train_importance_command,
        "train-importance --out models --set 'train_importance.target={run=\"wiki\"}' --set "
        "'train_importance.raw={run=\"crawl\"}'",
    ),
    "train-toxicity": Command(
        (add_fit_settings, add_model_folder, add_overrides),
        train_toxicity_command,
        "train-toxicity toxicity.toml --out models",
    ),
    "derive-profiles": Command(
        (add_fit_settings, add_profiles_file, add_overrides, add_verbose),
        derive_profiles_command,
        "derive-profiles --out languages.toml --set derive.run=wiki",
    ),
}
