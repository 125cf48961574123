"""The one place where a pure function meets Spark: tasks go out one per partition, small JSON answers come back.

Answers are what committed attempts returned, so retries and speculation count once. An error the user can act on
travels back as an answer instead of failing the task four times.
"""

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TextIO, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import SparkFiles, TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from schemas.errors import ConfigError, ContractError, PenstockError, storage_problem

# The progress line of a long step: parts, rows, rate and time left.


def progress_line(label: str, done: int, total: int, rows: int, seconds: float) -> str:
    """One line such as `documents  3/8 parts  1,203 rows  240 rows/s  0:12 left`."""
    rate = rows / seconds if seconds > 0 else 0.0
    left = f"{_clock(seconds / done * (total - done))} left" if 0 < done < total else f"{_clock(seconds)}"
    return f"{label:<10} {done}/{total} parts  {rows:,} rows  {rate:,.0f} rows/s  {left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class Progress:
    """Prints `read()` = (parts done, rows done) every few seconds while it is open, and once at the end."""

    def __init__(self, label: str, total: int, read: Callable[[], tuple[int, int]], stream: TextIO | None = None):
        self._label, self._total, self._read = label, total, read
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._print(end="\n")

    def _loop(self) -> None:
        is_terminal = self._stream.isatty()
        while not self._stop.wait(1.0 if is_terminal else 10.0):
            self._print(end="\r" if is_terminal else "\n")

    def _print(self, end: str) -> None:
        done, rows = self._read()
        line = progress_line(self._label, done, self._total, rows, time.monotonic() - self._started)
        print(f"{line:<78}", end=end, file=self._stream, flush=True)


T = TypeVar("T")
Answer = dict[str, Any]
ANSWER = pa.schema([pa.field("ordinal", pa.int64()), pa.field("answer", pa.string())])
KINDS = {"ConfigError": ConfigError, "ContractError": ContractError}


def run_tasks(
    spark: SparkSession, function: Callable[[T, bool], Answer], tasks: Sequence[T], label: str, partitions: int | None
) -> list[Answer]:
    """The answers of `function(task, retried)` in task order; an answer's `rows` feeds the progress line.

    Tasks are spread over `partitions` (None: one each). Raises the PenstockError that a task met.
    """
    if not tasks:
        return []
    context = spark.sparkContext
    shared = context.broadcast(list(tasks))
    rows_done, parts_done = context.accumulator(0), context.accumulator(0)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for ordinal in batch.column(0).to_pylist():
                answer = guarded(functools.partial(function, shared.value[ordinal], is_retry()))
                rows_done.add(int(answer.get("rows", 0)))
                parts_done.add(1)
                yield pa.RecordBatch.from_pydict({"ordinal": [ordinal], "answer": [json.dumps(answer)]}, schema=ANSWER)

    frame = spark.range(0, len(tasks), 1, numPartitions=min(partitions or len(tasks), len(tasks)))
    with Progress(label, len(tasks), lambda: (parts_done.value, rows_done.value)):
        rows = frame.mapInArrow(work, "ordinal long, answer string").collect()
    shared.unpersist()
    answers = {row.ordinal: json.loads(row.answer) for row in rows}
    return [checked(answers[ordinal]) for ordinal in range(len(tasks))]


def frame_of_tasks(
    spark: SparkSession, function: Callable[[T], Iterator[pa.RecordBatch]], tasks: Sequence[T], schema: str
) -> DataFrame:
    """The rows that `function(task)` yields for every task, as a DataFrame of Spark schema `schema`."""
    shared = spark.sparkContext.broadcast(list(tasks))

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for ordinal in batch.column(0).to_pylist():
                yield from function(shared.value[ordinal])

    return spark.range(0, len(tasks), 1, numPartitions=max(1, len(tasks))).mapInArrow(work, schema)


def answers_of_partitions(
    frame: DataFrame, function: Callable[[int, Iterator[pa.RecordBatch]], Answer]
) -> list[Answer]:
    """The answers of `function(partition number, its batches)`, one per partition, empty partitions included."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        number = task_context().partitionId()
        answer = guarded(functools.partial(function, number, batches))
        yield pa.RecordBatch.from_pydict({"ordinal": [number], "answer": [json.dumps(answer)]}, schema=ANSWER)

    rows = frame.mapInArrow(work, "ordinal long, answer string").collect()
    return [checked(json.loads(row.answer)) for row in sorted(rows, key=lambda row: row.ordinal)]


def guarded(call: Callable[[], Answer]) -> Answer:
    """The call's answer, or its actionable error as an answer; any other error fails the task, which is retried."""
    try:
        return call()
    except PenstockError as error:
        return {"error": str(error), "kind": type(error).__name__}
    except OSError as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        return {"error": problem}


def checked(answer: Answer) -> Answer:
    """The answer itself. Raises the error it carries."""
    if "error" in answer:
        raise KINDS.get(answer.get("kind", ""), PenstockError)(answer["error"])
    return answer


def task_context() -> TaskContext:
    """The context of the running Spark task. Raises RuntimeError outside of one."""
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("lift: expected to run inside a Spark task, got none")
    return context


def is_retry() -> bool:
    """Whether the running task is a second or later attempt."""
    return task_context().attemptNumber() > 0


def ship_models(spark: SparkSession, paths: Sequence[str]) -> None:
    """Make model files available to every worker, under their base names. Raises ConfigError if two share one."""
    places: dict[str, str] = {}
    for path in sorted(set(paths)):
        other = places.setdefault(os.path.basename(path), path)
        if other != path:
            raise ConfigError(f"models: expected files of different names, got {other} and {path}. Rename one of them.")
    for path in places.values():
        spark.sparkContext.addFile(path)


def worker_path(path: str) -> str:
    """Where a model file lies on this worker: its own path if it is there, else the shipped copy."""
    return path if os.path.exists(path) else SparkFiles.get(os.path.basename(path))


def persisted(frame: DataFrame) -> DataFrame:
    """The frame kept on the workers' disks, so that it is computed once."""
    return frame.persist(StorageLevel.DISK_ONLY)


def by_part(
    frame: DataFrame,
    parts: int,
    function: Callable[[int, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
) -> DataFrame:
    """The rows that `function(part number, its rows)` yields for every part, also for those without a row.

    The column `part` of `frame` says where a row goes, 0 to `parts` - 1. Every part gets a row of its own that names
    it, because the number of a partition is another one inside a union.
    """

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next(batches, None)
        if first is not None:
            yield from function(first.column("part")[0].as_py(), map(_without_marks, chain([first], batches)))

    return _by_part(frame, parts).mapInArrow(work, schema)


def answers_of_parts(
    frame: DataFrame, parts: int, function: Callable[[int, Iterator[pa.RecordBatch]], Answer]
) -> list[Answer]:
    """The answers of `function(part number, its rows)` for every part, also for those without a row.

    Raises ContractError if a part did not answer.
    """

    def answer(number: int, batches: Iterator[pa.RecordBatch]) -> Answer:
        return function(number, map(_without_marks, batches))

    answers = answers_of_partitions(_by_part(frame, parts), answer)
    if len(answers) != parts:
        raise ContractError(f"expected an answer of each of {parts} parts, got {len(answers)}. Run again.")
    return answers


def _by_part(frame: DataFrame, parts: int) -> DataFrame:
    """One partition for each part, with a row of its own: Spark leaves out a shuffle of what it knows to be empty."""
    marks = frame.sparkSession.range(parts).select(
        *(
            F.col("id").cast("int").alias("part") if name == "part" else F.lit(None).cast(kind).alias(name)
            for name, kind in frame.dtypes
        ),
        F.lit(True).alias("_mark"),
    )
    return frame.withColumn("_mark", F.lit(False)).union(marks).repartitionById(max(1, parts), F.col("part"))


def _without_marks(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.invert(batch.column("_mark")))
