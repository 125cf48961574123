"""Scaling measured: the same training run on 1, 2, … ranks, with tokens/s and efficiency.

    python -m bench.scaling RUN [--ranks 1 2] [--steps 30] [--rounds 3] [--set train.precision=bf16] [--out FILE.json]

RUN is a run folder with a dataset; it is only read, and each start trains in a folder of its own. weak: the global
batch grows with the ranks, so each rank has the same work. strong: the global batch is that of the run. Numbers of
ranks take turns, so load on the machine reaches all of them. Every rank has the same number of cores. Efficiency is
tokens/s over those of the fewest ranks, by rank. Intervals are those of 95 % over the steps, by bootstrap of whole
rounds and of steps in them.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from schemas.storage import Store
from schemas.tokens import open_dataset
from train.monitor.metrics import read_metrics
from train.plan.make_plan import make_plan
from train.plan.plan import read_settings

SKIPPED = 5
"""Steps at the start of a run that do not count: torch allocates, compiles and forms buckets."""
RESAMPLES = 2000
Rounds = list[list[float]]
"""Tokens/s of each step, by round."""


class Interval(NamedTuple):
    """A median and the ends of its 95 % interval."""

    low: float
    middle: float
    high: float


def folder_beside(run: Path, folder: Path) -> Path:
    """Return a run folder that shares all files of `run` but those of training."""
    folder.mkdir()
    for entry in run.iterdir():
        if entry.name != "train":
            (folder / entry.name).symlink_to(entry.resolve())
    return folder


def speeds(folder: Path, ranks: int, overrides: Sequence[str], cores: Sequence[int]) -> list[float]:
    """Train and return tokens/s of each step after the first SKIPPED; `cores`: those that the ranks may use."""
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "jobs.cli", "train", str(folder), "--ranks", str(ranks), *words]
    # A rank uses all cores that its machine has for it, so without a limit a single rank would have those of two.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    if done.returncode:
        raise SystemExit(f"{ranks} ranks: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return [step.tokens_per_second for step in read_metrics(Store(str(folder)))[SKIPPED:]]


def interval(rounds: Rounds, base: Rounds, factor: float, seed: int = 0) -> Interval:
    """Return the ratio of the medians of two sets of rounds, times `factor`."""
    draw = random.Random(seed)

    def median(sets: Rounds) -> float:
        return statistics.median(value for values in sets for value in values)

    def drawn(sets: Rounds) -> Rounds:
        return [draw.choices(values, k=len(values)) for values in draw.choices(sets, k=len(sets))]

    ratios = sorted(factor * median(drawn(rounds)) / median(drawn(base)) for _ in range(RESAMPLES))
    ends = ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES)]
    return Interval(ends[0], factor * median(rounds) / median(base), ends[1])


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line for each kind of scaling and number of ranks."""
    run = Store(str(arguments.run))
    plan = make_plan(run, open_dataset(run), read_settings(run, open_dataset(run), arguments.set))
    batch, fewest = plan.stages[-1].global_batch, min(arguments.ranks)
    fixed = [f"train.steps={arguments.steps}", "train.eval_every=0", "checkpoint.every=0", "train.ranks_every=0"]
    lines: list[dict[str, Any]] = []
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // max(arguments.ranks))
    for kind in ("weak", "strong"):
        rounds: dict[int, Rounds] = {ranks: [] for ranks in arguments.ranks}
        for number in range(arguments.rounds):
            for ranks in arguments.ranks[:: 1 if number % 2 == 0 else -1]:
                rows = batch * ranks // fewest if kind == "weak" else batch
                with tempfile.TemporaryDirectory(prefix="scaling-") as scratch:
                    folder = folder_beside(arguments.run, Path(scratch) / "run")
                    overrides = [*arguments.set, *fixed, f"train.global_batch={rows}"]
                    rounds[ranks].append(speeds(folder, ranks, overrides, cores[: ranks * share]))
        for ranks in arguments.ranks:
            alone = [[1.0]]
            line = {
                "scaling": kind,
                "ranks": ranks,
                "global_batch": batch * ranks // fewest if kind == "weak" else batch,
                "tokens_per_second": interval(rounds[ranks], alone, 1.0)._asdict(),
                "efficiency": interval(rounds[ranks], rounds[fewest], fewest / ranks)._asdict(),
            }
            lines.append(line)
            print(described(line), flush=True)
    return lines


def described(line: dict[str, Any]) -> str:
    """Return a line of the result as text."""
    speed, share = line["tokens_per_second"], line["efficiency"]
    return (
        f"{line['scaling']:<7}{line['ranks']:>4} ranks, batch {line['global_batch']:>5}  "
        f"{speed['middle']:>11,.0f} tokens/s ({speed['low']:,.0f} to {speed['high']:,.0f})  "
        f"efficiency {share['middle']:.3f} ({share['low']:.3f} to {share['high']:.3f})"
    )


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description="Measure the scaling of training over ranks.")
    parser.add_argument("run", type=Path, help="run folder with a dataset")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=30, help="steps of each start")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each number of ranks")
    parser.add_argument("--set", action="append", default=[], help="a setting, as for penstock train")
    parser.add_argument("--out", type=Path, help="JSON")
    arguments = parser.parse_args()
    if arguments.steps <= SKIPPED:
        parser.error(f"--steps: expected more than {SKIPPED}, got {arguments.steps}")
    lines = measure(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"cores": os.cpu_count(), "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
