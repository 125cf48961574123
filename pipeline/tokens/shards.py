"""Writers of the dataset's Arrow IPC files: a shard with its document index, and the URL index.

Every record batch is built from new arrays. A slice of a larger array would write the bytes outside the slice too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.engine.parquet import FileWriter
from pipeline.engine.part import PartResult
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.tokens import BATCH_DOCUMENTS, BY_URL, SHARD_DOCS, docs_key, shard_key, shard_schema


class IpcWriter(FileWriter):
    """An uncompressed Arrow IPC file, written batch by batch. If `has_blocks` is True, each batch is a block."""

    def __init__(self, folder: Store, key: str, schema: pa.Schema, has_blocks: bool = False):
        super().__init__(folder, key, "arrow", has_blocks=has_blocks)
        self._schema = schema
        options = pa.ipc.IpcWriteOptions(compression=None)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._sink, mode="w"), schema, options=options)

    def write(self, arrays: list[pa.Array], metadata: Mapping[str, bytes] | None = None) -> None:
        """Write one record batch from its columns, in the order of the schema, and its metadata."""
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._writer.write_batch(batch, metadata)
        self._sink.end_block()
        self.num_rows += batch.num_rows

    def _finish(self) -> None:
        self._writer.close()

    def _drop(self) -> None:
        self._writer.close()


def regroup(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of all batches in lists of `size` rows; only the last list may be shorter."""
    pending: list[dict[str, Any]] = []
    for batch in batches:
        pending.extend(batch.to_pylist())
        while len(pending) >= size:
            yield pending[:size]
            pending = pending[size:]
    if pending:
        yield pending


def write_shard(folder: Store, stream: str, number: int, batches: Iterator[pa.RecordBatch], dtype: str) -> PartResult:
    """Write a shard and its document index from rows sorted by (key, doc_id).

    In the returned `figures`, `tokens` maps the name of the stream to the number of tokens in the shard.
    """
    schema = shard_schema(dtype)
    offset = 0
    with (
        IpcWriter(folder, shard_key(stream, number), schema, has_blocks=True) as tokens_writer,
        IpcWriter(folder, docs_key(stream, number), SHARD_DOCS) as docs_writer,
    ):
        for rows in regroup(batches, BATCH_DOCUMENTS):
            lengths = np.array([row["num_tokens"] for row in rows], np.int64)
            ends = np.cumsum(lengths)
            flat = np.frombuffer(b"".join(row["tokens"] for row in rows), dtype)
            tokens = pa.ListArray.from_arrays(
                pa.array(np.concatenate([[0], ends]).astype(np.int32)), pa.array(flat), type=schema.field("tokens").type
            )
            tokens_writer.write([pa.array([row["doc_id"] for row in rows], pa.binary(16)), tokens])
            starts = offset + ends - lengths
            for row, start in zip(rows, starts.tolist()):
                row["token_offset"] = start
            docs_writer.write([pa.array([row[field.name] for row in rows], field.type) for field in SHARD_DOCS])
            offset += int(ends[-1])
    files = {"tokens": tokens_writer.written, "docs": docs_writer.written}
    return PartResult(files, _counts(tokens_writer), {"tokens": {stream: offset}})


def write_by_url(folder: Store, number: int, batches: Iterator[pa.RecordBatch]) -> PartResult:
    """Write one file of the URL index from rows sorted by (surt, url, doc_id)."""
    with IpcWriter(folder, f"by_url/{number:05d}", BY_URL) as writer:
        for rows in regroup(batches, BATCH_DOCUMENTS):
            writer.write([pa.array([row[field.name] for row in rows], field.type) for field in BY_URL])
    return PartResult({"by_url": writer.written}, _counts(writer))


def _counts(writer: IpcWriter) -> Counts:
    return Counts(rows_in=writer.num_rows, rows_kept=writer.num_rows)
