"""The same run through spark-submit on a standalone master with two workers, and runs whose processes are killed."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark
import pytest

from pipeline.demo_crawl.build import build_demo_crawl
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from tests.support.kills import below, processes, python_workers
from tests.support.paths import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SPARK_HOME = Path(pyspark.__file__).parent
ENVIRONMENT = os.environ | {
    "SPARK_HOME": str(SPARK_HOME),
    "SPARK_LOCAL_IP": "127.0.0.1",
    "PYSPARK_PYTHON": sys.executable,
    "PYSPARK_DRIVER_PYTHON": sys.executable,
}
EXECUTOR_KILLS, SECONDS_BETWEEN_KILLS = 16, 6.0
"""Number of kills in a run on a cluster, and the mean time between two."""
SETTINGS = ["tokenizer.vocab_size=1600", "tokens.shard_tokens=50000", "tokens.chunk_tokens=512"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(path: Path, text: str, times: int = 1, seconds: float = 60) -> None:
    """Wait until a log holds a text so many times."""
    end = time.monotonic() + seconds
    while path.read_text(errors="replace").count(text) < times:
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} never said {text!r}:\n{path.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)


@contextmanager
def standalone(folder: Path, workers: int) -> Iterator[str]:
    """A master with some workers of one core on loopback; yields its URL."""
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    spark_class = str(SPARK_HOME / "bin" / "spark-class")
    place = ["--host", "127.0.0.1", "--webui-port", "0"]
    commands = [[spark_class, "org.apache.spark.deploy.master.Master", *place, "--port", str(port)]]
    for number in range(workers):
        room = ["--cores", "1", "--memory", "2g", "--work-dir", str(folder / f"work{number}")]
        commands.append([spark_class, "org.apache.spark.deploy.worker.Worker", *place, *room, master])
    processes = []
    try:
        for number, command in enumerate(commands):
            log = folder / f"spark{number}.log"
            log.touch()
            with open(log, "wb") as stream:
                processes.append(subprocess.Popen(command, env=ENVIRONMENT, stdout=stream, stderr=stream))
            wait_for(log, "Successfully registered with master" if number else "I have been elected leader")
        yield master
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def command(out: Path, pattern: str, *settings: str) -> list[str]:
    """The arguments of a small run."""
    arguments = [str(ROOT / "jobs" / "recipes" / "web.toml"), "--out", str(out)]
    for setting in (f'source.paths=["{pattern}"]', *settings):
        arguments += ["--set", setting]
    return arguments


def submission(master: str, arguments: list[str], settings: Sequence[str] = ()) -> list[str]:
    """The command that runs the job on a master."""
    submit_path = str(SPARK_HOME / "bin" / "spark-submit")
    memory = ["--conf", "spark.executor.memory=1500m", "--driver-memory", "1g"]
    return [submit_path, "--master", master, *memory, *settings, str(ROOT / "jobs" / "run_all.py"), *arguments]


def submit(master: str, arguments: list[str]) -> None:
    subprocess.run(submission(master, arguments), env=ENVIRONMENT, check=True, timeout=500)


def digest(run: Path, table: str = "tokens") -> str:
    return open_table(Store(str(run)), table)[1].digest


def embedded(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "jobs.run_all", *arguments]


@pytest.fixture(scope="module")
def crawl(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("crawl")
    build_demo_crawl(folder, pages=240, seed=3)
    return folder


@pytest.fixture(scope="module")
def expected(crawl, tmp_path_factory) -> Path:
    """An undisturbed embedded run."""
    out = tmp_path_factory.mktemp("run") / "run"
    arguments = command(out, f"{crawl}/*.warc.gz", *SETTINGS)
    subprocess.run(embedded(arguments), cwd=ROOT, check=True, timeout=500)
    return out


def test_spark_submit_takes_the_real_pages_and_gives_the_embedded_runs_bytes(shared_data, tmp_path):
    pattern = str(shared_data / "warc" / "pages-*.warc.gz")
    settings = ["tokenizer.vocab_size=8000", "tokens.shard_tokens=500000"]
    with standalone(tmp_path, workers=2) as master:
        submit(master, command(tmp_path / "run", pattern, *settings))
    _, manifest = open_table(Store(str(tmp_path / "run")), "documents")
    assert manifest.content.counts.rows_in == 3386
    assert manifest.content.counts.dropped["source/not_a_page"] == 3
    _, judged = open_table(Store(str(tmp_path / "run")), "verdicts")
    languages = judged.content.figures["kept_languages"]
    assert {"en", "de", "zh", "ru", "pl", "ja"} <= set(languages)
    subprocess.run(embedded(command(tmp_path / "embedded", pattern, *settings)), cwd=ROOT, check=True, timeout=500)
    assert len(list(tmp_path.glob("work*/app-*/*"))) >= 2  # both workers had an executor
    for table in read_run(Store(str(tmp_path / "run"))).tables:
        assert digest(tmp_path / "run", table) == digest(tmp_path / "embedded", table), table


@pytest.mark.parametrize("form", ["text", "json"])
def test_executors_log_their_parts_to_their_own_standard_error(form, crawl, tmp_path):
    run = tmp_path / "run"
    job = [str(ROOT / "jobs" / "run_stage.py"), "documents", *command(run, f"{crawl}/*.warc.gz"), "--log-format", form]
    with standalone(tmp_path, workers=2) as master:
        words = [*submission(master, [])[:-1], *job]
        # spark-submit prints what the driver writes to its standard error on its standard output.
        done = subprocess.run(words, env=ENVIRONMENT, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    driver = done.stdout
    lines = [line for log in tmp_path.glob("work*/app-*/*/stderr") for line in log.read_text().splitlines()]
    parts = [f"part-{number:05d}" for number in range(len([*crawl.glob("*.warc.gz")]))]
    if form == "json":
        found = [json.loads(line) for line in lines if line.startswith('{"time": ')]
        assert {(line["run"], line["step"]) for line in found} == {(str(run), "documents")}
        assert sorted(line["part"] for line in found if line["message"] == "part begins") == parts
        assert sorted(line["part"] for line in found if "cpu_seconds" in line) == parts
        assert sum(line["rows"] for line in found if "cpu_seconds" in line) > 500
        own = [json.loads(line) for line in driver.splitlines() if line.startswith('{"time": ')]
        assert [line["step"] for line in own if "reasons" in line] == ["documents"]
    else:
        pattern = rf"\S+Z INFO {re.escape(str(run))} documents (part-\d+): part (begins|ends: .* of CPU time)"
        found = [match for line in lines if (match := re.fullmatch(pattern, line))]
        assert sorted(match[1] for match in found) == sorted(2 * parts)
        assert re.search(r"^documents  [\d,]+ rows, [\d,]+ kept, ", driver, re.MULTILINE)
    assert "part begins" not in driver


def kill_a_worker(process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not (workers := python_workers(process.pid)):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(1.0)
    for pid in python_workers(process.pid) or workers:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        return


def test_kill_9_of_a_worker_is_survived_with_the_same_bytes(crawl, expected, tmp_path):
    arguments = command(tmp_path / "run", f"{crawl}/*.warc.gz", *SETTINGS)
    process = subprocess.Popen(embedded(arguments), cwd=ROOT)
    kill_a_worker(process)
    assert process.wait(500) == 0
    assert digest(tmp_path / "run") == digest(expected)


def end_early(arguments: list[str], run: Path, stop: signal.Signals) -> None:
    """Start a run and send it a signal once its first part is complete."""
    process = subprocess.Popen(arguments, cwd=ROOT)
    end = time.monotonic() + 120
    while not list(run.glob("finished_parts/documents/*.json")):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(stop)
    assert process.wait(60) != 0
    assert not list(run.glob("documents/v-*/manifest.json"))


def test_a_run_that_was_killed_resumes_to_the_same_bytes(crawl, expected, tmp_path):
    arguments = embedded(command(tmp_path / "run", f"{crawl}/*.warc.gz", *SETTINGS, "spark.partitions=1"))
    end_early(arguments, tmp_path / "run", signal.SIGKILL)
    subprocess.run(arguments, cwd=ROOT, check=True, timeout=500)
    assert digest(tmp_path / "run") == digest(expected)


@pytest.fixture
def judged(expected, tmp_path) -> Path:
    """A copy of the undisturbed run as it was before deduplication."""
    later = ("clusters", "index", "dedup", "representatives", "audit", "clean", "tokenizer", "tokens", "train")
    shutil.copytree(expected, tmp_path / "run", ignore=lambda folder, names: later if folder == str(expected) else ())
    return tmp_path / "run"


DEDUP_TABLES = ("clusters", "index", "dedup", "representatives")
ROUNDS = ["dedup.finish_edges=0", "dedup.partitions=16"]


def until_kept(run: Path, name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until deduplication has kept the rows of this name."""
    end = time.monotonic() + 200
    while not list(run.glob(f"clusters/v-*/scratch/{name}")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


def executors() -> list[int]:
    """The executor processes below this one."""
    tree, names = processes()
    return [pid for pid in below(os.getpid(), tree) if b"CoarseGrainedExecutorBackend" in names.get(pid, b"")]


def test_clusters_survive_speculation_and_the_loss_of_a_worker(crawl, expected, judged, tmp_path):
    arguments = command(judged, f"{crawl}/*.warc.gz", *SETTINGS, *ROUNDS)
    speculation = ["spark.speculation=true", "spark.speculation.multiplier=1", "spark.speculation.quantile=0.1"]
    speculation += ["spark.speculation.minTaskRuntime=1ms", "spark.speculation.interval=10ms"]
    settings = [word for setting in speculation for word in ("--conf", setting)]
    with standalone(tmp_path, workers=2) as master:
        process = subprocess.Popen(submission(master, arguments, settings), env=ENVIRONMENT)
        until_kept(judged, "round-0.json", process)
        os.kill(executors()[0], signal.SIGKILL)
        assert process.wait(500) == 0
    for table in DEDUP_TABLES:
        assert digest(judged, table) == digest(expected, table), table


def test_random_kills_of_executors_and_of_their_processes_end_in_the_same_bytes(crawl, expected, tmp_path):
    arguments = command(tmp_path / "run", f"{crawl}/*.warc.gz", *SETTINGS)
    choose, kills = random.Random(5), Counter[str]()
    attempts = ["--conf", "spark.task.maxFailures=20"]
    with standalone(tmp_path, workers=2) as master:
        process = subprocess.Popen(submission(master, arguments, attempts), env=ENVIRONMENT)
        while kills.total() < EXECUTOR_KILLS and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(choose.expovariate(1 / SECONDS_BETWEEN_KILLS))
            kind = choose.choice(("executor", "executor", "worker", "daemon"))
            found = executors()
            if kind != "executor":
                workers = [pid for each in found for pid in python_workers(each)]
                found = workers if kind == "worker" else [pid for each in found for pid in below(each, processes()[0])]
            with suppress(ProcessLookupError, IndexError):
                os.kill(choose.choice(found), signal.SIGKILL)
                kills[kind] += 1
        assert process.wait(900) == 0
    print(dict(kills))
    assert kills["executor"] > 2
    for table in read_run(Store(str(tmp_path / "run"))).tables:
        assert digest(tmp_path / "run", table) == digest(expected, table), table


def test_deduplication_that_was_killed_resumes_after_its_last_round(crawl, expected, judged):
    arguments = embedded(command(judged, f"{crawl}/*.warc.gz", *SETTINGS, *ROUNDS))
    process = subprocess.Popen(arguments, cwd=ROOT)
    until_kept(judged, "round-0.json", process)
    process.kill()
    process.wait(60)
    (kept,) = judged.glob("clusters/v-*/scratch/round-0.json")
    listed = kept.read_text()
    process = subprocess.Popen(arguments, cwd=ROOT)
    until_kept(judged, "components/edges.json", process)
    assert kept.read_text() == listed
    assert process.wait(500) == 0
    assert not list(judged.glob("clusters/v-*/scratch"))
    for table in DEDUP_TABLES:
        assert digest(judged, table) == digest(expected, table), table


def first_step(arguments: list[str]) -> list[str]:
    """The command that runs the documents step alone."""
    return [sys.executable, "-m", "jobs.cli", "stage", "documents", *arguments]


def test_ctrl_c_ends_a_run_that_resumes_to_the_same_bytes(crawl, expected, tmp_path):
    arguments = first_step(command(tmp_path / "run", f"{crawl}/*.warc.gz", *SETTINGS, "spark.partitions=1"))
    end_early(arguments, tmp_path / "run", signal.SIGINT)
    subprocess.run(arguments, cwd=ROOT, check=True, timeout=500)
    assert digest(tmp_path / "run", "documents") == digest(expected, "documents")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own with room for little."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_that_says_so_and_the_run_resumes_to_the_same_bytes(crawl, expected, small_disk):
    arguments = first_step(command(small_disk / "run", f"{crawl}/*.warc.gz", *SETTINGS))
    failed = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert failed.returncode == 2
    assert (
        "expected writable storage, got an error: the disk is full. Resolve it and run the same command again."
        in failed.stderr
    )
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    subprocess.run(arguments, cwd=ROOT, check=True, timeout=500)
    assert digest(small_disk / "run", "documents") == digest(expected, "documents")
