"""An object store that is overloaded or stalls: requests are tried again, and then one sentence ends the command."""

import os
import time
from collections import Counter
from contextlib import AbstractContextManager
from unittest import mock

import pytest

from jobs.cli import main
from schemas import s3_requests, storage
from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.leases import hold_lease
from schemas.storage import Store
from tests.support.s3_proxy import OVERLOADED, STALLED, proxy
from tests.support.s3_server import environment, server

__all__ = ["server"]  # a fixture

BURST = 2
"""Number of 503 in a row that each request gets."""
GIVES_UP = 60.0
"""Maximum time after which a command gives up on a store that never answers [s]."""


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second without a byte is a stall here, and not twenty."""
    monkeypatch.setattr(storage, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(storage, "ATTEMPTS", 3)
    monkeypatch.setattr(s3_requests, "TIMEOUT", 1)


def endpoint(port: int) -> AbstractContextManager[object]:
    """Lead pyarrow and boto3 to this port."""
    return mock.patch.dict(os.environ, environment(port))


class Bursts:
    """The first requests of each kind for each object are answered with 503."""

    def __init__(self, burst: int) -> None:
        self.burst = burst
        self.seen: Counter[tuple[str, str]] = Counter()

    def __call__(self, method: str, path: str) -> str | None:
        self.seen[method, path] += 1
        return OVERLOADED if self.seen[method, path] <= self.burst else None


def test_bursts_of_503_are_waited_out(server: int) -> None:
    faults = Bursts(BURST)
    data = os.urandom(12 << 20)  # more than one part of an upload
    with proxy(server, faults) as port, endpoint(port):
        store = Store("s3://bucket/bursts")
        # pyarrow does not try again to read an object that is smaller than the text of the 503
        store.write_atomic("a/small.json", canonical_json({"a": "x" * 1000}))
        with store.open_output("large.bin") as stream:
            for start in range(0, len(data), 1 << 20):
                stream.write(data[start : start + (1 << 20)])
        assert store.read_json("a/small.json") == {"a": "x" * 1000}
        assert store.read_bytes("large.bin") == data
        assert sorted(store.walk()) == ["a/small.json", "large.bin"]
        with hold_lease(store, "tables.lock", "test"):
            store.write_atomic("b.json", b"{}")
        store.delete("a/small.json")
        assert not store.exists("a/small.json")
    assert sum(faults.seen.values()) > 3 * len(faults.seen) > 30


@pytest.mark.parametrize("fault", [OVERLOADED, STALLED])
def test_a_store_that_never_recovers_ends_a_command_with_one_sentence(
    server: int, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """A stall of an hour is a stall without end: nothing waits for its end."""
    began = time.monotonic()
    with proxy(server, lambda method, path: fault) as port, endpoint(port):
        assert main(["verify", "s3://bucket/run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: s3://bucket/run/run.json: expected an object store that answers, got ")
    assert error.count("\n") == 1
    assert time.monotonic() - began < GIVES_UP


@pytest.mark.parametrize("fault", [OVERLOADED, STALLED])
def test_a_write_that_gives_up_leaves_the_old_content(server: int, fault: str) -> None:
    Store("s3://bucket/kept").write_atomic("a.json", b"old")
    began = time.monotonic()
    with proxy(server, lambda method, path: fault if method == "PUT" else None) as port, endpoint(port):
        store = Store("s3://bucket/kept")
        with pytest.raises(OSError, match=r"AWS Error"):
            store.write_atomic("a.json", b"new")
    assert time.monotonic() - began < GIVES_UP
    assert Store("s3://bucket/kept").read_bytes("a.json") == b"old"


def test_a_lease_of_a_store_that_stalls_is_an_error_in_time(server: int) -> None:
    began = time.monotonic()
    with (
        proxy(server, lambda method, path: STALLED) as port,
        endpoint(port),
        pytest.raises(ContractError, match="expected an object store that answers, got Read timeout"),
        hold_lease(Store("s3://bucket/stalled"), "tables.lock", "test"),
    ):
        raise AssertionError("the lease was taken")
    assert time.monotonic() - began < GIVES_UP
