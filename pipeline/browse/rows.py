"""The rows of a run for `penstock browse`: batches of documents with final verdicts, and single rows by document.

Rows are read batch by batch, so the memory does not grow with the data. Part N of every table holds the same documents
in the same order, but a later table may leave out documents. Its rows are therefore matched by doc_id.
"""

import shlex
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.parquet import TEMPLATE_CHARS, TEMPLATES
from pipeline.engine.stage import Drop, PerDocument, Row
from pipeline.engine.worker import ModelPaths
from pipeline.inspect.show import JOINED, columns_of_run
from pipeline.tokens.streams import STREAM_TABLES, TOKENS, Sorting, mix_drops, mixed_sorting
from schemas.config import Recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import Manifest, TableVersion, current_tables, open_table, part_key, read_run
from schemas.older_tables import missing_columns, read_batches, with_nulls
from schemas.storage import Store
from schemas.tables import DROPPED_BEFORE, TABLES, VERDICT_COLUMNS

BATCH_ROWS = 2048
"""Maximum number of rows of a batch."""


@dataclass(frozen=True)
class RunRules:
    """The stages and the recipe of a run, which the command line provides: only `jobs` knows every section."""

    stages: tuple[PerDocument, ...]
    """The stages whose checks decide, in this order."""
    meanings: Mapping[str, str]
    """`stage/rule` → meaning, for every rule of every stage."""
    read: Callable[[Sequence[str]], Recipe]
    """(overrides as `section.key=value`) → the recipe of the run with these overrides."""
    models: Callable[[Recipe], ModelPaths]
    """(recipe) → local paths of the models of the stages that can drop documents."""
    check_change: Callable[[Recipe, Recipe], object]
    """(recipe of the run, changed recipe): raises ConfigError if a what-if cannot change one of the settings."""


@dataclass(frozen=True)
class BrowsedRun:
    """A run folder that is open for browsing. The tables are those that were current when it was opened."""

    address: str
    """The run as it was named on the command line."""
    store: Store
    rules: RunRules
    tables: Mapping[str, TableVersion]
    columns: pa.Schema
    """The columns that conditions may name, with their meanings and units."""
    sorting: Sorting | None
    """Decides which documents the mix leaves out of the dataset; None = no document is left out."""

    @property
    def num_parts(self) -> int:
        """The number of parts of every table of documents."""
        return len(self.tables["documents"].manifest.content.files)

    @cached_property
    def part_rows(self) -> list[int]:
        """The number of rows of each part of `documents`."""
        return [file.rows for file in self.tables["documents"].manifest.content.files]

    def figures(self, table: str) -> Mapping[str, Any]:
        """Return the figures of a table's manifest; empty if the run has no such table."""
        return self.tables[table].manifest.content.figures if table in self.tables else {}

    def command(self, verb: str, *arguments: str) -> str:
        """Return a command line that runs a verb on this run, quoted for a shell."""
        return shlex.join(["penstock", verb, self.address, *arguments])


def open_browsed_run(address: str, store: Store, rules: RunRules) -> BrowsedRun:
    """Open the run folder that is named `address`. Raises ContractError if it has no table `documents`."""
    open_table(store, "documents", even_replaced=True)
    tables = current_tables(store)
    sorting = None
    if "clean" in tables and TOKENS.name in read_run(store).tables:
        sorting = mixed_sorting(open_table(store, TOKENS.name, even_replaced=True)[1], tables["clean"].manifest.digest)
    return BrowsedRun(address, store, rules, tables, columns_of_run(store), sorting)


@dataclass(frozen=True)
class JudgedBatch:
    """Consecutive rows of one part of `documents`, with final verdicts and columns of later tables."""

    part: int
    first_row: int
    """Number of the first row in the part, from 0."""
    rows: pa.Table


def judged_batches(run: BrowsedRun, part: int, columns: Sequence[str]) -> Generator[JudgedBatch, None, None]:
    """Yield the rows of one part in batches, with `doc_id`, the final verdict and the searchable `columns`.

    The final verdict is that of the last step that judged the document. Signals are those that the rules compare: where
    templates were cut, those of the text without them. Raises ContractError if the tables do not hold the same
    documents.
    """
    split = _by_table(run, columns)
    replaced = _replaced(run, part, columns)
    if replaced:
        split[TEMPLATES] = list(dict.fromkeys([*split.get(TEMPLATES, ()), *replaced, TEMPLATE_CHARS]))
    with ExitStack() as stack:
        later = {name: _LaterRows(run, name, part, names, stack) for name, names in split.items()}
        names = list(dict.fromkeys(["doc_id", *VERDICT_COLUMNS, *split_documents(run, columns)]))
        left_out = _left_out(run, part)
        first_row = 0
        for batch in part_batches(run, "documents", part, names):
            rows = pa.Table.from_batches([batch])
            for name, reader in later.items():
                matched = reader.match(rows.column("doc_id").combine_chunks())
                if name == TEMPLATES:
                    rows = _without_templates(rows, matched, replaced)
                rows = _with_later(rows, matched, name, [c for c in columns if c in TABLES[name].searchable])
                if name == "clean" and run.sorting is not None:
                    rows = _with_mix(rows, matched, left_out)
            yield JudgedBatch(part, first_row, rows)
            first_row += rows.num_rows
        for reader in later.values():
            reader.finish()


def split_documents(run: BrowsedRun, columns: Sequence[str]) -> list[str]:
    """Return those of the columns that the table `documents` of this run has."""
    later = {column for name in JOINED for column in TABLES[name].searchable}
    return [name for name in columns if name not in later]


def _by_table(run: BrowsedRun, columns: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns to read of every later table: those of its verdict, and the wanted ones."""
    split: dict[str, list[str]] = {}
    for name in (name for name in JOINED if name in run.tables):
        table = TABLES[name]
        names = [*(VERDICT_COLUMNS if table.has_verdicts else ()), *(c for c in columns if c in table.searchable)]
        if names:
            split[name] = names
    return split


def _replaced(run: BrowsedRun, part: int, columns: Sequence[str]) -> list[str]:
    """Return those of the columns of `documents` that `templates` replaces."""
    if TEMPLATES not in run.tables:
        return []
    with ExitStack() as stack:
        known = set(_open_part(run, TEMPLATES, part, stack).schema_arrow.names) - {*TABLES[TEMPLATES].searchable}
    return [name for name in split_documents(run, columns) if name in known]


def _without_templates(rows: pa.Table, matched: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the rows with the values of `templates` in these columns where templates were cut."""
    is_cut = pc.fill_null(pc.greater(matched.column(TEMPLATE_CHARS), 0), False) if names else None
    for name in names:
        values = pc.if_else(is_cut, matched.column(name), rows.column(name))
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), values)
    return rows


def _with_later(rows: pa.Table, matched: pa.Table, name: str, wanted: Sequence[str]) -> pa.Table:
    """Return the rows with the wanted columns of a later table, and with its verdicts in place of earlier ones."""
    if TABLES[name].has_verdicts:
        dropped = pc.and_(matched.column("drop_stage").is_valid(), _differs(matched.column("drop_rule")))
        for column in VERDICT_COLUMNS:
            values = pc.if_else(dropped, matched.column(column), rows.column(column))
            rows = rows.set_column(rows.schema.get_field_index(column), column, values)
    for column in wanted:
        rows = rows.append_column(column, matched.column(column))
    return rows


def _differs(rules: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.fill_null(pc.not_equal(rules, DROPPED_BEFORE), False)


def _left_out(run: BrowsedRun, part: int) -> Iterator[tuple[bytes, Drop | None]]:
    """Return (doc_id, verdict of the mix) of every kept document of one part of `clean`, in order."""
    if run.sorting is None:
        return iter(())
    return mix_drops({name: run.tables[name] for name in STREAM_TABLES if name in run.tables}, part, run.sorting)


def _with_mix(rows: pa.Table, clean: pa.Table, left_out: Iterator[tuple[bytes, Drop | None]]) -> pa.Table:
    """Return the rows with the verdict of the mix on every document that the mix leaves out of the dataset."""
    verdicts = {column: rows.column(column).to_pylist() for column in VERDICT_COLUMNS}
    for index, (identifier, stage) in enumerate(zip(clean.column("doc_id").to_pylist(), verdicts["drop_stage"])):
        if identifier is None or stage is not None:
            continue
        drop = next(left_out)[1]
        if drop is not None:
            values = (TOKENS.name, drop.rule, drop.value, drop.limit)
            for column, value in zip(VERDICT_COLUMNS, values, strict=True):
                verdicts[column][index] = value
    for column, values in verdicts.items():
        position = rows.schema.get_field_index(column)
        rows = rows.set_column(position, column, pa.array(values, rows.schema.field(column).type))
    return rows


def _open_part(run: BrowsedRun, table: str, part: int, stack: ExitStack) -> pq.ParquetFile:
    version = run.tables[table]
    stream = stack.enter_context(version.folder.open_input(version.manifest.paths[part_key(part)]))
    return pq.ParquetFile(stream)


class _LaterRows:
    """The rows of one part of a later table, matched to consecutive batches of `documents`."""

    def __init__(self, run: BrowsedRun, table: str, part: int, columns: Sequence[str], stack: ExitStack):
        self._where = f"{run.store.uri}: {part_key(part)} of `{table}`"
        file = _open_part(run, table, part, stack)
        names = ["doc_id", *columns]
        self._batches = read_batches(file, table, names, BATCH_ROWS)
        missing = missing_columns(file, table, names)
        stored = [file.schema_arrow.field(name) for name in names if name not in missing.names]
        self._held = pa.schema([*stored, *missing]).empty_table().select(names)

    def match(self, ids: pa.Array) -> pa.Table:
        """Return a row for each of the next documents; a document that the table leaves out has a row of nulls."""
        while True:
            num_inside = pc.sum(pc.is_in(self._held.column("doc_id"), value_set=ids)).as_py() or 0
            batch = next(self._batches, None) if num_inside == self._held.num_rows else None
            if batch is None:
                break
            self._held = pa.concat_tables([self._held, pa.Table.from_batches([batch])])
        current, self._held = self._held.slice(0, num_inside), self._held.slice(num_inside)
        return current.take(pc.index_in(ids, value_set=current.column("doc_id").combine_chunks()))

    def finish(self) -> None:
        """Raise ContractError if rows are left that match no document."""
        if self._held.num_rows or next(self._batches, None) is not None:
            raise ContractError(
                f"{self._where}: expected documents of `documents` in the same order, got others. "
                "Run `penstock run` again: it rebuilds the table that is out of date."
            )


# Single documents: their position in `documents`, and their row in each table.


@dataclass(frozen=True)
class Position:
    """The position of a document: the number of its part, and its row in that part of `documents`, both from 0."""

    part: int
    row: int

    def __str__(self) -> str:
        return f"{self.part}.{self.row}"


def parse_position(text: str, where: str) -> Position:
    """Return the position that `PART.ROW` names. Raises ConfigError for any other text."""
    part, _, row = text.partition(".")
    if not (part.isascii() and part.isdigit() and row.isascii() and row.isdigit() and len(text) < 24):
        raise ConfigError(
            f"{where}: expected PART.ROW, such as 0.17, got {text!r}. Use a position that a search returned."
        )
    return Position(int(part), int(row))


def parse_doc_id(text: str, where: str) -> bytes:
    """Return the doc_id that hexadecimal digits name. Raises ConfigError for any other text."""
    digits = text.strip().lower()
    if len(digits) != 2 * DOC_ID_BYTES or set(digits) - set("0123456789abcdef"):
        raise ConfigError(
            f"{where}: expected {2 * DOC_ID_BYTES} hex digits, got {text[:80]!r}. Copy the id from the list of "
            "documents or from `penstock show`."
        )
    return bytes.fromhex(digits)


def find_position(run: BrowsedRun, doc_id: bytes, hint: Position | None = None) -> Position:
    """Return the position of a document. Only doc_ids are read, starting in the part of `hint`.

    Raises ConfigError if the run has no such document.
    """
    parts = list(range(run.num_parts))
    if hint is not None and hint.part < run.num_parts:
        parts.sort(key=lambda part: part != hint.part)
    for part in parts:
        row = row_number(run, "documents", part, doc_id)
        if row is not None:
            return Position(part, row)
    raise ConfigError(
        f"{run.address}: expected a document of this run, got the id {doc_id.hex()}, which no row of `documents` has. "
        "Check the id and the run."
    )


def part_batches(
    run: BrowsedRun, table: str, part: int, columns: Sequence[str]
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows of one part of a table in batches of at most BATCH_ROWS, with some of its columns."""
    with ExitStack() as stack:
        yield from read_batches(_open_part(run, table, part, stack), table, columns, BATCH_ROWS)


def row_number(run: BrowsedRun, table: str, part: int, doc_id: bytes) -> int | None:
    """Return the number of a document's row in one part of a table, from 0; None if the part has no such row."""
    first_row = 0
    with closing(part_batches(run, table, part, ["doc_id"])) as batches:
        for batch in batches:
            index = pc.index(batch.column("doc_id"), pa.scalar(doc_id, batch.schema.field("doc_id").type)).as_py()
            if index >= 0:
                return int(first_row + index)
            first_row += batch.num_rows
    return None


def read_row(run: BrowsedRun, table: str, part: int, doc_id: bytes) -> Row | None:
    """Return the row of a document in one part of a table; None if the run has no such table or row."""
    if table not in run.tables:
        return None
    number = row_number(run, table, part, doc_id)
    return None if number is None else read_rows(run, table, part, [number]).to_pylist()[0]


def read_rows(
    run: BrowsedRun, table: str, part: int, numbers: Sequence[int], columns: Sequence[str] | None = None
) -> pa.Table:
    """Return rows of one part of a table by their ascending numbers. Only row groups that hold such rows are read."""
    with ExitStack() as stack:
        file = _open_part(run, table, part, stack)
        missing = missing_columns(file, table, columns or ())
        names = None if columns is None else [name for name in columns if name not in missing.names]
        ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
        groups = np.searchsorted(ends, numbers, side="right")
        tables = []
        for group in np.unique(groups).tolist():
            start = int(ends[group - 1]) if group else 0
            indices = [number - start for number, at in zip(numbers, groups) if at == group]
            # The offsets of a column of text have 32 bits, so the taken rows must be few: a page of hits, or a batch.
            tables.append(with_nulls(file.read_row_group(group, columns=names).take(indices), missing))
        return pa.concat_tables(tables) if tables else with_nulls(file.schema_arrow.empty_table(), missing)


def counts_of(manifest: Manifest) -> dict[str, int]:
    """Return the number of documents that each `stage/rule` dropped in a table, without zeros and earlier drops."""
    dropped = manifest.content.counts.dropped
    return {name: count for name, count in dropped.items() if count and not name.endswith(f"/{DROPPED_BEFORE}")}
