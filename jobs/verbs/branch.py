"""Branches: other datasets made by changed recipes of a run, in folders below it; only what changes is computed.

A branch stands on the run's tables as far as their fingerprints agree, and on its tokenizer in any case: losses per
token of two tokenizers could not be compared.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.recipe import recipe_sections
from jobs.spark_session import SparkConfig, open_session
from pipeline.engine.step import TableJob
from pipeline.inspect.without_rules import leave_out
from pipeline.run import homes_of, prepare, run_steps, settings_of
from pipeline.stages import STEPS
from pipeline.tokens.tokenizer import TO_TRAIN
from schemas.ablation import ABLATIONS
from schemas.config import Recipe, load_recipe
from schemas.errors import ConfigError
from schemas.ids import digest_of
from schemas.manifest import RUN_NAME, Manifest, open_table, read_run
from schemas.storage import Store
from schemas.versions import attach
from train.config.settings import SECTIONS

NAME = re.compile(r"[\w.+=-]{1,80}")


@dataclass(frozen=True)
class Change:
    """What is changed for a branch."""

    words: tuple[str, ...]
    """Rules left out."""
    data: tuple[str, ...]
    """Overrides of the recipe of the other dataset."""
    training: tuple[str, ...]
    """Overrides of how both datasets' proxies are trained."""

    @property
    def name(self) -> str:
        """The name of its folder, by what makes the dataset another one."""
        name = "+".join(sorted({*self.words, *self.data}))
        if NAME.fullmatch(name):
            return name
        return f"{'+'.join(self.words) or 'set'}"[:60] + f"-{digest_of([sorted(self.words), sorted(self.data)])[:8]}"


def change_of(words: Sequence[str], overrides: Sequence[str]) -> Change:
    """The change that a command names. Raises ConfigError if it is none, or changes what has to stay."""
    sections = {text: text.partition("=")[0].strip().partition(".")[0] for text in overrides}
    if fixed := [text for text, section in sections.items() if section == "tokenizer"]:
        raise ConfigError(f"--set {fixed[0]}: promised one tokenizer for both datasets, found a change of it; leave it")
    named = {text.partition("=")[0].strip(): text for text in overrides}
    if "train.seed" in named:
        raise ConfigError(f"--set {named['train.seed']}: promised seeds that vary from 1 on, found one; give --seeds")
    if "guard.patience" in named:
        raise ConfigError(
            f"--set {named['guard.patience']}: promised proxies that all end behind the same step, found one that may "
            "end before; leave it out"
        )
    data = tuple(text for text, section in sections.items() if section not in SECTIONS)
    if not words and not data:
        raise ConfigError("ablate: promised --without SECTION.RULE or --set of a data setting, found neither")
    return Change(tuple(words), data, tuple(text for text in overrides if text not in data))


def branch_folder(run: Store, change: Change) -> Store:
    """Where the branch of a change lies."""
    return run.child(f"{ABLATIONS}/{change.name}")


def branch_recipe(run: Store, change: Change) -> Recipe:
    """The recipe of a run with a change, and with the run's tokenizer as it stands. Raises ConfigError."""
    where = f"{run.uri}/{RUN_NAME}"
    values = leave_out(read_run(run).recipe, change.words, lambda raw: load_recipe(raw, [], recipe_sections(), where))
    section = values.get("tokenizer", {})
    if section.get("model") is None:
        folder, manifest = open_table(run, "tokenizer")
        given = {key: value for key, value in section.items() if key not in TO_TRAIN}
        values["tokenizer"] = given | {"model": folder.path(manifest.run.paths["model"])}
    return load_recipe(values, change.data, recipe_sections(), where)


def steps_of(before: Recipe, after: Recipe) -> list[tuple[str, bool]]:
    """Every step that the second recipe wants, and whether it has to be made again for it."""
    made: set[str] = set()
    found = []
    for step in (step for step in STEPS if step.wanted(after)):
        again = not step.wanted(before) or not made.isdisjoint(step.reads) or _settings_differ(step, before, after)
        made |= set(step.writes) if again else set()
        found.append((step.name, again))
    return found


def _settings_differ(step: TableJob, before: Recipe, after: Recipe) -> bool:
    def settings(recipe: Recipe, name: str) -> tuple[object, object]:
        places = recipe[name].model_dump(mode="json", include=recipe[name].fields_of("location"))
        return settings_of(recipe[name], step), places

    return any(settings(before, stage.name) != settings(after, stage.name) for stage in step.stages)


def make_branch(run: Store, folder: Store, recipe: Recipe) -> None:
    """Bring a branch up to its dataset; steps that stand in it, or in the run, are not made again."""
    prepared = prepare(recipe, None)  # whatever is wrong is found before Spark starts
    if not folder.exists(RUN_NAME):
        attach(folder, run)
    config = recipe.section("spark", SparkConfig)
    spark = open_session(config, "penstock ablate")
    try:
        run_steps(spark, prepared, folder, config.partitions)
    finally:
        spark.stop()


def same_dataset(one: Manifest, other: Manifest) -> bool:
    """Whether two datasets are the same files, whatever settings led to them."""
    files = [[(entry.key, entry.sha256) for entry in manifest.content.files] for manifest in (one, other)]
    return files[0] == files[1]


def check_clusters(run: Store) -> None:
    """Raises ConfigError if a run has no clusters of its own, by which copies of held-out documents are found."""
    standing = read_run(run).tables
    if lacking := [name for name in ("clusters", "dedup") if name not in standing]:
        homes = [home.uri for home in homes_of(run) if home.uri != run.uri]
        there = f"it stands on the dataset of {homes[0]}: ablate that one" if homes else "run its recipe"
        raise ConfigError(f"{run.uri}: promised a run with its tables, found no {' and no '.join(lacking)}; {there}")
