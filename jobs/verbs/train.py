"""`penstock train`, `generate`, `evaluate` and `calibrate`: the commands that use torch.

Torch is imported in the child processes that they start, never in this one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile

from jobs.arguments import Command, add_overrides, add_run, number, whole
from jobs.spark_session import worker_environment
from schemas.errors import ConfigError
from schemas.locks import lock_training
from schemas.logs import LOGGER, log_words, show
from schemas.overrides import override_words
from schemas.paths import check_own_folders
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from schemas.versions import warn_of_replaced_tables
from train.checkpoint.folder import local_path
from train.config.settings import Settings
from train.monitor.wandb_log import check_wandb
from train.parallel.devices import cluster_of
from train.plan.make_plan import make_plan
from train.plan.plan import (
    check_overrides,
    check_ranks,
    check_settings_used,
    rank_problems,
    read_settings,
    settings_beyond_recipe,
)
from train.plan.text import RankDevice, describe_run, peak_memory
from train.remote.work import check_cache_given
from train.takedown_replay import begin_replay, describe_replay, plan_replay

GROUP = "training"
VERBS = {
    "train": "Start or resume training on this machine. --dry-run prints layout and memory without starting it.",
    "generate": "Sample text from a checkpoint.",
    "evaluate": "Measure a checkpoint on held-out text or tasks of lm_eval. The text is that of any run, without "
    "documents that it was trained on.",
    "calibrate": "Measure the speed of this machine, for `plan --gpu`. It is written as a device profile.",
}

Arguments = argparse.Namespace
SHUTDOWN_SECONDS = 3600
"""Time that torchrun waits for the ranks to write their last checkpoint; its default is to kill them after 30 s."""


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    parser.add_argument("profile", help="device profile to write; `plan --gpu FILE` reads it")
    parser.add_argument(
        "--ranks", type=whole, help="processes that measure together; default: as many as fit the machine"
    )
    parser.add_argument("--threads", type=whole, help="threads of each process")


def calibrate_command(arguments: Arguments) -> int:
    """Measure the speed of this machine and write it as a device profile for `plan --gpu`."""
    options = {"ranks": arguments.ranks, "threads": arguments.threads}
    given = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return in_torch("train.calibrate", arguments.profile, *given)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train` except the run and `--set`."""
    parser.add_argument("--ranks", type=whole, default=1, help="processes to start on this machine")
    parser.add_argument(
        "--restarts", type=whole, default=0, help="how often to restart the ranks after one of them has failed"
    )
    parser.add_argument(
        "--replay-from",
        metavar="STEP|clean",
        help="repeat training from this checkpoint, on the dataset without the documents that were taken down",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing; print the layout, the memory of a rank and the steps, or with --replay-from what it would "
        "repeat and move",
    )
    parser.add_argument(
        "--quarantine",
        dest="overrides",
        action="append_const",
        const="guard.quarantine=true",
        help="after a loss spike, exclude the documents whose losses are outliers; train/quarantine.jsonl lists them",
    )


def train_command(arguments: Arguments) -> int:
    """Start or resume training on this machine. --dry-run prints layout and memory without starting it."""
    if arguments.ranks < 1 or arguments.restarts < 0:
        raise ConfigError(
            f"train: expected --ranks >= 1 and --restarts >= 0, got {arguments.ranks} and {arguments.restarts}. "
            "Correct the flag that is too small."
        )
    run = Store(arguments.run)
    check_own_folders(run, "train")
    if arguments.replay_from is not None:
        check_overrides(run, arguments.overrides)  # before checkpoints are moved
        if arguments.dry_run:
            # The plan, and so its layout and memory, are those of the training before.
            print(
                f"nothing is started or moved; it would be {describe_replay(plan_replay(run, arguments.replay_from))}"
            )
            return 0
        show(describe_replay(begin_replay(run, arguments.replay_from)))
    dataset = open_dataset(run)
    warn_of_replaced_tables([run])
    try:
        settings = read_settings(run, dataset, arguments.overrides)
        check_settings_used(settings, dataset)
        check_cache_given(run, settings.train)
        check_wandb(settings.train)
        if arguments.dry_run:
            return _dry_run(run, dataset, settings, arguments.ranks)
        # Each rank checks this too; here the error is printed once, before any rank starts, and no restart repeats it.
        check_ranks(make_plan(run, dataset, settings), arguments.ranks)
        with lock_training(run, "penstock train"):
            pass
    except ConfigError as error:
        kept = ", ".join(settings_beyond_recipe(run))
        raise ConfigError(f"{error}" + (f"\n  (kept from earlier commands: {kept})" if kept else "")) from error
    words = override_words(arguments.overrides)
    command, environment = ["train.pretrain", arguments.run, *words], worker_environment()
    if arguments.ranks > 1 or arguments.restarts:
        options = {"nproc-per-node": arguments.ranks, "max-restarts": arguments.restarts}
        options["shutdown-timeout"] = SHUTDOWN_SECONDS
        torchrun = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = ["train.launch", "--standalone", *torchrun, "-m", "train.start", "--quiet", *log_words(), *command]
        # torchrun would set OMP_NUM_THREADS too, with a long warning; the ranks set their number of threads themselves.
        environment = {"OMP_NUM_THREADS": "1"} | environment
    # Replaces this process, so that signals and exit codes need not be passed on.
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "train.start", *log_words(), *command], environment)


def _dry_run(run: Store, dataset: Dataset, settings: Settings, num_ranks: int) -> int:
    """Print what a training would be; return 2 if it would be refused or needs too much memory, else 0."""
    # A plan that needs too much memory is rejected; a dry run prints it.
    unlimited = settings.plan.model_copy(update={"device_memory": None})
    with tempfile.TemporaryDirectory() as scratch:  # the index of packed rows is written there, not to the run
        plan = make_plan(Store(scratch), dataset, settings.model_copy(update={"plan": unlimited}), run)
        device = _device_of_rank(settings, num_ranks)
        print(describe_run(plan, settings, num_ranks, device))
        if rank_problems(plan, settings, num_ranks):
            return 2
        limit = settings.plan.device_memory or device.memory
        needed = peak_memory(plan, settings.for_device(device.kind), num_ranks, device.kind)
        if limit is not None and needed > limit:
            return 2
        try:
            make_plan(Store(scratch), dataset, settings, run)
        except ConfigError as error:
            print(f"!! {error}")
            return 2
    return 0


def _device_of_rank(settings: Settings, num_ranks: int) -> RankDevice:
    """Return the device of a rank: that of `[cluster]`, or else one of this machine."""
    if (cluster := cluster_of(settings)) is not None:
        return RankDevice(cluster.device.kind, cluster.device.name, cluster.device.memory_bytes)
    command = [sys.executable, "-m", "train.parallel.this_machine"]
    done = subprocess.run(command, env=worker_environment(), check=True, stdout=subprocess.PIPE)
    here = json.loads(done.stdout)
    # Ranks on CPUs share the memory of the machine.
    memory = here["memory"] if here["kind"] == "cuda" else here["memory"] // num_ranks
    return RankDevice(here["kind"], f"this machine, {here['name'] or here['kind']}", memory)


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate` except the run."""
    parser.add_argument("--prompt", default="", help="beginning of the text; default: a new document")
    parser.add_argument("--tokens", type=whole, default=100, help="maximum number of tokens to add; default 100")
    parser.add_argument(
        "--temperature", type=number, default=0.8, help="0 chooses the most probable token; default 0.8"
    )
    parser.add_argument("--seed", type=whole, default=0, help="seed of the sampling; default 0")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the option for the step of a checkpoint."""
    parser.add_argument("--step", type=whole, help="step of the checkpoint; default: the last")


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the option for the weights of a checkpoint."""
    parser.add_argument(
        "--weights",
        choices=("model", "ema"),
        default="model",
        help="model: those of the last update (default); ema: their moving average, of a run with optim.ema",
    )


def generate_command(arguments: Arguments) -> int:
    """Sample text from a checkpoint."""
    command = [arguments.run, "--prompt", arguments.prompt]
    for name in ("tokens", "temperature", "seed", "weights"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return in_torch("train.eval.generate", *command, *_step(arguments))


def in_torch(*command: str) -> int:
    """Run a module of `train` in a child process and return its exit code, or 130 if it was interrupted."""
    program = [sys.executable, "-m", "train.start", "--quiet", *log_words(), *command]
    try:
        return subprocess.run(program, env=worker_environment(), check=False).returncode
    except KeyboardInterrupt:
        LOGGER.warning("penstock: interrupted")  # such a command does not resume
        return 128 + signal.SIGINT


def _step(arguments: Arguments) -> list[str]:
    return [] if arguments.step is None else ["--step", str(arguments.step)]


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate` except the run."""
    parser.add_argument(
        "--on",
        action="append",
        help="run folder whose held-out text is read, such as RUN itself; may be repeated",
    )
    parser.add_argument(
        "--harness",
        metavar="TASKS",
        help="tasks of lm_eval, separated by commas, in place of --on; results are kept in train/harness.jsonl",
    )
    parser.add_argument(
        "--harness-tasks",
        metavar="FOLDER",
        action="append",
        help="folder with the files of more tasks, which may run code; may be repeated",
    )
    parser.add_argument("--limit", type=whole, help="with --harness: samples of each task; default: all")
    parser.add_argument("--step", type=whole, help="step of the checkpoint; default: the last")
    parser.add_argument("--sequences", type=whole, help="with --on: held-out rows of each source; default 512")
    parser.add_argument("--out", help="JSON file for the measurements")


def evaluate_command(arguments: argparse.Namespace) -> int:
    """Measure a checkpoint on the held-out text of runs, or on tasks of lm_eval."""
    if (arguments.on is None) == (arguments.harness is None):
        raise ConfigError(
            "evaluate: expected either --on RUN or --harness TASKS, got "
            f"{'both' if arguments.on else 'neither'}. Give one of them."
        )
    if arguments.harness is not None:
        return _harness_command(arguments)
    _check_unused(arguments, "--on", "harness_tasks", "limit")
    command = [word for run in arguments.on for word in ("--on", run)]
    command += ["--weights", arguments.weights]
    for name in ("sequences", "step", "out"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    return in_torch("train.eval.evaluate", arguments.run, *command)


def _check_unused(arguments: Arguments, used: str, *names: str) -> None:
    """Raise ConfigError if one of the options `names` is given, which have no effect with `used`."""
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]:
        raise ConfigError(f"evaluate: expected no {' and no '.join(given)} with {used}, got it. Remove it.")


def _harness_command(arguments: Arguments) -> int:
    """Measure a checkpoint on tasks of lm_eval, in a process of its own."""
    _check_unused(arguments, "--harness", "sequences", "out")
    run = Store(arguments.run)
    local_path(run, "train")
    check_own_folders(run, "train")
    command = ["--tasks", arguments.harness, "--weights", arguments.weights]
    command += [word for folder in arguments.harness_tasks or () for word in ("--folder", folder)]
    for name in ("step", "limit"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    return in_torch("train.eval.harness", arguments.run, *command)


COMMANDS = {
    "train": Command(
        (add_run, add_overrides, add_train_arguments),
        train_command,
        "train run --ranks 2 --set train.precision=bf16",
    ),
    "generate": Command(
        (add_run, add_generate_arguments, add_step, add_weights),
        generate_command,
        "generate run --prompt 'The function returns' --tokens 60",
    ),
    "evaluate": Command(
        (add_run, add_evaluate_arguments, add_weights),
        evaluate_command,
        "evaluate run --on other",
    ),
    "calibrate": Command((add_calibrate_arguments,), calibrate_command, "calibrate machine.json --ranks 2"),
}
