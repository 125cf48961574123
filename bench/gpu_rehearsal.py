"""The six calls of a GPU day rehearsed: the same functions with tiny models on a CPU, and the table that a GPU fills.

    python -m bench.gpu_rehearsal [--call N ...] [--device cpu|cuda] [--out FOLDER]

1: tests marked gpu, 20 steps in bf16 and fp8 beside fp32; 2: the 124M model; 3: 350M and 1B; 4: parts of a step and a
profile; 5: resume after a kill, offloading, checkpoints, calibration; 6: the same steps by peers. Each call is a
process of its own, which is killed at its limit of time; its lines are in FOLDER/call-N.jsonl as it goes. The table is
printed from these files, so calls of several commands add up. Exit code 1: a call failed. Models are those of a GPU
where there is one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_table import rendered

ROOT = Path(__file__).resolve().parents[1]
CALLS = (1, 2, 3, 4, 5, 6)
SECONDS = 480.0
"""Limit of a call: a machine is lent for ten minutes a command, and starting one takes some of them."""
MARGIN = 20.0
"""Seconds before the limit at which a call begins nothing new and should have ended."""


def environment(folder: Path, device: str) -> dict[str, str]:
    """The variables of a call: compiled kernels lie in its folder, and `cpu` hides every GPU."""
    found = dict(os.environ)
    found["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    found["TRITON_CACHE_DIR"] = str(folder / "triton")
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH", "")]))
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def command_of(number: int, folder: Path, seconds: float) -> list[str]:
    """The process of a call."""
    limit = max(1.0, seconds - MARGIN)
    return [sys.executable, "-m", "bench.gpu_calls", str(number), str(folder), "--seconds", str(limit)]


def run_call(number: int, folder: Path, device: str, seconds: float) -> bool:
    """Make a call; returns whether all of it worked. At the limit it is killed with all that it has started."""
    path = folder / f"call-{number}.jsonl"
    path.unlink(missing_ok=True)
    process = subprocess.Popen(
        command_of(number, folder, seconds), cwd=ROOT, env=environment(folder, device), start_new_session=True
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        problem = f"expected an end within {seconds:.0f} s, got none. Read the lines before it."
        with path.open("a") as file:
            file.write("\n" + json.dumps({"check": f"call {number}", "error": problem}) + "\n")
        return False
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a call, its children included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of all calls of a folder, in their order; what a kill cut off is no line."""
    found: list[dict[str, Any]] = []
    for number in CALLS:
        path = folder / f"call-{number}.jsonl"
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                found.append({"call": number} | json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def failures(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What went wrong, by call."""
    return [f"call {line['call']}: {line['error']}" for line in lines if "error" in line]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command."""
    parser = argparse.ArgumentParser(description="Make the calls of a GPU day, on a GPU or in tiny form on a CPU.")
    parser.add_argument("--call", type=int, nargs="+", choices=CALLS, default=list(CALLS), help="default: all")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--tiny", action="store_true", help="tiny models; wants --device cpu, where they are the rule")
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts/gpu", help="folder of the lines and the profile")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of a call")
    parser.add_argument("--table", action="store_true", help="print the table of a folder, and make no call")
    options = parser.parse_args(arguments)
    if options.tiny and options.device != "cpu":
        parser.error(f"--tiny: expected --device cpu, got {options.device}. Add it.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the calls that were asked for and print the table; returns 1 if any of them failed."""
    options = parsed(arguments)
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for number in () if options.table else options.call:
        print(f"call {number}", flush=True)
        if not run_call(number, folder, options.device, options.seconds):
            failed.append(number)
    lines = read_lines(folder)
    print(rendered(lines))
    for text in failures(lines):
        print(text[:2000], file=sys.stderr)
    if failed:
        print(f"failed: call {', '.join(map(str, failed))}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    # A SIGTERM ends this process by an exception, so that the call under way is killed too.
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))
    sys.exit(main())
