"""Rows of registered tables as their readers return them, and of the same files by pyarrow."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.manifest import open_table
from schemas.storage import Store

Rows = list[str]
OLDER_RUN = Path(__file__).parents[1] / "fixtures" / "runs" / "0.1.0"
TABLES = ("documents", "text", "verdicts", "clusters", "dedup", "audit", "clean")
"""The Parquet tables of that run, and of the synthetic one."""


def rows_of_files(run: Store, table: str) -> Rows:
    """The rows of the files that the manifest names, sorted."""
    folder, manifest = open_table(run, table)
    found = [pq.read_table(folder.path(path), filesystem=folder.fs) for path in manifest.paths.values()]
    return comparable(pa.concat_tables(found).to_pylist())


def rows_of_delta(run: Store, table: str, options: dict[str, str] | None = None) -> Rows:
    """The rows of the Delta table of a run, sorted; the test is skipped without its reader."""
    reader = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'penstock[register]'")
    found = reader.DeltaTable(run.child(table).uri, storage_options=options)
    return comparable(pa.table(found.to_pyarrow_table()).to_pylist())


def iceberg_table(folder: Store, table: str, properties: dict[str, str] | None = None) -> Any:
    """The Iceberg table in a folder, by pyiceberg; the test is skipped without it."""
    reader = pytest.importorskip(
        "pyiceberg.table", reason="pyiceberg is not installed: pip install 'penstock[register]'"
    )
    return reader.StaticTable.from_metadata(folder.child(table).uri, properties or {})


def rows_of_iceberg(folder: Store, table: str, properties: dict[str, str] | None = None) -> Rows:
    """The rows of the Iceberg table in a folder, sorted."""
    return comparable(iceberg_table(folder, table, properties).scan().to_arrow().to_pylist())


def without_null_lists(rows: Rows) -> Rows:
    """Rows as pyiceberg returns them: it reads an absent list of entries as an empty list."""
    return sorted(row.replace("None", "[]") for row in rows)


def comparable(rows: list[dict[str, Any]]) -> Rows:
    """Rows in an order that does not depend on the order of files."""
    return sorted(map(repr, rows))
