"""Pairs of nodes as they are stored, a row each, and as they travel: many in one row of a shuffle.

A row of two nodes costs the JVM more to move, and to turn into Arrow and back, than numpy needs for what is done with
it. A pack holds the pairs that one task sends to one partition, up to PACK_PAIRS.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dedup.keep_order import Bytes, binary_array, rows_of_bytes
from pipeline.dedup.star_contraction import Numbers
from schemas.errors import ContractError

PACK_PAIRS = 1024
"""40 KiB for nodes of 20 bytes, so that the thousands of rows of an Arrow batch stay below 100 MiB."""
PACKS_A_BATCH = 256
PACKS = pa.schema([("target", pa.int32()), ("kind", pa.int32()), ("width", pa.int32()), ("pack", pa.binary())])
PACKS_DDL = "target int, kind int, width int, pack binary"
"""`target` is a partition, `kind` what the receiver tells packs apart by, `width` that of a node [bytes]."""


def packs(pairs: Bytes, targets: Numbers, kind: int = 0) -> Iterator[pa.RecordBatch]:
    """Pairs (pairs, 2, width) packed by the partition (pairs,) that each goes to, in batches of some packs."""
    count, _, width = pairs.shape
    if not count:
        return
    order = np.argsort(targets, kind="stable")
    ends = np.cumsum(np.bincount(targets))
    starts = np.concatenate([np.arange(low, high, PACK_PAIRS) for low, high in zip([0, *ends[:-1]], ends)])
    bounds = np.append(starts, count)
    for first in range(0, len(starts), PACKS_A_BATCH):
        cuts = bounds[first : first + PACKS_A_BATCH + 1]
        number = len(cuts) - 1
        rows = pairs[order[cuts[0] : cuts[-1]]].reshape(-1)
        offsets = ((cuts - cuts[0]) * (2 * width)).astype(np.int32)
        columns = [
            pa.array(targets[order[cuts[:-1]]].astype(np.int32)),
            pa.array(np.full(number, kind, np.int32)),
            pa.array(np.full(number, width, np.int32)),
            pa.Array.from_buffers(pa.binary(), number, [None, pa.py_buffer(offsets), pa.py_buffer(rows)]),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=PACKS)


def unpacked(batch: pa.RecordBatch) -> Bytes:
    """The pairs of all packs of a batch (pairs, 2, width). Raises ContractError if their widths differ."""
    if not batch.num_rows:
        return np.zeros((0, 2, 1), np.uint8)
    widths = pc.min_max(batch.column("width"))
    low, high = widths["min"].as_py(), widths["max"].as_py()
    if low != high:
        raise ContractError(f"dedup: promised nodes of one width, found {low} and {high} bytes; make them equal")
    column = batch.column("pack")
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].reshape(-1, 2, low)


def pairs_of(batch: pa.RecordBatch) -> Bytes:
    """The first two columns of a batch (rows, 2, width). Raises ContractError unless all values have one width."""
    if not batch.num_rows:
        return np.zeros((0, 2, 1), np.uint8)
    ends = [batch.column(end) for end in (0, 1)]
    lengths = [pc.min_max(pc.binary_length(end)) for end in ends]
    widths = {length[side].as_py() for length in lengths for side in ("min", "max")}
    nulls = sum(end.null_count for end in ends)
    if nulls or len(widths) > 1 or not min(widths):
        found = " and ".join(str(width) for width in sorted(widths - {None}))
        raise ContractError(
            f"dedup: promised nodes of one width, found {found} bytes and {nulls} nulls; make them equal"
        )
    return np.stack([rows_of_bytes(end, min(widths)) for end in ends], axis=1)


def pair_batch(pairs: Bytes) -> pa.RecordBatch:
    """Pairs as rows (node, cluster)."""
    columns = [binary_array(pairs[:, end]) for end in (0, 1)]
    return pa.RecordBatch.from_arrays(columns, names=["node", "cluster"])
