"""Reading of recipes, with the sections of all data stages, the models, Spark, the plan and the training run."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.spark_session import SparkConfig, harmless_settings
from pipeline.engine.stage import no_checks
from pipeline.models import DEFAULT_CACHE, ModelsConfig, ensure_model
from pipeline.recipe_stages import SECTION, StagesConfig, resolve_functions
from pipeline.stages import checked_stages, sections
from pipeline.steps.verdicts import settings_by_source
from schemas.config import Recipe, Section
from schemas.errors import ConfigError, ContractError
from schemas.logs import LOGGER
from schemas.manifest import check_folder, open_table, read_run
from schemas.overrides import load_recipe, parse_recipe
from schemas.paths import is_on_known_server
from schemas.storage import Store
from schemas.versions import PinnedRun
from train.config.settings import SECTIONS


def recipe_sections() -> Mapping[str, type[Section]]:
    """Return the class of every section that a recipe may have, by name."""
    return {**sections(), "models": ModelsConfig, "spark": SparkConfig, **SECTIONS}


RECIPES = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that are installed with the package: name, such as `web` -> TOML file."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.toml"))}


def recipe_file(recipe: str) -> str:
    """Return the path of a recipe: an existing file, or else the shipped recipe that is named, as `web` or `web.toml`.

    A recipe that is neither is returned unchanged.
    """
    shipped = shipped_recipes().get(recipe.removesuffix(".toml"))
    return str(shipped) if shipped and not Path(recipe).is_file() else recipe


def read_recipe(path: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe in a TOML file with overrides applied. Raises ConfigError that lists every wrong setting."""
    values = resolve_functions(read_values(path), str(Path(path).parent))
    return load_recipe(values, overrides, recipe_sections(), path)


def read_values(path: str) -> dict[str, Any]:
    """Return the values of a TOML file, or of a shipped recipe by its name.

    Raises ConfigError if the file cannot be read or is not TOML.
    """
    try:
        text = Path(recipe_file(path)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        close = _similar(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(
            f"recipe {path}: expected a readable TOML file, got an error: {reason}{close}. Correct the path, "
            f"or name a shipped recipe: {', '.join(shipped_recipes())}."
        ) from error
    return parse_recipe(text, path)


def _similar(path: str) -> str:
    """Return ` (did you mean X?)` with the file beside a path or the shipped recipe of the most similar name."""
    beside = [str(other) for other in Path(path).parent.glob("*.toml")] if Path(path).parent.is_dir() else []
    close = difflib.get_close_matches(path, [*beside, *shipped_recipes()], n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def stored_sections(run: Store, trust: bool = True) -> dict[str, Any]:
    """Return the sections of the recipe that a run stores, not checked.

    Without `trust`, the settings of Spark that could start a program or send data elsewhere are left out (see
    `warn_of_spark`), and nothing is written to a folder of models that the run names.
    """
    recipe = read_run(run).recipe
    return recipe if trust else {name: _trusted(name, section) for name, section in recipe.items()}


def _trusted(name: str, section: Any) -> Any:
    """Return the settings of a section of a stored recipe that are used without trust in the run folder."""
    if not isinstance(section, dict):
        return section
    if name == "spark":
        return harmless_settings(section)
    # Nothing is downloaded into a folder that only the run names.
    is_own = name == "models" and section.get("cache", DEFAULT_CACHE) != DEFAULT_CACHE
    return {**section, "offline": True} if is_own else section


def stored_recipe(run: Store, overrides: Sequence[str], name: str = "", trust: bool = True) -> Recipe:
    """Return the recipe that a run stores, with overrides applied. Raises ConfigError if the folder is not a run.

    `name`: name of the run in errors; empty = its folder. `trust`: see `stored_sections`.
    """
    recipe = stored_sections(run, trust)
    if not recipe and isinstance(run, PinnedRun):
        for table in read_run(run).tables:
            open_table(run, table)  # that a takedown has replaced the version is the better reason
        raise ConfigError(
            f"{run.pinned_address}: expected a version whose manifest has its recipe, got one that an older penstock "
            "made. Run `penstock run` again with its settings in a new folder."
        )
    if not recipe:
        check_folder(run)
        raise ConfigError(
            f"{run.uri}: expected a run folder, got a folder without a recipe. Run `penstock run RECIPE --out …`."
        )
    return load_recipe(recipe, overrides, recipe_sections(), f"{name or run.uri}/run.json")


def warn_of_spark(run: Store, trust: bool) -> None:
    """Print the settings of Spark in the recipe of a run that `stored_recipe` leaves out without `trust`, if any."""
    spark = read_run(run).recipe.get("spark")
    if not trust and isinstance(spark, dict) and (left_out := sorted(spark.keys() - harmless_settings(spark).keys())):
        names = ", ".join(f"spark.{key}" for key in left_out)
        LOGGER.warning(f"{run.uri}: not used, because a run folder is not trusted: {names}; --trust-run uses it")


def check_functions(run: Store, recipe: Recipe, verb: str, trust: bool) -> None:
    """Raise ContractError if the recipe of a run names Python functions, which `verb` executes, without `trust`."""
    functions = [stage.function for stage in recipe.section(SECTION, StagesConfig).stages]
    if functions and not trust:
        raise ContractError(
            f"{run.uri}: expected --trust-run, because {verb} executes what the run names ({', '.join(functions)}), "
            "got none. Look at these files, and add the option if you trust them."
        )


def check_addresses(
    run: Store,
    recipe: Recipe,
    overrides: Sequence[str] = (),
    trust: bool = False,
    fix: str = "Look at these addresses, and add --trust-run if you trust them.",
) -> None:
    """Raise ContractError if a recipe has an address on a server that only the run names, unless it has `trust`.

    `overrides`: settings that the user has given. `fix`: the last sentence of the message.
    """
    if trust:
        return
    unknown = [
        own
        for own in _addresses(recipe.to_json())
        if not is_on_known_server(run, own) and not any(own in given for given in overrides)
    ]
    if unknown:
        raise ContractError(
            f"{run.uri}: expected addresses on servers that the environment or the address of the run names, got "
            f"{unknown[0]} in its recipe, to which your credentials would be sent. {fix}"
        )


def _addresses(value: Any) -> Iterator[str]:
    """Yield the addresses in the values of a recipe."""
    if isinstance(value, str):
        yield from [value] if "://" in value else []
    elif isinstance(value, Mapping):
        for own in value.values():
            yield from _addresses(own)
    elif isinstance(value, (list, tuple)):
        for own in value:
            yield from _addresses(own)


def deciding_models(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return stage -> model name -> local path, for the models of every stage that can drop documents."""
    config = recipe.section("models", ModelsConfig)
    return {
        settings.key: {name: str(ensure_model(place, config).path) for name, place in places.items()}
        for stage in checked_stages(recipe)
        if stage.checks is not no_checks
        for settings in settings_by_source(recipe, stage.name)
        if (places := stage.models(settings.section))
    }
