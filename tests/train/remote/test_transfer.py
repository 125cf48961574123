"""Copies from and to a store that fails: a real local filesystem that raises the errors of an object store."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ContractError
from schemas.storage import CheckedPath, Store
from train.remote import transfer
from train.remote.transfer import download, upload

CONTENT = os.urandom(10_000)
PATH = CheckedPath("shard.arrow", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
SLOW_DOWN = "When reading information for key 'shard.arrow' in bucket 'b': AWS Error SLOW_DOWN during GetObject"


class FailingStore(Store):
    """A local folder; each read of a block takes the next outcome, an error to raise or None."""

    def __init__(self, folder: Path, outcomes: Iterator[OSError | None]):
        super().__init__(str(folder))
        self._outcomes, self.num_read = outcomes, 0
        self._files, self.fs = self.fs, self

    def open_input_file(self, path: str) -> Any:
        """Open a file whose reads may fail."""
        file, store = self._files.open_input_file(path), self

        class Failing:
            def __enter__(self) -> "Failing":
                return self

            def __exit__(self, *exception: object) -> None:
                file.close()

            def seek(self, at: int) -> None:
                file.seek(at)

            def read(self, size: int) -> bytes:
                if (error := next(store._outcomes, None)) is not None:
                    raise error
                block = bytes(file.read(size))
                store.num_read += len(block)
                return block

        return Failing()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small blocks, and short pauses."""
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(transfer, "GIVE_UP_SECONDS", 0.2)


def fetched(store: Store, out: Path) -> bytes:
    """Return the bytes of a download."""
    with out.open("wb") as file:
        download(store, PATH, file.fileno())
    return out.read_bytes()


def test_a_download_continues_where_the_store_failed(tmp_path):
    (tmp_path / PATH).write_bytes(CONTENT)
    failures = [None, None, OSError(SLOW_DOWN), OSError(SLOW_DOWN), None, OSError("curlCode: 28, Timeout was reached")]
    store = FailingStore(tmp_path, iter(failures))
    assert fetched(store, tmp_path / "out") == CONTENT
    assert store.num_read == len(CONTENT)  # no byte came twice


def test_a_download_gives_up_in_time_with_the_last_error(tmp_path):
    (tmp_path / PATH).write_bytes(CONTENT)
    store = FailingStore(tmp_path, iter([None] + [OSError(SLOW_DOWN)] * 1000))
    with pytest.raises(ContractError, match=r"expected an object store that answers, got only errors .* SLOW_DOWN"):
        fetched(store, tmp_path / "out")


def test_an_error_that_stays_is_raised_at_once(tmp_path):
    (tmp_path / PATH).write_bytes(CONTENT)
    denied = OSError("AWS Error ACCESS_DENIED during GetObject operation")
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        fetched(FailingStore(tmp_path, iter([denied])), tmp_path / "out")
    with pytest.raises(ContractError, match="got no such file"):
        fetched(Store(str(tmp_path / "none")), tmp_path / "out")


def test_other_bytes_are_refused_in_both_directions(tmp_path):
    (tmp_path / PATH).write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ContractError, match=f"with SHA-256 {PATH.sha256} as the manifest names it"):
        fetched(Store(str(tmp_path)), tmp_path / "out")
    target = Store(str(tmp_path / "target"))
    with pytest.raises(ContractError, match=f"expected SHA-256 {PATH.sha256}, as it was written"):
        upload(tmp_path / PATH, target, "copy", PATH.sha256)
    upload(tmp_path / PATH, target, "copy")
    assert target.read_bytes("copy") == CONTENT[:-1] + b"x"
