"""Columns of tables of a run are read through `schemas/older_tables.py`, which fills those of an earlier version."""

import re

from tests.support.paths import ROOT

READ = re.compile(r"iter_batches\(|read_row_group\(|read_row_groups\(|read_table\(|\.read\(\[|file\.read\(\)")
PARQUET = "import pyarrow.parquet"
HOME = "schemas/older_tables.py"
OTHERS = {
    "pipeline/dedup/index.py": "the index of a snapshot, which has no older columns",
    "pipeline/dedup/key_ranges.py": "the index of a snapshot, too",
    "pipeline/engine/part_times.py": "a file that is no table, with columns of its own",
    "pipeline/export/shards.py": "all columns that a file has",
    "pipeline/fit/corpus.py": "files of a user",
    "pipeline/inspect/show.py": "all columns that a file has",
    "pipeline/links/evidence.py": "files of a user",
    "pipeline/links/table.py": "a table of links that is being written",
    "pipeline/rights/table.py": "a file of the step itself, which is no table",
    "pipeline/report/extraction.py": "all columns that a file has",
    "pipeline/report/judged.py": "the columns that a file has",
    "pipeline/browse/rows.py": "the rows of a page, which it fills itself",
    "pipeline/steps/scores.py": "a file of the step itself",
    "pipeline/takedown/certificate.py": "all columns that a file has",
    "pipeline/takedown/tables.py": "the columns of ids that a file has",
    "penstock/runs.py": "all columns that a file has",
    "train/eval/planted_documents.py": "document indexes of shards, which are no Parquet",
    "train/eval/score.py": "files of a user",
    "train/monitor/log_files.py": "metrics.parquet, which is no table",
    "train/trace/documents.py": "the columns that a file has",
}
"""Other files that read Parquet, and what they read."""


def test_columns_of_tables_are_read_in_one_place() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for room in ("schemas", "pipeline", "train", "penstock", "jobs")
        for path in (ROOT / room).rglob("*.py")
        if PARQUET in (text := path.read_text(encoding="utf-8")) and READ.search(text)
    }
    readers = {name for name in found if not name.startswith("pipeline/sources/")}
    assert readers == {HOME, *OTHERS}
