"""Files of tables are compared with the size and SHA-256 of their manifest when they are opened."""

import hashlib
import os
import pickle

import pytest

from schemas import storage
from schemas.errors import ContractError
from schemas.storage import CheckedPath, Store

DATA = bytes(range(256)) * 64


@pytest.fixture
def folder(tmp_path):
    """The folder of a version in a run, with one file."""
    store = Store(str(tmp_path / "run" / "text" / "v-1"))
    store.write_atomic("part.parquet", DATA)
    return store


def named(data: bytes = DATA, path: str = "part.parquet") -> CheckedPath:
    return CheckedPath(path, len(data), hashlib.sha256(data).hexdigest())


def flipped(place: int) -> bytes:
    return DATA[:place] + bytes([DATA[place] ^ 1]) + DATA[place + 1 :]


def test_the_named_file_is_opened(folder):
    with folder.open_input(named()) as stream:
        assert stream.read() == DATA
    assert folder.read_bytes(named()) == DATA


@pytest.mark.parametrize("place", [0, len(DATA) // 3, len(DATA) - 1])
def test_a_flipped_bit_is_refused_with_both_values_and_the_way_to_heal(folder, tmp_path, place):
    damaged = flipped(place)
    folder.write_atomic("part.parquet", damaged)
    with pytest.raises(ContractError) as caught:
        folder.open_input(named())
    now = hashlib.sha256(damaged).hexdigest()
    assert str(caught.value) == (
        f"{folder.uri}/part.parquet: expected SHA-256 {named().sha256} as the manifest names it, got SHA-256 {now}. "
        f"Run `penstock repair {tmp_path}/run`, which builds damaged files again."
    )
    with pytest.raises(ContractError, match=hashlib.sha256(damaged).hexdigest()):
        folder.read_bytes(named())


def test_a_file_that_changes_after_its_first_check_is_compared_again(folder):
    folder.open_input(named()).close()
    before = os.stat(folder.path("part.parquet"))
    with open(folder.path("part.parquet"), "r+b") as stream:
        stream.write(flipped(0)[:1])
    os.utime(folder.path("part.parquet"), ns=(before.st_atime_ns, before.st_mtime_ns))  # its change time differs
    with pytest.raises(ContractError, match="got SHA-256"):
        folder.open_input(named())


def test_an_unchanged_file_is_read_once(folder, monkeypatch):
    folder.open_input(named()).close()
    monkeypatch.setattr(Store, "sha256", lambda *_: pytest.fail("read again"))
    folder.open_input(named()).close()


def test_missing_shorter_and_irregular_files_are_refused(folder):
    folder.write_atomic("part.parquet", DATA[:-1])
    with pytest.raises(ContractError, match=f"expected a file of {len(DATA)} bytes .*, got a file of {len(DATA) - 1} "):
        folder.open_input(named())
    for path in ("pipe", "folder", "nothing"):
        if path == "pipe":
            os.mkfifo(folder.path(path))
        elif path == "folder":
            os.mkdir(folder.path(path))
        with pytest.raises(ContractError, match=f"{path}: expected a file of .*, got no such file"):
            folder.open_input(named(path=path))
    with pytest.raises(ContractError, match="pipe: expected a regular file, got a folder, pipe or device"):
        folder.read_bytes("pipe")
    writer = os.open(folder.path("pipe"), os.O_RDWR)  # so that code which opens the pipe does not block the tests
    for path in ("pipe", "folder"):
        with pytest.raises(ContractError, match=f"{path}: expected a regular file, got a folder, pipe or device"):
            folder.open_unchecked(path)
    os.close(writer)
    with pytest.raises(FileNotFoundError):
        folder.open_unchecked("nothing")


def test_a_path_keeps_its_digest_when_a_task_is_sent_to_a_worker():
    sent = pickle.loads(pickle.dumps(named()))
    assert (sent, sent.num_bytes, sent.sha256) == ("part.parquet", len(DATA), named().sha256)


def test_the_list_of_compared_files_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(storage, "MAX_CHECKED", 4)
    for number in range(20):
        folder.write_atomic(f"{number}", DATA)
        folder.open_input(named(path=f"{number}")).close()
    assert len(storage._CHECKED) <= 4


@pytest.mark.parametrize("text", [b"[" * 200_000, b"\xff\xfe", b"{", b"", b"1" * 10_000])
def test_json_that_cannot_be_parsed_is_one_sentence(folder, text):
    folder.write_atomic("run.json", text)
    with pytest.raises(ContractError, match=r"run.json: expected a JSON file, got one that cannot be parsed"):
        folder.read_json("run.json")


def test_missing_json_is_one_sentence(folder):
    with pytest.raises(ContractError, match=r"run.json: expected a JSON file, got no such file"):
        folder.read_json("run.json")
