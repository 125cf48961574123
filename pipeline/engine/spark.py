"""The Spark runner: runs pure functions as Spark tasks, which return small JSON results to the driver.

The results are those of each task's successful attempt, so retries and speculative attempts count once. An error that
the user can fix is returned as a result, because Spark would otherwise run the failing task four times.
"""

import functools
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark import AccumulatorParam, SparkFiles, TaskContext
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from pipeline.engine.code_digest import code_digest
from pipeline.engine.live_counts import CountsListener, PartMeter, WorkCounts, counting
from pipeline.engine.part import INPUT_FILES, PartResult, TaskResult, current_inputs, made_from
from pipeline.engine.progress import CountSources, Progress, WorkTotal, current_progress
from pipeline.engine.step import StepContext
from schemas.errors import ConfigError, ContractError, PenstockError, describe_storage_error
from schemas.storage import Store, describe_remote_error

T = TypeVar("T")
ANSWER = pa.schema([pa.field("ordinal", pa.int64()), pa.field("answer", pa.string())])
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
        print(f"progress: rows inside a part are not shown, because no UDP port opened: {error}", file=sys.stderr)
    sources = CountSources(listener, functools.partial(active_tasks, spark))
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


class _JobWatch:
    """What is known about a job of `run_tasks` whenever one of its Spark tasks ends.

    Accumulators count the parts of attempts that were repeated twice, so they are only displayed. An error that the
    user can fix cancels the job, because the other parts would take their time for a run that fails anyway.
    """

    def __init__(self, spark: SparkSession):
        self._context = spark.sparkContext
        self.rows, self.bytes, self.parts = (self._context.accumulator(0) for _ in range(3))
        self.error = self._context.accumulator("", _FirstText())
        self._tag = f"penstock-{uuid.uuid4().hex}"
        self._is_cancelled = False

    @contextmanager
    def tagged(self) -> Iterator[None]:
        """Mark the jobs that the `with` block starts as those that an error cancels."""
        self._context.addJobTag(self._tag)
        try:
            yield
        finally:
            self._context.removeJobTag(self._tag)

    def poll(self) -> WorkCounts:
        """Return the counts of the parts whose Spark task has ended. Cancel the job if one of them has an error."""
        if self.error.value and not self._is_cancelled:
            self._is_cancelled = True
            with suppress(Py4JError, OSError):  # if the JVM has ended, there is no job to cancel
                self._context.cancelJobsWithTag(self._tag)
        return WorkCounts(self.rows.value, self.bytes.value, self.parts.value)


def run_tasks(
    spark: SparkSession,
    function: Callable[[T, bool], TaskResult],
    tasks: Sequence[T],
    label: str,
    partitions: int | None,
    total: WorkTotal | None = None,
) -> list[TaskResult]:
    """Run `function(task, retried)` for every task and return the results in task order.

    `retried` is True in a second or later attempt. `partitions` is the number of Spark partitions; None = one per task.
    `label` and `total` are for the display of progress, which shows the rows that the tasks count in their
    `PartMeter`, or else the sum of `rows` over the results. Raises the PenstockError that a task raised; tasks that
    have not ended by then are cancelled.
    """
    if not tasks:
        return []
    if current_progress() is None:  # outside of a run, such as in `penstock whatif`
        with show_progress(spark, label, [label]) as progress, progress.step(label):
            results = run_tasks(spark, function, tasks, label, partitions, total)
            progress.say(progress.last_line())
        return results
    context = spark.sparkContext
    shared = context.broadcast(list(tasks))
    watch = _JobWatch(spark)
    rows_done, bytes_done, parts_done, first_error = watch.rows, watch.bytes, watch.parts, watch.error
    size = WorkTotal(len(tasks), total.rows if total else None, total.bytes if total else None)
    address, inputs = _begin(label, size, watch.poll), current_inputs()

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for ordinal in batch.column(0).to_pylist():
                with counting(address, ordinal), made_from(inputs):
                    answer = catch_user_errors(functools.partial(function, shared.value[ordinal], is_retry()))
                text = json.dumps(answer)
                rows_done.add(int(answer.get("rows", 0)))
                bytes_done.add(sum(source["bytes"] for source in answer.get(INPUT_FILES, ())))
                parts_done.add(1)
                yield pa.RecordBatch.from_pydict({"ordinal": [ordinal], "answer": [text]}, schema=ANSWER)
                if "error" in answer:
                    first_error.add(text)
                    return

    frame = spark.range(0, len(tasks), 1, numPartitions=min(partitions or len(tasks), len(tasks)))
    try:
        with watch.tagged():
            rows = frame.mapInArrow(work, "ordinal long, answer string").collect()
        answers = {row.ordinal: json.loads(row.answer) for row in rows}
    except Exception:  # of the cancelled job, or another error
        if not watch.error.value:
            raise
        answers = {0: json.loads(watch.error.value)}
    shared.unpersist()
    for ordinal in sorted(answers):
        raise_if_error(answers[ordinal])
    return _of_this_code([answers[ordinal] for ordinal in range(len(tasks))])


def _begin(what: str, total: WorkTotal, poll: Callable[[], WorkCounts]) -> Any:
    progress = current_progress()
    return progress.begin_work(what, total, poll) if progress is not None else None


def run_parts(
    build: StepContext,
    function: Callable[[T, bool], PartResult],
    tasks: Sequence[T],
    label: str,
    total: WorkTotal | None = None,
) -> list[PartResult]:
    """Run tasks that write one part each and return their results in task order. See `run_tasks`.

    Task number N writes part number N. If `build.only` names some parts, the other tasks are left out.
    """
    if build.only is not None:
        tasks = [task for number, task in enumerate(tasks) if number in build.only]

    def write(task: T, retried: bool) -> TaskResult:
        return function(task, retried).to_json()

    results = run_tasks(build.spark, write, tasks, label, build.partitions, total)
    return [PartResult.from_json(result) for result in results]


def dataframe_from_tasks(
    spark: SparkSession, function: Callable[[T], Iterator[pa.RecordBatch]], tasks: Sequence[T], schema: str
) -> DataFrame:
    """Return a DataFrame of the rows that `function(task)` yields for every task; `schema` is its Spark schema."""
    shared = spark.sparkContext.broadcast(list(tasks))
    progress = current_progress()
    address = progress.address() if progress is not None else None

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with marked_errors():
            for batch in batches:
                for ordinal in batch.column(0).to_pylist():
                    meter = PartMeter(address, ordinal)
                    for made in function(shared.value[ordinal]):
                        meter.add(made.num_rows)
                        yield made
                    meter.send(done=True)

    return spark.range(0, len(tasks), 1, numPartitions=max(1, len(tasks))).mapInArrow(work, schema)


def run_partitions(
    frame: DataFrame, function: Callable[[int, Iterator[pa.RecordBatch]], TaskResult], what: str = ""
) -> list[TaskResult]:
    """Run `function(partition number, batches)` on each partition of a frame.

    Return the results in the order of the partitions. `function` is also called for empty partitions. `what` is shown
    as the work of the current step; if it is empty, the display does not change.
    """
    progress = current_progress()
    address = progress.begin_work(what) if what and progress is not None else None
    inputs = current_inputs()

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        number = task_context().partitionId()
        with counting(address, number), made_from(inputs):
            answer = catch_user_errors(functools.partial(function, number, batches))
        yield pa.RecordBatch.from_pydict({"ordinal": [number], "answer": [json.dumps(answer)]}, schema=ANSWER)

    rows = frame.mapInArrow(work, "ordinal long, answer string").collect()
    return _of_this_code([raise_if_error(json.loads(row.answer)) for row in sorted(rows, key=lambda row: row.ordinal)])


def _of_this_code(answers: list[TaskResult]) -> list[TaskResult]:
    """Return the results of tasks. Say how many parts of other code or inputs were written again.

    Raises ContractError if a worker has other code than the driver.
    """
    codes = {answer["code"] for answer in answers if answer.get("code")}
    if others := sorted(codes - {code_digest()}):
        raise ContractError(
            f"spark: expected workers with the code of the driver ({code_digest()}), got {' and '.join(others)}. "
            "Use the same files of penstock on every machine and until the run ends."
        )
    progress, redone = current_progress(), sum(bool(answer.get("redone")) for answer in answers)
    if redone and progress is not None:
        progress.say(
            f"{redone:,} completed part(s) of other code or inputs were written again, so that no table mixes them"
        )
    return answers


def catch_user_errors(call: Callable[[], TaskResult]) -> TaskResult:
    """Return the result of `call`. If `call` raises an error that the user can fix, return the error as a result.

    Other errors are raised.
    """
    try:
        return call()
    except PenstockError as error:
        return {"error": str(error), "kind": type(error).__name__}
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
        raise RuntimeError(_marked({"error": str(error), "kind": type(error).__name__})) from error


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


def is_retry() -> bool:
    """Return True if the running task is a second or later attempt."""
    return task_context().attemptNumber() > 0


def ship_models(spark: SparkSession, paths: Sequence[str]) -> None:
    """Make model files available on every worker under their base names.

    Raises ConfigError if two files have the same base name.
    """
    places: dict[str, str] = {}
    for path in sorted(set(paths)):
        other = places.setdefault(os.path.basename(path), path)
        if other != path:
            raise ConfigError(
                f"models: expected model files with different names, got {other} and {path}. Rename one of the files."
            )
    for path in places.values():
        spark.sparkContext.addFile(path)


def worker_path(path: str) -> str:
    """Return the path of a model file on this worker: `path` if it exists here, else the path of the shipped copy."""
    return path if os.path.exists(path) else SparkFiles.get(os.path.basename(path))


def persist_on_disk(frame: DataFrame) -> DataFrame:
    """Return the frame, persisted on the workers' disks so that it is computed once."""
    return frame.persist(StorageLevel.DISK_ONLY)


def map_parts(
    frame: DataFrame,
    parts: int,
    function: Callable[[int, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
) -> DataFrame:
    """Group the rows of a frame by part, and return the rows that `function(part number, batches)` yields per part.

    The column `part` of `frame` is the part number of a row, from 0 to `parts` - 1. `function` is also called for parts
    without rows.
    """

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next(batches, None)
        if first is not None:
            # Spark renumbers partitions in a union; every part has a row, at least the marker row, with its number.
            with marked_errors():
                yield from function(first.column("part")[0].as_py(), map(_without_marks, chain([first], batches)))

    return _by_part(frame, parts).mapInArrow(work, schema)


def run_part_writers(
    frame: DataFrame, parts: int, function: Callable[[int, Iterator[pa.RecordBatch]], PartResult], what: str
) -> list[PartResult]:
    """Call `function(part number, batches)`, which writes a part, for each part of a frame.

    Return the results in the order of the parts. `function` is also called for parts without rows. `what` is shown as
    the work of the current step. Raises ContractError if a part has no result.
    """

    def write(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        return function(number, map(_without_marks, batches)).to_json()

    results = run_partitions(_by_part(frame, parts), write, what)
    if len(results) != parts:
        raise ContractError(f"spark: expected results of {parts} parts, got {len(results)}. Run `penstock run` again.")
    return [PartResult.from_json(result) for result in results]


def _by_part(frame: DataFrame, parts: int) -> DataFrame:
    """Return the frame with one partition for each part, and a marker row (`_mark` is True) in each partition."""
    # Without marker rows, Spark would skip the shuffle of a frame that it knows is empty.
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
