"""The reader of global batches: a pure function of (dataset, config, stages, skip list, step) that returns tensors.

Every rank reads its rows of the same global batch, so the batch is the same for any number of ranks. Held-out rows are
read in the same way. A *piece* is a contiguous span of a stream in a row.
"""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.storage import CheckedPath
from schemas.takedown import REMOVED_ID
from schemas.tokens import HELDOUT, TRAIN, Dataset
from train.config.train import TrainConfig
from train.data.document_index import read_table
from train.data.objective import Objective, cut_spans
from train.data.order import SampleOrder, Samples, heldout_streams, make_order
from train.data.packed_rows import PackedIndex
from train.data.permutation import Ints, Pieces, concatenate_ranges, join_pieces, key_of, keys_of
from train.data.rows import IGNORED, Rows
from train.data.shards import StreamReader, Tokens
from train.data.stages import NO_SKIPS, STAGE_BITS, SkipList, StagePlan

DocumentPart = tuple[int, int, int, int]
"""A part of a document in a batch: row, index of the piece in that row, and positions [first, stop) in the row."""
Number = TypeVar("Number", bound=np.integer[Any])
NEVER_TARGETS = ("pad", "tombstone")
"""Reserved tokens that are never a target: they replace removed text or pad rows."""
UNKNOWN_GROUP = (1 << 32) - 1
"""Placeholder for the loss group of a sentinel, until the group of the span that the sentinel replaces is known."""
FIRST_HELDOUT_INDEX = 1 << 62
"""Index of the first held-out sample, so that held-out and training samples have different masks."""


@dataclass(frozen=True)
class HeldoutRows:
    """Held-out rows for an evaluation, from every source that has held-out rows."""

    sources: tuple[str, ...]
    """The source names that `rows.sources_B` indexes."""
    rows: Rows
    """The rows, in the order of the sources."""


class Batches:
    """Reads a dataset's training batches, in the order of the run, and the dataset's held-out rows. Not thread-safe."""

    def __init__(self, dataset: Dataset, config: TrainConfig, order: SampleOrder):
        self.order = order
        self._dataset, self._config = dataset, config
        self._objective = Objective(config, dataset.tokenizer, config.seed)
        self._pad = dataset.tokenizer.reserved["pad"]
        self._never = [dataset.tokenizer.reserved[name] for name in NEVER_TARGETS]
        self._readers = {
            stream: StreamReader(dataset.folder, shards, dataset.tokenizer.dtype)
            for stream, shards in dataset.streams.items()
        }

    def samples(self, step: int, rows: range | None = None) -> Samples:
        """Return the samples of the given rows of a step's global batch; None = all rows. Tokens are not read."""
        return self.order.samples(step, rows)

    def batch(self, step: int, rows: range | None = None) -> Rows:
        """Read the given rows of a step's global batch; None = all rows.

        Raises ContractError if a shard is unreadable, or its tokens differ from the manifest in number, type or range.
        """
        return self.read(self.samples(step, rows))

    def read(self, samples: Samples) -> Rows:
        """Read the tokens of training samples, and return one row for each sample."""
        rows = self._rows(samples, [f"{source}/{TRAIN}" for source in self.order.sources], self._objective)
        if not self._config.drops:
            return rows
        keys = keys_of(key_of(self._config.seed, "dropout"), samples.index)
        return replace(rows, keys_B=torch.from_numpy(keys.view(np.int64)))

    def close_shards(self, kept: Set[str]) -> None:
        """Close all open shards but those whose SHA-256 is in `kept`."""
        for reader in self._readers.values():
            reader.close_except(kept)

    def groups(self, step: int, rows: range, parts: Sequence[DocumentPart]) -> torch.Tensor:
        """Return, for each position, the index in `parts` of the document part that contains the position's target.

        The result is (B, row_length), int64; it is len(parts) where no part contains the target. A sentinel belongs to
        the span that it replaces. The last sentinel of a row belongs to the row's last span.
        """
        samples = self.samples(step, rows)
        pieces, causal = samples.pieces, self._objective.predicts_next
        groups = np.full((len(rows), samples.seq_len), len(parts), np.int64)
        begins = np.searchsorted(pieces.row, np.arange(len(rows)))
        for number, (row, piece, first, stop) in enumerate(parts):
            if row in rows:
                line = row - rows.start
                # No position predicts a piece's first token; its last input predicts the token after the piece.
                first = max(first - 1, int(pieces.column[begins[line] + piece])) if causal else first
                groups[line, first : stop - 1 if causal else stop] = number
        if self._config.objective == "span":
            groups = move_groups(groups, samples.index, self._config)
        return torch.from_numpy(groups)

    def heldout(self, number: int | None = None) -> HeldoutRows:
        """Return the first `number` held-out rows of each source; None = `train.eval_sequences`.

        A row is `train.seq_len` consecutive tokens of the source's held-out stream. The rows are the same for every
        seed, training stage and packing.
        """
        number, seq_len = self._config.eval_sequences if number is None else number, self._config.seq_len
        streams = heldout_streams(self._dataset, seq_len)
        objective = Objective(self._config, self._dataset.tokenizer, seed=0)
        taken = [min(number, stream.num_units // seq_len) for stream in streams.values()]
        ends = np.cumsum(taken)
        rows = [np.arange(end - own, end) for end, own in zip(ends, taken, strict=True)]
        pieces = [s.pieces(np.arange(n) * seq_len, seq_len) for s, n in zip(streams.values(), taken, strict=True)]
        source = np.repeat(np.arange(len(taken)), taken)
        place, _ = concatenate_ranges(np.zeros(len(taken), np.int64), np.array(taken, np.int64))
        index = FIRST_HELDOUT_INDEX + (source << STAGE_BITS) + place
        samples = Samples(index, source, join_pieces(pieces, rows), seq_len)
        return HeldoutRows(
            tuple(streams), self._rows(samples, [f"{source}/{HELDOUT}" for source in streams], objective)
        )

    @cached_property
    def bytes_per_token(self) -> dict[str, float]:
        """Bytes of text per held-out token, by source, to convert losses to bits per byte. Separators are tokens.

        Documents that a takedown has removed are in neither, as in the losses.
        """
        ratios = {}
        for source in heldout_streams(self._dataset, self._config.seq_len):
            shards = self._dataset.streams[f"{source}/{HELDOUT}"]
            totals = [_bytes_and_tokens(self._dataset, shard.docs_path) for shard in shards]
            size, tokens = (sum(total) for total in zip(*totals, strict=True))
            ratios[source] = size / max(1, tokens)
        return ratios

    def _rows(self, samples: Samples, streams: Sequence[str], objective: Objective) -> Rows:
        """Read the tokens of samples and make one row of each; `samples.source` holds indices into `streams`."""
        pieces, shape = samples.pieces, (len(samples.index), samples.seq_len)
        # Pieces are concatenated, each with the token after it: a piece's targets are its inputs shifted by one.
        flat = np.empty(int(pieces.length.sum()) + len(pieces), self._dataset.tokenizer.dtype)
        at = np.cumsum(pieces.length + 1) - pieces.length - 1
        source = samples.source[pieces.row]
        present = np.flatnonzero(np.bincount(source)).tolist()
        groups = [(self._readers[streams[number]], np.flatnonzero(source == number)) for number in present]
        for reader, own in groups:
            reader.read(flat, at[own], pieces.start[own], pieces.length[own] + 1)
        self._check(flat)
        ids = _arrange_pieces(flat, at, pieces, shape, flat.dtype.type(self._pad))
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
            documents = _number_documents(marks, pieces)
        tensors = torch.from_numpy(inputs), torch.from_numpy(targets)
        return Rows(*tensors, documents, torch.from_numpy(samples.source.astype(np.int64)))

    def _next(self, flat: Tokens, at: Ints, pieces: Pieces, shape: tuple[int, int]) -> Ints:
        """Return the targets for objective = causal: the next token of each position; IGNORED = no target."""
        targets = _arrange_pieces(flat, at + 1, pieces, shape, np.int64(IGNORED))
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
                f"tokens: expected ids below the vocabulary size of {vocab_size}, got {flat.max()}. "
                "Run the step `tokens` again with the dataset's tokenizer."
            )


def move_groups(groups: Ints, index: Ints, config: TrainConfig) -> Ints:
    """Return the loss group of each target for objective = span, (B, row_length). Losses are summed by group.

    `groups`, (B, T): the group of each token, before `cut_spans` moves the spans. `index`: global indices of the
    samples. The group of a position without a target is arbitrary.
    """
    _, moved = cut_spans(
        groups.astype(np.uint32), keys_of(key_of(config.seed, "objective"), index), config, np.full(100, UNKNOWN_GROUP)
    )
    moved[:, -1] = moved[:, -2]  # the last sentinel follows the last span; every other sentinel precedes its span
    line = moved[:, :-1]
    np.copyto(line, moved[:, 1:], where=line == UNKNOWN_GROUP)
    return np.maximum(moved, 0)


def _arrange_pieces(flat: Tokens, at: Ints, pieces: Pieces, shape: tuple[int, int], blank: Number) -> NDArray[Number]:
    """Copy pieces of `flat` into rows (B, T) that are otherwise filled with `blank`.

    `at`: for each piece, the offset in `flat` of the first token to copy."""
    if len(pieces) == shape[0] and (pieces.length == shape[1]).all():
        first = int(at[0]) if len(at) else 0
        return flat.reshape(shape[0], shape[1] + 1)[:, first : first + shape[1]].astype(blank.dtype, copy=False)
    rows = np.full(shape, blank)
    line, begins = rows.reshape(-1), pieces.row * shape[1] + pieces.column
    # A copy for each piece is five times as fast as a gather of all tokens (140 and 29 M a second).
    for begin, length, first in zip(begins.tolist(), pieces.length.tolist(), at.tolist(), strict=True):
        line[begin : begin + length] = flat[first : first + length]
    return rows


def _number_documents(marks: NDArray[np.int32], pieces: Pieces) -> torch.Tensor:
    """Return, for each position, the index of its document within its row, from 0, (B, T), int32.

    `marks`, (B, T): 1 where a document starts; overwritten. Every piece, and padding, counts as a new document.
    """
    marks[pieces.row, pieces.column] = 1
    end = pieces.column + pieces.length
    short = end < marks.shape[1]
    marks[pieces.row[short], end[short]] = 1
    marks[:, :1] = 0
    return torch.from_numpy(np.cumsum(marks, axis=1, dtype=np.int32, out=marks))


def _bytes_and_tokens(dataset: Dataset, path: CheckedPath) -> tuple[int, int]:
    """Return the bytes of text and the tokens of the documents of a shard, without those that were removed."""
    table = read_table(dataset.folder, path, ("doc_id", "num_bytes", "num_tokens"))
    table = table.filter(pc.not_equal(table["doc_id"], REMOVED_ID))
    size, tokens = (int(pc.sum(table[name]).as_py() or 0) for name in ("num_bytes", "num_tokens"))
    return size, tokens


def open_batches(
    dataset: Dataset,
    config: TrainConfig,
    stages: Sequence[StagePlan],
    skip: SkipList = NO_SKIPS,
    packings: Mapping[str, PackedIndex] | None = None,
) -> Batches:
    """Return the reader of a dataset's batches.

    Raises ConfigError if a sequence length or the weights of the sources do not fit the dataset.
    """
    return Batches(dataset, config, make_order(dataset, config, stages, skip, packings))


# Prefetching: a thread reads the rows of the next step during the current step.


class Prefetch:
    """Reads the rows of step N + 1 in a thread while the caller uses the rows of step N.

    Steps may be taken in any order."""

    def __init__(self, read: Callable[[int], Rows], stop: int, device: str = "cpu"):
        """`read`: returns the rows of a step; called in one thread only. `stop`: end of the steps that are prefetched.

        `device` = "cuda": `take` returns rows in pinned memory.
        """
        self._read, self._stop, self._pinned = read, stop, device == "cuda"
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")
        self._step = -1
        self._pending: Future[Rows] | None = None

    def take(self, step: int) -> tuple[Rows, float]:
        """Return the rows of a step, and the time that the caller waited for them [s]. Read errors are raised here."""
        begin = time.perf_counter()
        pending = self._pending if self._step == step else None
        self._pending = None
        rows = (pending or self._pool.submit(self._rows, step)).result()
        if step + 1 < self._stop:
            self._step, self._pending = step + 1, self._pool.submit(self._rows, step + 1)
        return rows, time.perf_counter() - begin

    def _rows(self, step: int) -> Rows:
        rows = self._read(step)
        return rows.pinned() if self._pinned else rows

    def close(self) -> None:
        """End the thread; rows that it is reading are discarded."""
        self._pending = None
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
