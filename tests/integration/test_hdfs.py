"""Runs on HDFS: a real name node and data node, which the tests download and start, killed and resumed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.manifest import current_tables
from schemas.storage import Store
from tests.support.demo_run import RECIPE, SMALL
from tests.support.tiny_hdfs import NoHdfsError, build, client_variables, serving

pytestmark = [pytest.mark.slow, pytest.mark.spark]
BUILT = Path("~/.cache/penstock/tests/hdfs").expanduser()
DIGESTS = """
import json, sys
from schemas.manifest import current_tables
from schemas.storage import Store

tables = current_tables(Store(sys.argv[1]))
print(json.dumps({name: table.manifest.digest for name, table in tables.items()}))
"""
OVERWRITE = """
import sys
from schemas.storage import Store

store = Store(sys.argv[1])
for number in range(3):
    store.write_atomic("a/b.json", b"%d" % number)
assert store.read_bytes("a/b.json") == b"2"
assert [*store.walk()] == ["a/b.json"], [*store.walk()]
store.delete_folder("a")
assert [*store.walk()] == []
"""


class Hdfs:
    """An empty filesystem, and processes that can reach it."""

    def __init__(self, address: str):
        self.address = address

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a Python program that finds the filesystem."""
        variables = os.environ | client_variables(BUILT)
        return subprocess.Popen(
            [sys.executable, *words], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *words: str) -> str:
        """Run a Python program to its end, and return what it prints."""
        process = self.start(*words)
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return out

    def penstock(self, words: str) -> str:
        return self.run("-m", "jobs.cli", *shlex.split(words))


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    try:
        build(BUILT)
        with serving(BUILT, tmp_path_factory.mktemp("hdfs")) as address:
            yield Hdfs(address)
    except NoHdfsError as error:
        pytest.skip(f"no HDFS can be started: {error}")


@pytest.fixture(scope="module")
def folder(hdfs: Hdfs, crawl: Path) -> str:
    """A run that was killed when its second table was being built, and that was run again."""
    folder = f"{hdfs.address}/the runs/demo"
    settings = [word for setting in (f'source.paths=["{crawl}/*.warc.gz"]', *SMALL) for word in ("--set", setting)]
    words = ["-m", "jobs.cli", "run", str(RECIPE), "--out", folder, *settings]
    process = hdfs.start(*words)
    assert process.stderr is not None
    complete = next((line for line in process.stderr if re.match(r"documents  +\d+ rows", line)), None)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert complete is not None
    hdfs.run(*words)
    return folder


def test_its_tables_are_those_of_a_run_on_a_disk(hdfs: Hdfs, folder: str, finished: Store) -> None:
    expected = {name: table.manifest.digest for name, table in current_tables(finished).items()}
    assert json.loads(hdfs.run("-c", DIGESTS, folder)) == expected


@pytest.mark.parametrize(
    "words", ["verify {} --paranoid", "lineage {} --verify", "gc {}", "show {} --random 1", "report {}", "plan {}"]
)
def test_verbs_read_it(hdfs: Hdfs, folder: str, words: str) -> None:
    hdfs.penstock(words.format(shlex.quote(folder)))


def test_a_small_file_is_replaced_and_a_folder_deleted(hdfs: Hdfs) -> None:
    hdfs.run("-c", OVERWRITE, f"{hdfs.address}/small")


def test_a_document_is_taken_down(hdfs: Hdfs, folder: str) -> None:
    """The last test: it changes the run."""
    hdfs.penstock(f"takedown {shlex.quote(folder)} --domain www.tern.example")
    hdfs.penstock(f"verify {shlex.quote(folder)} --paranoid")
    assert "0 files, 0 bytes" in hdfs.penstock(f"gc {shlex.quote(folder)} --dry-run")
