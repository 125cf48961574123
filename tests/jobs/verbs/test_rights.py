"""`penstock rights` and `penstock robots`: what they print, and what they refuse."""

import gzip
import json
import shlex
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.cli import main
from pipeline.rights.table import RobotsTable
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.report_run import make_run
from tests.support.tiny_archive import record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a run without training, with a table `documents` and a dataset of other documents."""
    return make_run(tmp_path_factory.mktemp("rights") / "a run")


def test_everything_of_a_domain(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rights", run.uri, "--domain", "b.example", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"]["documents"] == found["documents"] == sum(found["files"].values())
    assert found["kept"]["documents"] + sum(found["dropped"].values()) == found["documents"]
    assert shlex.split(found["takedown"]) == ["penstock", "takedown", run.uri, "--domain", "b.example"]
    assert main(["rights", run.uri, "--domain", "b.example"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{found['documents']} document(s) of b.example\n")
    assert f"to remove them: penstock takedown '{run.uri}' --domain b.example" in out


def test_the_command_removes_the_documents(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    main(["rights", run.uri, "--domain", "b.example", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert main([*shlex.split(found["takedown"])[1:], "--dry-run"]) == 0
    assert f"{found['documents']} document(s) to be removed" in capsys.readouterr().out


def test_tokens_are_counted_by_stream(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    expected: dict[str, int] = {}
    dataset = open_dataset(run)
    for stream, shards in dataset.streams.items():
        for shard in shards:
            with dataset.folder.open_input(shard.docs_path) as file:
                rows = pa.ipc.open_file(file).read_all().to_pylist()
            own = [row["num_tokens"] for row in rows if "site2.co.uk" in row["url"]]
            expected |= {stream: expected.get(stream, 0) + sum(own)} if own else {}
    assert main(["rights", run.uri, "--domain", "site2.co.uk", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == expected
    assert found["rows"]["tokens"] == found["documents"] > 0


def test_a_domain_without_documents_is_refused(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rights", run.uri, "--domain", "nothing.example"]) == 2
    assert "--domain nothing.example: expected a document of" in capsys.readouterr().err


def test_robots_are_written_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = b"HTTP/1.1 200 OK\r\n\r\nUser-agent: *\nDisallow: /"
    stored = record(block, WARC_Target_URI="https://a.org/robots.txt") + record(b"x", kind="metadata")
    (tmp_path / "r.warc.gz").write_bytes(gzip.compress(stored))
    out = str(tmp_path / "t.arrow")
    assert main(["robots", f"{tmp_path}/*.warc.gz", "--out", out, "--processes", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 records: robots.txt of 1 hosts, tdmrep.json of 0 hosts",
        "           1 records left out: not_a_response",
    ]
    assert RobotsTable(out).of_url("http://a.org/x")[0].denies("CCBot", "/x")
    assert main(["robots", f"{tmp_path}/*.warc.gz", "--out", out, "--processes", "0"]) == 2
