"""Copies inside one part: documents whose signatures and digests are equal, found before anything is shuffled.

Only the first of them in keep order goes on to look for others, so a page that stands a million times costs one row a
window. Windows follow the part's own order, which no partitioning changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keep_order import NODE_BYTES, Bytes, order_columns, orders, rows_of_bytes
from pipeline.dedup.keys import all_keys, digests_of, key_columns, scopes_of, signatures_of
from pipeline.engine.parts import Part, measured
from pipeline.minhash.fast import mixed, odd_numbers
from pipeline.minhash.stage import SignatureConfig

WINDOW = 1 << 16
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class DedupTask:
    """One part of the documents, and how its copies are found."""

    part: Part
    dedup: DedupConfig
    signature: SignatureConfig


@dataclass(frozen=True)
class Window:
    """Consecutive measured documents of a part, and which of them are equal."""

    batch: pa.RecordBatch
    orders: Bytes
    """(documents, order_bytes)"""
    leads: Indices
    """(documents,) the first in keep order of the documents equal to each."""
    smallest: Indices
    """(documents,) the one with the smallest doc_id among them."""

    @property
    def nodes(self) -> Bytes:
        """(documents, NODE_BYTES)"""
        return self.orders[:, -NODE_BYTES:]

    @property
    def first(self) -> npt.NDArray[np.bool_]:
        """(documents,) whether the document leads."""
        first: npt.NDArray[np.bool_] = self.leads == np.arange(len(self.leads))
        return first


def windows(task: DedupTask) -> Iterator[Window]:
    """The measured documents of a part, a window at a time."""
    columns = order_columns(task.dedup)
    digest = ["raw_digest"] if task.dedup.verify == "jaccard" else []
    columns["documents"] = list(dict.fromkeys([*columns["documents"], *key_columns(task.dedup), *digest]))
    for batch in in_windows(measured(task.part, columns)):
        order = orders(batch, task.part.ordinal, task.dedup)
        leads, smallest = equal_documents(identities(batch, task.dedup, task.signature), order)
        yield Window(batch, order, leads, smallest)


def in_windows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows in batches of WINDOW; the last may be shorter."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        while rows + batch.num_rows >= WINDOW:
            head = batch.slice(0, WINDOW - rows)
            yield _joined([*held, head])
            batch, held, rows = batch.slice(WINDOW - rows), [], 0
        if batch.num_rows:
            held.append(batch)
            rows += batch.num_rows
    if rows:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def identities(batch: pa.RecordBatch, dedup: DedupConfig, signature: SignatureConfig) -> npt.NDArray[np.uint64]:
    """Two numbers of each document that are equal where its signature, digest and scope are, up to 2^-128."""
    parts = [scopes_of(batch, dedup)[:, None]]
    if dedup.exact != "off":
        parts.append(digests_of(batch, dedup).copy().view("<u8"))
    if dedup.verify == "jaccard":  # equal signatures do not prove equal shingles
        parts.append(rows_of_bytes(batch.column("raw_digest"), 16).copy().view("<u8"))
    elif dedup.near:
        parts.append(signatures_of(batch, signature).astype(np.uint64))
    values = np.concatenate(parts, axis=1)
    sums = [(mixed(values) * odd_numbers(seed, "identity", values.shape[1])).sum(axis=1) for seed in (0, 1)]
    return mixed(np.stack(sums, axis=1))


def equal_documents(identity: npt.NDArray[np.uint64], order: Bytes) -> tuple[Indices, Indices]:
    """For each document the first in keep order, and that of the smallest doc_id, among those of its identity."""
    by_order = _first_of_each(identity, np.lexsort((*words(order), identity[:, 1], identity[:, 0])))
    node = order[:, -NODE_BYTES:]
    return by_order, _first_of_each(identity, np.lexsort((*words(node), identity[:, 1], identity[:, 0])))


def words(rows: Bytes) -> list[npt.NDArray[np.uint64]]:
    """The rows as numbers that sort as their bytes do, the least significant first, as `np.lexsort` wants them."""
    count, width = rows.shape
    padded = np.zeros((count, -(-width // 8) * 8), np.uint8)
    padded[:, :width] = rows
    return [column.astype(np.uint64) for column in padded.view(">u8").T[::-1]]


def _first_of_each(identity: npt.NDArray[np.uint64], ranking: Indices) -> Indices:
    ranked = identity[ranking]
    starts = np.ones(len(ranked), bool)
    starts[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    found = np.empty(len(ranked), np.intp)
    found[ranking] = ranking[starts][np.cumsum(starts) - 1]
    return found


def keys_of(window: Window, task: DedupTask) -> npt.NDArray[np.int64]:
    """The keys of the documents that lead (leading documents, keys)."""
    return all_keys(window.batch.filter(pa.array(window.first)), task.dedup, task.signature)
