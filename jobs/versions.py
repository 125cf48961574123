"""`penstock dvc`: the steps of a recipe as the stages of a `dvc.yaml`, so that `dvc repro` runs what is out of date.

DVC decides which stage to call and Penstock what is left to do in it: versions that stand are passed over. Tables stay
where they are (`cache: false`, `persist: true`): they are versions already, addressed as `RUN@<digest>`, and a folder
that DVC emptied before a stage would lose them.
"""

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.recipe import read_recipe
from pipeline.build import TableJob
from pipeline.sources.config import SourceConfig
from pipeline.stage import Source
from pipeline.stages import STEPS
from schemas.config import Recipe
from schemas.errors import ConfigError
from schemas.storage import Store

DVC_NAME = "dvc.yaml"
FIRST_LINE = "# Written by `penstock dvc`; write it again rather than editing it."
MAGIC = "*?["
PACKAGE = Path(__file__).parents[1] / "pipeline"


@dataclass(frozen=True)
class DvcStage:
    """One stage of a `dvc.yaml`."""

    name: str
    says: str
    commands: tuple[tuple[str, ...], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    metrics: tuple[str, ...] = ()


def dvc_command(arguments: argparse.Namespace) -> int:
    """Write dvc.yaml into this folder: the stages of a recipe, from its inputs to the report, for `dvc repro`."""
    stages = dvc_stages(arguments.recipe, arguments.out, arguments.overrides)
    text = "\n".join([FIRST_LINE, *_yaml(stages)]) + "\n"
    here = Store(".")
    if here.exists(DVC_NAME):
        standing = here.read_bytes(DVC_NAME).decode("utf-8", "replace")
        if standing.partition("\n")[0] != FIRST_LINE:
            raise ConfigError(
                f"{here.uri}/{DVC_NAME}: promised a file that `penstock dvc` wrote, found another one; "
                "move it away, or call this in another folder"
            )
    here.write_atomic(DVC_NAME, text.encode())
    print(f"{DVC_NAME}: {len(stages)} stages; `dvc init` once (--no-scm outside Git), then `dvc repro`")
    return 0


def dvc_stages(recipe_path: str, out: str, overrides: Sequence[str]) -> list[DvcStage]:
    """The stages of a recipe that is run into the folder `out`. Raises ConfigError if DVC could not look after it."""
    recipe = read_recipe(recipe_path, overrides)
    run = _below_here(out)
    given = tuple(word for override in overrides for word in ("--set", override))
    stages = []
    written: list[str] = []
    for step in (step for step in STEPS if step.wanted(recipe)):
        reads = [f"{run}/{name}" for name in step.reads if name in written]
        written += step.writes
        stages.append(
            DvcStage(
                name=step.name,
                says=f"writes {' and '.join(step.writes)}",
                commands=(("penstock", "stage", step.name, recipe_path, "--out", run, *given),),
                reads=tuple(dict.fromkeys([recipe_path, *_outside(step, recipe), *reads])),
                writes=tuple(f"{run}/{name}" for name in step.writes),
            )
        )
    return [*stages, *_training(run, recipe_path)]


def _training(run: str, recipe_path: str) -> Iterator[DvcStage]:
    """Training and report. The plan is no stage of its own: the trainer adds to plan.json, and DVC would redo it."""
    plan, end = f"{run}/train/plan.json", f"{run}/train/manifest.json"
    yield DvcStage(
        name="train",
        says="sizes the training run and trains the model",
        commands=(("penstock", "plan", run, "--quiet"), ("penstock", "train", run)),
        reads=(recipe_path, f"{run}/tokens"),
        writes=(plan, f"{run}/train/checkpoints"),
        metrics=(end,),
    )
    commands = (("penstock", "report", run),)
    yield DvcStage("report", "writes the report", commands, (f"{run}/tokens", end), (f"{run}/report.html",))


def _below_here(out: str) -> str:
    """The run folder as a path below this one. Raises ConfigError for any other place: DVC tracks its own tree."""
    here, path = Path.cwd(), Path(os.path.abspath(out))
    if "://" in out or not path.is_relative_to(here) or path == here:
        raise ConfigError(f"dvc --out: promised a run folder below {here}, which DVC looks after, found {out}")
    return path.relative_to(here).as_posix()


def _outside(step: TableJob, recipe: Recipe) -> Iterator[str]:
    """Local files that a step reads besides tables: inputs and models. What lies elsewhere DVC does not follow."""
    if not step.reads:
        for pattern in recipe.section("source", SourceConfig).paths:
            if "://" not in pattern:
                yield fixed_part(pattern)
    for stage in step.stages:
        wanted: Mapping[str, str] = {} if isinstance(stage, Source) else stage.models(recipe[stage.name])
        yield from (place for place in wanted.values() if Path(place).is_file() and not _is_bundled(place))


def _is_bundled(place: str) -> bool:
    """Whether a file comes with this package, whose version the manifests name."""
    return Path(place).absolute().is_relative_to(PACKAGE)


def fixed_part(pattern: str) -> str:
    """The longest folder of a pattern that has no wildcard, so that a file that comes later counts; a path itself."""
    parts = pattern.split("/")
    first = next((n for n, part in enumerate(parts) if any(sign in part for sign in MAGIC)), len(parts))
    return "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")


def _yaml(stages: Sequence[DvcStage]) -> Iterator[str]:
    yield "stages:"
    for stage in stages:
        yield f"  {stage.name}:"
        yield f"    desc: {_quoted(stage.says)}"
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
