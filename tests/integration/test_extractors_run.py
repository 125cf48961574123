"""Several extractors in a run: the same bytes at any partitioning, tables that come and go, and takedowns."""

import io
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.engine.parquet import open_parquet, write_group
from pipeline.takedown.certificate import check_certificate
from pipeline.takedown.tables import plain_schema
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from tests.support.tiny_takedown import certificates, forge, take_down

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SETTINGS = [
    'extract.union=["penstock","trafilatura","all"]',
    "extract.compare=trafilatura",
    "extract.compare_share=0.2",
    "quality.min_words=120",
]


def rows(run: Store, table: str) -> list[dict]:
    folder, manifest = open_table(run, table)
    return [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]


@pytest.fixture(scope="module")
def runs(run_at) -> dict[int, Store]:
    """The first step of the demo run at one partition and at three."""
    return {partitions: run_at(partitions, SETTINGS, until="documents") for partitions in (1, 3)}


def test_the_same_tables_at_any_partitioning(runs: dict[int, Store]) -> None:
    for table in ("documents", "text", "comparisons"):
        first, second = (open_table(run, table)[1].digest for run in runs.values())
        assert first == second


def test_counts_agree_with_the_rows(runs: dict[int, Store]) -> None:
    run = runs[3]
    manifest = open_table(run, "documents")[1]
    figures, cpu = manifest.content.figures, manifest.run.notes["cpu"]
    documents = rows(run, "documents")
    assert sum(figures["second_opinions"].values()) > 0
    assert figures["union_tried"]["trafilatura"] >= figures["union_tried"]["all"] > 0
    taken = sum(row["extracted_by"] == "all" for row in documents)
    assert figures["union_taken"].get("all", 0) == taken
    assert {"extract", "union", "compare penstock", "compare trafilatura"} <= {*cpu}
    compared = rows(run, "comparisons")
    assert len(compared) == sum(figures["compared_f1"].values()) == cpu["compare trafilatura"]["rows"]
    assert {row["doc_id"] for row in compared} <= {row["doc_id"] for row in documents}


def test_a_recipe_without_them_has_no_comparisons_and_other_documents(run_at, runs: dict[int, Store]) -> None:
    run = runs[1]
    before = read_run(run).tables
    again = run_at(1, SETTINGS[:1], run.root, until="documents")
    tables = read_run(again).tables
    assert "comparisons" in before
    assert "comparisons" not in tables
    assert tables["documents"] != before["documents"]
    # A takedown deletes the texts of the table that is no longer made.
    folder = Path(again.root)
    assert list((folder / "comparisons").rglob("part-*"))
    gone = next(row["doc_id"] for row in rows(again, "documents") if row["drop_stage"] is None)
    assert take_down(folder, doc=[gone.hex()]) == 0
    assert [path for path in (folder / "comparisons").rglob("*") if path.is_file()] == []
    path = folder / "comparisons" / before["comparisons"] / "part-00000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"left")
    (problem,) = check_certificate(again, certificates(folder)[0]).problems
    assert "expected no old file, got one of no current version" in problem


def test_a_takedown_removes_the_compared_texts(runs: dict[int, Store], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[3].root, folder)
    run = Store(str(folder))
    before = {row["doc_id"]: row for row in rows(run, "comparisons")}
    documents = {row["doc_id"] for row in rows(run, "documents") if row["drop_stage"] is None}
    gone = max(before.keys() & documents, key=lambda one: len(before[one]["second_text"]))
    assert take_down(folder, doc=[gone.hex()]) == 0
    assert {row["doc_id"]: row for row in rows(run, "comparisons")} == {
        one: row for one, row in before.items() if one != gone
    }
    counts = open_table(run, "comparisons")[1].content.counts
    assert (counts.rows_in, counts.rows_kept) == (len(before) - 1, len(before) - 1)
    (certificate,) = certificates(folder)
    assert certificate.tables["comparisons"].rows == 1
    (version,) = (path.name for path in (folder / "comparisons").iterdir() if list(path.glob("manifest.json")))
    assert version == read_run(run).tables["comparisons"] == certificate.tables["comparisons"].version_after
    result = check_certificate(run, certificate)
    assert result.problems == []
    sizes = [len(row[name].encode()) for row in rows(run, "comparisons") for name in ("first_text", "second_text")]
    assert result.text_bytes > sum(sizes) > 0

    def with_the_text(data: bytes) -> bytes:
        """Return a part in which another document has the texts of the removed one."""
        table = pq.read_table(io.BytesIO(data))
        for name in ("first_text", "second_text"):
            texts = [before[gone][name], *table.column(name).to_pylist()[1:]]
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(texts))
        sink = io.BytesIO()
        with open_parquet(sink, plain_schema(pq.ParquetFile(io.BytesIO(data)).schema_arrow)) as writer:
            write_group(writer, table.cast(plain_schema(table.schema)))
        return sink.getvalue()

    key = next(file.key for file in certificate.tables["comparisons"].rewritten)
    forge(folder, key, with_the_text, "comparisons")
    found = check_certificate(run, certificates(folder)[0]).shared
    assert {place for _, place, _ in found} >= {"comparisons.first_text", "comparisons.second_text"}
