"""The six calls of a rehearsal or of a GPU, each a process of its own that writes a line of JSON for what it found.

`python -m bench.gpu_calls 2 FOLDER` makes call 2; bench/gpu_rehearsal.py starts it with a limit of time, a folder for
compiled kernels and a device. Without a CUDA device the models are tiny, and the code is the same.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu_peers import measure_peers
from bench.train_gpu import (
    GPU_CASES,
    LARGE_CASE,
    SECONDS,
    TINY_CASES,
    TINY_LARGE_CASE,
    VARIANTS,
    Deadline,
    GpuCase,
    Variant,
    batches_for,
    compilations,
    count_from_here,
    dataset_for,
    measure_cases,
    table_device,
)
from bench.train_parts import largest_gaps, measure_parts, profile
from bench.train_runs import finish, last_step, pretrain, wait_until
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import computed, metrics, notes, state_at
from train.parallel.ranks import Ranks, open_ranks
from train.pretrain.loop import train

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-m", "gpu", "-x", "-q", "-rs", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers")
PYTEST_SECONDS, CALIBRATE_SECONDS = 200.0, 180.0
KILL_AT, EVERY = 12, 5
"""Step after which a run is killed, and steps between its checkpoints."""
PRECISIONS = ("bf16", "fp8")


@dataclass(frozen=True)
class Call:
    """What a call works with."""

    folder: Path
    """Where its lines and files go."""
    ranks: Ranks
    deadline: Deadline
    keep: Callable[[Mapping[str, Any]], None]

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU; without one the models are tiny."""
        return self.ranks.device.type == "cuda"

    @property
    def cases(self) -> Sequence[GpuCase]:
        """The three models."""
        return GPU_CASES if self.cuda else TINY_CASES


def make_run(folder: Path, cuda: bool, changes: Mapping[str, Mapping[str, Any]]) -> Path:
    """A run folder with a small dataset of learnable text, in which nothing is trained yet."""
    sources = {"web": 900, "books": 300} if cuda else {"web": 90, "books": 30}
    run = make_tiny_dataset(folder, sources, 4096 if cuda else 512, 1024 if cuda else 256, 1 << 16)
    width, layers, heads = (384, 6, 6) if cuda else (64, 2, 4)
    shape = {"num_layers": layers, "d_model": width, "num_heads": heads, "num_kv_heads": heads, "d_ffw": 2 * width}
    length, batch = (512, 16) if cuda else (64, 8)
    recipe: dict[str, dict[str, Any]] = {
        "plan": shape | {"max_epochs": 1000.0},
        "train": {"seq_len": length, "global_batch": batch, "steps": 20, "eval_every": 0, "document_mask": True},
        "optim": {"learning_rate": 1e-3, "warmup_steps": 5},
        "layout": {"micro_batch": batch // 2, "data": "zero2"},
        "checkpoint": {"every": 0},
    }
    recipe = {name: section | dict(changes.get(name, {})) for name, section in recipe.items()}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    return folder


def curve_line(name: str, folder: Path, reference: Path | None) -> dict[str, Any]:
    """What the steps of a run measured, and how far its losses are from those of another."""
    lines = metrics(folder)
    line: dict[str, Any] = {
        "run": name,
        "steps": len(lines),
        "losses": [each.loss for each in lines],
        "heldout_loss": lines[-1].heldout_loss,
        "tokens_per_second": sorted(each.tokens_per_second for each in lines)[len(lines) // 2],
        "loader_stall": sum(each.data_seconds for each in lines) / sum(each.step_seconds for each in lines),
        "peak_bytes": max((each.memory for each in lines if each.memory), default=None),
    }
    if reference is not None:
        others = metrics(reference)
        pairs = [(one.loss, other.loss) for one, other in zip(lines, others, strict=True)]
        line["from_fp32"] = max(abs((one or 0.0) - (other or 0.0)) for one, other in pairs)
        line["heldout_from_fp32"] = abs((line["heldout_loss"] or 0.0) - (others[-1].heldout_loss or 0.0))
    return line


def train_here(call: Call, folder: Path, *overrides: str) -> dict[str, Any]:
    """Train a run in this process; returns the counts of compilation. Raises RuntimeError if it did not end well."""
    count_from_here()
    if code := train(Store(str(folder)), overrides, call.ranks):
        raise RuntimeError(f"{folder.name}: expected a run that ends with 0, got {code}. Read its messages.")
    return compilations()._asdict()


def call_1(call: Call) -> None:
    """The tests that need a GPU, then 20 steps in each number format with one evaluation, beside fp32 on the CPU."""
    call.keep({"check": "pytest -m gpu"} | run_tests())
    with tempfile.TemporaryDirectory() as scratch:
        fp32 = make_run(Path(scratch) / "fp32", call.cuda, {"train": {"eval_every": 20}})
        copies = {name: shutil.copytree(fp32, Path(scratch) / name) for name in PRECISIONS}
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")
        command = [sys.executable, "-m", "train.pretrain", str(fp32), "--set", "train.precision=fp32"]
        subprocess.run([*command, "--set", "layout.compile=false"], check=True, cwd=ROOT, env=environment)
        call.keep(curve_line("fp32 on the CPU", fp32, None))
        for name, folder in copies.items():
            counted = train_here(call, folder, f"train.precision={name}", "layout.compile=true")
            call.keep(curve_line(f"{name} compile documents", folder, fp32) | counted)


def run_tests() -> dict[str, Any]:
    """The outcome of the tests marked gpu."""
    try:
        done = subprocess.run(
            [sys.executable, *PYTEST], capture_output=True, text=True, cwd=ROOT, timeout=PYTEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"expected an end within {PYTEST_SECONDS:.0f} s, got none. Run the test files one by one."}
    print(done.stdout[-6000:], flush=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    line: dict[str, Any] = {"returncode": done.returncode, "result": lines[-1][:200] if lines else ""}
    return line if done.returncode == 0 else line | {"error": "\n".join(lines[-40:])}


def call_2(call: Call) -> None:
    """The smallest model in every variant."""
    measure_cases(call.cases[:1], VARIANTS, call.ranks, call.keep, call.deadline)


def call_3(call: Call) -> None:
    """The larger models."""
    measure_cases(call.cases[1:], VARIANTS, call.ranks, call.keep, call.deadline)


def call_4(call: Call) -> None:
    """The parts of a step alone, their distance from the roofline, and a profile; of what users run."""
    case, variant = call.cases[0], best_variant(call.folder)
    with tempfile.TemporaryDirectory() as scratch:
        batches = batches_for(dataset_for(Path(scratch), case), case, variant)
        with call.deadline.measuring():
            lines = measure_parts(case, variant, call.ranks, batches)
        for line in lines:
            call.keep({"case": case.name, "of": variant.name} | line)
        for place, line in enumerate(largest_gaps(lines), start=1):
            call.keep({"gap": place} | line)
        call.keep({"check": "profile"} | profile(case, variant, call.ranks, batches, call.folder))


def best_variant(folder: Path) -> Variant:
    """The fastest variant with documents that call 2 measured; else the one that users run."""
    path = folder / "call-2.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rates = {line["variant"]: line["tokens_per_second"] for line in lines if "tokens_per_second" in line}
    known = [variant for variant in VARIANTS if variant.documents and variant.name in rates]
    return max(known, key=lambda variant: rates[variant.name], default=VARIANTS[0])


def call_5(call: Call) -> None:
    """A run killed and resumed beside an uninterrupted one, a large model and its offloading, checkpoints, and the
    device measured."""
    with tempfile.TemporaryDirectory() as scratch:
        run_resumes(call, Path(scratch))
    large = LARGE_CASE if call.cuda else TINY_LARGE_CASE
    variants = [Variant(), Variant("fp8"), Variant(offload=True, compile=False)]
    measure_cases([large], variants, call.ranks, call.keep, call.deadline)
    if call.deadline.has_room:
        call.keep({"check": "calibrate"} | calibrated(call))
    else:
        call.keep({"check": "calibrate", "left_out": "the time of the call was over"})


def run_resumes(call: Call, scratch: Path) -> None:
    """Keep a line on the resumed run, and one on how long training waits for checkpoints of each mode.

    On a CPU layers are not compiled, which would take most of the time of four processes.
    """
    changes = {"checkpoint": {"every": EVERY, "keep": 10}, "train": {"precision": "bf16", "steps": 40}}
    whole = make_run(scratch / "whole", call.cuda, changes | {"layout": {"compile": call.cuda}})
    killed, sync = (shutil.copytree(whole, scratch / name) for name in ("killed", "sync"))
    finish(pretrain(Store(str(whole))))
    process = pretrain(Store(str(killed)))
    wait_until(process, lambda: last_step(Store(str(killed))) >= KILL_AT)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    stopped = last_step(Store(str(killed)))
    finish(pretrain(Store(str(killed))))
    call.keep({"check": "resume after kill -9", "killed_after_step": stopped} | resume_line(killed, whole))
    finish(pretrain(Store(str(sync)), "checkpoint.mode=sync"))
    # Attention's backward pass on a GPU adds in no fixed order, so this is the distance to expect of a resumed run.
    call.keep({"check": "the same run twice"} | resume_line(sync, whole))
    for name, folder in (("async", whole), ("sync", sync)):
        call.keep({"check": f"checkpoint {name}"} | stall_line(folder))


def resume_line(killed: Path, whole: Path) -> dict[str, Any]:
    """Whether two runs computed the same, in every step and in the last checkpoint; else how far they are apart."""
    steps = list(zip(metrics(killed), metrics(whole), strict=True))
    states = [state_at(folder, notes(folder)[-1].step) for folder in (killed, whole)]
    apart = max(float((value - states[1][name]).abs().max()) for name, value in states[0].items() if value.numel())
    line: dict[str, Any] = {
        "equal": computed(killed) == computed(whole) and apart == 0.0,
        "loss_apart": max(abs((one.loss or 0.0) - (other.loss or 0.0)) for one, other in steps),
        "state_apart": apart,
    }
    if len(steps) <= KILL_AT:
        line["error"] = f"resume: expected a kill before the end, got a run of {len(steps)} steps. Lengthen it."
    return line


def stall_line(folder: Path) -> dict[str, Any]:
    """How long training waited for each checkpoint, and its bytes."""
    lines, newest = metrics(folder), sorted((folder / "train/checkpoints").glob("step-*"))[-1]
    stalls = sorted(line.checkpoint_stall for line in lines if line.checkpoint_stall)
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    middle = stalls[len(stalls) // 2]
    return {"saves": len(stalls), "bytes": size, "stall_seconds": middle, "bytes_per_second": size / middle}


def calibrated(call: Call) -> dict[str, Any]:
    """The constants that calibration writes for this machine."""
    profile_file = call.folder / "device.json"
    command = [sys.executable, "-m", "train.calibrate", str(profile_file)]
    command += [] if call.cuda else ["--ranks", "1", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CALIBRATE_SECONDS)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    device = json.loads(profile_file.read_text())["device"]
    names = ("peak_flops", "product_share", "attention_share", "memory_bandwidth", "traffic_share")
    return {name: device[name] for name in names}


def call_6(call: Call) -> None:
    """The same steps by peers."""
    measure_peers(call.ranks, call.keep, call.deadline)


CALLS: dict[int, Callable[[Call], None]] = {1: call_1, 2: call_2, 3: call_3, 4: call_4, 5: call_5, 6: call_6}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = torch.cuda.is_available()
    return {
        "machine": torch.cuda.get_device_name() if cuda else platform.machine(),
        "device": table_device().name if cuda else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> int:
    """Make a call; returns 1 if anything in it failed."""
    parser = argparse.ArgumentParser(description="Make one of the six calls.")
    parser.add_argument("number", type=int, choices=CALLS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    failed: list[str] = []
    began = time.monotonic()

    def keep(line: Mapping[str, Any]) -> None:
        whole = dict(line) | {"seconds_into_call": round(time.monotonic() - began, 1)}
        with (arguments.folder / f"call-{arguments.number}.jsonl").open("a") as file:
            file.write(json.dumps(whole) + "\n")
        print(json.dumps({name: value for name, value in whole.items() if name != "losses"}), flush=True)
        failed.extend([str(whole["error"])] if "error" in whole else [])

    with open_ranks() as ranks:
        torch.set_num_threads(min(8, os.cpu_count() or 1) if ranks.device.type == "cuda" else 1)
        keep(machine())
        try:
            CALLS[arguments.number](Call(arguments.folder, ranks, Deadline(arguments.seconds), keep))
        except Exception as error:
            keep({"check": f"call {arguments.number}", "error": f"{type(error).__name__}: {error}"})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
