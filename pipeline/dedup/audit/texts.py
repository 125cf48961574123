"""The documents of a sample as they lie in one part: keys, signature, cluster, and the shingles of their texts.

Of a part only the row groups that hold a wanted document are read: a sample costs what it is, not what the run is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keep_order import binary_array
from pipeline.dedup.keys import key_columns, near_keys, scopes_of
from pipeline.engine.parts import Part, apply_cuts
from pipeline.minhash.stage import SignatureConfig, shingle_hashes
from pipeline.text.words import Codes
from schemas.errors import ContractError
from schemas.manifest import part_key

MAX_SHINGLES = 1 << 18
"""Documents of more are not compared: a novel has 10^5."""
SAMPLED = pa.schema(
    [
        pa.field("doc", pa.binary()),
        pa.field("scope", pa.int64()),
        pa.field("cluster", pa.binary()),
        pa.field("digest", pa.binary()),
        pa.field("signature", pa.binary()),
        pa.field("keys", pa.binary()),
        pa.field("num_shingles", pa.int64()),
        pa.field("shingles", pa.binary()),
    ]
)
"""`shingles` are sorted distinct uint64, null if there is no text (then their number is too) or too much of it."""
SAMPLED_DDL = (
    "doc binary, scope long, cluster binary, digest binary, signature binary, keys binary, num_shingles long, "
    "shingles binary"
)


@dataclass(frozen=True)
class TextsTask:
    """One part, and the documents that are wanted of all parts."""

    part: Part
    wanted: Sequence[bytes]
    dedup: DedupConfig
    signature: SignatureConfig


def sampled(task: TextsTask) -> Iterator[pa.RecordBatch]:
    """The wanted documents (SAMPLED) that this part holds. Raises ContractError if its tables are not of one run."""
    names = list(dict.fromkeys(["doc_id", "language", "text_digest", "signature", *key_columns(task.dedup)]))
    found = joined(rows_of(task.part, "documents", names, pa.array(task.wanted, pa.binary(16))))
    if found is None:
        return
    ids = found.column("doc_id")
    clusters = joined(rows_of(task.part, "clusters", ["doc_id", "cluster"], ids))
    found = found.append_column("cluster", _same(task, ids, clusters).column("cluster"))
    start = 0
    for texts in rows_of(task.part, "text", ["doc_id", "text", "cuts"], ids):
        rows = found.slice(start, texts.num_rows)
        _same(task, rows.column("doc_id"), texts)
        yield _with_shingles(task, rows, texts)
        start += texts.num_rows
    _same(task, ids.slice(start), None)


def rows_of(part: Part, table: str, columns: Sequence[str], wanted: pa.Array) -> Iterator[pa.RecordBatch]:
    """The wanted documents' rows of one part of a table, in its order; only row groups that hold one are read."""
    with part.folders[table].open_input(part.paths[table]) as stream:
        file = pq.ParquetFile(stream)
        for group in range(file.num_row_groups):
            hits = pc.is_in(file.read_row_group(group, columns=["doc_id"]).column("doc_id"), value_set=wanted)
            if pc.any(hits).as_py():
                rows = file.read_row_group(group, columns=list(columns)).filter(hits).select(list(columns))
                yield rows.combine_chunks().to_batches()[0]


def joined(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    """The batches as one; None if there is none."""
    held = list(batches)
    return pa.Table.from_batches(held).combine_chunks().to_batches()[0] if held else None


def _same(task: TextsTask, promised: pa.Array, rows: pa.RecordBatch | None) -> pa.RecordBatch:
    """The rows, which are those of the promised documents in their order."""
    if rows is None:
        rows = pa.RecordBatch.from_arrays([promised.slice(0, 0)], ["doc_id"])
    if not rows.column("doc_id").equals(promised):
        raise ContractError(
            f"audit {part_key(task.part.ordinal)}: promised {len(promised)} sampled documents in `clusters` and "
            f"`text`, found {rows.num_rows} or others; the tables are not of the same run: run the stages again"
        )
    return rows


def _with_shingles(task: TextsTask, rows: pa.RecordBatch, texts: pa.RecordBatch) -> pa.RecordBatch:
    languages = rows.column("language").to_pylist()
    sets = [_shingles(task, text, language) for text, language in zip(texts.to_pylist(), languages)]
    stored = [None if found is None or len(found) > MAX_SHINGLES else found.astype("<u8").tobytes() for found in sets]
    columns = [
        rows.column("doc_id").cast(pa.binary()),
        pa.array(scopes_of(rows, task.dedup).view(np.int64)),
        rows.column("cluster").cast(pa.binary()),
        rows.column("text_digest").cast(pa.binary()),
        rows.column("signature").cast(pa.binary()),
        binary_array(np.ascontiguousarray(near_keys(rows, task.dedup, task.signature)).view(np.uint8)),
        pa.array([None if found is None else len(found) for found in sets], pa.int64()),
        pa.array(stored, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SAMPLED)


def _shingles(task: TextsTask, text: Mapping[str, Any], language: str | None) -> Codes | None:
    if text["text"] is None:
        return None
    return shingle_hashes(apply_cuts(text["text"], text["cuts"] or []), language or "", task.signature)
