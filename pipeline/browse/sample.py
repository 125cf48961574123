"""The sample on which limits are tried: stored signals of documents in memory, with their positions and token counts.

The sample is the documents whose id has the smallest hash, so it is the same in every session.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.browse.rows import BrowsedRun, Position, part_batches
from pipeline.browse.search import hash_ids, mixed_hash
from pipeline.engine.parquet import parts_of, read_measured
from pipeline.engine.rules import columns_of
from pipeline.engine.stage import Check
from pipeline.inspect.cells import counts_of_shard
from pipeline.steps.verdicts import split_columns
from schemas.errors import ConfigError
from schemas.manifest import open_table, read_run

MAX_ROWS_READ = 2_000_000
"""Number of measured documents after which no further part is read; parts are read in the order of a hash."""
MAX_INDEX_ROWS = 4_000_000
"""Number of documents of the dataset after which no further shard's index is read for token counts."""


@dataclass(frozen=True)
class LimitSample:
    """Sampled documents with the columns that the checks of the run compare."""

    batch: pa.RecordBatch
    positions: tuple[Position, ...]
    """Position of each document."""
    tokens: npt.NDArray[np.float64]
    """Number of tokens of each document in the dataset, NaN if it is not in the dataset; shape (documents,)."""
    population: int
    """Number of all documents that have signals."""
    parts_read: int
    has_tokens: bool
    """True if the run has a dataset."""

    @property
    def is_exact(self) -> bool:
        """True if the sample holds all documents that have signals."""
        return int(self.batch.num_rows) == self.population

    @property
    def factor(self) -> float:
        """The number of documents for which each sampled document counts."""
        return self.population / max(1, int(self.batch.num_rows))


@dataclass
class SampleProgress:
    """How much of a run was read for a sample; one thread writes it and others read it."""

    rows_read: int = 0
    rows_total: int = 0


def read_sample(run: BrowsedRun, checks: Sequence[Check], size: int, progress: SampleProgress) -> LimitSample:
    """Return the `size` documents whose id has the smallest hash, of the parts that are read.

    All parts are read unless they have more than MAX_ROWS_READ documents with signals. About 2 x `size` documents are
    in memory. Raises ConfigError if no document has signals.
    """
    tables = {name: run.tables[name] for name in ("documents", "templates", "scores") if name in run.tables}
    parts = parts_of(tables)
    population = run.tables["verdicts"].manifest.content.counts.rows_in
    progress.rows_total = min(population, MAX_ROWS_READ)
    names = list(dict.fromkeys([*columns_of(checks), "source", "body_chars"]))
    held: list[pa.RecordBatch] = []
    num_held = parts_read = rows_read = 0
    for part in (parts[at] for at in np.argsort(mixed_hash(np.arange(len(parts), dtype=np.uint64), 0))):
        if rows_read >= MAX_ROWS_READ:
            break
        measured = 0
        for batch in read_measured(part, split_columns(names, tables)):
            numbers = pa.array(np.arange(measured, measured + batch.num_rows))
            batch = batch.append_column(_PART, pa.array(np.full(batch.num_rows, part.ordinal)))
            held.append(batch.append_column(_ROW, numbers))
            measured, num_held = measured + batch.num_rows, num_held + batch.num_rows
            if num_held >= 2 * size:
                held, num_held = [_smallest(held, size)], size
            progress.rows_read = min(rows_read + measured, progress.rows_total)
        rows_read, parts_read = rows_read + measured, parts_read + 1
    if not held:
        raise ConfigError(f"{run.address}: expected documents with signals, got none. Check the inputs of the run.")
    batch = _smallest(held, size)
    tokens, has_tokens = _token_counts(run, batch.column("doc_id"))
    return LimitSample(batch, _positions(run, batch), tokens, population, parts_read, has_tokens)


_PART, _ROW = "\0part", "\0row"
"""Names of the columns of the part and of the number among its measured documents; no table has such columns."""


def _smallest(batches: Sequence[pa.RecordBatch], size: int) -> pa.RecordBatch:
    """Return the `size` documents whose id has the smallest hash, in the order of the hash."""
    rows = pa.Table.from_batches(batches).combine_chunks()
    order = np.argsort(hash_ids(rows.column("doc_id"), 0), kind="stable")[:size]
    chosen = rows.take(pa.array(order)).combine_chunks()
    return pa.RecordBatch.from_arrays([column.combine_chunks() for column in chosen.columns], chosen.schema.names)


def _positions(run: BrowsedRun, batch: pa.RecordBatch) -> tuple[Position, ...]:
    """Return the position in `documents` of every sampled document."""
    parts, numbers = batch.column(_PART).to_numpy(), batch.column(_ROW).to_numpy()
    rows = np.zeros(len(parts), np.int64)
    for part in np.unique(parts).tolist():
        chosen = np.flatnonzero(parts == part)
        wanted = np.sort(numbers[chosen])
        positions: list[npt.NDArray[np.int64]] = []
        measured = first = 0
        for stored in part_batches(run, "documents", part, ["drop_stage"]):
            at = np.flatnonzero(stored.column("drop_stage").is_null().to_numpy(zero_copy_only=False))
            low, high = np.searchsorted(wanted, [measured, measured + len(at)])
            positions.append(first + at[wanted[low:high] - measured])
            measured, first = measured + len(at), first + stored.num_rows
        rows[chosen] = np.concatenate(positions)[np.searchsorted(wanted, numbers[chosen])]
    return tuple(Position(part, row) for part, row in zip(parts.tolist(), rows.tolist()))


def _token_counts(run: BrowsedRun, ids: pa.Array) -> tuple[npt.NDArray[np.float64], bool]:
    """Return the number of tokens of each document, and True if the run has a dataset.

    NaN: the document is not in the dataset, or its shard was not read.
    """
    tokens = np.full(len(ids), np.nan)
    if "tokens" not in read_run(run.store).tables:
        return tokens, False
    folder, manifest = open_table(run.store, "tokens", even_replaced=True)
    wanted = ids.cast(pa.binary())
    rows_read = 0
    for path in sorted(path for key, path in manifest.paths.items() if key.endswith(".docs")):
        if rows_read >= MAX_INDEX_ROWS:
            break
        for batch in counts_of_shard((folder, path)):
            rows_read += batch.num_rows
            at = pc.index_in(batch.column("doc"), value_set=wanted)
            is_wanted = at.is_valid().to_numpy(zero_copy_only=False)
            tokens[at.drop_null().to_numpy()] = batch.column("tokens").to_numpy()[is_wanted]
    return tokens, True
