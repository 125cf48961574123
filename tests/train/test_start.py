"""Ctrl-C and errors of storage in a program of `train.start`: one sentence, or none where another process prints it."""

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


@pytest.mark.parametrize(
    ("error", "code", "end"),
    [
        ('OSError(13, "Permission denied", "/a/run.json")', 2, "an error: permission is denied. Name another place.\n"),
        (
            'OSError("AWS Error SLOW_DOWN during GetObject")',
            2,
            "Check bucket, endpoint and credentials, then run the same command again.\n",
        ),
        ('ValueError("a bug")', 1, "ValueError: a bug\n"),
    ],
)
def test_an_error_of_the_storage_is_one_sentence(tmp_path: Path, error: str, code: int, end: str) -> None:
    (tmp_path / "fails.py").write_text(f"raise {error}")
    search = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "train.start", "--quiet", "fails"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.endswith(end)
    assert (done.stderr.count("\n") == 1) == (code == 2)
