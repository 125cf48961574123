"""A run of the recipe `demo`, with columns of every stage, as Delta, Iceberg and Spark read its tables."""

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from jobs.cli import main
from pipeline.register.delta import register_delta
from pipeline.register.iceberg import register_iceberg
from pipeline.register.tables import parquet_tables
from pipeline.stages import all_stages
from schemas.storage import Store
from schemas.tables import TABLES
from tests.support.registered import comparable, rows_of_delta, rows_of_files, rows_of_iceberg, without_null_lists

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def run(finished: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A copy of the run, since the log of Delta is written into it."""
    folder = tmp_path_factory.mktemp("registered") / "run"
    shutil.copytree(finished.root, folder)
    return Store(str(folder))


def test_every_table_in_delta(run: Store) -> None:
    for table in parquet_tables(run):
        register_delta(table)
        assert rows_of_delta(run, table.name) == rows_of_files(run, table.name), table.name


def test_every_table_in_iceberg(run: Store, tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg.catalog.memory", reason="pyiceberg is not installed")
    out = Store(str(tmp_path))
    for table in parquet_tables(run):
        register_iceberg(table, out)
        rows, files = rows_of_iceberg(out, table.name), rows_of_files(run, table.name)
        assert without_null_lists(rows) == without_null_lists(files), table.name


def test_every_table_in_spark(run: Store, spark: SparkSession) -> None:
    penstock.register_source(spark)
    for table in parquet_tables(run):
        frame = spark.read.format("penstock").option("table", table.name).load(run.uri)
        assert comparable(frame.toArrow().to_pylist()) == rows_of_files(run, table.name), table.name


def test_every_column_that_a_stage_may_add_has_a_type_of_delta(run: Store) -> None:
    """Also those of stages that the recipe leaves out."""
    fields = {field.name: field for stage in all_stages() for field in getattr(stage, "columns", ())}
    fields |= {field.name: field for table in TABLES.values() if table.schema is not None for field in table.schema}
    assert "date_published" in fields
    (table,) = parquet_tables(run, ["clean"])
    schema = table.schema
    for field in fields.values():
        schema = schema if field.name in schema.names else schema.append(field)
    shutil.rmtree(run.path("clean/_delta_log"), ignore_errors=True)
    register_delta(type(table)(**vars(table) | {"schema": schema}))
    assert main(["register", run.uri, "--delta", "--table", "clean"]) == 0
