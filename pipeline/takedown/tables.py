"""Rewriting of Parquet parts without some documents, and the traces by which their absence is verified.

A table loses the rows of removed documents, or keeps them blanked. The rows of `documents` are kept, because they
account for every byte of the inputs. Traces are salted digests of spans of a removed text. With them, the text can be
found where it still occurs, but they do not reveal it.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.engine.parquet import PartWriter, WrittenFile
from pipeline.takedown.figures import removed_rows
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import Counts
from schemas.storage import CheckedPath, Store
from schemas.tables import Table
from schemas.takedown import RULE, STAGE

Mask = NDArray[np.bool_]
ID = pa.binary(DOC_ID_BYTES)
TEXTS = ("text", "first_text", "second_text")
"""Columns with texts, of which digests of spans are recorded when a document is removed."""
NODE_BYTES = DOC_ID_BYTES + 4
"""Bytes at the end of a document's `order` in a snapshot index: doc_id and part."""
ORDER = "order"
"""Column of a snapshot index that ends with a document's id."""
VERDICT = ("drop_stage", "drop_rule")


@dataclass
class RewrittenPart:
    """A part of a table that was written again without some documents."""

    written: WrittenFile
    """The new file."""
    removed: dict[str, int]
    """Number of rows removed or blanked, by their former verdict: `kept` or `stage/rule`."""
    texts: dict[bytes, list[str]]
    """Removed texts, by doc_id."""
    rows: list[dict[str, Any]]
    """The columns of the removed rows that the figures of the table count."""


def columns_with_ids(table: Table, names: Collection[str]) -> list[str]:
    """Return the columns with document ids among `names`, the columns of a table's file."""
    return [name for name in table.ids if name in names]


def _ids(column: pa.ChunkedArray | pa.Array, name: str) -> pa.ChunkedArray | pa.Array:
    return pc.binary_slice(column, -NODE_BYTES, -4) if name == ORDER else column.cast(pa.binary())


def _names_any(rows: pa.RecordBatch | pa.Table, columns: Sequence[str], documents: pa.Array) -> Mask:
    """Return a mask of the rows that contain an id of `documents` in one of the given columns."""
    known = documents.cast(pa.binary())
    mask: Mask = np.zeros(rows.num_rows, np.bool_)
    for name in columns:
        mask |= np.asarray(pc.is_in(_ids(rows.column(name), name), known), np.bool_)
    return mask


def documents_named(batch: pa.RecordBatch, columns: Sequence[str]) -> set[bytes]:
    """Return the document ids in the given columns of a batch."""
    return {identifier for name in columns for identifier in _ids(batch.column(name), name).to_pylist()}


def holds_documents(folder: Store, path: CheckedPath, table: Table, documents: pa.Array) -> bool:
    """Return True if a part of a table contains the id of any of the documents."""
    with folder.open_input(path) as stream:
        file = pq.ParquetFile(stream)
        columns = columns_with_ids(table, file.schema_arrow.names)
        batches = file.iter_batches(batch_size=1 << 16, columns=columns)
        return bool(columns) and any(_names_any(batch, columns, documents).any() for batch in batches)


def rewrite_part(old: Store, path: CheckedPath, new: Store, key: str, how: tuple[Table, pa.Array]) -> RewrittenPart:
    """Write a part of a table without some documents, in the same row groups.

    `how` is the pair (table, ids of the documents to remove).
    """
    table, documents = how
    removed: dict[str, int] = {}
    texts: dict[bytes, list[str]] = {}
    counted: list[dict[str, Any]] = []
    with old.open_input(path) as stream:
        file = pq.ParquetFile(stream)
        columns = columns_with_ids(table, file.schema_arrow.names)
        with PartWriter(new, key, plain_schema(file.schema_arrow)) as writer:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group)
                is_removed = _names_any(rows, columns, documents)
                if is_removed.any():
                    own = rows.filter(pa.array(is_removed))
                    counted += removed_rows(own)
                    for name, number in _verdicts(own).items():
                        removed[name] = removed.get(name, 0) + number
                    for column in set(TEXTS) & set(rows.schema.names):
                        _collect(own, column, texts)
                    kept = table.blank_keeps
                    rows = blank_rows(rows, is_removed, kept) if kept else rows.filter(pa.array(~is_removed))
                writer.add_group(rows)
    return RewrittenPart(writer.written, removed, texts, counted)


def blank_rows(rows: pa.Table, is_removed: Mask, kept: Collection[str]) -> pa.Table:
    """Return the rows with those of removed documents blanked: all columns except `kept` become null.

    If the table has the columns of a verdict, these state that the takedown dropped the documents.
    """
    indices = pa.array(np.where(is_removed, -1, np.arange(len(is_removed))))
    indices = pc.if_else(pc.less(indices, 0), None, indices)
    for number, name in enumerate(rows.schema.names):
        if name in VERDICT:
            reason = pa.scalar(STAGE if name == "drop_stage" else RULE, rows.schema.field(name).type)
            verdicts = pc.if_else(pa.array(is_removed), reason, rows.column(name))
            rows = rows.set_column(number, rows.schema.field(name), verdicts)
        elif name not in kept:
            rows = rows.set_column(number, rows.schema.field(name), rows.column(name).combine_chunks().take(indices))
    return rows


def counts_without_rows(counts: Counts, table: Table, removed: Mapping[str, int]) -> Counts:
    """Return the row counts of a table after a takedown. `removed` is the number of removed rows by their old verdict.

    Deleted rows are no longer counted. Blanked rows count as dropped by the takedown if the table has verdicts.
    """
    number = sum(removed.values())
    dropped = {name: count - removed.get(name, 0) for name, count in counts.dropped.items()}
    kept = counts.rows_kept - sum(count for name, count in removed.items() if name not in counts.dropped)
    if table.blank_keeps and not table.has_verdicts:
        return counts
    if table.blank_keeps:
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
    for identifier, text in zip(rows.column("doc_id").to_pylist(), rows.column(column).to_pylist(), strict=True):
        if text:
            texts.setdefault(bytes(identifier), []).append(text)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with which a Parquet file was written: the schema read from the file, without field ids."""
    return pa.schema([_plain(field) for field in schema], metadata=schema.metadata)


def _plain(field: pa.Field) -> pa.Field:
    metadata = {name: value for name, value in (field.metadata or {}).items() if name != b"PARQUET:field_id"}
    kind = field.type
    if pa.types.is_list(kind):
        kind = pa.list_(_plain(kind.value_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_plain(kind.field(number)) for number in range(kind.num_fields)])
    return pa.field(field.name, kind, field.nullable, metadata or None)


# Traces: salted digests of spans. A span is a window of tokens or of bytes. Its mark is the upper half of a rolling
# hash whose multiplier depends on the salt. A search compares marks at every position of a text. Where they match, the
# salted SHA-256 of the window decides.

Units = NDArray[np.unsignedinteger]
Marks = NDArray[np.uint32]
SpanTrace = tuple[int, str]

SPAN_LENGTHS = {"tokens": 16, "text": 32}
"""Length of a span [tokens; bytes of UTF-8]; the rolling hash requires powers of two."""
MAX_SPANS_OF_DOCUMENT = 64
"""Maximum number of spans of a document, spread evenly over it. Spans of a shorter document are adjacent."""
MAX_SPANS = 100_000
"""Maximum number of spans of a takedown; with more documents, each document has one span."""
MIN_DISTINCT = 4
"""Minimum number of distinct tokens or bytes in a span; a window with fewer occurs in many documents."""
DIGEST_BYTES = 16
BLOCK = 1 << 16


def trace_spans(units: Units, kind: str, salt: str, most: int = MAX_SPANS_OF_DOCUMENT) -> list[SpanTrace]:
    """Return (32-bit hash, salted digest) of at most `most` spans; empty if `units` is shorter than a span.

    `units` are the tokens of a document (`kind` is `tokens`) or the bytes of one of its texts (`kind` is `text`).
    """
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
    """Return the maximum number of spans to record for each document if `documents` documents are removed."""
    return max(1, min(MAX_SPANS_OF_DOCUMENT, MAX_SPANS // max(1, documents)))


def window_marks(units: Units, kind: str, salt: str) -> Marks:
    """Return the 32-bit hash of every span of `units`, ordered by the position at which the span starts."""
    multiplier = int.from_bytes(hashlib.sha256(f"{salt} {kind}".encode()).digest()[:8], "little") | 1
    hashed, width = units.astype(np.uint64), 1
    while width < SPAN_LENGTHS[kind]:
        # The hash of a window is that of its first half times the multiplier's power, plus that of its second half.
        hashed = hashed[:-width] * np.uint64(multiplier) + hashed[width:] if len(hashed) > width else hashed[:0]
        multiplier, width = multiplier * multiplier % (1 << 64), 2 * width
    return (hashed >> np.uint64(32)).astype(np.uint32)


def span_digest(window: Units, kind: str, salt: str) -> str:
    """Return the salted digest (hex) of a span."""
    # The digest must not depend on the integer type of the array.
    content = window.astype("<u4" if kind == "tokens" else "<u1").tobytes()
    return hashlib.sha256(f"{salt} {kind} ".encode() + content).digest()[:DIGEST_BYTES].hex()


class SpanFinder:
    """Finds the spans of removed documents in sequences of tokens or bytes."""

    def __init__(self, kind: str, salt: str, traces: Sequence[tuple[int, Sequence[SpanTrace]]]):
        """Prepare the search. `traces` has (number, spans) of each removed document.

        A span is given as (32-bit hash, salted digest).
        """
        self._kind, self._salt = kind, salt
        self._owners: dict[str, list[int]] = {}
        for number, spans in traces:
            for _, span in spans:
                self._owners.setdefault(span, []).append(number)
        self._marks = np.unique(np.array([mark for _, spans in traces for mark, _ in spans], np.uint32))
        self._likely = np.zeros(1 << 16, np.bool_)
        self._likely[self._marks >> np.uint32(16)] = True

    def find(self, units: Units) -> Iterator[tuple[int, str, list[int]]]:
        """Yield (position, digest, numbers of the removed documents with this span) for every span found in `units`."""
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
