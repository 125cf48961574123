"""Search for documents, and their format with verdict, signals and provenance (`penstock show`).

Raw text is never printed: `--text` prints the text of the table `clean`, in which personal data is replaced.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.stage import Row
from pipeline.stages import declared_reasons
from pipeline.tokens.streams import STREAM_TABLES, TOKENS, Sorting, mix_drops, mixed_sorting
from schemas.expressions import equality, parse_expression
from schemas.manifest import TableVersion, current_tables, open_table, read_run
from schemas.storage import Store
from schemas.tables import DOCUMENTS, DROPPED_BEFORE, NAME, TABLES, VALUE, VERDICT_COLUMNS

JOINED = tuple(name for name, table in TABLES.items() if table.rows in ("document", "survivor"))
"""Tables whose rows are joined by doc_id to the rows of `documents`."""
COLUMNS = pa.schema([t.schema.field(name) for t in TABLES.values() if t.schema is not None for name in t.searchable])
"""Columns that a condition of `--where` may name in every run."""


def columns_of_run(run: Store) -> pa.Schema:
    """Return the columns that a condition of `--where` may name in this run, including columns that stages added."""
    tables = current_tables(run)
    if "documents" not in tables:
        return COLUMNS
    known = {name: table.schema for name, table in TABLES.items() if name in tables and table.schema is not None}
    columns = [schema.field(column) for name, schema in known.items() for column in TABLES[name].searchable]
    return pa.schema([*columns, *_own_columns(tables["documents"])])


def _own_columns(documents: TableVersion) -> list[pa.Field]:
    """Return the columns of a run's `documents` that a stage adds and that `schemas/tables.py` does not list."""
    with documents.folder.open_input(documents.manifest.paths_of()[0]) as stream:
        return [field for field in pq.read_schema(stream) if field.name not in DOCUMENTS.names]


def parse_where(text: str, columns: pa.Schema = COLUMNS) -> pc.Expression:
    """Return the filter of a condition such as `language = de and gopher_num_words < 60`; see `schemas/expressions.py`.

    Raises ConfigError if the condition cannot be parsed, a column does not exist, or a value is not of the column's
    kind.
    """
    return parse_expression(text, columns, "--where", VERDICT_COLUMNS).to_filter()


def column_equals(name: str, value: str) -> pc.Expression:
    """Return the filter `name = value`. An id may be given by its first 12 or more hexadecimal digits.

    Raises ConfigError if the value cannot be compared with the column.
    """
    return equality(name, value, COLUMNS, f"{name} {value}").to_filter()


def find_documents(run: Store, condition: pc.Expression, limit: int) -> Iterator[Row]:
    """Yield up to `limit` documents that meet the condition.

    A row has the searchable columns of all tables, and further columns of later tables as `table.column`. The verdict
    columns are those of the last step that judged the document.
    """
    tables = current_tables(run)
    sorting = mix_of(run, tables)
    _, manifest = open_table(run, "documents")
    num_found = 0
    for number in range(len(manifest.content.files)):
        part = judged_part(tables, number, sorting)
        rows = part.filter(condition).slice(0, limit - num_found).to_pylist()
        for name in JOINED:
            if rows and name in tables:
                _join(name, tables[name], number, rows)
        yield from rows
        num_found += len(rows)
        if num_found >= limit:
            return


def mix_of(run: Store, tables: Mapping[str, TableVersion]) -> Sorting | None:
    """Return the `Sorting` that decides which documents the mix leaves out of the dataset.

    None if the mix leaves no document out, if the dataset was not made from the current `clean`, or if there is no
    dataset.
    """
    if "clean" not in tables or TOKENS.name not in read_run(run).tables:
        return None
    return mixed_sorting(open_table(run, TOKENS.name)[1], tables["clean"].manifest.digest)


def judged_part(tables: Mapping[str, TableVersion], number: int, sorting: Sorting | None) -> pa.Table:
    """Return one part of `documents` with final verdicts and with the searchable columns of all tables.

    `sorting` decides which documents the mix leaves out of the dataset; None = no document is left out.
    """
    own = [field.name for field in _own_columns(tables["documents"])]
    part = _read_part(tables["documents"], number, [*TABLES["documents"].searchable, *own])
    row_of = {identifier: row for row, identifier in enumerate(part.column("doc_id").to_pylist())}
    final = part.select(VERDICT_COLUMNS).to_pylist()
    for name in (name for name in JOINED if name in tables):
        table = TABLES[name]
        columns = (*(VERDICT_COLUMNS if table.has_verdicts else ()), *table.searchable)
        if not columns:
            continue
        later = _read_part(tables[name], number, ("doc_id", *columns))
        part = _with_columns(part, later, table.searchable)
        for row in later.to_pylist() if table.has_verdicts else ():
            if row["drop_stage"] is not None and row["drop_rule"] != DROPPED_BEFORE:
                final[row_of[row["doc_id"]]] = row
    if sorting is not None:
        read = {name: tables[name] for name in STREAM_TABLES if name in tables}
        for identifier, drop in mix_drops(read, number, sorting):
            if drop is not None:
                values = (TOKENS.name, drop.rule, drop.value, drop.limit)
                final[row_of[identifier]] = dict(zip(VERDICT_COLUMNS, values, strict=True))
    for column in VERDICT_COLUMNS:
        values = pa.array([row[column] for row in final], DOCUMENTS.field(column).type)
        part = part.set_column(part.schema.get_field_index(column), column, values)
    return part


def _with_columns(part: pa.Table, other: pa.Table, names: Sequence[str]) -> pa.Table:
    row_of = {identifier: row for row, identifier in enumerate(other.column("doc_id").to_pylist())}
    rows = pa.array([row_of.get(identifier) for identifier in part.column("doc_id").to_pylist()], pa.int64())
    for name in names:
        part = part.append_column(name, other.column(name).combine_chunks().take(rows))
    return part


def _read_part(table: TableVersion, number: int, columns: Sequence[str] | None = None) -> pa.Table:
    with table.folder.open_input(table.manifest.paths_of()[number]) as stream:
        return pq.read_table(stream, columns=None if columns is None else list(columns))


def _join(name: str, table: TableVersion, number: int, rows: list[Row]) -> None:
    """Add to `rows` the columns of part `number` of the table `name`, as `name.column`.

    Columns that the rows already have are omitted, unless the table measured them again.
    """
    identifiers = pa.array([row["doc_id"] for row in rows], pa.binary(16))
    part = _read_part(table, number).filter(pc.is_in(pc.field("doc_id"), value_set=identifiers)).to_pylist()
    known = {"doc_id", *VERDICT_COLUMNS}
    if not TABLES[name].measured_again:
        known |= {*DOCUMENTS.names, *COLUMNS.names} - {"url"}
    by_id = {row["doc_id"]: row for row in part}
    for row in rows:
        for column, value in by_id.get(row["doc_id"], {}).items():
            if column not in known:
                row[f"{name}.{column}"] = value


def reasons_of_run(run: Store) -> dict[str, str]:
    """Return the meanings of the reasons that the run's recipe declares, by `stage/reason`."""
    tables = {name: table.manifest for name, table in current_tables(run).items()}
    known, built_in = declared_reasons(tables), declared_reasons({})
    return {
        f"{stage}/{reason}": meaning
        for stage, reasons in known.items()
        for reason, meaning in reasons.items()
        if reason not in built_in.get(stage, {})
    }


def format_document(
    row: Row, with_text: bool, columns: pa.Schema = COLUMNS, reasons: Mapping[str, str] | None = None
) -> str:
    """Format a document as text: its verdict, its provenance, and every measured signal with its unit.

    `with_text` adds the cleaned text. `columns` has the units of columns that are in no standard table. `reasons` has
    the meanings that are printed with verdicts, by `stage/reason`.
    """
    meaning = (reasons or {}).get(f"{row.get('drop_stage')}/{row.get('drop_rule')}")
    lines = [f"document {row['doc_id'].hex()}  {verdict_of(row)}{f': {meaning}' if meaning else ''}"]
    fields = {
        field.name: field
        for schema in (columns, *(table.schema or () for table in TABLES.values()))
        for field in schema
    }
    for name, value in row.items():
        if value is None or name == "doc_id" or name.split(".")[-1].startswith("drop_"):
            continue
        if name == "clean.text":
            continue
        unit = (fields[name.split(".")[-1]].metadata or {}).get(b"unit", b"").decode()
        lines.append(f"  {name:<26} {_shown(value)}{' ' + unit if unit and unit != 'ratio' else ''}")
    if with_text and row.get("clean.text"):
        lines += ["", *(f"  | {line}" for line in row["clean.text"].splitlines())]
    return "\n".join(lines)


def verdict_of(row: Row) -> str:
    """Return the verdict of a row as text: `kept`, or `dropped by` with the stage, rule, value and limit."""
    if row.get("drop_stage") is None:
        return "kept"
    value, limit = row.get("drop_value"), row.get("drop_limit")
    measured = f" ({value:g}, limit {limit:g})" if value is not None and limit is not None else ""
    return f"dropped by {row['drop_stage']}/{row['drop_rule']}{measured}"


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, dict) and NAME in value:
        return f"{value[NAME]} {_shown(value[VALUE])}"
    if isinstance(value, dict):  # a span; some have a reason
        return f"{value['start']}-{value['end']}" + (f" {value['reason']}" if "reason" in value else "")
    return str(value)
