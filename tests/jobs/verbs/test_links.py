"""`penstock links`: pages are counted by their canonical URL, and every submission has an outcome."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard

from jobs.cli import main
from pipeline.sources.link_evidence import LINKS
from tests.support.paths import SHARED

SAMPLE = SHARED / "sources" / "reddit" / "submissions.jsonl.zst"


def submission(url: str | None, score: int = 5, **values: object) -> dict[str, object]:
    return {"id": "a1", "title": "t", "selftext": "", "url": url, "score": score} | values


def test_pages_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        submission("http://www.Example.com/a", 3),
        submission("https://example.com/a", 4),
        submission("https://b.example.co.uk/x?y=1"),
        submission("https://example.com/low", 2),
        submission("https://www.reddit.com/r/a/"),
        submission("no url"),
        submission(None),
        submission("https://example.com/adult", over_18=True),
        {"id": "!"},
    ]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows) + b"{\n"
    (tmp_path / "RS_2015-01.zst").write_bytes(zstandard.compress(content))
    out = tmp_path / "links.parquet"
    assert main(["links", f"{tmp_path}/RS*", "--out", str(out)]) == 0
    table = pq.read_table(out)
    assert table.schema.names == LINKS.names
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("http://b.example.co.uk/x?y=1", "example.co.uk", 1, 5),
        ("http://example.com/a", "example.com", 2, 7),
    ]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"3 submissions link to 2 pages: {out}"
    counts = {line.split()[0]: int(line.split()[1]) for line in printed[1:]}
    assert counts == {"low_score": 1, "no_link": 3, "adult_content": 1, "bad_row": 1, "bad_line": 1}
    first = out.read_bytes()
    assert main(["links", f"{tmp_path}/RS*", "--out", str(out), "--min-score", "3"]) == 0
    assert out.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RS_2015-01.zst", "links.parquet"]


def test_no_link_and_a_wrong_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "RS").write_bytes(json.dumps(submission(None)).encode())
    assert main(["links", f"{tmp_path}/RS", "--out", f"{tmp_path}/links.parquet"]) == 1
    assert main(["links", f"{tmp_path}/RS", "--out", f"{tmp_path}/none/links.parquet"]) == 2
    assert "Create the folder" in capsys.readouterr().err


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"needs the sample {SAMPLE}")
def test_real_submissions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["links", str(SAMPLE), "--out", f"{tmp_path}/links.parquet"]) == 0
    table = pq.read_table(tmp_path / "links.parquet")
    printed = capsys.readouterr().out.splitlines()
    linked, others = int(printed[0].split()[0].replace(",", "")), [line.split()[1] for line in printed[1:]]
    assert linked + sum(int(number.replace(",", "")) for number in others) == 5599
    assert sum(table["links"].to_pylist()) == linked > 1000
