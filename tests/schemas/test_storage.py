"""Storage: atomic small writes, digests, and errors with values."""

import errno
import hashlib
import os
import pickle
import re
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.exit_codes import exit_code_of
from schemas.errors import ConfigError, ContractError
from schemas.storage import AZURE_ACCOUNT, AZURE_KEY, MAX_FILE_BYTES, MAX_JSON_BYTES, Store


def test_write_is_atomic_and_leaves_no_other_file(tmp_path):
    store = Store(str(tmp_path))
    store.write_atomic("a/b.json", b'{"x": 1}')
    store.write_atomic("a/b.json", b'{"x": 2}')
    assert store.read_json("a/b.json") == {"x": 2}
    assert sorted(store.walk()) == ["a/b.json"]


@pytest.mark.parametrize(
    ("uri", "got"), [("", "expected a folder, got an empty text"), ("a\udcff", "expected a name in UTF-8")]
)
def test_no_folder_and_a_name_that_is_not_utf8_are_refused(uri: str, got: str) -> None:
    with pytest.raises(ConfigError, match=got):
        Store(uri)


def test_failed_write_keeps_the_old_content(tmp_path):
    store = Store(str(tmp_path))
    store.write_atomic("b.json", b"{}")
    with pytest.raises(TypeError):
        store.write_atomic("b.json", "text")
    assert store.read_bytes("b.json") == b"{}"
    assert os.listdir(tmp_path) == ["b.json"]


def test_digest_and_size(tmp_path):
    store = Store(str(tmp_path))
    data = os.urandom(3 << 20)
    with store.open_output("x.bin") as stream:
        stream.write(data)
    assert store.sha256("x.bin") == hashlib.sha256(data).hexdigest()
    assert store.size("x.bin") == len(data)


def test_missing_file_and_bad_json_are_named(tmp_path):
    store = Store(str(tmp_path))
    with pytest.raises(ContractError, match=r"nothing\.arrow: expected a file that a manifest names, got no file\."):
        store.size("nothing.arrow")
    store.write_atomic("bad.json", b"{")
    with pytest.raises(ContractError, match=r"bad\.json: expected a JSON file"):
        store.read_json("bad.json")


AZURE = "Check for Hierarchical Namespace support on 'https://acc.dfs.core.windows.net/c' failed"


@pytest.mark.parametrize(
    ("error", "got"),
    [
        (
            OSError(f"{AZURE}. Azure Error: [] Fail to get a new connection for: https://acc.dfs. Could not connect"),
            "got Fail to get a new connection for: https://acc.dfs. Could not connect. Check account, container and",
        ),
        (
            OSError("GetProperties failed for 'https://acc/c/x'. Azure Error: [AuthorizationFailure] 403 Not you.\nId"),
            "got AuthorizationFailure: 403 Not you. Check account",
        ),
        (
            pa.ArrowException(
                f"Unknown error: {AZURE}: N5Azure4Core11Credentials23AuthenticationExceptionE: No token."
            ),
            "got No token. Check account",
        ),
        (OSError("Azure Error: [X] 403 https://acc/c?sv=1&sig=SEKRET"), "got X: 403 <not shown, because"),
    ],
)
def test_an_error_of_azure_is_one_sentence(capsys: pytest.CaptureFixture[str], error: Exception, got: str) -> None:
    def fail() -> int:
        raise error

    assert exit_code_of(fail) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: abfs://: expected an object store that answers, ")
    assert got in line
    assert "SEKRET" not in line


@pytest.mark.parametrize(
    ("code", "got"),
    [
        (errno.ENOSPC, "expected writable storage, got an error: the disk is full. Resolve it and run the same"),
        (errno.EACCES, "expected storage that this user may use, got an error: permission is denied. Name another"),
        (errno.EFBIG, "got an error: the file is larger than this filesystem or process allows."),
    ],
)
def test_an_error_of_a_disk_is_one_sentence(capsys: pytest.CaptureFixture[str], code: int, got: str) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code), "/run/report.html")

    assert exit_code_of(fail) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: /run/report.html: expected ")
    assert got in error
    assert error.count("\n") == 1


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    """Links to the own folder double the number of paths at each level."""
    (tmp_path / "run/a/b").mkdir(parents=True)
    (tmp_path / "disk/far").mkdir(parents=True)
    for place in (tmp_path / "run", tmp_path / "run/a/b", tmp_path / "disk"):
        (place / "up").symlink_to("..")
        (place / "same").symlink_to(".")
        (place / "also").symlink_to(place)
        (place / "file.json").write_text("{}")
        (place / "to_file").symlink_to("file.json")
        (place / "loop").symlink_to("loop")
        (place / "gone").symlink_to("nothing")
        os.mkfifo(place / "pipe")
    for name in ("disk", "again", "z/third"):
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "disk")
    (tmp_path / "link").symlink_to("run")
    files = ["a/b/file.json", "a/b/to_file", "file.json", "to_file"]
    for root in ("run", "link"):  # the folder itself may be reached through a link
        names = [*Store(str(tmp_path / root)).walk()]
        assert sorted(names) == sorted([*files, "again/file.json", "again/to_file"])
    assert [*Store(str(tmp_path / "nothing")).walk()] == []


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for name, size in (("log", MAX_FILE_BYTES), ("value.json", MAX_JSON_BYTES)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size + 1)
        read = store.read_json if name.endswith("json") else store.read_bytes
        with pytest.raises(ContractError, match=f"{name}: expected a file of at most {size} bytes, got one of"):
            read(name)


def test_a_folder_in_place_of_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ContractError, match=r"report\.html: expected a file to replace, got a folder\."):
        Store(str(tmp_path)).write_atomic("report.html", b"x")
    assert os.listdir(tmp_path) == ["report.html"]


AZURE_RUN = "abfs://box@account.dfs.core.windows.net/run"


LOCAL = "blob_storage_authority=127.0.0.1:10000&dfs_storage_authority=127.0.0.1:10000"


def key_of(uri: str) -> str:
    key: str = Store(uri).fs.__reduce__()[1][0]["account_key"]
    return key


def test_azure_gets_the_key_of_its_account_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AZURE_KEY, raising=False)
    monkeypatch.setenv(AZURE_ACCOUNT, "account")
    assert key_of(AZURE_RUN) == ""
    monkeypatch.setenv(AZURE_KEY, "a2V5")
    assert key_of(AZURE_RUN) == key_of(f"{AZURE_RUN}?{LOCAL}&enable_tls=false") == "a2V5"
    assert "a2V5" not in repr(pickle.dumps(Store(AZURE_RUN)))
    assert key_of(AZURE_RUN.replace("account", "other")) == ""
    monkeypatch.delenv(AZURE_ACCOUNT)
    assert key_of(AZURE_RUN) == ""


def test_a_key_that_is_none_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AZURE_ACCOUNT, "account")
    monkeypatch.setenv(AZURE_KEY, "geheim!")
    with pytest.raises(ConfigError, match="expected a key in base64 in AZURE_STORAGE_KEY, got another text") as error:
        Store(AZURE_RUN)
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize("key", ["a2V5", ""])
@pytest.mark.parametrize(
    "options",
    [
        "blob_storage_authority=evil.example",
        "dfs_storage_authority=.evil.example",
        "dfs_storage_authority=.dfs.core.windows.net.evil.example",
        "dfs_storage_authority=127.0.0.1.evil.example:1",
        "blob_storage_authority=.localhost:443",
        "enable_tls=false",
        "enable_tls=false&blob_storage_authority=127.0.0.1:1",
    ],
)
def test_no_other_host_gets_a_signature_or_login_of_azure(
    monkeypatch: pytest.MonkeyPatch, options: str, key: str
) -> None:
    """A run folder of a stranger may name such a URI. A login is valid for every account of the user."""
    monkeypatch.setenv(AZURE_ACCOUNT, "account")
    monkeypatch.setenv(AZURE_KEY, key)
    with pytest.raises(ConfigError, match=r"Correct the URI|Remove enable_tls=false"):
        Store(f"{AZURE_RUN}?{options}")


def test_a_server_on_this_machine_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, the library of Azure would end the process."""
    monkeypatch.delenv(AZURE_KEY, raising=False)
    with pytest.raises(ConfigError, match="Set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"):
        Store(f"{AZURE_RUN}?{LOCAL}&enable_tls=false")
    assert key_of(f"{AZURE_RUN}?{LOCAL}&enable_tls=false&credential_kind=anonymous") == ""


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("abfs://box:a2V5a2V5a2V5@account.dfs.core.windows.net/run", "expected no secrets in a URI"),
        (f"{AZURE_RUN}?sas_token=sv%3D2", "expected no secrets in a URI"),
        ("abfs:///run", "Write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER."),
        ("abfs://box@account.dfs.core.windows.net/a//b", "expected a path without empty"),
        ("abfs://box@%3A%3A.dfs.core.windows.net/run", "expected CONTAINER@ACCOUNT.dfs.core.windows.net"),
        (f"{AZURE_RUN}?blob_storage_authority=127.0.0.1:x", "expected CONTAINER@ACCOUNT.dfs.core.windows.net"),
        (f"{AZURE_RUN}?blob_storage_authorit%79=127.0.0.1:x", "expected CONTAINER@ACCOUNT.dfs.core.windows.net"),
        (f"{AZURE_RUN}?dfs_storage_authority=127.0.0.1:1@evil.example", "expected CONTAINER@ACCOUNT.dfs.core"),
        (f"{AZURE_RUN}?dfs_storage_authority=127.0.0.1:99999", "expected CONTAINER@ACCOUNT.dfs.core.windows.net"),
        ("abfs://box@host.example/run", "abfs://box@host.example/run: expected CONTAINER@ACCOUNT.dfs.core.windows.net"),
    ],
)
def test_addresses_of_azure_that_are_refused(uri: str, problem: str) -> None:
    """With some of these hosts, the library of Azure would end the process."""
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Store(uri)
