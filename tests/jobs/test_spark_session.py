"""Spark from the command line, in real processes: quiet unless it fails, and ended by one interrupt."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jobs.recipe import read_recipe
from jobs.run_all import workers_of
from jobs.spark_session import REDACTING_WORKERS, SMALL_INPUTS, WORKERS, check_version, ended_workers
from pipeline.prepare import prepare
from schemas.errors import ConfigError
from tests.support.demo_run import RECIPE, SMALL
from tests.support.paths import ROOT

pytestmark = pytest.mark.spark

INTERRUPTED = "penstock: interrupted; the same command resumes where it stopped"
STEP_LINE = re.compile(
    r"(?:documents|verdicts|clusters|dedup|audit|clean|tokenizer|tokens) +"
    r"(?:.* of .* parts  .*|.* (?:in|left) .*|is complete .*|[\d,]+ rows.* s\))"
)
"""A line about a step: its progress, that it is complete, or what it kept and dropped."""
SPARK_LINES = ("Using incubator modules", "log4j", "WARN ")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The folder for temporary files of a command."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A source of three documents."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"text": "A short text with the number {number}."}}\n' for number in range(3)))
    return path


def start(temporary: Path, words: Sequence[str]) -> "subprocess.Popen[str]":
    """Start a command in a session of its own, whose processes can be told apart from all others."""
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jobs.cli", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, list[str]]:
    """Wait for a command; return its exit code and the lines of its standard error."""
    error = process.communicate(timeout=300)[1]
    return process.returncode, error.splitlines()


def documents(texts: Path, *words: str) -> list[str]:
    """The words of a command that runs the first step on the three documents."""
    source = ["--set", f'source.paths=["{texts}"]']
    return ["stage", "documents", str(RECIPE), "--out", str(texts.parent / "run"), *source, *words]


def test_messages_of_spark_are_printed_if_it_is_verbose(texts: Path, temporary: Path) -> None:
    """Without the flag none is, as test_an_interrupt_is_one_sentence_and_leaves_no_process shows."""
    code, lines = finish(start(temporary, documents(texts, "--verbose")))
    assert code == 0
    assert [text for text in SPARK_LINES if not any(text in line for line in lines)] == []
    assert any(STEP_LINE.match(line) for line in lines)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("spark.driver_memory=2x", "got Invalid maximum heap size: -Xmx2x. "),
        ("spark.master=nowhere", "got Master must either be yarn or start with spark, k8s, or local. "),
    ],
)
def test_why_spark_does_not_start_is_one_message(texts: Path, temporary: Path, setting: str, reason: str) -> None:
    code, (line,) = finish(start(temporary, documents(texts, "--set", setting)))
    assert code == 2
    assert line.startswith("penstock: [spark]: expected settings that Spark starts with, got ")
    assert reason in line
    assert line.endswith("--verbose prints all messages of Spark.")
    assert list(temporary.glob("penstock-spark-*")) == []


@pytest.mark.parametrize(
    ("version", "is_enough"), [("3.5.7", False), ("4.0.5", False), ("4.1.0.dev1", True), ("5.0", True)]
)
def test_an_older_spark_is_refused_before_it_starts(version: str, is_enough: bool) -> None:
    if is_enough:
        check_version(version)
        return
    with pytest.raises(
        ConfigError, match=f"pyspark: expected version 4.1 or newer, got {version}. Install a newer one"
    ):
        check_version(version)


OPTIONS = """
import sys
from jobs.spark_session import SparkConfig, spark_session

settings = {"spark.driver.extraJavaOptions": sys.argv[2]} if sys.argv[2:] else {}
config = SparkConfig(master="local[1]", driver_memory="512m", settings=settings)
with spark_session(config, input_bytes=int(sys.argv[1])) as spark:
    print(*spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
"""
"""Prints the options of the JVM for inputs of a size and for options of the user."""


@pytest.mark.parametrize(
    ("arguments", "levels"),
    [([SMALL_INPUTS], ["1"]), ([SMALL_INPUTS + 1], []), ([1, "-XX:TieredStopAtLevel=3"], ["1", "3"])],
)
def test_only_a_small_run_has_no_optimizing_compiler(arguments: list[object], levels: list[str]) -> None:
    """The last option counts, which is the user's."""
    environment = {name: value for name, value in os.environ.items() if name != "JDK_JAVA_OPTIONS"}
    words = [sys.executable, "-c", OPTIONS, *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert re.findall(r"-XX:TieredStopAtLevel=(\d)", done.stdout) == levels


REDACTING = """
import sys
from jobs.spark_session import REDACTING_WORKERS, SparkConfig, spark_session

config = SparkConfig(master="local[1]", driver_memory="512m")
with spark_session(config, workers=REDACTING_WORKERS) as spark:
    print(spark.sparkContext.parallelize([0], 1).map(lambda _: "presidio_analyzer" in sys.modules).first())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Spark's own daemon starts the workers")
def test_workers_of_a_run_that_replaces_personal_data_have_loaded_what_finds_it() -> None:
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", REDACTING]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize(
    ("changes", "until", "workers"),
    [([], None, REDACTING_WORKERS), (["pii.types=[]"], None, WORKERS), ([], "dedup", WORKERS)],
)
def test_only_such_a_run_has_them(tmp_path: Path, changes: list[str], until: str | None, workers: str) -> None:
    (tmp_path / "pages.jsonl").write_text('{"text": "one"}\n')
    source = [f'source.paths=["{tmp_path}/pages.jsonl"]', 'source.format="jsonl"']
    assert workers_of(prepare(read_recipe("demo", [*source, *changes]), until)) == workers


def processes_of(session: int) -> dict[int, str]:
    """The living processes of a session: command by process id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = stat.read_text().partition(" ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        name, _, fields = rest.rpartition(")")
        state, _, _, sid = fields.split()[:4]
        if int(sid) == session and state != "Z":
            found[int(number)] = name.lstrip("(")
    return found


def waited_for(process: "subprocess.Popen[str]", files: "Files") -> None:
    """Wait until a file exists, as long as the process runs."""
    while not any(files):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


class Files:
    """An iterator over the files that match a pattern now."""

    def __init__(self, folder: Path, pattern: str):
        self.folder, self.pattern = folder, pattern

    def __iter__(self) -> Iterator[Path]:
        return self.folder.glob(self.pattern)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are listed in /proc only on Linux")
@pytest.mark.parametrize(
    ("until", "pattern"),
    [
        ("documents", "documents/v-*/*"),
        pytest.param("clusters", "verdicts/v-*/manifest.json", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_is_one_sentence_and_leaves_no_process(
    crawl: Path, tmp_path: Path, temporary: Path, until: str, pattern: str
) -> None:
    run = tmp_path / "run"
    settings = [f'source.paths=["{min(crawl.glob("*.warc.gz"))}"]', *SMALL]
    words = ["stage", until, str(RECIPE), "--out", str(run)]
    words += [word for setting in settings for word in ("--set", setting)]
    process = start(temporary, words)
    waited_for(process, Files(run, pattern))
    assert "java" in processes_of(process.pid).values()
    os.killpg(process.pid, signal.SIGINT)
    code, lines = finish(process)
    assert (code, lines[-1]) == (130, INTERRUPTED)
    assert [line for line in lines[:-1] if not STEP_LINE.match(line)] == []
    deadline = time.monotonic() + 5  # a worker ends when its parent does
    while processes_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(process.pid) == {}
    assert list(temporary.glob("penstock-spark-*")) == []
    code, lines = finish(start(temporary, words))
    assert code == 0
    assert [line for line in lines if not STEP_LINE.match(line)] == []
    assert list(temporary.glob("penstock-spark-*")) == []
    assert len([*run.glob(f"{until}/v-*/manifest.json")]) == 1


WRITES_IN_JAVA = """
import sys
from jobs.exit_codes import exit_code_of
from jobs.spark_session import SparkConfig, spark_session

def call():
    with spark_session(SparkConfig(), "test") as spark:
        spark._jvm.java.io.FileOutputStream(sys.argv[1]).write(1)

sys.exit(exit_code_of(call))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a full disk only on Linux")
@pytest.mark.parametrize("place", ["/dev/full", "/"])
def test_a_full_disk_of_spark_is_one_sentence(temporary: Path, place: str) -> None:
    """Any other error of Java has its text, which Spark's process gives only while it runs."""
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITES_IN_JAVA, place]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if place == "/dev/full":
        assert (done.returncode, done.stderr) == (
            2,
            f"penstock: spark: expected free disk space for temporary files in {temporary} and for the run, got a full "
            "disk. Free space there, or set TMPDIR to a folder on another disk, then run the same command again.\n",
        )
    else:
        assert done.returncode == 1
        assert "java.io.FileNotFoundException: / (Is a directory)" in done.stderr
        assert "ConnectionRefusedError" not in done.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are listed in /proc only on Linux")
@pytest.mark.slow
def test_a_jvm_that_is_killed_is_named_with_its_messages(crawl: Path, tmp_path: Path, temporary: Path) -> None:
    run = tmp_path / "run"
    settings = [f'source.paths=["{min(crawl.glob("*.warc.gz"))}"]', *SMALL]
    words = ["stage", "documents", str(RECIPE), "--out", str(run)]
    process = start(temporary, [*words, *(word for setting in settings for word in ("--set", setting))])
    waited_for(process, Files(run, "documents/v-*/*"))
    (java,) = (number for number, name in processes_of(process.pid).items() if name == "java")
    os.kill(java, signal.SIGKILL)
    code, lines = finish(process)
    assert code == 2
    assert lines[-1].startswith("penstock: spark: expected a Java process that runs until the last step, got one that ")
    assert "ended with signal 9" in lines[-1]
    (log,) = temporary.glob("penstock-spark-*/spark.log")
    assert lines[-1].endswith(f"and run the same command again; its messages are in {log}.")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Spark's own daemon starts the workers")
def test_workers_are_forks_of_a_process_that_has_imported_the_pipeline(spark) -> None:
    def parent_and_modules(_: int) -> tuple[str, bool]:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8")
        return command, "pipeline.stages" in sys.modules

    (command, is_imported) = spark.sparkContext.parallelize([0], 1).map(parent_and_modules).first()
    assert "jobs.workers" in command
    assert is_imported


def test_workers_that_ended_in_every_attempt_are_one_sentence() -> None:
    lost = (
        "Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task 0.3 in "
    )
    lost += "stage 0.0 (TID 8) (localhost executor driver): org.apache.spark.SparkException: Python worker exited "
    error = ended_workers(f"An error occurred.\n: org.apache.spark.SparkException: {lost}unexpectedly (crashed).")
    assert str(error).startswith("spark: expected Python workers that finish a task, got 4 that have ended in it")
    assert (
        ended_workers("failed 4 times, most recent failure: java.lang.Error\nPython worker exited unexpectedly") is None
    )
