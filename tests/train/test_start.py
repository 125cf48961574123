"""Ctrl-C in a program that `train.start` runs: one sentence, or none where the process that started it prints one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import pathlib, sys, time

if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).touch()
    for _ in range(1200):
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("options", "code", "errors"),
    [
        ([], 130, "penstock: interrupted; the same command resumes where it stopped\n"),
        (["--quiet"], -signal.SIGINT, ""),
    ],
)
def test_an_interrupt_prints_no_traceback(tmp_path: Path, options: list[str], code: int, errors: str) -> None:
    (tmp_path / "sleeps.py").write_text(PROGRAM)
    search = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        [sys.executable, "-m", "train.start", *options, "sleeps", str(tmp_path / "started")],
        env=os.environ | {"PYTHONPATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        limit = time.monotonic() + 60
        while not (tmp_path / "started").exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (code, errors)
