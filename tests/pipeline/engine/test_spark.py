"""Where functions meet Spark: one answer a task, errors a user can act on, retries in isolation, nothing collected."""

import ast
import errno
import os
import signal

import pytest
from pyspark.sql import functions as F

from pipeline.engine.spark import catch_user_errors, raise_if_error, run_partitions, run_tasks, ship_models
from schemas.errors import ConfigError, ContractError, PenstockError
from tests.support.paths import ROOT

PIPELINE = ROOT / "pipeline"
GATHERING = {"collect", "toPandas", "toArrow", "toLocalIterator"}
SMALL = {("spark.py", "run_tasks"), ("spark.py", "run_partitions")}
SMALL |= {
    ("step.py", "lowest_proposals"),
    ("dataset.py", "stream_totals"),
    ("whatif.py", "count_cells"),
    ("corpus.py", "_rows"),
}
"""Where answers of tasks, a row for each stream, for each fate, or a sample, are gathered on the driver."""


def test_no_table_is_gathered_on_one_node():
    found = set()
    for path in PIPELINE.rglob("*.py"):
        for function in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GATHERING:
                    found.add((path.name, function.name))
    assert found == SMALL


def test_two_models_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"expected model files with different names, got a/en\.lm and b/en\.lm"):
        ship_models(None, ["b/en.lm", "a/en.lm", "a/en.lm"])


def raises(error):
    def call():
        raise error

    return call


def test_a_full_disk_is_an_answer_and_other_errors_fail_the_task():
    answer = catch_user_errors(raises(OSError(errno.ENOSPC, "no space", "/data/run/part")))
    with pytest.raises(PenstockError, match="part: expected writable storage, got an error: the disk is full"):
        raise_if_error(answer)
    with pytest.raises(OSError, match="other"):
        catch_user_errors(raises(OSError(errno.EIO, "other")))
    with pytest.raises(ContractError, match="expected X"):
        raise_if_error(catch_user_errors(raises(ContractError("expected X"))))


def make_task():
    """A task that kills its worker at number 2, once; made here so that it travels to the worker by value."""

    def task(number: int, retried: bool) -> dict:
        if number == 2 and not retried:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 5:
            raise ConfigError("five is wrong")
        return {"rows": 1, "number": number, "retried": retried}

    return task


@pytest.mark.spark
@pytest.mark.parametrize("partitions", [None, 2])
def test_answers_come_in_task_order_and_a_killed_worker_is_retried(spark, partitions):
    answers = run_tasks(spark, make_task(), [0, 1, 2, 3], "test", partitions)
    assert [answer["number"] for answer in answers] == [0, 1, 2, 3]
    assert answers[2]["retried"] is True
    assert answers[0]["retried"] is False


@pytest.mark.spark
def test_a_tasks_error_reaches_the_user_as_it_is(spark):
    with pytest.raises(ConfigError, match=r"^five is wrong$"):
        run_tasks(spark, make_task(), [0, 5], "test", None)
    assert run_tasks(spark, make_task(), [], "test", None) == []


@pytest.mark.spark
def test_empty_partitions_answer_too(spark):
    frame = spark.range(6).repartitionById(4, (F.col("id") % 2).cast("int"))
    answers = run_partitions(frame, lambda number, batches: {"at": number, "n": sum(b.num_rows for b in batches)})
    assert answers == [{"at": 0, "n": 3}, {"at": 1, "n": 3}, {"at": 2, "n": 0}, {"at": 3, "n": 0}]
