"""The reader: a global batch as a pure function of (dataset, config, skip list, step), from memory-mapped shards.

A stream is its shards laid end to end; a sample may straddle documents, record batches and shards. Ranks ask for their
rows of the one global batch, so the batch is the same for any number of ranks.
"""

from bisect import bisect_right
from collections import OrderedDict

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import HELDOUT, TRAIN, Dataset, Shard
from train.config import TrainConfig
from train.order import Ints, Order, Samples, make_heldout_order, make_order
from train.skips import NO_SKIPS, SkipList

OPEN_SHARDS = 64
"""Shards of a stream kept open; an open local shard costs a file map, no memory of its own."""


class StreamReader:
    """The tokens of one stream by position; shards are opened when first touched."""

    def __init__(self, folder: Store, shards: list[Shard], dtype: str):
        self._folder, self._shards, self._dtype = folder, shards, dtype
        self._begins: list[int] = np.cumsum([0, *(shard.num_tokens for shard in shards)]).tolist()
        self._open: OrderedDict[int, tuple[list[int], list[NDArray[np.unsignedinteger]]]] = OrderedDict()

    def read_into(self, out: Ints, row: int, start: int) -> None:
        """Fill a row of `out` with the stream's tokens from `start` on."""
        target, filled = out[row], 0
        while filled < len(target):
            number = bisect_right(self._begins, start) - 1
            begins, views = self._views(number)
            offset = start - self._begins[number]
            batch = bisect_right(begins, offset) - 1
            part = views[batch][offset - begins[batch] :][: len(target) - filled]
            target[filled : filled + len(part)] = part
            filled += len(part)
            start += len(part)

    def _views(self, number: int) -> tuple[list[int], list[NDArray[np.unsignedinteger]]]:
        """First token of every record batch of a shard, and the batches' flat token buffers, not copied."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self._shards[number]
        try:
            reader = pa.ipc.open_file(self._folder.open_input(shard.path))
            columns = [reader.get_batch(i).column("tokens") for i in range(reader.num_record_batches)]
            views = [column.flatten().to_numpy(zero_copy_only=True) for column in columns]
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise ContractError(
                f"{self._folder.uri}/{shard.path}: promised a token shard, found {error}; restore it"
            ) from error
        begins = np.cumsum([0, *map(len, views)]).tolist()
        found = begins.pop(), {str(view.dtype) for view in views} or {self._dtype}
        if found != (shard.num_tokens, {self._dtype}):
            raise ContractError(
                f"{self._folder.uri}/{shard.path}: promised {shard.num_tokens} tokens of {self._dtype}, "
                f"found {found[0]} of {', '.join(found[1])}; restore the shard"
            )
        self._open[number] = begins, views
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return self._open[number]


class Batches:
    """The training batches of a dataset in their order, and its held-out samples."""

    def __init__(self, dataset: Dataset, order: Order, heldout_order: Order | None, global_batch: int):
        self.order = order
        self.global_batch = global_batch
        self._heldout_order = heldout_order
        self._vocab_size = dataset.tokenizer.vocab_size
        self._readers = {
            stream: StreamReader(dataset.folder, shards, dataset.tokenizer.dtype)
            for stream, shards in dataset.streams.items()
        }

    def samples(self, step: int, rows: range | None = None) -> Samples:
        """Source, epoch and place of the rows of a step's global batch; None = all rows."""
        rows = range(self.global_batch) if rows is None else rows
        if rows.step != 1 or rows.start < 0 or rows.stop > self.global_batch:
            raise ValueError(f"rows {rows} are not a contiguous part of a global batch of {self.global_batch}")
        return self.order.samples(step * self.global_batch + rows.start, len(rows))

    def batch(self, step: int, rows: range | None = None) -> torch.Tensor:
        """Tokens (rows, seq_len + 1), int64, of the rows of a step's global batch; None = all rows.

        Raises ContractError if a shard is unreadable, or holds other than the promised number, type or range of tokens.
        """
        return self._read(self.order, TRAIN, self.samples(step, rows))

    def heldout(self, count: int) -> torch.Tensor:
        """The first `count` held-out samples (count, seq_len + 1), int64, for every seed; fewer if there are fewer."""
        order = self._heldout_order
        if order is None:
            return torch.empty((0, self.order.seq_len + 1), dtype=torch.int64)
        total = sum(stream.num_samples for stream in order.streams)
        return self._read(order, HELDOUT, order.samples(0, min(count, total)))

    def _read(self, order: Order, split: str, samples: Samples) -> torch.Tensor:
        out = np.empty((len(samples.start), order.seq_len + 1), np.int64)
        readers = [self._readers[f"{source}/{split}"] for source in order.sources]
        for row, (source, start) in enumerate(zip(samples.source.tolist(), samples.start.tolist(), strict=True)):
            readers[source].read_into(out, row, start)
        # An id beyond the embedding would surface as an unreadable device error much later.
        if out.size and out.max() >= self._vocab_size:
            raise ContractError(
                f"{split} tokens: promised ids below the vocabulary of {self._vocab_size}, found {out.max()}; "
                "the shards were not written with this tokenizer"
            )
        return torch.from_numpy(out)


def open_batches(dataset: Dataset, config: TrainConfig, global_batch: int, skip: SkipList = NO_SKIPS) -> Batches:
    """The batches of a dataset. Raises ConfigError if seq_len, weights or the amount of data do not allow any."""
    return Batches(dataset, make_order(dataset, config, skip), make_heldout_order(dataset, config), global_batch)
