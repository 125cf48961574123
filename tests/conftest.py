"""Shared fixtures: one Spark session for the whole test run, and the real data beside the project, if it is there.

An environment without Spark has the training half alone, such as a GPU's image: test files that import a package which
is missing there are skipped, with its name. Where Spark is installed a missing package is an error.
"""

import json
import os
import signal
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from tests.support.demo_run import crawl, finished, run_at
from tests.support.expensive_files import (
    MEASURE,
    FileTimes,
    add_options,
    expensive_files,
    is_left_out,
    kind_of,
    summary,
)
from tests.support.paths import SHARED

__all__ = ["crawl", "finished", "run_at"]

TESTS = Path(__file__).parent
SPARK = "spark"
"""The kind of files with tests on Spark, and the name of the group of all of them."""
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m")
"""The options of every JVM that a test starts, in processes of its own too. Half of the JVM's time in the small runs of
tests is its optimizing compiler's. Without it the code cache has 48 MB, and a thread that looks for code to discard
took 5 % of the JVM's time in the one session of all tests."""
os.environ.setdefault("OMP_NUM_THREADS", "1")
"""The threads of torch and numpy in the processes of tests. On small tensors, beside other processes, a second thread
waits in a loop for the first; that was half of the CPU time of some tests."""
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
"""The processes that compile kernels of torch: a second one imports torch first, which was 10 of the 73 seconds of CPU
time of `tests/train/model/test_compiled.py`."""
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start a command in the background so that it ignores Ctrl-C, and its processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


class WithoutSpark(pytest.Module):
    """A test file in an environment without Spark."""

    def _getobj(self) -> ModuleType:
        try:
            return super()._getobj()
        except self.CollectError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            if missing is None or is_ours(missing):
                raise
            pytest.skip(f"{missing} is not installed, and no Spark", allow_module_level=True)


def is_ours(name: str) -> bool:
    """Whether a module belongs to the project, whose absence is an error everywhere."""
    top = name.partition(".")[0]
    return any((folder / top).is_dir() or (folder / f"{top}.py").exists() for folder in (TESTS.parent, TESTS))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for expensive test files."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Measure the time of each test file, if an option asks for it."""
    if config.getoption(MEASURE):
        config.pluginmanager.register(FileTimes(), "file times")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the expensive test files that the commit does not choose."""
    return is_left_out(collection_path, config) or None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which expensive test files were left out."""
    if text := summary(config):
        terminalreporter.write_line(text)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """A test file as pytest takes it, unless there is no Spark."""
    return None if find_spec("pyspark") else WithoutSpark.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A report whose captured output can be sent to another process: xdist ends at a lone surrogate in it."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`, files are distributed whole, and at most two processes run files with heavy tests.

    A heavy test starts several processes itself. The first process runs all files on Spark, in one JVM.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

        def _next_group(self, node: Any) -> str | None:
            """Return the group that a process should run next; None if it has run all that it may.

            Expensive files are first, the longest first, so that no process runs one alone at the end.
            """
            place = [*self.assigned_work].index(node)
            kinds = [("spark", "light", "dist"), ("dist", "light", "spark"), ("light",)][min(place, 2)]
            groups = [*(group for group in expensive_files() if group in self.workqueue), *self.workqueue]
            return next((group for kind in kinds for group in groups if kind == _kind_of_group(group)), None)

        def _assign_work_unit(self, node: Any) -> None:
            if group := self._next_group(node):
                self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if self._next_group(node) or node.shutting_down:
                super()._reschedule(node)
            else:
                node.shutdown()

    return Scheduling(config, log)


def _kind_of_group(group: str) -> str:
    """Return the kind of the files of a group, as `kind_of` does."""
    return group if group == SPARK else kind_of(group)


def group_of(path: str) -> str:
    """Return what a test file shares its process with: all files on Spark have one group, others their own."""
    return SPARK if kind_of(path) == SPARK else path


@pytest.fixture(scope="session")
def spark():
    """One local session with retries, as an embedded run has it.

    Its plans are interpreted: compiling them is a third of the JVM's time in runs of 100 rows. Runs in processes of
    their own compile them.
    """
    from jobs.spark_session import SparkConfig, open_session

    # A job that sends the driver more than 64 MB fails here, where runs are small.
    config = SparkConfig(
        master="local[2,4]",
        driver_memory="1g",
        shuffle_partitions=4,
        settings={"spark.driver.maxResultSize": "64m"},
    )
    session = open_session(config, "tests")
    session.conf.set("spark.sql.codegen.wholeStage", "false")
    session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    yield session
    session.stop()


@pytest.fixture
def json_lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The log of this process as JSON lines; the function returns the objects that were logged since the last call."""
    from schemas.logs import JSON, TEXT, set_log

    set_log(JSON)
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.split("\n")[:-1]]
    set_log(TEXT)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; the test is skipped where a clone does not have it."""
    if not SHARED.is_dir():
        pytest.skip(f"the real data is not beside the project ({SHARED.name} is missing)")
    return SHARED
