"""Parts and stored frames of other code: a bug that is fixed between a kill and the resume leaves no old row."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine import code_digest as digests
from pipeline.engine.code_digest import code_digest
from pipeline.engine.materialize import FrameStore
from pipeline.engine.part import (
    PartTarget,
    TableTarget,
    current_inputs,
    delete_incomplete_parts,
    made_from,
    part_results,
    write_part,
)
from pipeline.engine.step import StepContext
from schemas.config import build_recipe
from schemas.errors import ContractError
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.demo_run import RECIPE, SMALL
from tests.support.paths import ROOT

TABLE = pa.schema([pa.field("value", pa.int64())])


def write_value(folder: Store, value: int, code: str):
    """Write part 0 with one value, as a process with this code does."""

    def fill(output):
        output.write({"value": value})
        output.books.enter({}, 1)

    with mock.patch("pipeline.engine.part.code_digest", return_value=code):
        return write_part(PartTarget(0, {"table": TableTarget(folder, TABLE)}), fill)


def stored_value(folder: Store, result) -> int:
    return pq.read_table(folder.path(result.files["table"].path)).column("value")[0].as_py()


def test_a_part_of_the_same_code_is_kept_and_one_of_other_code_is_written_again(tmp_path: Path) -> None:
    folder = Store(str(tmp_path))
    first = write_value(folder, 1, "a")
    assert (first.code, first.redone) == ("a", False)
    assert write_value(folder, 2, "a") == first
    second = write_value(folder, 2, "b")
    assert (stored_value(folder, second), second.code, second.redone) == (2, "b", True)
    again = write_value(folder, 3, "b")
    assert (again.files, again.redone) == (second.files, False)
    (name,) = part_results(folder)
    assert folder.read_json(name)["code"] == "b"


def test_a_part_of_other_tables_is_written_again(tmp_path: Path) -> None:
    """As when a takedown has changed the tables that an interrupted step reads."""
    folder = Store(str(tmp_path))

    def write(value: int, inputs: str):
        with made_from(inputs):
            return write_value(folder, value, "a")

    first = write(1, "before")
    assert (first.inputs, write(2, "before")) == ("before", first)
    second = write(2, "after")
    assert (stored_value(folder, second), second.inputs, second.redone) == (2, "after", True)


def test_a_part_of_other_libraries_is_written_again(tmp_path: Path) -> None:
    folder = Store(str(tmp_path))
    with mock.patch("pipeline.engine.part.libraries_digest", return_value="older"):
        first = write_value(folder, 1, "a")
        assert write_value(folder, 2, "a") == first
    second = write_value(folder, 2, "a")
    assert (stored_value(folder, second), second.redone) == (2, True)


@pytest.mark.parametrize(
    "damaged", ["", "{", "[]", "{}", '{"files": 1, "counts": {}}', '{"files": {"table": {"rows": 1}}}']
)
def test_a_part_whose_result_is_damaged_is_written_again(tmp_path: Path, damaged: str) -> None:
    folder = Store(str(tmp_path))
    write_value(folder, 1, "a")
    folder.write_atomic("parts/part-00000.json", damaged.encode())
    again = write_value(folder, 2, "a")
    assert (stored_value(folder, again), again.redone) == (2, True)
    assert write_value(folder, 3, "a").files == again.files
    folder.write_atomic("parts/part-00000.json", damaged.encode())
    delete_incomplete_parts(folder)
    assert not [*folder.walk()]


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_part_without_its_files_is_written_again(tmp_path: Path, damage: str) -> None:
    """As when a worker outlives its driver and completes a part whose files `penstock gc` has just listed."""
    folder = Store(str(tmp_path))
    path = Path(folder.path(write_value(folder, 1, "a").files["table"].path))
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1])
    again = write_value(folder, 2, "a")
    assert (stored_value(folder, again), again.redone) == (2, True)


def test_a_takedown_starts_again_from_parts_of_other_code(tmp_path: Path) -> None:
    folder = Store(str(tmp_path))
    kept = write_value(folder, 1, code_digest())
    delete_incomplete_parts(folder)
    assert {*folder.walk()} == {"parts/part-00000.json", kept.files["table"].path}
    write_value(folder, 1, "b")
    folder.write_atomic("parts/part-00000.json.0123abcd.partial", b"{")
    delete_incomplete_parts(folder)
    assert not [*folder.walk()]


def test_the_digest_of_libraries_follows_each_version_also_below_others() -> None:
    needs = {
        "penstock": ["numpy>=2", 'trafilatura>=2; extra == "data"', 'ruff; extra == "dev"'],
        "trafilatura": ["lxml>=5", "brotli; extra == 'all'", 'win; sys_platform == "win32"'],
    }
    versions = {"numpy": "2", "trafilatura": "2", "lxml": "5", "ruff": "1", "brotli": "1"}

    def installed(name: str) -> str:
        if name not in versions:
            raise digests.PackageNotFoundError(name)
        return versions[name]

    def digest() -> str:
        digests.libraries_digest.cache_clear()
        return digests.libraries_digest()

    try:
        with (
            mock.patch.object(digests, "requires", lambda name: needs.get(name)),
            mock.patch.object(digests, "version", installed),
        ):
            first = digest()
            for name in versions:
                with mock.patch.dict(versions, {name: "9"}):
                    assert (digest() != first) == (name not in ("ruff", "brotli")), name
            assert digest() == first
    finally:
        digests.libraries_digest.cache_clear()
    assert {"pyarrow", "regex"} <= {*digests._needed("penstock", digests.EXTRAS)}


def test_the_digest_follows_each_source_file(tmp_path: Path) -> None:
    def digest_in(folder: Path) -> str:
        code_digest.cache_clear()
        with mock.patch.object(digests, "files", lambda package: folder / package):
            return code_digest()

    for package in digests.PACKAGES:
        (tmp_path / package / "room").mkdir(parents=True)
        (tmp_path / package / "room" / "code.py").write_text("x = 1\n")
    try:
        before = digest_in(tmp_path)
        assert digest_in(tmp_path) == before
        (tmp_path / "pipeline" / "room" / "code.pyc").write_text("not a source")
        assert digest_in(tmp_path) == before
        seen = {before}
        names = ("room/code.py", "words.toml", "table.json", "room/module.cpp", "room/part.h")
        for name in ("schemas/room/code.py", *(f"pipeline/{name}" for name in names)):
            (tmp_path / name).write_text("x = 2\n")
            seen.add(digest_in(tmp_path))
        (tmp_path / "pipeline" / "words.toml").rename(tmp_path / "pipeline" / "other.toml")
        seen.add(digest_in(tmp_path))
        assert len(seen) == 8
    finally:
        code_digest.cache_clear()


@pytest.mark.spark
def test_a_stored_frame_of_other_code_is_computed_again(spark, tmp_path: Path) -> None:
    def keep(rows: int, code: str) -> int:
        with mock.patch("pipeline.engine.materialize.code_digest", return_value=code):
            return FrameStore(spark, Store(str(tmp_path))).keep("rows", spark.range(rows)).rows

    assert [keep(3, "a"), keep(4, "a"), keep(4, "b"), keep(5, "b")] == [3, 3, 4, 4]


@pytest.mark.spark
def test_a_stored_frame_of_other_libraries_or_whose_list_is_damaged_is_computed_again(spark, tmp_path: Path) -> None:
    folder = Store(str(tmp_path))

    def keep(rows: int, libraries: str) -> int:
        with mock.patch("pipeline.engine.materialize.libraries_digest", return_value=libraries):
            return FrameStore(spark, folder).keep("rows", spark.range(rows)).rows

    assert [keep(3, "a"), keep(4, "a"), keep(4, "b")] == [3, 3, 4]
    for rows, damaged in enumerate((b"", b"[]", b"{}"), start=5):
        folder.write_atomic("rows.json", damaged)
        assert keep(rows, "b") == rows


@pytest.mark.spark
def test_a_stored_frame_of_other_tables_is_computed_again(spark, tmp_path: Path) -> None:
    def keep(rows: int, inputs: str) -> int:
        with made_from(inputs):
            return FrameStore(spark, Store(str(tmp_path))).keep("rows", spark.range(rows)).rows

    assert [keep(3, "before"), keep(4, "before"), keep(4, "after")] == [3, 3, 4]


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["tasks", "partitions"])
def test_tasks_know_the_tables_that_their_parts_are_made_from(spark, tmp_path: Path, kind: str) -> None:
    from pipeline.engine.spark import run_partitions, run_tasks

    def answer(*task: object) -> dict[str, str]:
        return {"inputs": current_inputs()}

    with made_from("these"):
        if kind == "tasks":
            answers = run_tasks(spark, answer, [1, 2], "write", None)
        else:
            answers = run_partitions(spark.range(0, 2, 1, 2), answer)
    assert answers == [{"inputs": "these"}] * 2
    assert current_inputs() == ""


@pytest.mark.spark
def test_workers_with_other_code_than_the_driver_are_refused(spark, tmp_path: Path) -> None:
    from pipeline.engine.spark import run_parts

    result = write_value(Store(str(tmp_path)), 1, "other code")
    context = StepContext(spark, build_recipe({}, {}, "test"), (), {}, {}, (), {}, None)
    with pytest.raises(ContractError, match=r"expected workers with the code of the driver \(\w{16}\), got other code"):
        run_parts(context, lambda task, retried: result, [1], "write")


BUG = ("column.append(row.get(name))", 'column.append("OLD" if name == "title" else row.get(name))')
"""A line of the part writer, and the same line with a bug that sets each title."""


def titles(run: Path) -> list[str | None]:
    folder, manifest = open_table(Store(str(run)), "text")
    paths = (folder.path(path) for path in manifest.paths_of())
    return [title for path in paths for title in pq.read_table(path).column("title").to_pylist()]


@pytest.mark.spark
@pytest.mark.slow
def test_a_bug_that_is_fixed_between_kill_and_resume_leaves_no_old_row(run_at, crawl: Path, tmp_path: Path) -> None:
    for package in ("schemas", "pipeline", "jobs", "train", "penstock"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    writer = tmp_path / "pipeline" / "engine" / "parquet.py"
    fixed = writer.read_text()
    assert fixed.count(BUG[0]) == 1
    settings = [f'source.paths=["{crawl}/*.warc.gz"]', *SMALL, "spark.partitions=1"]
    flags = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "jobs.cli", "stage", "documents", str(RECIPE), "--out", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def killed(parts: int) -> set[str]:
        process = subprocess.Popen([*command, *flags], cwd=tmp_path, env=environment)
        end = time.monotonic() + 300
        while len(done := [*tmp_path.glob("run/finished_parts/documents/*.json")]) < parts:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        process.kill()
        process.wait(60)
        return {path.read_text() for path in done}

    writer.write_text(fixed.replace(*BUG))
    old = killed(1)
    assert old
    writer.write_text(fixed)
    done = subprocess.run(
        [*command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "completed part(s) of other code or inputs were written again, so that no table mixes them" in done.stderr
    found = titles(tmp_path / "run")
    assert len(found) > 200
    assert "OLD" not in found
    expected = run_at(1, until="documents")
    for table in ("documents", "text"):
        manifest = open_table(expected, table)[1]
        assert open_table(Store(str(tmp_path / "run")), table)[1].digest == manifest.digest
        assert manifest.run.notes["code"] == code_digest()
