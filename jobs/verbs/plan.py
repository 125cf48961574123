"""`penstock plan`: the size of a training run, computed from its dataset and written to plan.json."""

import argparse
import tempfile

from jobs.arguments import Command, add_overrides, add_run
from jobs.recipe import stored_recipe
from schemas.errors import ConfigError, PenstockError
from schemas.locks import training
from schemas.manifest import RUN_NAME
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import attach, run_at
from train.checkpoint.folder import as_begun, check_goes_on
from train.config.plan import keep_mix, mix_overrides
from train.config.settings import settings_of
from train.plan.make_plan import choose_layout, make_plan
from train.plan.plan import write_plan
from train.plan.text import print_plan

VERBS = {
    "plan": "Size the training run from what was written; --dry-run shows the plan and leaves the one that stands.",
}

Arguments = argparse.Namespace

BUDGETS: dict[str, tuple[str, type, str]] = {
    "flops": ("plan.compute", float, "budget [FLOPs]"),
    "gpu-hours": ("plan.gpu_hours", float, "budget in hours of one device"),
    "usd": ("plan.usd", float, "budget in money, at --usd-per-gpu-hour"),
    "params": ("plan.params", float, "parameters to plan for"),
    "law": ("plan.law_file", str, "file of a law of your own, from `penstock ladder`"),
    "gpu": ("cluster.device", str, "device by name, such as h100-sxm"),
    "gpus": ("cluster.gpus", int, "devices in a node"),
    "nodes": ("cluster.nodes", int, "nodes"),
    "usd-per-gpu-hour": ("cluster.usd_per_gpu_hour", float, "price of a device for an hour"),
}
"""Flags of `plan`, the settings they stand for, their type, and what they say."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan` but for the run and `--set`."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quiet", action="store_true", help="write the plan, print only where it is")
    how.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    parser.add_argument("--dataset", metavar="RUN", help="make RUN's dataset that of this new run folder")
    parser.add_argument("--mix", metavar="FILE", help="shares of the sources, from `penstock mix suggest`")
    for flag, (setting, kind, told) in BUDGETS.items():
        parser.add_argument(f"--{flag}", type=kind, help=f"{told} ({setting})")


def plan_command(arguments: Arguments) -> int:
    """Size the training run from what was written; --dry-run shows the plan and leaves the one that stands."""
    with tempfile.TemporaryDirectory() as scratch:  # where a dry run writes what a plan may need
        return _plan(arguments, Store(scratch))


def _plan(arguments: Arguments, scratch: Store) -> int:
    run = Store(arguments.run)
    is_new = not run.exists(RUN_NAME)
    try:
        return _planned(arguments, run, scratch)
    except PenstockError:
        if is_new:
            run.delete(RUN_NAME)  # of a folder on another run's dataset, for which there is no plan
        raise


def _planned(arguments: Arguments, run: Store, scratch: Store) -> int:
    given = vars(arguments)
    if given.get("dataset") is not None:
        run = _on_dataset_of(run_at(arguments.dataset), run, scratch if arguments.dry_run else run)
    flags = {setting: given.get(flag.replace("-", "_")) for flag, (setting, *_) in BUDGETS.items()}
    budgets = [f"{setting}={value!r}" for setting, value in flags.items() if value is not None]
    budgets += ["plan.law='own'"] if given.get("law") is not None else []
    recipe = stored_recipe(run, [*arguments.overrides, *budgets])
    dataset, mix = open_dataset(run), given.get("mix")
    if mix is not None:
        mixed = mix_overrides(mix, dataset, arguments.overrides)
        recipe = stored_recipe(run, [*arguments.overrides, *budgets, *mixed])
    place = scratch if arguments.dry_run else run
    plan, found = choose_layout(make_plan(place, dataset, as_begun(run, settings_of(recipe))))
    if not arguments.dry_run:
        with training(run, "penstock plan"):
            check_goes_on(run, dataset, plan)
            if mix is not None:
                keep_mix(run, mix)  # before the plan that names it
            write_plan(run, plan)
    if arguments.quiet:
        print(f"plan written to {run.uri}/train/plan.json")
        return 0
    print(print_plan(plan))
    if found is not None:
        print(found)
    return 0


def _on_dataset_of(other: Store, run: Store, place: Store) -> Store:
    """The folder `place` as a run on the dataset of another one, whose recipe it begins with.

    Raises ConfigError if `run` stands on another dataset.
    """
    dataset = open_dataset(other)
    if not run.exists(RUN_NAME):
        if place is not run and not other.is_local:
            raise ConfigError(
                f"plan --dry-run: expected a dataset on a disk of this machine, got {other.uri}. Leave --dry-run out."
            )
        attach(place, other, ("tokens", "tokenizer"))
        return place
    if (found := open_dataset(run)).digest != dataset.digest:
        raise ConfigError(
            f"plan --dataset {other.uri}: expected a new run folder or one on dataset {dataset.digest[:12]}, got "
            f"{run.uri} on {found.digest[:12]}. Name another folder."
        )
    return run


COMMANDS = {
    "plan": Command(
        (add_run, add_overrides, add_plan_arguments),
        plan_command,
        "plan run --set plan.tokens_per_parameter=20",
    ),
}
