"""The exit code of several ranks: that of the rank that failed first, and 0 when a scheduler asked them to stop."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_dataset import make_tiny_dataset
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from schemas.manifest import read_run, write_run
from schemas.storage import Store
from train import launch

RECIPE = {
    "plan": {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 1, "d_ffw": 48, "max_epochs": 1e6},
    "train": {"seq_len": 32, "global_batch": 4, "steps": 100_000, "eval_every": 0},
    "checkpoint": {"every": 0},
}


def failed(**codes: int) -> ChildFailedError:
    """Ranks that ended with these exit codes, one after the other."""
    failures = {}
    for number, code in enumerate(codes.values()):
        failures[number] = ProcessFailure(local_rank=number, pid=1, exitcode=code, error_file="none")
        failures[number].timestamp = number
    return ChildFailedError("train", failures)


def raising(error: BaseException) -> Callable[[object], None]:
    def run(_: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (failed(first=2, second=-15), 2),
        (failed(first=-9, second=1), 137),
        (SignalException("asked to stop", signal.SIGTERM), 0),
        (SignalException("asked to stop", signal.SIGINT), 130),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    monkeypatch.setattr(launch, "torchrun", raising(error))
    assert launch.main(["--nproc-per-node", "2"]) == code


def test_ranks_that_end_well_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(launch, "torchrun", seen.append)
    assert launch.main(["--nproc-per-node", "2"]) == 0
    assert seen == [["--nproc-per-node", "2"]]


@pytest.mark.dist
def test_a_scheduler_that_stops_the_command_finds_a_checkpoint_and_no_error(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    write_run(run, read_run(run).model_copy(update={"recipe": RECIPE}))
    wrong = [sys.executable, "-m", "jobs.cli", "train", run.uri, "--ranks", "2", "--set", "train.stes=3"]
    done = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 'steps'?" in done.stderr
    assert "Traceback" not in done.stderr

    started = subprocess.Popen(wrong[:-2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: steps_of(run) >= 3, started)
    started.send_signal(signal.SIGTERM)
    said, _ = started.communicate(timeout=120)
    assert started.returncode == 0, said
    (note,) = (tmp_path / "run/train/checkpoints").glob("*/checkpoint.json")
    assert json.loads(note.read_text())["step"] == steps_of(run)
    assert "stopped after step" in said


def steps_of(run: Store) -> int:
    """Steps that the metrics tell of."""
    name = "train/metrics.jsonl"
    return run.read_bytes(name).count(b"\n") if run.exists(name) else 0


def wait_for(claim: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not claim():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)
