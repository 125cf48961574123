"""Part files: writes them as Parquet with their SHA-256, and reads the parts of several tables together in batches.

The size of a row group depends only on the number and text sizes of its rows, so equal rows give equal bytes anywhere.
"""

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.stage import Row
from schemas.blocks import BlockSums
from schemas.entries import to_entries, value_type
from schemas.errors import ContractError
from schemas.manifest import TableVersion, part_key
from schemas.older_tables import missing_columns, read_batches, read_columns
from schemas.storage import CheckedPath, Store
from schemas.tables import REPLACED, TABLES

GROUP_ROWS = 2048
GROUP_BYTES = 32 << 20
GROUP_CHARS = 128 << 20
"""Maximum length of the other texts of a row group, such as addresses, which the writer holds [code points]."""
GROUPS_OF_A_SIZE, DOUBLINGS = 64, 3
"""After so many row groups their maximum number of rows doubles, so often at most.

The writer holds the metadata of all groups until the file is complete: 160 kB for a group of 160 columns.
"""


class HashingSink:
    """A file object that counts the bytes written through it and, unless `hashes` is False, computes their SHA-256.

    If `has_blocks` is True, the checksums of its blocks are computed too.
    """

    def __init__(self, stream: Any, hashes: bool = True, has_blocks: bool = False):
        self._stream = stream
        self._digest = hashlib.sha256() if hashes else None
        self.blocks = BlockSums() if has_blocks else None
        self.num_bytes = 0
        self.closed = False
        self.discards = False

    def write(self, data: Any) -> int:
        """Write and hash one buffer and return its size [bytes]. If `discards` is True, only the size is returned."""
        view = memoryview(data)
        if self.discards:
            return view.nbytes
        if self._digest is not None:
            self._digest.update(view)
        if self.blocks is not None:
            self.blocks.add(view)
        self._stream.write(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def end_block(self) -> None:
        """End a block; without blocks, nothing is done."""
        if self.blocks is not None:
            self.blocks.end_block()

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self.num_bytes

    def flush(self) -> None:
        """Flush the underlying stream."""
        self._stream.flush()

    def close(self) -> None:
        """Close the underlying stream."""
        if not self.closed:
            self._stream.close()
            self.closed = True

    @property
    def sha256(self) -> str:
        """The SHA-256 (hex) of all bytes written so far; an empty string if `hashes` is False."""
        return self._digest.hexdigest() if self._digest is not None else ""


def unique_name(stem: str, suffix: str) -> str:
    """Return a file name that no other task attempt uses."""
    return f"{stem}-{uuid.uuid4().hex[:12]}.{suffix}"


@dataclass(frozen=True)
class WrittenFile:
    """A finished file, as a manifest lists it. `path` is relative to the folder of the table version."""

    key: str
    path: str
    rows: int
    bytes: int
    sha256: str
    blocks: str = ""
    """The blocks of a file of tokens or of a stored frame, as in schemas/blocks.py."""

    @property
    def checked_path(self) -> CheckedPath:
        """The path, with the size and SHA-256 that a reader compares."""
        return CheckedPath(self.path, self.bytes, self.sha256)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        values = {name: getattr(self, name) for name in ("key", "path", "rows", "bytes", "sha256")}
        return values | ({"blocks": self.blocks} if self.blocks else {})


class FileWriter(ABC):
    """A context manager that writes a file under a unique name and computes its SHA-256. Subclasses define the format.

    After the `with` block, `written` describes the file. If the block raises, the file is deleted.
    """

    def __init__(self, folder: Store, key: str, suffix: str, hashes: bool = True, has_blocks: bool = False):
        self._folder, self._key = folder, key
        self._path = unique_name(key, suffix)
        self._sink = HashingSink(folder.open_output(self._path), hashes, has_blocks)
        self._written: WrittenFile | None = None
        self.num_rows = 0

    @abstractmethod
    def _finish(self) -> None:
        """Write the pending rows and the end of the file."""

    @abstractmethod
    def _drop(self) -> None:
        """Close the format's writer. Bytes that it still writes are discarded."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._remove()
            return
        try:
            self._finish()
            self._sink.end_block()
            self._sink.close()
            self._folder.sync(self._path)
        except BaseException:
            self._remove()
            raise
        sink = self._sink
        blocks = sink.blocks.text if sink.blocks is not None else ""
        self._written = WrittenFile(self._key, self._path, self.num_rows, sink.num_bytes, sink.sha256, blocks)

    def _remove(self) -> None:
        self._sink.discards = True
        self._drop()
        self._sink.close()
        self._folder.delete(self._path)

    @property
    def written(self) -> WrittenFile:
        """Key, path, rows, bytes and SHA-256 of the file. Raises RuntimeError if read inside the `with` block."""
        if self._written is None:
            raise RuntimeError(f"{self._key}: expected a finished file, got an open one. Read it after the with block.")
        return self._written


def open_parquet(sink: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Return a Parquet writer with the options that all tables use."""
    file = pa.PythonFile(sink, mode="w")
    return pq.ParquetWriter(file, schema, compression="zstd", compression_level=1, write_statistics=False)


def write_group(writer: pq.ParquetWriter, rows: pa.Table) -> None:
    """Write the rows as one row group; without rows, nothing is written."""
    if rows.num_rows:
        # The chunks of a column may be slices of larger arrays; only the values in the slices are written.
        writer.write_table(rows.cast(writer.schema).combine_chunks(), row_group_size=rows.num_rows)


def group_rows(number: int) -> int:
    """Return the maximum number of rows of row group `number` (0 = first) of a file that is written row by row."""
    return GROUP_ROWS << min(number // GROUPS_OF_A_SIZE, DOUBLINGS)


class PartWriter(FileWriter):
    """A Parquet file that is written row by row, or by whole row groups."""

    def __init__(self, folder: Store, key: str, schema: pa.Schema, size_column: str | None = None):
        super().__init__(folder, key, "parquet")
        self._schema, self._size_column = schema, size_column
        self._writer = open_parquet(self._sink, schema)
        self._names = schema.names
        self._texts = [field.name for field in schema if field.type == pa.string() and field.name != size_column]
        self._columns: list[list[Any]] = [[] for _ in self._names]
        self._pending_rows = self._pending_bytes = self._pending_chars = self._num_groups = 0

    def add(self, row: Row) -> None:
        """Append one row. Missing columns are null, and columns that the schema does not have are ignored."""
        for column, name in zip(self._columns, self._names):
            column.append(row.get(name))
        self._pending_rows += 1
        if self._size_column is not None:
            self._pending_bytes += len(row.get(self._size_column) or "")
        for name in self._texts:
            if value := row.get(name):
                self._pending_chars += len(value)
        is_large = self._pending_bytes >= GROUP_BYTES or self._pending_chars >= GROUP_CHARS
        if is_large or self._pending_rows >= group_rows(self._num_groups):
            self._flush()

    def add_group(self, rows: pa.Table) -> None:
        """Append these rows as one row group."""
        self._flush()
        write_group(self._writer, rows)
        self.num_rows += rows.num_rows

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        arrays = []
        for column, field in zip(self._columns, self._schema):
            try:
                if value_type(field.type) is not None:
                    column[:] = map(to_entries, column)
                arrays.append(pa.array(column, field.type))
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise ContractError(
                    f"{self._key}: column {field.name}: expected {field.type}, got a value that does not fit "
                    f"({error}). Correct the stage that sets this column."
                ) from error
            column.clear()
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._pending_rows)
        self._num_groups += 1
        self.num_rows += self._pending_rows
        self._pending_rows = self._pending_bytes = self._pending_chars = 0

    def _finish(self) -> None:
        self._flush()
        self._writer.close()

    def _drop(self) -> None:
        self._writer.close()


# All tables of documents have the same number of parts, and part N of each holds the same documents in the same order.
# A table has a row for every record, dropped ones included, or one for every measured document: each one whose row in
# `documents` has no drop. `TABLES` says which.

ROWS_AT_ONCE = 4096
TEXTS_AT_ONCE = 512


@dataclass(frozen=True)
class Part:
    """Part number `ordinal` of several tables.

    By table, `folders` has the folder, and `paths` has the path of the part in that folder.
    """

    ordinal: int
    folders: Mapping[str, Store]
    paths: Mapping[str, CheckedPath]


def parts_of(tables: Mapping[str, TableVersion]) -> list[Part]:
    """Return the parts of several tables in order. Every table has as many parts as `documents`."""
    folders = {name: table.folder for name, table in tables.items()}
    count = len(tables["documents"].manifest.content.files)
    keys = [part_key(ordinal) for ordinal in range(count)]
    paths = [{name: table.manifest.paths[key] for name, table in tables.items()} for key in keys]
    return [Part(ordinal, folders, path) for ordinal, path in enumerate(paths)]


def read_measured(
    part: Part, columns: Mapping[str, Sequence[str]], rows_at_once: int = ROWS_AT_ONCE
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the documents of a part that `documents` did not drop, with columns of several tables.

    `columns` maps each table to the columns to read. `doc_id` is the first column of the batches. If two tables have a
    column of the same name, the column of the later table is named `table.column`. If the part has the table
    `templates`, the columns of `documents` and `text` have the values without the templates of a host. Raises
    ContractError if the tables do not hold the same documents in the same order.
    """
    own = list(dict.fromkeys(["doc_id", *columns.get("documents", ())]))
    replaced = _replaced_columns(part, columns)
    wanted, columns = {TEMPLATES: [], **columns}, _with_replacements(columns, replaced)
    others = {
        name: _Rows(_batches(part, name, ["doc_id", *names], rows_at_once), name, part)
        for name, names in columns.items()
        if name != "documents"
    }
    for whole in _batches(part, "documents", list(dict.fromkeys([*own, "drop_stage"])), rows_at_once):
        passed = whole.column("drop_stage").is_null()
        batch = whole.filter(passed).select(own)
        arrays = dict(zip(batch.schema.names, batch.columns))
        places: dict[tuple[str, str], str] = {}
        changed: pa.RecordBatch | None = None
        for name, rows in others.items():
            is_complete = TABLES[name].rows == "record"
            taken = rows.take(whole.num_rows).filter(passed) if is_complete else rows.take(batch.num_rows)
            rows.check(taken.column("doc_id"), batch.column("doc_id"))
            for column in wanted[name]:
                place = column if column not in arrays else f"{name}.{column}"
                arrays[place] = taken.column(column)
                places[name, column] = place
            if name == TEMPLATES:
                changed = taken
        if replaced and changed is not None:
            _replace(arrays, {places.get(at, at[1]): own for at, own in replaced.items()}, changed)
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))
    for rows in others.values():
        rows.finish()


TEMPLATES, TEMPLATE_CHARS = "templates", "template_chars"
"""The table with new values of columns of `documents` and `text`, and its column that is above 0 in rows with them."""


def _replaced_columns(part: Part, columns: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    """Return the columns of `documents` and `text` that `templates` replaces: (table, column) → its column."""
    if TEMPLATES not in part.paths:
        return {}
    with part.folders[TEMPLATES].open_input(part.paths[TEMPLATES]) as stream:
        known = set(pq.read_schema(stream).names) - {"doc_id", TEMPLATE_CHARS, "cuts"}
    renamed = {
        (table, column): REPLACED.get(table, {}).get(column, column)
        for table in ("documents", "text")
        for column in columns.get(table, ())
    }
    return {at: column for at, column in renamed.items() if column in known}


def _with_replacements(
    columns: Mapping[str, Sequence[str]], replaced: Mapping[tuple[str, str], str]
) -> dict[str, list[str]]:
    """Return the columns to read, by table: those that are asked for, and those of `templates` that replace others."""
    read = {table: [*names] for table, names in columns.items()}
    if replaced:
        read[TEMPLATES] = list(dict.fromkeys([*read.get(TEMPLATES, ()), *replaced.values(), TEMPLATE_CHARS]))
    return read


def _replace(arrays: dict[str, pa.Array], columns: Mapping[str, str], changed: pa.RecordBatch) -> None:
    """Replace columns (name in `arrays` → name in `templates`) in the rows from which templates were cut."""
    is_cut = pc.fill_null(pc.greater(changed.column(TEMPLATE_CHARS), 0), False)
    for name, column in columns.items():
        arrays[name] = pc.if_else(is_cut, changed.column(column), arrays[name])


def table_without_templates(part: Part, table: str, rows: pa.Table) -> pa.Table:
    """Return what `without_templates` returns, for a table of rows that are in memory."""
    batches = rows.combine_chunks().to_batches()
    return pa.Table.from_batches([without_templates(part, table, batch) for batch in batches]) if batches else rows


def without_templates(part: Part, table: str, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of `documents` or `text`, in any order, with the values that `read_measured` returns for them."""
    replaced = _replaced_columns(part, {table: rows.schema.names})
    if not replaced:
        return rows
    names = ["doc_id", TEMPLATE_CHARS, *dict.fromkeys(replaced.values())]
    ids = rows.column("doc_id")
    with part.folders[TEMPLATES].open_input(part.paths[TEMPLATES]) as stream:
        file = pq.ParquetFile(stream)
        stored = [file.schema_arrow.empty_table().select(names)]
        for group in range(file.num_row_groups):  # groups without these documents are read for their ids only
            hits = pc.is_in(read_columns(file, TEMPLATES, ["doc_id"], group).column("doc_id"), value_set=ids)
            if pc.any(hits).as_py():
                stored.append(read_columns(file, TEMPLATES, names, group).filter(hits))
    changed = pa.concat_tables(stored).combine_chunks()
    places = pc.index_in(ids, value_set=changed.column("doc_id").combine_chunks())
    (taken,) = changed.take(places).combine_chunks().to_batches() or [None]
    arrays = dict(zip(rows.schema.names, rows.columns))
    if taken is not None:
        _replace(arrays, {column: own for (_, column), own in replaced.items()}, taken)
    return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))


def _batches(part: Part, table: str, columns: list[str], rows_at_once: int) -> Iterator[pa.RecordBatch]:
    with part.folders[table].open_input(part.paths[table]) as stream:
        file = pq.ParquetFile(stream)
        missing = missing_columns(file, table, columns)
        stored = [file.schema_arrow.field(name) for name in columns if name not in missing.names]
        # An empty batch comes first, so that the caller knows the columns of a table without rows.
        yield pa.RecordBatch.from_pylist([], pa.schema([*stored, *missing]))
        yield from read_batches(file, table, columns, rows_at_once)


class _Rows:
    """The rows of one part of a table, read in batches of any size."""

    def __init__(self, batches: Iterator[pa.RecordBatch], table: str, part: Part):
        self._batches, self._table, self._part = batches, table, part
        self._empty = next(batches)
        self._held: list[pa.RecordBatch] = []

    def take(self, count: int) -> pa.RecordBatch:
        """Return the next `count` rows as one batch. Raises ContractError if fewer than `count` rows are left."""
        taken: list[pa.RecordBatch] = []
        while count:
            batch = self._held.pop() if self._held else next(self._batches, None)
            if batch is None:
                raise self._unequal()
            if batch.num_rows > count:
                self._held.append(batch.slice(count))
                batch = batch.slice(0, count)
            taken.append(batch)
            count -= batch.num_rows
        if len(taken) < 2:
            return taken[0] if taken else self._empty
        return pa.Table.from_batches(taken).combine_chunks().to_batches()[0]

    def check(self, doc_ids: pa.Array, expected: pa.Array) -> None:
        """Raise ContractError if `doc_ids` and `expected` differ, also if only their order differs."""
        if not doc_ids.equals(expected):
            raise self._unequal()

    def finish(self) -> None:
        """Raise ContractError if `take` has not returned all rows of the part."""
        if self._held or next(self._batches, None) is not None:
            raise self._unequal()

    def _unequal(self) -> ContractError:
        return ContractError(
            f"{part_key(self._part.ordinal)}: expected the same documents in `documents` and `{self._table}`, got "
            "different ones. Run `penstock run` again: it rebuilds the table that is out of date."
        )


def apply_cuts(text: str, cuts: Sequence[Mapping[str, int]]) -> str:
    """Return the text without the spans `cuts`, which are sorted and do not overlap.

    The `start` and `end` of a span are in code points.
    """
    if not cuts:
        return text
    kept, end = [], 0
    for cut in cuts:
        kept.append(text[end : cut["start"]])
        end = cut["end"]
    kept.append(text[end:])
    return "".join(kept)
