"""`penstock whatif`: the predicted effect of other thresholds on a finished run, from its stored signals."""

import argparse
from collections.abc import Sequence

from jobs.arguments import Command, add_overrides, add_run
from jobs.recipe import stored_recipe
from jobs.spark_session import SparkConfig, open_session
from pipeline.engine.spark import ship_models
from pipeline.engine.stage import no_checks
from pipeline.inspect.whatif import Prediction, format_prediction, open_tables, predict, to_json
from pipeline.inspect.whatif_limits import changed_settings
from pipeline.models import ModelsConfig, ensure_model
from pipeline.stages import CHECKED
from schemas.config import Recipe
from schemas.ids import canonical_json
from schemas.storage import Store

VERBS = {
    "whatif": "Predict what a finished run would keep with other thresholds, without reading texts or changing the "
    "run.",
}


def add_whatif_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `whatif` except the run and `--set`."""
    parser.add_argument("--json", help="write the whole prediction to this file, every curve included")


def whatif_command(arguments: argparse.Namespace) -> int:
    """Predict what a finished run would keep with other thresholds, without reading texts or changing the run."""
    run = Store(arguments.run)
    prediction, changed = predict_run(run, arguments.overrides)
    print(format_prediction(prediction, changed))
    if arguments.json:
        folder, _, name = arguments.json.rpartition("/")
        Store(folder or ".").write_atomic(name, canonical_json(to_json(prediction, changed)))
    return 0


def predict_run(run: Store, overrides: Sequence[str]) -> tuple[Prediction, dict[str, tuple[object, object]]]:
    """Return the prediction for a run and the changed settings. Raises ConfigError before Spark starts."""
    committed, proposed = stored_recipe(run, []), stored_recipe(run, overrides)
    changed = changed_settings(committed, proposed)
    models = deciding_models(proposed)
    open_tables(run)  # a missing or inconsistent run is rejected before Spark starts
    spark = open_session(proposed.section("spark", SparkConfig), "penstock what-if")
    try:
        ship_models(spark, [path for paths in models.values() for path in paths.values()])
        return predict(spark, run, proposed, models), changed
    finally:
        spark.stop()


def deciding_models(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return the local paths of the models of every stage that can drop documents, by stage and name of the model."""
    config = recipe.section("models", ModelsConfig)
    return {
        stage.name: {name: str(ensure_model(place, config).path) for name, place in places.items()}
        for stage in CHECKED
        if stage.checks is not no_checks and (places := stage.models(recipe[stage.name]))
    }


COMMANDS = {
    "whatif": Command(
        (add_run, add_overrides, add_whatif_arguments),
        whatif_command,
        "whatif run --set quality.min_words=30 --set toxicity.max_words=0",
    ),
}
