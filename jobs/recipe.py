"""The sections of a whole recipe: every data stage, the models, Spark, the plan and the training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs.session import SparkConfig
from pipeline.models import ModelsConfig
from pipeline.stages import sections
from schemas.config import Recipe, Section, load_recipe, parse_recipe
from schemas.errors import ConfigError
from train.config import PlanConfig, TrainConfig


def recipe_sections() -> Mapping[str, type[Section]]:
    """Every section a recipe may have, by name."""
    return {**sections(), "models": ModelsConfig, "spark": SparkConfig, "plan": PlanConfig, "train": TrainConfig}


def read_recipe(path: str, overrides: Sequence[str]) -> Recipe:
    """The recipe of a TOML file with overrides applied. Raises ConfigError with every wrong name at once."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"recipe {path}: cannot be read: {error.strerror}; give the path of a TOML file") from error
    return load_recipe(parse_recipe(text, path), overrides, recipe_sections(), path)
