"""The tables of a run as DuckDB, Dask and Hugging Face `datasets` open them unchanged, against what pyarrow reads."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from schemas.manifest import open_table, read_run
from schemas.storage import Store

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Files:
    """Files of one table and one schema, in the order of the manifest."""

    table: str
    kind: str
    """`parquet` or `arrow`, as `datasets` calls them too."""
    paths: list[str]
    rows: int
    """As the manifest counts them."""

    def read(self) -> pa.Table:
        """What pyarrow reads."""
        if self.kind == "parquet":
            return pa.concat_tables(pq.ParquetFile(path).read() for path in self.paths)
        return pads.dataset(self.paths, format="ipc").to_table()


def files_of(run: Store) -> Iterator[Files]:
    """Every file of rows of a run, by table and schema."""
    for table in read_run(run).tables:
        folder, manifest = open_table(run, table)
        found: dict[tuple[str, ...], list[tuple[str, int]]] = {}
        for entry in manifest.content.files:
            path = folder.path(manifest.paths[entry.key])
            kind = Path(path).suffix.removeprefix(".")
            if kind in ("parquet", "arrow"):
                schema = pq.read_schema(path) if kind == "parquet" else pa.ipc.open_file(path).schema
                found.setdefault((kind, *schema.names), []).append((path, entry.rows))
        for (kind, *_), entries in found.items():
            yield Files(table, kind, [path for path, _ in entries], sum(rows for _, rows in entries))


def by_duckdb(files: Files, cache: Path) -> Rows:
    """All rows: Parquet by its own reader, Arrow files handed over by pyarrow, which is how it reads those."""
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    connection = duckdb.connect()
    if files.kind == "parquet":
        found = connection.read_parquet(files.paths)
    else:
        found = connection.from_arrow(pads.dataset(files.paths, format="ipc"))
    rows: Rows = found.to_arrow_table().to_pylist()
    return rows


def by_dask(files: Files, cache: Path) -> Rows:
    """All rows of Parquet files; Dask has no reader of Arrow files."""
    frames = pytest.importorskip("dask.dataframe", reason="dask[dataframe] is not installed")
    if files.kind != "parquet":
        return files.read().to_pylist()
    # By default pandas makes whole numbers with nulls among them float64, which holds them only up to 2^53.
    frame = frames.read_parquet(files.paths, dtype_backend="pyarrow").compute()
    assert list(frame.columns) == files.read().schema.names
    return pa.Table.from_pandas(frame, files.read().schema, preserve_index=False).to_pylist()


def by_datasets(files: Files, cache: Path) -> Rows:
    """All rows, with a cache of its own and no network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(cache / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
        if not files.rows:  # it makes no split of nothing
            return []
        given = {"data_files": files.paths, "split": "train", "cache_dir": str(cache)}
        found = datasets.load_dataset(files.kind, **given)
    assert found.num_rows == files.rows
    columns = found[:]
    assert list(columns) == files.read().schema.names
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


READERS: Mapping[str, Callable[[Files, Path], Rows]] = {
    "duckdb": by_duckdb,
    "dask": by_dask,
    "datasets": by_datasets,
}
by_every_reader = pytest.mark.parametrize("reader", READERS)


def check_reader(reader: str, run: Store, cache: Path) -> set[str]:
    """Assert that a reader sees every row of every table as pyarrow does; returns the names of the tables."""
    seen = set()
    for files in files_of(run):
        rows = READERS[reader](files, cache)
        assert len(rows) == files.rows, files.table
        assert rows == files.read().to_pylist(), files.table
        seen.add(files.table)
    return seen
