"""The tokens and document starts of one stream by position, read from memory-mapped shards.

A stream is the concatenation of its shards. A piece is a contiguous span of a stream; it may cross documents, record
batches and shards.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import Shard
from train.data.permutation import Ints, concatenate_ranges

Tokens = NDArray[np.unsignedinteger]
OPEN_SHARDS = 64
"""Maximum number of open shards of a stream; an open local shard costs a memory map, and 8 bytes per document."""


class OpenShard:
    """An open shard: memory-mapped tokens of its record batches, and the positions at which its documents start."""

    def __init__(self, folder: Store, shard: Shard, dtype: str):
        where = f"{folder.uri}/{shard.path}"
        try:
            # Not compared with the manifest here: `verify_dataset` did that before training started.
            reader = pa.ipc.open_file(folder.open_unchecked(shard.path))
            columns = [reader.get_batch(i).column("tokens") for i in range(reader.num_record_batches)]
            self.views: list[Tokens] = [column.flatten().to_numpy(zero_copy_only=True) for column in columns]
            offsets = [column.offsets.to_numpy() for column in columns]
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise ContractError(
                f"{where}: expected a readable token shard, got an error: {error}. Restore the shard from a backup."
            ) from error
        ends = np.cumsum([0, *map(len, self.views)])
        num_tokens, dtypes = int(ends[-1]), {str(view.dtype) for view in self.views} or {dtype}
        if (num_tokens, dtypes) != (shard.num_tokens, {dtype}):
            raise ContractError(
                f"{where}: expected {shard.num_tokens} tokens of {dtype}, "
                f"got {num_tokens} of {', '.join(dtypes)}. Restore the shard from a backup."
            )
        self._begins = ends[:-1]
        first = [begin + own[:-1].astype(np.int64) - own[0] for begin, own in zip(ends, offsets)]
        # An empty document begins where the next document does.
        self.documents: Ints = np.unique(np.concatenate(first)) if first else np.empty(0, np.int64)

    def copy(self, out: Tokens, at: Ints, offset: Ints, length: Ints) -> None:
        """Copy, for each piece, the shard's tokens [offset, offset + length) to out[at : at + length]."""
        batch = np.searchsorted(self._begins, offset, side="right") - 1
        inside = offset - self._begins[batch]
        pieces = zip(batch.tolist(), at.tolist(), inside.tolist(), (inside + length).tolist(), strict=True)
        for number, place, begin, end in pieces:
            part = self.views[number][begin:end]
            filled = place + len(part)
            out[place:filled] = part
            while filled < place + end - begin:
                number += 1
                part = self.views[number][: place + end - begin - filled]
                out[filled : filled + len(part)] = part
                filled += len(part)


class StreamReader:
    """Reads the tokens and document starts of one stream; shards are opened at first use. Not thread-safe."""

    def __init__(self, folder: Store, shards: list[Shard], dtype: str):
        self._folder, self._shards, self._dtype = folder, shards, dtype
        self._begins: Ints = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def read(self, out: Tokens, at: Ints, start: Ints, length: Ints) -> None:
        """Copy, for each piece, the stream's tokens [start, start + length) to out[at : at + length].

        Raises ContractError if a shard is unreadable, or its tokens differ from the manifest in number or type.
        """
        for shard, which, offset, shift, taken in self._spans(start, length):
            shard.copy(out, at[which] + shift, offset, taken)

    def documents(self, start: Ints, length: Ints) -> tuple[Ints, Ints]:
        """Return two arrays over all document starts in the pieces [start, start + length).

        The first holds the index of the piece; the second, the position of the start in the piece.
        """
        starts = []
        for shard, which, offset, shift, taken in self._spans(start, length):
            low, high = np.searchsorted(shard.documents, [offset, offset + taken])
            number, span = concatenate_ranges(low, high - low)
            starts.append((which[span], shard.documents[number] - (offset - shift)[span]))
        none = np.empty(0, np.int64)
        pieces, places = zip(*starts) if starts else ((none,), (none,))
        return np.concatenate(pieces), np.concatenate(places)

    def _spans(self, start: Ints, length: Ints) -> Iterator[tuple[OpenShard, Ints, Ints, Ints, Ints]]:
        """Cut the pieces at the ends of shards, and yield the resulting spans by shard.

        A tuple holds the shard, and arrays with a value per span: index of piece, offset in shard, offset in piece,
        length.
        """
        which, shift = np.flatnonzero(length > 0), np.zeros(len(start), np.int64)
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
        if number not in self._open:
            if len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)
            self._open[number] = OpenShard(self._folder, self._shards[number], self._dtype)
        self._open.move_to_end(number)
        return self._open[number]
