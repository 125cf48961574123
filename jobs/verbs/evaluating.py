"""`penstock evaluate RUN --on OTHER`: a checkpoint measured on the held-out text of another dataset."""

import argparse
import subprocess
import sys

from jobs.spark_session import worker_environment


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`, behind the run."""
    parser.add_argument("--on", action="append", required=True, help="run folder whose held-out text is asked about")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")
    parser.add_argument("--sequences", type=int, default=512, help="held-out rows of each source")
    parser.add_argument("--out", help="JSON file of what was measured")


def evaluate_command(arguments: argparse.Namespace) -> int:
    """Measure a checkpoint on the held-out text of other runs; what it was trained on is left out."""
    command = [sys.executable, "-m", "train.evaluate", arguments.run]
    command += [word for run in arguments.on for word in ("--on", run)]
    command += ["--sequences", str(arguments.sequences)]
    for name in ("step", "out"):
        if (value := getattr(arguments, name)) is not None:
            command += [f"--{name}", str(value)]
    return subprocess.run(command, env=worker_environment(), check=False).returncode
