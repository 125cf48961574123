"""The exit code of `train.launch`: that of its ranks, and success for a run that stopped as requested."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.tiny_runs import make_run

pytestmark = pytest.mark.dist

LOOPBACK_HEX = "0100007F"
"""127.0.0.1, as /proc/net/tcp writes it."""

RANK = """
import os, pathlib, signal, sys, time

def stop(number, frame):
    if number == 0 or sys.argv[1] == "fails":
        # As torch's ErrorHandler does, without the seconds that importing it takes.
        pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text('{"message": "no space"}')
        sys.exit(2)
    sys.exit(0)

if sys.argv[1] == "fails once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    stop(0, None)
if sys.argv[1].isdigit():
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `train.start` does
pathlib.Path(sys.argv[0]).with_suffix(".ready").touch()
for _ in range(1200):  # short sleeps: a signal that arrives just before the system call does not interrupt it
    time.sleep(0.1)
"""


def launched(folder: Path, word: str) -> subprocess.Popen[str]:
    """The command over one rank that does as the word says."""
    script = folder / "rank.py"
    script.write_text(RANK)
    options = ["--max-restarts", "1", str(script), word]
    command = [sys.executable, "-m", "train.launch", "--standalone", "--nproc-per-node", "1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [pytest.param(2, marks=pytest.mark.slow), 7])
def test_the_exit_code_is_that_of_the_ranks(tmp_path: Path, code: int) -> None:
    process = launched(tmp_path, str(code))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert (f"penstock: rank 0 ended with exit code {code}" in errors) == (code == 7)  # at 2, the rank has said why


@pytest.mark.parametrize(("word", "code"), [("stops", 0), ("fails", 2), ("fails once", 0)])
def test_a_run_that_is_asked_to_stop_succeeds_unless_a_rank_says_that_it_failed(
    tmp_path: Path, word: str, code: int
) -> None:
    process = launched(tmp_path, word)
    _, errors = signalled(process, tmp_path / "rank.ready", signal.SIGTERM)
    assert process.returncode == code
    assert "death signal" not in errors


def test_an_interrupt_prints_one_sentence(tmp_path: Path) -> None:
    process = launched(tmp_path, "stops")
    printed = signalled(process, tmp_path / "rank.ready", signal.SIGINT)
    assert process.returncode == 130
    assert printed == ("", "penstock: interrupted; the same command resumes where it stopped\n")


def signalled(process: subprocess.Popen[str], ready: Path, number: signal.Signals) -> tuple[str, str]:
    """Send a signal once the rank is ready; return the output and the errors."""
    try:
        limit = time.monotonic() + 120
        while not ready.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        process.send_signal(number)
        return process.communicate(timeout=120)
    finally:
        process.kill()


def listening(process: int) -> set[str]:
    """Return the addresses (hex) of all TCP sockets on which a process and its children listen."""
    family, sockets = [process], set()
    for member in family:
        try:
            family += [int(child) for child in Path(f"/proc/{member}/task/{member}/children").read_text().split()]
            sockets |= {os.readlink(entry) for entry in Path(f"/proc/{member}/fd").iterdir()}
        except OSError:  # it ended meanwhile, or closed a file; the next look sees the rest
            continue
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table]
    return {words[1].partition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in sockets}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
@pytest.mark.parametrize("local", [True, False])
def test_no_port_of_a_local_run_is_open_to_other_machines(tmp_path: Path, local: bool) -> None:
    """Two ranks that train; without the rendezvous of ours, torchrun listens on every interface."""
    run = make_run(tmp_path / "run")
    here = ["--standalone"] if local else ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    words = [*here, "--nproc-per-node", "2", "-m", "train.pretrain", str(run)]
    with (tmp_path / "printed").open("w") as printed:
        command = [sys.executable, "-m", "train.launch", *words]
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        limit, seen = time.monotonic() + 400, set[str]()
        try:
            while process.poll() is None and time.monotonic() < limit:
                seen |= listening(process.pid)
                time.sleep(0.1)
        finally:
            process.terminate()
    assert process.wait(60) == 0, (tmp_path / "printed").read_text()
    assert LOOPBACK_HEX in seen or not local
    assert (seen == {LOOPBACK_HEX}) == local


def lines_of(command: list[str], code: int) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines that a command prints on its standard error, and its standard output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()], done.stdout


def test_the_log_of_ranks_is_json_lines_with_the_figures_of_steps(tmp_path: Path) -> None:
    run = str(make_run(tmp_path / "run"))
    settings = ["--set", "train.steps=4", "--set", "train.log_every=2"]
    lines, out = lines_of(["jobs.cli", "train", run, "--ranks", "2", *settings, "--log-format", "json"], 0)
    assert {(line["run"], line["step"], line["rank"]) for line in lines} == {(run, "train", 0)}
    assert any("parameters on 2 x cpu" in line["message"] for line in lines)
    steps = [line for line in lines if "optimizer_step" in line]
    assert [line["optimizer_step"] for line in steps] == [2, 4]
    for line in steps:
        assert line["message"].startswith(f"step {line['optimizer_step']}/4  loss {line['loss']:.4f}  ")
        assert line["tokens_per_second"] > 0 <= line["seconds_left"]
    assert out.startswith("trained: 4 steps, ")
    assert out.count("\n") == 1


def test_an_error_of_a_rank_is_one_json_line(tmp_path: Path) -> None:
    run = str(make_run(tmp_path / "run"))
    start = ["train.start", "--log-format=json"]
    launch = [*start, "train.launch", "--standalone", "--nproc-per-node", "2", "-m", "train.start", "--quiet"]
    lines, out = lines_of([*launch, start[1], "train.pretrain", run, "--set", "nonsense.x=1"], 2)
    (line,) = [line for line in lines if line["logger"] == "penstock"]
    assert (line["level"], line["error"], line["rank"], line["run"]) == ("ERROR", "ConfigError", 0, run)
    assert "[nonsense]: no such section" in line["message"]
    others = {line["logger"] for line in lines} - {"penstock"}
    assert all(name.startswith("torch.distributed.elastic.") for name in others)
    assert out == ""
