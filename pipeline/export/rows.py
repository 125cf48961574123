"""The rows of an export: which columns they have, and how they are read from one part of the tables of a run.

A row is a kept document of the table `clean`, with signals of the same document from `documents`, `templates`, `scores`
and `verdicts`. All values have types that every reader of JSON and Parquet knows: ids are hexadecimal, dates ISO 8601.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.parquet import Part, table_without_templates
from pipeline.inspect.show import columns_of_run, expand_meta, meta_columns, parse_where
from schemas.config import SHOWN_NAMES, suggest_name
from schemas.entries import to_mapping, value_type
from schemas.errors import ConfigError
from schemas.manifest import TableVersion, check_not_replaced, current_tables
from schemas.older_tables import read_columns
from schemas.storage import Store
from schemas.tables import CLEAN, META_PREFIX, SCORES, VERDICT_COLUMNS, field

COLUMNS = pa.schema(
    [
        field("id", pa.string(), "id of the document, 32 hexadecimal digits"),
        field("text", pa.string(), "clean text, personal data replaced"),
        field("title", pa.string(), "title, personal data replaced"),
        field("url", pa.string(), "URL, personal data replaced"),
        field("date", pa.string(), "date of the document, ISO 8601, UTC"),
        field("source", pa.string(), "name of the source"),
        field("language", pa.string(), "most probable language"),
        field("licence", pa.string(), "licence of the document; null: unknown"),
        field("meta", pa.string(), "other fields of the source's row as a JSON object, personal data replaced"),
    ]
)
"""The columns of every export; chosen signals follow."""
FROM_CLEAN = ("doc_id", "text", "title", "url", "date", "source", "language", "licence", "meta")
SIGNAL_TABLES = ("documents", "templates", "scores", "verdicts")
"""Tables with signals of a document, in the order in which a column is looked up."""
ALL = "all"
NO_SIGNALS = {
    *CLEAN.names,
    *VERDICT_COLUMNS,
    "drop_limit",
    "record_type",
    "http_status",
    "mime",
    "charset",
    "charset_from",
}
NO_SIGNALS |= {"raw_digest", "text_digest", "signature", "anchor", "doc_id"}
"""Columns of these tables that are provenance, verdicts or digests."""
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class RowSource:
    """What an export reads: tables of a run, chosen signals and a condition."""

    tables: Mapping[str, TableVersion]
    signals: tuple[str, ...]
    """Names of the signals, in the order of the columns."""
    where: str | None
    columns: pa.Schema
    """The columns that the condition may name."""
    meta: tuple[pa.Field, ...]
    """The fields of `meta` as columns."""

    @property
    def needed(self) -> list[str]:
        """The columns that occur in the condition, and possibly a few more."""
        text = self.where or ""
        return [name for name in self.columns.names if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text)]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of an exported row."""
        return pa.schema([*COLUMNS, *(_plain_field(self.columns.field(name)) for name in self.signals)])


def open_rows(run: Store, signals: Sequence[str], where: str | None, unmeasured: Mapping[str, str]) -> RowSource:
    """Return the source of the rows of an export; the signal `all` names every signal.

    `unmeasured` maps columns that the run did not measure to the fix. Raises ConfigError if the run has no up-to-date
    clean text, if a signal is unknown or was not measured, or if the condition is not valid.
    """
    tables = current_tables(run)
    if missing := [name for name in ("documents", "clean") if name not in tables]:
        raise ConfigError(
            f"export: expected a run with up-to-date clean text, got none in {run.uri} (missing: {', '.join(missing)}"
            "). Run `penstock run` first."
        )
    for table in tables.values():
        check_not_replaced(table.folder)
    own = [COLUMNS.field("id"), CLEAN.field("title")]
    known = columns_of_run(run)
    columns = pa.schema([*known, *(column for column in own if column.name not in known.names)])
    offered = [name for name in columns.names if _is_signal(columns.field(name), tables)]
    chosen = offered if [*signals] == [ALL] else [*dict.fromkeys(signals)]
    measured = [name for name in offered if name not in unmeasured]
    if wrong := [f"{name!r}{suggest_name(name, [*measured, ALL])}" for name in chosen if name not in offered]:
        raise ConfigError(
            f"export --signals: expected signals of {run.uri}, got {', '.join(wrong)}. Name columns that "
            "`penstock show` prints, or all."
        )
    if [*signals] != [ALL] and (empty := [name for name in chosen if name in unmeasured]):
        fixes = "; ".join(dict.fromkeys(unmeasured[name] for name in empty))
        more = f" and {len(measured) - SHOWN_NAMES} more" if len(measured) > SHOWN_NAMES else ""
        raise ConfigError(
            f"export --signals: expected signals that {run.uri} measured, got {', '.join(map(repr, empty))}, which are "
            f"null in every document. Remove them, or run the recipe again: {fixes}. Measured: "
            f"{', '.join(measured[:SHOWN_NAMES])}{more}."
        )
    if where is not None:
        parse_where(where, columns)
    return RowSource(tables, tuple(chosen), where, columns, tuple(meta_columns(tables["documents"])))


def is_meta(name: str) -> bool:
    """Return True if a column of a condition is a field of `meta`."""
    return name.startswith(META_PREFIX)


def _is_signal(column: pa.Field, tables: Mapping[str, TableVersion]) -> bool:
    if column.name in NO_SIGNALS or column.name == "id" or is_meta(column.name):
        return False
    return "scores" in tables or column.name not in SCORES.names


def _plain_field(column: pa.Field) -> pa.Field:
    is_nested = pa.types.is_nested(column.type) or pa.types.is_binary(column.type)
    return pa.field(column.name, pa.string() if is_nested else column.type, metadata=column.metadata)


class PartRows:
    """One part of the tables: its selected rows, with their sizes, and the exported rows of a range of them."""

    def __init__(self, source: RowSource, part: Part):
        self._source, self._part = source, part
        self._narrow: dict[tuple[str, ...], pa.Table] = {}
        self._names = {name: self._file(name).schema_arrow.names for name in part.paths}
        clean = read_columns(self._file("clean"), "clean", ["doc_id", "drop_stage", "num_bytes"])
        mask = np.asarray(clean.column("drop_stage").is_null(), np.bool_)
        self.num_clean = int(mask.sum())
        """Number of kept documents of `clean` in this part, before the condition."""
        if source.where is not None:
            condition = parse_where(source.where, source.columns)
            columns = self._columns(clean.column("doc_id"), source.needed)
            place = pa.array(np.arange(clean.num_rows))
            chosen = columns.append_column("_place", place).filter(condition).column("_place").to_numpy()
            met = np.zeros(clean.num_rows, np.bool_)
            met[chosen] = True
            mask &= met
        self.rows: npt.NDArray[np.int64] = np.flatnonzero(mask)
        """Row numbers of the selected documents in the part of `clean`."""
        self.sizes: npt.NDArray[np.int64] = clean.column("num_bytes").take(pa.array(self.rows)).to_numpy()
        """Size of the text of each of them [bytes of UTF-8]."""

    def _file(self, table: str) -> pq.ParquetFile:
        return pq.ParquetFile(self._part.folders[table].open_input(self._part.paths[table]))

    def _read(self, table: str, names: Sequence[str]) -> pa.Table:
        """Return narrow columns of a table, which are read once."""
        key = (table, *names)
        if key not in self._narrow:
            rows = read_columns(self._file(table), table, ["doc_id", *names])
            self._narrow[key] = table_without_templates(self._part, table, rows) if table == "documents" else rows
        return self._narrow[key]

    def _columns(self, doc_ids: pa.ChunkedArray, names: Sequence[str]) -> pa.Table:
        """Return columns of the documents with these ids, in this order, from the tables that have them."""
        columns: dict[str, pa.ChunkedArray | pa.Array] = {}
        wanted = {name: self._table_of(name) for name in names}
        for table in dict.fromkeys(wanted.values()):
            own = [name for name in names if wanted[name] == table and name != "id" and not is_meta(name)]
            own += ["meta"] if table == "clean" and any(map(is_meta, names)) else []
            stored = [name for name in dict.fromkeys(own) if table is not None and name in self._names[table]]
            read = self._read(table, stored) if table is not None else None
            rows = None if read is None else pc.index_in(doc_ids, value_set=read.column("doc_id").combine_chunks())
            for name in own:
                kind = self._source.columns.field(name).type if name in self._source.columns.names else pa.string()
                if read is None or name not in stored:
                    columns[name] = pa.nulls(len(doc_ids), kind)
                else:
                    columns[name] = read.column(name).take(rows)
        if "id" in names:
            columns["id"] = hex_text(doc_ids)
        table = pa.table(columns) if columns else pa.table({"_rows": pa.nulls(len(doc_ids))})
        return expand_meta(table, [own for own in self._source.meta if own.name in names])

    def _table_of(self, name: str) -> str | None:
        """Return the table with a column: `clean`, whose values are redacted, before all others."""
        if name == "id" or is_meta(name):
            return "clean"
        return next((table for table in ("clean", *SIGNAL_TABLES) if name in self._names.get(table, ())), None)

    def measured(self, names: Sequence[str]) -> list[str]:
        """Return the names of those signals that have a value in any selected row."""
        ids = read_columns(self._file("clean"), "clean", ["doc_id"]).column("doc_id").take(pa.array(self.rows))
        columns = self._columns(ids, names)
        return [name for name in names if columns.column(name).null_count < columns.num_rows]

    def counts(self, column: str) -> dict[str, int]:
        """Return the number of selected rows by value of a column of `clean`; null values are left out."""
        values = read_columns(self._file("clean"), "clean", [column]).column(column).take(pa.array(self.rows))
        counted = pc.value_counts(values.drop_null()).to_pylist()
        return {entry["values"]: entry["counts"] for entry in counted}

    def read(self, first: int, last: int) -> Iterator[pa.Table]:
        """Yield the selected rows first to last - 1, counted from 0, as tables with the schema of the export."""
        if first >= last:
            return
        chosen, start = self.rows[first:last], 0
        file = self._file("clean")
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            own = chosen[(chosen >= start) & (chosen < end)] - start
            if len(own):
                rows = read_columns(file, "clean", FROM_CLEAN, group).take(pa.array(own))
                for begin in range(0, rows.num_rows, ROWS_AT_ONCE):
                    yield self._export(rows.slice(begin, ROWS_AT_ONCE))
            start = end

    def _export(self, rows: pa.Table) -> pa.Table:
        signals = self._columns(rows.column("doc_id"), self._source.signals)
        columns = {name: self._plain(rows, name) for name in COLUMNS.names}
        columns |= {name: plain_column(signals.column(name)) for name in self._source.signals}
        return pa.table(columns).cast(self._source.schema)

    def _plain(self, rows: pa.Table, name: str) -> pa.ChunkedArray | pa.Array:
        if name == "id":
            return hex_text(rows.column("doc_id"))
        return iso_text(rows.column(name)) if name == "date" else rows.column(name)


def hex_text(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column of bytes as hexadecimal texts."""
    return pa.array([None if value is None else value.hex() for value in column.to_pylist()], pa.string())


def iso_text(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return a column of times as texts such as `2024-05-06T07:08:09Z`; fractions of a second are left out."""
    seconds = column.cast(pa.timestamp("s", "UTC"), safe=False)
    return pc.strftime(seconds, format="%Y-%m-%dT%H:%M:%SZ")


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """Return a column as numbers, truth values or texts: bytes as hexadecimal, lists and entries as JSON."""
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return hex_text(column)
    if value_type(kind) is not None:
        return pa.array(
            [None if row is None else json.dumps(to_mapping(row)) for row in column.to_pylist()], pa.string()
        )
    if pa.types.is_nested(kind):
        return pa.array([None if row is None else json.dumps(row) for row in column.to_pylist()], pa.string())
    return iso_text(column) if pa.types.is_timestamp(kind) else column


def plain_table(rows: pa.Table) -> pa.Table:
    """Return the rows of any table with bytes as hexadecimal texts and times as ISO 8601; lists stay lists."""
    columns: dict[str, pa.ChunkedArray | pa.Array] = {}
    for name in rows.column_names:
        column = rows.column(name)
        columns[name] = column if pa.types.is_nested(column.type) else plain_column(column)
    fields = [
        pa.field(name, column.type, metadata=rows.schema.field(name).metadata) for name, column in columns.items()
    ]
    return pa.table(list(columns.values()), schema=pa.schema(fields))
