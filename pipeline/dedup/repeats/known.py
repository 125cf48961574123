"""The repeats that a part is told of: keys that occur often enough in the run, and where their first place is."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dedup.keep_order import NODE_BYTES, Bytes, rows_of_bytes
from pipeline.dedup.repeats.tally import POSITION_BYTES
from pipeline.text.words import Codes, Ints
from schemas.ids import DOC_ID_BYTES

ELSEWHERE = -1
Bools = npt.NDArray[np.bool_]


class Known:
    """Keys of one width, sorted, and the document and position of each one's first place if that is in this part."""

    def __init__(self, keys: Codes, documents: Bytes, positions: Ints):
        # the same key comes once from each chunk that has it; that which knows the first place comes before
        ranking = np.lexsort((positions == ELSEWHERE, *keys.T[::-1]))
        ranked = keys[ranking]
        begins = np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1))[: len(ranked)]
        self.keys = ranked[begins]
        self._documents, self._positions = documents[ranking[begins]], positions[ranking[begins]]
        self._leading = np.ascontiguousarray(self.keys[:, 0])

    def __len__(self) -> int:
        return len(self.keys)

    def begins_like(self, numbers: Codes) -> Bools:
        """Whether a key has this first number."""
        if not len(self):
            return np.zeros(len(numbers), bool)
        found: Bools = self._leading[self._near(numbers)] == numbers
        return found

    def stands_elsewhere(self, keys: Codes, positions: Ints, doc_id: bytes) -> Bools:
        """(places,) whether a key of a document is a repeat and its first place is not this one."""
        if not len(self):
            return np.zeros(len(keys), bool)
        rows = self._near(keys[:, 0])
        while True:  # as often as different keys begin with the same number: once, but for chance or malice
            behind = (self._leading[rows] == keys[:, 0]) & (self.keys[rows] != keys).any(axis=1)
            behind &= rows + 1 < len(self)
            if not behind.any():
                break
            rows = rows + behind
        repeated: Bools = (self.keys[rows] == keys).all(axis=1)
        here = (self._documents[rows] == np.frombuffer(doc_id, np.uint8)).all(axis=1)
        gone: Bools = repeated & ~(here & (self._positions[rows] == positions))
        return gone

    def _near(self, numbers: Codes) -> npt.NDArray[np.intp]:
        return np.minimum(np.searchsorted(self._leading, numbers), len(self) - 1)


def known_of(batches: Iterable[pa.RecordBatch], numbers: Sequence[int]) -> list[Known]:
    """What the rows (key, part, first) of a part say, for the keys of each of these numbers of 64 bits.

    `first` is null where the first place is not in this part.
    """
    held: dict[int, list[tuple[Codes, Bytes, Ints]]] = {number: [] for number in numbers}
    for batch in batches:
        sizes = pc.binary_length(batch.column("key"))
        for number in numbers:
            rows = batch.filter(pc.equal(sizes, 8 * number))
            if rows.num_rows:
                held[number].append(_rows_of(rows, number))
    return [_joined(held[number], number) for number in numbers]


def _joined(held: list[tuple[Codes, Bytes, Ints]], number: int) -> Known:
    nothing = np.zeros((0, number), np.uint64), np.zeros((0, DOC_ID_BYTES), np.uint8), np.zeros(0, np.int64)
    keys, documents, positions = (np.concatenate(columns) for columns in zip(nothing, *held))
    return Known(keys, documents, positions)


def _rows_of(batch: pa.RecordBatch, number: int) -> tuple[Codes, Bytes, Ints]:
    keys = rows_of_bytes(batch.column("key"), 8 * number).copy().view(">u8").astype(np.uint64)
    documents = np.zeros((len(keys), DOC_ID_BYTES), np.uint8)
    positions = np.full(len(keys), ELSEWHERE, np.int64)
    here = batch.column("first").is_valid().to_numpy(zero_copy_only=False)
    if here.any():
        firsts = batch.column("first").drop_null()
        rows = rows_of_bytes(firsts, len(firsts[0].as_py()))
        node = rows[:, -NODE_BYTES - POSITION_BYTES :]
        documents[here] = node[:, :DOC_ID_BYTES]
        positions[here] = node[:, -POSITION_BYTES:].copy().view(">i8")[:, 0]
    return keys, documents, positions
