"""The test files that take most CPU time, and which of them `make test` runs.

They are the files with tests of Spark or of several ranks, and those that `tests/expensive_files.txt` names with their
CPU seconds. `make test` runs one of SHARES shares of them, which the commit chooses, and all other files; with ALL=1 or
SLOW=1 it runs all. So a commit is tested by the same files wherever it is tested, and successive commits by all. The
times of the files of a run are measured, on Linux, by

    python -m pytest -n 2 --dist loadgroup -m "not slow" --measure-files
"""

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

LIST = ROOT / "tests" / "expensive_files.txt"
EXPENSIVE = 3.0
"""CPU time from which a file is expensive [s]: that of its tests and of the processes that they start. It is assumed
for a file with tests of Spark or of ranks that the list does not name."""
SHARES = 16
OPTION, MEASURE = "--expensive-files", "--measure-files"
SECONDS: dict[str, float] = {}
"""CPU time of each test file that this process has run [s]."""


@cache
def kind_of(path: str) -> str:
    """Return the mark of a file's heavy tests: "spark", "dist" (several ranks) or "light"."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return next((mark for mark in ("spark", "dist") if f"pytest.mark.{mark}" in text), "light")


@cache
def expensive_files() -> dict[str, float]:
    """Return the path of each expensive file → its CPU time [s], the longest first."""
    files = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    found = dict.fromkeys((path for path in files if kind_of(path) != "light"), EXPENSIVE) | listed_files()
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def listed_files() -> dict[str, float]:
    """Return the files of the list → their CPU time [s]."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    return {path: float(seconds) for seconds, _, path in (line.partition(" ") for line in lines)}


def share_of_commit() -> int:
    """Return the number of the share that this commit is tested with, from 0; 0 if there is no repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        commit = ""
    return int(commit[:8] or "0", 16) % SHARES


def shares() -> list[list[str]]:
    """Return the expensive files in shares that take about the same time."""
    chosen: list[list[str]] = [[] for _ in range(SHARES)]
    taken = [0.0] * SHARES
    for path, seconds in expensive_files().items():
        least = taken.index(min(taken))
        chosen[least].append(path)
        taken[least] += seconds
    return chosen


@cache
def left_out(option: str) -> frozenset[str]:
    """Return the expensive files that a run leaves out, by the value of OPTION."""
    return frozenset() if option == "all" else frozenset(expensive_files()) - frozenset(shares()[share_of_commit()])


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this module to those of pytest."""
    parser.addoption(
        OPTION,
        choices=("all", "share"),
        default="all",
        help="all expensive test files, or the share of the commit",
    )
    parser.addoption(MEASURE, action="store_true", help="write the list of the expensive test files anew")


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """Return True if a test file is an expensive one that this run leaves out."""
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).as_posix() in left_out(config.getoption(OPTION))


def summary(config: pytest.Config) -> str:
    """Return the line that says which expensive files a run has left out; empty if none."""
    if not (names := left_out(config.getoption(OPTION))):
        return ""
    return (
        f"{len(names)} of {len(expensive_files())} expensive test files were left out: this commit is tested with "
        f"share {share_of_commit() + 1} of {SHARES}. `make test ALL=1` runs all."
    )


class FileTimes:
    """A plugin of pytest that measures the CPU time of each file, in each process that runs tests."""

    def __init__(self) -> None:
        """Start the measurement."""
        self.started = cpu_seconds()

    def pytest_runtest_logstart(self) -> None:
        """Begin with a test."""
        self.started = cpu_seconds()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Add the time of a test to that of its file."""
        path = nodeid.partition("::")[0]
        SECONDS[path] = SECONDS.get(path, 0.0) + cpu_seconds() - self.started

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Give the times of a process of xdist to the one that started it, which writes the list."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["file_seconds"] = SECONDS
        else:
            # Files that this run left out keep the times that an earlier run has measured.
            found = {path: seconds for path, seconds in (listed_files() | SECONDS).items() if seconds >= EXPENSIVE}
            lines = [f"{found[path]:.0f} {path}\n" for path in sorted(found, key=lambda path: (-found[path], path))]
            LIST.write_text("".join(lines), encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the times of a process of xdist that has ended."""
        for path, seconds in getattr(node, "workeroutput", {}).get("file_seconds", {}).items():
            SECONDS[path] = SECONDS.get(path, 0.0) + seconds


def cpu_seconds() -> float:
    """CPU time of this process and of all that it has started, directly or not [s].

    The ranks of tests are started by another process, and Spark's workers by a JVM, which live on.
    """
    ticks, parents = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        number = int(status.parent.name)
        parents[number], ticks[number] = int(fields[1]), sum(map(int, fields[11:15]))  # with children that have ended
    own = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(ticks[number] for number in own) / os.sysconf("SC_CLK_TCK")
