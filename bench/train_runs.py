"""Training as a whole measured: the loader, how long it waits for saves, resumes and restarts."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.data import tokens_per_second, write_dataset
from schemas.manifest import read_run, write_run
from schemas.paths import METRICS_NAME
from schemas.storage import Store
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_stages import batches_of
from train.config.train import TrainConfig
from train.data.packing import write_packing
from train.monitor.metrics import StepMetrics, read_metrics
from train.parallel.ranks import open_ranks
from train.pretrain.setup import prepare
from train.pretrain.step import Learner

SAVED = {
    "plan": {"num_layers": 10, "d_model": 256, "num_heads": 8, "num_kv_heads": 2, "d_ffw": 704, "max_epochs": 1000.0},
    "train": {"seq_len": 128, "global_batch": 2, "steps": 60, "eval_every": 0},
    "checkpoint": {"every": 10},
}
"""A recipe whose checkpoints are large beside its steps: 10 million parameters, 256 tokens a step."""
KILL_AT = 26
PATIENCE = 600.0


class Broken(Exception):
    """A run did not do what was to be timed."""


def loader() -> list[dict[str, Any]]:
    """Tokens the loader gives for each second of CPU: three ways of reading, in batches of 2^19 tokens."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder))
        for settings in ({}, {"document_mask": False}, {"packing": "best_fit"}):
            config = TrainConfig.model_validate({"seq_len": 2048} | settings)
            write_packing(dataset.folder, dataset, config)
            rate = tokens_per_second(batches_of(dataset, config, (1 << 19) // 2048, run=dataset.folder), 1 << 19)
            print(f"loader {settings or 'as by default'}: {rate / 1e6:.0f} M tokens for each second of CPU", flush=True)
            found.append({"settings": settings, "tokens_per_cpu_second": rate})
    return found


@contextmanager
def prepared_run(recipe: Mapping[str, Any] = SAVED) -> Iterator[Store]:
    """A run folder with a tiny dataset, ready to train."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_tiny_dataset(Path(folder), {"web": 150, "books": 50}, vocab_size=4096)
        write_run(run, read_run(run).model_copy(update={"recipe": dict(recipe)}))
        yield run


def pretrain(run: Store, *settings: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """The real command."""
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, *before, "-m", "train.pretrain", run.path(""), *options]
    root = Path(__file__).resolve().parents[1]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def last_step(run: Store) -> int:
    """The newest step whose line exists; 0 if there is none."""
    path = Path(run.path(METRICS_NAME))
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def wait_until(process: subprocess.Popen[bytes], done: Callable[[], bool]) -> float:
    """Seconds until something is so. Raises Broken if the process ends first, or nothing happens."""
    begin = time.perf_counter()
    while not done():
        if process.poll() not in (None, 0) or time.perf_counter() - begin > PATIENCE:
            process.kill()
            raise Broken(f"training did not go on: {(process.communicate()[1] or b'').decode()[-2000:]}")
        time.sleep(0.005)
    return time.perf_counter() - begin


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a run. Raises Broken if it failed."""
    _, errors = process.communicate()
    if process.returncode:
        raise Broken(errors.decode()[-2000:])


def saves() -> dict[str, Any]:
    """How long training waits for a save, and how long a resume takes, whole and in parts."""
    found: dict[str, Any] = {}
    for mode in ("sync", "async"):
        with prepared_run() as run:
            finish(pretrain(run, f"checkpoint.mode={mode}"))
            lines = read_metrics(run)
            stalls = [line.checkpoint_stall for line in lines if line.checkpoint_stall]
            stood, trained = sum(stalls), sum(line.step_seconds for line in lines)
            newest = sorted(Path(run.path("train")).glob("**/step-*"))[-1]
            size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
            found[mode] = {
                "bytes": size,
                "stall_seconds": statistics.median(stalls),
                "share_of_run": stood / (stood + trained),
                "step_seconds": statistics.median(line.step_seconds for line in lines),
                "saves": len(stalls),
            }
            if mode == "async":
                found["loop"] = _around_steps(lines)
    found["stall_async_of_sync"] = found["async"]["stall_seconds"] / found["sync"]["stall_seconds"]
    sync, later, size = found["sync"], found["async"], found["sync"]["bytes"] / 2**20
    print(
        f"saves of {size:.0f} MiB, one in 10 steps of {later['step_seconds']:.2f} s: training waits "
        f"{sync['stall_seconds']:.3f} s (sync), {later['stall_seconds']:.3f} s (async, "
        f"{found['stall_async_of_sync']:.0%} of it and {later['share_of_run']:.2%} of the run)",
        flush=True,
    )
    return found | {"resume": resume()}


def _around_steps(lines: Sequence[StepMetrics]) -> dict[str, float]:
    """What the loop waits for its rows, as a share of the steps."""
    waited, trained = (sum(getattr(line, name) for line in lines) for name in ("data_seconds", "step_seconds"))
    return {"share_waiting_for_rows": waited / trained}


def resume() -> dict[str, float]:
    """Seconds from the start of a process that resumes from a checkpoint to its first line, and of their parts."""
    with prepared_run() as run:
        process = pretrain(run)
        wait_until(process, lambda: last_step(run) >= KILL_AT)
        process.send_signal(signal.SIGTERM)
        finish(process)
        stood = last_step(run)
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import train.pretrain.loop"], check=True, cwd=Path(__file__).parents[1])
        found = {"import": time.perf_counter() - begin}
        with open_ranks() as ranks:
            begin = time.perf_counter()
            setup = prepare(run, (), ranks)
            found["verify"] = time.perf_counter() - begin
            begin = time.perf_counter()
            learner = Learner(setup.plan, ranks, 2)
            found["build"] = time.perf_counter() - begin
            begin = time.perf_counter()
            learner.load_checkpoint(run, setup.checkpoint, True)
            found["load"] = time.perf_counter() - begin
        process = pretrain(run)
        found["to_first_line"] = wait_until(process, lambda: last_step(run) > stood)
        process.kill()
        process.communicate()
    shown = ", ".join(f"{name} {value:.2f} s" for name, value in found.items() if name != "to_first_line")
    print(f"resume: {found['to_first_line']:.2f} s from the start to the first line ({shown})", flush=True)
    return found


def restart() -> dict[str, float]:
    """Seconds from kill -9 of one of two ranks, under torchrun, to the next step's line."""
    with prepared_run() as run:
        options = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
        process = pretrain(run, before=options)
        wait_until(process, lambda: last_step(run) >= KILL_AT)
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        stood = last_step(run)
        begin = time.perf_counter()
        wait_until(process, lambda: last_step(run) < stood)
        back = last_step(run)
        wait_until(process, lambda: last_step(run) > back)
        found = {"seconds": time.perf_counter() - begin, "killed_at": stood, "went_on_from": back}
        process.terminate()
        process.communicate()
    print(f"restart: {found['seconds']:.2f} s from kill -9 at step {stood} to the line of step {back + 1}", flush=True)
    return found
