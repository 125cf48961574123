"""`penstock plan`, `train`, `generate`, `export`: sizing a training run, making it, and what becomes of its model.

Torch is loaded in the processes that are started, never here.
"""

import argparse
import os
import subprocess
import sys
import tempfile

from jobs.recipe import stored_recipe
from jobs.spark_session import worker_environment
from schemas.errors import ConfigError, PenstockError
from schemas.locks import lock_training
from schemas.manifest import RUN_NAME
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from schemas.versions import attach_run, open_run
from train.checkpoint.folder import check_resumable, local_path, with_checkpoint_formats
from train.config.plan import copy_mix, mix_overrides
from train.config.settings import Settings, settings_of
from train.export.megatron import export_megatron
from train.plan.dry_run import describe_run
from train.plan.make_plan import choose_layout, make_plan
from train.plan.plan import check_overrides, check_ranks, check_used, kept_settings, read_settings, write_plan
from train.plan.text import print_plan
from train.takedown_replay import begin_replay, describe_replay

Arguments = argparse.Namespace
FORMATS = ("huggingface", "megatron")
"""What a run is exported as: the model of a checkpoint as a Llama folder; its dataset as .bin and .idx files."""
SHUTDOWN_SECONDS = 3600
"""Time that torchrun leaves its ranks for their last checkpoint; after its own 30 s it would kill them."""


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
    plan, found = choose_layout(make_plan(place, dataset, with_checkpoint_formats(run, settings_of(recipe))))
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
        attach_run(place, other, ("tokens", "tokenizer"))
        return place
    if (found := open_dataset(run)).digest != dataset.digest:
        raise ConfigError(
            f"plan --dataset {other.uri}: expected a new run folder or one on dataset {dataset.digest[:12]}, got "
            f"{run.uri} on {found.digest[:12]}. Name another folder."
        )
    return run


def calibrate_command(arguments: Arguments) -> int:
    """Measure this machine as a device that plans can name."""
    options = {"ranks": arguments.ranks, "threads": arguments.threads}
    given = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return _in_torch("train.calibrate", arguments.profile, *given)


def train_command(arguments: Arguments) -> int:
    """Train on this machine, or go on with it, in as many processes as asked; --dry-run says what that would be."""
    if arguments.ranks < 1 or arguments.restarts < 0:
        raise ConfigError(
            f"train: expected --ranks >= 1 and --restarts >= 0, got {arguments.ranks} and {arguments.restarts}"
        )
    run = Store(arguments.run)
    local_path(run, "train")
    if arguments.replay_from is not None:
        if arguments.dry_run:
            raise ConfigError("train: expected --dry-run or --replay-from, got both. A replay moves checkpoints.")
        check_overrides(run, arguments.overrides)  # before checkpoints are moved
        print(describe_replay(begin_replay(run, arguments.replay_from)), flush=True)
    dataset = open_dataset(run)
    try:
        settings = read_settings(run, dataset, arguments.overrides)
        check_used(settings, dataset)
        if arguments.dry_run:
            return _dry_run(dataset, settings, arguments.ranks)
        # Each rank checks this too; here it is said once, before any starts, and no restart repeats it.
        check_ranks(make_plan(run, dataset, settings), arguments.ranks)
        with lock_training(run, "penstock train"):
            pass
    except ConfigError as error:
        kept = ", ".join(kept_settings(run))
        raise ConfigError(f"{error}" + (f"\n  (kept from earlier commands: {kept})" if kept else "")) from error
    words = [word for override in arguments.overrides for word in ("--set", override)]
    command, environment = ["train.pretrain", arguments.run, *words], worker_environment()
    if arguments.ranks > 1 or arguments.restarts:
        options = {"nproc-per-node": arguments.ranks, "max-restarts": arguments.restarts}
        options["shutdown-timeout"] = SHUTDOWN_SECONDS
        torchrun = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = ["train.launch", "--standalone", *torchrun, "-m", *command]
        # As torchrun would set it, with a page of warnings; the ranks set their threads themselves.
        environment = {"OMP_NUM_THREADS": "1"} | environment
    # In place of this process, so that signals and exit codes need nobody to pass them on.
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", *command], environment)


def _dry_run(dataset: Dataset, settings: Settings, num_ranks: int) -> int:
    # A plan that asks for too much memory is refused; here it is shown.
    unlimited = settings.plan.model_copy(update={"device_memory": None})
    with tempfile.TemporaryDirectory() as scratch:  # an index of packed rows is made there, not in the run
        plan = make_plan(Store(scratch), dataset, settings.model_copy(update={"plan": unlimited}))
        print(describe_run(plan, settings, num_ranks))
        try:
            check_ranks(make_plan(Store(scratch), dataset, settings), num_ranks)
        except ConfigError:
            return 2  # what is wrong stands above
    return 0


def generate_command(arguments: Arguments) -> int:
    """Sample text from a checkpoint."""
    command = [arguments.run, "--prompt", arguments.prompt]
    for name in ("tokens", "temperature", "seed"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return _in_torch("train.eval.generate", *command, *_step(arguments))


def export_command(arguments: Arguments) -> int:
    """Write a checkpoint as a Llama folder of Hugging Face's, or the dataset as Megatron's .bin and .idx."""
    if arguments.format == "huggingface":
        return _in_torch("train.export.llama", arguments.run, "--out", arguments.out, *_step(arguments))
    if arguments.step is not None:
        raise ConfigError("export --step: expected with --format huggingface, got megatron, which takes the dataset")
    for made in export_megatron(Store(arguments.run), Store(arguments.out)):
        print(f"{arguments.out}/{made.prefix}: {made.num_documents:,} documents, {made.num_tokens:,} tokens")
    return 0


def _in_torch(*command: str) -> int:
    """The exit code of a module of the training half, run in a process of its own."""
    return subprocess.run([sys.executable, "-m", *command], check=False).returncode


def _step(arguments: Arguments) -> list[str]:
    return [] if arguments.step is None else ["--step", str(arguments.step)]


# `penstock evaluate RUN --on OTHER`: a checkpoint measured on the held-out text of another dataset.


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`, behind the run."""
    parser.add_argument("--on", action="append", required=True, help="run folder whose held-out text is asked about")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")
    parser.add_argument("--sequences", type=int, default=512, help="held-out rows of each source")
    parser.add_argument("--out", help="JSON file of what was measured")


def evaluate_command(arguments: argparse.Namespace) -> int:
    """Measure a checkpoint on the held-out text of other runs; what it was trained on is left out."""
    command = [sys.executable, "-m", "train.eval.evaluate", arguments.run]
    command += [word for run in arguments.on for word in ("--on", run)]
    command += ["--sequences", str(arguments.sequences)]
    for name in ("step", "out"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    return subprocess.run(command, env=worker_environment(), check=False).returncode
