"""Several extractors in a run: the same bytes at any partitioning, and tables that come and go."""

import pyarrow.parquet as pq
import pytest

from schemas.manifest import open_table, read_run
from schemas.storage import Store

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
