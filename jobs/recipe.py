"""Reading of recipes, with the sections of all data stages, the models, Spark, the plan and the training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.spark_session import SparkConfig
from pipeline.models import ModelsConfig
from pipeline.stages import sections
from schemas.config import Recipe, Section, load_recipe, parse_recipe
from schemas.errors import ConfigError
from schemas.manifest import read_run
from schemas.storage import Store
from train.config.settings import SECTIONS


def recipe_sections() -> Mapping[str, type[Section]]:
    """Return the class of every section that a recipe may have, by name."""
    return {**sections(), "models": ModelsConfig, "spark": SparkConfig, **SECTIONS}


def read_recipe(path: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe in a TOML file with overrides applied. Raises ConfigError that lists every wrong setting."""
    return load_recipe(read_values(path), overrides, recipe_sections(), path)


def read_values(path: str) -> dict[str, Any]:
    """Return the values of a TOML file. Raises ConfigError if the file cannot be read or is not TOML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"recipe {path}: expected a readable TOML file, got an error: {reason}. Correct the path."
        ) from error
    return parse_recipe(text, path)


def stored_recipe(run: Store, overrides: Sequence[str]) -> Recipe:
    """Return the recipe that a run stores, with overrides applied. Raises ConfigError if the folder is not a run."""
    recipe = read_run(run).recipe
    if not recipe:
        raise ConfigError(
            f"{run.uri}: expected a run folder, got a folder without a recipe. Run `penstock run RECIPE --out …`."
        )
    return load_recipe(recipe, overrides, recipe_sections(), f"{run.uri}/run.json")
