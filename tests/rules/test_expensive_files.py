"""`make test` runs a share of the expensive test files, which the commit chooses; the list names files that exist."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import expensive_files as module
from tests.support.expensive_files import SHARES, expensive_files, share_of_commit, shares
from tests.support.paths import ROOT

LONG = """
import time

def test_it():
    begun = time.process_time()
    while time.process_time() < begun + 2:
        pass
"""


def git(folder: Path, *arguments: str) -> str:
    """What git prints in a folder."""
    command = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_every_expensive_file_exists() -> None:
    assert [path for path in expensive_files() if not (ROOT / path).is_file()] == []


def test_each_file_is_in_one_share_and_the_shares_take_as_long() -> None:
    seconds = expensive_files()
    assert sorted(path for share in shares() for path in share) == sorted(seconds)
    totals = [sum(seconds[path] for path in share) for share in shares()]
    assert max(totals) - min(totals) <= max(seconds.values())


def test_the_commit_chooses_the_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert share_of_commit() == 0  # no repository
    git(tmp_path, "init")
    for message in "abcde":
        git(tmp_path, "commit", "--allow-empty", "-m", message)
        assert share_of_commit() == int(git(tmp_path, "rev-parse", "HEAD")[:8], 16) % SHARES


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one short test file, and two expensive ones in each share."""
    (tmp_path / "tests/support").mkdir(parents=True)
    support = [f"support/{name}.py" for name in ("__init__", "demo_run", "expensive_files", "paths")]
    for name in ("__init__.py", "conftest.py", *support):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    for number in range(2 * SHARES + 1):
        (tmp_path / f"tests/test_{number}.py").write_text("def test_it():\n    sum(range(10**6))\n", encoding="utf-8")
    lines = "".join(f"{10 + number} tests/test_{number}.py\n" for number in reversed(range(2 * SHARES)))
    (tmp_path / "tests/expensive_files.txt").write_text(lines, encoding="utf-8")
    return tmp_path


def listed(folder: Path) -> dict[str, float]:
    """The expensive files of a project → their seconds."""
    lines = (folder / "tests/expensive_files.txt").read_text(encoding="utf-8").splitlines()
    return {file: float(seconds) for seconds, file in map(str.split, lines)}


def run(folder: Path, *arguments: str) -> str:
    """The output of the tests of a project, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_has_a_share_of_the_expensive_files_and_says_so(project: Path) -> None:
    output = run(project, "tests", "-rA", "--expensive-files", "share")
    assert "3 passed" in output
    assert f"tests/test_{2 * SHARES}.py" in output
    left = f"{2 * SHARES - 2} of {2 * SHARES} expensive test files were left out"
    assert f"{left}: this commit is tested with share 1 of {SHARES}. `make test ALL=1`" in output
    output = run(project, "tests")
    assert f"{2 * SHARES + 1} passed" in output
    assert "left out" not in output


@pytest.mark.parametrize("processes", [(), ("-n", "2", "--dist", "loadgroup")])
def test_the_list_is_written_with_what_each_file_takes(project: Path, processes: tuple[str, ...]) -> None:
    path = project / "tests/support/expensive_files.py"
    path.write_text(path.read_text(encoding="utf-8").replace("EXPENSIVE = 3.0", "EXPENSIVE = 1.0"), encoding="utf-8")
    (project / "tests/test_1.py").write_text(LONG, encoding="utf-8")
    run(project, "tests", "--measure-files", *processes)
    ((file, seconds),) = listed(project).items()
    assert file == "tests/test_1.py"
    assert seconds >= 2


def test_files_that_are_not_run_keep_their_times(project: Path) -> None:
    before = listed(project)
    run(project, "tests/test_1.py", "tests/test_2.py", "--measure-files")
    assert listed(project) == {file: before[file] for file in before if not file.endswith(("_1.py", "_2.py"))}


def test_the_time_of_processes_of_processes_counts() -> None:
    """The ranks of tests are started by a server of processes, and live on."""
    burn = LONG.replace("def test_it():", "def burn():") + "\nburn()\nprint('done', flush=True)\ntime.sleep(60)\n"
    start = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    before = module.cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert module.cpu_seconds() - before >= 2
        os.killpg(process.pid, signal.SIGKILL)
