"""Where functions meet Spark: one answer a task, errors a user can act on, retries in isolation, nothing collected."""

import ast
import errno
import os
import re
import signal
import time
import unicodedata
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from pipeline.engine.guard import RecordGuard
from pipeline.engine.isolation import RecordLimits
from pipeline.engine.live_counts import current_meter
from pipeline.engine.progress import WorkTotal
from pipeline.engine.spark import (
    catch_user_errors,
    dataframe_from_tasks,
    raise_if_error,
    run_partitions,
    run_tasks,
    ship_models,
    show_progress,
    worker_path,
)
from pipeline.engine.worker import run_rows
from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.storage import Store
from tests.support.paths import ROOT

PIPELINE = ROOT / "pipeline"
GATHERING = {"collect", "toPandas", "toArrow", "toLocalIterator"}
SMALL = {
    ("spark.py", "gather"),
    ("step.py", "lowest_proposals"),
    ("step.py", "count_hosts"),
    ("dataset.py", "stream_totals"),
    ("whatif.py", "count_cells"),
    ("corpus.py", "_rows"),
    ("losses.py", "largest_losses"),
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


@pytest.fixture
def cluster(monkeypatch):
    """Let models be shipped as to workers on other machines."""
    monkeypatch.setattr("pipeline.engine.spark.on_this_machine", lambda session: False)


@pytest.mark.spark
def test_two_models_of_one_name_are_shipped_apart(spark, tmp_path, cluster):
    paths = [tmp_path / name / "en.lm" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(path.parent.name)
    for _ in range(2):  # a second run of the session sends nothing again
        ship_models(spark, [str(path) for path in paths])
    for path in paths:
        path.unlink()

    def read(task, retried):
        return {"text": Path(worker_path(task)).read_text(), "rows": 1}

    found = run_tasks(spark, read, [str(path) for path in paths], "test", None)
    assert [answer["text"] for answer in found] == ["a", "b"]


@pytest.mark.spark
def test_a_model_that_changed_cannot_be_shipped_again(spark, tmp_path, cluster):
    model = tmp_path / "en.lm"
    model.write_text("old")
    ship_models(spark, [str(model)])
    model.write_text("newer")
    with pytest.raises(ConfigError, match=r"expected .*en\.lm as this Spark session sent it .* Start another session"):
        ship_models(spark, [str(model)])


@pytest.mark.spark
def test_workers_of_this_machine_read_a_model_that_changed(spark, tmp_path):
    model = tmp_path / "en.lm"
    for text in ("old", "newer"):
        model.write_text(text)
        ship_models(spark, [str(model)])

        def read(task, retried):
            return {"text": Path(worker_path(task)).read_text(), "rows": 1}

        assert [answer["text"] for answer in run_tasks(spark, read, [str(model)], "test", None)] == [text]


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


def make_hanging_task(folder: str):
    """A task of three records whose second hangs in native code that holds the interpreter."""

    def task(number: int, retried: bool) -> dict:
        def measure(row):
            if row["n"] == 1:
                unicodedata.normalize("NFC", "a" + "\u0301" * 400_000 + "\u0327" * 400_000)
            return row | {"pid": os.getpid()}

        limits = RecordLimits(cpu_seconds=1)
        guard = RecordGuard(measure, (Store(folder), f"part-{number:05d}"), retried, limits)
        rows = [*run_rows((({"n": n}, None) for n in range(3)), guard, ("source", "stage"))]
        guard.close()
        verdicts = [row.get("drop_rule") or ("here" if row["pid"] == os.getpid() else "child") for row in rows]
        return {"rows": 3, "verdicts": verdicts, "ends": dict(guard.ends)}

    return task


@pytest.mark.spark
def test_a_record_that_hangs_in_native_code_is_noticed_in_the_first_attempt(spark, tmp_path):
    (answer,) = run_tasks(spark, make_hanging_task(str(tmp_path)), [0], "test", None)
    assert answer["verdicts"] == ["here", "crashed", "here"]
    assert answer["ends"] == {"worker": 1, "cpu_limit": 2}


@pytest.mark.spark
def test_a_tasks_error_reaches_the_user_as_it_is(spark):
    with pytest.raises(ConfigError, match=r"^five is wrong$"):
        run_tasks(spark, make_task(), [0, 5], "test", None)
    assert run_tasks(spark, make_task(), [], "test", None) == []


def make_slow_task():
    """A task whose number 0 has a wrong setting, while the others would take minutes."""

    def task(number: int, retried: bool) -> dict:
        if number == 0:
            raise ConfigError("zero is wrong")
        time.sleep(300)
        return {"rows": 1}

    return task


@pytest.mark.spark
@pytest.mark.parametrize("partitions", [None, 2])
def test_an_error_of_one_part_cancels_the_others(spark, partitions):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^zero is wrong$"):
        run_tasks(spark, make_slow_task(), [0, 1, 2, 3], "test", partitions)
    assert time.monotonic() - started < 120
    assert [answer["number"] for answer in run_tasks(spark, make_task(), [0, 1], "test", None)] == [0, 1]


def make_counting_task():
    """A task that counts 40 rows in its meter, and waits until the driver has shown some of them."""

    def task(number: int, retried: bool) -> dict:
        meter = current_meter()
        meter.position = lambda: 100 * meter.rows
        for _ in range(40):
            meter.add()
            meter.send()
            time.sleep(0.1)
        return {"rows": 40, "source": {"bytes": 4000}}

    return task


@pytest.mark.spark
def test_rows_and_bytes_inside_a_part_reach_the_driver(spark, tmp_path):
    seen = []
    with show_progress(spark, "penstock run", ["documents"], Store(str(tmp_path))) as progress:
        say = progress._view.show
        progress._view.show = lambda text, fraction, figures: (seen.append((text, fraction)), say(text, None, figures))
        with progress.step("documents") as status:
            total = WorkTotal(rows=80, bytes=8000)
            run_tasks(spark, make_counting_task(), [0, 1], "documents", None, total)
        assert (status.rows, status.bytes, status.parts, status.total_parts) == (80, 8000, 2, 2)
    inside = [text for text, _ in seen if " rows  " in text and "  0/2 parts  " in text]
    assert inside, seen
    assert re.search(r"documents   [\d.]+ (kB|bytes) of 8 kB  \d+ %  0/2 parts  \d+ rows  ", inside[0])
    assert max(fraction for _, fraction in seen if fraction is not None) <= 1


@pytest.mark.spark
def test_a_dataframe_step_shows_its_rows_and_tasks(spark, tmp_path):
    def slow(number: int):
        for _ in range(4):
            time.sleep(1)
            yield pa.RecordBatch.from_pydict({"id": [number] * 5})

    with show_progress(spark, "penstock run", ["clusters"]) as progress, progress.step("clusters") as status:
        frame = dataframe_from_tasks(spark, slow, [0, 1], "id long")
        answers = run_partitions(frame, lambda _, batches: {"rows": sum(b.num_rows for b in batches)}, "join clusters")
        assert sorted(answer["rows"] for answer in answers) == [20, 20]
        assert (status.what, status.total_parts) == ("join clusters", 2)
        assert "join clusters  " in progress.last_line()


@pytest.mark.spark
def test_empty_partitions_answer_too(spark):
    frame = spark.range(6).repartitionById(4, (F.col("id") % 2).cast("int"))
    answers = run_partitions(frame, lambda number, batches: {"at": number, "n": sum(b.num_rows for b in batches)})
    assert answers == [{"at": 0, "n": 3}, {"at": 1, "n": 3}, {"at": 2, "n": 0}, {"at": 3, "n": 0}]
