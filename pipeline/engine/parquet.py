"""Part files: rows go in one by one, a Parquet file of known SHA-256 comes out.

Row groups are cut by the rows alone (count and text size), so equal rows give equal bytes on every machine.
"""

import hashlib
import uuid
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.stage import Row
from schemas.entries import to_entries, value_type
from schemas.errors import ContractError
from schemas.storage import Store

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
                raise ContractError(f"{self._key}: column {field.name} promised {field.type}, found {error}") from error
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
