"""The reader: a global batch as a pure function of (dataset, config, stages, skip list, step), as tensors.

Ranks ask for their rows of the one global batch, so the batch is the same for any number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.tokens import HELDOUT, TRAIN, Dataset
from train.config.train import TrainConfig
from train.data.document_index import read_table
from train.data.objective import Objective, cut_spans
from train.data.order import Order, Samples, heldout_streams, make_order
from train.data.permutation import Ints, PackedIndex, Pieces, join_pieces, key_of, keys_of, ranges
from train.data.rows import IGNORED, Rows
from train.data.shards import StreamReader, Tokens
from train.data.stages import NO_SKIPS, STAGE_BITS, SkipList, StagePlan

Part = tuple[int, int, int, int]
"""Row of a global batch, piece of the row, and first token there of a part of a document and the one behind it."""
Number = TypeVar("Number", bound=np.integer[Any])
NEVER_PREDICTED = ("pad", "tombstone")
"""Reserved tokens that are no target: they stand where there is no text."""
UNKNOWN = (1 << 32) - 1
"""The group of a sentinel before it is known."""
HELDOUT_INDEX = 1 << 62
"""Held-out samples count from here, so that what is masked in them is not what is masked in training."""


@dataclass(frozen=True)
class Heldout:
    """Held-out rows of every source that has one."""

    sources: tuple[str, ...]
    """What `rows.sources_B` counts."""
    rows: Rows
    """The rows, source by source."""


class Batches:
    """The training batches of a dataset in their order, and its held-out samples. One thread at a time may read."""

    def __init__(self, dataset: Dataset, config: TrainConfig, order: Order):
        self.order = order
        self._dataset, self._config = dataset, config
        self._objective = Objective(config, dataset.tokenizer, config.seed)
        self._pad = dataset.tokenizer.reserved["pad"]
        self._never = [dataset.tokenizer.reserved[name] for name in NEVER_PREDICTED]
        self._readers = {
            stream: StreamReader(dataset.folder, shards, dataset.tokenizer.dtype)
            for stream, shards in dataset.streams.items()
        }

    def samples(self, step: int, rows: range | None = None) -> Samples:
        """Source, index and pieces of the rows of a step's global batch; None = all rows."""
        return self.order.samples(step, rows)

    def batch(self, step: int, rows: range | None = None) -> Rows:
        """The rows of a step's global batch; None = all rows.

        Raises ContractError if a shard is unreadable, or holds other than the expected number, type or range of tokens.
        """
        return self.read(self.samples(step, rows))

    def read(self, samples: Samples) -> Rows:
        """The rows of any training samples."""
        return self._rows(samples, [f"{source}/{TRAIN}" for source in self.order.sources], self._objective)

    def groups(self, step: int, rows: range, parts: Sequence[Part]) -> torch.Tensor:
        """Number of the part that the loss at each position of some rows of a step belongs to, (B, row_length), int64.

        A loss belongs to the part that holds the token predicted; len(parts) = to none of them. A sentinel counts with
        the span that it stands for, the last one with the span before it.
        """
        samples = self.samples(step, rows)
        pieces, causal = samples.pieces, self._objective.predicts_next
        found = np.full((len(rows), samples.seq_len), len(parts), np.int64)
        begins = np.searchsorted(pieces.row, np.arange(len(rows)))
        for number, (row, piece, first, stop) in enumerate(parts):
            if row in rows:
                line = row - rows.start
                # A piece's first token is predicted by nothing, and the token behind it by its last input.
                first = max(first - 1, int(pieces.column[begins[line] + piece])) if causal else first
                found[line, first : stop - 1 if causal else stop] = number
        if self._config.objective == "span":
            found = grouped_spans(found, samples.index, self._config)
        return torch.from_numpy(found)

    def heldout(self, number: int | None = None) -> Heldout:
        """The first `number` held-out rows of each source, for every seed; None = `train.eval_sequences`.

        They are `train.seq_len` long and cut from the stream as it stands, in every stage and under every packing.
        """
        number, seq_len = self._config.eval_sequences if number is None else number, self._config.seq_len
        streams = heldout_streams(self._dataset, seq_len)
        objective = Objective(self._config, self._dataset.tokenizer, seed=0)
        taken = [min(number, stream.num_units // seq_len) for stream in streams.values()]
        ends = np.cumsum(taken)
        rows = [np.arange(end - own, end) for end, own in zip(ends, taken, strict=True)]
        pieces = [s.pieces(np.arange(n) * seq_len, seq_len) for s, n in zip(streams.values(), taken, strict=True)]
        source = np.repeat(np.arange(len(taken)), taken)
        place, _ = ranges(np.zeros(len(taken), np.int64), np.array(taken, np.int64))
        index = HELDOUT_INDEX + (source << STAGE_BITS) + place
        samples = Samples(index, source, join_pieces(pieces, rows), seq_len)
        return Heldout(tuple(streams), self._rows(samples, [f"{source}/{HELDOUT}" for source in streams], objective))

    @cached_property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes of text per token of every source with held-out rows, separators counted: for bits per byte."""
        found = {}
        for source in heldout_streams(self._dataset, self._config.seq_len):
            shards = self._dataset.streams[f"{source}/{HELDOUT}"]
            size = sum(_text_bytes(self._dataset, shard.docs_path) for shard in shards)
            found[source] = size / sum(shard.num_tokens for shard in shards)
        return found

    def _rows(self, samples: Samples, streams: Sequence[str], objective: Objective) -> Rows:
        """The rows of samples from these streams, which `samples.source` counts."""
        pieces, shape = samples.pieces, (len(samples.index), samples.seq_len)
        # Pieces lie end to end, each with the token behind it, so that a piece's targets are its inputs moved by one.
        flat = np.empty(int(pieces.length.sum()) + len(pieces), self._dataset.tokenizer.dtype)
        at = np.cumsum(pieces.length + 1) - pieces.length - 1
        source = samples.source[pieces.row]
        present = np.flatnonzero(np.bincount(source)).tolist()
        groups = [(self._readers[streams[number]], np.flatnonzero(source == number)) for number in present]
        for reader, own in groups:
            reader.read(flat, at[own], pieces.start[own], pieces.length[own] + 1)
        self._check(flat)
        ids = _laid_out(flat, at, pieces, shape, flat.dtype.type(self._pad))
        if objective.predicts_next:
            inputs, targets = ids.astype(np.int64), self._next(flat, at, pieces, shape)
        else:
            inputs, targets = objective.apply(ids, samples.index)
        documents = None
        if self._config.document_mask:
            marks = np.zeros(shape, np.int32)
            for reader, own in groups:
                piece, place = reader.documents(pieces.start[own], pieces.length[own])
                marks[pieces.row[own][piece], pieces.column[own][piece] + place] = 1
            documents = _numbered(marks, pieces)
        tensors = torch.from_numpy(inputs), torch.from_numpy(targets)
        return Rows(*tensors, documents, torch.from_numpy(samples.source.astype(np.int64)))

    def _next(self, flat: Tokens, at: Ints, pieces: Pieces, shape: tuple[int, int]) -> Ints:
        """The token behind each position, IGNORED where none is to be predicted."""
        targets = _laid_out(flat, at + 1, pieces, shape, np.int64(IGNORED))
        closed = np.flatnonzero(pieces.closed)
        targets[pieces.row[closed], pieces.column[closed] + pieces.length[closed] - 1] = IGNORED
        if any((flat == never).any() for never in self._never):
            targets[np.isin(targets, self._never)] = IGNORED
        return targets

    def _check(self, flat: Tokens) -> None:
        # An id beyond the embedding would surface as an unreadable device error much later.
        vocab_size = self._dataset.tokenizer.vocab_size
        if flat.size and flat.max() >= vocab_size:
            raise ContractError(
                f"tokens: expected ids below the vocabulary of {vocab_size}, got {flat.max()}. "
                "The shards were not written with this tokenizer."
            )


def grouped_spans(groups: Ints, index: Ints, config: TrainConfig) -> Ints:
    """Groups of tokens (B, T) moved as objective = span moves tokens: those of what is predicted, elsewhere any."""
    _, found = cut_spans(
        groups.astype(np.uint32), keys_of(key_of(config.seed, "objective"), index), config, np.full(100, UNKNOWN)
    )
    found[:, -1] = found[:, -2]  # the last sentinel has the last span before it, every other one its span behind it
    line = found[:, :-1]
    np.copyto(line, found[:, 1:], where=line == UNKNOWN)
    return np.maximum(found, 0)


def _laid_out(flat: Tokens, at: Ints, pieces: Pieces, shape: tuple[int, int], blank: Number) -> NDArray[Number]:
    """Rows (B, T) of pieces that begin at `at` in `flat`, each one token longer there; `blank` where there is none."""
    if len(pieces) == shape[0] and (pieces.length == shape[1]).all():
        first = int(at[0]) if len(at) else 0
        return flat.reshape(shape[0], shape[1] + 1)[:, first : first + shape[1]].astype(blank.dtype, copy=False)
    rows = np.full(shape, blank)
    line, begins = rows.reshape(-1), pieces.row * shape[1] + pieces.column
    # A copy for each piece is five times as fast as a gather of all tokens (140 and 29 M a second).
    for begin, length, first in zip(begins.tolist(), pieces.length.tolist(), at.tolist(), strict=True):
        line[begin : begin + length] = flat[first : first + length]
    return rows


def _numbered(marks: NDArray[np.int32], pieces: Pieces) -> torch.Tensor:
    """Number of the document of every position, from marks where documents begin; so do pieces and padding."""
    marks[pieces.row, pieces.column] = 1
    end = pieces.column + pieces.length
    short = end < marks.shape[1]
    marks[pieces.row[short], end[short]] = 1
    marks[:, :1] = 0
    return torch.from_numpy(np.cumsum(marks, axis=1, dtype=np.int32, out=marks))


def _text_bytes(dataset: Dataset, path: str) -> int:
    return int(pc.sum(read_table(dataset.folder, path, ("num_bytes",)).column(0)).as_py() or 0)


def open_batches(
    dataset: Dataset,
    config: TrainConfig,
    stages: Sequence[StagePlan],
    skip: SkipList = NO_SKIPS,
    packings: Mapping[str, PackedIndex] | None = None,
) -> Batches:
    """The batches of a dataset. Raises ConfigError if lengths, weights or the amount of data do not allow any."""
    return Batches(dataset, config, make_order(dataset, config, stages, skip, packings))
