"""Tests of leases on a real server of S3, with real processes: exclusion, renewal, takeover, and stalled processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import boto3
import pytest

from jobs.cli import main
from pipeline.garbage import HALF_UPLOAD, UNNAMED, find_garbage
from pipeline.takedown.commit import read_pending
from schemas import leases
from schemas.errors import ConfigError, ContractError
from schemas.exports import exported_files
from schemas.leases import check_still_held
from schemas.lock_files import EXPORT_LOCK, TABLES_LOCK, TRAIN_LOCK
from schemas.locks import lock_export, lock_tables, lock_training
from schemas.manifest import read_run, write_run
from schemas.s3_requests import S3Requests
from schemas.storage import Store
from schemas.takedown import PENDING_NAME
from schemas.tokens import open_dataset
from tests.support.s3_server import server
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import documents_of

__all__ = ["server"]  # a fixture
SECONDS = 2
"""Duration of the leases of these tests; a takeover waits for two seconds more."""
HOLDER = """
import sys
from schemas import leases, locks
from schemas.errors import ContractError
from schemas.manifest import read_run, write_run
from schemas.storage import Store

leases.LEASE_SECONDS = float(sys.argv[4])
run = Store(sys.argv[2])
try:
    with getattr(locks, sys.argv[1])(run, sys.argv[3]):
        print("held", flush=True)
        for line in sys.stdin:
            write_run(run, read_run(run).model_copy(update={"recipe": {"source": {"paths": [line.strip()]}}}))
            print("written", flush=True)
except ContractError as error:
    print(error, flush=True)
    sys.exit(2)
"""
VERB = """
import sys
from schemas import leases

leases.LEASE_SECONDS = float(sys.argv[1])
from jobs.cli import main

sys.exit(main(sys.argv[2:]))
"""


class Drivers:
    """Processes that hold locks until they are ended."""

    def __init__(self, stack: ExitStack):
        self._stack = stack

    def start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen([sys.executable, "-c", program, *arguments], **pipes)
        self._stack.callback(self._end, process)
        return process

    def hold(self, run: Store, what: str = "penstock this", lock: str = "lock_tables", seconds: float = SECONDS):
        """Start a process inside `with <lock>(run)`; returns it and its first line."""
        process = self.start(HOLDER, lock, run.uri, what, str(seconds))
        return process, process.stdout.readline().strip()

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def drivers() -> Iterator[Drivers]:
    with ExitStack() as stack:
        yield Drivers(stack)


@pytest.fixture
def run(server: int, request: pytest.FixtureRequest) -> Store:
    """An empty run folder on S3."""
    store = Store(f"s3://bucket/{request.node.name}/run")
    store.write_atomic("run.json", b'{"tables": {}, "recipe": {}}')
    return store


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    with mock.patch.object(leases, "LEASE_SECONDS", SECONDS):
        yield


def lease_of(run: Store, name: str = TABLES_LOCK) -> dict:
    return run.read_json(name) if run.exists(name) else {}


def paths(run: Store) -> list[str]:
    """The setting that the last writer left."""
    return read_run(run).recipe.get("source", {}).get("paths", [])


def write(process: subprocess.Popen[str], word: str) -> str:
    """Let a driver write `run.json`; returns what it prints."""
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_the_second_driver_gets_the_error_of_a_lock(run: Store, drivers: Drivers) -> None:
    first, line = drivers.hold(run, seconds=60)
    assert line == "held"
    lease = lease_of(run)
    assert (lease["pid"], lease["host"], lease["epoch"]) == (first.pid, socket.gethostname(), 1)
    second, line = drivers.hold(run, "penstock that", seconds=60)
    assert line.startswith(f"{run.uri}/{TABLES_LOCK}: expected a free lock for `penstock that`, got one held by ")
    assert f"held by `penstock this` (process {first.pid} on {socket.gethostname()}, since 20" in line
    assert line.endswith("Wait until that process ends, or stop it; the lock of a killed process ends after 60.0 s.")
    assert second.wait(60) == 2
    assert write(first, "a") == "written"
    first.communicate(timeout=60)
    assert [*run.walk()] == ["run.json"]
    with lock_tables(run, "penstock that"):
        assert lease_of(run)["epoch"] == 1


def test_a_folder_on_a_store_takes_one_export_at_a_time(run: Store, drivers: Drivers) -> None:
    out = run.child("out")
    with lock_export(out, "penstock export"):
        assert [*out.walk()] == [EXPORT_LOCK]
        assert [*exported_files(out)] == []
        _, line = drivers.hold(out, "penstock export", "lock_export")
        assert line.startswith(f"{out.uri}/{EXPORT_LOCK}: expected a free lock for `penstock export`, got one held by")
    assert [*out.walk()] == []


def test_two_drivers_that_start_at_once_are_never_both_inside(run: Store, drivers: Drivers) -> None:
    started = [drivers.start(HOLDER, "lock_tables", run.uri, f"penstock {number}", "60") for number in range(6)]
    lines = [process.stdout.readline().strip() for process in started]
    assert sum(line == "held" for line in lines) == 1
    assert all(line == "held" or "expected a free lock" in line for line in lines)


def test_a_lease_is_renewed_for_as_long_as_its_process_lives(run: Store, drivers: Drivers) -> None:
    process, _ = drivers.hold(run)
    first = lease_of(run)
    time.sleep(SECONDS + leases.CLOCK_SECONDS + 2)
    assert lease_of(run)["renewals"] > first["renewals"]
    assert lease_of(run)["token"] == first["token"]
    with pytest.raises(ContractError, match=f"process {process.pid} on"), lock_tables(run, "penstock that"):
        pass


def wait_until_free(run: Store, what: str = "penstock that") -> ExitStack:
    """Take over the lease of a process that does not renew it; returns the lock."""
    end, refused = time.monotonic() + 60, 0
    while time.monotonic() < end:
        stack = ExitStack()
        try:
            stack.enter_context(lock_tables(run, what))
            assert refused, "the lease was taken over before it expired"
            return stack
        except ContractError:
            refused += 1
            time.sleep(0.5)
    raise TimeoutError


def test_the_lease_of_a_killed_driver_is_taken_over(run: Store, drivers: Drivers) -> None:
    process, _ = drivers.hold(run)
    process.kill()
    process.wait(60)
    with wait_until_free(run):
        assert lease_of(run)["epoch"] == 2
    assert lease_of(run) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 200_000,
        b'{"seconds": "abc", "epoch": "abc"}',
        b'{"seconds": null, "epoch": {}}',
        b'{"seconds": 1e18, "epoch": 1e400}',
        b'{"seconds": NaN, "epoch": -3}',
    ],
)
def test_any_object_in_the_place_of_a_lease_is_taken_over_when_it_is_old(run: Store, content: bytes) -> None:
    run.write_atomic(TABLES_LOCK, content)
    with pytest.raises(ContractError, match="expected a free lock for `this`"), lock_tables(run, "this"):
        pass
    with mock.patch("time.time", return_value=time.time() + 700), lock_tables(run, "this"):
        assert lease_of(run)["epoch"] >= 1


def test_the_clock_of_the_store_decides(run: Store, drivers: Drivers) -> None:
    """The server runs in this process, and its answers have the time of `time.time`."""
    drivers.hold(run, seconds=60)
    for now, is_free in ((time.time() + 55, False), (time.time() + 70, True)):
        with mock.patch("time.time", return_value=now), ExitStack() as stack:
            try:
                stack.enter_context(lock_tables(run, "penstock that"))
                assert is_free
            except ContractError:
                assert not is_free


def test_a_stalled_driver_commits_nothing_once_its_lease_is_taken(run: Store, drivers: Drivers) -> None:
    process, _ = drivers.hold(run)
    assert write(process, "before") == "written"
    os.kill(process.pid, signal.SIGSTOP)
    with wait_until_free(run):
        assert lease_of(run)["epoch"] == 2
        write_run(run, read_run(run).model_copy(update={"recipe": {"source": {"paths": ["second"]}}}))
        os.kill(process.pid, signal.SIGCONT)
        said = write(process, "after")
        said = said if "expected epoch" in said else process.stdout.read()
        assert f"{run.uri}/{TABLES_LOCK}: expected epoch 1 of this process, got the lease of `penstock that` " in said
        assert process.wait(60) == 2
        assert paths(run) == ["second"]
        assert lease_of(run)["epoch"] == 2  # the first driver did not remove the lease of the second
        leases.check_still_held(run)
    assert [*run.walk()] == ["run.json"]


def upload(folder: Path, store: Store) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.write_atomic(path.relative_to(folder).as_posix(), path.read_bytes())


@pytest.fixture
def dataset(server: int, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    """A run on S3 with a token dataset."""
    make_tiny_dataset(tmp_path / "run", {"web": 30, "books": 10})
    store = Store(f"s3://bucket/{request.node.name}/dataset")
    upload(tmp_path / "run", store)
    return store


STALLED = """
import os, signal
from pipeline.takedown import rewrite

delete = rewrite.delete_incomplete_parts
def stalled(folder):
    os.kill(os.getpid(), signal.SIGSTOP)
    delete(folder)
rewrite.delete_incomplete_parts = stalled
"""


def test_a_stalled_takedown_deletes_nothing_of_the_driver_that_completed_it(dataset: Store, drivers: Drivers) -> None:
    """Both write the new versions under the same names."""
    document = documents_of(open_dataset(dataset))[8]["doc_id"]
    process = drivers.start(STALLED + VERB, str(SECONDS), "takedown", dataset.uri, "--doc", document.hex())
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.poll() is None
    words = [sys.executable, "-m", "jobs.cli", "takedown", dataset.uri]
    while (done := subprocess.run(words, capture_output=True, text=True, check=False)).returncode:
        assert "expected a free lock" in done.stderr
    names = {*dataset.walk()}
    os.kill(process.pid, signal.SIGCONT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2, output
    assert "expected epoch 1 of this process" in output
    assert {*dataset.walk()} >= names
    assert main(["verify", dataset.uri]) == 0
    assert document not in {row["doc_id"] for row in documents_of(open_dataset(dataset))}


def test_a_stalled_takedown_leaves_the_tables_of_the_driver_that_took_over(dataset: Store, drivers: Drivers) -> None:
    document, before = documents_of(open_dataset(dataset))[8]["doc_id"], read_run(dataset)
    words = ["takedown", dataset.uri, "--doc", document.hex()]
    process = drivers.start(VERB, str(SECONDS), *words)
    while not dataset.exists(PENDING_NAME):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGSTOP)
    with wait_until_free(dataset):
        os.kill(process.pid, signal.SIGCONT)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 2, output
        assert "expected epoch 1 of this process, got the lease of `penstock that` (process " in output
        assert read_run(dataset) == before
        assert read_pending(dataset) is not None
    done = subprocess.run([sys.executable, "-m", "jobs.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert document not in {row["doc_id"] for row in documents_of(open_dataset(dataset))}


@pytest.mark.parametrize(("first", "second"), [("lock_training", "lock_tables"), ("lock_tables", "lock_training")])
def test_readers_and_writers_exclude_each_other(dataset: Store, drivers: Drivers, first: str, second: str) -> None:
    process, line = drivers.hold(dataset, lock=first)
    assert line == "held"
    _, line = drivers.hold(dataset, "penstock that", lock=second)
    assert line.startswith(f"{dataset.uri}/{TABLES_LOCK}: expected a free lock for `penstock that`, got one held by ")
    assert f"(process {process.pid} on " in line
    process.kill()
    process.wait(60)
    time.sleep(SECONDS + leases.CLOCK_SECONDS + 2)
    with lock_tables(dataset, "penstock that"):
        pass
    with lock_training(dataset, "penstock that"):
        pass
    assert not [name for name in dataset.walk() if ".lock" in name]


def test_a_renewal_whose_answer_is_lost_is_made_again(run: Store) -> None:
    """The lost one may be nearly as old as the lease lasts, so it must not count as one of now."""
    requests = S3Requests(run)
    lease = leases._Lease(run, TABLES_LOCK, "penstock this", requests)
    lease.take()
    written = requests.put_if

    def lose(name: str, data: bytes, etag: str | None) -> str | None:
        written(name, data, etag)
        raise ContractError("no answer")

    with mock.patch.object(requests, "put_if", lose), pytest.raises(ContractError, match="no answer"):
        lease.renew()
    lost = lease_of(run)
    assert lost["renewals"] == 1
    lease.renew()
    assert lease_of(run) == lost | {"renewals": 2}
    lease.renew()
    assert lease_of(run) == lost | {"renewals": 3}
    lease.release()
    assert not lease_of(run)


def test_a_reader_that_has_lost_its_lease_commits_nothing(dataset: Store, run: Store) -> None:
    """A takedown removes the expired lease of training, whose next checkpoints its certificate would not list."""
    with (
        leases.hold_reader(dataset, TABLES_LOCK, "penstock train"),
        leases.hold_lease(run, TRAIN_LOCK, "penstock train"),
    ):
        check_still_held(run)
        requests = S3Requests(dataset)
        requests.delete(requests.names(f"{TABLES_LOCK}.{leases.READERS}/"))
        with pytest.raises(
            ContractError, match=rf"{dataset.uri}/{TABLES_LOCK}.*: expected epoch 1 of this process, got"
        ):
            check_still_held(run)
    check_still_held(run)


@pytest.mark.parametrize("shared", [False, True])
def test_a_lease_that_cannot_be_released_hides_no_error(
    run: Store, capsys: pytest.CaptureFixture[str], shared: bool
) -> None:
    """The command has ended, well or with an error of its own, and the lease ends by itself."""
    take = leases.hold_reader if shared else leases.hold_lease
    gone = ContractError("no answer")
    for error in (None, ConfigError("a wrong setting")):
        raised = None
        try:
            with mock.patch.object(S3Requests, "delete", side_effect=gone), take(run, f"{error}.lock", "penstock this"):
                if error is not None:
                    raise error
        except (ConfigError, ContractError) as own:
            raised = own
        assert raised is error
        assert "the lock is not released, and ends by itself after" in capsys.readouterr().err


def test_a_store_that_is_gone_gives_one_sentence(run: Store) -> None:
    message = r"tables\.lock: expected an object store that answers, got Could not connect"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": address}), pytest.raises(ContractError, match=message):
            lock_tables(run, "penstock that").__enter__()


def test_without_boto3_the_extra_is_named(run: Store) -> None:
    with mock.patch.dict(sys.modules, {"boto3": None}), pytest.raises(ConfigError, match=r"Install penstock\[s3\]\."):
        S3Requests(run)


def start_upload(folder: Store, name: str) -> None:
    """Start an upload of a large file that is not completed."""
    bucket, _, prefix = folder.root.partition("/")
    client, named = boto3.client("s3"), {"Bucket": bucket, "Key": f"{prefix}/{name}"}
    upload_id = client.create_multipart_upload(**named)["UploadId"]
    client.upload_part(**named, UploadId=upload_id, PartNumber=1, Body=b"x" * 1000)


def test_gc_on_s3_removes_files_and_unfinished_uploads(
    dataset: Store, drivers: Drivers, capsys: pytest.CaptureFixture[str]
) -> None:
    version = read_run(dataset).tables["tokens"]
    left = [f"tokens/{version}/web/train/{number:05d}.tokens-aaaaaaaaaaaa.arrow" for number in range(25)]
    before = {*dataset.walk()}
    for name in left:
        dataset.write_atomic(name, b"x")
    started = ["documents/v-0123456789ab/big.parquet", "repair/clean/part-00000.parquet"]
    of_others = ["export/train-00000.jsonl", "ladder/small/tokens/v-0123456789ab/big.arrow"]
    for name in (*started, of_others[0]):
        start_upload(dataset, name)
    inner = dataset.child("ladder/small")
    inner.write_atomic("run.json", b'{"tables": {}, "recipe": {}}')
    start_upload(inner, "tokens/v-0123456789ab/big.arrow")
    garbage = find_garbage(dataset)
    assert [each.path for each in garbage if each.why == UNNAMED] == left
    uploads = [(each.path, each.bytes) for each in garbage if each.why == HALF_UPLOAD]
    assert uploads == [(name, 1000) for name in started]
    assert len(garbage) == len(left) + 2
    process, _ = drivers.hold(dataset, seconds=60)
    assert main(["gc", dataset.uri]) == 2
    assert f"(process {process.pid} on " in capsys.readouterr().err
    assert len([*dataset.walk()]) == len(before) + len(left) + 2
    process.communicate(timeout=60)
    with mock.patch("schemas.s3_requests.DELETED_AT_ONCE", 10):
        assert main(["gc", dataset.uri]) == 0
    assert "27 files, " in capsys.readouterr().out
    assert {*dataset.walk()} == before | {"ladder/small/run.json"}
    assert [found.name for found in S3Requests(dataset).uploads()] == of_others
    assert json.loads(dataset.read_bytes("run.json"))["tables"]["tokens"] == version


@pytest.fixture
def careless(server: int) -> Iterator[Store]:
    """An empty run folder on a store that ignores the conditions of writes, as older clones of S3 do."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)

    def without_conditions(environ: dict[str, object], start: object) -> object:
        for name in ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"):
            environ.pop(name, None)
        return app(environ, start)

    store = make_server("127.0.0.1", 0, without_conditions, threaded=True)
    threading.Thread(target=store.serve_forever, daemon=True).start()
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.server_port}"}):
        run = Store("s3://bucket/careless/run")
        run.write_atomic("run.json", b'{"tables": {}, "recipe": {}}')
        yield run
    store.shutdown()


def test_a_store_that_ignores_conditions_is_named(careless: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_tables(careless, "penstock run"):
        assert capsys.readouterr().err == (
            f"penstock: {careless.uri}/{TABLES_LOCK}: the object store ignores `If-None-Match`, so nothing keeps two "
            "processes from writing this run folder. Run one at a time, or use a store with conditional writes.\n"
        )
        write_run(careless, read_run(careless))  # the lease is renewed as on other stores
    assert lease_of(careless) == {}


def test_a_store_with_conditions_gives_no_warning(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_tables(run, "penstock run"):
        write_run(run, read_run(run))
    assert capsys.readouterr().err == ""
