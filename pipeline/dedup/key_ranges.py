"""Buckets of earlier snapshots, merged by file: the rows of a run join those of indexes where these lie.

Keys are hashes, so ranges of keys of equal width have about equally many rows. The files of buckets of an index are cut
by ranges and sorted. The rows of a run are cut by ranges too, and the worker that gets a range reads the same range of
each index: the rows of an index, which may be many times those of the run, are never shuffled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.dedup.keep_order import EARLIER, PART_BYTES, Bytes, binary_array, rows_of_bytes
from pipeline.dedup.keys import KEYS, Keys, sort_words
from schemas.storage import CheckedPath, Store

TOP_BITS = 31
"""Number of leading bits of a key that decide its range, so that their product with a number of ranges has 64 bits."""
SHIFT = 64 - TOP_BITS
HALF = 1 << (TOP_BITS - 1)
BATCH_ROWS = 1 << 14
"""Most rows of an index that are merged at once."""


@dataclass(frozen=True)
class IndexRange:
    """The files of one index with the rows of a range of keys."""

    files: tuple[tuple[Store, CheckedPath], ...]
    first_leaders: int
    """Number of the index's first file of leaders among those of all indexes."""


@dataclass(frozen=True)
class KeyRange:
    """A range of keys, and the files of all indexes with rows of it."""

    low: int
    high: int
    """The first key after the range; 2^63 for the last range."""
    indexes: tuple[IndexRange, ...]


def range_sql(key: str, count: int) -> str:
    """Return a Spark expression for the number of the range, of `count`, that contains the value of a column."""
    return f"cast(shiftright((shiftright({key}, {SHIFT}) + {HALF}L) * {count}L, {TOP_BITS}) as int)"


def range_of(key: int, count: int) -> int:
    """Return the number of the range, of `count`, that contains a key."""
    return ((key >> SHIFT) + HALF) * count >> TOP_BITS


def first_key(number: int, count: int) -> int:
    """Return the first key of range `number` of `count`; 2^63 if `number` is `count`."""
    return (-(-(number << TOP_BITS) // count) - HALF) << SHIFT


def key_ranges(least: int, indexes: Sequence[IndexRange]) -> list[KeyRange]:
    """Return at least `least` ranges that contain all keys, and as many as the index of most files has.

    `indexes` have the files of all keys.
    """
    count = max([least, *(len(index.files) for index in indexes)])
    ranges = []
    for number in range(count):
        low, high = first_key(number, count), first_key(number + 1, count)
        parts = [IndexRange(_files_of(index, low, high), index.first_leaders) for index in indexes]
        ranges.append(KeyRange(low, high, tuple(part for part in parts if part.files)))
    return ranges


def _files_of(index: IndexRange, low: int, high: int) -> tuple[tuple[Store, CheckedPath], ...]:
    count = len(index.files)
    return index.files[range_of(low, count) : range_of(high - 1, count) + 1] if count else ()


def merge_buckets(task: KeyRange, batches: Iterator[pa.RecordBatch], width: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows (KEYS) of a run in a range of keys, and those of indexes with a key that occurs twice.

    Both are sorted by key, and those of indexes, which are first in keep order, precede the others of the same key.
    `batches` are sorted by (key, order); an order has `width` bytes.
    """
    own = _Rows((_rows_of(batch, width) for batch in batches), width)
    others = [_Rows(_index_rows(index, task, width), width) for index in task.indexes]
    while True:
        filled = [rows.keys[-1] for rows in (own, *others) if rows.fill()]
        if not filled:
            return
        last = min(filled)
        earlier = [rows.take(last, whole=True) for rows in others]
        keys, orders = own.take(last)
        if earlier:
            keys, orders = _merged(earlier, keys, orders)
        if len(keys):
            yield pa.RecordBatch.from_arrays([pa.array(keys), binary_array(orders)], schema=KEYS)


def _merged(earlier: Sequence[tuple[Keys, Bytes]], keys: Keys, orders: Bytes) -> tuple[Keys, Bytes]:
    """Return sorted rows of indexes and of a run as one, without rows of indexes whose key occurs once."""
    before = np.concatenate([own for own, _ in earlier])
    if not len(before):
        return keys, orders
    values, counts = np.unique(np.concatenate([before, keys]), return_counts=True)
    shared = np.flatnonzero(counts[np.searchsorted(values, before)] > 1)
    first = np.concatenate([own for _, own in earlier])[shared]
    before = before[shared]
    ranking = np.lexsort((*sort_words(first), before))
    both = np.concatenate([before[ranking], keys])
    place = np.argsort(both, kind="stable")
    return both[place], np.concatenate([first[ranking], orders])[place]


class _Rows:
    """Sorted rows (key, order) that are read piece by piece; an order has `width` bytes."""

    def __init__(self, pieces: Iterator[tuple[Keys, Bytes]], width: int):
        self._pieces = pieces
        self._none: tuple[Keys, Bytes] = np.zeros(0, np.int64), np.zeros((0, width), np.uint8)
        self.keys, self._orders = self._none

    def fill(self) -> bool:
        """Read pieces until there is a row; return False at the end."""
        while not len(self.keys):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self.keys, self._orders = piece
        return True

    def take(self, last: int, whole: bool = False) -> tuple[Keys, Bytes]:
        """Return the rows up to key `last` that are read, and with `whole` all others of this key too."""
        taken = [self._none]
        while self.fill():
            end = int(np.searchsorted(self.keys, last, "right"))
            taken.append((self.keys[:end], self._orders[:end]))
            is_complete = end < len(self.keys)
            self.keys, self._orders = self.keys[end:], self._orders[end:]
            if is_complete or not whole:
                break
        return np.concatenate([keys for keys, _ in taken]), np.concatenate([orders for _, orders in taken])


def _rows_of(batch: pa.RecordBatch, width: int) -> tuple[Keys, Bytes]:
    return batch.column("key").to_numpy(), rows_of_bytes(batch.column("order"), width)


def _index_rows(index: IndexRange, task: KeyRange, width: int) -> Iterator[tuple[Keys, Bytes]]:
    """Yield the rows of an index in a range of keys; the part in their order is the number of their file of leaders."""
    for folder, path in index.files:
        with folder.open_input(path) as stream:
            file = pq.ParquetFile(stream)
            groups = [number for number in range(file.num_row_groups) if _overlaps(file, number, task)]
            for batch in file.iter_batches(BATCH_ROWS, groups, KEYS.names) if groups else ():
                if not batch.num_rows:  # a takedown removed all rows of a group
                    continue
                keys, orders = _rows_of(batch, width)
                begin = int(np.searchsorted(keys, task.low))
                end = len(keys) if task.high > keys[-1] else int(np.searchsorted(keys, task.high))
                yield keys[begin:end], number_leaders(orders[begin:end], index.first_leaders)


def _overlaps(file: pq.ParquetFile, group: int, task: KeyRange) -> bool:
    """Whether a row group may have a key of the range; files that a takedown wrote again have no statistics."""
    found = file.metadata.row_group(group).column(0).statistics
    return found is None or not found.has_min_max or (found.max >= task.low and found.min < task.high)


def number_leaders(orders: Bytes, first: int, end: int | None = None) -> Bytes:
    """Return keep orders of an earlier run in which the part is the number of its file of leaders, from EARLIER on.

    `first`: number of the run's first file of leaders. `end`: where a keep order ends in a row; None = with the row.
    """
    numbered = orders.copy()
    place = slice((end or orders.shape[1]) - PART_BYTES, end)
    parts: npt.NDArray[np.uint32] = numbered[:, place].copy().view(">u4")[:, 0].astype(np.uint32)
    numbered[:, place] = (parts + np.uint32(EARLIER + first)).astype(">u4").view(np.uint8).reshape(-1, PART_BYTES)
    return numbered
