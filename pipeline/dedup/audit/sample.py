"""The samples of the audit: documents that each part proposes, the choice among them, and the reading of their texts.

Documents are chosen by hashes of doc_id and anchor, never by order. There are four samples. For precision: documents
that deduplication joined, and documents that it removed as copies. For recall: uniformly drawn documents, and all
documents of some anchors. An anchor is a document's smallest shingle under a separate hash, so two documents of Jaccard
similarity s share it with probability s. Sources: Broder 1997, "On the resemblance and containment of documents"; Cohen
and Kaplan 2007, "Summarizing data using bottom-k sketches" (coordinated samples).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.dedup.config import EXACT, NEAR, AuditConfig, DedupConfig
from pipeline.dedup.keep_order import big_endian, binary_array, order_columns, orders, rows_of_bytes
from pipeline.dedup.keys import key_columns, near_keys, scopes_of
from pipeline.engine.parquet import Part, apply_cuts, read_measured, without_templates
from pipeline.minhash.permutations import mix_bits
from pipeline.minhash.stage import SignatureConfig, shingle_hashes
from pipeline.text.words import Codes
from schemas.errors import ContractError
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import part_key
from schemas.older_tables import read_columns
from schemas.takedown import STAGE

JOINED, REMOVED, UNIFORM, ANCHORED = "joined", "removed", "uniform", "anchored"
OVERSAMPLE = 64
"""Number of documents that are proposed for their anchors, as a multiple of the sample size. The share of documents
whose anchor another document has is not known in advance. If it is below one in 64, the sample is smaller than
`audit.documents`."""
PROPOSALS = pa.schema(
    [
        pa.field("sample", pa.string()),
        pa.field("key", pa.int64()),
        pa.field("doc", pa.binary()),
        pa.field("other", pa.binary()),
        pa.field("rank", pa.int64()),
        pa.field("group", pa.binary()),
        pa.field("count", pa.int64()),
    ]
)
"""Columns of a proposed document. `other` is the document that it matched, in the sample `joined`, or the one that is
kept in its place, in the sample `removed`. In the sample `anchored`, `rank` is the hash of its anchor, and `group` is
anchor and scope. The first row of a group in a part has the number of the group's documents in the part as `count`. The
other rows have 0. In the other samples, these three columns are null."""
PROPOSALS_DDL = "sample string, key long, doc binary, other binary, rank long, group binary, count long"
Keys = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ProposeTask:
    """Input of `propose`: one part of the documents, settings, and counts of documents in all parts."""

    part: Part
    audit: AuditConfig
    dedup: DedupConfig
    num_documents: int
    num_joined: int
    """Documents in all parts that deduplication joined with another."""
    num_removed: int
    """Documents in all parts that were dropped as copies."""


def hash_values(values: npt.NDArray[np.uint64], seed: int, purpose: str) -> Keys:
    """Return a hash of each value, in [0, 2^63); different values of `purpose` give independent hash functions."""
    digest = hashlib.blake2b(f"audit {purpose} {seed}".encode(), digest_size=8).digest()
    hashed: Keys = (mix_bits(mix_bits(values) ^ np.uint64(int.from_bytes(digest, "little"))) >> np.uint64(1)).view(
        np.int64
    )
    return hashed


def document_keys(doc_ids: pa.Array, seed: int, purpose: str) -> Keys:
    """Return a hash of each doc_id, in [0, 2^63), by the hash function for `purpose`, such as the name of a sample."""
    return hash_values(rows_of_bytes(doc_ids, DOC_ID_BYTES)[:, :8].copy().view("<u8")[:, 0], seed, purpose)


def hash_limit(share: float) -> int:
    """Return the limit for results of `hash_values`: a hash is below the limit with probability `share`."""
    return (1 << 63) - 1 if share >= 1 else int(share * (1 << 63))


def propose(task: ProposeTask) -> Iterator[pa.RecordBatch]:
    """Yield the documents of one part that `choose` may select for a sample, as rows (PROPOSALS)."""
    size = task.audit.documents
    enough = size + 6 * size**0.5 + 10  # almost surely at least `size`
    sizes = task.num_joined, task.num_removed, task.num_documents
    joined_cut, removed_cut, uniform_cut = (hash_limit(enough / max(1, count)) for count in sizes)
    anchored_cut = hash_limit(OVERSAMPLE * size / max(1, task.num_documents))
    columns = {"documents": ["anchor", *task.dedup.scope], "clusters": ["leader"], "dedup": ["survivor", "drop_rule"]}
    anchored: list[pa.RecordBatch] = []
    for batch in read_measured(task.part, columns):
        keys = document_keys(batch.column("doc_id"), task.audit.seed, JOINED)
        joined = batch.column("leader").is_valid().to_numpy(zero_copy_only=False) & (keys <= joined_cut)
        yield _rows(JOINED, batch, keys, joined, "leader")
        keys = document_keys(batch.column("doc_id"), task.audit.seed, REMOVED)
        is_copy = pc.is_in(batch.column("drop_rule"), value_set=pa.array([EXACT, NEAR]))
        removed = is_copy.to_numpy(zero_copy_only=False) & (keys <= removed_cut)
        yield _rows(REMOVED, batch, keys, removed, "survivor")
        keys = document_keys(batch.column("doc_id"), task.audit.seed, UNIFORM)
        yield _rows(UNIFORM, batch, keys, keys <= uniform_cut)
        anchored.append(_with_anchors(batch, task, anchored_cut))
    if anchored:
        yield from _groups(pa.Table.from_batches(anchored).combine_chunks().to_batches(), task.audit.group)


def _rows(
    sample: str, batch: pa.RecordBatch, keys: Keys, chosen: npt.NDArray[np.bool_], other: str | None = None
) -> pa.RecordBatch:
    """Return the chosen documents as rows (PROPOSALS). `other` is the column of the other document of each pair."""
    taken = batch.filter(pa.array(chosen))
    count = taken.num_rows
    ids = taken.column("doc_id").cast(pa.binary())
    documents = [ids, taken.column(other).cast(pa.binary()) if other else pa.nulls(count, pa.binary())]
    empty = [pa.nulls(count, pa.int64()), pa.nulls(count, pa.binary()), pa.nulls(count, pa.int64())]
    columns = [pa.array([sample] * count, pa.string()), pa.array(keys[chosen]), *documents, *empty]
    return pa.RecordBatch.from_arrays(columns, schema=PROPOSALS)


def _with_anchors(batch: pa.RecordBatch, task: ProposeTask, limit: int) -> pa.RecordBatch:
    """Return rows (doc, rank, group, key) of the documents of rank <= `limit`; for the columns, see PROPOSALS."""
    batch = batch.filter(batch.column("anchor").is_valid())
    anchors = batch.column("anchor").to_numpy().view(np.uint64)
    ranks = hash_values(anchors, task.audit.seed, "anchor")
    chosen = ranks <= limit
    batch = batch.filter(pa.array(chosen))
    group = np.concatenate([big_endian(part, 8) for part in (anchors[chosen], scopes_of(batch, task.dedup))], axis=1)
    keys = document_keys(batch.column("doc_id"), task.audit.seed, ANCHORED)
    columns = [batch.column("doc_id").cast(pa.binary()), pa.array(ranks[chosen]), binary_array(group), pa.array(keys)]
    return pa.RecordBatch.from_arrays(columns, ["doc", "rank", "group", "key"])


def _groups(batches: Sequence[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """Yield up to `size` documents of each group in a part, those with the lowest keys, as rows (PROPOSALS)."""
    for batch in batches:  # a single batch, or none if the part has no document
        if not batch.num_rows:
            continue
        batch = batch.sort_by([("group", "ascending"), ("key", "ascending"), ("doc", "ascending")])
        group = rows_of_bytes(batch.column("group"), 16).view("V16")[:, 0]
        starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
        counts = np.diff(np.append(starts, len(group)))
        rank = np.arange(len(group)) - np.repeat(starts, counts)
        batch = batch.append_column("count", pa.array(np.where(rank == 0, np.repeat(counts, counts), 0)))
        batch = batch.filter(pa.array(rank < size))
        empty = pa.nulls(batch.num_rows, pa.binary())
        constants = {"sample": pa.array([ANCHORED] * batch.num_rows), "other": empty}
        columns = [constants[name] if name in constants else batch.column(name) for name in PROPOSALS.names]
        yield pa.RecordBatch.from_arrays(columns, schema=PROPOSALS)


@dataclass(frozen=True)
class AuditSamples:
    """The documents of the audit's four samples: joined, removed, uniform and anchored."""

    joined: Sequence[tuple[bytes, bytes]]
    """Rows (document, document that it matched)."""
    removed: Sequence[tuple[bytes, bytes]]
    """Rows (document, document that is kept in its place)."""
    uniform: Sequence[bytes]
    """The uniformly drawn documents."""
    anchored: Sequence[Sequence[bytes]]
    """Groups of at least two documents with the same anchor and scope."""
    every_joined: bool
    """True if the sample of joined documents holds all joined documents of the run."""
    every_removed: bool
    """True if the sample of removed documents holds all that the run dropped as copies."""
    every_document: bool
    """True if the uniform sample holds all documents of the run."""
    capped: Sequence[int]
    """Size of each group of which only `audit.group` documents are in the sample, because it has more."""

    def wanted(self) -> list[bytes]:
        """Return the doc_ids of all documents in the samples, sorted."""
        paired = {doc for row in (*self.joined, *self.removed) for doc in row}
        return sorted({*paired, *self.uniform, *(doc for group in self.anchored for doc in group)})


def choose(rows: pa.Table, audit: AuditConfig, num_documents: int, num_joined: int, num_removed: int) -> AuditSamples:
    """Return the four samples, chosen from the proposals `rows` (PROPOSALS).

    In `rows`, every row of a group has the number of the group's documents in the whole run as `count`.
    """
    by_sample: dict[str, list[dict[str, Any]]] = {JOINED: [], REMOVED: [], UNIFORM: [], ANCHORED: []}
    for row in rows.to_pylist():
        by_sample[row["sample"]].append(row)
    size = audit.documents
    joined, removed, uniform = (
        sorted(by_sample[name], key=lambda row: (row["key"], row["doc"]))[:size] for name in (JOINED, REMOVED, UNIFORM)
    )
    groups: dict[tuple[int, bytes], list[dict[str, Any]]] = {}
    for row in by_sample[ANCHORED]:
        groups.setdefault((row["rank"], row["group"]), []).append(row)
    anchored, taken, capped = [], 0, []
    for _, members in sorted(groups.items()):
        total = members[0]["count"]
        taken += min(total, audit.group)
        if taken > size:  # all later groups are left out too, or small ones would be preferred
            break
        anchored.append(sorted(row["doc"] for row in members))
        capped += [total] if total > audit.group else []
    return AuditSamples(
        joined=[(row["doc"], row["other"]) for row in joined],
        removed=[(row["doc"], row["other"]) for row in removed],
        uniform=[row["doc"] for row in uniform],
        anchored=anchored,
        every_joined=num_joined <= size,
        every_removed=num_removed <= size,
        every_document=num_documents <= size,
        capped=capped,
    )


# The sampled documents of one part: keys, signature, cluster, and the shingles of their texts.
#
# Only the row groups that hold a sampled document are read, so the cost depends on the sample and not on the run.

MAX_SHINGLES = 1 << 18
"""Most shingles of a document that is compared; a novel has 10^5."""
SAMPLED = pa.schema(
    [
        pa.field("doc", pa.binary()),
        pa.field("scope", pa.int64()),
        pa.field("cluster", pa.binary()),
        pa.field("source", pa.string()),
        pa.field("order", pa.binary()),
        pa.field("digest", pa.binary()),
        pa.field("signature", pa.binary()),
        pa.field("keys", pa.binary()),
        pa.field("num_shingles", pa.int64()),
        pa.field("shingles", pa.binary()),
        pa.field("with_numbers", pa.binary()),
    ]
)
"""`order` is the keep order, or the doc_id if there are no figures by source. `shingles` are the sorted distinct hashes
as uint64. They are null for a document without text, for which `num_shingles` is null too, and for a document with more
than MAX_SHINGLES. `with_numbers` are the shingles in which numbers keep their digits, of documents in the sample
`removed`."""
SAMPLED_DDL = (
    "doc binary, scope long, cluster binary, source string, order binary, digest binary, signature binary, "
    "keys binary, num_shingles long, shingles binary, with_numbers binary"
)


@dataclass(frozen=True)
class TextsTask:
    """Input of `read_sampled`: one part, the doc_ids of the sampled documents of all parts, and settings.

    The signature settings are those of the part's source.
    """

    part: Part
    wanted: Sequence[bytes]
    dedup: DedupConfig
    signature: SignatureConfig
    by_source: bool = False
    """Whether the keep order is read, for figures by source."""
    removed: frozenset[bytes] = frozenset()
    """The documents of the sample `removed`, and those that are kept in their place."""


def read_sampled(task: TextsTask) -> Iterator[pa.RecordBatch]:
    """Yield the sampled documents of a part (SAMPLED). Raises ContractError if the part's tables differ in doc_ids.

    A document that a takedown removed can still be the other document of a pair. It has no text.
    """
    kept = order_columns(task.dedup) if task.by_source else {"documents": []}
    names = ["doc_id", "source", "language", "text_digest", "signature", *key_columns(task.dedup)]
    names = list(dict.fromkeys([*names, *kept.pop("documents"), "drop_stage"]))
    documents = joined(rows_of(task.part, "documents", names, pa.array(task.wanted, pa.binary(16))))
    if documents is None:
        return
    is_left = pc.fill_null(pc.not_equal(documents.column("drop_stage"), STAGE), True)
    removed = documents.column("doc_id").filter(pc.invert(is_left)).cast(pa.binary())
    if len(removed):
        nothing = [pa.nulls(len(removed), field.type) for field in list(SAMPLED)[1:]]
        yield pa.RecordBatch.from_arrays([removed, *nothing], schema=SAMPLED)
        documents = documents.filter(is_left)
    if not documents.num_rows:
        return
    ids = documents.column("doc_id")
    for table, columns in kept.items():
        signals = _same(task, ids, joined(rows_of(task.part, table, ["doc_id", *columns], ids)))
        for name in columns:
            documents = documents.append_column(name, signals.column(name))
    clusters = joined(rows_of(task.part, "clusters", ["doc_id", "cluster"], ids))
    documents = documents.append_column("cluster", _same(task, ids, clusters).column("cluster"))
    start = 0
    for texts in rows_of(task.part, "text", ["doc_id", "text", "cuts"], ids):
        rows = documents.slice(start, texts.num_rows)
        _same(task, rows.column("doc_id"), texts)
        yield _with_shingles(task, rows, texts)
        start += texts.num_rows
    _same(task, ids.slice(start), None)


def rows_of(part: Part, table: str, columns: Sequence[str], wanted: pa.Array) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the wanted documents in one part of a table, in the order of the table.

    Row groups without a wanted document are not read, except for their doc_ids.
    """
    with part.folders[table].open_input(part.paths[table]) as stream:
        file = pq.ParquetFile(stream)
        for group in range(file.num_row_groups):
            hits = pc.is_in(read_columns(file, table, ["doc_id"], group).column("doc_id"), value_set=wanted)
            if pc.any(hits).as_py():
                rows = read_columns(file, table, columns, group).filter(hits)
                batch = rows.combine_chunks().to_batches()[0]
                yield without_templates(part, table, batch) if table in ("documents", "text") else batch


def joined(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    """Return all batches as a single batch; None if there are none."""
    held = list(batches)
    return pa.Table.from_batches(held).combine_chunks().to_batches()[0] if held else None


def _same(task: TextsTask, expected: pa.Array, rows: pa.RecordBatch | None) -> pa.RecordBatch:
    """Return `rows`, or an empty batch if `rows` is None.

    Raises ContractError unless the returned rows have exactly the doc_ids `expected`, in the same order.
    """
    if rows is None:
        rows = pa.RecordBatch.from_arrays([expected.slice(0, 0)], ["doc_id"])
    if not rows.column("doc_id").equals(expected):
        raise ContractError(
            f"audit {part_key(task.part.ordinal)}: expected {len(expected)} sampled documents in `clusters` and "
            f"`text`, got {rows.num_rows} rows with different doc_ids. Run `penstock run` again."
        )
    return rows


def _with_shingles(task: TextsTask, rows: pa.RecordBatch, texts: pa.RecordBatch) -> pa.RecordBatch:
    languages = rows.column("language").to_pylist()
    bodies = [_body(text) for text in texts.to_pylist()]
    sets = [_shingles(body, language, task.signature) for body, language in zip(bodies, languages)]
    numbered = task.signature.model_copy(update={"numbers": "kept"})
    with_numbers = [
        _shingles(body, language, numbered) if doc in task.removed else None
        for doc, body, language in zip(rows.column("doc_id").to_pylist(), bodies, languages)
    ]
    order = rows.column("doc_id").cast(pa.binary())
    if task.by_source:
        order = binary_array(orders(rows, task.part.ordinal, task.dedup))
    columns = [
        rows.column("doc_id").cast(pa.binary()),
        pa.array(scopes_of(rows, task.dedup).view(np.int64)),
        rows.column("cluster").cast(pa.binary()),
        rows.column("source").cast(pa.string()),
        order,
        rows.column("text_digest").cast(pa.binary()),
        rows.column("signature").cast(pa.binary()),
        binary_array(np.ascontiguousarray(near_keys(rows, task.dedup, task.signature)).view(np.uint8)),
        pa.array([None if codes is None else len(codes) for codes in sets], pa.int64()),
        *(pa.array([_as_bytes(codes) for codes in each], pa.binary()) for each in (sets, with_numbers)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SAMPLED)


def _body(text: Mapping[str, Any]) -> str | None:
    return None if text["text"] is None else apply_cuts(text["text"], text["cuts"] or [])


def _shingles(body: str | None, language: str | None, signature: SignatureConfig) -> Codes | None:
    return None if body is None else shingle_hashes(body, language or "", signature)


def _as_bytes(codes: Codes | None) -> bytes | None:
    return None if codes is None or len(codes) > MAX_SHINGLES else codes.astype("<u8").tobytes()
