"""Shards of an export: which documents each has, and the tasks that count documents and write shards.

The documents of all parts are one sequence, in the order of the parts. A document is in the shard in which the bytes of
its text begin, and shards have equal sizes. So the shards depend on the data only, not on the tasks that write them.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.parquet import FileWriter, Part, WrittenFile
from pipeline.engine.part import PartResult, TaskResult, complete_part
from pipeline.export.rows import PartRows, RowSource, plain_table
from schemas.manifest import Counts
from schemas.storage import CheckedPath, Store

DATA = "data"
PARTIAL = "_incomplete"
"""Folder of an unfinished export: its plan, the results of complete shards, and files that are being written."""
COMPRESSIONS = {"zstd": "jsonl.zst", "gzip": "jsonl.gz", "none": "jsonl"}
"""Suffix of JSON lines by their compression."""
SUFFIXES = {"jsonl": (*COMPRESSIONS.values(),), "parquet": ("parquet",)}
"""Suffixes of the files of each format; the first one is the default."""
GROUP_ROWS = 4096
GROUP_BYTES = 16 << 20
WRITE_BYTES = 1 << 20
SHOWN_VALUES = 20
"""Maximum number of licences that the result of a task counts."""


class RowWriter(FileWriter):
    """A file of exported rows."""

    @abstractmethod
    def add(self, rows: pa.Table) -> None:
        """Append rows."""


class JsonLinesWriter(RowWriter):
    """A file with one JSON object per line, in UTF-8; numbers that are not finite are null."""

    def __init__(self, folder: Store, key: str, schema: pa.Schema, suffix: str):
        super().__init__(folder, key, suffix)
        (compression,) = (name for name, known in COMPRESSIONS.items() if known == suffix)
        file = pa.PythonFile(self._sink, mode="w")
        self._stream = file if compression == "none" else pa.CompressedOutputStream(file, compression)
        self._pending = bytearray()

    def add(self, rows: pa.Table) -> None:
        """Append rows."""
        columns = [json_values(rows.column(name)) for name in rows.column_names]
        for values in zip(*columns, strict=True):
            line = json.dumps(dict(zip(rows.column_names, values)), ensure_ascii=False, separators=(",", ":"))
            self._pending += line.encode() + b"\n"
            # Blocks of one size, so that the compressed bytes do not depend on how rows are batched.
            while len(self._pending) >= WRITE_BYTES:
                self._stream.write(bytes(self._pending[:WRITE_BYTES]))
                del self._pending[:WRITE_BYTES]
        self.num_rows += rows.num_rows

    def _finish(self) -> None:
        self._stream.write(bytes(self._pending))
        self._close()

    def _drop(self) -> None:
        self._close()

    def _close(self) -> None:
        if isinstance(self._stream, pa.CompressedOutputStream):
            self._stream.close()  # a plain stream has nothing to finish, and the writer closes the file


class ParquetRowWriter(RowWriter):
    """A Parquet file with zstd compression and statistics."""

    def __init__(self, folder: Store, key: str, schema: pa.Schema, suffix: str):
        super().__init__(folder, key, suffix)
        self._writer = pq.ParquetWriter(pa.PythonFile(self._sink, mode="w"), schema, compression="zstd")
        self._schema = schema
        self._pending: list[pa.Table] = []

    def add(self, rows: pa.Table) -> None:
        """Append rows."""
        self._pending.append(rows)
        self.num_rows += rows.num_rows
        if sum(own.num_rows for own in self._pending) >= GROUP_ROWS or sum(own.nbytes for own in self._pending) >= (
            GROUP_BYTES
        ):
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            table = pa.concat_tables(self._pending).cast(self._schema).combine_chunks()
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._pending = []

    def _finish(self) -> None:
        self._flush()
        self._writer.close()

    def _drop(self) -> None:
        self._writer.close()


WRITERS: dict[str, Callable[[Store, str, pa.Schema, str], RowWriter]] = {
    **dict.fromkeys(SUFFIXES["jsonl"], JsonLinesWriter),
    **dict.fromkeys(SUFFIXES["parquet"], ParquetRowWriter),
}
"""Writer by the suffix of the files."""


def json_values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column for JSON: floats with as few digits as identify them, and finite or None."""
    if not pa.types.is_floating(column.type):
        return list(column.to_pylist())
    # The shortest digits of a float32; as a Python float 0.9 would be 0.8999999761581421.
    values = (None if text is None else float(text) for text in column.cast(pa.string()).to_pylist())
    return [value if value is not None and math.isfinite(value) else None for value in values]


@dataclass(frozen=True)
class RowCountTask:
    """One part whose rows to count."""

    source: RowSource
    part: Part
    shard_bytes: int
    measures: bool
    """True to find the signals that have a value in any row."""


@dataclass(frozen=True)
class PartCount:
    """What the shards need to know of one part."""

    num_clean: int
    """Kept documents of `clean`."""
    rows: int
    """Documents that meet the condition."""
    bytes: int
    """Size of their texts [bytes of UTF-8]."""
    last: int | None
    """First byte of the last text in the part; None: no document meets the condition."""
    large: tuple[tuple[int, int], ...]
    """(first byte in the part, size) of each text larger than a shard."""


def count_rows(task: RowCountTask, retried: bool) -> TaskResult:
    """Count the rows of one part; the result has the fields of PartCount, and counts for the dataset card."""
    part = PartRows(task.source, task.part)
    starts = np.cumsum(part.sizes) - part.sizes
    is_large = part.sizes > task.shard_bytes
    licences = part.counts("licence")
    most = sorted(licences, key=lambda name: (-licences[name], name))[:SHOWN_VALUES]
    return {
        "num_clean": part.num_clean,
        "rows": len(part.rows),
        "bytes": int(part.sizes.sum()),
        "last": int(starts[-1]) if len(starts) else None,
        "large": [[int(start), int(size)] for start, size in zip(starts[is_large], part.sizes[is_large])],
        "languages": part.counts("language"),
        "sources": part.counts("source"),
        "with_licence": sum(licences.values()),
        "licences": {name: licences[name] for name in most},
        "measured": part.measured(task.source.signals) if task.measures else [],
    }


@dataclass(frozen=True)
class ExportShard:
    """A shard: its number among all, and the range of bytes of text in which its documents begin."""

    number: int
    first: int
    last: int
    parts: tuple[tuple[int, int], ...]
    """(number of the part, position of its first byte) of each part with documents of the shard."""


def plan_shards(counts: Sequence[PartCount], shard_bytes: int) -> list[ExportShard]:
    """Return the shards of parts with these counts, without shards in which no document begins."""
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count.bytes)
    begins = [first + count.last for first, count in zip(firsts, counts) if count.last is not None]
    # Only a text that is larger than a shard can skip one: the next text begins at most its size later.
    empty: set[int] = set()
    for first, count in zip(firsts, counts):
        for start, size in count.large:
            empty.update(range((first + start) // shard_bytes + 1, (first + start + size) // shard_bytes))
    numbers = [number for number in range(begins[-1] // shard_bytes + 1) if number not in empty] if begins else []
    shards, part = [], 0
    for number, slot in enumerate(numbers):
        begin, end = slot * shard_bytes, (slot + 1) * shard_bytes
        while part + 1 < len(counts) and firsts[part + 1] < begin:
            part += 1
        own = []
        for ordinal in range(part, len(counts)):
            if firsts[ordinal] >= end:
                break
            if counts[ordinal].rows and firsts[ordinal + 1] >= begin:
                own.append((ordinal, firsts[ordinal]))
        shards.append(ExportShard(number, begin, end, tuple(own)))
    return shards


@dataclass(frozen=True)
class ShardTask:
    """One shard to write."""

    source: RowSource
    shard: ExportShard
    parts: tuple[Part, ...]
    out: Store
    suffix: str
    """Suffix of the file, which determines its format: a value of SUFFIXES."""


def write_shard(task: ShardTask, retried: bool) -> TaskResult:
    """Write one shard and return its PartResult as JSON; a shard that is complete is not written again."""

    def tables() -> Iterator[pa.Table]:
        for part, (_, base) in zip(task.parts, task.shard.parts, strict=True):
            rows = PartRows(task.source, part)
            starts = base + np.cumsum(rows.sizes) - rows.sizes
            first, last = (int(np.searchsorted(starts, edge)) for edge in (task.shard.first, task.shard.last))
            yield from rows.read(first, last)

    name = f"train-{task.shard.number:05d}"
    return _write(task.out, (task.shard.number, name, task.suffix), task.source.schema, tables())


@dataclass(frozen=True)
class TableTask:
    """One part file of a table to convert."""

    folder: Store
    path: CheckedPath
    table: str
    number: int
    out: Store
    suffix: str
    """Suffix of the file, which determines its format: a value of SUFFIXES."""


def convert_part(task: TableTask, retried: bool) -> TaskResult:
    """Write one part file of a table with plain types, and return its PartResult as JSON."""
    with task.folder.open_input(task.path) as stream:
        file = pq.ParquetFile(stream)
        schema = plain_table(file.schema_arrow.empty_table()).schema
        batches = (pa.Table.from_batches([batch]) for batch in file.iter_batches(batch_size=512))
        name = f"{task.table}-{task.number:05d}"
        return _write(task.out, (task.number, name, task.suffix), schema, map(plain_table, batches))


def _write(out: Store, named: tuple[int, str, str], schema: pa.Schema, tables: Iterator[pa.Table]) -> TaskResult:
    """Write a file `data/NAME.SUFFIX` and return its PartResult as JSON.

    `named` is (number, name, suffix). The file is written elsewhere and then moved, so it is complete or absent.
    """
    number, name, suffix = named
    partial = out.child(PARTIAL)

    def write() -> PartResult:
        with WRITERS[suffix](partial, name, schema, suffix) as writer:
            for rows in tables:
                writer.add(rows.cast(schema))
        path = f"{DATA}/{name}.{suffix}"
        out.move(f"{PARTIAL}/{writer.written.path}", path)
        counts = Counts(rows_in=writer.num_rows, rows_kept=writer.num_rows)
        return PartResult({"data": replace(writer.written, path=path)}, counts)

    return complete_part(partial, number, write, {"data": out}).to_json()


def written_files(results: Sequence[TaskResult]) -> list[WrittenFile]:
    """Return the files of the results of tasks that write."""
    return [PartResult.from_json(result).files["data"] for result in results]
