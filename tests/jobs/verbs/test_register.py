"""`penstock register`: what it prints, what it refuses, and what a takedown says of registered tables."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from jobs.cli import main
from schemas.locks import lock_export
from schemas.storage import Store
from tests.support.registered import OLDER_RUN, rows_of_delta, rows_of_files, rows_of_iceberg
from tests.support.s3_server import environment, server

__all__ = ["server"]  # a fixture
NO_ICEBERG = "pyiceberg is not installed: pip install 'penstock[register]'"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of every table, with 41 records in one part."""
    shutil.copytree(OLDER_RUN, tmp_path / "run")
    return tmp_path / "run"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints; it succeeds."""
    assert main([*words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error that a command prints."""
    assert main([*words]) == 2
    return capsys.readouterr().err


def test_delta_needs_no_further_package(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    out = printed(capsys, "register", str(run), "--delta", "--table", "clean")
    assert out == f"clean: version 0 at file://{run}/clean, 1 rows in 1 file(s)\n"
    assert printed(capsys, "register", str(run), "--delta", "--table", "clean") == (
        f"clean: version 0 at file://{run}/clean, unchanged\n"
    )
    assert json.loads((run / "registered.json").read_text())["registrations"] == [
        {"folder": "", "format": "delta", "tables": ["clean"]}
    ]


def test_iceberg_names_the_extra_where_it_is_missing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyiceberg"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    error = refused(capsys, "register", str(run), "--iceberg", str(tmp_path / "out"))
    assert "expected the package pyiceberg with SQLAlchemy, got an error: " in error
    assert error.endswith("Install it with `pip install 'penstock[register]'`.\n")
    assert not (tmp_path / "out").exists()
    assert not (run / "registered.json").exists()


def test_raw_tables_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["register", str(run), "--delta"]) == 0
    assert capsys.readouterr().err == "register: raw tables, which may hold personal data: documents, text\n"


def test_refusals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected --delta or --iceberg FOLDER, got neither. Give one." in refused(capsys, "register", str(run))
    assert "got no such folder" in refused(capsys, "register", str(tmp_path / "rum"), "--delta")
    assert "got 'cleen' (did you mean 'clean'?)" in refused(capsys, "register", str(run), "--delta", "--table", "cleen")
    (run / "takedowns").mkdir()
    (run / "takedowns" / "pending.json").write_text("{}")
    assert "expected no unfinished takedown" in refused(capsys, "register", str(run), "--delta")


def test_a_takedown_names_what_is_stale(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its log files are none of the files that it does not know, and gc and verify accept them."""
    printed(capsys, "register", str(run), "--delta", "--table", "clean", "--table", "verdicts")
    (run / "clean" / "_delta_log" / "00000000000000000007.json").write_text("of another writer")
    out = printed(capsys, "takedown", str(run), "--domain", "site1.example.com")
    assert "left, because no version of a table has such a path; may hold removed documents: clean/_delta_log/" in out
    assert out.count("_delta_log/") == 1
    (run / "clean" / "_delta_log" / "00000000000000000007.json").unlink()
    command = f"penstock register {run} --delta --table clean --table verdicts"
    assert f"registered tables still name the replaced files; register them again: `{command}`\n" in out
    printed(capsys, *command.split()[1:])
    store = Store(str(run))
    assert rows_of_delta(store, "verdicts") == rows_of_files(store, "verdicts")
    assert printed(capsys, "gc", str(run)).startswith("0 files")
    printed(capsys, "verify", str(run), "--paranoid")
    assert "certificate is valid" in printed(
        capsys, "takedown", str(run), "--check", str(next((run / "takedowns").glob("????????????.json")))
    )


def test_the_record_keeps_the_widest_request(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--table", "clean"], ["--table", "audit"]):
        printed(capsys, "register", str(run), "--delta", *words)
    record = json.loads((run / "registered.json").read_text())["registrations"]
    assert [each["tables"] for each in record] == [["audit", "clean"]]
    printed(capsys, "register", str(run), "--delta")
    printed(capsys, "register", str(run), "--delta", "--table", "clean")
    record = json.loads((run / "registered.json").read_text())["registrations"]
    assert [each["tables"] for each in record] == [[]]
    (run / "registered.json").write_text('{"registrations": [1]}')
    assert "expected a list of registrations" in refused(capsys, "register", str(run), "--delta")
    before = (run / "run.json").read_bytes()
    assert "expected a list of registrations" in refused(capsys, "takedown", str(run), "--domain", "site1.example.com")
    assert (run / "run.json").read_bytes() == before
    assert not (run / "takedowns").exists()


def test_on_an_object_store(server: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both formats, over the same objects, before and after a takedown."""
    pytest.importorskip("pyiceberg.catalog.memory", reason=NO_ICEBERG)
    run, out = Store("s3://bucket/run"), Store("s3://bucket/iceberg")
    pafs.copy_files(str(OLDER_RUN), run.root, destination_filesystem=run.fs)
    words = ["register", run.uri, "--delta", "--iceberg", out.uri, "--table", "verdicts", "--table", "dedup"]
    printed(capsys, *words)
    options = {**environment(server), "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    reader = {"s3.endpoint": options["AWS_ENDPOINT_URL"], "s3.region": "us-east-1"}
    for table in ("verdicts", "dedup"):
        assert rows_of_delta(run, table, options) == rows_of_files(run, table)
        assert rows_of_iceberg(out, table, reader) == rows_of_files(run, table)
    assert printed(capsys, *words).count("unchanged") == 4
    printed(capsys, "takedown", run.uri, "--domain", "site1.example.com")
    assert "version 1 at s3://bucket/run/verdicts, 33 rows" in printed(capsys, *words)
    after = rows_of_files(run, "verdicts")
    assert rows_of_delta(run, "verdicts", options) == after == rows_of_iceberg(out, "verdicts", reader)


def test_two_commands_do_not_write_into_one_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")
    out = tmp_path / "out"
    with lock_export(Store(str(out)), "penstock register"):
        error = refused(capsys, "register", str(run), "--iceberg", str(out), "--table", "clean")
    assert "expected a free lock for `penstock register`, got one held by" in error
    assert not out.exists()
    printed(capsys, "register", str(run), "--iceberg", str(out), "--table", "clean")
    assert {path.name for path in out.iterdir()} == {"clean"}
