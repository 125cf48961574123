"""Parquet parts without some documents: rows that say what became of a record are blanked, all others go.

`documents` and `text` keep a row for every record, so that the account of each input's bytes stays whole; the tables
behind them have no row for a document that is gone.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.engine.parquet import HashingSink, unique_name
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.takedown import RULE, STAGE

Mask = NDArray[np.bool_]
ID = pa.binary(DOC_ID_BYTES)
KEPT = ("doc_id", "source", "split", "offset", "length", "record_type", "snapshot")
"""What a blanked row still says: which bytes of which input it accounts for."""
BLANKED = ("documents", "text")
TEXTS = ("text",)
"""Columns whose spans are traced."""
NODE_BYTES = DOC_ID_BYTES + 4
"""At the end of a document's order in the index of a snapshot: doc_id and part."""
VERDICT = ("drop_stage", "drop_rule")


@dataclass
class RewrittenPart:
    """What became of one part."""

    entry: dict[str, Any]
    """Of the manifest."""
    removed: dict[str, int] = field(default_factory=dict)
    """Rows removed or blanked, by what had become of them before: `kept` or `stage/rule`."""
    texts: dict[bytes, list[str]] = field(default_factory=dict)
    """Texts that were removed, by doc_id."""


def _by_id(batch: pa.RecordBatch | pa.Table, documents: pa.Array) -> Mask:
    return _is_in(batch.column("doc_id"), documents)


def _of_pair(batch: pa.RecordBatch | pa.Table, documents: pa.Array) -> Mask:
    return _is_in(batch.column("a"), documents) | _is_in(batch.column("b"), documents)


def _of_order(batch: pa.RecordBatch | pa.Table, documents: pa.Array) -> Mask:
    node = pc.binary_slice(batch.column("order"), -NODE_BYTES, -4)
    return _is_in(node, documents)


def _is_in(column: pa.ChunkedArray | pa.Array, documents: pa.Array) -> Mask:
    found: Mask = np.asarray(pc.is_in(column.cast(pa.binary()), documents.cast(pa.binary())), np.bool_)
    return found


MATCHES: Mapping[str, tuple[tuple[str, ...], Callable[[Any, pa.Array], Mask]]] = {
    "doc_id": (("doc_id",), _by_id),
    "audit": (("a", "b"), _of_pair),
    "bands": (("order",), _of_order),
}
"""Columns that name the documents of a row, and how."""


def documents_named(batch: pa.RecordBatch, match: str) -> set[bytes]:
    """The documents that the rows of a batch name."""
    if match == "bands":
        return {order[-NODE_BYTES:-4] for order in batch.column("order").to_pylist()}
    return {one for column in MATCHES[match][0] for one in batch.column(column).to_pylist()}


def match_key(table: str, key: str) -> str | None:
    """How the rows of a file of a table name their documents; None where they name none."""
    if table == "index":
        return {"bands": "bands", "leaders": "doc_id"}.get(key.partition("/")[0])
    if table == "audit":
        return "audit"
    return None if table == "representatives" else "doc_id"


def holds_documents(folder: Store, path: str, match: str, documents: pa.Array) -> bool:
    """Whether a part holds a row of one of the documents."""
    columns, matches = MATCHES[match]
    with folder.open_input(path) as stream:
        batches = pq.ParquetFile(stream).iter_batches(batch_size=1 << 16, columns=list(columns))
        return any(matches(batch, documents).any() for batch in batches)


def rewrite_part(old: Store, path: str, new: Store, key: str, how: tuple[str, str, pa.Array]) -> RewrittenPart | None:
    """Write a part without documents, its row groups as they were; None if it holds none.

    `how`: name of the table, how its rows name their documents, the documents.
    """
    table, match, documents = how
    if not holds_documents(old, path, match, documents):
        return None
    found: dict[str, int] = {}
    texts: dict[bytes, list[str]] = {}
    with old.open_input(path) as stream:
        file = pq.ParquetFile(stream)
        writer = GroupWriter(new, key, plain_schema(file.schema_arrow))
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group)
            gone = MATCHES[match][1](rows, documents)
            if gone.any():
                for name, number in _fates(rows.filter(pa.array(gone))).items():
                    found[name] = found.get(name, 0) + number
                for column in set(TEXTS) & set(rows.schema.names):
                    _collect(rows.filter(pa.array(gone)), column, texts)
                rows = blank_rows(rows, gone) if table in BLANKED else rows.filter(pa.array(~gone))
            writer.write(rows)
    return RewrittenPart(writer.close(), found, texts)


def blank_rows(rows: pa.Table, gone: Mask) -> pa.Table:
    """The rows, those of documents that are gone without all that they said of them, dropped by the takedown."""
    places = pa.array(np.where(gone, -1, np.arange(len(gone))))
    places = pc.if_else(pc.less(places, 0), None, places)
    for number, name in enumerate(rows.schema.names):
        if name in VERDICT:
            said = pa.scalar(STAGE if name == "drop_stage" else RULE, rows.schema.field(name).type)
            rows = rows.set_column(number, rows.schema.field(name), pc.if_else(pa.array(gone), said, rows.column(name)))
        elif name not in KEPT:
            rows = rows.set_column(number, rows.schema.field(name), rows.column(name).combine_chunks().take(places))
    return rows


def counts_without_rows(counts: Counts, table: str, removed: Mapping[str, int]) -> Counts:
    """The books of a table without some rows; a blanked row is dropped by the takedown, others never came in."""
    number = sum(removed.values())
    dropped = {name: count - removed.get(name, 0) for name, count in counts.dropped.items()}
    kept = counts.rows_kept - sum(count for name, count in removed.items() if name not in counts.dropped)
    if table == "text":
        return counts
    if table in BLANKED:
        dropped[f"{STAGE}/{RULE}"] = dropped.get(f"{STAGE}/{RULE}", 0) + number
        return Counts(rows_in=counts.rows_in, rows_kept=kept, dropped=dropped)
    return Counts(rows_in=counts.rows_in - number, rows_kept=kept, dropped=dropped)


def _fates(rows: pa.Table) -> dict[str, int]:
    """How many of the rows were kept, or dropped by which rule."""
    if "drop_stage" not in rows.schema.names:
        return {"kept": rows.num_rows}
    found: dict[str, int] = {}
    for stage, rule in zip(*(rows.column(name).to_pylist() for name in VERDICT), strict=True):
        fate = "kept" if stage is None else f"{stage}/{rule}"
        found[fate] = found.get(fate, 0) + 1
    return found


def _collect(rows: pa.Table, column: str, texts: dict[bytes, list[str]]) -> None:
    for identifier, text in zip(rows.column("doc_id").to_pylist(), rows.column(column).to_pylist(), strict=True):
        if text:
            texts.setdefault(bytes(identifier), []).append(text)


class GroupWriter:
    """Writes row groups as they come to one Parquet file; equal rows give equal bytes."""

    def __init__(self, folder: Store, key: str, schema: pa.Schema, stream: Any = None):
        """`stream` takes the place of a file in `folder`, for those who only want its digest."""
        self._folder, self._key, self._schema = folder, key, schema
        self._path = unique_name(key, "parquet")
        self._durable = stream is None
        self._sink = HashingSink(stream or folder.open_output(self._path))
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"), schema, compression="zstd", compression_level=1, write_statistics=False
        )
        self.num_rows = 0

    def write(self, rows: pa.Table) -> None:
        """Write the rows as one row group, or none if there are none."""
        if rows.num_rows:
            # Chunks of a row group may be slices; what is written is their values alone.
            self._writer.write_table(rows.cast(self._schema).combine_chunks(), row_group_size=rows.num_rows)
            self.num_rows += rows.num_rows

    def close(self) -> dict[str, Any]:
        """Finish the file and make it durable; returns its manifest entry."""
        self._writer.close()
        self._sink.close()
        if self._durable:
            self._folder.sync(self._path)
        size, sha256 = self._sink.num_bytes, self._sink.sha256
        return {"key": self._key, "path": self._path, "rows": self.num_rows, "bytes": size, "sha256": sha256}


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of a Parquet file as it was given to the writer: without the ids of fields that reading adds."""
    return pa.schema([_plain(one) for one in schema], metadata=schema.metadata)


def _plain(one: pa.Field) -> pa.Field:
    metadata = {name: value for name, value in (one.metadata or {}).items() if name != b"PARQUET:field_id"}
    kind = one.type
    if pa.types.is_list(kind):
        kind = pa.list_(_plain(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_plain(kind.field(number)) for number in range(kind.num_fields)])
    return pa.field(one.name, kind, one.nullable, metadata or None)


# Salted digests of spans: that a text is absent can be verified by who scans for them, and nobody can read it there.
#
# A span is a window of tokens or of bytes. Its mark, the upper half of a rolling hash under a multiplier that the salt
# gives, is compared at every position; where it fits, the salted SHA-256 decides.

Units = NDArray[np.unsignedinteger]
Marks = NDArray[np.uint32]
SpanTrace = tuple[int, str]

SPAN_LENGTHS = {"tokens": 16, "text": 32}
"""Length of a span [tokens; bytes of UTF-8]; powers of two, which the rolling hash is built of."""
MAX_SPANS_OF_DOCUMENT = 64
"""Spans of a document at most, spread over it evenly; where there are fewer, they lie end to end."""
MAX_SPANS = 100_000
"""Spans of a takedown at most, as long as every document has one."""
MIN_DISTINCT = 4
"""A window of fewer different units says nothing of where it comes from."""
DIGEST_BYTES = 16
BLOCK = 1 << 16


def trace_spans(units: Units, kind: str, salt: str, most: int = MAX_SPANS_OF_DOCUMENT) -> list[SpanTrace]:
    """(mark, salted digest) of windows of a document; none if it is shorter than a window."""
    window = SPAN_LENGTHS[kind]
    count = min(len(units) // window, most)
    if not count:
        return []
    starts = np.unique(np.linspace(0, len(units) - window, count).astype(np.int64))
    hashed = window_marks(units, kind, salt)
    windows = units[starts[:, None] + np.arange(window)]
    distinct = 1 + (np.diff(np.sort(windows, axis=1), axis=1) != 0).sum(axis=1)
    chosen = zip(hashed[starts].tolist(), windows, (distinct >= MIN_DISTINCT).tolist(), strict=True)
    return [(mark, span_digest(own, kind, salt)) for mark, own, message in chosen if message]


def spans_per_document(documents: int) -> int:
    """Spans of each document so that those of all are not too many."""
    return max(1, min(MAX_SPANS_OF_DOCUMENT, MAX_SPANS // max(1, documents)))


def window_marks(units: Units, kind: str, salt: str) -> Marks:
    """The mark of the window that begins at each position."""
    multiplier = int.from_bytes(hashlib.sha256(f"{salt} {kind}".encode()).digest()[:8], "little") | 1
    hashed, width = units.astype(np.uint64), 1
    while width < SPAN_LENGTHS[kind]:
        # The hash of a window is that of its first half times the multiplier's power, plus that of its second half.
        hashed = hashed[:-width] * np.uint64(multiplier) + hashed[width:] if len(hashed) > width else hashed[:0]
        multiplier, width = multiplier * multiplier % (1 << 64), 2 * width
    return (hashed >> np.uint64(32)).astype(np.uint32)


def span_digest(window: Units, kind: str, salt: str) -> str:
    """The salted digest (hex) of a window, whatever integers hold it."""
    content = window.astype("<u4" if kind == "tokens" else "<u1").tobytes()
    return hashlib.sha256(f"{salt} {kind} ".encode() + content).digest()[:DIGEST_BYTES].hex()


class SpanFinder:
    """Looks for spans in streams of tokens or bytes."""

    def __init__(self, kind: str, salt: str, wanted: Sequence[tuple[int, Sequence[SpanTrace]]]):
        """`wanted`: number of a document, and the spans of it."""
        self._kind, self._salt = kind, salt
        self._owners: dict[str, list[int]] = {}
        for number, spans in wanted:
            for _, one in spans:
                self._owners.setdefault(one, []).append(number)
        self._marks = np.unique(np.array([mark for _, spans in wanted for mark, _ in spans], np.uint32))
        self._likely = np.zeros(1 << 16, np.bool_)
        self._likely[self._marks >> np.uint32(16)] = True

    def find(self, units: Units) -> Iterator[tuple[int, str, list[int]]]:
        """(position, digest, numbers of its documents) of every span that stands in the units."""
        if not len(self._marks):
            return
        window = SPAN_LENGTHS[self._kind]
        for first in range(0, max(0, len(units) - window + 1), BLOCK):
            block = units[first : first + BLOCK + window - 1]
            hashed = window_marks(block, self._kind, self._salt)
            places = np.flatnonzero(self._likely[hashed >> np.uint32(16)])
            for place in places[np.isin(hashed[places], self._marks)].tolist():
                found = span_digest(block[place : place + window], self._kind, self._salt)
                if found in self._owners:
                    yield first + place, found, self._owners[found]
