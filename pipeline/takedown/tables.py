"""Rewriting of Parquet parts without some documents, and the traces by which their absence is verified.

`documents` and `text` keep a blanked row for every removed record, so that all bytes of each input stay accounted for;
other tables lose the row. Traces are salted digests of spans of a removed text: they find the text where it still
occurs, and do not reveal it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.engine.parquet import PartWriter, WrittenFile
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.takedown import RULE, STAGE

Mask = NDArray[np.bool_]
ID = pa.binary(DOC_ID_BYTES)
KEPT = ("doc_id", "source", "split", "offset", "length", "record_type", "snapshot")
"""Columns that a blanked row keeps: the bytes of the input that it accounts for."""
BLANKED = ("documents", "text")
TEXTS = ("text",)
"""Columns whose spans are traced."""
NODE_BYTES = DOC_ID_BYTES + 4
"""Bytes at the end of a document's `order` in a snapshot index: doc_id and part."""
VERDICT = ("drop_stage", "drop_rule")


@dataclass
class RewrittenPart:
    """The result of rewriting a part."""

    written: WrittenFile
    """The new file."""
    removed: dict[str, int]
    """Number of rows removed or blanked, by their former verdict: `kept` or `stage/rule`."""
    texts: dict[bytes, list[str]]
    """Removed texts, by doc_id."""


def _by_id(batch: pa.RecordBatch | pa.Table, documents: pa.Array) -> Mask:
    return _is_in(batch.column("doc_id"), documents)


def _of_pair(batch: pa.RecordBatch | pa.Table, documents: pa.Array) -> Mask:
    return _is_in(batch.column("a"), documents) | _is_in(batch.column("b"), documents)


def _of_order(batch: pa.RecordBatch | pa.Table, documents: pa.Array) -> Mask:
    node = pc.binary_slice(batch.column("order"), -NODE_BYTES, -4)
    return _is_in(node, documents)


def _is_in(column: pa.ChunkedArray | pa.Array, documents: pa.Array) -> Mask:
    mask: Mask = np.asarray(pc.is_in(column.cast(pa.binary()), documents.cast(pa.binary())), np.bool_)
    return mask


MATCHES: Mapping[str, tuple[tuple[str, ...], Callable[[Any, pa.Array], Mask]]] = {
    "doc_id": (("doc_id",), _by_id),
    "audit": (("a", "b"), _of_pair),
    "bands": (("order",), _of_order),
}
"""Columns that name the documents of a row, and the function that matches them."""


def documents_named(batch: pa.RecordBatch, match: str) -> set[bytes]:
    """Return the documents that the rows of a batch name."""
    if match == "bands":
        return {order[-NODE_BYTES:-4] for order in batch.column("order").to_pylist()}
    return {identifier for column in MATCHES[match][0] for identifier in batch.column(column).to_pylist()}


def match_key(table: str, key: str) -> str | None:
    """Return the key in `MATCHES` for the rows of a file; None if they name no documents."""
    if table == "index":
        return {"bands": "bands", "leaders": "doc_id"}.get(key.partition("/")[0])
    if table == "audit":
        return "audit"
    return None if table == "representatives" else "doc_id"


def holds_documents(folder: Store, path: str, match: str, documents: pa.Array) -> bool:
    """Return True if a part holds a row of any of the documents."""
    columns, matches = MATCHES[match]
    with folder.open_input(path) as stream:
        batches = pq.ParquetFile(stream).iter_batches(batch_size=1 << 16, columns=list(columns))
        return any(matches(batch, documents).any() for batch in batches)


def rewrite_part(old: Store, path: str, new: Store, key: str, how: tuple[str, str, pa.Array]) -> RewrittenPart:
    """Write a part without documents, with the same row groups.

    `how` is the name of the table, the key in `MATCHES`, and the documents.
    """
    table, match, documents = how
    removed: dict[str, int] = {}
    texts: dict[bytes, list[str]] = {}
    with old.open_input(path) as stream:
        file = pq.ParquetFile(stream)
        with PartWriter(new, key, plain_schema(file.schema_arrow)) as writer:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group)
                is_removed = MATCHES[match][1](rows, documents)
                if is_removed.any():
                    for name, number in _verdicts(rows.filter(pa.array(is_removed))).items():
                        removed[name] = removed.get(name, 0) + number
                    for column in set(TEXTS) & set(rows.schema.names):
                        _collect(rows.filter(pa.array(is_removed)), column, texts)
                    rows = blank_rows(rows, is_removed) if table in BLANKED else rows.filter(pa.array(~is_removed))
                writer.add_group(rows)
    return RewrittenPart(writer.written, removed, texts)


def blank_rows(rows: pa.Table, is_removed: Mask) -> pa.Table:
    """Return the rows with removed documents blanked, except for `KEPT` columns, and dropped by the takedown."""
    indices = pa.array(np.where(is_removed, -1, np.arange(len(is_removed))))
    indices = pc.if_else(pc.less(indices, 0), None, indices)
    for number, name in enumerate(rows.schema.names):
        if name in VERDICT:
            reason = pa.scalar(STAGE if name == "drop_stage" else RULE, rows.schema.field(name).type)
            verdicts = pc.if_else(pa.array(is_removed), reason, rows.column(name))
            rows = rows.set_column(number, rows.schema.field(name), verdicts)
        elif name not in KEPT:
            rows = rows.set_column(number, rows.schema.field(name), rows.column(name).combine_chunks().take(indices))
    return rows


def counts_without_rows(counts: Counts, table: str, removed: Mapping[str, int]) -> Counts:
    """Return the counts of a table without some rows; a blanked row counts as dropped, a removed row not at all."""
    number = sum(removed.values())
    dropped = {name: count - removed.get(name, 0) for name, count in counts.dropped.items()}
    kept = counts.rows_kept - sum(count for name, count in removed.items() if name not in counts.dropped)
    if table == "text":
        return counts
    if table in BLANKED:
        dropped[f"{STAGE}/{RULE}"] = dropped.get(f"{STAGE}/{RULE}", 0) + number
        return Counts(rows_in=counts.rows_in, rows_kept=kept, dropped=dropped)
    return Counts(rows_in=counts.rows_in - number, rows_kept=kept, dropped=dropped)


def _verdicts(rows: pa.Table) -> dict[str, int]:
    """Return the number of rows by verdict: `kept` or `stage/rule`."""
    if "drop_stage" not in rows.schema.names:
        return {"kept": rows.num_rows}
    numbers: dict[str, int] = {}
    for stage, rule in zip(*(rows.column(name).to_pylist() for name in VERDICT), strict=True):
        verdict = "kept" if stage is None else f"{stage}/{rule}"
        numbers[verdict] = numbers.get(verdict, 0) + 1
    return numbers


def _collect(rows: pa.Table, column: str, texts: dict[bytes, list[str]]) -> None:
    """Add the texts of a column to `texts`, by doc_id."""
    for identifier, text in zip(rows.column("doc_id").to_pylist(), rows.column(column).to_pylist(), strict=True):
        if text:
            texts.setdefault(bytes(identifier), []).append(text)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema that was given to the writer of a Parquet file, without the field ids that reading adds."""
    return pa.schema([_plain(field) for field in schema], metadata=schema.metadata)


def _plain(field: pa.Field) -> pa.Field:
    metadata = {name: value for name, value in (field.metadata or {}).items() if name != b"PARQUET:field_id"}
    kind = field.type
    if pa.types.is_list(kind):
        kind = pa.list_(_plain(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_plain(kind.field(number)) for number in range(kind.num_fields)])
    return pa.field(field.name, kind, field.nullable, metadata or None)


# Traces: salted digests of spans. A span is a window of tokens or of bytes. Its mark, the upper half of a rolling hash
# whose multiplier depends on the salt, is compared at every position; if it matches, the salted SHA-256 decides.

Units = NDArray[np.unsignedinteger]
Marks = NDArray[np.uint32]
SpanTrace = tuple[int, str]

SPAN_LENGTHS = {"tokens": 16, "text": 32}
"""Length of a span [tokens; bytes of UTF-8]; the rolling hash requires powers of two."""
MAX_SPANS_OF_DOCUMENT = 64
"""Maximum number of spans of a document, spread over it evenly; if it has fewer, they are adjacent."""
MAX_SPANS = 100_000
"""Maximum number of spans of a takedown, unless every document has just one."""
MIN_DISTINCT = 4
"""Minimum number of distinct units in a span; a window with fewer occurs in many documents."""
DIGEST_BYTES = 16
BLOCK = 1 << 16


def trace_spans(units: Units, kind: str, salt: str, most: int = MAX_SPANS_OF_DOCUMENT) -> list[SpanTrace]:
    """Return (mark, salted digest) of spans of a document; empty if it is shorter than a span."""
    window = SPAN_LENGTHS[kind]
    count = min(len(units) // window, most)
    if not count:
        return []
    starts = np.unique(np.linspace(0, len(units) - window, count).astype(np.int64))
    hashed = window_marks(units, kind, salt)
    windows = units[starts[:, None] + np.arange(window)]
    distinct = 1 + (np.diff(np.sort(windows, axis=1), axis=1) != 0).sum(axis=1)
    chosen = zip(hashed[starts].tolist(), windows, (distinct >= MIN_DISTINCT).tolist(), strict=True)
    return [(mark, span_digest(own, kind, salt)) for mark, own, is_distinctive in chosen if is_distinctive]


def spans_per_document(documents: int) -> int:
    """Return the number of spans of each document that keeps their total within `MAX_SPANS`."""
    return max(1, min(MAX_SPANS_OF_DOCUMENT, MAX_SPANS // max(1, documents)))


def window_marks(units: Units, kind: str, salt: str) -> Marks:
    """Return the mark of the window that starts at each position."""
    multiplier = int.from_bytes(hashlib.sha256(f"{salt} {kind}".encode()).digest()[:8], "little") | 1
    hashed, width = units.astype(np.uint64), 1
    while width < SPAN_LENGTHS[kind]:
        # The hash of a window is that of its first half times the multiplier's power, plus that of its second half.
        hashed = hashed[:-width] * np.uint64(multiplier) + hashed[width:] if len(hashed) > width else hashed[:0]
        multiplier, width = multiplier * multiplier % (1 << 64), 2 * width
    return (hashed >> np.uint64(32)).astype(np.uint32)


def span_digest(window: Units, kind: str, salt: str) -> str:
    """Return the salted digest (hex) of a window; it does not depend on the integer type."""
    content = window.astype("<u4" if kind == "tokens" else "<u1").tobytes()
    return hashlib.sha256(f"{salt} {kind} ".encode() + content).digest()[:DIGEST_BYTES].hex()


class SpanFinder:
    """Finds spans in streams of tokens or bytes."""

    def __init__(self, kind: str, salt: str, traces: Sequence[tuple[int, Sequence[SpanTrace]]]):
        """Index the spans in `traces`, pairs of the number of a document and its spans."""
        self._kind, self._salt = kind, salt
        self._owners: dict[str, list[int]] = {}
        for number, spans in traces:
            for _, span in spans:
                self._owners.setdefault(span, []).append(number)
        self._marks = np.unique(np.array([mark for _, spans in traces for mark, _ in spans], np.uint32))
        self._likely = np.zeros(1 << 16, np.bool_)
        self._likely[self._marks >> np.uint32(16)] = True

    def find(self, units: Units) -> Iterator[tuple[int, str, list[int]]]:
        """Yield (position, digest, numbers of its documents) of every span that occurs in the units."""
        if not len(self._marks):
            return
        window = SPAN_LENGTHS[self._kind]
        for first in range(0, max(0, len(units) - window + 1), BLOCK):
            block = units[first : first + BLOCK + window - 1]
            hashed = window_marks(block, self._kind, self._salt)
            positions = np.flatnonzero(self._likely[hashed >> np.uint32(16)])
            for position in positions[np.isin(hashed[positions], self._marks)].tolist():
                span = span_digest(block[position : position + window], self._kind, self._salt)
                if span in self._owners:
                    yield first + position, span, self._owners[span]
