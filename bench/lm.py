"""Bench of the n-gram trainer: `python -m bench.lm --lmplz PATH TEXT...` prints time and memory next to lmplz.

Each text is trained by lmplz and by the trainer, each in its own process, one after the other. Memory is the sum of
resident sets of the process and all below it (driver, JVM, Python workers), sampled every 0.2 s; CPU time likewise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
SAMPLE_SECONDS = 0.2


def tree(root: int) -> dict[int, tuple[int, float]]:
    """Resident bytes and CPU seconds of a process and all below it."""
    parents, figures = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1])
        figures[int(name)] = (int(fields[21]) * PAGE, (int(fields[11]) + int(fields[12])) / TICKS)
    found = {}
    for process in figures:
        above = process
        while above not in (root, 0, 1) and above in parents:
            above = parents[above]
        if above == root:
            found[process] = figures[process]
    return found


def measured(command: Sequence[str], stdin: Path | None = None) -> dict[str, float]:
    """Wall and CPU time [s] and peak memory [MB] of a command."""
    started, peak, cpu = time.perf_counter(), 0, {}
    with open(stdin or os.devnull, "rb") as text:
        process = subprocess.Popen(command, stdin=text, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None:
            found = tree(process.pid)
            peak = max(peak, sum(resident for resident, _ in found.values()))
            cpu |= {number: seconds for number, (_, seconds) in found.items()}
            with suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_SECONDS)
    if process.returncode:
        sys.exit(f"{command[0]} failed:\n{process.stderr.read().decode()[-2000:]}")
    wall = time.perf_counter() - started
    return {"wall": round(wall, 1), "cpu": round(sum(cpu.values()), 1), "peak": round(peak / 1e6)}


def distance(one: Path, other: Path) -> dict[str, object]:
    """How far apart two ARPA files are: lines only one has, and the largest difference [log10].

    Both are sorted by n-gram by sort(1), so that models of any size can be compared.
    """
    with tempfile.TemporaryDirectory(dir=one.parent) as folder:
        targets = []
        for name, path in (("one", one), ("other", other)):
            target = Path(folder) / name
            targets.append(target)
            command = f"grep -aP '\\t' '{path}' | LC_ALL=C sort -S 500M -T '{folder}' -t '\t' -k 2,2 > '{target}'"
            subprocess.run(["bash", "-c", command], check=True)
        lines = differing = 0
        worst = [0.0, 0.0]
        with targets[0].open("rb") as ours, targets[1].open("rb") as theirs:
            for a, b in zip_longest(ours, theirs, fillvalue=b"\t"):
                left, right = a.rstrip(b"\n").split(b"\t"), b.rstrip(b"\n").split(b"\t")
                lines += 1
                if left[1] != right[1] or len(left) != len(right):
                    differing += 1
                    continue
                for side, column in enumerate(range(0, len(left), 2)):
                    worst[side] = max(worst[side], abs(float(left[column]) - float(right[column])))
    return {"lines": lines, "differing": differing, "probability": worst[0], "backoff": worst[1]}


def train(text: Path, out: Path, order: int, heap: str) -> None:
    """What the measured process does: one training with a fresh session."""
    from jobs.spark_session import SparkConfig, open_session
    from pipeline.perplexity.kneser_ney.train import TrainLmConfig, train_lm

    spark = open_session(SparkConfig(driver_memory=heap), "bench_lm")
    report = train_lm(spark, TrainLmConfig(input=[str(text)], order=order), str(out))
    spark.stop()
    out.with_suffix(".seconds").write_text(json.dumps(report.seconds))


def main() -> None:
    """Measure every text and print one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--lmplz", type=Path)
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--heap", default="1g", help="heap of the driver JVM")
    parser.add_argument("--memory", default="2G", help="sorting memory of lmplz")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--compare", action="store_true", help="compare the models line by line")
    parser.add_argument("--train-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train_only:
        train(options.texts[0], options.work / "ours.arpa", options.order, options.heap)
        return
    for text in options.texts:
        ours, theirs = options.work / "ours.arpa", options.work / "lmplz.arpa"
        figures: dict[str, object] = {"text": text.name, "megabytes": round(text.stat().st_size / 1e6, 1)}
        if options.lmplz:
            plain = [str(options.lmplz), "-o", str(options.order), "-S", options.memory, "-T", str(options.work)]
            figures["lmplz"] = measured([*plain, "--arpa", str(theirs)], text)
        own = [sys.executable, "-m", "bench.lm", "--train-only", "--work", str(options.work), "--heap", options.heap]
        figures["penstock"] = measured([*own, "--order", str(options.order), str(text)])
        figures["steps"] = json.loads(ours.with_suffix(".seconds").read_text())
        if options.compare and options.lmplz:
            figures["distance"] = distance(ours, theirs)
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
