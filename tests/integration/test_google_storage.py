"""A run on Google Cloud Storage: a server that speaks its protocol, with files and tables in a bucket."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyarrow.fs as pafs
import pytest

from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline import run as running
from pipeline.garbage import find_garbage
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.manifest import current_tables, open_table
from schemas.storage import Store
from tests.support.demo_run import RECIPE, SMALL

pytest.importorskip("gcp_storage_emulator", reason="gcp-storage-emulator is not installed: penstock[readers] has it")
pytestmark = pytest.mark.spark
SERVER = """
import sys, threading
from gcp_storage_emulator.server import create_server

create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="bucket").start()
print("ready", flush=True)
threading.Event().wait()
"""
"""A server with an empty bucket, at a port."""


class Killed(BaseException):
    """In place of the end of a process."""


@pytest.fixture(scope="module")
def options() -> Iterator[str]:
    """The options of a URI with which pyarrow finds a server with an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # In a process of its own: pyarrow may wait for an answer while it holds the lock of the interpreter.
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield f"?scheme=http&endpoint_override=127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def run_on(spark, source: str, folder: Store, until: str | None = None) -> Store:
    recipe = read_recipe(str(RECIPE), [f'source.paths=["{source}"]', *SMALL])
    run_steps(spark, prepare(recipe, until), folder, 2)
    return folder


@pytest.fixture(scope="module")
def run(spark, crawl: Path, options: str) -> Store:
    """A run whose first step was killed before its manifest was written, and which was run again."""
    archives = Store(f"gs://anonymous@bucket/the crawl{options}")
    for path in crawl.glob("*.warc.gz"):
        archives.write_atomic(path.name, path.read_bytes())
    source, folder = f"gs://anonymous@bucket/the crawl/*.warc.gz{options}", Store(f"gs://anonymous@bucket/run{options}")
    with mock.patch.object(running, "commit", side_effect=Killed), pytest.raises(Killed):
        run_on(spark, source, folder)
    parts = {name for name in folder.walk() if name.startswith(("documents/", "text/"))}
    assert parts
    run_on(spark, source, folder)
    assert parts == {name for name in folder.walk() if name.startswith(("documents/", "text/")) and ".parquet" in name}
    return folder


def test_its_tables_are_those_of_a_run_on_a_disk(run: Store, finished: Store) -> None:
    expected = {name: table.manifest.digest for name, table in current_tables(finished).items()}
    assert {name: table.manifest.digest for name, table in current_tables(run).items()} == expected
    assert not any("/scratch/" in name for name in run.walk())
    assert find_garbage(run) == []


@pytest.mark.parametrize("words", ["verify {} --paranoid", "lineage {} --verify", "gc {}", "show {} --random 1"])
def test_verbs_read_it(run: Store, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.format(run.address).split()) == 0, capsys.readouterr().err


def test_a_document_is_taken_down(spark, run: Store, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Store(f"gs://anonymous@bucket/copy{options}")
    pafs.copy_files(run.root, copy.root, source_filesystem=run.fs, destination_filesystem=copy.fs)
    assert main(["takedown", copy.address, "--domain", "www.tern.example"]) == 0, capsys.readouterr().err
    before, after = (open_table(folder, "clean")[1].content.counts.rows_kept for folder in (run, copy))
    assert after < before
    assert main(["verify", copy.address, "--paranoid"]) == 0
    assert find_garbage(copy) == []


def test_a_folder_is_deleted_with_all_files_and_nothing_else(options: str) -> None:
    store = Store(f"gs://anonymous@bucket/folders{options}")
    for name in ("a/1", "a/b/2", "ab/3"):
        store.write_atomic(name, b"x")
    store.delete_folder("a")
    store.delete_folder("a")
    assert [*store.walk()] == ["ab/3"]
