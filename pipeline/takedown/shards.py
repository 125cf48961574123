"""Shards without some documents: token files, their document index and the index by URL, written anew.

With tombstones a removed document stays as a row of tombstone tokens under no id, so every position keeps its place.
Every array is built anew and exact, so that no byte of a neighbour, removed or not, gets into padding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.tokens.shards import IpcWriter
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import BATCH_DOCUMENTS, BY_URL, SHARD_DOCS, Dataset, Shard, docs_key, shard_key, shard_schema

Rows = NDArray[np.int64]
Tokens = NDArray[np.unsignedinteger]
Entry = dict[str, Any]
BLANK: Mapping[str, Any] = {"doc_id": REMOVED_ID, "split": "", "offset": 0, "length": 0, "url": "", "num_bytes": 0}
"""What the document index says of a removed document; its source and its tokens' place stay, all else is null."""
KEPT = ("source", "token_offset", "num_tokens")


@dataclass(frozen=True)
class RemovedRows:
    """Where removed documents lie in a shard."""

    shard: Shard
    rows: Rows
    """Their rows."""
    documents: list[bytes]
    """Their ids."""
    spans: list[tuple[int, int]]
    """First token in the shard, and number of tokens, of each."""


def find_removed_rows(dataset: Dataset, documents: frozenset[bytes]) -> list[RemovedRows]:
    """Where documents lie in the shards."""
    wanted = pa.array(sorted(documents), pa.binary(16))
    places = []
    for shards in dataset.streams.values():
        for shard in shards:
            with dataset.folder.open_input(shard.docs_path) as file:
                index = pa.ipc.open_file(file).read_all().select(["doc_id", "token_offset", "num_tokens"])
                found = pc.is_in(index.column("doc_id"), wanted).combine_chunks().to_numpy(zero_copy_only=False)
                rows = np.flatnonzero(found).astype(np.int64)
                if not len(rows):
                    continue
                own = index.take(pa.array(rows)).to_pydict()
            spans = list(zip(own["token_offset"], own["num_tokens"], strict=True))
            places.append(RemovedRows(shard, rows, own["doc_id"], spans))
    return places


def exact_copy(array: pa.Array) -> pa.Array:
    """A copy with buffers of exactly its own values."""
    return pa.concat_arrays([array, array.slice(0, 0)])


def token_batches(folder: Store, path: str) -> Iterator[tuple[pa.Array, Tokens, Rows]]:
    """Ids, tokens and lengths of the documents of every record batch of a shard."""
    with folder.open_input(path) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            column = batch.column("tokens")
            lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
            yield batch.column("doc_id"), column.flatten().to_numpy(zero_copy_only=True), lengths


def write_tokens(writer: IpcWriter, dtype: str, ids: pa.Array, tokens: Tokens, lengths: Rows) -> None:
    """Write one record batch of a shard."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kind = shard_schema(dtype).field("tokens").type
    writer.write([exact_copy(ids), pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens), type=kind)])


def blank_tokens(old: Store, place: RemovedRows, new: Store, dtype: str, tombstone: int) -> tuple[Entry, list[Tokens]]:
    """Write a shard in which documents have become tombstones; returns its entry and the removed tokens."""
    shard, removed, first = place.shard, [], 0
    with IpcWriter(new, shard_key(shard.stream, shard.number), shard_schema(dtype)) as writer:
        for ids, tokens, lengths in token_batches(old, shard.path):
            rows = _inside(place.rows, first, len(lengths))
            first += len(lengths)
            if len(rows):
                tokens, ends = tokens.copy(), np.cumsum(lengths)
                for row in rows.tolist():
                    begin, end = int(ends[row] - lengths[row]), int(ends[row])
                    removed.append(tokens[begin:end].copy())
                    tokens[begin:end] = tombstone
                ids = _with(ids, rows, REMOVED_ID)
            write_tokens(writer, dtype, ids, tokens, lengths)
    return writer.written.to_json(), removed


def cut_tokens(old: Store, place: RemovedRows, new: Store, dtype: str) -> tuple[Entry, list[Tokens]]:
    """Write a shard without documents, its batches cut at fixed counts again; returns its entry and removed tokens."""
    shard, removed, first = place.shard, list[Tokens](), 0
    with IpcWriter(new, shard_key(shard.stream, shard.number), shard_schema(dtype)) as writer:
        held: list[tuple[list[bytes], Tokens, Rows]] = []
        for ids, tokens, lengths in token_batches(old, shard.path):
            rows = _inside(place.rows, first, len(lengths))
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
    return writer.written.to_json(), removed


def _write_held(
    writer: IpcWriter, dtype: str, held: list[tuple[list[bytes], Tokens, Rows]], count: int
) -> list[tuple[list[bytes], Tokens, Rows]]:
    """Write the first `count` documents of those held, or all; returns the rest."""
    ids = [one for own, _, _ in held for one in own]
    tokens, lengths = (np.concatenate([part[column] for part in held]) for column in (1, 2))
    end = int(lengths[:count].sum())
    write_tokens(writer, dtype, pa.array(ids[:count], pa.binary(16)), tokens[:end], lengths[:count])
    return [(ids[count:], tokens[end:], lengths[count:])]


def blank_docs(old: Store, place: RemovedRows, new: Store) -> Entry:
    """Write a document index in which the rows of documents say nothing of them; returns its entry."""
    shard, first = place.shard, 0
    with IpcWriter(new, docs_key(shard.stream, shard.number), SHARD_DOCS) as writer:
        for batch in _batches(old, shard.docs_path):
            rows = _inside(place.rows, first, batch.num_rows)
            first += batch.num_rows
            arrays = [batch.column(field.name) for field in SHARD_DOCS]
            if len(rows):
                blank = [field.name not in KEPT for field in SHARD_DOCS]
                values = [BLANK.get(field.name) for field in SHARD_DOCS]
                arrays = [_with(a, rows, v) if b else a for a, v, b in zip(arrays, values, blank, strict=True)]
            writer.write([exact_copy(array) for array in arrays])
    return writer.written.to_json()


def cut_docs(old: Store, place: RemovedRows, new: Store) -> Entry:
    """Write a document index without documents, those behind them moved up; returns its entry."""
    shard = place.shard
    table = pa.Table.from_batches(_batches(old, shard.docs_path), SHARD_DOCS)
    stays = np.ones(table.num_rows, np.bool_)
    stays[place.rows] = False
    table = table.filter(pa.array(stays))
    lengths = table.column("num_tokens").to_numpy().astype(np.int64)
    offsets = pa.chunked_array([pa.array(np.cumsum(lengths) - lengths)])
    table = table.set_column(table.schema.get_field_index("token_offset"), SHARD_DOCS.field("token_offset"), offsets)
    return _write_table(new, docs_key(shard.stream, shard.number), SHARD_DOCS, table)


def cut_by_url(old: Store, key: str, path: str, new: Store, documents: pa.Array) -> Entry | None:
    """Write a bucket of the index by URL without documents; returns its entry, None if it has none of them."""
    kept, touched = [], False
    for batch in _batches(old, path):
        gone = pc.is_in(batch.column("doc_id"), documents)
        here = bool(pc.any(gone).as_py())
        kept.append(batch.filter(pc.invert(gone)) if here else batch)
        touched |= here
    return _write_table(new, key, BY_URL, pa.Table.from_batches(kept, BY_URL)) if touched else None


def _write_table(new: Store, key: str, schema: pa.Schema, table: pa.Table) -> Entry:
    """Write the rows of a table in batches of the fixed number of rows, each copied once, into arrays of its own."""
    with IpcWriter(new, key, schema) as writer:
        for first in range(0, table.num_rows, BATCH_DOCUMENTS):
            rows = table.slice(first, BATCH_DOCUMENTS)
            writer.write([pa.concat_arrays([*own.chunks, own.chunk(0).slice(0, 0)]) for own in rows.columns])
    return writer.written.to_json()


def _batches(folder: Store, path: str) -> Sequence[pa.RecordBatch]:
    file = folder.open_input(path)
    reader = pa.ipc.open_file(file)
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _inside(rows: Rows, first: int, count: int) -> Rows:
    """Those of a file's rows that lie in a batch, counted in it."""
    return rows[(rows >= first) & (rows < first + count)] - first


def _with(array: pa.Array, rows: Rows, value: Any) -> pa.Array:
    """The array with one value in these rows."""
    chosen = np.zeros(len(array), np.bool_)
    chosen[rows] = True
    return pc.if_else(pa.array(chosen), pa.scalar(value, array.type), array)
