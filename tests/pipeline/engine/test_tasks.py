"""Tasks as rows: each with its own values, and the objects that all share only once."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.dedup.candidates import MAX_BLOCKS, payload_partitions
from pipeline.engine.part import PartResult
from pipeline.engine.spark import dataframe_from_tasks, gather_tasks, map_parts, run_part_writers, run_tasks
from pipeline.engine.step import StepContext
from pipeline.engine.tasks import (
    TASKS,
    WorkDone,
    group_size,
    newest_stage,
    num_cores,
    num_groups,
    rows_of_tasks,
    unpacked,
    work_since,
)
from schemas.config import build_recipe
from schemas.errors import ConfigError
from schemas.manifest import Counts
from schemas.storage import Store


@dataclass(frozen=True)
class Task:
    number: int
    folder: Store
    words: list[str]
    own: str


def make_tasks(count: int) -> list[Task]:
    folder, words = Store("/tmp"), ["word"] * 10_000
    return [Task(number, folder, words, f"own {number}") for number in range(count)]


@pytest.mark.spark
def test_a_row_has_the_own_values_of_its_task_only(spark) -> None:
    tasks = [*enumerate(make_tasks(40))]
    rows = rows_of_tasks(spark, tasks, groups=7)
    table = rows.frame.toArrow()
    assert (rows.group, rows.frame.rdd.getNumPartitions()) == (6, 7)
    assert max(len(data) for data in table.column("task").to_pylist()) < 300
    found = [*unpacked(iter(table.cast(TASKS).to_batches()), rows.shared)]
    assert [ordinal for ordinal, _ in found] == [*range(40)]
    assert [task for _, (_, task) in found] == [task for _, task in tasks]
    assert len({id(task.words) for _, (_, task) in found}) == len({id(task.folder) for _, (_, task) in found}) == 1


@pytest.mark.spark
def test_one_task_and_tasks_of_plain_values(spark) -> None:
    for tasks in ([3], [3, 4], ["a", ("b", 1), None], [[1], [1]]):
        rows = rows_of_tasks(spark, tasks)
        found = [task for _, task in unpacked(iter(rows.frame.toArrow().cast(TASKS).to_batches()), rows.shared)]
        assert found == tasks


class Conf:
    def __init__(self, known: int, **values: str):
        self.defaultParallelism, self.values, self.sparkContext = known, values, self

    def getConf(self) -> "Conf":
        return self

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name.rpartition(".")[2], default)


@pytest.mark.parametrize(
    ("conf", "cores"),
    [
        (Conf(1000), 1000),
        (Conf(2, enabled="true", maxExecutors="50", cores="4"), 200),
        (Conf(2, enabled="true"), 1024),
        (Conf(2000, enabled="true"), 2000),
        (Conf(2, maxExecutors="50", cores="4"), 2),
    ],
)
def test_cores_are_those_that_executors_may_have(conf: Conf, cores: int) -> None:
    assert num_cores(conf) == cores  # type: ignore[arg-type]


def test_the_blocks_of_a_shuffle_of_parts_follow_the_cores() -> None:
    """For the shuffle of keys; that of pairs and signatures also has the readers of this one as writers."""
    cluster: Any = Conf(1000)
    assert [group_size(cluster, parts) for parts in (1, 8000, 8001, 90_000)] == [1, 1, 2, 12]
    mappers = -(-90_000 // group_size(cluster, 90_000))
    reducers = 2_700_000_000 * 15 // 4_000_000  # of a search for copies in the pages of a snapshot
    assert mappers * reducers <= 10**8
    assert num_groups(cluster, 90_000) == mappers == 7_500
    assert payload_partitions(reducers, mappers) == 5_673
    assert (reducers + mappers) * 5_673 <= MAX_BLOCKS
    assert [payload_partitions(readers, 4) for readers in (1, 2_000, 9_997)] == [1, 2_000, 9_997]
    assert group_size(cluster, 90_000, groups=10) == 9_000


def rows_by_part(spark, parts: int):
    def numbers(part: int):
        yield pa.RecordBatch.from_pydict(
            {"part": pa.array([(part + step) % parts for step in range(3)], pa.int32()), "value": [part] * 3}
        )

    return dataframe_from_tasks(spark, numbers, [*range(parts)], "part int, value long")


@pytest.mark.spark
def test_each_part_gets_its_task_and_its_rows_though_it_has_none(spark) -> None:
    def total(task: tuple[str, int], batches):
        values = [value for batch in batches for value in batch.column("value").to_pylist()]
        schema = pa.schema([pa.field("name", pa.string()), pa.field("values", pa.list_(pa.int64()))])
        yield pa.RecordBatch.from_pydict({"name": [task[0]], "values": [sorted(values)]}, schema)

    tasks = [(f"part {number}", number) for number in range(50)]
    frame = rows_by_part(spark, 50)
    found = map_parts(frame.where("part != 7"), tasks, total, "name string, values array<long>").collect()
    expected = {f"part {n}": sorted((n - step) % 50 for step in range(3)) for n in range(50)} | {"part 7": []}
    assert {row["name"]: row["values"] for row in found} == expected


def context(spark) -> StepContext:
    return StepContext(spark, build_recipe({}, {}, "test"), (), {}, {}, (), {}, None)


@pytest.mark.spark
@pytest.mark.parametrize("parts", [3, 100])
def test_writers_of_parts_answer_in_order_and_their_counts_are_added(spark, parts: int) -> None:
    def write(task: str, batches, retried: bool) -> PartResult:
        values = [value for batch in batches for value in batch.column("value").to_pylist()]
        counts = Counts(rows_in=len(values), rows_kept=0, dropped={"a/b": len(values)})
        return PartResult({}, counts, {"tasks": {task: 1}}, sources=[{"name": task, "bytes": 0, "sha256": ""}])

    tasks = [f"part {number}" for number in range(parts)]
    results = run_part_writers(context(spark), rows_by_part(spark, parts), tasks, write, "write")
    assert [part.sources[0]["name"] for part in results.parts] == tasks
    assert results.counts == Counts(rows_in=3 * parts, rows_kept=0, dropped={"a/b": 3 * parts})
    assert results.figures == {"tasks": dict.fromkeys(sorted(tasks), 1)}


@pytest.mark.spark
def test_an_error_of_a_writer_is_reported_as_it_is(spark) -> None:
    def write(task: int, batches, retried: bool) -> PartResult:
        if task == 1:
            raise ConfigError("one is wrong")
        return PartResult({}, Counts(rows_in=0, rows_kept=0))

    with pytest.raises(ConfigError, match=r"^one is wrong$"):
        run_part_writers(context(spark), rows_by_part(spark, 4), [*range(4)], write, "write")


@pytest.mark.spark
def test_many_tasks_answer_in_order_and_spark_adds_their_counts(spark) -> None:
    def count(number: int, retried: bool) -> dict[str, Any]:
        return {"number": number, "summed": {"odd" if number % 2 else "even": {"n": 1}}}

    results = gather_tasks(spark, count, [*range(200)], "count", None)
    assert [answer["number"] for answer in results.answers] == [*range(200)]
    assert results.summed == {"even": {"n": 100}, "odd": {"n": 100}}


@pytest.mark.spark
def test_only_the_part_at_which_an_attempt_failed_counts_as_retried(spark, tmp_path) -> None:
    folder = str(tmp_path)

    def task(number: int, retried: bool) -> dict[str, Any]:
        done = Path(folder, str(number))
        if done.exists():
            return {"number": number, "retried": retried, "resumed": True}
        if number == 2 and not retried:
            os.kill(os.getpid(), signal.SIGKILL)
        done.touch()
        return {"number": number, "retried": retried}

    answers = run_tasks(spark, task, [*range(5)], "write", 1)
    assert [(answer["number"], answer["retried"]) for answer in answers] == [
        (0, True),
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]


@pytest.mark.spark
def test_the_time_of_tasks_is_their_sum_not_the_clock(spark) -> None:
    """In local mode too, where Spark gives the age of the application as the time of the driver's tasks."""

    def wait(task: float, retried: bool) -> dict[str, Any]:
        time.sleep(task)
        return {"rows": 0}

    run_tasks(spark, wait, [0.0], "test", 1)  # starts a worker
    before, began = newest_stage(spark), time.monotonic()
    run_tasks(spark, wait, [1.0, 1.0], "test", 2)
    wall = time.monotonic() - began
    assert 2.0 <= work_since(spark, before).task_seconds <= 2 * wall
    assert work_since(spark, newest_stage(spark)) == WorkDone(0, 0.0)
