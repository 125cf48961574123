"""Buckets: documents that share a key, streamed in keep order and never held; the others are paired with the first.

A bucket of a million documents gives a million pairs. Pairs that verification does not join come back with their keys,
and the first of them leads the next round.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dedup.keep_order import NODE_BYTES, Bytes, binary_array, rows_of_bytes

KEYS = pa.schema([pa.field("key", pa.int64()), pa.field("order", pa.binary())])
KEYS_DDL = "key long, order binary"
PAIRS = pa.schema(
    [
        pa.field("node", pa.binary()),
        pa.field("leader", pa.binary()),
        pa.field("key", pa.int64()),
        pa.field("order", pa.binary()),
    ]
)
PAIRS_DDL = "node binary, leader binary, key long, order binary"
WANTED = b"\0"
"""In place of a leader: the node itself leads, and what it is compared by is wanted. Sorts before any leader."""
PAIRED, LED = "pairs", "leads"
"""Kinds of rows of buckets: PAIRS, and KEYS of those that lead."""
KINDS = {PAIRED: PAIRS_DDL, LED: KEYS_DDL}


def pairs_of_buckets(batches: Iterator[pa.RecordBatch], width: int) -> Iterator[pa.RecordBatch]:
    """The pairs (PAIRS) of every bucket of rows sorted by (key, order), each order `width` bytes long, and a WANTED row
    for each leader of a pair."""
    return (batch for kind, batch in rows_of_buckets(0, batches, width) if kind == PAIRED)


def rows_of_buckets(number: int, batches: Iterator[pa.RecordBatch], width: int) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The same pairs, and what leads each bucket, by their kinds (see KINDS); `number` is that of the partition."""
    last_key: int | None = None
    leader = np.zeros((1, width), np.uint8)
    asked = False
    for batch in batches:
        if not batch.num_rows:
            continue
        keys = batch.column(0).to_numpy()
        rows = rows_of_bytes(batch.column(1), width)
        starts = np.ones(len(keys), bool)
        starts[1:] = keys[1:] != keys[:-1]
        starts[0] = last_key is None or keys[0] != last_key
        bucket = np.cumsum(starts)  # 0: the bucket that the batch before has opened
        firsts = np.concatenate([leader, rows[starts]])
        members = np.flatnonzero(~starts)
        if len(members):
            yield PAIRED, _pairs(rows[members], firsts[bucket[members]][:, -NODE_BYTES:], keys[members])
            wanted = np.unique(bucket[members])
            if asked and wanted[0] == 0:
                wanted = wanted[1:]
            if len(wanted):
                marks = np.full((len(wanted), 1), WANTED[0], np.uint8)
                yield PAIRED, _pairs(firsts[wanted], marks, np.zeros(len(wanted), np.int64))
        yield LED, pa.RecordBatch.from_arrays([pa.array(keys[starts]), binary_array(rows[starts])], schema=KEYS)
        has_members = len(members) > 0 and bucket[members[-1]] == bucket[-1]
        asked = has_members or (asked and bucket[-1] == 0)
        last_key, leader = int(keys[-1]), firsts[-1:].copy()


def _pairs(orders: Bytes, leaders: Bytes, keys: npt.NDArray[np.int64]) -> pa.RecordBatch:
    columns = [binary_array(orders[:, -NODE_BYTES:]), binary_array(leaders), pa.array(keys), binary_array(orders)]
    return pa.RecordBatch.from_arrays(columns, schema=PAIRS)


def key_rows(keys: npt.NDArray[np.int64], orders: Bytes) -> Iterator[pa.RecordBatch]:
    """One row (KEYS) for each key of each document; `keys` is (documents, keys)."""
    order = binary_array(orders)
    for column in keys.T:
        yield pa.RecordBatch.from_arrays([pa.array(np.ascontiguousarray(column)), order], schema=KEYS)
