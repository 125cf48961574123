"""Part files: rows go in one by one, a Parquet file of known SHA-256 comes out.

Row groups are cut by the rows alone (count and text size), so equal rows give equal bytes on every machine.
"""

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Row
from schemas.errors import ContractError
from schemas.manifest import Table, part_key
from schemas.storage import Store
from schemas.tables import to_entries, value_type

GROUP_ROWS = 2048
GROUP_BYTES = 32 << 20


class HashingSink:
    """A file object that takes the SHA-256 of what is written through it."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        self.closed = False
        self.discards = False

    def write(self, data: Any) -> int:
        """Write and hash one buffer; returns its size [bytes]. Nothing is written once `discards` is set."""
        view = memoryview(data)
        if self.discards:
            return view.nbytes
        self._digest.update(view)
        self._stream.write(view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Position [bytes]."""
        return self.num_bytes

    def flush(self) -> None:
        """Flush the stream below."""
        self._stream.flush()

    def close(self) -> None:
        """Close the stream below."""
        if not self.closed:
            self._stream.close()
            self.closed = True

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of everything written so far."""
        return self._digest.hexdigest()


def unique_name(stem: str, suffix: str) -> str:
    """A file name no other attempt uses; it counts only once a manifest lists it."""
    return f"{stem}-{uuid.uuid4().hex[:12]}.{suffix}"


class PartWriter:
    """Writes rows to one Parquet file; `close` returns its entry for the manifest."""

    def __init__(self, folder: Store, key: str, schema: pa.Schema, size_column: str | None = None):
        self._folder, self._key, self._schema = folder, key, schema
        self._path = unique_name(key, "parquet")
        self._sink = HashingSink(folder.open_output(self._path))
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"), schema, compression="zstd", compression_level=1, write_statistics=False
        )
        self._names = schema.names
        self._allowed = frozenset(schema.names)
        self._columns: list[list[Any]] = [[] for _ in self._names]
        self._size_column = size_column
        self._pending_rows = self._pending_bytes = self.num_rows = 0

    def add(self, row: Row) -> None:
        """Append one row; columns it lacks are null. The caller sees to it that all its columns belong here."""
        for column, name in zip(self._columns, self._names):
            column.append(row.get(name))
        self._pending_rows += 1
        if self._size_column is not None:
            self._pending_bytes += len(row.get(self._size_column) or "")
        if self._pending_rows >= GROUP_ROWS or self._pending_bytes >= GROUP_BYTES:
            self._flush()

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
                raise ContractError(f"{self._key}: column {field.name} expected {field.type}, got {error}") from error
            column.clear()
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=GROUP_ROWS)
        self.num_rows += self._pending_rows
        self._pending_rows = self._pending_bytes = 0

    def close(self) -> dict[str, Any]:
        """Finish the file and make it durable; returns key, path, rows, bytes and SHA-256."""
        self._flush()
        self._writer.close()
        self._sink.close()
        self._folder.sync(self._path)
        return {
            "key": self._key,
            "path": self._path,
            "rows": self.num_rows,
            "bytes": self._sink.num_bytes,
            "sha256": self._sink.sha256,
        }

    def abandon(self) -> None:
        """Close and remove the unfinished file, as far as the storage lets us; no manifest will list it."""
        self._sink.discards = True
        self._writer.close()
        self._sink.close()
        self._folder.delete(self._path)


# The parts of a run's document-wise tables, read side by side: same documents, same order, a batch at a time.
#
# `documents` has a row for every record; `scores`, `verdicts` and `dedup` have one for every document that was
# measured.

ROWS_AT_ONCE = 4096
TEXTS_AT_ONCE = 512
EVERY_ROW = ("text",)
"""Tables beside `documents` that have a row for every record."""


@dataclass(frozen=True)
class Part:
    """One part of several tables: the folder of each table and the part's path in it."""

    ordinal: int
    folders: Mapping[str, Store]
    paths: Mapping[str, str]


def parts_of(tables: Mapping[str, Table]) -> list[Part]:
    """The parts of these tables, which all have the same number of them."""
    folders = {name: table.folder for name, table in tables.items()}
    count = len(tables["documents"].manifest.content.files)
    keys = [part_key(ordinal) for ordinal in range(count)]
    paths = [{name: table.manifest.run.paths[key] for name, table in tables.items()} for key in keys]
    return [Part(ordinal, folders, path) for ordinal, path in enumerate(paths)]


def measured(
    part: Part, columns: Mapping[str, Sequence[str]], rows_at_once: int = ROWS_AT_ONCE
) -> Iterator[pa.RecordBatch]:
    """Batches of the documents that were measured, with these columns of these tables, `doc_id` first.

    A column that two tables have is named `table.column` but for the first of them. Raises ContractError if a table
    does not hold the same documents in the same order.
    """
    own = list(dict.fromkeys(["doc_id", *columns.get("documents", ())]))
    others = {
        name: _Rows(_batches(part, name, ["doc_id", *names], rows_at_once), name, part)
        for name, names in columns.items()
        if name != "documents"
    }
    for whole in _batches(part, "documents", list(dict.fromkeys([*own, "drop_stage"])), rows_at_once):
        passed = whole.column("drop_stage").is_null()
        batch = whole.filter(passed).select(own)
        arrays = dict(zip(batch.schema.names, batch.columns))
        for name, rows in others.items():
            taken = rows.take(whole.num_rows).filter(passed) if name in EVERY_ROW else rows.take(batch.num_rows)
            rows.check(taken.column("doc_id"), batch.column("doc_id"))
            for column in columns[name]:
                arrays[column if column not in arrays else f"{name}.{column}"] = taken.column(column)
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))
    for rows in others.values():
        rows.finish()


def _batches(part: Part, table: str, columns: list[str], rows_at_once: int) -> Iterator[pa.RecordBatch]:
    with part.folders[table].open_input(part.paths[table]) as stream:
        file = pq.ParquetFile(stream)
        # an empty batch first, so that a table without rows still has its columns
        yield pa.RecordBatch.from_pylist([], pa.schema([file.schema_arrow.field(name) for name in columns]))
        yield from file.iter_batches(batch_size=rows_at_once, columns=columns)


class _Rows:
    """The rows of one part of a table, taken in any number."""

    def __init__(self, batches: Iterator[pa.RecordBatch], table: str, part: Part):
        self._batches, self._table, self._part = batches, table, part
        self._empty = next(batches)
        self._held: list[pa.RecordBatch] = []

    def take(self, count: int) -> pa.RecordBatch:
        """The next `count` rows as one batch. Raises ContractError if there are fewer."""
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

    def check(self, found: pa.Array, expected: pa.Array) -> None:
        """Raise ContractError if the documents are not the same."""
        if not found.equals(expected):
            raise self._unequal()

    def finish(self) -> None:
        """Raise ContractError if rows are left."""
        if self._held or next(self._batches, None) is not None:
            raise self._unequal()

    def _unequal(self) -> ContractError:
        return ContractError(
            f"{part_key(self._part.ordinal)}: expected the same documents in `documents` and `{self._table}`, got "
            "others. The tables are not of the same run: run the stages again."
        )


def apply_cuts(text: str, cuts: Sequence[Mapping[str, int]]) -> str:
    """The text without the spans that line rules cut."""
    if not cuts:
        return text
    pieces, end = [], 0
    for cut in cuts:
        pieces.append(text[end : cut["start"]])
        end = cut["end"]
    pieces.append(text[end:])
    return "".join(pieces)
