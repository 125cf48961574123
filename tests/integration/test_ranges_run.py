"""Large files that are read in ranges: the run has the rows, verdicts and tokens of the run that reads each at once."""

import gzip
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import zstandard

from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline.engine.part import PARTS
from pipeline.forecast import Prices, describe_run, plan_steps
from pipeline.inspect.diff import compare_runs, open_compared_run
from pipeline.prepare import Prepared, prepare
from pipeline.run import run_steps
from pipeline.sources import config
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import refetch
from pipeline.steps import documents, file_ranges
from schemas.entries import to_mapping
from schemas.errors import ContractError
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.corpus_pages import paragraphs
from tests.support.paths import ROOT
from tests.support.tiny_archive import record
from tests.support.tiny_takedown import certificates, opened, take_down
from train.trace.documents import DetailReader

pytestmark = pytest.mark.spark
PART_BYTES = 60_000
TABLES = ("documents", "text", "verdicts", "clusters", "dedup", "clean")
ORDERED = {"clusters": ("doc_id",)}
"""Columns that are compared of tables whose others depend on the number of the part."""


def page_of(number: int) -> bytes:
    # every ninth page has the text of the one before
    body = "".join(f"<p>{text}</p>" for text in paragraphs(str(number - (number % 9 == 8)), 5))
    html = f"<html lang='en'><head><title>Page {number}</title></head><body><article>{body}</article></body></html>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    return record(head + html.encode(), WARC_Target_URI=f"https://site{number % 7}.example.org/{number}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    members = [gzip.compress(page_of(number), mtime=0) for number in range(220)]
    members[100] = members[100][:300]  # damage in the middle
    (folder / "a.warc.gz").write_bytes(b"".join(members))
    rows = [
        json.dumps({"url": f"https://rows.example.org/{n}", "text": "\n".join(paragraphs(f"row {n}"))})
        for n in range(300)
    ]
    (folder / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress("\n".join(rows).encode()))
    (folder / "c.jsonl").write_text("\n".join(rows[:3]))
    return folder


@contextmanager
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "MIN_PART_BYTES", 1)
        yield


def prepared(files: Path, part_bytes: int, until: str) -> Prepared:
    changes = ["language.min_score=0", "quality.rules=[]", "tokenizer.vocab_size=1500"]
    changes += [f'source.paths=["{files}/*"]', f"source.part_bytes={part_bytes}"]
    return prepare(read_recipe(str(ROOT / "jobs/recipes/demo.toml"), changes), until)


@pytest.fixture(scope="module")
def runs(spark: Any, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Store]]:
    """The run in ranges, and the run that reads each file as a whole."""
    with small_parts():
        found = []
        for part_bytes in (PART_BYTES, 0):
            store = Store(str(tmp_path_factory.mktemp("run")))
            run_steps(spark, prepared(files, part_bytes, "tokens"), store, 2)
            found.append(store)
        yield found[0], found[1]


def rows_of(run: Store, table: str) -> Counter[str]:
    folder, manifest = open_table(run, table)
    rows = [row for path in manifest.paths.values() for row in pq.read_table(folder.path(path)).to_pylist()]
    names = ORDERED.get(table)
    return Counter(repr(sorted((k, v) for k, v in row.items() if names is None or k in names)) for row in rows)


@pytest.mark.parametrize("table", TABLES)
def test_the_rows_are_the_same(runs: tuple[Store, Store], table: str) -> None:
    ranges, whole = (rows_of(run, table) for run in runs)
    assert ranges == whole
    assert ranges.total() > 200


def test_the_counts_and_tokens_are_the_same(runs: tuple[Store, Store]) -> None:
    ranges, whole = (open_table(run, "documents")[1].content for run in runs)
    assert ranges.counts == whole.counts
    assert ranges.figures == whole.figures
    assert ranges.counts.dropped["source/bad_gzip"] + ranges.counts.dropped["source/truncated_record"] == 1
    ranges, whole = (open_table(run, "tokens")[1].content for run in runs)
    assert ranges.counts == whole.counts
    assert ranges.figures == whole.figures


def test_the_manifest_lists_the_ranges(runs: tuple[Store, Store], files: Path) -> None:
    manifest = open_table(runs[0], "documents")[1]
    archive, lines, small = manifest.content.inputs
    assert archive.bytes == (files / "a.warc.gz").stat().st_size
    assert archive.ranges is not None
    assert lines.num_parts > 1
    assert small.ranges is None
    first, second, third = manifest.parts_of_inputs.values()
    assert (first.start, second.start, third.start) == (0, archive.num_parts, archive.num_parts + lines.num_parts)
    assert third.stop == len(manifest.content.files)
    assert len(first) > 3
    data, end = (files / "a.warc.gz").read_bytes(), 0
    for own in archive.ranges:
        assert own.begin == end
        end = own.begin + own.bytes
        assert own.sha256 == hashlib.sha256(data[own.begin : end]).hexdigest()
    assert end == len(data)
    inputs = open_table(runs[1], "documents")[1].content.inputs
    assert [(entry.ranges, entry.part) for entry in inputs] == [(None, None)] * 3


def test_runs_are_compared_file_by_file(runs: tuple[Store, Store]) -> None:
    difference = compare_runs(open_compared_run(runs[0]), open_compared_run(runs[1]), 3)
    assert not difference.documents
    assert not any(side.names for side in difference.unshared)
    assert difference.kept[0] == difference.kept[1] > 0


def test_a_document_is_found_in_its_range_and_read_again(runs: tuple[Store, Store], files: Path) -> None:
    details = DetailReader(opened(runs[0].root))
    splits = {split.name: split for split in prepared(files, 0, "documents").splits}
    folder, manifest = open_table(runs[0], "documents")
    for path in manifest.paths.values():
        rows = [row for row in pq.read_table(folder.path(path)).to_pylist() if row["drop_stage"] is None]
        for row in [*rows[:1], *rows[-1:]]:
            recorded = details.record(row["split"], row["offset"], row["doc_id"].hex())
            entries = {name: to_mapping(row[name]) for name, value in recorded.items() if isinstance(value, dict)}
            assert recorded == {name: row[name] for name in recorded} | entries
            assert recorded["doc_id"] == row["doc_id"]
            assert refetch(splits[row["split"]], recorded, SourceConfig(paths=("x",))).changes == ()


def test_a_damaged_part_is_repaired(runs: tuple[Store, Store], capsys: Any) -> None:
    folder, manifest = open_table(runs[0], "documents")
    path = Path(folder.path(manifest.paths["part-00002"]))
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with small_parts():
        main(["repair", runs[0].root])
    assert path.read_bytes() == content
    assert "part-00002" in capsys.readouterr().out


def test_a_run_that_failed_does_not_read_the_file_again(
    spark: Any, files: Path, runs: tuple[Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    with small_parts():
        run = prepared(files, PART_BYTES, "documents")
        build, found = documents.run_parts, file_ranges.run_tasks

        def fail(context: Any, function: Any, tasks: Any, *rest: Any) -> Any:
            build(context, function, tasks[:3], *rest)
            raise KeyboardInterrupt

        monkeypatch.setattr(documents, "run_parts", fail)
        with pytest.raises(KeyboardInterrupt):
            run_steps(spark, run, store, 2)
        assert "3 of 9 parts are written" in plan_steps(run, store)[0].state
        monkeypatch.setattr(documents, "run_parts", build)
        answers = []
        monkeypatch.setattr(file_ranges, "run_tasks", lambda *rest: answers.extend(found(*rest)) or answers)
        run_steps(spark, run, store, 2)
    assert [answer.get("resumed") for answer in answers] == [True, True]
    assert open_table(store, "documents")[1].digest == open_table(runs[0], "documents")[1].digest
    assert not [name for name in Store(str(tmp_path)).walk() if "scratch" in name or f"/{PARTS}/" in name]


def test_a_file_that_changes_ends_the_run(spark: Any, files: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    copy = tmp_path / "in" / "b.jsonl.zst"
    copy.write_bytes((files / "b.jsonl.zst").read_bytes())
    with small_parts():
        run = prepared(tmp_path / "in", PART_BYTES, "documents")
        os.utime(copy, (1, 1))
        with pytest.raises(ContractError, match="while its ranges are read"):
            run_steps(spark, run, Store(str(tmp_path / "run")), 2)


def test_the_dry_run_names_the_ranges(files: Path, runs: tuple[Store, Store]) -> None:
    with small_parts():
        text = describe_run(prepared(files, PART_BYTES, "documents"), runs[1], None, Prices(1.0, 1.0))
    assert "source.part_bytes: 2 large file(s) are read in other ranges, or as a whole" in text
    assert "3 file(s)" in text
    assert "; 2 large file(s) are read in " in text


def test_a_takedown_removes_a_document_of_a_range(runs: tuple[Store, Store], tmp_path: Path) -> None:
    copy = Store(str(shutil.copytree(runs[0].root, tmp_path / "copy")))
    folder, manifest = open_table(copy, "clean")
    row = pq.read_table(folder.path(manifest.paths["part-00002"])).to_pylist()[-1]
    assert take_down(copy.root, doc=[row["doc_id"].hex()]) == 0
    (certificate,) = certificates(Path(copy.root))
    assert take_down(copy.root, check=f"takedowns/{certificate.id}.json") == 0
    for table in ("verdicts", "dedup", "clean"):
        folder, manifest = open_table(copy, table)
        ids = [pq.read_table(folder.path(path)).column("doc_id").to_pylist() for path in manifest.paths.values()]
        assert row["doc_id"] not in [one for own in ids for one in own]
