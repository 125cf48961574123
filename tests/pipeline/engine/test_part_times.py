"""How long parts took: a file for each step, its distribution in the report, and damaged files."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine.parquet import WrittenFile
from pipeline.engine.part import WrittenPart
from pipeline.engine.part_times import FOLDER, PART_TIMES, StepTimes, read_step_times, write_part_times
from pipeline.report.page import write_report
from schemas.errors import ContractError
from schemas.manifest import open_table
from schemas.storage import Store

WALL = (1.0, 2.0, 3.0, 30.0)


def a_part(number: int, wall: float, source: str = "") -> WrittenPart:
    key = f"part-{number:05}"
    files = {name: WrittenFile(key, f"{key}.parquet", 10, 100, "0" * 64) for name in ("documents", "text")}
    sources = [{"name": source, "bytes": 7, "sha256": "0" * 64}] if source else []
    work = {"rows": 10, "kept": 5, "wall_seconds": wall, "cpu_seconds": 0.5, "requests": 3, "waited_seconds": number}
    return WrittenPart(files, sources, work)


@pytest.fixture
def run(tmp_path: Path) -> Store:
    run = Store(str(tmp_path / "run"))
    write_part_times(run, "documents", [a_part(at, wall, f"{at}.warc.gz") for at, wall in enumerate(WALL)])
    write_part_times(run, "clean", [a_part(0, 0.0)])
    write_part_times(run, "tokens", [])
    return run


def test_each_part_has_a_row(run: Store) -> None:
    assert sorted(run.child(FOLDER).names()) == ["clean.parquet", "documents.parquet"]
    table = pq.read_table(Path(run.root) / FOLDER / "documents.parquet")
    assert table.schema.equals(PART_TIMES)
    assert table.to_pylist()[3] == {
        "part": "part-00003",
        "input": "3.warc.gz",
        "rows": 10,
        "kept": 5,
        "written_bytes": 200,
        "wall_seconds": 30.0,
        "cpu_seconds": 0.5,
        "requests": 3,
        "waited_seconds": 3,
    }


def test_the_distribution_of_a_step(run: Store) -> None:
    documents, clean = read_step_times(run, ["documents", "dedup", "clean"])
    assert documents == StepTimes("documents", 4, 2.5, pytest.approx(25.95), 30.0, "3.warc.gz", 40 / 36, 6)
    assert (clean.slowest, clean.longest) == ("part-00000", 0.0)


@pytest.mark.parametrize("damage", ["cut", "columns", "empty", "nulls"])
def test_a_damaged_file_is_named(run: Store, damage: str) -> None:
    path = Path(run.root) / FOLDER / "clean.parquet"
    rows = pa.Table.from_pylist([{}] if damage == "nulls" else [], PART_TIMES)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        pq.write_table(rows if damage != "columns" else pa.table({"part": ["a"]}), path)
    with pytest.raises(ContractError, match=r"part_times/clean.parquet: expected the times of parts, got .* Delete"):
        read_step_times(run, ["clean"])


@pytest.mark.spark
def test_a_run_has_the_times_of_all_its_parts(finished: Store, tmp_path: Path) -> None:
    for name in ("documents", "verdicts", "clusters", "dedup", "clean"):
        rows = pq.read_table(Path(finished.root) / FOLDER / f"{name}.parquet").to_pylist()
        content = open_table(finished, name)[1].content
        assert [row["part"] for row in rows] == [file.key for file in content.files]
        assert sum(row["rows"] for row in rows) == content.counts.rows_in
        assert sum(row["kept"] for row in rows) == content.counts.rows_kept
    inputs = [entry.name for entry in open_table(finished, "documents")[1].content.inputs]
    documents = pq.read_table(Path(finished.root) / FOLDER / "documents.parquet").to_pylist()
    assert [row["input"] for row in documents] == inputs
    assert all(row["wall_seconds"] > 0 for row in documents)
    copy = Store(str(shutil.copytree(finished.root, tmp_path / "copy")))
    page = Path(write_report(copy, None)).read_text()
    slowest = max(documents, key=lambda row: row["wall_seconds"])["input"]
    assert slowest in page.partition("<h3>Parts</h3>")[2].partition("</table>")[0]
