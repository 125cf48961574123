"""Training measured: tokens/s beside transformers and plain torch in one run, memory, stalls and restarts, and a GPU.

    python -m bench.train [--quick] [--only speed memory loader saves restart] [--threads 1 2] [--out FILE.json]
    python -m bench.train --gpu [--out FILE.json]

All contenders have the same weights, rows, loss, optimiser (fused AdamW) and clipping, which the losses of their first
steps must show, and take turns step by step. Ratios are medians over the rounds of (their seconds / ours): of wall
clock, and of CPU seconds, which other load on the machine moves less. `transformers` takes part where it is installed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.train_contenders import CASES, CONTENDERS, Case, make_rows, taking_part
from bench.train_gpu import gpu_cases
from bench.train_runs import Broken, loader, restart, saves
from train.model.shape import num_parameters
from train.parallel.ranks import Ranks, open_ranks

FIRST_STEPS = 3
EQUAL = 1e-5
"""Largest difference between the losses of first steps."""


# --------------------------------------------------------------------------------------------------------------- speed


def compare(case: Case, masked: bool, seconds: float, ranks: Ranks, names: Sequence[str]) -> dict[str, Any]:
    """Tokens/s of each contender, and how much slower than ours the others are; every round, each makes a step."""
    rows, contenders = make_rows(case, masked), {name: CONTENDERS[name](case, ranks) for name in names}
    first = {name: [each.step(n, rows) for n in range(1, FIRST_STEPS + 1)] for name, each in contenders.items()}
    apart = max(abs(a - b) for losses in first.values() for a, b in zip(losses, first["penstock"]))
    if apart > EQUAL:
        raise SystemExit(f"{case.name}: losses of the first steps differ by {apart:.1e}: {first}")
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    end, number = time.perf_counter() + seconds, FIRST_STEPS
    while time.perf_counter() < end or number < FIRST_STEPS + 5:
        number += 1
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            begin, used = time.perf_counter(), time.process_time()
            contenders[name].step(number, rows)
            wall[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - used)
    found: dict[str, Any] = {
        "case": case.name,
        "parameters": num_parameters(case.shape),
        "rows": case.rows,
        "seq_len": case.seq_len,
        "threads": torch.get_num_threads(),
        "document_mask": masked,
        "rounds": number - FIRST_STEPS,
        "largest_difference_of_losses": apart,
    }
    for name in names:
        found[name] = {
            "tokens_per_second": case.tokens / statistics.median(wall[name]),
            "tokens_per_cpu_second": case.tokens / statistics.median(cpu[name]),
            "times_ours": _ratio(wall[name], wall["penstock"]),
            "times_ours_cpu": _ratio(cpu[name], cpu["penstock"]),
        }
    return found


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def speed(cases: Sequence[Case], threads: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """A line for each case, number of threads, and with and without masks of documents."""
    found, names = [], taking_part()
    print("tokens/s; in brackets how many times our wall-clock seconds and CPU seconds a step takes")
    with open_ranks() as ranks:
        for case in cases:
            for number in threads:
                torch.set_num_threads(number)
                for masked in (False, True):
                    line = compare(case, masked, seconds, ranks, names)
                    shown = "  ".join(_shown(name, line[name]) for name in names)
                    kind = "documents" if masked else "causal   "
                    print(f"{case.name:>4} {case.rows} x {case.seq_len} {number} threads {kind} {shown}", flush=True)
                    found.append(line)
    return found


def _shown(name: str, line: Mapping[str, float]) -> str:
    text = f"{name} {line['tokens_per_second']:8,.0f}"
    return text if name == "penstock" else f"{text} ({line['times_ours']:.2f}, {line['times_ours_cpu']:.2f})"


# -------------------------------------------------------------------------------------------------------------- memory


def memory(case: Case) -> list[dict[str, Any]]:
    """Largest growth of each contender's memory, each in a process of its own."""
    found = []
    for name in taking_part():
        command = [sys.executable, "-m", "bench.train", "--memory-of", name, "--case", case.name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        line = json.loads(done.stdout.splitlines()[-1]) | {"case": case.name, "contender": name}
        print(
            f"{case.name:>4} {case.rows} x {case.seq_len} {name:13s} peak {line['peak'] / 2**20:7,.0f} MiB", flush=True
        )
        found.append(line)
    return found


def memory_of(name: str, case: Case) -> None:
    """Print how much this process grows with a contender and its steps [bytes]; Linux only."""
    with open_ranks() as ranks:
        torch.set_num_threads(1)
        before = _status("VmRSS")
        contender, rows = CONTENDERS[name](case, ranks), make_rows(case, False)
        contender.step(1, rows)
        built = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        contender.step(2, rows)
        contender.step(3, rows)
        print(json.dumps({"peak": _status("VmHWM") - before, "between_steps": built - before}))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


# ------------------------------------------------------------------------------------------------------------- command

PARTS = ("speed", "memory", "loader", "saves", "restart")


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parts that were asked for, by name."""
    found: dict[str, Any] = {}
    cases = [case for case in CASES if case.name in arguments.cases][: 1 if arguments.quick else None]
    makers: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed(
            cases, arguments.threads[:1] if arguments.quick else arguments.threads, arguments.seconds
        ),
        "memory": lambda: memory(cases[-1]),
        "loader": loader,
        "saves": saves,
        "restart": restart,
    }
    for name in arguments.only or (("speed", "memory") if arguments.quick else PARTS):
        try:
            found[name] = makers[name]()
        except Broken as error:
            print(f"{name}: {error}", flush=True)
            found[name] = {"error": str(error)}
        write(arguments.out, found)
    return found


def write(out: Path | None, found: Mapping[str, Any]) -> None:
    """Write what was found so far."""
    if out is not None:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        machine["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        out.write_text(json.dumps(machine | dict(found), indent=1))


def measure_gpu(out: Path | None) -> None:
    """The GPU's part."""
    if not torch.cuda.is_available():
        print("the GPU's part is left out: torch finds no CUDA device")
        return
    lines: list[dict[str, Any]] = []

    def keep(line: dict[str, Any]) -> None:
        lines.append(line)
        write(out, {"gpu": lines})

    torch.set_num_threads(min(8, os.cpu_count() or 1))
    with open_ranks() as ranks:
        gpu_cases(ranks, keep)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description="Measure training.")
    parser.add_argument("--quick", action="store_true", help="the smallest case only, in less than a minute")
    parser.add_argument("--gpu", action="store_true", help="the GPU's part, and nothing else")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts (default: all)")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, help="for each line of speed (default: 20; quick: 4)")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--memory-of", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.seconds = arguments.seconds or (4.0 if arguments.quick else 20.0)
    if arguments.memory_of:
        memory_of(arguments.memory_of, next(case for case in CASES if case.name == arguments.case))
    elif arguments.gpu:
        measure_gpu(arguments.out)
    else:
        measure_all(arguments)
        measure_gpu(None) if arguments.only is None and not arguments.quick else None


if __name__ == "__main__":
    main()
