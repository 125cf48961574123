"""Sums of tokens by source and value, such as by registrable domain, in memory that does not grow with the values.

Rows are summed in memory up to a limit, then written to a temporary folder: one file each time, with one record batch
for each part. The part of a value is a keyed hash of it, so no page chooses its part. Each part is then summed alone.
"""

import hashlib
import heapq
import secrets
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_ROWS = 1 << 17
"""Maximum number of sums in memory before they are written; they take about 10 MB."""
NUM_PARTS = 128
SCHEMA = pa.schema([("source", pa.string()), ("value", pa.string()), ("tokens", pa.int64())])
RANKED = [("tokens", "descending"), ("source", "ascending"), ("value", "ascending")]
"""The order of lists: most tokens first."""
READ_ROWS = 4096
"""Rows of a part that a merge of sorted parts holds as Python objects."""

Row = tuple[str, str, int]
"""(source, value, tokens)."""


@dataclass(frozen=True)
class ValueTotals:
    """What all values of some sources have together."""

    num_values: int = 0
    """Number of distinct values, without the empty one."""
    tokens: int = 0
    """Their tokens."""
    without: int = 0
    """Tokens of documents whose value is empty, because it is not known."""


class SpilledSums:
    """Exact sums of tokens by (source, value) that are written to disk when they are many."""

    def __init__(self, max_rows: int = MAX_ROWS):
        self.max_rows = max_rows
        self._held: list[pa.Table] = []
        self._key = secrets.token_bytes(16)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: list[Path] = []

    def add(self, rows: pa.Table) -> None:
        """Add rows with the columns of SCHEMA; a null source or value counts as empty."""
        self._held.append(_summed(rows))
        if sum(map(len, self._held)) > self.max_rows:
            self._held = [_summed(pa.concat_tables(self._held))]
            if len(self._held[0]) > self.max_rows // 2:
                self._write()

    def parts(self) -> Iterator[pa.Table]:
        """Yield the sums in parts; all rows of a value are in one part, and no key is in two rows."""
        if not self._files:
            yield _summed(pa.concat_tables([SCHEMA.empty_table(), *self._held]))
            return
        if self._held:
            self._held = [_summed(pa.concat_tables(self._held))]
            self._write()
        for number in range(NUM_PARTS):
            held = SCHEMA.empty_table()
            for path in self._files:
                with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                    held = pa.concat_tables([held, pa.Table.from_batches([reader.get_batch(number)])])
                    if len(held) > self.max_rows:
                        held = _summed(held)
            yield _summed(held)

    def totals(self, sources: Collection[str] | None = None) -> ValueTotals:
        """Return what all values of some sources have together; None: of all sources."""
        totals = ValueTotals()
        for part in self._values(sources):
            is_known = pc.not_equal(part.column("value"), "")
            known = part.filter(is_known)
            tokens = pc.sum(known.column("tokens")).as_py() or 0
            without = (pc.sum(part.column("tokens")).as_py() or 0) - tokens
            totals = ValueTotals(totals.num_values + len(known), totals.tokens + tokens, totals.without + without)
        return totals

    def largest(self, number: int, sources: Collection[str] | None = None) -> list[tuple[str, int]]:
        """Return the `number` values with the most tokens in some sources (None: all), without the empty value."""
        best = SCHEMA.empty_table()
        for part in self._values(sources):
            best = pa.concat_tables([best, part.filter(pc.not_equal(part.column("value"), ""))])
            if len(best) > 2 * number + self.max_rows:
                best = best.sort_by(RANKED).slice(0, number).combine_chunks()
        best = best.sort_by(RANKED).slice(0, number)
        return list(zip(best.column("value").to_pylist(), best.column("tokens").to_pylist(), strict=True))

    def ranked(self) -> Iterator[Row]:
        """Yield all sums, most tokens first, then by source and value."""
        if not self._files:
            yield from _rows(next(self.parts()).sort_by(RANKED))
            return
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            paths = []
            for number, part in enumerate(self.parts()):
                paths.append(Path(folder) / f"{number}.arrow")
                with pa.ipc.new_file(str(paths[-1]), SCHEMA) as writer:
                    writer.write_table(part.sort_by(RANKED), max_chunksize=READ_ROWS)
            yield from heapq.merge(*map(_stored_rows, paths), key=lambda row: (-row[2], row[0], row[1]))

    def _values(self, sources: Collection[str] | None) -> Iterator[pa.Table]:
        """Yield parts with one row for each value of some sources; their source is empty."""
        for part in self.parts():
            if sources is not None:
                part = part.filter(pc.is_in(part.column("source"), pa.array(sorted(sources), pa.string())))
            yield _summed(part.set_column(0, "source", pa.array([""] * len(part), pa.string())))

    def _write(self) -> None:
        """Write the sums in memory as a file with one record batch for each part, and forget them."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        (rows,) = self._held
        numbers = self._part_of(rows.column("value"))
        rows = rows.take(pa.array(np.argsort(numbers, kind="stable"))).combine_chunks()
        ends = np.cumsum(np.bincount(numbers, minlength=NUM_PARTS)).tolist()
        path = Path(self._folder.name) / f"{len(self._files)}.arrow"
        with pa.ipc.new_file(str(path), SCHEMA) as writer:
            for begin, end in zip([0, *ends], ends, strict=False):
                batches = rows.slice(begin, end - begin).to_batches()
                writer.write_batch(batches[0] if batches else pa.RecordBatch.from_pylist([], SCHEMA))
        self._files.append(path)
        self._held = []

    def _part_of(self, values: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the number of the part of each value."""
        encoded = values.combine_chunks().dictionary_encode()
        digests = (
            hashlib.blake2b(value.encode(), digest_size=2, key=self._key).digest()
            for value in encoded.dictionary.to_pylist()
        )
        numbers = np.array([int.from_bytes(digest, "little") % NUM_PARTS for digest in digests], np.int64)
        return numbers[encoded.indices.to_numpy()] if len(numbers) else np.zeros(0, np.int64)


def _summed(rows: pa.Table) -> pa.Table:
    """Return rows with the columns of SCHEMA, one for each source and value."""
    names = [pc.fill_null(rows.column(name), "") for name in ("source", "value")]
    rows = pa.table([*names, rows.column("tokens")], schema=SCHEMA)
    grouped = rows.group_by(["source", "value"]).aggregate([("tokens", "sum")])
    return grouped.select(["source", "value", "tokens_sum"]).rename_columns(SCHEMA.names)


def _rows(table: pa.Table | pa.RecordBatch) -> Iterator[Row]:
    yield from zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True)


def _stored_rows(path: Path) -> Iterator[Row]:
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            yield from _rows(reader.get_batch(number))
