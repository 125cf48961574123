"""Rewriting of shards without some documents: token files, document indexes and the index by URL.

In the mode `tombstones`, a row of tombstone tokens without an id replaces a removed document, so no token changes its
position. Every array is copied to buffers of exactly its own size, so that padding holds no bytes of other documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.engine.parquet import WrittenFile
from pipeline.tokens.shards import IpcWriter
from schemas.arrow_files import ArrowFile
from schemas.storage import CheckedPath, Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import BATCH_DOCUMENTS, BY_URL, SHARD_DOCS, Dataset, Shard, docs_key, shard_key, shard_schema

Rows = NDArray[np.int64]
Tokens = NDArray[np.unsignedinteger]
BLANK: Mapping[str, Any] = {"doc_id": REMOVED_ID, "split": "", "offset": 0, "length": 0, "url": "", "num_bytes": 0}
"""Values of these columns in the blanked row of a removed document in the document index. `KEPT` columns are unchanged,
and all others are null."""
KEPT = ("source", "token_offset", "num_tokens")


@dataclass(frozen=True)
class RemovedRows:
    """The rows and tokens of a shard that belong to removed documents."""

    shard: Shard
    rows: Rows
    """Row numbers of the documents."""
    documents: list[bytes]
    """Ids of the documents."""
    spans: list[tuple[int, int]]
    """(first token in the shard, number of tokens) of each document."""


def find_removed_rows(dataset: Dataset, documents: frozenset[bytes]) -> list[RemovedRows]:
    """Return, for each shard that holds any of the documents, the rows and the token positions of these documents."""
    ids = pa.array(sorted(documents), pa.binary(16))
    targets = []
    for shards in dataset.streams.values():
        for shard in shards:
            with dataset.folder.open_input(shard.docs_path) as file:
                rows_of = ArrowFile(file, f"{dataset.folder.uri}/{shard.docs_path}").read_all()
                index = rows_of.select(["doc_id", "token_offset", "num_tokens"])
                is_listed = pc.is_in(index.column("doc_id"), ids).combine_chunks().to_numpy(zero_copy_only=False)
                rows = np.flatnonzero(is_listed).astype(np.int64)
                if not len(rows):
                    continue
                own = index.take(pa.array(rows)).to_pydict()
            spans = list(zip(own["token_offset"], own["num_tokens"], strict=True))
            targets.append(RemovedRows(shard, rows, own["doc_id"], spans))
    return targets


def exact_copy(array: pa.Array) -> pa.Array:
    """Return a copy of the array whose buffers hold only its own values, and zeros or nothing in its null cells."""
    if not array.null_count:
        return pa.concat_arrays([array, array.slice(0, 0)])
    # Other kernels set a validity bit and leave the value of a null cell in the buffer, where its bytes can be read.
    indices = np.arange(len(array))
    return array.take(pa.array(indices, mask=array.is_null().to_numpy(zero_copy_only=False)))


def token_batches(folder: Store, path: CheckedPath) -> Iterator[tuple[pa.Array, Tokens, Rows]]:
    """Yield (ids, concatenated tokens, numbers of tokens) of the documents in each record batch of a shard."""
    with folder.open_input(path) as file:
        reader = ArrowFile(file, f"{folder.uri}/{path}")
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            column = batch.column("tokens")
            lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
            yield batch.column("doc_id"), column.flatten().to_numpy(zero_copy_only=True), lengths


def write_tokens(writer: IpcWriter, dtype: str, ids: pa.Array, tokens: Tokens, lengths: Rows) -> None:
    """Write the documents with these ids, tokens (concatenated) and lengths as one record batch of a shard."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kind = shard_schema(dtype).field("tokens").type
    writer.write([exact_copy(ids), pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens), type=kind)])


def blank_tokens(
    old: Store, target: RemovedRows, new: Store, dtype: str, tombstone: int
) -> tuple[WrittenFile, list[Tokens]]:
    """Write a shard in which tombstone tokens replace the tokens of the documents of `target`.

    Return the written file and the original tokens of each removed document.
    """
    shard, removed, first = target.shard, [], 0
    with IpcWriter(new, shard_key(shard.stream, shard.number), shard_schema(dtype), has_blocks=True) as writer:
        for ids, tokens, lengths in token_batches(old, shard.path):
            rows = _inside(target.rows, first, len(lengths))
            first += len(lengths)
            if len(rows):
                tokens, ends = tokens.copy(), np.cumsum(lengths)
                for row in rows.tolist():
                    begin, end = int(ends[row] - lengths[row]), int(ends[row])
                    removed.append(tokens[begin:end].copy())
                    tokens[begin:end] = tombstone
                ids = _with(ids, rows, REMOVED_ID)
            write_tokens(writer, dtype, ids, tokens, lengths)
    return writer.written, removed


def cut_tokens(old: Store, target: RemovedRows, new: Store, dtype: str) -> tuple[WrittenFile, list[Tokens]]:
    """Write a shard without the documents of `target`; return the written file and the tokens of each removed document.

    The remaining documents are regrouped: every record batch except the last has `BATCH_DOCUMENTS` documents.
    """
    shard, removed, first = target.shard, list[Tokens](), 0
    with IpcWriter(new, shard_key(shard.stream, shard.number), shard_schema(dtype), has_blocks=True) as writer:
        held: list[tuple[list[bytes], Tokens, Rows]] = []
        for ids, tokens, lengths in token_batches(old, shard.path):
            rows = _inside(target.rows, first, len(lengths))
            first += len(lengths)
            stays = np.ones(len(lengths), np.bool_)
            stays[rows] = False
            ends = np.cumsum(lengths)
            removed += [tokens[ends[row] - lengths[row] : ends[row]].copy() for row in rows.tolist()]
            held.append((ids.filter(pa.array(stays)).to_pylist(), tokens[np.repeat(stays, lengths)], lengths[stays]))
            while sum(len(own) for own, _, _ in held) >= BATCH_DOCUMENTS:
                held = _write_held(writer, dtype, held, BATCH_DOCUMENTS)
        if any(len(own) for own, _, _ in held):
            _write_held(writer, dtype, held, BATCH_DOCUMENTS)
    return writer.written, removed


def _write_held(
    writer: IpcWriter, dtype: str, held: list[tuple[list[bytes], Tokens, Rows]], count: int
) -> list[tuple[list[bytes], Tokens, Rows]]:
    """Write up to `count` documents of `held` as one record batch, and return the rest of `held`."""
    ids = [identifier for own, _, _ in held for identifier in own]
    tokens, lengths = (np.concatenate([part[column] for part in held]) for column in (1, 2))
    end = int(lengths[:count].sum())
    write_tokens(writer, dtype, pa.array(ids[:count], pa.binary(16)), tokens[:end], lengths[:count])
    return [(ids[count:], tokens[end:], lengths[count:])]


def blank_docs(old: Store, target: RemovedRows, new: Store) -> WrittenFile:
    """Write a shard's document index with the rows of the documents of `target` blanked; return the written file."""
    shard, first = target.shard, 0
    with IpcWriter(new, docs_key(shard.stream, shard.number), SHARD_DOCS) as writer:
        for batch in _batches(old, shard.docs_path):
            rows = _inside(target.rows, first, batch.num_rows)
            first += batch.num_rows
            arrays = [batch.column(field.name) for field in SHARD_DOCS]
            if len(rows):
                blank = [field.name not in KEPT for field in SHARD_DOCS]
                values = [BLANK.get(field.name) for field in SHARD_DOCS]
                arrays = [_with(a, rows, v) if b else a for a, v, b in zip(arrays, values, blank, strict=True)]
            writer.write([exact_copy(array) for array in arrays])
    return writer.written


def cut_docs(old: Store, target: RemovedRows, new: Store) -> WrittenFile:
    """Write a shard's document index without the documents of `target` and with new token offsets; return the file."""
    shard = target.shard
    table = pa.Table.from_batches(_batches(old, shard.docs_path), SHARD_DOCS)
    stays = np.ones(table.num_rows, np.bool_)
    stays[target.rows] = False
    table = table.filter(pa.array(stays))
    lengths = table.column("num_tokens").to_numpy().astype(np.int64)
    offsets = pa.chunked_array([pa.array(np.cumsum(lengths) - lengths)])
    table = table.set_column(table.schema.get_field_index("token_offset"), SHARD_DOCS.field("token_offset"), offsets)
    return _write_table(new, docs_key(shard.stream, shard.number), SHARD_DOCS, table)


def bucket_holds(old: Store, path: CheckedPath, documents: pa.Array) -> bool:
    """Return True if a bucket of the index by URL holds any of the documents."""
    return any(pc.any(pc.is_in(batch.column("doc_id"), documents)).as_py() for batch in _batches(old, path))


def cut_by_url(old: Store, key: str, path: CheckedPath, new: Store, documents: pa.Array) -> WrittenFile:
    """Write a bucket of the index by URL without the documents; return the written file."""
    kept = []
    for batch in _batches(old, path):
        removed = pc.is_in(batch.column("doc_id"), documents)
        kept.append(batch.filter(pc.invert(removed)) if pc.any(removed).as_py() else batch)
    return _write_table(new, key, BY_URL, pa.Table.from_batches(kept, BY_URL))


def _write_table(new: Store, key: str, schema: pa.Schema, table: pa.Table) -> WrittenFile:
    """Write a table in record batches of `BATCH_DOCUMENTS` rows, and return the written file."""
    with IpcWriter(new, key, schema) as writer:
        for first in range(0, table.num_rows, BATCH_DOCUMENTS):
            rows = table.slice(first, BATCH_DOCUMENTS)
            writer.write([exact_copy(pa.concat_arrays(own.chunks)) for own in rows.columns])
    return writer.written


def _batches(folder: Store, path: CheckedPath) -> Sequence[pa.RecordBatch]:
    file = folder.open_input(path)
    reader = ArrowFile(file, f"{folder.uri}/{path}")
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _inside(rows: Rows, first: int, count: int) -> Rows:
    """Return the row numbers in `rows` that are in a batch, counted from the start of the batch.

    The batch contains `count` rows of the file, from row `first` on.
    """
    return rows[(rows >= first) & (rows < first + count)] - first


def _with(array: pa.Array, rows: Rows, value: Any) -> pa.Array:
    """Return a copy of the array in which `value` replaces the values at the indices `rows`."""
    chosen = np.zeros(len(array), np.bool_)
    chosen[rows] = True
    return pc.if_else(pa.array(chosen), pa.scalar(value, array.type), array)
