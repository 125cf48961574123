"""Rows of a step that are needed again: written once to a folder of the run, read back without their history.

What Spark persists lies on executors and dies with them, and then their history is computed again. Here every task
writes Arrow files through pyarrow.fs and the driver lists them in one atomic write: a killed worker loses nothing, and
a killed run goes on behind the last rows that it kept. Files of failed or speculative attempts are in no list.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.engine.parquet import unique_name
from pipeline.engine.spark import Answer, answers_of_partitions, frame_of_tasks
from schemas.storage import Store

BATCH_ROWS = 1 << 16
BATCH_BYTES = 16 << 20
"""What a stored batch holds at most; rows of very different sizes may exceed the second."""
COMPRESSION = "lz4"

Batches = Iterator[pa.RecordBatch]
Step = Callable[[int, Batches], Iterator[tuple[str, pa.RecordBatch]]]
"""What a task does before it writes: (number of its partition, its batches) to batches, each with the name of its
kind."""


@dataclass(frozen=True)
class KeptFile:
    """One Arrow IPC file, which a task that ended well wrote."""

    path: str
    rows: int
    bytes: int
    batches: int


@dataclass(frozen=True)
class Span:
    """Some batches of a file, from `first` up to before `end`."""

    path: str
    first: int
    end: int


@dataclass(frozen=True)
class Kept:
    """Rows in files, each read by one task."""

    spark: SparkSession
    folder: Store
    schema: str
    """Columns and types as Spark's DDL."""
    files: Sequence[KeptFile]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """What they take in the folder [bytes]."""
        return sum(file.bytes for file in self.files)

    @property
    def frame(self) -> DataFrame:
        """The rows, read from the files alone."""
        return self.mapped(_as_it_is, self.schema)

    def mapped(self, function: Callable[[Batches], Batches], schema: str) -> DataFrame:
        """What `function` makes of the rows, within the reading tasks, of Spark schema `schema`.

        There are about as many tasks as the cluster has cores, however many files there are.
        """
        read = functools.partial(_read, self.folder, function)
        return frame_of_tasks(self.spark, read, spans(self.files, self.spark.sparkContext.defaultParallelism), schema)


class Scratch:
    """A folder of kept rows, for one step of one run."""

    def __init__(self, spark: SparkSession, folder: Store):
        self.spark, self.folder = spark, folder

    def keep(self, name: str, frame: DataFrame) -> Kept:
        """The rows of a frame, computed and written now unless an interrupted run has kept them under this name."""
        return self.keep_each(name, frame, functools.partial(_one_kind, name), {name: frame.schema.toDDL()})[name]

    def keep_each(self, name: str, frame: DataFrame, step: Step, schemas: Mapping[str, str]) -> dict[str, Kept]:
        """The kinds of rows that `step` makes of the partitions of a frame; kept together, under one name.

        `schemas` gives the Spark DDL of every kind. The rows go from the step to the files without passing the JVM.
        """
        listing = f"{name}.json"
        if not self.folder.exists(listing):
            write = functools.partial(_write, self.folder, name, step)
            files: dict[str, list[Answer]] = {kind: [] for kind in schemas}
            for answer in answers_of_partitions(frame, write):
                for kind, file in answer["files"].items():
                    files[kind].append(file)
            kinds = {kind: {"schema": schema, "files": files[kind]} for kind, schema in schemas.items()}
            self.folder.write_atomic(listing, json.dumps(kinds).encode())
        kept: Mapping[str, Any] = self.folder.read_json(listing)
        return {
            kind: Kept(self.spark, self.folder, value["schema"], [KeptFile(**file) for file in value["files"]])
            for kind, value in kept.items()
        }

    def clear(self) -> None:
        """Remove everything, files of failed attempts included."""
        if self.folder.exists(""):
            self.folder.fs.delete_dir(self.folder.path(""))


def shuffled_bytes(spark: SparkSession) -> int:
    """What the tasks of this application have written to shuffles until now [bytes], compressed as Spark writes them.

    It is the sum that the driver keeps of the figures of ended tasks, failed ones included; tasks report a moment after
    they end. Take the difference of two calls around a job.
    """
    executors: Any = spark.sparkContext._jsc.sc().statusStore().executorList(False)
    return sum(int(executors.apply(number).totalShuffleWrite()) for number in range(executors.size()))


def spans(files: Sequence[KeptFile], tasks: int) -> list[list[Span]]:
    """The batches of all files, in order, cut into at most so many shares whose sizes differ by at most one batch."""
    total = sum(file.batches for file in files)
    tasks = min(tasks, total)
    bounds = [total * number // tasks for number in range(tasks + 1)] if tasks else []
    shares: list[list[Span]] = [[] for _ in range(tasks)]
    first = 0
    for file in files:
        for share, (low, high) in zip(shares, itertools.pairwise(bounds)):
            begin, end = max(low - first, 0), min(high - first, file.batches)
            if begin < end:
                share.append(Span(file.path, begin, end))
        first += file.batches
    return shares


def _read(folder: Store, function: Callable[[Batches], Batches], share: Sequence[Span]) -> Batches:
    return function(_stored(folder, share))


def _stored(folder: Store, share: Sequence[Span]) -> Batches:
    for span in share:
        with folder.open_input(span.path) as source:
            reader = pa.ipc.open_file(source)
            for number in range(span.first, span.end):
                yield reader.get_batch(number)


def _as_it_is(batches: Batches) -> Batches:
    return batches


def _one_kind(name: str, number: int, batches: Batches) -> Iterator[tuple[str, pa.RecordBatch]]:
    return ((name, batch) for batch in batches)


def _write(folder: Store, name: str, step: Step, number: int, batches: Batches) -> Answer:
    """Write what the step makes of a partition, one file a kind; a kind without rows has no file."""
    writers: dict[str, _Writer] = {}
    try:
        for kind, batch in step(number, batches):
            if batch.num_rows:
                if kind not in writers:
                    stem = f"{name}-{number}" if kind == name else f"{name}-{kind}-{number}"
                    writers[kind] = _Writer(folder, unique_name(stem, "arrow"), batch.schema)
                writers[kind].add(batch)
        return {"files": {kind: asdict(writer.close()) for kind, writer in writers.items()}}
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise


class _Writer:
    """Writes batches to one IPC file, joined and cut to the bounds of a stored batch."""

    def __init__(self, folder: Store, path: str, schema: pa.Schema):
        self._folder, self._path = folder, path
        self._stream = folder.open_output(path)
        options = pa.ipc.IpcWriteOptions(compression=COMPRESSION)
        self._writer = pa.ipc.new_file(self._stream, schema, options=options)
        self._pending: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._batches = self._written = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a batch."""
        rows = min(BATCH_ROWS, max(1, BATCH_BYTES * batch.num_rows // batch.nbytes)) if batch.nbytes else BATCH_ROWS
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            if self._rows + piece.num_rows > BATCH_ROWS or self._bytes + piece.nbytes > BATCH_BYTES:
                self._flush()
            self._pending.append(piece)
            self._rows += piece.num_rows
            self._bytes += piece.nbytes

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_batch(pa.concat_batches(self._pending))
            self._batches += 1
            self._written += self._rows
        self._pending, self._rows, self._bytes = [], 0, 0

    def close(self) -> KeptFile:
        """Finish the file and make it durable."""
        self._flush()
        self._writer.close()
        size = int(self._stream.tell())
        self._stream.close()
        self._folder.sync(self._path)
        return KeptFile(self._path, self._written, size, self._batches)

    def abandon(self) -> None:
        """Remove the unfinished file, as far as the storage lets us; no list will name it."""
        self._stream.close()
        self._folder.delete(self._path)
