"""`penstock plan`: the size of a training run, computed from its dataset and written to plan.json."""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jobs.arguments import Command, add_overrides, add_run
from jobs.recipe import recipe_sections, stored_recipe
from schemas.errors import ConfigError
from schemas.locks import lock_training
from schemas.logs import LOGGER
from schemas.manifest import RUN_NAME, read_run
from schemas.paths import PLAN_NAME, check_own_folders
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from schemas.union import describe_union, write_union
from schemas.versions import DATASET, attach_run, open_run, warn_of_replaced_tables
from train.checkpoint.folder import check_resumable, list_checkpoints, with_checkpoint_formats
from train.config.recipe import with_recipe
from train.config.settings import SECTIONS, Settings, load_settings, settings_of
from train.plan.layouts import choose_layout
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, check_settings_used, copy_mix, mix_overrides, read_plan, write_plan
from train.plan.text import describe_changes, print_plan

GROUP = "training"
VERBS = {
    "plan": "Compute model size, batch and steps from the dataset. --dry-run prints the plan without writing it.",
}

Arguments = argparse.Namespace

BUDGETS: dict[str, tuple[str, type, str]] = {
    "flops": ("plan.compute", str, "budget [FLOPs], such as 1e18"),
    "gpu-hours": ("plan.gpu_hours", float, "budget [device hours]"),
    "usd": ("plan.usd", float, "budget in US dollars, at the price --usd-per-gpu-hour"),
    "params": ("plan.params", str, "number of parameters of the model, such as 124M or 1.5B"),
    "law": ("plan.law_file", str, "file of a scaling law, from `penstock ladder` or `fit-scaling`"),
    "gpu": ("cluster.device", str, "name of the device, such as h100-sxm"),
    "gpus": ("cluster.gpus", int, "number of devices in a node"),
    "nodes": ("cluster.nodes", int, "number of nodes"),
    "usd-per-gpu-hour": ("cluster.usd_per_gpu_hour", float, "price of a device hour"),
}
"""Flags of `plan`: the setting that each sets, its type and its help text."""
KEPT = ("train", "checkpoint", "guard")
"""Sections of which the plan of a trained run keeps every setting, also those that `penstock train --set` has made. The
execution settings of the others are those of the recipe, because a plan also holds values that devices gave them."""
WRITTEN = (DATASET, "train")
"""The folders of a run to which `plan` writes: the manifest of a union, and the plan with its files."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan` except the run and `--set`."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--quiet", action="store_true", help="write the plan and print only its path")
    output.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument(
        "--dataset",
        metavar="RUN",
        action="append",
        help="plan a new run folder on the dataset of RUN; several times: on the union of the datasets",
    )
    parser.add_argument("--mix", metavar="FILE", help="shares of the sources, from `penstock mix suggest`")
    for flag, (setting, kind, description) in BUDGETS.items():
        parser.add_argument(f"--{flag}", type=kind, help=f"{description} ({setting})")


def plan_command(arguments: Arguments) -> int:
    """Compute model size, batch size and steps from the dataset. --dry-run prints the plan without writing it."""
    check_used(arguments.overrides)
    warn_of_replaced_tables([Store(arguments.run), *map(open_run, vars(arguments).get("dataset") or ())])
    with tempfile.TemporaryDirectory() as scratch:  # a dry run writes its files there, not to the run folder
        return _plan(arguments, Store(scratch))


def _plan(arguments: Arguments, scratch: Store) -> int:
    run, names = Store(arguments.run), vars(arguments).get("dataset") or []
    if arguments.dry_run:
        return _planned(arguments, run, scratch)
    if not names:
        open_dataset(run)  # a misspelled folder is an error before anything is locked in it
    check_own_folders(run, "train")
    others = [open_run(name) for name in names]
    if run.exists(RUN_NAME) and _is_kept(arguments, run):  # only printed, and so also while the run is trained
        run = _on_datasets_of(others, run, run) if others else run
        return _print_stored(run, open_dataset(run), arguments.quiet)
    new_folders = _make_folder(run) if names else []
    try:
        with lock_training(run, "penstock plan", others), _new_files_removed(run):
            return _planned(arguments, run, scratch)
    finally:
        for folder in new_folders:
            with suppress(OSError):  # not empty: the plan is in it, or another process uses it
                folder.rmdir()


def _make_folder(run: Store) -> list[Path]:
    """Make the folder of a new local run, so that it can be locked; return the new folders, the deepest first."""
    if not run.is_local:
        return []
    path = Path(run.root)
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return new


@contextmanager
def _new_files_removed(run: Store) -> Iterator[None]:
    """Remove what the block has written to a new run if it fails. The caller holds the lock on training in the run.

    Without a plan, the folder must not look like a run.
    """
    if run.exists(RUN_NAME):
        yield
        return
    before = _written(run)
    try:
        yield
    except BaseException:
        for name in sorted(_written(run) - before, reverse=True):  # the files of a folder before the folder
            if run.is_local and Path(run.path(name)).is_dir():
                with suppress(OSError):
                    os.rmdir(run.path(name))
            else:
                run.delete(name)
        raise


def _written(run: Store) -> set[str]:
    """Return the names of the files and local folders that a run has in the places to which `plan` writes."""
    if not run.is_local:
        names = {f"{folder}/{name}" for folder in WRITTEN for name in run.child(folder).walk()}
        return names | ({RUN_NAME} if run.exists(RUN_NAME) else set())
    root = Path(run.root)
    places = [place for name in (RUN_NAME, *WRITTEN) for place in (root / name, *(root / name).rglob("*"))]
    return {str(place.relative_to(root)) for place in places if place.exists()}


def _planned(arguments: Arguments, run: Store, scratch: Store) -> int:
    given = vars(arguments)
    if given.get("dataset") is not None:
        run = _on_datasets_of(
            [open_run(name) for name in arguments.dataset], run, scratch if arguments.dry_run else run
        )
    name = arguments.run if run is scratch else run.uri  # the user knows no scratch folder
    dataset, mix = open_dataset(run), given.get("mix")
    overrides = [*arguments.overrides, *budget_overrides(given)]
    if _is_kept(arguments, run):
        return _print_stored(run, dataset, arguments.quiet)
    if mix is not None:
        overrides += mix_overrides(mix, dataset, arguments.overrides)
    place = scratch if arguments.dry_run else run
    settings = _settings(run, overrides, name)
    check_settings_used(settings, dataset)
    plan, search_text = choose_layout(make_plan(place, dataset, settings, run))
    if not arguments.dry_run:
        check_resumable(run, dataset, plan)
        if mix is not None:
            copy_mix(run, mix)  # before the plan that names it
        write_plan(run, plan)
    if arguments.quiet:
        print(f"plan written to {run.uri}/train/plan.json")
        return 0
    print(print_plan(plan))
    if overrides and (before := _plan_without_overrides(run, scratch)) is not None:
        print("".join(f"\n{line}" for line in describe_changes(before, plan, overrides)), end="")
    if search_text is not None:
        print(search_text)
    return 0


def budget_overrides(given: Mapping[str, Any]) -> list[str]:
    """Return the flags of BUDGETS that are given as overrides; `given`: arguments by name."""
    flags = {setting: given.get(flag.replace("-", "_")) for flag, (setting, *_) in BUDGETS.items()}
    budgets = [f"{setting}={value!r}" for setting, value in flags.items() if value is not None]
    return budgets + (["plan.law='own'"] if given.get("law") is not None else [])


def _is_kept(arguments: Arguments, run: Store) -> bool:
    """Return True if a command changes no setting of a trained run, so that its plan is only printed."""
    given = vars(arguments)
    return not arguments.overrides and not budget_overrides(given) and given.get("mix") is None and _is_trained(run)


def _is_trained(run: Store) -> bool:
    return run.exists(PLAN_NAME) and bool(list_checkpoints(run))


def check_used(overrides: Sequence[str]) -> None:
    """Raise ConfigError if an override sets something that is no part of a plan, so that it would be ignored."""
    data = recipe_sections().keys() - SECTIONS.keys()
    if wrong := [text for text in map(str, overrides) if text.strip().partition(".")[0] in data]:
        raise ConfigError(
            f"plan: expected settings of {', '.join(f'[{name}]' for name in SECTIONS)}, got {', '.join(wrong)}. Give "
            "settings of the data to `penstock run`."
        )


def _settings(run: Store, overrides: Sequence[str], name: str) -> Settings:
    """Return the settings of a run's recipe with overrides applied; after training, with the content of its plan."""
    recipe = stored_recipe(run, overrides, name)
    if not _is_trained(run):
        return with_checkpoint_formats(run, with_recipe(settings_of(recipe)))
    trained, given = read_plan(run).settings.to_json(), read_run(run).recipe
    values = {
        name: {key: value for key, value in given.get(name, {}).items() if key in kind.fields_of("execution")}
        | {key: value for key, value in trained.get(name, {}).items() if key not in kind.fields_of("execution")}
        for name, kind in SECTIONS.items()
    }
    values |= {name: trained.get(name, {}) for name in KEPT}
    return load_settings(values, overrides, f"{run.uri}/{PLAN_NAME}")


def _print_stored(run: Store, dataset: Dataset, quiet: bool) -> int:
    """Print the plan of a trained run, which only another setting would change."""
    plan = read_plan(run, dataset)
    print(f"plan kept, because the run has checkpoints: {run.uri}/{PLAN_NAME}")
    if not quiet:
        print(print_plan(plan))
    return 0


def _plan_without_overrides(run: Store, scratch: Store) -> Plan | None:
    """Return the plan of the settings before this command; None if they make no plan."""
    try:
        return make_plan(scratch, open_dataset(run), _settings(run, [], run.uri), run)
    except ConfigError:
        return None  # for instance, no size suits the data before this command gives one


def _on_datasets_of(others: Sequence[Store], run: Store, place: Store) -> Store:
    """Return `run`, or a new run in `place` if `run` does not exist.

    The new run has the recipe of the first of `others`, and its dataset or the union of the datasets of all. Raises
    ConfigError if `run` uses another dataset.
    """
    if not run.exists(RUN_NAME):
        if place is not run and not all(other.is_local for other in others):
            names = " and ".join(other.uri for other in others)
            raise ConfigError(f"plan --dry-run: expected datasets on a local disk, got {names}. Remove --dry-run.")
        if len(others) == 1:
            attach_run(place, others[0], ("tokens", "tokenizer"))
        else:
            LOGGER.info(describe_union(write_union(place, others)))
        return place
    digests = [member.digest for other in others for member in open_dataset(other).members]
    current = [member.digest for member in open_dataset(run).members]
    if current != digests:
        wanted, got = (" + ".join(digest[:12] for digest in each) for each in (digests, current))
        raise ConfigError(
            f"plan --dataset {' --dataset '.join(other.uri for other in others)}: expected a new run folder or one on "
            f"dataset {wanted}, got {run.uri} on dataset {got}. Name another run folder."
        )
    return run


COMMANDS = {
    "plan": Command(
        (add_run, add_overrides, add_plan_arguments),
        plan_command,
        "plan run --set plan.tokens_per_parameter=20",
    ),
}
