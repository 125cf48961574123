"""The bytes that a file must have by what it holds: its rows written once more by the writer that makes such files."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.takedown.shards import fresh
from pipeline.takedown.tables import GroupWriter, plain_schema
from schemas.manifest import Table
from schemas.tokens import BY_URL, SHARD_DOCS, shard_schema


class Digesting:
    """A file object that only takes the SHA-256 of what is written to it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Hash a buffer; returns its size [bytes]."""
        view = memoryview(data)
        self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Position [bytes]."""
        return self._size

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """No more is written."""
        self.closed = True

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of everything written so far."""
        return self._digest.hexdigest()


def canonical_digest(name: str, table: Table, key: str) -> str:
    """The SHA-256 that a rewritten file of a table must have by its rows."""
    path = table.manifest.run.paths[key]
    if name != "tokens":
        with table.folder.open_input(path) as file:
            stored = pq.ParquetFile(file)
            writer = GroupWriter(table.folder, key, plain_schema(stored.schema_arrow), Digesting())
            for group in range(stored.num_row_groups):
                writer.write(stored.read_row_group(group))
        return str(writer.close()["sha256"])
    schema = _schema_of(key, table.manifest.content.figures["tokenizer"])
    sink = Digesting()
    with table.folder.open_input(path) as file:
        reader = pa.ipc.open_file(file)
        writer_of = pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            writer_of.write_batch(pa.RecordBatch.from_arrays([_exact(one) for one in batch.columns], schema=schema))
        writer_of.close()
    return sink.sha256


def _schema_of(key: str, contract: Mapping[str, Any]) -> pa.Schema:
    if key.startswith("by_url/"):
        return BY_URL
    dtype = "uint16" if contract["vocab_size"] <= 1 << 16 else "uint32"
    return SHARD_DOCS if key.endswith(".docs") else shard_schema(dtype)


def _exact(array: pa.Array) -> pa.Array:
    """The array with buffers of exactly its own values; tokens are hundreds of megabytes and are not copied."""
    if not pa.types.is_list(array.type):
        return fresh(array)
    offsets = array.offsets.to_numpy()
    tokens = array.flatten().to_numpy(zero_copy_only=True)
    return pa.ListArray.from_arrays(
        pa.array((offsets - offsets[0]).astype(np.int32)), pa.array(tokens), type=array.type
    )
