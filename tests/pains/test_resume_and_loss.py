"""Pains of lost work and lost data: full disks, interrupted tasks, damaged inputs, and results that are not there."""

import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from pipeline.engine.failures import FAILURE
from pipeline.engine.stage import PerDocument
from pipeline.engine.worker import FusedStages
from schemas.config import Section, build_recipe
from schemas.errors import ContractError, PenstockError
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from tests.support.tiny_archive import record
from tests.support.tiny_dataset import flip_byte

CUT, EMPTY = "part-cut.warc.gz", "part-empty.warc.gz"


@pytest.fixture(scope="module")
def odd(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three archives: one of the crawl, one that was cut off in the middle of a record, and one without a page."""
    folder = tmp_path_factory.mktemp("odd")
    first, second = sorted(crawl.glob("*.warc.gz"))[:2]
    shutil.copy(first, folder / first.name)
    data = second.read_bytes()
    (folder / CUT).write_bytes(data[: 2 * len(data) // 3])
    info = record(b"software: none\r\n", kind="warcinfo", Content_Type="application/warc-fields")
    (folder / EMPTY).write_bytes(gzip.compress(info, mtime=0))
    return folder


@pytest.fixture(scope="module")
def paths(odd: Path) -> list[str]:
    return [f'source.paths=["{odd}/*.warc.gz"]']


@pytest.fixture(scope="module")
def odd_run(run_at, paths: list[str]) -> Store:
    """A run over the three archives, up to deduplication."""
    return run_at(2, paths, until="dedup")


def rows_of(run: Store, table: str, *columns: str) -> list[dict]:
    folder, manifest = open_table(run, table)
    paths = [folder.path(path) for path in manifest.paths_of("part-")]
    return [row for path in paths for row in pq.read_table(path, columns=list(columns) or None).to_pylist()]


@pytest.mark.spark
def test_a_damaged_input_costs_its_own_bytes_only(odd_run: Store, odd: Path) -> None:
    """Data-Juicer: if a small part of a data set failed, the whole stage failed, and everything ran again.

    https://github.com/datajuicer/data-juicer/pull/748

    The records before the damage are read, all other files too, and the lost bytes are rows with a reason.
    """
    rows = rows_of(odd_run, "documents", "split", "length", "record_type", "drop_rule")
    covered: dict[str, int] = {}
    for row in rows:
        covered[row["split"]] = covered.get(row["split"], 0) + row["length"]
    assert covered == {path.name: path.stat().st_size for path in odd.iterdir()}
    cut = [row for row in rows if row["split"] == CUT]
    assert sum(row["drop_rule"] is None for row in cut) > 5
    gaps = [row for row in cut if row["record_type"] == "gap"] or [cut[-1]]
    assert gaps[-1]["drop_rule"] is not None
    assert sum(row["split"] not in (CUT, EMPTY) and row["drop_rule"] is None for row in rows) > 5


@pytest.mark.spark
def test_an_input_without_documents_does_not_end_deduplication(odd_run: Store) -> None:
    """datatrove: the index of MinHash failed with StopIteration if a file of signatures was empty.

    https://github.com/huggingface/datatrove/issues/333

    A file without a document has a part in each table, with no rows.
    """
    for table in ("documents", "clusters", "dedup"):
        files = open_table(odd_run, table)[1].content.files
        assert len(files) == 3
    splits = {row["doc_id"]: row["split"] for row in rows_of(odd_run, "documents", "doc_id", "split")}
    deduplicated = [splits[row["doc_id"]] for row in rows_of(odd_run, "dedup", "doc_id")]
    assert len(deduplicated) > 10
    assert EMPTY not in deduplicated


@pytest.fixture(scope="module")
def interrupted(run_at, paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped when two of its three parts were complete."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with mock.patch("pipeline.run.commit", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run_at(2, paths, folder=folder, until="documents")
    (second,) = (path for path, result in results_of(folder).items() if part_of(result) == "part-00001")
    second.unlink()
    return folder


def results_of(folder: Path) -> dict[Path, Any]:
    """Return the results of the complete parts of `documents`, by file."""
    return {path: json.loads(path.read_bytes()) for path in folder.glob("finished_parts/documents/*.json")}


def part_of(result: Any) -> str:
    return str(result["files"]["documents"]["key"])


def written(folder: Path) -> dict[str, set[str]]:
    """Return the files of each part: those of complete parts of a stopped run, or those of the manifest."""
    store = Store(str(folder))
    (version,) = (folder / "documents").glob("v-*")
    if (version / "manifest.json").exists():
        paths = open_table(store, "documents")[1].run.paths
        return {key: {path} for key, path in paths.items()}
    results = results_of(folder).values()
    return {part_of(result): {result["files"]["documents"]["path"].partition("/")[2]} for result in results}


@pytest.mark.spark
def test_an_interrupted_run_repeats_its_unfinished_parts_only(
    interrupted: Path, run_at, paths: list[str], odd_run: Store, tmp_path: Path
) -> None:
    """datatrove: a server stopped after 6,000 of 10,000 tasks, and its user asked whether the rest could be done alone.

    https://github.com/huggingface/datatrove/issues/220

    The same command writes the missing part. The others keep their files, and the table has the bytes of a whole run.
    """
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    before = written(folder)
    assert set(before) == {"part-00000", "part-00002"}
    run = run_at(2, paths, folder=folder, until="documents")
    after = written(folder)
    assert {name: after[name] for name in before} == before
    assert set(after) == {*before, "part-00001"}
    assert open_table(run, "documents")[1].digest == open_table(odd_run, "documents")[1].digest


@pytest.mark.spark
def test_a_resume_at_another_number_of_partitions_keeps_what_is_complete(
    interrupted: Path, run_at, paths: list[str], odd_run: Store, tmp_path: Path
) -> None:
    """Data-Juicer: a resumed job was cut into partitions with other rows than before, so all checkpoints were deleted.

    https://github.com/datajuicer/data-juicer/issues/1030

    A part belongs to an input file, and not to a partition. With more of them, complete parts stay, and bytes are
    equal.
    """
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    before = written(folder)
    run = run_at(5, paths, folder=folder, until="documents")
    assert {name: files for name, files in written(folder).items() if name in before} == before
    assert open_table(run, "documents")[1].digest == open_table(odd_run, "documents")[1].digest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for little."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.spark
@pytest.mark.slow
def test_a_full_disk_ends_the_step_that_it_stops(small_disk: Path, run_at, paths: list[str], odd_run: Store) -> None:
    """datatrove: a worker ran out of disk in the first stage of MinHash and failed silently. The second stage then
    stopped at corrupt files.

    https://github.com/huggingface/datatrove/issues/157

    The step that meets the full disk ends with that reason, and no table. With room, the same command completes it.
    """
    folder = small_disk / "run"
    with pytest.raises(PenstockError, match="expected writable storage, got an error: the disk is full"):
        run_at(2, paths, folder=folder, until="verdicts")
    assert not [*folder.glob("*/v-*/manifest.json")]
    assert not (folder / "verdicts").exists()
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    run = run_at(2, paths, folder=folder, until="documents")
    assert open_table(run, "documents")[1].digest == open_table(odd_run, "documents")[1].digest


@pytest.mark.spark
def test_a_run_that_keeps_nothing_is_an_error_with_reasons(finished: Store, run_at, tmp_path: Path) -> None:
    """datatrove: the example was shown as completed, and there was no result. The advice was to try more documents.

    https://github.com/huggingface/datatrove/issues/235

    A run that is to write tokens stops at the step that kept no document, and counts what was dropped by reason.
    """
    folder = tmp_path / "run"
    shutil.copytree(finished.root, folder)
    with pytest.raises(ContractError, match=r"verdicts: expected at least one document to be left, got none") as error:
        run_at(2, ["quality.min_words=1000000", "quality.max_words=2000000"], folder=folder)
    assert "gopher_short_doc" in str(error.value)
    assert read_run(Store(str(folder))).tables["tokens"] == read_run(finished).tables["tokens"]


def test_an_extractor_that_raises_loses_its_page_only() -> None:
    """datatrove: a user's extractor raised an error in its process, and the task waited for an answer for ever.

    https://github.com/huggingface/datatrove/issues/339

    A stage that raises drops the document with the reason `failed`. The error is counted by type and place, and the
    next document is read.
    """

    class Empty(Section):
        pass

    def extract(row: dict) -> None:
        if row["doc_id"] == bytes([2] * 16):
            raise ValueError("no text in this page")
        row["text"] = "a text"

    stage = PerDocument(
        name="own", version=1, config=Empty, reads=(), adds=("text",), reasons={}, make=lambda config, models: extract
    )
    fused = FusedStages((stage,), build_recipe({}, {"own": Empty}, "r"), {})
    rows = [fused({"doc_id": bytes([number] * 16)}) for number in (1, 2, 3)]
    assert [row.get("drop_rule") for row in rows] == [None, "failed", None]
    assert rows[1][FAILURE].kind.startswith("own: ValueError at test_resume_and_loss.py:")
    assert [row.get("text") for row in rows] == ["a text", None, "a text"]


@pytest.mark.spark
def test_a_damaged_part_is_refused_by_the_step_that_reads_it(finished: Store, run_at, tmp_path: Path) -> None:
    """datatrove: the second stage of MinHash failed on signature files whose size fitted no record. Nothing had been
    reported when they were written.

    https://github.com/huggingface/datatrove/issues/301

    A part with one flipped bit is refused by its name, before a row of it reaches another table.
    """
    folder = tmp_path / "run"
    shutil.copytree(finished.root, folder)
    part = sorted(folder.glob("text/v-*/part-00000*.parquet"))[0]
    flip_byte(part, part.stat().st_size // 3)
    tables = read_run(Store(str(folder))).tables
    with pytest.raises(ContractError, match=part.name):
        run_at(2, ["quality.min_words=45"], folder=folder, until="clean")
    assert read_run(Store(str(folder))).tables["clean"] == tables["clean"]
