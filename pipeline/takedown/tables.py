"""Rewriting of Parquet parts without some documents, and the traces by which their absence is verified.

A table loses the rows of removed documents, or keeps them blanked: those of `documents` account for every byte of the
inputs. Traces are salted digests of spans of a removed text: they find the text where it still
occurs, and do not reveal it.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.engine.parquet import PartWriter, WrittenFile
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.tables import Table
from schemas.takedown import RULE, STAGE

Mask = NDArray[np.bool_]
ID = pa.binary(DOC_ID_BYTES)
TEXTS = ("text",)
"""Columns whose spans are traced."""
NODE_BYTES = DOC_ID_BYTES + 4
"""Bytes at the end of a document's `order` in a snapshot index: doc_id and part."""
ORDER = "order"
"""Column of a snapshot index that ends with a document's id."""
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


def columns_with_ids(table: Table, names: Collection[str]) -> list[str]:
    """Return those columns of a file of a table that name documents; empty if its rows name none."""
    return [name for name in table.ids if name in names]


def _ids(column: pa.ChunkedArray | pa.Array, name: str) -> pa.ChunkedArray | pa.Array:
    return pc.binary_slice(column, -NODE_BYTES, -4) if name == ORDER else column.cast(pa.binary())


def _names_any(rows: pa.RecordBatch | pa.Table, columns: Sequence[str], documents: pa.Array) -> Mask:
    """Return for each row True if one of the columns names one of the documents."""
    known = documents.cast(pa.binary())
    mask: Mask = np.zeros(rows.num_rows, np.bool_)
    for name in columns:
        mask |= np.asarray(pc.is_in(_ids(rows.column(name), name), known), np.bool_)
    return mask


def documents_named(batch: pa.RecordBatch, columns: Sequence[str]) -> set[bytes]:
    """Return the documents that the rows of a batch name in these columns."""
    return {identifier for name in columns for identifier in _ids(batch.column(name), name).to_pylist()}


def holds_documents(folder: Store, path: str, table: Table, documents: pa.Array) -> bool:
    """Return True if a part of a table holds a row of any of the documents."""
    with folder.open_input(path) as stream:
        file = pq.ParquetFile(stream)
        columns = columns_with_ids(table, file.schema_arrow.names)
        batches = file.iter_batches(batch_size=1 << 16, columns=columns)
        return bool(columns) and any(_names_any(batch, columns, documents).any() for batch in batches)


def rewrite_part(old: Store, path: str, new: Store, key: str, how: tuple[Table, pa.Array]) -> RewrittenPart:
    """Write a part of a table without documents, with the same row groups. `how` is the table and the documents."""
    table, documents = how
    removed: dict[str, int] = {}
    texts: dict[bytes, list[str]] = {}
    with old.open_input(path) as stream:
        file = pq.ParquetFile(stream)
        columns = columns_with_ids(table, file.schema_arrow.names)
        with PartWriter(new, key, plain_schema(file.schema_arrow)) as writer:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group)
                is_removed = _names_any(rows, columns, documents)
                if is_removed.any():
                    for name, number in _verdicts(rows.filter(pa.array(is_removed))).items():
                        removed[name] = removed.get(name, 0) + number
                    for column in set(TEXTS) & set(rows.schema.names):
                        _collect(rows.filter(pa.array(is_removed)), column, texts)
                    kept = table.blank_keeps
                    rows = blank_rows(rows, is_removed, kept) if kept else rows.filter(pa.array(~is_removed))
                writer.add_group(rows)
    return RewrittenPart(writer.written, removed, texts)


def blank_rows(rows: pa.Table, is_removed: Mask, kept: Collection[str]) -> pa.Table:
    """Return the rows with removed documents blanked, except for the `kept` columns, and dropped by the takedown."""
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
    """Return the counts of a table without some rows; a blanked row counts as dropped, a removed row not at all."""
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
