"""Verification of candidate pairs: payloads of both documents are joined to each pair and compared, in streams.

First every document of a bucket is joined with its own signature, then with the signature of the bucket's leader, its
first document in keep order. Each signature crosses the network once per pair, and no worker holds a table of
signatures.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keep_order import NODE_BYTES, binary_array, rows_of_bytes
from pipeline.dedup.keys import DIGEST_BYTES, KEYS, KEYS_DDL, PAIRS
from pipeline.minhash.simhash import distance
from pipeline.minhash.stage import SignatureConfig, jaccard, similarity, value_type
from schemas.errors import ContractError

PAYLOADS = pa.schema([pa.field("node", pa.binary()), pa.field("payload", pa.binary())])
PAYLOADS_DDL = "node binary, payload binary"
WITH_PAYLOADS = pa.schema([*PAIRS, pa.field("payload", pa.binary())])
CARRIED = pa.schema([pa.field(name, pa.binary()) for name in ("leader", "node", "payload", "keys", "order")])
CARRIED_DDL = "leader binary, node binary, payload binary, keys binary, order binary"
SIMILAR = pa.schema(
    [pa.field("node", pa.binary()), pa.field("other", pa.binary()), pa.field("similarity", pa.float32())]
)
SIMILAR_DDL = "node binary, other binary, similarity float"
JOINED, BEST, FAILED = "joined", "best", "failed"
"""Kinds of outcomes. `joined`: documents with the leader that they match; `best`: leaders with the most similar
document that matches them; `failed`: documents that do not match their leader, with their keys, for the next round."""
OUTCOMES = {JOINED: SIMILAR_DDL, BEST: SIMILAR_DDL, FAILED: KEYS_DDL}
Outcomes = Iterator[tuple[str, pa.RecordBatch]]
Compare = Callable[[pa.Array, pa.Array], npt.NDArray[np.float32]]
"""Function (payloads, payloads) → the similarity of each pair; NaN for pairs that are too different to be joined."""


def attach_payloads(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each distinct pair (node, leader) once, with the payload of the node (CARRIED).

    The input (`WITH_PAYLOADS`) is sorted by (node, leader), so the row with a node's payload comes first. Raises
    ContractError if such a row is missing.
    """
    payload, owner, last_size = pa.array([b""], pa.binary()), np.zeros((1, NODE_BYTES), np.uint8), 0
    for batch in batches:
        if not batch.num_rows:
            continue
        node = rows_of_bytes(batch.column(0), NODE_BYTES)
        sizes = lengths(batch.column(1))
        own = sizes == 0
        row = np.cumsum(own)  # 0: the last payload of the previous batch
        payloads = pa.concat_arrays([payload, batch.column(4).filter(pa.array(own))])
        owners = np.concatenate([owner, node[own]])
        if (owners[row] != node).any():
            raise ContractError(
                "dedup: expected a signature for every document of a bucket, got a document without one. "
                "Delete the folder `documents` in the run folder, then run `penstock run` again."
            )
        requested = (sizes == 1) & (np.concatenate([[last_size], sizes[:-1]]) == 0)
        if requested.any():
            count = int(requested.sum())
            empty = pa.array([b""] * count, pa.binary())
            columns = [binary_array(node[requested]), empty, payloads.take(pa.array(row[requested])), empty, empty]
            yield pa.RecordBatch.from_arrays(columns, schema=CARRIED)
        pairs = np.flatnonzero(sizes == NODE_BYTES)
        if len(pairs):
            yield _distinct(batch.take(pa.array(pairs)), payloads.take(pa.array(row[pairs])))
        payload, owner, last_size = payloads.slice(len(payloads) - 1), owners[-1:].copy(), int(sizes[-1])


def _distinct(pairs: pa.RecordBatch, payloads: pa.Array) -> pa.RecordBatch:
    """Merge all rows of a pair (node, leader) into one, with the keys of these rows and the payload of the node.

    The rows of a pair must be adjacent.
    """
    both = np.concatenate([rows_of_bytes(pairs.column(column), NODE_BYTES) for column in (0, 1)], axis=1)
    starts = np.flatnonzero(np.concatenate([[True], (both[1:] != both[:-1]).any(axis=1)]))
    offsets = np.append(starts, len(both)).astype(np.int32) * 8
    keys = np.ascontiguousarray(pairs.column(2).to_numpy())
    joined = pa.Array.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(keys)])
    chosen = pa.array(starts)
    node, leader, order = (pairs.column(column).take(chosen) for column in (0, 1, 3))
    return pa.RecordBatch.from_arrays([leader, node, payloads.take(chosen), joined, order], schema=CARRIED)


def compare_pairs(batches: Iterator[pa.RecordBatch], compare: Compare) -> Outcomes:
    """Compare all pairs with the function `compare`, and yield (kind, batch) of the results; see OUTCOMES.

    The input (CARRIED) is sorted by (leader, node), so the row with a leader's payload comes first. Raises
    ContractError if such a row is missing.
    """
    payload, owner = pa.array([b""], pa.binary()), np.zeros((1, NODE_BYTES), np.uint8)
    for batch in batches:
        if not batch.num_rows:
            continue
        leader = rows_of_bytes(batch.column(0), NODE_BYTES)
        own = lengths(batch.column(1)) == 0
        row = np.cumsum(own)
        payloads = pa.concat_arrays([payload, batch.column(2).filter(pa.array(own))])
        owners = np.concatenate([owner, leader[own]])
        if (owners[row] != leader).any():
            raise ContractError(
                "dedup: expected a signature for the first document of every bucket, got a document without one. "
                "Delete the folder `documents` in the run folder, then run `penstock run` again."
            )
        pairs = np.flatnonzero(~own)
        if len(pairs):
            members = batch.take(pa.array(pairs))
            yield from _outcomes(members, compare(payloads.take(pa.array(row[pairs])), members.column(2)))
        payload, owner = payloads.slice(len(payloads) - 1), owners[-1:].copy()


def _outcomes(members: pa.RecordBatch, similar: npt.NDArray[np.float32]) -> Outcomes:
    leader, node, _, keys, order = members.columns
    joined = np.flatnonzero(~np.isnan(similar))
    failed = np.flatnonzero(np.isnan(similar))
    if len(joined):
        yield JOINED, _similar(node, leader, similar, joined)
        groups = rows_of_bytes(leader, NODE_BYTES)[joined]
        starts = np.concatenate([[True], (groups[1:] != groups[:-1]).any(axis=1)])
        ranking = np.lexsort((np.arange(len(joined)), -similar[joined], np.cumsum(starts)))
        yield BEST, _similar(leader, node, similar, joined[ranking[starts]])  # groups stay in order
    if len(failed):
        chosen = pa.array(failed)
        again = keys.take(chosen)
        rows = np.repeat(np.arange(len(failed)), lengths(again) // 8)
        columns = [
            pa.array(np.frombuffer(b"".join(again.to_pylist()), np.int64)),
            order.take(chosen).take(pa.array(rows)),
        ]
        yield FAILED, pa.RecordBatch.from_arrays(columns, schema=KEYS)


def _similar(
    node: pa.Array, other: pa.Array, similar: npt.NDArray[np.float32], rows: npt.NDArray[np.intp]
) -> pa.RecordBatch:
    chosen = pa.array(rows)
    return pa.RecordBatch.from_arrays([node.take(chosen), other.take(chosen), pa.array(similar[rows])], schema=SIMILAR)


def lengths(array: pa.Array) -> npt.NDArray[np.int32]:
    """Return the length of every value of a binary array [bytes]."""
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    return np.diff(offsets)


def make_comparison(dedup: DedupConfig, signature: SignatureConfig) -> Compare:
    """Return the function that computes the similarity of pairs from their payloads; see `Compare`.

    If the text digests are equal, the similarity is 1, regardless of the signatures.
    """
    skip = DIGEST_BYTES if dedup.exact != "off" else 0
    limit = np.float32(dedup.min_similarity)

    def compare(left: pa.Array, right: pa.Array) -> npt.NDArray[np.float32]:
        if dedup.near and dedup.verify == "jaccard":
            return _true_jaccard(left, right, skip, limit)
        width = int(lengths(right[:1])[0])
        first, second = rows_of_bytes(left, width), rows_of_bytes(right, width)
        equal = (first[:, :skip] == second[:, :skip]).all(axis=1) if skip else np.zeros(len(first), bool)
        similar = np.full(len(first), np.nan, np.float32)
        if dedup.near:
            value = value_type(signature)
            signatures = [np.ascontiguousarray(rows[:, skip:]).view(value) for rows in (first, second)]
            if signature.family == "simhash":
                bits = distance(signatures[0][:, 0], signatures[1][:, 0])
                similar = np.where(bits <= dedup.max_distance, 1 - bits / 64, np.nan).astype(np.float32)
            else:
                estimate = similarity(signatures[0], signatures[1]).astype(np.float32)
                similar = np.where(estimate >= limit, estimate, np.float32(np.nan))
        similar[equal] = 1
        return similar

    return compare


def _true_jaccard(left: pa.Array, right: pa.Array, skip: int, limit: np.float32) -> npt.NDArray[np.float32]:
    similar = np.full(len(left), np.nan, np.float32)
    for row, (first, second) in enumerate(zip(left.to_pylist(), right.to_pylist())):
        shingles = [np.frombuffer(payload, "<u8", offset=skip) for payload in (first, second)]
        value = np.float32(jaccard(*shingles))
        if skip and first[:skip] == second[:skip]:
            value = np.float32(1)
        if value >= limit:
            similar[row] = value
    return similar
