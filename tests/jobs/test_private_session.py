"""A real Spark session on this machine: its ports, its temporary files, and the secrets of its environment.

Other users of the machine cannot connect to it, read its temporary files, or read a secret on a command line. What a
killed session leaves is removed by the next one. No secret reaches a file that a run or a verb writes.
"""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.scratch import LOCAL, OWNER, open_scratch, remove_abandoned
from jobs.spark_session import is_local
from tests.jobs.test_spark_session import processes_of
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="ports and processes are listed in /proc on Linux"),
]

SESSION = """
import sys
import pyarrow as pa
from jobs.spark_session import SparkConfig, spark_session

def same(batches):
    for batch in batches:
        yield batch

settings = {"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false", "spark.eventLog.dir": "file://" + sys.argv[1]}
with spark_session(SparkConfig(master="local[2,4]", driver_memory="512m", settings=settings)) as spark:
    table = spark.range(0, 20000, 1, 4).mapInArrow(same, "id long").repartition(3, "id")
    print("rows", table.count(), spark.sparkContext.uiWebUrl, flush=True)
    sys.stdin.readline()
"""
PLANTED = {
    "AWS_ACCESS_KEY_ID": "PLANTEDKEYID",
    "AWS_SECRET_ACCESS_KEY": "planted-secret-of-the-store",
    "AWS_SESSION_TOKEN": "planted-token-of-the-store",
    "HTTPS_PROXY": "http://someone:planted-password-of-the-proxy@127.0.0.1:9",
    "HF_TOKEN": "planted-token-of-the-hub",
    "GOOGLE_APPLICATION_CREDENTIALS": "/none/planted-google.json",
}
SECRETS = [
    "PLANTEDKEYID", "planted-secret-of-the-store", "planted-token-of-the-store", "planted-password-of-the-proxy",
    "planted-token-of-the-hub", "planted-google",
]  # fmt: skip


def environment(temporary: Path, more: Mapping[str, str]) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)} | more


@contextmanager
def session(temporary: Path, logs: Path) -> Iterator["subprocess.Popen[str]"]:
    """A session that waits, as the leader of a session of processes; what is left of it is killed after the block."""
    for folder in (temporary, logs):
        folder.mkdir(exist_ok=True)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION, str(logs)],
        env=environment(temporary, PLANTED), cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        for number in processes_of(process.pid):
            os.kill(number, signal.SIGKILL)
        process.wait(60)


def ready(process: "subprocess.Popen[str]") -> str:
    """Wait until the session has run a job, and return the address of Spark's own page."""
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words[:2] == ["rows", "20000"]
    return words[2]


def sockets_of(numbers: Mapping[int, str]) -> set[str]:
    """The inodes of the sockets of processes."""
    found = set()
    for number in numbers:
        for link in Path(f"/proc/{number}/fd").glob("*"):
            try:
                found |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
            except FileNotFoundError:  # closed meanwhile
                continue
    return found


LISTENS = "0A"


def open_ports(numbers: Mapping[int, str]) -> list[str]:
    """The local addresses, in hexadecimal, at which processes accept TCP connections or UDP packets."""
    inodes, found = sockets_of(numbers), []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTENS or name.startswith("udp")):
                found.append(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as an IPv6 address, and ::1."""


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_ports_files_and_command_lines_of_a_session(tmp_path: Path) -> None:
    temporary, logs = tmp_path / "tmp", tmp_path / "events"
    with session(temporary, logs) as process:
        page = ready(process)
        numbers = processes_of(process.pid)
        ports = open_ports(numbers)
        # Spark's RPC, its block manager, its page and the gateway of Python, at least.
        assert len(ports) >= 4, ports
        assert set(ports) <= LOOPBACK
        assert page.startswith("http://127.0.0.1:")
        lines = [Path(f"/proc/{number}/cmdline").read_bytes().decode() for number in numbers]
        assert any("org.apache.spark.deploy.SparkSubmit" in line for line in lines)
        assert [secret for secret in SECRETS if any(secret in line for line in lines)] == []
        assert not any(re.search(r"spark\.authenticate\.secret|spark\.ssl\..*Password", line) for line in lines)
        assert any("spark.authenticate=true" in line for line in lines)
        (folder,) = temporary.glob("penstock-spark-*")
        assert mode_of(folder) == 0o700
        names = {path.name.partition("-")[0] for path in (folder / LOCAL).iterdir()}
        assert {"blockmgr", "spark"} <= names
        assert [path for path in temporary.iterdir() if path != folder and mode_of(path) != 0o700] == []
        assert any(path.is_file() for path in folder.glob(f"{LOCAL}/blockmgr-*/**/*"))  # the shuffle
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(120) == 0
    assert list(temporary.glob("penstock-spark-*")) == []
    events = [path.read_text() for path in logs.rglob("*") if path.is_file()]
    assert "SparkListenerJobEnd" in "".join(events)
    assert [secret for secret in SECRETS if any(secret in text for text in events)] == []


def test_a_killed_session_is_removed_by_the_next_one(tmp_path: Path) -> None:
    temporary, logs = tmp_path / "tmp", tmp_path / "events"
    with session(temporary, logs) as process:
        ready(process)
        (folder,) = temporary.glob("penstock-spark-*")
        assert remove_abandoned(temporary) == []  # its processes run
        driver = process.pid
        os.kill(driver, signal.SIGKILL)
        # As long as the JVM runs, the files are its own.
        if "java" in processes_of(driver).values():
            assert remove_abandoned(temporary) == [] or "java" not in processes_of(driver).values()
        for number in processes_of(driver):
            os.kill(number, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while processes_of(driver) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert folder.exists()  # the JVM had no time to remove its files
    deadline = time.monotonic() + 30  # threads of a killed JVM end after its first one
    while folder.exists() and time.monotonic() < deadline:
        with open_scratch([temporary]) as scratch:
            assert scratch.folders[0].exists()
        time.sleep(0.2)
    assert list(temporary.glob("penstock-spark-*")) == []


def test_a_killed_jvm_leaves_its_messages_only(tmp_path: Path) -> None:
    temporary, logs = tmp_path / "tmp", tmp_path / "events"
    with session(temporary, logs) as process:
        ready(process)
        (java,) = (number for number, name in processes_of(process.pid).items() if name == "java")
        os.kill(java, signal.SIGKILL)
        process.communicate("\n", timeout=120)
    left = [path for path in temporary.glob("penstock-spark-*/**/*") if path.is_file()]
    assert {path.name for path in left} <= {"spark.log"}
    assert list(temporary.rglob("blockmgr-*")) == []


def test_folders_of_others_and_kept_messages_stay(tmp_path: Path) -> None:
    with open_scratch([tmp_path]) as scratch:
        scratch.log.write_text("an error")
        (scratch.local_folders[0] / "blockmgr-1").mkdir()
        scratch.keep_log()
    folder = scratch.folders[0]
    assert [path.name for path in folder.iterdir()] == ["spark.log"]
    (tmp_path / "penstock-spark-link").symlink_to(tmp_path)
    (tmp_path / "penstock-spark-file").write_text("x")
    (tmp_path / "penstock-spark-trap").mkdir()
    (tmp_path / "penstock-spark-trap" / OWNER).symlink_to(folder / "spark.log")
    assert remove_abandoned(tmp_path) == []
    with open_scratch([tmp_path]):
        assert folder.exists()
    (tmp_path / "penstock-spark-old").mkdir()
    (tmp_path / "penstock-spark-old" / OWNER).touch()
    assert [path.name for path in remove_abandoned(tmp_path)] == ["penstock-spark-old"]


@pytest.mark.parametrize(
    ("master", "local"),
    [("local", True), ("local[*,4]", True), ("local[2]", True), ("local-cluster[2,1,1024]", False), ("yarn", False)],
)
def test_what_a_local_master_is(master: str, local: bool) -> None:
    assert is_local(master) == local


def penstock(temporary: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "jobs.cli", *words]
    return subprocess.run(
        command, cwd=temporary, env=environment(temporary, PLANTED), capture_output=True, text=True, check=False
    )


def test_no_secret_of_the_environment_is_kept(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"A short text with the number {number}. " * 30}) + "\n" for number in range(30))
    )
    temporary.mkdir()
    (tmp_path / "events").mkdir()
    settings = (
        '{"spark.eventLog.enabled"="true", "spark.eventLog.compress"="false", '
        f'"spark.eventLog.dir"="file://{tmp_path}/events"}}'
    )
    recipe, run = tmp_path / "recipe.toml", "run"
    source = str(tmp_path / "texts.jsonl")
    done = [penstock(temporary, "init", str(recipe), "--source", source, "--vocab-size", "400")]
    more = ("--set", f"spark.settings={settings}", "--set", "quality.rules=[]", "--set", "language.min_score=0")
    done += [penstock(temporary, "stage", "dedup", str(recipe), "--out", run, "--verbose", *more)]
    done += [penstock(temporary, "report", run), penstock(temporary, "dvc", str(recipe), "--out", run)]
    done += [penstock(temporary, "lineage", run, "--out", "lineage.json", "--openlineage", "events.json")]
    done += [penstock(temporary, "show", run, "--where", "source = web", "--json")]
    assert [each.stderr for each in done if each.returncode] == []
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"run.json", "manifest.json", "progress.json", "report.html", "dvc.yaml", "recipe.toml"} <= names
    texts = [path.read_bytes() for path in written] + [(each.stdout + each.stderr).encode() for each in done]
    assert any(b"SparkListenerJobEnd" in text for text in texts)
    assert [secret for secret in SECRETS if any(secret.encode() in text for text in texts)] == []


@pytest.mark.parametrize(
    "setting",
    [
        'spark.settings={"spark.hadoop.fs.s3a.secret.key"="planted-secret"}',
        'spark.settings={"spark.hadoop.fs.s3a.session.token"="planted-secret"}',
        'spark.settings={"spark.driver.extraJavaOptions"="-Djavax.net.ssl.keyStorePassword=planted-secret"}',
        'spark.settings={"spark.hadoop.fs.azure.account.key.a.blob.core.windows.net"="planted-secret"}',
        'source.paths=["s3://key:planted-secret@bucket/crawl"]',
        'source.paths=["https://example.com/a.warc.gz?X-Amz-Signature=planted-secret"]',
    ],
)
def test_a_secret_in_a_setting_is_refused_before_anything_starts(tmp_path: Path, setting: str) -> None:
    done = penstock(tmp_path, "run", "web", "--out", "run", "--set", "source.paths=['x']", "--set", setting)
    assert done.returncode == 2
    assert "secret" in done.stderr
    assert "AWS_SECRET_ACCESS_KEY" in done.stderr
    assert "planted-secret" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_with_a_password_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "A short text."}\n')
    command = [sys.executable, "-m", "jobs.cli", "stage", "documents", "web", "--out", "run"]
    command += ["--set", f'source.paths=["{tmp_path}/texts.jsonl"]']
    values = environment(tmp_path, {"AWS_ENDPOINT_URL": "http://someone:planted-password@127.0.0.1:9"})
    done = subprocess.run(command, cwd=tmp_path, env=values, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "AWS_ENDPOINT_URL: expected the place of an object store" in done.stderr
    assert "planted-password" not in done.stdout + done.stderr
