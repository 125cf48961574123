"""Columns of tables, also of those that an earlier version of penstock wrote without columns that were added since.

The values of such a column are unknown, so they are null, as those of a row that was not measured.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import ContractError
from schemas.tables import TABLES

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def missing_columns(file: pq.ParquetFile, table: str, columns: Sequence[str]) -> pa.Schema:
    """Return the fields of the columns that a file of a table lacks, because an earlier version wrote it.

    Raises ContractError if the table has no such column in this version either.
    """
    stored, known = {*file.schema_arrow.names}, TABLES[table].schema
    missing = [name for name in columns if name not in stored]
    if unknown := [name for name in missing if known is None or name not in known.names]:
        raise ContractError(
            f"{table}: expected the column {unknown[0]}, got a table without it, which another recipe or version "
            "made. Run `penstock run` with its recipe: it builds the table again."
        )
    return pa.schema([known.field(name) for name in missing]) if known is not None else pa.schema([])


def with_nulls(rows: Rows, missing: pa.Schema) -> Rows:
    """Return rows with further columns, in which every value is null."""
    for added in missing:
        rows = rows.append_column(added, pa.nulls(rows.num_rows, added.type))
    return rows


def read_batches(
    file: pq.ParquetFile, table: str, columns: Sequence[str], rows_at_once: int
) -> Iterator[pa.RecordBatch]:
    """Yield columns of a file of a table, in this order. Columns that an earlier version did not write are null.

    Raises ContractError if a value is not valid, such as a text that is not UTF-8.
    """
    columns = list(dict.fromkeys(columns))
    missing = missing_columns(file, table, columns)
    stored = [name for name in columns if name not in missing.names]
    for batch in file.iter_batches(batch_size=rows_at_once, columns=stored):
        yield with_nulls(_validated(batch, table), missing).select(columns)


def read_columns(file: pq.ParquetFile, table: str, columns: Sequence[str], group: int | None = None) -> pa.Table:
    """Return columns of a row group of a file of a table, or of all groups, as `read_batches` does."""
    columns = list(dict.fromkeys(columns))
    missing = missing_columns(file, table, columns)
    stored = [name for name in columns if name not in missing.names]
    rows = file.read(stored) if group is None else file.read_row_group(group, columns=stored)
    return with_nulls(_validated(rows, table), missing).select(columns)


def _validated(rows: Rows, table: str) -> Rows:
    """Return rows of a table. pyarrow reads texts of Parquet files that are not UTF-8 without an error."""
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid as error:
        raise ContractError(
            f"{table}: expected valid values, got an error: {str(error).rstrip('.')}. Restore the table from a backup."
        ) from error
    return rows
