"""The tokens and document starts of one stream by position, read from memory-mapped shards.

A stream is the concatenation of its shards. A piece is a contiguous span of a stream; it may cross documents, record
batches and shards.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.arrow_files import ArrowFile
from schemas.blocks import BlockFile, numbers_of
from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import Shard
from train.data.permutation import Ints, concatenate_ranges

Tokens = NDArray[np.unsignedinteger]
OPEN_SHARDS = 64
"""Maximum number of open shards of a stream; an open local shard costs a memory map, and 8 bytes per document."""


def _lists(column: pa.Array) -> pa.ListArray:
    if not pa.types.is_list(column.type):
        raise pa.ArrowInvalid(f"the column tokens has the type {column.type}")
    return column


def _covers(offsets: Ints, size: int) -> bool:
    """Return True if lists with these offsets have `size` values, one after another."""
    return len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == size and bool((np.diff(offsets) >= 0).all())


class OpenShard:
    """An open shard: the tokens of its record batches, and the positions at which its documents start.

    Each process compares a record batch with its checksum when it first reads it, on every machine. Shards of an
    earlier version of penstock, and those of `Dataset.by_sha256`, have no checksums: their SHA-256 is compared when a
    process first opens them.
    """

    def __init__(self, folder: Store, shard: Shard, dtype: str, compared: set[int] | None = None):
        """`compared`: numbers of the record batches that this process has compared before; others are added."""
        self._where, self._fix = f"{folder.uri}/{shard.path}", folder.repair_fix
        try:
            self._batch: Callable[[int], pa.RecordBatch]
            if shard.blocks:
                # A local file is mapped, and a remote one is read in one request.
                content = pa.BufferReader(folder.open_unchecked(shard.path).read_buffer())
                file = BlockFile(content, shard.blocks, self._where, folder.repair_fix, compared)
                self._batch, unchecked, number = file.batch, file.unchecked_batch, file.num_batches
            else:
                reader = ArrowFile(folder.open_input(shard.path))
                self._batch, unchecked, number = reader.get_batch, reader.get_batch, reader.num_record_batches
            columns = [_lists(unchecked(i).column("tokens")).values for i in range(number)]
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise ContractError(
                f"{self._where}: expected a readable token shard, got an error: {error}. {folder.repair_fix}"
            ) from error
        ends = np.cumsum([0, *map(len, columns)])
        num_tokens, dtypes = int(ends[-1]), {str(column.type) for column in columns} or {dtype}
        if (num_tokens, dtypes) != (shard.num_tokens, {dtype}):
            raise ContractError(
                f"{self._where}: expected {shard.num_tokens} tokens of {dtype}, "
                f"got {num_tokens} of {', '.join(dtypes)}. {folder.repair_fix}"
            )
        self._begins = ends[:-1]
        self._views: list[Tokens | None] = [None] * number
        self._starts: dict[int, Ints] = {}

    def view(self, number: int) -> Tokens:
        """Return the tokens of a record batch. Raises ContractError if they differ from what was written."""
        view = self._views[number]
        if view is None:
            column = self._batch(number).column("tokens")
            offsets = numbers_of(column.offsets).astype(np.int64)
            view = numbers_of(column.values)
            # Positions count all values: nulls, or values of no list, would move the tokens after them.
            if column.null_count or column.values.null_count or not _covers(offsets, len(view)):
                raise ContractError(
                    f"{self._where}: expected documents that have the tokens of record batch {number} one after "
                    f"another, got lists with gaps or nulls. {self._fix}"
                )
            self._views[number] = view
            begins = self._begins[number] + offsets[:-1]
            # An empty document begins where the next document does, which may be in the next batch.
            self._starts[number] = np.unique(begins[begins < self._begins[number] + len(view)])
        return view

    @property
    def views(self) -> Iterator[Tokens]:
        """The tokens of each record batch, in order."""
        return map(self.view, range(len(self._views)))

    def documents(self, offset: Ints, length: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yield pairs of arrays over the document starts in the pieces [offset, offset + length) of the shard.

        The first holds the index of the piece; the second, the position of the start in the shard.
        """
        first = np.searchsorted(self._begins, offset, side="right") - 1
        stop = np.searchsorted(self._begins, offset + length)
        for number in np.unique(concatenate_ranges(first, stop - first)[0]).tolist():
            self.view(number)
            which = np.flatnonzero((first <= number) & (number < stop))
            starts = self._starts[number]
            low, high = np.searchsorted(starts, [offset[which], offset[which] + length[which]])
            place, span = concatenate_ranges(low, high - low)
            yield which[span], starts[place]

    def copy(self, out: Tokens, at: Ints, offset: Ints, length: Ints) -> None:
        """Copy, for each piece, the shard's tokens [offset, offset + length) to out[at : at + length]."""
        batch = np.searchsorted(self._begins, offset, side="right") - 1
        inside = offset - self._begins[batch]
        pieces = zip(batch.tolist(), at.tolist(), inside.tolist(), (inside + length).tolist(), strict=True)
        for number, place, begin, end in pieces:
            part = self.view(number)[begin:end]
            filled = place + len(part)
            out[place:filled] = part
            while filled < place + end - begin:
                number += 1
                part = self.view(number)[: place + end - begin - filled]
                out[filled : filled + len(part)] = part
                filled += len(part)


class StreamReader:
    """Reads the tokens and document starts of one stream; shards are opened at first use. Not thread-safe."""

    def __init__(self, folder: Store, shards: Sequence[Shard], dtype: str):
        self._folder, self._shards, self._dtype = folder, shards, dtype
        self._begins: Ints = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._compared: defaultdict[int, set[int]] = defaultdict(set)

    def read(self, out: Tokens, at: Ints, start: Ints, length: Ints) -> None:
        """Copy, for each piece, the stream's tokens [start, start + length) to out[at : at + length].

        Raises ContractError if a shard is unreadable, or its tokens differ from the manifest in number or type.
        """
        for shard, which, offset, shift, taken in self._spans(start, length):
            shard.copy(out, at[which] + shift, offset, taken)
            del shard  # before the next one is opened, which may need the room of this one in a cache

    def documents(self, start: Ints, length: Ints) -> tuple[Ints, Ints]:
        """Return two arrays over all document starts in the pieces [start, start + length).

        The first holds the index of the piece; the second, the position of the start in the piece.
        """
        starts = []
        for shard, which, offset, shift, taken in self._spans(start, length):
            for piece, begin in shard.documents(offset, taken):
                starts.append((which[piece], begin - (offset - shift)[piece]))
            del shard
        none = np.empty(0, np.int64)
        pieces, places = zip(*starts) if starts else ((none,), (none,))
        return np.concatenate(pieces), np.concatenate(places)

    def close_except(self, kept: Set[str]) -> None:
        """Close the open shards whose SHA-256 is not in `kept`."""
        for number in [*self._open]:
            if self._shards[number].sha256 not in kept:
                self._open.pop(number, None)

    def _spans(self, start: Ints, length: Ints) -> Iterator[tuple[OpenShard, Ints, Ints, Ints, Ints]]:
        """Cut the pieces at the ends of shards, and yield the resulting spans by shard.

        A tuple holds the shard, and arrays with a value per span: index of piece, offset in shard, offset in piece,
        length.
        """
        which, shift = np.flatnonzero(length > 0), np.zeros(len(start), np.int64)
        if which.size and not 0 <= start[which].min() <= (start + length)[which].max() <= self._begins[-1]:
            found = f"{start[which].min()} to {(start + length)[which].max()}"
            raise ContractError(
                f"{self._folder.uri}: expected tokens 0 to {self._begins[-1]} of a stream, got {found} by the document "
                f"index. {self._folder.repair_fix}"
            )
        while which.size:
            begin = start[which] + shift[which]
            shard = np.searchsorted(self._begins, begin, side="right") - 1
            taken = np.minimum(length[which] - shift[which], self._begins[shard + 1] - begin)
            for number in np.unique(shard).tolist():
                own = shard == number
                some = which[own]
                yield self._shard(number), some, begin[own] - self._begins[number], shift[some], taken[own]
            shift[which] += taken
            which = which[shift[which] < length[which]]

    def _shard(self, number: int) -> OpenShard:
        opened = self._open.pop(number, None)
        if opened is None:
            if len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)
            opened = OpenShard(self._folder, self._shards[number], self._dtype, self._compared[number])
        self._open[number] = opened  # as the latest one
        return opened
