"""A run on texts with planted personal data: no value is in any file but those of the raw tables, and rows balance."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from pipeline.report.page import write_report
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tables import TABLES
from tests.support.paths import ROOT
from tests.support.tiny_takedown import take_down

pytestmark = pytest.mark.spark

PLANTED = (
    "zyxwv.qponm@corp-example.com",
    "4539 1488 0343 6467",
    "GB29 NWBK 6016 1331 9268 19",
    "+49 30 901820",
    "9.8.7.65",
)
RAW = ("documents/", "text/")
"""Folders of the tables that hold raw text, as their schemas and the guide state."""
FILLER = (
    "The town council met in the old hall and spoke about the new bridge, its cost, and the time that the work will "
    "take. Several people asked for a smaller bridge, and others wanted none at all. The council will decide in the "
    "autumn, after a second report about the river and the roads on both of its sides has been read by everyone. "
)
RECIPE = """
[source]
paths = ["{paths}"]

[quality]
rules = []

[language]
languages = []
min_score = 0

[dedup]
near = false

[pii]
audit = true
max_share = 0.5

[tokenizer]
vocab_size = 450

[spark.settings]
"spark.eventLog.enabled" = "true"
"spark.eventLog.compress" = "false"
"spark.eventLog.dir" = "file:{events}"
"""


def texts(folder: Path) -> Path:
    """A JSONL file of 40 texts: some with each planted value, one that is mostly personal data."""
    path = folder / "texts.jsonl"
    rows = []
    for number in range(40):
        value = PLANTED[number % len(PLANTED)]
        text = f"{FILLER * 2}Page {number} of the report names {value} as its contact. {FILLER}{number * 7919}"
        row = {"text": text, "id": number, "by": value if number % 2 else "the editors"}
        # Values also stand in addresses, as their hosts, and in names of fields.
        value = value.replace(" ", "")
        host = value if value == "9.8.7.65" else f"site{number}.example.org"
        rows.append(row | {"url": f"http://{host}/{number}?of={value}", f"of {value}": 1})
    many = " ".join(f"person{number}.{PLANTED[0]}" for number in range(60))
    rows.append({"text": f"{FILLER}{many}", "id": 40})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def strings_in(path: Path) -> str:
    """All text of a file after decompression: its bytes, and the values of Parquet and Arrow files."""
    content = path.read_bytes()
    if content[:4] == b"PAR1":
        file = pq.ParquetFile(io.BytesIO(content))
        return f"{file.metadata.metadata} {file.read().to_pylist()}"
    if content[:6] == b"ARROW1":
        return str(ipc.open_file(pa.BufferReader(content)).read_all().to_pylist())
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if content[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            content = b"\n".join(archive.read(name) for name in archive.namelist())
    return content.decode("utf-8", "replace")


def leaks(folder: Path) -> dict[str, list[str]]:
    """The files below a folder that hold planted values, in any notation of them, with these values."""
    found: dict[str, list[str]] = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        content = strings_in(path)
        squeezed = content.replace(" ", "")
        own = [value for value in PLANTED if value in content or value.replace(" ", "") in squeezed]
        if own:
            found[path.relative_to(folder).as_posix()] = own
    return found


def rows_of(run: Store, table: str) -> list[dict[str, Any]]:
    folder, manifest = open_table(run, table)
    return [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with all tables, the audit table, a report and a log of JSON lines."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "events").mkdir()
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(paths=texts(folder), events=folder / "events"))
    words = [sys.executable, "-m", "jobs.cli", "run", str(recipe), "--out", "run", "--log-format", "json"]
    done = subprocess.run(
        words, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    (folder / "run" / "output.log").write_bytes(done.stdout + done.stderr)
    write_report(Store(str(folder / "run")), None)
    return folder / "run"


def test_no_planted_value_is_in_any_other_file(planted: Path) -> None:
    found = leaks(planted)
    assert {value for name, values in found.items() if name.startswith("text/") for value in values} == {*PLANTED}
    assert {name for name in found if not name.startswith(RAW)} == set()
    assert any((planted.parent / "events").rglob("*events_*")) or any((planted.parent / "events").iterdir())
    assert leaks(planted.parent / "events") == {}
    kinds = {path.suffix for path in planted.rglob("*") if path.is_file()}
    assert {".parquet", ".arrow", ".json", ".html", ".log"} <= kinds
    assert "raw text" in TABLES["text"].schema.metadata[b"privacy"].decode()


def test_the_search_finds_a_value_in_each_kind_of_file(tmp_path: Path) -> None:
    table = pa.table({"text": [f"a {PLANTED[0]} b"]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    with ipc.new_file(tmp_path / "b.arrow", table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(PLANTED[2].replace(" ", "").encode()))
    with zipfile.ZipFile(tmp_path / "d.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", PLANTED[4])
    (tmp_path / "e.html").write_text("none of them")
    assert leaks(tmp_path) == {
        "a.parquet": [PLANTED[0]], "b.arrow": [PLANTED[0]], "c.json.gz": [PLANTED[2]], "d.zip": [PLANTED[4]],
    }  # fmt: skip


def test_the_audit_table_agrees_with_the_clean_texts(planted: Path) -> None:
    run = Store(str(planted))
    clean = {row["doc_id"]: row for row in rows_of(run, "clean")}
    places = rows_of(run, "personal_data")
    counted: Counter[str] = Counter()
    for row in clean.values():
        if row["drop_stage"] is None:
            counted.update({entry["name"]: entry["value"] for entry in row["pii_counts"]})
    assert Counter(place["type"] for place in places) == counted
    assert {*counted} >= {"email", "credit_card", "iban", "phone", "ip"}
    for place in places:
        if place["column"] != "meta":
            shown = clean[place["doc_id"]][place["column"]][place["start"] : place["end"]]
            assert shown == f"<{place['type'].upper()}>"
    assert {place["column"] for place in places} == {"text", "url", "meta"}


def test_a_document_of_personal_data_is_dropped_and_counted(planted: Path) -> None:
    run = Store(str(planted))
    content = open_table(run, "clean")[1].content
    assert content.counts.dropped["pii/personal_data_share"] == 1
    assert content.counts.rows_in == content.counts.rows_kept + 1 == 41
    (row,) = (row for row in rows_of(run, "clean") if row["drop_stage"] is not None)
    assert (row["drop_stage"], row["drop_rule"], row["drop_limit"]) == ("pii", "personal_data_share", 0.5)
    assert 0.5 < row["drop_value"] < 1
    assert {row[name] for name in ("text", "title", "url", "meta", "num_chars")} == {None}
    figures = content.figures
    kept = [entry for own in rows_of(run, "clean") if own["drop_stage"] is None for entry in own["pii_counts"] or ()]
    assert row["pii_counts"]
    assert sum(figures["pii"].values()) == sum(entry["value"] for entry in kept)
    assert (
        sum(figures["pii_languages"].values()) == sum(figures["pii_sources"].values()) == sum(figures["pii"].values())
    )
    assert figures["pii_documents"] == {"web": 40}


def test_a_takedown_removes_the_places_of_the_document(planted: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(planted, copy)
    before, places = open_table(Store(str(copy)), "clean")[1].content, rows_of(Store(str(copy)), "personal_data")
    removed = places[0]["doc_id"]
    own = sum(place["doc_id"] == removed for place in places)
    assert take_down(copy, doc=[removed.hex()]) == 0
    run = Store(str(copy))
    assert rows_of(run, "personal_data") == [place for place in places if place["doc_id"] != removed]
    after = open_table(run, "clean")[1].content
    for figure in ("pii", "pii_languages", "pii_sources"):
        assert sum(after.figures[figure].values()) == sum(before.figures[figure].values()) - own
    assert after.figures["pii_documents"] == {"web": 39}
    counts = open_table(run, "personal_data")[1].content.counts
    assert (counts.rows_in, counts.rows_kept) == (len(places) - own, len(places) - own)
