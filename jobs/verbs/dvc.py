"""`penstock dvc`: a `dvc.yaml` with a stage for each step of a recipe, so that `dvc repro` runs outdated steps.

The first stage writes a file for each other stage, with the settings that determine the output of that stage. A changed
setting therefore runs only the stages that depend on it. Tables are not moved to DVC's cache (`cache: false`), because
they are versions already, addressed as `RUN@<digest>`. They would be lost if DVC emptied their folder before a stage,
so it does not (`persist: true`).
"""

import argparse
import json
import os
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.arguments import Command, add_recipe
from jobs.recipe import read_recipe, recipe_file
from jobs.run_all import RunOptions, run_recipe
from pipeline.engine.stage import Source
from pipeline.engine.step import Step
from pipeline.prepare import settings_of
from pipeline.sources.config import SourceConfig
from pipeline.stages import STEPS, steps_for
from schemas.config import SOURCE, Recipe, own_key
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.logs import LOGGER
from schemas.manifest import MANIFEST_NAME, RUN_NAME, TableVersion, open_table, read_run
from schemas.overrides import override_words
from schemas.paths import PLACE, check_deletable, check_unlinked_tables
from schemas.storage import Store
from schemas.takedown import TAKEDOWNS
from train.config.settings import SECTIONS

GROUP = "data"
VERBS = {
    "dvc": "Write dvc.yaml, with a stage for each step, for `dvc repro`. It is written into the current folder.",
}

DVC_NAME = "dvc.yaml"
FIRST_LINE = "# Written by `penstock dvc`; write it again rather than editing it."
WILDCARDS = "*?["
PACKAGE = Path(__file__).parents[2] / "pipeline"
TRAIN = "train"


@dataclass(frozen=True)
class DvcStage:
    """One stage of a `dvc.yaml`; `reads` and `writes` are the files and folders that DVC tracks."""

    name: str
    description: str
    commands: tuple[tuple[str, ...], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    metrics: tuple[str, ...] = ()


def add_dvc_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dvc` except the recipe, the run folder and `--set`."""
    parser.add_argument(
        "--stage",
        metavar="STEP",
        help="used by the commands in dvc.yaml: run the recipe up to this step, and rebuild the tables of the step if "
        "their files are damaged",
    )


def dvc_command(arguments: argparse.Namespace) -> int:
    """Write dvc.yaml into the current folder, with a stage for each step of a recipe, for `dvc repro`."""
    recipe_path, out, overrides = recipe_file(arguments.recipe), arguments.out, arguments.overrides
    if arguments.stage is not None:
        run_and_repair(recipe_path, out, overrides, arguments.stage, arguments.verbose)
        return 0
    stages, run = dvc_stages(recipe_path, out, overrides), _below_here(out)
    text = "\n".join([FIRST_LINE, *_yaml(stages)]) + "\n"
    here = Store(".")
    if here.exists(DVC_NAME):
        existing = here.read_bytes(DVC_NAME).decode("utf-8", "replace")
        if existing.partition("\n")[0] != FIRST_LINE:
            raise ConfigError(
                f"{here.uri}/{DVC_NAME}: expected a file that `penstock dvc` wrote, got another one. "
                "Move it to another folder."
            )
    here.write_atomic(DVC_NAME, text.encode())
    for name, settings in deciding_settings(read_recipe(recipe_path, overrides)).items():
        here.write_atomic(_settings_file(run, name), canonical_json(settings))
    print(f"{DVC_NAME}: {len(stages)} stages; `dvc init` once (--no-scm outside Git), then `dvc repro`")
    return 0


# Stages.


def dvc_stages(recipe_path: str, out: str, overrides: Sequence[str]) -> list[DvcStage]:
    """Return the stages of the dvc.yaml of a recipe. Raises ConfigError if DVC cannot track the run folder `out`."""
    recipe = read_recipe(recipe_path, overrides)
    run = _below_here(out)
    flags = tuple(override_words(overrides))
    call = ("penstock", "dvc", recipe_path, "--out", run, *flags)
    steps = _steps_of(recipe)
    written = {name for step in steps for name in step.writes}
    stages = [
        DvcStage(
            name=step.name,
            description=f"writes {' and '.join(step.writes)}",
            commands=((*call, "--stage", step.name),),
            reads=tuple(
                dict.fromkeys(
                    [
                        _settings_file(run, step.name),
                        *(file for before in _dependencies(step, recipe) for file in _outside(before, recipe)),
                        *(f"{run}/{name}" for name in step.inputs(recipe) if name in written),
                    ]
                )
            ),
            writes=tuple(f"{run}/{name}" for name in step.writes),
        )
        for step in steps
    ]
    names = [*(step.name for step in steps), TRAIN]
    first = DvcStage(
        name="settings",
        description="writes this file again, and what decides each of the stages below",
        commands=(call,),
        reads=(recipe_path,),
        writes=tuple(_settings_file(run, name) for name in names),
    )
    return [first, *stages, *_training(run, recipe, recipe_path, flags)]


def _training(run: str, recipe: Recipe, recipe_path: str, flags: tuple[str, ...]) -> Iterator[DvcStage]:
    """Yield the stages of training and of the report."""
    plan, end = f"{run}/train/plan.json", f"{run}/train/manifest.json"
    files = [file for name in SECTIONS for place in _locations(recipe, name) for file in _tracked_files(place)]
    # No separate stage writes the plan: the trainer adds to plan.json, and DVC would then repeat such a stage.
    # If checkpoints have another dataset or other settings, `penstock run` prints the difference and stops.
    yield DvcStage(
        name=TRAIN,
        description="sizes the training run and trains the model",
        commands=(("penstock", "run", recipe_path, "--out", run, *flags), ("penstock", "train", run)),
        reads=tuple(dict.fromkeys([_settings_file(run, TRAIN), *files, f"{run}/tokens"])),
        writes=(plan, f"{run}/train/checkpoints"),
        metrics=(end,),
    )
    commands = (("penstock", "report", run),)
    yield DvcStage("report", "writes the report", commands, (f"{run}/tokens", end), (f"{run}/report.html",))


def _below_here(out: str) -> str:
    """Return the path of the run folder relative to the current folder.

    Raises ConfigError if the run folder is not below the current folder.
    """
    here, path = Path.cwd(), Path(os.path.abspath(out))
    if "://" in out or not path.is_relative_to(here) or path == here:
        raise ConfigError(
            f"dvc --out: expected a run folder below {here}, which DVC tracks, got {out}. Set --out to a folder there."
        )
    return path.relative_to(here).as_posix()


def _steps_of(recipe: Recipe) -> list[Step]:
    return [step for step in steps_for(recipe) if step.is_used(recipe)]


def _dependencies(step: Step, recipe: Recipe) -> list[Step]:
    """Return a step and all steps that it depends on, in order."""
    # Not only the steps just before: the folder of a table holds all its versions, so it does not change when earlier
    # settings are restored. DVC notices the settings of all steps that determine the version.
    steps, read = _steps_of(recipe), {*step.inputs(recipe)}
    dependencies = [step]
    for before in reversed(steps[: [each.name for each in steps].index(step.name)]):
        if read & {*before.writes}:
            read |= {*before.inputs(recipe)}
            dependencies.insert(0, before)
    return dependencies


# The settings and files that determine the output of a stage.


def deciding_settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return stage -> step -> settings, for each stage and every step that the stage depends on."""
    steps = _steps_of(recipe)
    settings = {step.name: {each.name: _own(each, recipe) for each in _dependencies(step, recipe)} for step in steps}
    training = {name: recipe[name] for name in SECTIONS}
    own = {name: section.content() | section.decisions() | _located(recipe, name) for name, section in training.items()}
    return settings | {TRAIN: settings[steps[-1].name] | {TRAIN: own}}


def _own(step: Step, recipe: Recipe) -> dict[str, Any]:
    names = [stage.name for stage in step.stages]
    return {
        "stages": {stage.name: stage.version for stage in step.stages},
        "settings": {
            name if source is None else own_key(source, name): settings_of(own[name], step) | _located(own, name)
            for source, own, stages in _recipes(recipe, names)
            for name in stages
        },
        "inputs": [] if step.reads else _paths(recipe),
    }


def _recipes(recipe: Recipe, names: Sequence[str]) -> Iterator[tuple[str | None, Recipe, Sequence[str]]]:
    """Yield (None, the recipe, the sections of all sources), then each of several sources with its own sections."""
    yield None, recipe, [name for name in names if name != SOURCE or not recipe.has_several_sources]
    for source, own in recipe.by_source().items() if recipe.has_several_sources else ():
        yield source, own, [name for name in names if name in own.own or name == SOURCE]


def _paths(recipe: Recipe) -> list[str]:
    return [path for own in recipe.by_source().values() for path in own.section(SOURCE, SourceConfig).paths]


def _located(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the settings of a section that name files or folders."""
    section = recipe[name]
    return section.model_dump(mode="json", include=section.fields_of("location"))


def _settings_file(run: str, stage: str) -> str:
    return f"{run}/dvc/{stage}.json"


def _outside(step: Step, recipe: Recipe) -> Iterator[str]:
    """Yield the local files that a step reads besides tables: inputs, model files, and the `run.json` of other runs."""
    if not step.reads:
        for pattern in _paths(recipe):
            if "://" not in pattern:
                yield fixed_folder(pattern)
    for own in recipe.by_source().values():
        for stage in step.stages:
            models: Mapping[str, str] = {} if isinstance(stage, Source) else stage.models(own[stage.name])
            for place in [*models.values(), *_locations(own, stage.name)]:
                yield from _tracked_files(place)


def _locations(recipe: Recipe, name: str) -> Iterator[str]:
    """Yield every path or URI that the `location` settings of a section name."""
    for value in _located(recipe, name).values():
        places = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        yield from (place for place in places if isinstance(place, str))


def _tracked_files(place: str) -> Iterator[str]:
    """Yield the file at a path, or `run.json` if the path is a run folder.

    Yield nothing for a file of this package.
    """
    # Files of this package are not tracked, because manifests record the version of the package.
    for path in (Path(place), Path(place) / RUN_NAME) if place else ():
        if path.is_file() and not path.absolute().is_relative_to(PACKAGE):
            yield str(path)


def fixed_folder(pattern: str) -> str:
    """Return the part of a path before its first segment with a wildcard, or the whole path if it has none."""
    parts = pattern.split("/")
    first = next((n for n, part in enumerate(parts) if any(sign in part for sign in WILDCARDS)), len(parts))
    return "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")


# Running a stage.


def run_and_repair(recipe_path: str, out: str, overrides: Sequence[str], step_name: str, verbose: bool = False) -> None:
    """Run the recipe up to a step, and rebuild the tables of the step if one of their files is missing or changed.

    `verbose`: print the messages of Spark.
    """
    # DVC starts this command if a file has changed, but `run_recipe` skips a complete table without reading its files.
    run_recipe(recipe_path, out, overrides, step_name, RunOptions(verbose=verbose))
    run = Store(out)
    tables = next(step.writes for step in STEPS if step.name == step_name)
    tables_by_name = {name: TableVersion(*open_table(run, name)) for name in tables if name in read_run(run).tables}
    if damaged := [file for table in tables_by_name.values() for file in damaged_files(table)]:
        _remove_versions(run, tables_by_name, damaged)
        run_recipe(recipe_path, out, overrides, step_name, RunOptions(verbose=verbose))


def damaged_files(table: TableVersion) -> list[str]:
    """Return the files of a table that are missing or whose digest differs from the manifest."""
    folder, manifest = table.folder, table.manifest
    files = [(manifest.paths[entry.key], entry.sha256) for entry in manifest.content.files]
    wrong = [path for path, sha256 in files if not folder.exists(path) or folder.sha256(path) != sha256]
    return [f"{folder.uri}/{path}" for path in wrong]


def _remove_versions(run: Store, tables: Mapping[str, TableVersion], damaged: Sequence[str]) -> None:
    """Delete the current version of each table in `tables`, so that the next run rebuilds the table.

    Raises ContractError if a table belongs to another run, if documents were taken down from this run, or if a symbolic
    link leads to one of the files.
    """
    is_foreign = any("/" in read_run(run).tables[name] for name in tables)
    if is_foreign or run.exists(TAKEDOWNS):
        reason = "it belongs to another run" if is_foreign else "a rebuild would restore documents that were taken down"
        raise ContractError(
            f"{damaged[0]}: expected a file with the digest in the manifest, got another digest or no file. Restore "
            f"the file from a backup: the table is not rebuilt, because {reason}."
        )
    check_unlinked_tables(run, tables)
    for name, table in tables.items():
        version = read_run(run).tables[name]
        for path in (MANIFEST_NAME, *table.manifest.paths_of()):
            place = posixpath.normpath(f"{name}/{version}/{path}")
            if not PLACE.fullmatch(place):
                raise ContractError(
                    f"{run.uri}/{place}: expected a file of a version of a table, such as {name}/v-0123456789ab/…, to "
                    f"delete, got another path. Remove the folder {name} of the run, and run again."
                )
            check_deletable(run, place)
    LOGGER.warning(f"{damaged[0]}: differs from its manifest. Rebuilding {' and '.join(tables)}.")
    for table in tables.values():
        table.folder.delete(MANIFEST_NAME)
        for path in table.manifest.paths_of():
            table.folder.delete(path)


# The text of dvc.yaml.


def _yaml(stages: Sequence[DvcStage]) -> Iterator[str]:
    yield "stages:"
    for stage in stages:
        yield f"  {stage.name}:"
        yield f"    desc: {_quoted(stage.description)}"
        yield "    cmd:"
        yield from (f"      - {_quoted(shlex.join(command))}" for command in stage.commands)
        yield "    deps:"
        yield from (f"      - {_quoted(path)}" for path in stage.reads)
        for kind, paths in (("outs", stage.writes), ("metrics", stage.metrics)):
            if paths:
                yield f"    {kind}:"
            for path in paths:
                yield from (f"      - {_quoted(path)}:", "          cache: false", "          persist: true")


def _quoted(text: str) -> str:
    """Return a text as a quoted YAML string in which DVC replaces no `${variable}`."""
    return json.dumps(text, ensure_ascii=False).replace("${", "\\\\${")


COMMANDS = {
    "dvc": Command(
        (add_recipe, add_dvc_arguments),
        dvc_command,
        "dvc jobs/recipes/demo.toml --out demo/run",
    ),
}
