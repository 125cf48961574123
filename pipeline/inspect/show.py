"""Search for documents and print them with their verdicts, signals and provenance (`penstock show`).

Everything is read through the manifests of a run. Raw text is never printed: `--text` prints the text of the clean
table, in which personal data is replaced.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.stage import Row
from pipeline.tokens.streams import STREAM_TABLES, TOKENS, Sorting, mix_drops, mixed_sorting
from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.manifest import TableVersion, open_table, read_run
from schemas.storage import Store
from schemas.tables import DOCUMENTS, NAME, SCORES, TABLES, VALUE, VERDICTS

CONDITION = re.compile(r"\s*(\w+)\s*(==|!=|<=|>=|<|>|=|is null|is not null)\s*(.*?)\s*$", re.IGNORECASE)
COMPARE = {"==": pc.equal, "=": pc.equal, "!=": pc.not_equal}
COMPARE |= {"<=": pc.less_equal, ">=": pc.greater_equal, "<": pc.less, ">": pc.greater}
HIDDEN_COLUMNS = ("signature",)
LATER_TABLES = ("scores", "verdicts", "clusters", "dedup", "repeats", "clean")
"""Tables after `documents` whose rows are joined to it by doc_id."""
TABLES_WITHOUT_VERDICT = ("clusters",)
TABLE_ORDER = (
    "documents",
    "text",
    "scores",
    "verdicts",
    "clusters",
    "index",
    "dedup",
    "representatives",
    "repeats",
    "clean",
)
"""Tables that are checked for having been made from each other, in the order of the run."""
VERDICT = ["drop_stage", "drop_rule", "drop_value", "drop_limit"]
SCORED = [name for name in SCORES.names if name not in ("doc_id", "paragraphs", "paragraph_perplexity")]
BUCKET = ["perplexity_bucket"]
JOINED = [*(SCORES.field(name) for name in SCORED), VERDICTS.field(BUCKET[0])]
COLUMNS = pa.schema([*DOCUMENTS, *JOINED])
"""Columns that a condition may name in every run."""


def columns_of_run(run: Store) -> pa.Schema:
    """Return the columns that a condition may name in this run, with those that stages declare themselves."""
    if "documents" not in read_run(run).tables:
        return COLUMNS
    folder, manifest = open_table(run, "documents")
    with folder.open_input(manifest.paths_of()[0]) as stream:
        return pa.schema([*pq.read_schema(stream), *JOINED])


def parse_where(text: str, columns: pa.Schema = COLUMNS) -> pc.Expression:
    """Return the filter of a condition such as `language = de and gopher_num_words < 60`.

    Raises ConfigError if a column does not exist, a value does not fit its type, or the condition cannot be parsed.
    """
    expression: pc.Expression | None = None
    for part in re.split(r"\s+and\s+", text.strip(), flags=re.IGNORECASE):
        match = CONDITION.match(part)
        if match is None:
            raise ConfigError(
                "--where: expected terms such as `column < value` or `column is null`, joined by `and`, "
                f"got {part!r}. Write it as `column operator value`."
            )
        name, operator, value = match.groups()
        if name not in columns.names:
            close = suggest_name(name, columns.names)
            raise ConfigError(
                f"--where {part!r}: expected a column of documents or scores, got {name!r}{close}. "
                "Name a column that `penstock show` prints."
            )
        term = _term(columns.field(name), operator.lower(), value)
        expression = term if expression is None else expression & term
    if expression is None:
        raise ConfigError("--where: expected a condition, got none. Write one such as 'language = de'.")
    return expression


def _term(column: pa.Field, operator: str, value: str) -> pc.Expression:
    if operator.startswith("is"):
        is_null = pc.field(column.name).is_null()
        return is_null if operator == "is null" else ~is_null
    return compare_column(column, operator, value.strip("'\""))


def column_equals(name: str, value: str) -> pc.Expression:
    """Return the filter `name = value` for an unquoted value. Raises ConfigError if it does not fit the column."""
    return compare_column(COLUMNS.field(name), "=", value)


def compare_column(column: pa.Field, operator: str, value: str) -> pc.Expression:
    """Return the filter that compares a column with a value; ids are given in hex.

    Raises ConfigError if the value does not fit the type of the column.
    """
    name, kind = column.name, column.type
    try:
        if pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind):
            scalar = pa.scalar(bytes.fromhex(value), kind)
        else:
            scalar = pc.cast(pa.scalar(value), kind)
    except (pa.ArrowInvalid, ValueError) as error:
        raise ConfigError(
            f"--where {name} {operator} {value}: column {name} is {kind}, got {value!r} ({error}). Give a {kind} value."
        ) from error
    return COMPARE[operator](pc.field(name), scalar)


def find_documents(run: Store, condition: pc.Expression, limit: int) -> Iterator[Row]:
    """Yield up to `limit` documents that meet the condition, with the columns of later tables as `table.column`.

    The condition is applied to the final verdict, not to that of `documents`.
    """
    tables = current_tables(run)
    sorting = _mix_of(run, tables)
    _, manifest = open_table(run, "documents")
    num_found = 0
    for number in range(len(manifest.content.files)):
        part = _judged_part(run, number, tables, sorting)
        rows = part.filter(condition).slice(0, limit - num_found).to_pylist()
        for name in LATER_TABLES:
            if rows and name in tables:
                _join(run, name, number, rows)
        yield from rows
        num_found += len(rows)
        if num_found >= limit:
            return


def current_tables(run: Store) -> set[str]:
    """Return the names of the tables that were made from the current versions of their inputs.

    A later table is left out if it was made with other thresholds or models.
    """
    tables, current = read_run(run).tables, dict[str, str]()
    for name in TABLE_ORDER:
        if name in tables:
            manifest = open_table(run, name)[1]
            inputs = [] if name in ("documents", "text") else manifest.content.inputs
            reads = {
                entry.name: entry.sha256 for entry in inputs if "/" not in entry.name
            }  # "/": a table of another run
            if all(current.get(read) == digest for read, digest in reads.items()):
                current[name] = manifest.digest
    return set(current)


def _mix_of(run: Store, tables: Collection[str]) -> Sorting | None:
    """Return the mix that selected among the current clean documents.

    None if all of them are in the dataset, or if there is no dataset.
    """
    if "clean" not in tables or TOKENS.name not in read_run(run).tables:
        return None
    return mixed_sorting(open_table(run, TOKENS.name)[1], open_table(run, "clean")[1].digest)


def _judged_part(run: Store, number: int, tables: Collection[str], sorting: Sorting | None) -> pa.Table:
    """Return one part of `documents` with the scores and with the verdict of the last table that has one.

    `sorting` decides which documents the mix of the dataset leaves out.
    """
    part = _read_part(run, "documents", number)
    row_of = {identifier: row for row, identifier in enumerate(part.column("doc_id").to_pylist())}
    final = part.select(VERDICT).to_pylist()
    for name in LATER_TABLES:
        if name not in tables or name in TABLES_WITHOUT_VERDICT:
            continue
        if name == "scores":
            part = _with_columns(part, _read_part(run, name, number, ["doc_id", *SCORED]), SCORED)
            continue
        later = _read_part(run, name, number, ["doc_id", *VERDICT, *(BUCKET if name == "verdicts" else [])])
        if name == "verdicts":
            part = _with_columns(part, later, BUCKET)
        for row in later.to_pylist():
            if row["drop_stage"] is not None and row["drop_rule"] != "dropped_before":
                final[row_of[row["doc_id"]]] = row
    if sorting is not None:
        read = {name: TableVersion(*open_table(run, name)) for name in STREAM_TABLES if name in tables}
        for identifier, drop in mix_drops(read, number, sorting):
            if drop is not None:
                values = (TOKENS.name, drop.rule, drop.value, drop.limit)
                final[row_of[identifier]] = dict(zip(VERDICT, values, strict=True))
    for column in VERDICT:
        values = pa.array([row[column] for row in final], DOCUMENTS.field(column).type)
        part = part.set_column(part.schema.get_field_index(column), column, values)
    return part


def _with_columns(part: pa.Table, other: pa.Table, names: Sequence[str]) -> pa.Table:
    row_of = {identifier: row for row, identifier in enumerate(other.column("doc_id").to_pylist())}
    rows = pa.array([row_of.get(identifier) for identifier in part.column("doc_id").to_pylist()], pa.int64())
    for name in names:
        part = part.append_column(name, other.column(name).combine_chunks().take(rows))
    return part


def _read_part(run: Store, table: str, number: int, columns: list[str] | None = None) -> pa.Table:
    folder, manifest = open_table(run, table)
    with folder.open_input(manifest.paths_of()[number]) as stream:
        file = pq.ParquetFile(stream)
        return file.read(columns or [name for name in file.schema_arrow.names if name not in HIDDEN_COLUMNS])


def _join(run: Store, table: str, number: int, rows: list[Row]) -> None:
    identifiers = pa.array([row["doc_id"] for row in rows], pa.binary(16))
    part = _read_part(run, table, number).filter(pc.is_in(pc.field("doc_id"), value_set=identifiers)).to_pylist()
    known = (set(DOCUMENTS.names) - {"url"}) | {*SCORED, *BUCKET}
    if table == "repeats":  # its signals were measured again after the cuts
        known = {"doc_id", *VERDICT}
    by_id = {row["doc_id"]: row for row in part}
    for row in rows:
        for name, value in by_id.get(row["doc_id"], {}).items():
            if name not in known:
                row[f"{table}.{name}"] = value


def format_document(row: Row, with_text: bool, columns: pa.Schema = COLUMNS) -> str:
    """Format a document as text: the verdict, its provenance, and every measured signal with its unit."""
    lines = [f"document {row['doc_id'].hex()}  {verdict_of(row)}"]
    fields = {field.name: field for schema in (columns, *TABLES.values()) for field in schema}
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
    """Return `kept`, or `dropped by` with the stage, rule, value and limit."""
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
