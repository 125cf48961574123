"""Tasks as rows of a DataFrame, in groups: a worker gets its own tasks and no others.

A Spark task processes a group of consecutive parts one after the other, so the number of Spark tasks, and with it that
of the blocks of a shuffle, follows the cores and not the number of parts.
"""

import io
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import takewhile
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pipeline.engine.stage import PerDocument, Relation, Source
from schemas.config import Recipe, Section
from schemas.storage import Store

GROUPS_PER_CORE = 8
"""Number of groups for each core, so that cores that are done early take over work."""
UNKNOWN_CORES = 1024
"""Number of cores that is taken if Spark may allocate any number of executors."""
SHARED = (Store, Recipe, Section, PerDocument, Source, Relation)
"""Types whose objects many tasks have in common. Each is sent once for all tasks."""
PLAIN = (int, float, str, bytes, bool, type(None))
"""Types of small values, which every task has for itself."""
ARROW = "spark.sql.execution.arrow"
TASKS = pa.schema([pa.field("ordinal", pa.int64()), pa.field("task", pa.binary())])


@dataclass(frozen=True)
class TaskRows:
    """Tasks as rows of a DataFrame: `ordinal`, the number of the task, and `task`, its bytes for `unpack`.

    The tasks of a group are the rows of a partition.
    """

    frame: DataFrame
    shared: tuple[Any, ...]
    """Objects that several tasks have in common, which travel with the functions that unpack tasks."""
    group: int
    """Number of tasks in a group; the last group may have fewer."""


def group_size(spark: SparkSession, num_tasks: int, groups: int | None = None) -> int:
    """Return the number of consecutive tasks in a group. `groups`: most groups; None: it follows the cores.

    Up to GROUPS_PER_CORE tasks for each core, a group has one task.
    """
    return max(1, -(-num_tasks // (groups or GROUPS_PER_CORE * num_cores(spark))))


def num_groups(spark: SparkSession, num_tasks: int) -> int:
    """Return the number of groups of tasks, each of which is a Spark task."""
    return -(-num_tasks // group_size(spark, num_tasks))


def num_cores(spark: SparkSession) -> int:
    """Return the number of cores that a Spark application uses, or may use if executors are allocated on demand."""
    conf = spark.sparkContext.getConf()
    known = spark.sparkContext.defaultParallelism
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() != "true":
        return known
    most = conf.get("spark.dynamicAllocation.maxExecutors")
    return max(known, int(most) * int(conf.get("spark.executor.cores", "1"))) if most else max(known, UNKNOWN_CORES)


SETTLE_SECONDS = 2.0
"""Longest wait for the figures of the last stage, which the driver gets after the result."""


@dataclass(frozen=True)
class WorkDone:
    """What the tasks of some stages of Spark have done; failed ones count too."""

    shuffled_bytes: int
    """Compressed bytes that they have written for shuffles."""
    task_seconds: float
    """Sum of the times for which they held a core [s]."""


def newest_stage(spark: SparkSession) -> int:
    """Return the number of the last stage that Spark has started; -1 = none."""
    return next((int(stage.stageId()) for stage in _stages(spark)), -1)


def work_since(spark: SparkSession, stage: int) -> WorkDone:
    """Return the work of the stages after number `stage`, of those that Spark remembers (1,000 by default)."""
    # Not from the executors: in local mode Spark gives the age of the application as the time of their tasks.
    deadline = time.monotonic() + SETTLE_SECONDS
    stages = [*takewhile(lambda each: each.stageId() > stage, _stages(spark))]
    while any(each.status().toString() == "ACTIVE" for each in stages) and time.monotonic() < deadline:
        time.sleep(SETTLE_SECONDS / 40)
        stages = [*takewhile(lambda each: each.stageId() > stage, _stages(spark))]
    milliseconds = sum(int(each.executorRunTime()) + int(each.executorDeserializeTime()) for each in stages)
    return WorkDone(sum(int(each.shuffleWriteBytes()) for each in stages), milliseconds / 1000)


def _stages(spark: SparkSession) -> Iterator[Any]:
    """Yield the figures of stages, the newest first."""
    gateway: Any = spark.sparkContext._gateway
    every, quantiles = gateway.jvm.java.util.ArrayList(), gateway.new_array(gateway.jvm.double, 0)
    found: Any = spark.sparkContext._jsc.sc().statusStore().stageList(every, False, False, quantiles, every)
    for number in range(found.size()):
        yield found.apply(number)


def rows_of_tasks(spark: SparkSession, tasks: Sequence[Any], groups: int | None = None) -> TaskRows:
    """Return tasks as rows of a DataFrame. `groups`: maximum number of groups; None: it follows the cores."""
    size = group_size(spark, len(tasks), groups)
    shared: dict[int, tuple[int, Any]] = {}
    common = _common(tasks)
    packed = [_packed(task, common, shared) for task in tasks]
    table = pa.table([pa.array(range(len(tasks)), pa.int64()), pa.array(packed, pa.binary())], schema=TASKS)
    # Spark makes a partition of each batch of a table that is not part of the plan.
    with _settings(spark, {f"{ARROW}.maxRecordsPerBatch": str(size), f"{ARROW}.localRelationThreshold": "0"}):
        frame = spark.createDataFrame(table)
    return TaskRows(frame, tuple(value for _, value in shared.values()), size)


def unpack(data: bytes, shared: Sequence[Any]) -> Any:
    """Return a task from the bytes of a row of TaskRows."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = shared.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


def unpacked(batches: Iterator[pa.RecordBatch], shared: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the number of each task and the task, from rows of TaskRows."""
    for batch in batches:
        for ordinal, data in zip(batch.column("ordinal").to_pylist(), batch.column("task").to_pylist()):
            yield ordinal, unpack(data, shared)


def _common(tasks: Sequence[Any]) -> set[int]:
    """Return the identities of the objects that are values of fields of both the first and the second task."""
    first, second = ({id(value): value for value in _values(task)} for task in (*tasks[:2], (), ())[:2])
    return {key for key in first.keys() & second.keys() if not isinstance(first[key], PLAIN)}


def _values(task: Any) -> Iterator[Any]:
    if isinstance(task, tuple):
        yield from task
        for item in task:
            yield from _values(item)
    elif is_dataclass(task):
        yield from (getattr(task, each.name) for each in fields(task))


def _packed(task: Any, common: set[int], shared: dict[int, tuple[int, Any]]) -> bytes:
    """Return the bytes of a task without its shared objects, which are added to `shared` by their identity.

    Shared are objects of the types SHARED, and those in `common`.
    """

    def number(value: Any) -> int | None:
        if not isinstance(value, SHARED) and id(value) not in common:
            return None
        return shared.setdefault(id(value), (len(shared), value))[0]

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.persistent_id = number  # type: ignore[method-assign]
    pickler.dump(task)
    return stream.getvalue()


@contextmanager
def _settings(spark: SparkSession, values: dict[str, str]) -> Iterator[None]:
    """Change settings of a session in a block."""
    before = {name: str(spark.conf.get(name)) for name in values}
    for name, value in values.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
