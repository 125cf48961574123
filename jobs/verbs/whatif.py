"""`penstock whatif`: other thresholds tried on a finished run, from its stored measurements."""

import argparse
from collections.abc import Sequence

from jobs.recipe import stored_recipe
from jobs.spark_session import SparkConfig, open_session
from pipeline.engine.spark import ship_models
from pipeline.engine.stage import no_checks
from pipeline.inspect.whatif import Prediction, open_tables, predict
from pipeline.inspect.whatif_limits import changed_settings
from pipeline.inspect.whatif_text import format_prediction, to_json
from pipeline.models import ModelsConfig, ensure_model
from pipeline.stages import CHECKED
from schemas.config import Recipe
from schemas.ids import canonical_json
from schemas.storage import Store


def whatif_command(arguments: argparse.Namespace) -> int:
    """Predict what a finished run would keep with other thresholds; no text is read and nothing is changed."""
    run = Store(arguments.run)
    prediction, changed = predict_run(run, arguments.overrides)
    print(format_prediction(prediction, changed))
    if arguments.json:
        folder, _, name = arguments.json.rpartition("/")
        Store(folder or ".").write_atomic(name, canonical_json(to_json(prediction, changed)))
    return 0


def predict_run(run: Store, overrides: Sequence[str]) -> tuple[Prediction, dict[str, tuple[object, object]]]:
    """The prediction for a run and the settings that it changes. Raises ConfigError before Spark starts."""
    committed, wanted = stored_recipe(run, []), stored_recipe(run, overrides)
    changed = changed_settings(committed, wanted)
    models = deciding_models(wanted)
    open_tables(run)  # a run that is not there, or not of one piece, is refused before Spark starts
    spark = open_session(wanted.section("spark", SparkConfig), "penstock what-if")
    try:
        ship_models(spark, [path for paths in models.values() for path in paths.values()])
        return predict(spark, run, wanted, models), changed
    finally:
        spark.stop()


def deciding_models(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Local paths of the models of the stages that decide something."""
    config = recipe.section("models", ModelsConfig)
    return {
        stage.name: {name: str(ensure_model(place, config).path) for name, place in places.items()}
        for stage in CHECKED
        if stage.checks is not no_checks and (places := stage.models(recipe[stage.name]))
    }
