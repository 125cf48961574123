"""`penstock dvc`: the steps of a recipe as the stages of a `dvc.yaml`, so that `dvc repro` runs what is out of date.

The first stage writes what decides each of the others to a file of its own, so that a changed setting calls the stages
behind it and no others. Tables stay where they are (`cache: false`, `persist: true`): they are versions already,
addressed as `RUN@<digest>`, and a folder that DVC emptied before a stage would lose them.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.recipe import read_recipe
from jobs.run_all import run_recipe
from pipeline.engine.stage import Source
from pipeline.engine.step import Step
from pipeline.run import settings_of
from pipeline.sources.config import SourceConfig
from pipeline.stages import STEPS
from schemas.config import Recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.manifest import MANIFEST_NAME, RUN_NAME, TableVersion, open_table, read_run
from schemas.storage import Store
from schemas.takedown import TAKEDOWNS
from train.config.settings import SECTIONS

DVC_NAME = "dvc.yaml"
FIRST_LINE = "# Written by `penstock dvc`; write it again rather than editing it."
WILDCARDS = "*?["
PACKAGE = Path(__file__).parents[2] / "pipeline"
TRAIN = "train"


@dataclass(frozen=True)
class DvcStage:
    """One stage of a `dvc.yaml`."""

    name: str
    message: str
    commands: tuple[tuple[str, ...], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    metrics: tuple[str, ...] = ()


def add_dvc_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dvc` but for those of a data run."""
    parser.add_argument(
        "--stage",
        metavar="STEP",
        help="write nothing here, but run the recipe up to this step, and make again what stands damaged of it; what "
        "the stages of dvc.yaml call",
    )


def dvc_command(arguments: argparse.Namespace) -> int:
    """Write dvc.yaml into this folder: the stages of a recipe, from its inputs to the report, for `dvc repro`."""
    recipe_path, out, overrides = arguments.recipe, arguments.out, arguments.overrides
    if arguments.stage is not None:
        run_and_repair(recipe_path, out, overrides, arguments.stage)
        return 0
    stages, run = dvc_stages(recipe_path, out, overrides), _below_here(out)
    text = "\n".join([FIRST_LINE, *_yaml(stages)]) + "\n"
    here = Store(".")
    if here.exists(DVC_NAME):
        standing = here.read_bytes(DVC_NAME).decode("utf-8", "replace")
        if standing.partition("\n")[0] != FIRST_LINE:
            raise ConfigError(
                f"{here.uri}/{DVC_NAME}: expected a file that `penstock dvc` wrote, got another one. "
                "Move it away, or call this in another folder."
            )
    here.write_atomic(DVC_NAME, text.encode())
    for name, decides in deciding_settings(read_recipe(recipe_path, overrides)).items():
        here.write_atomic(_settings_file(run, name), canonical_json(decides))
    print(f"{DVC_NAME}: {len(stages)} stages; `dvc init` once (--no-scm outside Git), then `dvc repro`")
    return 0


# ------------------------------------------------------------------------------------------------------------- stages


def dvc_stages(recipe_path: str, out: str, overrides: Sequence[str]) -> list[DvcStage]:
    """The stages of a recipe that is run into the folder `out`. Raises ConfigError if DVC could not look after it."""
    recipe = read_recipe(recipe_path, overrides)
    run = _below_here(out)
    given = tuple(word for override in overrides for word in ("--set", override))
    call = ("penstock", "dvc", recipe_path, "--out", run, *given)
    steps = _wanted(recipe)
    written = {name for step in steps for name in step.writes}
    stages = [
        DvcStage(
            name=step.name,
            message=f"writes {' and '.join(step.writes)}",
            commands=((*call, "--stage", step.name),),
            reads=tuple(
                dict.fromkeys(
                    [
                        _settings_file(run, step.name),
                        *(file for before in _behind(step, recipe) for file in _outside(before, recipe)),
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
        message="writes this file again, and what decides each of the stages below",
        commands=(call,),
        reads=(recipe_path,),
        writes=tuple(_settings_file(run, name) for name in names),
    )
    return [first, *stages, *_training(run, recipe, recipe_path, given)]


def _training(run: str, recipe: Recipe, recipe_path: str, given: tuple[str, ...]) -> Iterator[DvcStage]:
    """Training and report. The plan is no stage of its own: the trainer adds to plan.json, and DVC would redo it.

    What another dataset or setting trained is never removed for them: `penstock run` says what differs, and stops.
    """
    plan, end = f"{run}/train/plan.json", f"{run}/train/manifest.json"
    files = [file for name in SECTIONS for place in _locations(recipe, name) for file in _followed(place)]
    yield DvcStage(
        name=TRAIN,
        message="sizes the training run and trains the model",
        commands=(("penstock", "run", recipe_path, "--out", run, *given), ("penstock", "train", run)),
        reads=tuple(dict.fromkeys([_settings_file(run, TRAIN), *files, f"{run}/tokens"])),
        writes=(plan, f"{run}/train/checkpoints"),
        metrics=(end,),
    )
    commands = (("penstock", "report", run),)
    yield DvcStage("report", "writes the report", commands, (f"{run}/tokens", end), (f"{run}/report.html",))


def _below_here(out: str) -> str:
    """The run folder as a path below this one. Raises ConfigError for any other place: DVC tracks its own tree."""
    here, path = Path.cwd(), Path(os.path.abspath(out))
    if "://" in out or not path.is_relative_to(here) or path == here:
        raise ConfigError(f"dvc --out: expected a run folder below {here}, which DVC looks after, got {out}")
    return path.relative_to(here).as_posix()


def _wanted(recipe: Recipe) -> list[Step]:
    return [step for step in STEPS if step.wanted(recipe)]


def _behind(step: Step, recipe: Recipe) -> list[Step]:
    """A step and all that it is made from, in order.

    A table's folder holds its earlier versions too, so going back to one changes nothing in it: every stage looks at
    whatever decides its version, from the inputs on.
    """
    steps, read = _wanted(recipe), {*step.inputs(recipe)}
    found = [step]
    for before in reversed(steps[: steps.index(step)]):
        if read & {*before.writes}:
            read |= {*before.inputs(recipe)}
            found.insert(0, before)
    return found


# ------------------------------------------------------------------------------------------------- what decides a stage


def deciding_settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Of every stage that reads settings: what decides what it writes, of itself and of all steps behind it."""
    steps = _wanted(recipe)
    found = {step.name: {each.name: _own(each, recipe) for each in _behind(step, recipe)} for step in steps}
    training = {name: recipe[name] for name in SECTIONS}
    own = {name: section.content() | section.decisions() | _located(recipe, name) for name, section in training.items()}
    return found | {TRAIN: found[steps[-1].name] | {TRAIN: own}}


def _own(step: Step, recipe: Recipe) -> dict[str, Any]:
    names = [stage.name for stage in step.stages]
    return {
        "stages": {stage.name: stage.version for stage in step.stages},
        "settings": {name: settings_of(recipe[name], step) | _located(recipe, name) for name in names},
        "inputs": [] if step.reads else list(recipe.section("source", SourceConfig).paths),
    }


def _located(recipe: Recipe, name: str) -> dict[str, Any]:
    """The settings of a section that say where files lie; a file's content DVC follows itself."""
    section = recipe[name]
    return section.model_dump(mode="json", include=section.fields_of("location"))


def _settings_file(run: str, stage: str) -> str:
    return f"{run}/dvc/{stage}.json"


def _outside(step: Step, recipe: Recipe) -> Iterator[str]:
    """Local files that a step reads besides tables: inputs, models, other runs. What lies elsewhere DVC cannot see."""
    if not step.reads:
        for pattern in recipe.section("source", SourceConfig).paths:
            if "://" not in pattern:
                yield fixed_folder(pattern)
    for stage in step.stages:
        wanted: Mapping[str, str] = {} if isinstance(stage, Source) else stage.models(recipe[stage.name])
        for place in [*wanted.values(), *_locations(recipe, stage.name)]:
            yield from _followed(place)


def _locations(recipe: Recipe, name: str) -> Iterator[str]:
    """Every place that the settings of a section name."""
    for value in _located(recipe, name).values():
        places = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        yield from (place for place in places if isinstance(place, str))


def _followed(place: str) -> Iterator[str]:
    """The file of a place, or of a run its state; not of this package, whose version the manifests name."""
    for path in (Path(place), Path(place) / RUN_NAME) if place else ():
        if path.is_file() and not path.absolute().is_relative_to(PACKAGE):
            yield str(path)


def fixed_folder(pattern: str) -> str:
    """The longest folder of a pattern that has no wildcard, so that a file that comes later counts; a path itself."""
    parts = pattern.split("/")
    first = next((n for n, part in enumerate(parts) if any(sign in part for sign in WILDCARDS)), len(parts))
    return "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")


# ------------------------------------------------------------------------------------------------------ running a stage


def run_and_repair(recipe_path: str, out: str, overrides: Sequence[str], step_name: str) -> None:
    """Run the recipe up to a step and read its tables again: a version with a damaged file is made anew.

    DVC calls a stage because a file of it has changed, while to a run a version stands as long as its manifest does.
    """
    run_recipe(recipe_path, out, overrides, until=step_name)
    run = Store(out)
    tables = next(step.writes for step in STEPS if step.name == step_name)
    standing = {name: TableVersion(*open_table(run, name)) for name in tables if name in read_run(run).tables}
    if damaged := [file for table in standing.values() for file in damaged_files(table)]:
        _forget(run, standing, damaged)
        run_recipe(recipe_path, out, overrides, until=step_name)


def damaged_files(table: TableVersion) -> list[str]:
    """The files of a table that are not what its manifest states, or are not there."""
    folder, manifest = table.folder, table.manifest
    files = [(manifest.run.paths[entry.key], entry.sha256) for entry in manifest.content.files]
    wrong = [path for path, sha256 in files if not folder.exists(path) or folder.sha256(path) != sha256]
    return [f"{folder.uri}/{path}" for path in wrong]


def _forget(run: Store, tables: Mapping[str, TableVersion], damaged: Sequence[str]) -> None:
    """Remove versions of one step, so that they no longer stand. Raises ContractError if that would lose something."""
    foreign = any("/" in read_run(run).tables[name] for name in tables)
    if foreign or run.exists(TAKEDOWNS):
        why = "it belongs to another run" if foreign else "documents were taken down since, and would come back"
        raise ContractError(
            f"{damaged[0]}: expected what its manifest says, got another content, and it is not made again, for "
            f"{why}. Restore the file."
        )
    print(f"{damaged[0]}: not what its manifest expected. {' and '.join(tables)} are made again.", file=sys.stderr)
    for table in tables.values():
        table.folder.delete(MANIFEST_NAME)
        for path in table.manifest.paths_of():
            table.folder.delete(path)


# --------------------------------------------------------------------------------------------------------------- text


def _yaml(stages: Sequence[DvcStage]) -> Iterator[str]:
    yield "stages:"
    for stage in stages:
        yield f"  {stage.name}:"
        yield f"    desc: {_quoted(stage.message)}"
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
    """A string of YAML, in which DVC finds nothing to fill in."""
    return json.dumps(text, ensure_ascii=False).replace("${", "\\\\${")
