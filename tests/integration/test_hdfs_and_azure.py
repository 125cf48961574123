"""Runs on HDFS and on Azure's blob storage: killed, run again, read by the verbs, and with a document taken down.

The servers are real ones of HDFS, and Azurite; the tests download and start them.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.manifest import current_tables
from schemas.storage import AZURE_ACCOUNT, AZURE_KEY, Store
from tests.support import tiny_azure, tiny_hdfs
from tests.support.demo_run import RECIPE, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.spark]
DOWNLOADED = Path("~/.cache/penstock/tests").expanduser()
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


@dataclass(frozen=True)
class Server:
    """An empty filesystem, and processes that can reach it."""

    uri: str
    """The URI of a folder, with {} for its path."""
    variables: dict[str, str]
    """Environment variables with which a process reaches it."""

    def folder(self, path: str) -> str:
        return self.uri.format(path)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a Python program that can reach it."""
        return subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> str:
        """Run a Python program to its end, and return what it prints."""
        process = self.start(*words)
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return out

    def penstock(self, words: str) -> str:
        return self.run("-m", "jobs.cli", *shlex.split(words))


@contextmanager
def hdfs(data: Path) -> Iterator[Server]:
    built = DOWNLOADED / "hdfs"
    tiny_hdfs.build(built)
    with tiny_hdfs.serving(built, data) as address:
        yield Server(f"{address}/{{}}", tiny_hdfs.client_variables(built))


@contextmanager
def azure(data: Path) -> Iterator[Server]:
    with tiny_azure.serving(tiny_azure.install(DOWNLOADED / "azurite"), data) as address:
        options = f"blob_storage_authority={address}&dfs_storage_authority={address}&enable_tls=false"
        uri = f"abfs://bucket@{tiny_azure.ACCOUNT}.dfs.core.windows.net/{{}}?{options}"
        yield Server(uri, {AZURE_ACCOUNT: tiny_azure.ACCOUNT, AZURE_KEY: tiny_azure.KEY})


@pytest.fixture(scope="module", params=[hdfs, azure])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        with request.param(tmp_path_factory.mktemp("server")) as server:
            yield server
    except (tiny_hdfs.NoHdfsError, tiny_azure.NoAzuriteError) as error:
        pytest.skip(f"no server can be started: {error}")


@pytest.fixture(scope="module")
def folder(server: Server, crawl: Path) -> str:
    """A run that was killed when its second table was being built, and that was run again."""
    folder = server.folder("the runs/demo")
    settings = [word for setting in (f'source.paths=["{crawl}/*.warc.gz"]', *SMALL) for word in ("--set", setting)]
    words = ["-m", "jobs.cli", "run", str(RECIPE), "--out", folder, *settings]
    process = server.start(*words)
    assert process.stderr is not None
    complete = next((line for line in process.stderr if re.match(r"documents  +\d+ rows", line)), None)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert complete is not None
    server.run(*words)
    return folder


def test_its_tables_are_those_of_a_run_on_a_disk(server: Server, folder: str, finished: Store) -> None:
    expected = {name: table.manifest.digest for name, table in current_tables(finished).items()}
    assert json.loads(server.run("-c", DIGESTS, folder)) == expected


@pytest.mark.parametrize(
    "words", ["verify {} --paranoid", "lineage {} --verify", "gc {}", "show {} --random 1", "report {}", "plan {}"]
)
def test_verbs_read_it(server: Server, folder: str, words: str) -> None:
    server.penstock(words.format(shlex.quote(folder)))


def test_a_small_file_is_replaced_and_a_folder_deleted(server: Server) -> None:
    server.run("-c", OVERWRITE, server.folder("small"))


def test_a_document_is_taken_down(server: Server, folder: str) -> None:
    """The last test: it changes the run."""
    server.penstock(f"takedown {shlex.quote(folder)} --domain www.tern.example")
    server.penstock(f"verify {shlex.quote(folder)} --paranoid")
    assert "0 files, 0 bytes" in server.penstock(f"gc {shlex.quote(folder)} --dry-run")
