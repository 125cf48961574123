"""Search for documents by conditions, with their final verdicts and the columns of all tables (`penstock show`)."""

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.parquet import TEMPLATES, parts_of, table_without_templates
from pipeline.engine.stage import Row
from pipeline.tokens.streams import STREAM_TABLES, TOKENS, Sorting, mix_drops, mixed_sorting
from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.expressions import Expression, equality, parse_expression
from schemas.ids import shuffle_key
from schemas.manifest import TableVersion, current_tables, open_table, read_run
from schemas.older_tables import read_columns
from schemas.storage import Store
from schemas.tables import (
    DOCUMENTS,
    DROPPED_BEFORE,
    META_FIELDS,
    META_NUMBERS,
    META_PREFIX,
    TABLES,
    VERDICT_COLUMNS,
)
from schemas.urls import canonical_url, host_suffixes, parse_domain, url_pattern

JOINED = tuple(name for name, table in TABLES.items() if table.rows in ("document", "survivor"))
"""Tables whose rows are joined by doc_id to the rows of `documents`."""
COLUMNS = pa.schema([t.schema.field(name) for t in TABLES.values() if t.schema is not None for name in t.searchable])
"""Columns that a condition of `--where` may name in every run."""
WITH_TEXT = pc.field("num_chars").is_valid()
"""The condition that is true of every document with a text."""


def columns_of_run(run: Store) -> pa.Schema:
    """Return the columns that a condition of `--where` may name in this run.

    They include the columns that stages added, and the fields of the column `meta`, such as `meta.score`.
    """
    tables = current_tables(run)
    if "documents" not in tables:
        return COLUMNS
    known = {name: table.schema for name, table in TABLES.items() if name in tables and table.schema is not None}
    columns = [schema.field(column) for name, schema in known.items() for column in TABLES[name].searchable]
    documents = tables["documents"]
    return pa.schema([*columns, *_own_columns(documents), *meta_columns(documents)])


def meta_columns(documents: TableVersion) -> list[pa.Field]:
    """Return a column for each field of `meta` that the manifest of `documents` counts, such as `meta.score`.

    A field that is a number in every row is a column of numbers, any other a column of texts.
    """
    figures = documents.manifest.content.figures
    numbers = figures.get(META_NUMBERS, {})
    return [
        pa.field(f"{META_PREFIX}{name}", pa.float64() if numbers.get(name) == count else pa.string())
        for name, count in figures.get(META_FIELDS, {}).items()
    ]


def rules_of_run(run: Store) -> list[str]:
    """Return `stage/rule` for every rule that may drop documents in this run, in the order of its tables."""
    counted = [name for table in current_tables(run).values() for name in table.manifest.content.counts.dropped]
    return [name for name in dict.fromkeys(counted) if name.partition("/")[2] != DROPPED_BEFORE]


def rule_equals(run: Store, rule: str) -> pc.Expression:
    """Return the condition that a rule dropped the document: `gopher_short_doc`, or with its stage before a slash.

    Raises ConfigError if the run has no such rule.
    """
    known = rules_of_run(run)
    names = {*known, *(name.partition("/")[2] for name in known)}
    if rule not in names:
        raise ConfigError(
            f"--rule {rule}: expected a rule of {run.uri}, got none{suggest_name(rule, names)}. Correct --rule."
        )
    stage, slash, name = rule.rpartition("/")
    is_rule = pc.field("drop_rule") == name
    return is_rule & (pc.field("drop_stage") == stage) if slash else is_rule


def _own_columns(documents: TableVersion) -> list[pa.Field]:
    """Return the columns of a run's `documents` that a stage adds and that `schemas/tables.py` does not list."""
    with documents.folder.open_input(documents.manifest.paths_of()[0]) as stream:
        return [field for field in pq.read_schema(stream) if field.name not in DOCUMENTS.names]


def parse_where(text: str, columns: pa.Schema = COLUMNS) -> pc.Expression:
    """Return the filter of a condition such as `language = de and gopher_num_words < 60`; see `schemas/expressions.py`.

    Raises ConfigError if the condition cannot be parsed, a column does not exist, or a value is not of the column's
    kind.
    """
    return _condition(text, columns).to_filter()


def where_columns(text: str, columns: pa.Schema = COLUMNS) -> frozenset[str]:
    """Return the names of the columns that a condition reads. Raises ConfigError as `parse_where` does."""
    return _condition(text, columns).columns


def _condition(text: str, columns: pa.Schema) -> Expression:
    return parse_expression(text, columns, "--where", VERDICT_COLUMNS)


def column_equals(name: str, value: str) -> pc.Expression:
    """Return the filter `name = value`. An id may be given by its first 12 or more hexadecimal digits.

    Raises ConfigError if the value cannot be compared with the column.
    """
    return equality(name, value, COLUMNS, f"{name} {value}").to_filter()


def host_below(domain: str) -> pc.Expression:
    """Return the filter of the documents of a domain, the hosts below it included.

    Raises ConfigError if `domain` is not the name of a host.
    """
    name = parse_domain(domain)
    of_url = pc.match_substring_regex(pc.field("url"), url_pattern(name), ignore_case=True)
    return of_url | (pc.field("domain") == name)


def find_documents(
    run: Store, condition: pc.Expression, limit: int, url: str | None = None, with_text: bool = False
) -> Iterator[Row]:
    """Yield up to `limit` documents that meet the condition.

    A row has the searchable columns of all tables, and further columns of later tables as `table.column`. The verdict
    columns are those of the last step that judged the document. Where templates were cut, signals are those of the text
    without them, which the rules compare; `documents.column` has those of the whole page. If `url` is given, the URL of
    a document must have the same canonical form. `with_text` adds columns of the table `text` to documents without a
    clean text.
    """
    search = _Search(run, with_text)
    num_found = 0
    for number in range(search.num_parts):
        part = search.part(number, condition, url)
        rows = part.slice(0, limit - num_found).to_pylist()
        yield from search.join(number, rows)
        num_found += len(rows)
        if num_found >= limit:
            return


def sample_documents(
    run: Store, condition: pc.Expression, number: int, seed: int, with_text: bool = False
) -> Iterator[Row]:
    """Yield `number` documents at random among those that meet the condition, as rows like those of `find_documents`.

    They are the documents with the smallest hashes of (seed, doc_id), so the same seed gives the same documents.
    """
    search = _Search(run, with_text)
    chosen: list[tuple[int, int, Row]] = []  # a heap of (-hash, number of the part, row)
    for ordinal in range(search.num_parts):
        part = search.part(ordinal, condition, None)
        hashes = [shuffle_key(seed, identifier) for identifier in part.column("doc_id").to_pylist()]
        for place in heapq.nsmallest(number, range(len(hashes)), key=hashes.__getitem__):
            if len(chosen) == number and -hashes[place] <= chosen[0][0]:
                break
            entry = (-hashes[place], ordinal, part.slice(place, 1).to_pylist()[0])
            if len(chosen) == number:
                heapq.heapreplace(chosen, entry)
            else:
                heapq.heappush(chosen, entry)
    for _, ordinal, row in sorted(chosen, key=lambda entry: -entry[0]):
        yield from search.join(ordinal, [row])


class _Search:
    """The tables of a run, read part by part with the verdicts of the last step that judged each document."""

    def __init__(self, run: Store, with_text: bool):
        self._tables = current_tables(run)
        self._sorting = mix_of(run, self._tables)
        self._documents = TableVersion(*open_table(run, "documents", even_replaced=True))
        self._tables.setdefault("documents", self._documents)
        self._with_text = with_text
        self.num_parts = len(self._documents.manifest.content.files)

    def part(self, number: int, condition: pc.Expression, url: str | None) -> pa.Table:
        """Return the documents of one part that meet the condition and have the URL, by its canonical form."""
        part = judged_part(self._tables, number, self._sorting)
        names = part.schema.names
        part = expand_meta(part, meta_columns(self._documents)).filter(condition).select(names)
        if url is None:
            return part
        form = canonical_url(url)
        hosts = [*host_suffixes(form), *(f"www.{host}" for host in host_suffixes(form)[:1])]
        part = part.filter(pc.is_in(pc.field("domain"), value_set=pa.array(hosts, pa.string())))
        return part.filter(pa.array([canonical_url(own) == form for own in part.column("url").to_pylist()], pa.bool_()))

    def join(self, number: int, rows: list[Row]) -> list[Row]:
        """Return rows of one part with the columns of later tables added."""
        for name in JOINED:
            if rows and name in self._tables:
                _join(name, self._tables[name], number, rows)
        if TEMPLATES in self._tables:
            self._join_whole_pages(number, [row for row in rows if row["template_chars"]])
        without = [row for row in rows if row.get("clean.text") is None]
        if self._with_text and without and "text" in self._tables:
            _join("text", self._tables["text"], number, without)
        return rows

    def _join_whole_pages(self, number: int, rows: list[Row]) -> None:
        """Add the values of whole pages, as `documents.column`, to rows that have those without templates."""
        prefix = f"{TEMPLATES}."
        names = {name.removeprefix(prefix) for row in rows for name in row if name.startswith(prefix)}
        names &= {name for row in rows for name in row} - {*TABLES[TEMPLATES].searchable}
        identifiers = pa.array([row["doc_id"] for row in rows], pa.binary(16))
        part = _read_part(self._documents, number, ["doc_id", *sorted(names)]) if rows else pa.table({"doc_id": []})
        by_id = {row["doc_id"]: row for row in part.filter(pc.is_in(pc.field("doc_id"), identifiers)).to_pylist()}
        for row in rows:
            for name in names:
                del row[f"{prefix}{name}"]  # the row has it as its own value
                row[f"documents.{name}"] = by_id[row["doc_id"]][name]


def expand_meta(part: pa.Table, columns: Sequence[pa.Field]) -> pa.Table:
    """Return the rows with a column added for each of these fields of their column `meta`."""
    if not columns:
        return part
    values = [json.loads(text) if text else {} for text in part.column("meta").to_pylist()]
    for column in columns:
        name, is_number = column.name.removeprefix(META_PREFIX), pa.types.is_floating(column.type)
        own = [_meta_value(row.get(name), is_number) for row in values]
        part = part.append_column(column, pa.array(own, column.type))
    return part


def _meta_value(value: Any, is_number: bool) -> float | str | None:
    if value is None or (isinstance(value, str) and not is_number):
        return value
    return float(value) if is_number else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def mix_of(run: Store, tables: Mapping[str, TableVersion]) -> Sorting | None:
    """Return the `Sorting` that decides which documents the mix leaves out of the dataset.

    None if the mix leaves no document out, if the dataset was not made from the current `clean`, or if there is no
    dataset.
    """
    if "clean" not in tables or TOKENS.name not in read_run(run).tables:
        return None
    return mixed_sorting(open_table(run, TOKENS.name, even_replaced=True)[1], tables["clean"].manifest.digest)


def judged_part(tables: Mapping[str, TableVersion], number: int, sorting: Sorting | None) -> pa.Table:
    """Return one part of `documents` with final verdicts and with the searchable columns of all tables.

    Signals are those that the rules compare: where templates were cut, those of the text without them. `sorting`
    decides which documents the mix leaves out of the dataset; None = no document is left out.
    """
    own = [field.name for field in _own_columns(tables["documents"])]
    known = TABLES["documents"].searchable
    part = _read_part(tables["documents"], number, [*known, *own])
    if TEMPLATES in tables:
        pair = {name: tables[name] for name in ("documents", TEMPLATES)}
        part = table_without_templates(parts_of(pair)[number], "documents", part)
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
    """Return one part of a table; columns that an earlier version of the table does not have are null."""
    with table.folder.open_input(table.manifest.paths_of()[number]) as stream:
        file = pq.ParquetFile(stream)
        if columns is None:
            return file.read()
        return read_columns(file, table.manifest.content.table, columns)


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
