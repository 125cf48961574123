"""Stored frames: intermediate rows of a step, written once to Arrow files in the run folder and read back from there.

Rows that Spark persists are lost with their executor, and Spark then computes everything that led to them again. Here
every task writes Arrow files through pyarrow.fs, and the driver lists them in a JSON file in one atomic write. So a
killed worker loses nothing, and a killed run resumes after the last stored frame. Files of failed or speculative task
attempts are in no list. A frame that other code or libraries stored is computed again.
"""

import functools
import itertools
import json
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.engine.code_digest import code_digest, libraries_digest
from pipeline.engine.parquet import FileWriter
from pipeline.engine.part import FRAMES, TaskResult, current_inputs
from pipeline.engine.spark import dataframe_from_tasks, run_partitions
from pipeline.engine.tasks import GROUPS_PER_CORE, num_cores
from schemas.blocks import BlockFile
from schemas.errors import ContractError
from schemas.leases import check_before_delete, check_still_held
from schemas.paths import check_deletable
from schemas.storage import Store

BATCH_ROWS = 1 << 16
BATCH_BYTES = 16 << 20
"""Maximum number of rows and of bytes of a stored batch. If rows differ much in size, a batch may have more bytes."""
SPAN_BYTES = 1 << 20
"""Size of the stored rows that one task reads, if there are not more than GROUPS_PER_CORE such tasks for each core."""
COMPRESSION = "lz4"

Batches = Iterator[pa.RecordBatch]
Step = Callable[[int, Batches], Iterator[tuple[str, pa.RecordBatch]]]
"""Function from (partition number, batches of the partition) to the batches to store, each with its kind's name."""


@dataclass(frozen=True)
class StoredFile:
    """One Arrow IPC file of a committed task."""

    path: str
    rows: int
    bytes: int
    blocks: str
    """The blocks of the file, which its readers compare: one for each record batch, and the end."""

    @property
    def batches(self) -> int:
        """The number of record batches."""
        return self.blocks.count(" ")


@dataclass(frozen=True)
class BatchRange:
    """The record batches of a stored file from number `first` to number `end` - 1, counted from 0."""

    file: StoredFile
    first: int
    end: int


@dataclass(frozen=True)
class StoredFrame:
    """The stored rows of a Spark DataFrame: the schema and the files."""

    spark: SparkSession
    folder: Store
    schema: str
    """Columns and types as Spark DDL."""
    files: Sequence[StoredFile]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """The total size of the files [bytes]."""
        return sum(file.bytes for file in self.files)

    @property
    def frame(self) -> DataFrame:
        """The rows as a DataFrame that Spark reads from the files."""
        return self.mapped(_unchanged, self.schema)

    def batches(self) -> Batches:
        """Yield the stored batches in this process, for frames that are small."""
        return _stored(self.folder, [BatchRange(file, 0, file.batches) for file in self.files])

    def mapped(self, function: Callable[[Batches], Batches], schema: str) -> DataFrame:
        """Return a DataFrame of the rows that `function` makes from the stored batches.

        `function` runs in the Spark tasks that read the files. `schema` is the Spark schema of the result.
        """
        read = functools.partial(_read, self.folder, function)
        tasks = min(-(-self.bytes // SPAN_BYTES), GROUPS_PER_CORE * num_cores(self.spark))
        return dataframe_from_tasks(self.spark, read, spans(self.files, tasks), schema)


class FrameStore:
    """The folder of the stored frames of one step of one run."""

    def __init__(self, spark: SparkSession, folder: Store):
        self.spark, self.folder = spark, folder

    def keep(self, name: str, frame: DataFrame) -> StoredFrame:
        """Store the rows of `frame` under `name` and return the stored frame.

        If an interrupted run of the same code and libraries has stored `name` already, from the same tables, that
        stored frame is returned and `frame` is not computed.
        """
        return self.store_each(name, frame, functools.partial(_one_kind, name), {name: frame.schema.toDDL()})[name]

    def store_each(
        self, name: str, frame: DataFrame, step: Step, schemas: Mapping[str, str], what: str = ""
    ) -> dict[str, StoredFrame]:
        """Apply `step` to each partition of a frame, store the batches that it yields, and return one frame per kind.

        `schemas` maps each kind of batch to its columns as Spark DDL. `what` is shown as the work of the current step.
        If an interrupted run of the same code and libraries has stored `name` already, from the same tables, the stored
        frames are returned and `step` is not called.
        """
        listing = f"{name}.json"
        made_by = {"code": code_digest(), "libraries": libraries_digest(), "inputs": current_inputs()}
        if not self._has(listing, made_by):
            write = functools.partial(_write, self.folder, name, step)
            files: dict[str, list[TaskResult]] = {kind: [] for kind in schemas}
            for answer in run_partitions(frame, write, what):
                for kind, file in answer["files"].items():
                    files[kind].append(file)
            kinds = {kind: {"schema": schema, "files": files[kind]} for kind, schema in schemas.items()}
            self.folder.write_atomic(listing, json.dumps({**made_by, FRAMES: kinds}).encode())
        kept: Mapping[str, Any] = self.folder.read_json(listing)[FRAMES]
        return {
            kind: StoredFrame(self.spark, self.folder, value["schema"], [StoredFile(**file) for file in value["files"]])
            for kind, value in kept.items()
        }

    def _has(self, listing: str, made_by: Mapping[str, str]) -> bool:
        """Return True if frames are stored that were made by this code. A damaged list is worth as much as none."""
        try:
            stored = self.folder.read_json(listing) if self.folder.exists(listing) else {}
        except ContractError:
            return False
        return isinstance(stored, dict) and FRAMES in stored and made_by.items() <= stored.items()

    def clear(self) -> None:
        """Delete the folder with all stored frames, including the files that failed task attempts wrote.

        The lists go first, and durably, so that a process killed meanwhile leaves no list without its files. Raises
        ContractError if another process has taken over the lease on the run, or if a link leads out of the run, in
        which the folder is that of a version.
        """
        check_still_held(self.folder)
        if self.folder.exists(""):
            check_deletable(self.folder, "x", levels=3)
            lists = [name for name in self.folder.walk() if name.endswith(".json")]
            for name in lists:
                check_before_delete(self.folder)
                self.folder.delete(name)
            for folder in {posixpath.dirname(name) for name in lists}:
                self.folder.sync(folder)
            self.folder.delete_folder()


def spans(files: Sequence[StoredFile], tasks: int) -> list[list[BatchRange]]:
    """Divide the batches of all files, in order, into at most `tasks` groups of almost equal size.

    The sizes differ by at most one batch.
    """
    total = sum(file.batches for file in files)
    tasks = min(tasks, total)
    bounds = [total * number // tasks for number in range(tasks + 1)] if tasks else []
    groups: list[list[BatchRange]] = [[] for _ in range(tasks)]
    first = 0
    for file in files:
        for group, (low, high) in zip(groups, itertools.pairwise(bounds)):
            begin, end = max(low - first, 0), min(high - first, file.batches)
            if begin < end:
                group.append(BatchRange(file, begin, end))
        first += file.batches
    return groups


def _read(folder: Store, function: Callable[[Batches], Batches], group: Sequence[BatchRange]) -> Batches:
    return function(_stored(folder, group))


def _stored(folder: Store, group: Sequence[BatchRange]) -> Batches:
    for span in group:
        fix = f"Delete the folder {folder.uri}, and run the same command again: it computes the rows again."
        where = f"{folder.uri}/{span.file.path}"
        try:
            source = folder.open_unchecked(span.file.path)
        except OSError as error:
            raise ContractError(f"{where}: expected a stored frame, got an error: {error}. {fix}") from error
        with source:
            file = BlockFile(source, span.file.blocks, where, fix)
            for number in range(span.first, span.end):
                yield file.batch(number)


def _unchanged(batches: Batches) -> Batches:
    return batches


def _one_kind(name: str, number: int, batches: Batches) -> Iterator[tuple[str, pa.RecordBatch]]:
    return ((name, batch) for batch in batches)


def _write(folder: Store, name: str, step: Step, number: int, batches: Batches) -> TaskResult:
    """Apply `step` to a partition, and write one file for each kind of batch that `step` yields."""
    writers: dict[str, BatchWriter] = {}
    with ExitStack() as stack:
        for kind, batch in step(number, batches):
            if batch.num_rows:
                if kind not in writers:
                    stem = f"{name}-{number}" if kind == name else f"{name}-{kind}-{number}"
                    writers[kind] = stack.enter_context(BatchWriter(folder, stem, batch.schema))
                writers[kind].add(batch)
    return {"files": {kind: asdict(writer.stored()) for kind, writer in writers.items()}}


class BatchWriter(FileWriter):
    """An Arrow IPC file to which rows are written in batches, which are its blocks. No SHA-256 is computed."""

    def __init__(self, folder: Store, key: str, schema: pa.Schema):
        super().__init__(folder, key, "arrow", hashes=False, has_blocks=True)
        options = pa.ipc.IpcWriteOptions(compression=COMPRESSION)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._sink, mode="w"), schema, options=options)
        self._pending: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a batch."""
        rows = min(BATCH_ROWS, max(1, BATCH_BYTES * batch.num_rows // batch.nbytes)) if batch.nbytes else BATCH_ROWS
        for start in range(0, batch.num_rows, rows):
            some = batch.slice(start, rows)
            if self._rows + some.num_rows > BATCH_ROWS or self._bytes + some.nbytes > BATCH_BYTES:
                self._flush()
            self._pending.append(some)
            self._rows += some.num_rows
            self._bytes += some.nbytes

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_batch(pa.concat_batches(self._pending))
            self._sink.end_block()
            self.num_rows += self._rows
        self._pending, self._rows, self._bytes = [], 0, 0

    def _finish(self) -> None:
        self._flush()
        self._writer.close()

    def _drop(self) -> None:
        self._writer.close()

    def stored(self) -> StoredFile:
        """Return path, rows, bytes and blocks of the file. Raises RuntimeError if called inside the `with` block."""
        written = self.written
        return StoredFile(written.path, written.rows, written.bytes, written.blocks)
