"""`penstock train`, `generate`, `export`, `evaluate`, `calibrate`: a training run, and what becomes of its model.

Torch is loaded in the processes that are started, never here.
"""

import argparse
import os
import subprocess
import sys
import tempfile

from jobs.arguments import Command, add_overrides, add_run
from jobs.spark_session import worker_environment
from schemas.errors import ConfigError
from schemas.locks import training
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.folder import local_path
from train.config.settings import Settings
from train.export.megatron import export_megatron
from train.plan.dry_run import describe_run
from train.plan.make_plan import make_plan
from train.plan.plan import check_overrides, check_ranks, check_used, kept_settings, read_settings
from train.takedown_replay import begin_replay, describe_replay

VERBS = {
    "train": "Train on this machine, or go on with it, in as many processes as asked; --dry-run says what that would be.",
    "generate": "Sample text from a checkpoint.",
    "export": "Write a checkpoint as a Llama folder of Hugging Face's, or the dataset as Megatron's .bin and .idx.",
    "evaluate": "Measure a checkpoint on the held-out text of other runs; what it was trained on is left out.",
    "calibrate": "Measure this machine as a device that plans can name.",
}

Arguments = argparse.Namespace
FORMATS = ("huggingface", "megatron")
"""What a run is exported as: the model of a checkpoint as a Llama folder; its dataset as .bin and .idx files."""
SHUTDOWN_SECONDS = 3600
"""Time that torchrun leaves its ranks for their last checkpoint; after its own 30 s it would kill them."""


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    parser.add_argument("profile", help="file to write what was measured to; `plan --gpu FILE` takes it")
    parser.add_argument("--ranks", type=int, help="processes that measure together; default: what the machine takes")
    parser.add_argument("--threads", type=int, help="threads of each")


def calibrate_command(arguments: Arguments) -> int:
    """Measure this machine as a device that plans can name."""
    options = {"ranks": arguments.ranks, "threads": arguments.threads}
    given = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return _in_torch("train.calibrate", arguments.profile, *given)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train` but for the run and `--set`."""
    parser.add_argument("--ranks", type=int, default=1, help="processes to start on this machine")
    parser.add_argument("--restarts", type=int, default=0, help="how often the ranks start again after one has died")
    parser.add_argument(
        "--replay-from",
        metavar="STEP|clean",
        help="train again from this checkpoint on the dataset without documents that were taken down",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="start nothing; print layout, memory of a rank and steps for so many"
    )
    parser.add_argument(
        "--quarantine",
        dest="overrides",
        action="append_const",
        const="guard.quarantine=true",
        help="behind a spike go on without the documents that stand out; train/quarantine.jsonl lists them",
    )


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
        with training(run, "penstock train"):
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


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate` but for the run."""
    parser.add_argument("--prompt", default="")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the step of the checkpoint."""
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")


def generate_command(arguments: Arguments) -> int:
    """Sample text from a checkpoint."""
    command = [arguments.run, "--prompt", arguments.prompt]
    for name in ("tokens", "temperature", "seed"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return _in_torch("train.eval.generate", *command, *_step(arguments))


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export` but for the run and the step."""
    parser.add_argument("--format", choices=FORMATS, required=True, help="of a checkpoint; megatron: of the dataset")
    parser.add_argument("--out", required=True, help="folder to write: a new one for huggingface")


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


COMMANDS = {
    "train": Command(
        (add_run, add_overrides, add_train_arguments),
        train_command,
        "train run --ranks 2 --set train.precision=bf16",
    ),
    "generate": Command(
        (add_run, add_generate_arguments, add_step),
        generate_command,
        "generate run --prompt 'The function returns' --tokens 60",
    ),
    "export": Command(
        (add_run, add_export_arguments, add_step),
        export_command,
        "export run --format huggingface --out llama",
    ),
    "evaluate": Command(
        (add_run, add_evaluate_arguments),
        evaluate_command,
        "evaluate run --on other",
    ),
    "calibrate": Command((add_calibrate_arguments,), calibrate_command, "calibrate machine.json --ranks 2"),
}
