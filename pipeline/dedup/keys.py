"""Keys that copies share, exact copies inside a part, and the buckets of documents with equal keys.

Keys come from bands of a MinHash, tables of a SimHash, and the digest of the text. An equal key makes two documents
candidates, and `verify` decides whether they are joined. The scope is part of every key, so documents of different
scopes are never compared. Each bucket is streamed in keep order, and its documents are paired with its first.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pipeline.dedup.config import MINHASH_ONLY, SIMHASH_ONLY, DedupConfig
from pipeline.dedup.keep_order import NODE_BYTES, Bytes, binary_array, order_columns, orders, rows_of_bytes
from pipeline.engine.parquet import Part, read_measured
from pipeline.minhash.bands import optimal_bands
from pipeline.minhash.datasketch_family import library_bands
from pipeline.minhash.permutations import draw_odd_numbers, mix_bits
from pipeline.minhash.simhash import table_keys
from pipeline.minhash.stage import SignatureConfig, band_keys, value_type
from schemas.errors import ConfigError

Keys = npt.NDArray[np.int64]
DIGESTS = {"normalised": "text_digest", "raw": "raw_digest"}
DIGEST_BYTES = 16
MAX_KEYS = 1000
"""Most keys of a document."""
_EXACT = np.uint64(0x6C62272E07BB0142)
"""Constant that is mixed into keys of text digests, so that they differ from keys of bands."""


def layout(dedup: DedupConfig, signature: SignatureConfig) -> tuple[int, int]:
    """Return (bands, rows per band) for MinHash signatures. Raises ConfigError if a signature has too few values."""
    if dedup.threshold is not None and signature.family == "datasketch":
        return library_bands(dedup.threshold, signature.permutations)
    if dedup.threshold is not None:
        return optimal_bands(dedup.threshold, signature.permutations)
    if dedup.bands * dedup.rows > signature.permutations:
        raise ConfigError(
            f"dedup.bands, dedup.rows: expected at most signature.permutations = {signature.permutations} values, "
            f"got {dedup.bands} x {dedup.rows} = {dedup.bands * dedup.rows}. Lower dedup.bands or dedup.rows."
        )
    return dedup.bands, dedup.rows


def check_method(dedup: DedupConfig, signature: SignatureConfig) -> None:
    """Raise ConfigError if settings of `[dedup]` do not work with the signature family.

    Also raise it if a document would have over MAX_KEYS keys.
    """
    is_simhash = signature.family == "simhash"
    idle = sorted(dedup.model_fields_set & (MINHASH_ONLY if is_simhash else SIMHASH_ONLY))
    if idle:
        raise ConfigError(
            f"dedup.{', dedup.'.join(idle)}: expected no value with signature.family = {signature.family!r}, which "
            "ignores it, got one. Remove these settings, or set signature.family to a family that uses them."
        )
    if num_keys(dedup, signature) > MAX_KEYS:
        raise ConfigError(
            f"dedup.blocks, dedup.max_distance: expected at most {MAX_KEYS} keys a document, got "
            f"{num_keys(dedup, signature)}. Lower dedup.blocks or dedup.max_distance."
        )


def num_keys(dedup: DedupConfig, signature: SignatureConfig) -> int:
    """Return the number of keys of a document: bands or SimHash tables if `dedup.near`, plus 1 for `dedup.exact`."""
    exact = int(dedup.exact != "off")
    if not dedup.near:
        return exact
    if signature.family == "simhash":
        return math.comb(dedup.blocks, dedup.max_distance) + exact
    return layout(dedup, signature)[0] + exact


def key_columns(dedup: DedupConfig) -> list[str]:
    """Return the columns of the table `documents` from which keys and payloads are computed."""
    digest = [DIGESTS[dedup.exact]] if dedup.exact != "off" else []
    return [*dedup.scope, *digest, *(["signature"] if dedup.near else [])]


def near_keys(batch: pa.RecordBatch, dedup: DedupConfig, signature: SignatureConfig) -> Keys:
    """Return the keys that near copies are likely to share (documents, keys); none if `dedup.near` is false."""
    if not dedup.near:
        return np.zeros((batch.num_rows, 0), np.int64)
    values = signatures_of(batch, signature)
    if signature.family == "simhash":
        keys = table_keys(values[:, 0], dedup.blocks, dedup.max_distance)
    else:
        keys = band_keys(values, *layout(dedup, signature))
    return _scoped(keys, batch, dedup)


def all_keys(batch: pa.RecordBatch, dedup: DedupConfig, signature: SignatureConfig) -> Keys:
    """Return all keys of every document (documents, num_keys).

    Exact copies have a common key. Near copies are likely to have one.
    """
    keys = near_keys(batch, dedup, signature)
    if dedup.exact == "off":
        return keys
    digest = digests_of(batch, dedup)[:, :8].copy().view("<u8")
    return np.concatenate([keys, _scoped(mix_bits(digest ^ _EXACT), batch, dedup)], axis=1)


def signatures_of(batch: pa.RecordBatch, signature: SignatureConfig) -> npt.NDArray[np.unsignedinteger]:
    """Return the signatures of a batch as numbers (documents, values)."""
    value = np.dtype(value_type(signature))
    count = 1 if signature.family == "simhash" else signature.permutations
    return rows_of_bytes(batch.column("signature"), count * value.itemsize).view(value)


def digests_of(batch: pa.RecordBatch, dedup: DedupConfig) -> npt.NDArray[np.uint8]:
    """Return each document's text digest, as `dedup.exact` selects it (documents, 16); exact copies have equal ones."""
    return rows_of_bytes(batch.column(DIGESTS[dedup.exact]), DIGEST_BYTES)


def scopes_of(batch: pa.RecordBatch, dedup: DedupConfig) -> npt.NDArray[np.uint64]:
    """Return a hash of each document's values in the columns `dedup.scope` (documents,).

    Different values have equal hashes with probability 2^-64.
    """
    numbers = np.zeros(batch.num_rows, np.uint64)
    for column in dedup.scope:
        encoded = pc.dictionary_encode(pc.fill_null(batch.column(column), ""))
        names = [xxhash.xxh64_intdigest(f"{column}={name}".encode()) for name in encoded.dictionary.to_pylist()]
        numbers = mix_bits(numbers ^ np.array(names, np.uint64)[encoded.indices.to_numpy(zero_copy_only=False)])
    return numbers


def _scoped(keys: npt.NDArray[np.uint64], batch: pa.RecordBatch, dedup: DedupConfig) -> Keys:
    if dedup.scope:
        keys = mix_bits(keys ^ scopes_of(batch, dedup)[:, None])
    return keys.view(np.int64)


def payloads_of(batch: pa.RecordBatch, dedup: DedupConfig) -> npt.NDArray[np.uint8]:
    """Return text digest and signature of each document, by which it is compared: a (documents, bytes) array."""
    parts = [digests_of(batch, dedup)] if dedup.exact != "off" else []
    if dedup.near:
        signatures = b"".join(batch.column("signature").to_pylist())
        parts.append(np.frombuffer(signatures, np.uint8).reshape(batch.num_rows, -1))
    return np.concatenate(parts, axis=1)


# Exact copies inside a part: documents with equal signatures and digests are grouped before the shuffle.
#
# Only the first of a group in keep order is shuffled, so a page that occurs a million times costs one row per window.
# A window is a fixed number of consecutive rows of the part, so it does not depend on partitioning.

WINDOW = 1 << 16
"""Documents in a `DedupWindow`; the last one of a part may have fewer."""
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class DedupTask:
    """One part of the documents, with the settings of signatures of its source, and those of deduplication."""

    part: Part
    dedup: DedupConfig
    signature: SignatureConfig


@dataclass(frozen=True)
class DedupWindow:
    """WINDOW consecutive documents of a part, grouped by equality.

    Equal documents have the same signature, text digest and scope.
    """

    batch: pa.RecordBatch
    orders: Bytes
    """Keep order of each document, (documents, order_bytes)."""
    leads: Indices
    """For each document, the index of the first in keep order among the documents equal to it, (documents,)."""
    smallest: Indices
    """For each document, the index of the one with the smallest doc_id among the documents equal to it,
    (documents,)."""

    @property
    def nodes(self) -> Bytes:
        """Return the node of each document, the last bytes of its keep order (documents, NODE_BYTES)."""
        return self.orders[:, -NODE_BYTES:]

    @property
    def first(self) -> npt.NDArray[np.bool_]:
        """Return True for each document that is the first of its group in keep order (documents,)."""
        first: npt.NDArray[np.bool_] = self.leads == np.arange(len(self.leads))
        return first


def read_windows(task: DedupTask) -> Iterator[DedupWindow]:
    """Yield windows of the documents of a part, without the documents that the step `documents` dropped."""
    columns = order_columns(task.dedup)
    digest = ["raw_digest"] if task.dedup.verify == "jaccard" else []
    columns["documents"] = list(dict.fromkeys([*columns["documents"], *key_columns(task.dedup), *digest]))
    for batch in iterate_windows(read_measured(task.part, columns)):
        order = orders(batch, task.part.ordinal, task.dedup)
        leads, smallest = equal_documents(identities(batch, task.dedup, task.signature), order)
        yield DedupWindow(batch, order, leads, smallest)


def iterate_windows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all batches in batches of WINDOW rows; the last may be shorter."""
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
    """Return a 128-bit hash of each document's signature, text digest and scope, as two numbers (documents, 2).

    Documents that differ in one of the three have equal hashes with probability 2^-128.
    """
    parts = [scopes_of(batch, dedup)[:, None]]
    if dedup.exact != "off":
        parts.append(digests_of(batch, dedup).copy().view("<u8"))
    if dedup.verify == "jaccard":  # equal signatures do not prove equal shingles
        parts.append(rows_of_bytes(batch.column("raw_digest"), 16).copy().view("<u8"))
    elif dedup.near:
        parts.append(signatures_of(batch, signature).astype(np.uint64))
    values = np.concatenate(parts, axis=1)
    sums = [(mix_bits(values) * draw_odd_numbers(seed, "identity", values.shape[1])).sum(axis=1) for seed in (0, 1)]
    return mix_bits(np.stack(sums, axis=1))


def equal_documents(identity: npt.NDArray[np.uint64], order: Bytes) -> tuple[Indices, Indices]:
    """Return `leads` and `smallest` of a `DedupWindow`. Documents with the same `identity` are equal."""
    by_order = _first_of_each(identity, np.lexsort((*sort_words(order), identity[:, 1], identity[:, 0])))
    node = order[:, -NODE_BYTES:]
    return by_order, _first_of_each(identity, np.lexsort((*sort_words(node), identity[:, 1], identity[:, 0])))


def sort_words(rows: Bytes) -> list[npt.NDArray[np.uint64]]:
    """Return the keys with which `np.lexsort` sorts the rows of a byte matrix by their bytes."""
    count, width = rows.shape
    padded = np.zeros((count, -(-width // 8) * 8), np.uint8)
    padded[:, :width] = rows
    return [column.astype(np.uint64) for column in padded.view(">u8").T[::-1]]


def _first_of_each(identity: npt.NDArray[np.uint64], ranking: Indices) -> Indices:
    ranked = identity[ranking]
    starts = np.ones(len(ranked), bool)
    starts[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    firsts = np.empty(len(ranked), np.intp)
    firsts[ranking] = ranking[starts][np.cumsum(starts) - 1]
    return firsts


def keys_of(window: DedupWindow, task: DedupTask) -> npt.NDArray[np.int64]:
    """Return the keys of the first document of each group of equal documents in a window (groups, keys)."""
    return all_keys(window.batch.filter(pa.array(window.first)), task.dedup, task.signature)


# Buckets: documents that share a key, streamed in keep order. Each is paired with the first of the bucket, its leader.
#
# A bucket of a million documents makes a million pairs and is never held in memory. Documents that do not match their
# leader form a bucket of the same key in the next round, and the first of them is its leader.

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
PAYLOAD_REQUEST = b"\0"
"""Value of `leader` in a row of PAIRS whose node is itself a leader, by which the node's payload is requested. It sorts
before the nodes of leaders."""
PAIRED, LEADERS = "pairs", "leads"
"""Kinds of rows that buckets yield: pairs (PAIRS), and keys of the leaders (KEYS)."""
KINDS = {PAIRED: PAIRS_DDL, LEADERS: KEYS_DDL}


def pairs_of_buckets(batches: Iterator[pa.RecordBatch], width: int) -> Iterator[pa.RecordBatch]:
    """Yield the pairs of all buckets (PAIRS): each document with its leader, the first document of the bucket.

    Each leader of a pair also has a row with `PAYLOAD_REQUEST`. The input rows (KEYS) are sorted by (key, order), and
    each keep order is `width` bytes long.
    """
    return (batch for kind, batch in rows_of_buckets(0, batches, width) if kind == PAIRED)


def rows_of_buckets(number: int, batches: Iterator[pa.RecordBatch], width: int) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield (kind, batch) of the pairs and the leaders of all buckets; for the kinds, see KINDS.

    For the input, see `pairs_of_buckets`. `number` has no effect.
    """
    last_key: int | None = None
    leader = np.zeros((1, width), np.uint8)
    is_requested = False
    for batch in batches:
        if not batch.num_rows:
            continue
        keys = batch.column(0).to_numpy()
        rows = rows_of_bytes(batch.column(1), width)
        starts = np.ones(len(keys), bool)
        starts[1:] = keys[1:] != keys[:-1]
        starts[0] = last_key is None or keys[0] != last_key
        bucket = np.cumsum(starts)  # 0: a bucket that began in the previous batch
        firsts = np.concatenate([leader, rows[starts]])
        members = np.flatnonzero(~starts)
        if len(members):
            yield PAIRED, _pairs(rows[members], firsts[bucket[members]][:, -NODE_BYTES:], keys[members])
            requested = np.unique(bucket[members])
            if is_requested and requested[0] == 0:
                requested = requested[1:]
            if len(requested):
                marks = np.full((len(requested), 1), PAYLOAD_REQUEST[0], np.uint8)
                yield PAIRED, _pairs(firsts[requested], marks, np.zeros(len(requested), np.int64))
        yield LEADERS, pa.RecordBatch.from_arrays([pa.array(keys[starts]), binary_array(rows[starts])], schema=KEYS)
        has_members = len(members) > 0 and bucket[members[-1]] == bucket[-1]
        is_requested = has_members or (is_requested and bucket[-1] == 0)
        last_key, leader = int(keys[-1]), firsts[-1:].copy()


def _pairs(orders: Bytes, leaders: Bytes, keys: npt.NDArray[np.int64]) -> pa.RecordBatch:
    columns = [binary_array(orders[:, -NODE_BYTES:]), binary_array(leaders), pa.array(keys), binary_array(orders)]
    return pa.RecordBatch.from_arrays(columns, schema=PAIRS)


def key_rows(keys: npt.NDArray[np.int64], orders: Bytes) -> Iterator[pa.RecordBatch]:
    """Yield one row (KEYS) for each key of each document; `keys` is (documents, keys)."""
    order = binary_array(orders)
    for column in keys.T:
        yield pa.RecordBatch.from_arrays([pa.array(np.ascontiguousarray(column)), order], schema=KEYS)
