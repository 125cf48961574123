"""The keep order as byte strings: of two documents, the one with the smaller bytes is kept.

The rules of a recipe become fields of fixed width, the first rule first, each encoded so that its bytes sort like its
values. The doc_id and the part number follow, so that no two documents are equal and each can be located. Only this
string and a key are shuffled.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dedup.config import SIDES, DedupConfig
from schemas.ids import DOC_ID_BYTES
from schemas.tables import SCORES

Bytes = npt.NDArray[np.uint8]
PART_BYTES = 4
NODE_BYTES = DOC_ID_BYTES + PART_BYTES
"""Length of a node [bytes]. A node names and locates a document: doc_id, then part number, big-endian. Nodes sort like
doc_ids."""
EARLIER = 1 << 31
"""First part number in nodes of documents of earlier snapshots, which are in no part of this run: EARLIER plus the
number of the file of leaders that has the document's payload."""
EARLIER_CLUSTER = (1 << 32) - 1
"""Part number in the node that names a cluster of earlier snapshots. No file has this number."""
SNAPSHOT_BYTES = 24
NEVER = (1 << 48) - 1
Encode = Callable[[pa.RecordBatch, DedupConfig], Bytes]


def order_columns(config: DedupConfig) -> dict[str, list[str]]:
    """Return the stored columns, by table, that decide which of two copies is kept (`dedup.keep`)."""
    columns: dict[str, list[str]] = {"documents": []}
    for rule in config.keep:
        name = COLUMNS[rule] if rule in COLUMNS else rule.partition(":")[2]
        columns.setdefault("scores" if name in SCORES.names else "documents", []).append(name)
    return {table: list(dict.fromkeys(names)) for table, names in columns.items()}


def order_bytes(config: DedupConfig) -> int:
    """Return the length of a document's keep order, a byte string that ends with the document's node [bytes]."""
    return sum(WIDTHS.get(rule, SIGNAL_BYTES) for rule in config.keep) + NODE_BYTES


def orders(batch: pa.RecordBatch, ordinal: int, config: DedupConfig) -> Bytes:
    """Return the keep order of every document of a batch of part `ordinal`, as bytes (documents, order_bytes).

    A document precedes another in keep order if its bytes are smaller.
    """
    fields = [ENCODERS[rule](batch, config) if rule in ENCODERS else _signal(batch, rule) for rule in config.keep]
    return np.concatenate([*fields, nodes(batch.column("doc_id"), ordinal)], axis=1)


def nodes(doc_ids: pa.Array, ordinal: int) -> Bytes:
    """Return the node of every document of part `ordinal`: doc_id and part number (documents, NODE_BYTES)."""
    ids = rows_of_bytes(doc_ids, DOC_ID_BYTES)
    part = np.frombuffer(ordinal.to_bytes(PART_BYTES, "big"), np.uint8)
    return np.concatenate([ids, np.broadcast_to(part, (len(ids), PART_BYTES))], axis=1)


def rows_of_bytes(array: pa.Array, width: int) -> Bytes:
    """Return the values of a binary array, all `width` bytes long, as a matrix (rows, width) without a copy."""
    if not len(array):
        return np.zeros((0, width), np.uint8)
    if pa.types.is_fixed_size_binary(array.type):
        start = array.offset * width
    else:
        start = np.frombuffer(array.buffers()[1], np.int32)[array.offset]
    return np.frombuffer(array.buffers()[-1], np.uint8)[start : start + len(array) * width].reshape(-1, width)


def binary_array(rows: Bytes) -> pa.Array:
    """Return the rows of a matrix as an Arrow array of byte strings."""
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * width
    flat = np.ascontiguousarray(rows).reshape(-1)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(flat)])


def big_endian(values: npt.NDArray[np.uint64], width: int) -> Bytes:
    """Return the last `width` bytes of each number, most significant first (values, width)."""
    return values.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - width :]


def _length(batch: pa.RecordBatch, config: DedupConfig) -> Bytes:
    return big_endian(batch.column("num_bytes").to_numpy(zero_copy_only=False).astype(np.uint64), 6)


def _millis(batch: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """Return the date of each document in milliseconds, shifted to numbers of at least 0; NEVER if it has no date."""
    millis = batch.column("date").cast(pa.int64())
    shifted = pc.fill_null(millis, 0).to_numpy(zero_copy_only=False).astype(np.int64) + (1 << 46)
    shifted = np.clip(shifted, 0, NEVER - 1)  # the years -260 to 8659
    return np.where(millis.is_null().to_numpy(zero_copy_only=False), NEVER, shifted).astype(np.uint64)


def _earliest(batch: pa.RecordBatch, config: DedupConfig) -> Bytes:
    return big_endian(_millis(batch), 6)


def _latest(batch: pa.RecordBatch, config: DedupConfig) -> Bytes:
    millis = _millis(batch)
    return big_endian(np.where(millis == NEVER, np.uint64(NEVER), np.uint64(NEVER - 1) - millis), 6)


def _source_rank(batch: pa.RecordBatch, config: DedupConfig) -> Bytes:
    ranks = {name: rank for rank, name in enumerate(config.source_ranks)}
    return big_endian(_by_value(batch.column("source"), lambda name: ranks.get(name, len(ranks))), 2)


def _snapshot(batch: pa.RecordBatch, config: DedupConfig) -> Bytes:
    names = pc.dictionary_encode(pc.fill_null(batch.column("snapshot"), ""))
    padded = [name.encode().ljust(SNAPSHOT_BYTES, b"\0")[:SNAPSHOT_BYTES] for name in names.dictionary.to_pylist()]
    table = np.frombuffer(b"".join(padded), np.uint8).reshape(-1, SNAPSHOT_BYTES)
    encoded: Bytes = table[names.indices.to_numpy(zero_copy_only=False)]
    return encoded


def _signal(batch: pa.RecordBatch, rule: str) -> Bytes:
    """Return bytes that sort documents by a signal, highest or lowest first as in `rule`; NaN and null come last."""
    side, _, name = rule.partition(":")
    values = pc.cast(batch.column(name), pa.float32(), safe=False)
    numbers = pc.fill_null(values, np.nan).to_numpy(zero_copy_only=False).astype(np.float32) + np.float32(0)
    if side == SIDES[0]:
        numbers = -numbers
    bits = numbers.view(np.uint32)
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return big_endian(np.where(np.isnan(numbers), np.uint32(0xFFFFFFFF), ascending).astype(np.uint64), SIGNAL_BYTES)


def _by_value(column: pa.Array, rank: Callable[[str], int]) -> npt.NDArray[np.uint64]:
    encoded = pc.dictionary_encode(column)
    ranks: Sequence[int] = [rank(name) for name in encoded.dictionary.to_pylist()]
    values: npt.NDArray[np.uint64] = np.array(ranks, np.uint64)[encoded.indices.to_numpy(zero_copy_only=False)]
    return values


def _shortest(batch: pa.RecordBatch, config: DedupConfig) -> Bytes:
    return _length(batch, config)


def _longest(batch: pa.RecordBatch, config: DedupConfig) -> Bytes:
    return 255 - _length(batch, config)


SIGNAL_BYTES = 4
ENCODERS: Mapping[str, Encode] = {
    "source_rank": _source_rank,
    "snapshot": _snapshot,
    "earliest": _earliest,
    "latest": _latest,
    "longest": _longest,
    "shortest": _shortest,
}
COLUMNS = {
    "source_rank": "source",
    "snapshot": "snapshot",
    "earliest": "date",
    "latest": "date",
    "longest": "num_bytes",
    "shortest": "num_bytes",
}
WIDTHS = {
    "source_rank": 2,
    "snapshot": SNAPSHOT_BYTES,
    "earliest": 6,
    "latest": 6,
    "longest": 6,
    "shortest": 6,
}
