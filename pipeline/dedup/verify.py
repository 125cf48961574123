"""Verification of candidate pairs: what two documents are compared by is brought together and compared, in streams.

First every member of a bucket meets its own signature, then the signature of the document that leads it; each crosses
the network once a pair, and no table of signatures is held anywhere.
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
"""Members with the leader they join; leaders with the most similar that joined them; members to be tried again, with
their keys."""
OUTCOMES = {JOINED: SIMILAR_DDL, BEST: SIMILAR_DDL, FAILED: KEYS_DDL}
Outcomes = Iterator[tuple[str, pa.RecordBatch]]
Compare = Callable[[pa.Array, pa.Array], npt.NDArray[np.float32]]
"""The similarity of each pair of payloads; NaN where they are not to be joined."""


def attach_payloads(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The distinct pairs (CARRIED) with the member's payload, of rows MET sorted by (node, leader): for each node its
    payload first (no leader), then WANTED rows, then its pairs. Raises ContractError if a payload is missing."""
    payload, owner, before = pa.array([b""], pa.binary()), np.zeros((1, NODE_BYTES), np.uint8), 0
    for batch in batches:
        if not batch.num_rows:
            continue
        node = rows_of_bytes(batch.column(0), NODE_BYTES)
        sizes = lengths(batch.column(1))
        own = sizes == 0
        place = np.cumsum(own)  # 0: the payload that the batch before has left
        payloads = pa.concat_arrays([payload, batch.column(4).filter(pa.array(own))])
        owners = np.concatenate([owner, node[own]])
        if (owners[place] != node).any():
            raise ContractError("dedup: expected a signature for every document of a bucket, got one without")
        wanted = (sizes == 1) & (np.concatenate([[before], sizes[:-1]]) == 0)
        if wanted.any():
            count = int(wanted.sum())
            nothing = pa.array([b""] * count, pa.binary())
            columns = [binary_array(node[wanted]), nothing, payloads.take(pa.array(place[wanted])), nothing, nothing]
            yield pa.RecordBatch.from_arrays(columns, schema=CARRIED)
        pairs = np.flatnonzero(sizes == NODE_BYTES)
        if len(pairs):
            yield _distinct(batch.take(pa.array(pairs)), payloads.take(pa.array(place[pairs])))
        payload, owner, before = payloads.slice(len(payloads) - 1), owners[-1:].copy(), int(sizes[-1])


def _distinct(pairs: pa.RecordBatch, payloads: pa.Array) -> pa.RecordBatch:
    """The pairs, each once with all its keys; equal ones stand together."""
    both = np.concatenate([rows_of_bytes(pairs.column(place), NODE_BYTES) for place in (0, 1)], axis=1)
    starts = np.flatnonzero(np.concatenate([[True], (both[1:] != both[:-1]).any(axis=1)]))
    offsets = np.append(starts, len(both)).astype(np.int32) * 8
    keys = np.ascontiguousarray(pairs.column(2).to_numpy())
    joined = pa.Array.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(keys)])
    chosen = pa.array(starts)
    node, leader, order = (pairs.column(place).take(chosen) for place in (0, 1, 3))
    return pa.RecordBatch.from_arrays([leader, node, payloads.take(chosen), joined, order], schema=CARRIED)


def compare_pairs(batches: Iterator[pa.RecordBatch], compare: Compare) -> Outcomes:
    """The outcome of every pair of rows CARRIED sorted by (leader, node), a leader's own row first; kinds: OUTCOMES."""
    payload, owner = pa.array([b""], pa.binary()), np.zeros((1, NODE_BYTES), np.uint8)
    for batch in batches:
        if not batch.num_rows:
            continue
        leader = rows_of_bytes(batch.column(0), NODE_BYTES)
        own = lengths(batch.column(1)) == 0
        place = np.cumsum(own)
        payloads = pa.concat_arrays([payload, batch.column(2).filter(pa.array(own))])
        owners = np.concatenate([owner, leader[own]])
        if (owners[place] != leader).any():
            raise ContractError("dedup: expected the signature of every document that leads, got one without")
        pairs = np.flatnonzero(~own)
        if len(pairs):
            members = batch.take(pa.array(pairs))
            yield from _outcomes(members, compare(payloads.take(pa.array(place[pairs])), members.column(2)))
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
        yield BEST, _similar(leader, node, similar, joined[ranking[starts]])  # groups keep their places in the ranking
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
    """The length of every value of a binary array [bytes]."""
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
    return np.diff(offsets)


def make_comparison(dedup: DedupConfig, signature: SignatureConfig) -> Compare:
    """How the payloads of two documents are compared: equal digests are similarity 1, whatever the signatures say."""
    skip = DIGEST_BYTES if dedup.exact != "off" else 0
    limit = np.float32(dedup.min_similarity)

    def compare(left: pa.Array, right: pa.Array) -> npt.NDArray[np.float32]:
        if dedup.near and dedup.verify == "jaccard":
            return _true_jaccard(left, right, skip, limit)
        width = int(lengths(right[:1])[0])
        one, other = rows_of_bytes(left, width), rows_of_bytes(right, width)
        equal = (one[:, :skip] == other[:, :skip]).all(axis=1) if skip else np.zeros(len(one), bool)
        similar = np.full(len(one), np.nan, np.float32)
        if dedup.near:
            value = value_type(signature)
            signed = [np.ascontiguousarray(rows[:, skip:]).view(value) for rows in (one, other)]
            if signature.family == "simhash":
                apart = distance(signed[0][:, 0], signed[1][:, 0])
                similar = np.where(apart <= dedup.max_distance, 1 - apart / 64, np.nan).astype(np.float32)
            else:
                estimate = similarity(signed[0], signed[1]).astype(np.float32)
                similar = np.where(estimate >= limit, estimate, np.float32(np.nan))
        similar[equal] = 1
        return similar

    return compare


def _true_jaccard(left: pa.Array, right: pa.Array, skip: int, limit: np.float32) -> npt.NDArray[np.float32]:
    found = np.full(len(left), np.nan, np.float32)
    for place, (one, other) in enumerate(zip(left.to_pylist(), right.to_pylist())):
        value = np.float32(jaccard(np.frombuffer(one, "<u8", offset=skip), np.frombuffer(other, "<u8", offset=skip)))
        if skip and one[:skip] == other[:skip]:
            value = np.float32(1)
        if value >= limit:
            found[place] = value
    return found
