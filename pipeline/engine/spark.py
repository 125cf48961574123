"""The Spark runner: runs pure functions as Spark tasks, which return small JSON results to the driver.

The results are those of each task's successful attempt, so retries and speculative attempts count once. An error that
the user can fix is returned as a result, because Spark would otherwise run the failing task four times.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import AccumulatorParam, SparkFiles, TaskContext
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from pipeline.engine.code_digest import code_digest
from pipeline.engine.failures import place_of
from pipeline.engine.live_counts import CountsListener, PartMeter, WorkCounts, counting
from pipeline.engine.model_files import State, path_here, state_of
from pipeline.engine.part import INPUT_FILES, PartResult, PartResults, TaskResult, current_inputs, made_from
from pipeline.engine.progress import CountSources, Progress, WorkTotal, current_progress
from pipeline.engine.results import (
    MAX_UNADDED,
    RESULTS_DDL,
    TaskResults,
    answer_of_part,
    gather,
    result_rows,
    results_of_parts,
)
from pipeline.engine.step import StepContext
from pipeline.engine.tasks import rows_of_tasks, unpack, unpacked
from schemas.errors import ConfigError, ContractError, PenstockError, describe_storage_error
from schemas.logs import LOGGER, WORKER_LOGGER, log_fields, logging_as, worker_log
from schemas.manifest import part_key
from schemas.storage import Store, describe_remote_error

T = TypeVar("T")
KINDS = {"ConfigError": ConfigError, "ContractError": ContractError}
MARKED_ERROR = re.compile(r"<penstock-error>(.*?)</penstock-error>")
"""An error of a task that returns rows and no result, as it appears in the message of Spark's exception."""


@contextmanager
def show_progress(
    spark: SparkSession | None, command: str, steps: Sequence[str], folder: Store | None = None
) -> Iterator[Progress]:
    """Show the progress of steps in the `with` block. `folder`: the run folder, which gets `progress.json`.

    `spark`: None if the steps start no Spark job.
    """
    if spark is None:
        with Progress(command, steps, CountSources(None, lambda: (0, 0)), folder) as shown:
            yield shown
        return
    conf = spark.sparkContext.getConf()
    host = conf.get("spark.driver.host") or "127.0.0.1"
    listener: CountsListener | None = None
    try:
        listener = CountsListener((conf.get("spark.driver.bindAddress") or host).strip("[]"), host.strip("[]"))
    except OSError as error:
        LOGGER.warning(f"progress: rows inside a part are not shown, because no UDP port opened: {error}")
    sources = CountSources(listener, functools.partial(active_tasks, spark), spark.sparkContext.setJobDescription)
    open_port = closing(listener) if listener is not None else nullcontext()
    with open_port, Progress(command, steps, sources, folder) as shown:
        try:
            yield shown
        except Exception as error:
            if (known := error_of_worker(error)) is not None and not isinstance(error, PenstockError):
                raise known from error
            raise


def active_tasks(spark: SparkSession) -> tuple[int, int]:
    """Return the numbers of complete and of all tasks of the Spark stages that are running."""
    try:
        tracker = spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    except (Py4JError, OSError):
        return 0, 0  # the JVM has ended; the call that waits for its job raises the error
    known = [stage for stage in stages if stage is not None]
    return sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known)


class _FirstText(AccumulatorParam[str]):
    """Keeps one of the texts that are added to an accumulator."""

    def zero(self, value: str) -> str:
        return ""

    def addInPlace(self, value1: str, value2: str) -> str:
        return value1 or value2


@dataclass
class _Ended:
    """The counts of the parts whose Spark task has ended, and the first error that the user can fix.

    Accumulators count the parts of attempts that were repeated twice, so they are only displayed.
    """

    rows: Any
    bytes: Any
    parts: Any
    error: Any

    def result(self, ordinal: int, call: Callable[[], TaskResult]) -> tuple[pa.RecordBatch, TaskResult]:
        """Return the result of a task, and as rows; for an error that the user can fix, the error is the result."""
        answer = catch_user_errors(call)
        if "error" in answer:
            self.error.add(json.dumps(answer))
        else:
            self.rows.add(int(answer.get("rows", 0)))
            self.bytes.add(sum(source["bytes"] for source in answer.get(INPUT_FILES, ())))
            self.parts.add(1)
        return result_rows(ordinal, answer), answer


class _Attempt:
    """The attempt at a group of parts that runs in this worker."""

    def __init__(self) -> None:
        self._number = task_context().attemptNumber()
        self.is_retry = self._number > 0
        """True if an earlier attempt may have failed at the part that is next."""

    def after(self, answer: TaskResult) -> None:
        """Note the result of a part. The first attempt failed at the first part that it has not completed."""
        self.is_retry = self.is_retry and (self._number > 1 or bool(answer.get("resumed")))


@contextmanager
def _attempt_at(part: int, retried: bool) -> Iterator[None]:
    """Log on a worker that a part is tried again, and what ends this attempt, without words that may quote data."""
    with log_fields(part=part_key(part)):
        if retried:
            number = task_context().attemptNumber() + 1
            text = f"attempt {number}: an earlier one has failed, was lost, or is slow"
            WORKER_LOGGER.warning(text, extra={"attempt": number})
        try:
            yield
        except Exception as error:
            cause = f"{type(error).__name__} at {place_of(error)}"
            WORKER_LOGGER.warning(f"the attempt has failed: {cause}", extra={"cause": cause})
            raise


class _Job:
    """A Spark job whose tasks return results.

    An error that the user can fix cancels it, because the other parts would take their time for a run that fails.
    """

    def __init__(self, spark: SparkSession):
        self._context = spark.sparkContext
        rows, size, parts = (self._context.accumulator(0) for _ in range(3))
        self.ended = _Ended(rows, size, parts, self._context.accumulator("", _FirstText()))
        self._tag = f"penstock-{uuid.uuid4().hex}"
        self._is_cancelled = False

    def poll(self) -> WorkCounts:
        """Return the counts of the parts whose Spark task has ended. Cancel the job if one of them has an error."""
        if self.ended.error.value and not self._is_cancelled:
            self._is_cancelled = True
            with suppress(Py4JError, OSError):  # if the JVM has ended, there is no job to cancel
                self._context.cancelJobsWithTag(self._tag)
        return WorkCounts(self.ended.rows.value, self.ended.bytes.value, self.ended.parts.value)

    def gather(self, rows: DataFrame, is_large: bool) -> TaskResults:
        """Return the results that a frame of rows (RESULTS) describes, in the order of the tasks.

        `is_large`: the counts are added up by Spark. Raises the PenstockError that a task raised.
        """
        self._context.addJobTag(self._tag)
        try:
            results = gather((_add_up(rows) if is_large else rows).collect())
        except Exception:  # of the cancelled job, or another error
            if not self.ended.error.value:
                raise
            results = TaskResults([json.loads(self.ended.error.value)])
        finally:
            self._context.removeJobTag(self._tag)
        for answer in results.answers:
            raise_if_error(answer)
        _check_code(results.answers)
        return results


def _add_up(rows: DataFrame) -> DataFrame:
    """Return rows (RESULTS) in which Spark has added up the counts of the same name."""
    # An answer has a number of its own, and a count has none.
    return rows.groupBy("ordinal", "answer", "figure").agg(
        F.sum("count").alias("count"), F.min("example").alias("example")
    )


def gather_tasks(
    spark: SparkSession,
    function: Callable[[T, bool], TaskResult],
    tasks: Sequence[T],
    label: str,
    partitions: int | None,
    total: WorkTotal | None = None,
) -> TaskResults:
    """Run `function(task, retried)` for every task; return the results in task order, and the sums of their counts.

    `retried` is True if an earlier attempt may have failed at this task. `partitions` is the number of Spark
    partitions; None: it follows the cores. `label` and `total` are for the display of progress, which shows the rows
    that the tasks count in their `PartMeter`, or else the sum of `rows` over the results. Raises the PenstockError that
    a task raised; tasks that have not ended by then are cancelled.
    """
    if not tasks:
        return TaskResults([])
    if current_progress() is None:  # outside of a run, such as in `penstock whatif`
        with show_progress(spark, label, [label]) as progress, progress.step(label):
            results = gather_tasks(spark, function, tasks, label, partitions, total)
            progress.say(progress.last_line(), step=label)
        return results
    rows, job = rows_of_tasks(spark, tasks, partitions), _Job(spark)
    shared, ended = rows.shared, job.ended
    size = WorkTotal(len(tasks), total.rows if total else None, total.bytes if total else None)
    address, inputs = _begin(label, size, job.poll), current_inputs()
    log = worker_log(on_this_machine(spark))

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        attempt = _Attempt()
        for ordinal, task in unpacked(batches, shared):
            with logging_as(log), counting(address, ordinal), made_from(inputs):
                result, answer = ended.result(ordinal, functools.partial(function, task, attempt.is_retry))
            yield result
            if "error" in answer:
                return
            attempt.after(answer)

    return job.gather(rows.frame.mapInArrow(work, RESULTS_DDL), len(tasks) > MAX_UNADDED)


def run_tasks(
    spark: SparkSession,
    function: Callable[[T, bool], TaskResult],
    tasks: Sequence[T],
    label: str,
    partitions: int | None,
    total: WorkTotal | None = None,
) -> list[TaskResult]:
    """Run `function(task, retried)` for every task and return the results in task order; see `gather_tasks`."""
    return gather_tasks(spark, function, tasks, label, partitions, total).answers


def _begin(what: str, total: WorkTotal, poll: Callable[[], WorkCounts]) -> Any:
    progress = current_progress()
    return progress.begin_work(what, total, poll) if progress is not None else None


def run_parts(
    build: StepContext,
    function: Callable[[T, bool], PartResult],
    tasks: Sequence[T],
    label: str,
    total: WorkTotal | None = None,
) -> PartResults:
    """Run tasks that write one part each and return their results. See `gather_tasks`.

    Task number N writes part number N. If `build.only` names some parts, the other tasks are left out.
    """
    sources = build.part_sources
    numbered = [*enumerate(tasks)]
    if build.only is not None:
        numbered = [(number, task) for number, task in numbered if number in build.only]

    def write(task: tuple[int, T], retried: bool) -> TaskResult:
        number, own = task
        with _attempt_at(number, retried):
            return answer_of_part(function(own, retried), None if sources is None else sources[number])

    return results_of_parts(gather_tasks(build.spark, write, numbered, label, build.partitions, total))


def dataframe_from_tasks(
    spark: SparkSession, function: Callable[[T], Iterator[pa.RecordBatch]], tasks: Sequence[T], schema: str
) -> DataFrame:
    """Return a DataFrame of the rows that `function(task)` yields for every task; `schema` is its Spark schema."""
    rows = rows_of_tasks(spark, tasks)
    shared, progress = rows.shared, current_progress()
    address = progress.address() if progress is not None else None

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with marked_errors():
            for ordinal, task in unpacked(batches, shared):
                meter = PartMeter(address, ordinal)
                for made in function(task):
                    meter.add(made.num_rows)
                    yield made
                meter.send(done=True)

    return rows.frame.mapInArrow(work, schema)


def run_partitions(
    frame: DataFrame, function: Callable[[int, Iterator[pa.RecordBatch]], TaskResult], what: str = ""
) -> list[TaskResult]:
    """Run `function(partition number, batches)` on each partition of a frame.

    Return the results in the order of the partitions. `function` is also called for empty partitions. `what` is shown
    as the work of the current step; if it is empty, the display does not change.
    """
    job = _Job(frame.sparkSession)
    address, inputs, ended = _begin(what, WorkTotal(), job.poll) if what else None, current_inputs(), job.ended
    log = worker_log(on_this_machine(frame.sparkSession))

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        number = task_context().partitionId()
        with logging_as(log), counting(address, number), made_from(inputs):
            result, _ = ended.result(number, functools.partial(function, number, batches))
        yield result

    return job.gather(frame.mapInArrow(work, RESULTS_DDL), is_large=False).answers


def is_taken_over(answer: TaskResult) -> bool:
    """Return True if the result of a task is that of a part of an earlier version."""
    return any(isinstance(file, dict) and file["path"].startswith("../") for file in answer.get("files", {}).values())


def _check_code(answers: Sequence[TaskResult]) -> None:
    """Say how many parts of other code or inputs were written again, and how many are those of earlier versions.

    Raises ContractError if a worker has other code than the driver.
    """
    codes = {answer["code"] for answer in answers if answer.get("code")}
    if others := sorted(codes - {code_digest()}):
        raise ContractError(
            f"spark: expected workers with the code of the driver ({code_digest()}), got {' and '.join(others)}. "
            "Use the same files of penstock on every machine and until the run ends."
        )
    progress, redone = current_progress(), sum(bool(answer.get("redone")) for answer in answers)
    if progress is None:
        return
    if redone:
        progress.say(
            f"{redone:,} completed part(s) of other code or inputs were written again, so that no table mixes them"
        )
    if taken := sum(is_taken_over(answer) for answer in answers):
        progress.say(f"{taken:,} of {len(answers):,} parts are those of an earlier version of the table")


def catch_user_errors(call: Callable[[], TaskResult]) -> TaskResult:
    """Return the result of `call`. If `call` raises an error that the user can fix, return the error as a result.

    Other errors are raised.
    """
    try:
        return call()
    except PenstockError as error:
        return _error_answer(error)
    except OSError as error:
        problem = describe_storage_error(error)
        if problem is None:
            raise
        return {"error": problem}


@contextmanager
def marked_errors() -> Iterator[None]:
    """Mark an error that the user can fix, so that `error_of_worker` finds it in the exception of a Spark job."""
    try:
        yield
    except PenstockError as error:
        # A traceback shows this line, which therefore has no marks.
        raise RuntimeError(_marked(_error_answer(error))) from error


def _error_answer(error: PenstockError) -> TaskResult:
    kinds = (name for name, kind in KINDS.items() if isinstance(error, kind))
    return {"error": str(error), "kind": next(kinds, type(error).__name__)}


def _marked(answer: TaskResult) -> str:
    return f"<penstock-error>{json.dumps(answer)}</penstock-error>"


def error_of_worker(error: Exception) -> PenstockError | None:
    """Return the error that the user can fix and that made a Spark job fail; None if there is none.

    Call this while the session is open: Spark asks its JVM for the text of an exception.
    """
    if marked := MARKED_ERROR.search(str(error)):
        answer = json.loads(marked[1])
        return KINDS.get(answer["kind"], PenstockError)(answer["error"])
    problem = describe_remote_error(error)
    return None if problem is None else PenstockError(problem)


def raise_if_error(answer: TaskResult) -> TaskResult:
    """Return the result of a task. If the result is an error that `catch_user_errors` returned, raise the error."""
    if "error" in answer:
        raise KINDS.get(answer.get("kind", ""), PenstockError)(answer["error"])
    return answer


def task_context() -> TaskContext:
    """Return the context of the running Spark task. Raises RuntimeError outside of a task."""
    context = TaskContext.get()
    if context is None:
        raise RuntimeError(
            "engine: expected to run inside a Spark task, got no task context. Call it in a function of a task."
        )
    return context


_SHIPPED: dict[tuple[str, str], State] = {}
"""Size and time of each model file when it was sent to the workers, by application and path."""


def ship_models(spark: SparkSession, paths: Sequence[str]) -> None:
    """Make model files available on every worker, each under a name of its own; workers of this machine read the files.

    Raises ConfigError if a file has changed since it was sent before, and ContractError if since the run was prepared.
    """
    context = spark.sparkContext
    if on_this_machine(spark):
        return
    folder = os.path.join(SparkFiles.getRootDirectory(), "penstock")
    os.makedirs(folder, exist_ok=True)
    for path in sorted(set(paths)):
        now = state_of(path)[:2]
        key = (str(context.applicationId), path)
        if key not in _SHIPPED:
            # A copy, so that workers that start later get the same bytes.
            copy = shutil.copy(path, os.path.join(folder, _shipped_name(path)))
            path_here(path, None)
            context.addFile(copy)
            _SHIPPED[key] = now
        elif _SHIPPED[key] != now:
            raise ConfigError(
                f"models: expected {path} as this Spark session sent it to its workers, got a changed file. Start "
                "another session."
            )


def on_this_machine(spark: SparkSession) -> bool:
    """Return True if the workers of a session run on the driver's machine, and so can read its files."""
    return str(spark.sparkContext.master).startswith("local")


def worker_path(path: str) -> str:
    """Return the path of a model file on this worker, as `path_here` does."""
    return path_here(path, lambda: SparkFiles.get(_shipped_name(path)))


def _shipped_name(path: str) -> str:
    return f"{hashlib.sha256(path.encode()).hexdigest()[:16]}-{os.path.basename(path)}"


def persist_on_disk(frame: DataFrame) -> DataFrame:
    """Return the frame, persisted on the workers' disks so that it is computed once."""
    return frame.persist(StorageLevel.DISK_ONLY)


def map_parts(
    frame: DataFrame,
    tasks: Sequence[T],
    function: Callable[[T, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
    order: Sequence[str] = (),
) -> DataFrame:
    """Group the rows of a frame by part, and return the rows that `function(task, batches)` yields for each part.

    The column `part` of `frame` is the number of the task that gets a row. Rows of a part are sorted by `order`, if it
    names columns. `function` is also called for parts without rows.
    """
    by_part, shared = _by_part(frame, tasks, order)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with marked_errors():
            for _, task, own in _each_part(batches, shared):
                yield from function(task, own)

    return by_part.mapInArrow(work, schema)


def run_part_writers(
    build: StepContext,
    frame: DataFrame,
    tasks: Sequence[T],
    function: Callable[[T, Iterator[pa.RecordBatch], bool], PartResult],
    what: str,
) -> PartResults:
    """Call `function(task, batches, retried)`, which writes a part, for each part of a frame; return the results.

    The column `part` of `frame` is the number of the task that gets a row. `function` is also called for parts without
    rows. `retried` is True if an earlier attempt may have failed at this part. `what` is shown as the work of the
    current step. Raises ContractError if a part has no result.
    """
    by_part, shared = _by_part(frame, tasks)
    job, sources, inputs = _Job(build.spark), build.part_sources, current_inputs()
    address, ended = _begin(what, WorkTotal(len(tasks)), job.poll), job.ended
    log = worker_log(on_this_machine(build.spark))

    def write(task: T, own: Iterator[pa.RecordBatch], number: int, retried: bool) -> TaskResult:
        with _attempt_at(number, retried):
            return answer_of_part(function(task, own, retried), None if sources is None else sources[number])

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        attempt = _Attempt()
        for number, task, own in _each_part(batches, shared):
            with logging_as(log), counting(address, number), made_from(inputs):
                result, answer = ended.result(number, functools.partial(write, task, own, number, attempt.is_retry))
            yield result
            if "error" in answer:
                return
            attempt.after(answer)

    results = job.gather(by_part.mapInArrow(work, RESULTS_DDL), len(tasks) > MAX_UNADDED)
    if len(results.answers) != len(tasks):
        raise ContractError(
            f"spark: expected results of {len(tasks)} parts, got {len(results.answers)}. Run `penstock run` again."
        )
    return results_of_parts(results)


def _by_part(frame: DataFrame, tasks: Sequence[Any], order: Sequence[str] = ()) -> tuple[DataFrame, tuple[Any, ...]]:
    """Return the rows of a frame in groups of parts, and the objects that the tasks share.

    The parts of a partition are in order, and the first row of each has its task in the column `_task`.
    """
    rows = rows_of_tasks(frame.sparkSession, tasks)
    # Every part has a row of its own, or Spark would skip the shuffle of a frame that it knows is empty.
    own = [
        F.col("ordinal").cast("int").alias("part") if name == "part" else F.lit(None).cast(kind).alias(name)
        for name, kind in frame.dtypes
    ]
    both = frame.withColumn("_task", F.lit(None).cast("binary")).union(rows.frame.select(*own, F.col("task")))
    groups = max(1, -(-len(tasks) // rows.group))
    grouped = both.repartitionById(groups, F.expr(f"cast(part div {rows.group} as int)"))
    return grouped.sortWithinPartitions("part", F.col("_task").isNull(), *order), rows.shared


def _each_part(
    batches: Iterator[pa.RecordBatch], shared: Sequence[Any]
) -> Iterator[tuple[int, Any, Iterator[pa.RecordBatch]]]:
    """Yield the number, the task and the batches of each part in a partition of `_by_part`."""
    for number, own in itertools.groupby(_runs(batches), lambda run: run.column("part")[0].as_py()):
        data, rest = _task_of(own)
        yield number, unpack(data, shared), rest


def _task_of(runs: Iterator[pa.RecordBatch]) -> tuple[bytes, Iterator[pa.RecordBatch]]:
    """Return the bytes of the task in the first row of a part, and the other rows."""
    first = next(runs)
    rest = itertools.chain([first.slice(1)], runs)
    return first.column("_task")[0].as_py(), (run.drop_columns("_task") for run in rest)


def _runs(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of batches, cut where the column `part` changes."""
    for batch in batches:
        parts = batch.column("part").to_numpy()
        starts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), batch.num_rows]
        for start, end in itertools.pairwise(starts):
            if end > start:
                yield batch.slice(start, end - start)


# Totals of each key over all parts: how often it occurs, and which of its documents is first in keep order.
#
# Each part contributes one row for each of its keys. So the cost of a frequent key grows with the number of parts and
# not with the number of its occurrences.

TALLIES = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("part", pa.int32()),
        pa.field("count", pa.int64()),
        pa.field("first", pa.binary()),
    ]
)
TALLIES_DDL = "key binary, part int, count long, first binary"


def totals(tallies: DataFrame) -> DataFrame:
    """Add the columns `total` and `best`: the sum of `count` and the smallest `first` over the rows with the same key.

    `tallies` has one row per key and part, with the columns of TALLIES. `count` is the number of times that the key
    occurs in the part. `first` is the place in keep order (bytes) of the part's first document with the key.
    """
    same_key = Window.partitionBy("key")
    return tallies.withColumns({"total": F.sum("count").over(same_key), "best": F.min("first").over(same_key)})
