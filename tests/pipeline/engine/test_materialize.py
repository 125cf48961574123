"""Kept rows: written once, read without their history, by few tasks, and found again by a run that was killed."""

import datetime
import os
import re
import signal
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from pipeline.engine import materialize
from pipeline.engine.materialize import BATCH_ROWS, BatchRange, FrameStore, StoredFile, spans
from pipeline.engine.spark import error_of_worker
from pipeline.engine.tasks import newest_stage, work_since
from schemas.errors import ContractError
from schemas.storage import Store


@pytest.fixture
def folder(tmp_path):
    return Store(str(tmp_path / "scratch"))


def files_in(folder):
    return sorted(Path(folder.root).glob("*.arrow"))


def kept_files(*batches):
    return [StoredFile(f"f{number}", 0, 0, " ".join(["8:0"] * (count + 1))) for number, count in enumerate(batches)]


def ranges(*parts):
    """The ranges of batches of these files, as (name, batches, first, end)."""
    return [BatchRange(StoredFile(name, 0, 0, " ".join(["8:0"] * (count + 1))), *ends) for name, count, *ends in parts]


def test_frames_in_a_folder_elsewhere_are_not_deleted(tmp_path):
    outside, version = tmp_path / "outside", tmp_path / "run/clusters/v-0"
    (outside / "project").mkdir(parents=True)
    (outside / "project/thesis.tex").write_text("precious")
    version.mkdir(parents=True)
    (version / "scratch").symlink_to(outside)
    with pytest.raises(ContractError, match="expected a file of the run to delete, got one in"):
        FrameStore(None, Store(str(version / "scratch"))).clear()
    assert (outside / "project/thesis.tex").exists()


def test_many_small_files_are_few_tasks_and_a_large_file_is_many():
    assert spans(kept_files(1, 1, 1, 1, 1), 2) == [
        ranges(("f0", 1, 0, 1), ("f1", 1, 0, 1)),
        ranges(("f2", 1, 0, 1), ("f3", 1, 0, 1), ("f4", 1, 0, 1)),
    ]
    assert spans(kept_files(5, 1), 3) == [
        ranges(("f0", 5, 0, 2)),
        ranges(("f0", 5, 2, 4)),
        ranges(("f0", 5, 4, 5), ("f1", 1, 0, 1)),
    ]
    assert spans(kept_files(1, 1), 8) == [ranges(("f0", 1, 0, 1)), ranges(("f1", 1, 0, 1))]
    assert spans([], 4) == []


@pytest.mark.spark
def test_rows_of_every_type_come_back(spark, folder):
    rows = [(1, b"\x00\xff", "é", None, [1.5, None], {"a": 1}, datetime.datetime(2024, 5, 6, 7, 8, 9)), (None,) * 7]
    schema = "i long, `a b` binary, s string, n int, l array<double>, m map<string,int>, t timestamp"
    frame = spark.createDataFrame(rows, schema)
    kept = FrameStore(spark, folder).keep("rows", frame)
    assert kept.frame.schema == frame.schema
    assert sorted(map(str, kept.frame.collect())) == sorted(map(str, frame.collect()))
    assert kept.rows == 2
    assert kept.bytes == sum(path.stat().st_size for path in files_in(folder))


@pytest.mark.spark
def test_no_rows_are_kept_too(spark, folder):
    scratch = FrameStore(spark, folder)
    kept = scratch.keep("none", spark.createDataFrame([], "a binary, b int"))
    assert (kept.rows, kept.bytes, files_in(folder)) == (0, 0, [])
    assert kept.frame.collect() == []
    assert kept.frame.schema.simpleString() == "struct<a:binary,b:int>"
    scratch.clear()
    assert not Path(folder.root).exists()
    scratch.clear()


@pytest.mark.spark
def test_the_frame_knows_the_files_alone_and_has_few_tasks(spark, folder):
    frame = spark.range(0, 200_000, 1, 40).where("id % 40 < 20 or id < 5000").withColumn("even", F.col("id") % 2 == 0)
    kept = FrameStore(spark, folder).keep("rows", frame.repartition(30, "even"))
    plan = kept.frame._jdf.queryExecution().toString()
    assert "Exchange" not in plan
    assert "Filter" not in plan
    assert "even" in plan
    assert len(files_in(folder)) == 2  # of thirty partitions two have rows
    assert kept.frame.rdd.getNumPartitions() == 1
    with pytest.MonkeyPatch.context() as patch:  # one task for each megabyte, up to eight for each of the two cores
        patch.setattr(materialize, "SPAN_BYTES", -(-kept.bytes // 2))
        assert kept.frame.rdd.getNumPartitions() == 2
        patch.setattr(materialize, "SPAN_BYTES", 1)
        assert kept.frame.rdd.getNumPartitions() == min(16, sum(file.batches for file in kept.files)) == 2
    expected = [number for number in range(200_000) if number % 40 < 20 or number < 5000]
    assert kept.rows == len(expected)
    assert sorted(row.id for row in kept.frame.select("id").collect()) == expected


@pytest.mark.spark
def test_batches_are_bounded(spark, folder):
    def count(batches):
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"n": pa.array([batch.num_rows], pa.int64())})

    kept = FrameStore(spark, folder).keep("rows", spark.range(0, 150_000, 1, 1))
    [file] = kept.files
    assert (file.rows, file.batches) == (150_000, 3)
    sizes = sorted(row.n for row in kept.mapped(count, "n long").collect())
    assert sizes[-1] <= BATCH_ROWS
    assert sum(sizes) == 150_000
    wide = FrameStore(spark, folder).keep(
        "wide", spark.range(0, 60, 1, 1).select(F.repeat(F.lit("x"), 1 << 20).alias("x"))
    )
    assert wide.files[0].batches == 4  # 60 MiB in batches of 15 rows, which with their offsets fit into 16 MiB


def dying_once(killed):
    """A step that passes rows on; partition 1 dies after its first batch, once. Made here to travel by value."""

    def step(number, batches):
        for position, batch in enumerate(batches):
            if number == 1 and position == 1 and not os.path.exists(killed):
                Path(killed).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield "rows", batch

    return step


@pytest.mark.spark
def test_a_killed_worker_leaves_one_copy_of_its_rows(spark, folder, tmp_path):
    killed = str(tmp_path / "killed")
    frame = spark.range(0, 10_000, 1, 2)
    kept = FrameStore(spark, folder).store_each("rows", frame, dying_once(killed), {"rows": "id long"})["rows"]
    assert os.path.exists(killed)
    assert (len(kept.files), len(files_in(folder))) == (2, 3)  # what the dead attempt left is in no list
    assert sorted(row.id for row in kept.frame.collect()) == list(range(10_000))
    assert kept.rows == 10_000


@pytest.mark.spark
def test_a_failed_attempt_removes_its_file_and_a_broken_promise_is_reported(spark, folder):
    def fail(number, batches):
        yield "rows", next(batches)
        raise ContractError("rows: expected good, got bad. Mend them.")

    with pytest.raises(ContractError, match=r"^rows: expected good, got bad\. Mend them\.$"):
        FrameStore(spark, folder).store_each("rows", spark.range(0, 10, 1, 1), fail, {"rows": "id long"})
    assert list(Path(folder.root).iterdir()) == []


@pytest.mark.spark
def test_a_killed_run_resumes_after_what_it_kept(spark, folder, tmp_path):
    def counting(batches):
        with open(tmp_path / "runs", "a") as stream:
            stream.write("x")
        yield from batches

    frame = spark.range(0, 10, 1, 1).mapInArrow(counting, "id long")
    first = FrameStore(spark, folder).keep("rows", frame)
    again = FrameStore(spark, folder).keep("rows", frame)
    assert again.files == first.files
    assert sorted(row.id for row in again.frame.collect()) == list(range(10))
    assert (tmp_path / "runs").read_text() == "x"
    FrameStore(spark, folder).keep("others", frame)
    assert (tmp_path / "runs").read_text() == "xx"
    Path(folder.path("rows.json")).unlink()  # killed before the list stood: the files count for nothing
    assert FrameStore(spark, folder).keep("rows", frame).rows == 10
    assert len(files_in(folder)) == 3


@pytest.mark.spark
@pytest.mark.parametrize("damage", ["a bit", "gone"])
def test_a_damaged_frame_is_refused_with_the_folder_to_delete(spark, folder, damage):
    kept = FrameStore(spark, folder).keep("rows", spark.range(0, 1000, 1, 1))
    [path] = files_in(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data) if damage == "a bit" else path.unlink()
    found = "expected checksum .* of record batch 0, got" if damage == "a bit" else "expected a stored frame, got"
    with pytest.raises(Exception, match="penstock-error") as raised:
        kept.frame.collect()
    error = error_of_worker(raised.value)
    assert isinstance(error, ContractError)
    assert re.search(rf"^{path}: {found} .*Delete the folder {folder.uri}, and run the same command again", str(error))


@pytest.mark.spark
def test_kinds_are_kept_apart(spark, folder):
    def halves(number, batches):
        for batch in batches:
            yield "low", batch.filter(pa.compute.less(batch["id"], 5))
            yield "high", batch.filter(pa.compute.greater_equal(batch["id"], 8))

    kinds = {"low": "id long", "high": "id long", "none": "id long"}
    kept = FrameStore(spark, folder).store_each("halves", spark.range(0, 10, 1, 3), halves, kinds)
    assert {kind: sorted(row.id for row in rows.frame.collect()) for kind, rows in kept.items()} == {
        "low": [0, 1, 2, 3, 4],
        "high": [8, 9],
        "none": [],
    }


@pytest.mark.spark
def test_shuffled_bytes_grow_with_what_is_shuffled(spark):
    def shuffle(rows):
        before = newest_stage(spark)
        frame = spark.range(0, rows, 1, 2).select(F.sha2(F.col("id").cast("string"), 256).alias("x"))
        frame.repartition(3, "x").write.format("noop").mode("overwrite").save()
        return work_since(spark, before).shuffled_bytes

    small, large = shuffle(1000), shuffle(10_000)
    assert 32 * 1000 < small < 100 * 1000
    assert 32 * 10_000 < large < 100 * 10_000
