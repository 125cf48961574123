"""`penstock plan`: the size of a training run, computed from its dataset and written to plan.json."""

import argparse
import tempfile

from jobs.arguments import Command, add_overrides, add_run
from jobs.recipe import stored_recipe
from schemas.errors import ConfigError, PenstockError
from schemas.locks import lock_training
from schemas.manifest import RUN_NAME
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import attach_run, open_run
from train.checkpoint.folder import check_resumable, with_checkpoint_formats
from train.config.settings import settings_of
from train.plan.layouts import choose_layout
from train.plan.make_plan import make_plan
from train.plan.plan import copy_mix, mix_overrides, write_plan
from train.plan.text import print_plan

GROUP = "training"
VERBS = {
    "plan": "Compute model size, batch and steps from the dataset. --dry-run prints the plan without writing it.",
}

Arguments = argparse.Namespace

BUDGETS: dict[str, tuple[str, type, str]] = {
    "flops": ("plan.compute", float, "budget [FLOPs]"),
    "gpu-hours": ("plan.gpu_hours", float, "budget [device hours]"),
    "usd": ("plan.usd", float, "budget in US dollars, at the price --usd-per-gpu-hour"),
    "params": ("plan.params", float, "number of parameters of the model"),
    "law": ("plan.law_file", str, "file of a scaling law, from `penstock ladder` or `fit-scaling`"),
    "gpu": ("cluster.device", str, "name of the device, such as h100-sxm"),
    "gpus": ("cluster.gpus", int, "number of devices in a node"),
    "nodes": ("cluster.nodes", int, "number of nodes"),
    "usd-per-gpu-hour": ("cluster.usd_per_gpu_hour", float, "price of a device hour"),
}
"""Flags of `plan`: the setting that each sets, its type and its help text."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan` except the run and `--set`."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--quiet", action="store_true", help="write the plan and print only its path")
    output.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--dataset", metavar="RUN", help="plan a new run folder on the dataset of RUN")
    parser.add_argument("--mix", metavar="FILE", help="shares of the sources, from `penstock mix suggest`")
    for flag, (setting, kind, description) in BUDGETS.items():
        parser.add_argument(f"--{flag}", type=kind, help=f"{description} ({setting})")


def plan_command(arguments: Arguments) -> int:
    """Compute model size, batch size and steps from the dataset. --dry-run prints the plan without writing it."""
    with tempfile.TemporaryDirectory() as scratch:  # a dry run writes its files there, not to the run folder
        return _plan(arguments, Store(scratch))


def _plan(arguments: Arguments, scratch: Store) -> int:
    run = Store(arguments.run)
    is_new = not run.exists(RUN_NAME)
    try:
        return _planned(arguments, run, scratch)
    except PenstockError:
        if is_new:
            run.delete(RUN_NAME)  # without a plan, the new folder must not look like a run
        raise


def _planned(arguments: Arguments, run: Store, scratch: Store) -> int:
    given = vars(arguments)
    if given.get("dataset") is not None:
        run = _on_dataset_of(open_run(arguments.dataset), run, scratch if arguments.dry_run else run)
    flags = {setting: given.get(flag.replace("-", "_")) for flag, (setting, *_) in BUDGETS.items()}
    budgets = [f"{setting}={value!r}" for setting, value in flags.items() if value is not None]
    budgets += ["plan.law='own'"] if given.get("law") is not None else []
    recipe = stored_recipe(run, [*arguments.overrides, *budgets])
    dataset, mix = open_dataset(run), given.get("mix")
    if mix is not None:
        mixed = mix_overrides(mix, dataset, arguments.overrides)
        recipe = stored_recipe(run, [*arguments.overrides, *budgets, *mixed])
    place = scratch if arguments.dry_run else run
    plan, search_text = choose_layout(make_plan(place, dataset, with_checkpoint_formats(run, settings_of(recipe))))
    if not arguments.dry_run:
        with lock_training(run, "penstock plan"):
            check_resumable(run, dataset, plan)
            if mix is not None:
                copy_mix(run, mix)  # before the plan that names it
            write_plan(run, plan)
    if arguments.quiet:
        print(f"plan written to {run.uri}/train/plan.json")
        return 0
    print(print_plan(plan))
    if search_text is not None:
        print(search_text)
    return 0


def _on_dataset_of(other: Store, run: Store, place: Store) -> Store:
    """Return `run`, or a new run in `place` if `run` does not exist.

    The new run has the recipe and the dataset of `other`. Raises ConfigError if `run` uses another dataset.
    """
    dataset = open_dataset(other)
    if not run.exists(RUN_NAME):
        if place is not run and not other.is_local:
            raise ConfigError(f"plan --dry-run: expected a dataset on a local disk, got {other.uri}. Remove --dry-run.")
        attach_run(place, other, ("tokens", "tokenizer"))
        return place
    if (current := open_dataset(run)).digest != dataset.digest:
        raise ConfigError(
            f"plan --dataset {other.uri}: expected a new run folder or one on dataset {dataset.digest[:12]}, got "
            f"{run.uri} on dataset {current.digest[:12]}. Name another run folder."
        )
    return run


COMMANDS = {
    "plan": Command(
        (add_run, add_overrides, add_plan_arguments),
        plan_command,
        "plan run --set plan.tokens_per_parameter=20",
    ),
}
