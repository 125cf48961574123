"""`spark.read.format("penstock")`: the rows of a table's files, by Spark, with its columns, filters and errors."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    In,
    IsNotNull,
    IsNull,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

import penstock
from pipeline.register.spark_reader import _condition_of
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.versions import attach_run
from tests.support.registered import TABLES, comparable, rows_of_files
from tests.support.report_run import make_run
from tests.support.tiny_dataset import flip_byte

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The synthetic run of 53 records in two parts."""
    return make_run(tmp_path_factory.mktemp("spark") / "run")


@pytest.fixture(scope="module")
def registered(spark: SparkSession) -> SparkSession:
    """The session of the tests with the data source."""
    penstock.register_source(spark)
    return spark


def read(spark: SparkSession, run: Store, table: str, schema: str | None = None) -> DataFrame:
    """A table of a run by the data source."""
    reader = spark.read.format("penstock").option("table", table)
    return (reader if schema is None else reader.schema(schema)).load(run.uri)


def rows_of(frame: DataFrame) -> list[str]:
    """The rows of a frame as those of pyarrow, sorted."""
    return comparable(frame.toArrow().to_pylist())


def test_every_table_has_the_rows_of_its_files(registered: SparkSession, run: Store) -> None:
    for table in TABLES:
        assert rows_of(read(registered, run, table)) == rows_of_files(run, table), table


def test_clean_is_the_default_with_a_partition_for_each_file(registered: SparkSession, run: Store) -> None:
    frame = registered.read.format("penstock").load(run.uri)
    assert frame.columns == read(registered, run, "clean").columns
    assert frame.rdd.getNumPartitions() == len(open_table(run, "clean")[1].content.files) == 2
    kinds = dict(frame.dtypes)
    assert [kinds[name] for name in ("doc_id", "date", "weight")] == ["binary", "timestamp", "int"]
    assert kinds["pii_counts"] == "array<struct<name:string,value:int>>"


def test_files_that_no_manifest_names_are_not_read(registered: SparkSession, tmp_path: Path) -> None:
    own = make_run(tmp_path / "run", until="clean")
    folder, manifest = open_table(own, "clean")
    named = Path(folder.path(next(iter(manifest.paths.values()))))
    shutil.copy(named, named.with_name("part-00009-killed.parquet"))
    assert rows_of(read(registered, own, "clean")) == rows_of_files(own, "clean")


def test_a_schema_chooses_the_columns(registered: SparkSession, run: Store) -> None:
    frame = read(registered, run, "documents", "url string, num_chars bigint")
    assert frame.columns == ["url", "num_chars"]
    whole = read(registered, run, "documents").select("url", "num_chars")
    assert rows_of(frame) == rows_of(whole)


@pytest.mark.parametrize(
    "condition",
    [
        "drop_rule = 'gopher_short_doc'",
        "not (drop_rule = 'gopher_short_doc')",
        "drop_rule is null and url like 'http%'",
        "drop_rule in ('near_duplicate', 'exact_duplicate')",
        "drop_rule not in ('near_duplicate', 'exact_duplicate')",
        "num_chars > 900 and num_chars <= 1000",
        "language_score > 0.5",
        "contains(url, '/') and endswith(url, '1')",
        "drop_rule <=> null",
        "contamination is not null",
    ],
)
def test_filters_keep_the_rows_that_spark_keeps(registered: SparkSession, run: Store, condition: str) -> None:
    stored = [str(path) for path in Path(open_table(run, "documents")[0].root).glob("*.parquet")]
    expected = registered.read.parquet(*stored).where(condition)
    assert rows_of(read(registered, run, "documents").where(condition)) == rows_of(expected)


ROWS = pa.table(
    {
        "text": pa.array(["ab", "b", None], pa.string()),
        "number": pa.array([1, 2, None], pa.int32()),
        "ratio": pa.array([1.0, float("nan"), None], pa.float64()),
    }
)


@pytest.mark.parametrize(
    ("spark_filter", "expected"),
    [
        (EqualTo(("text",), "b"), [1]),
        (Not(EqualTo(("text",), "b")), [0]),
        (GreaterThan(("number",), 1), [1]),
        (LessThanOrEqual(("number",), 1), [0]),
        (In(("number",), (1, 3)), [0]),
        (IsNull(("ratio",)), [2]),
        (IsNotNull(("text",)), [0, 1]),
        (StringStartsWith(("text",), "a"), [0]),
        (StringEndsWith(("text",), "b"), [0, 1]),
        (StringContains(("text",), "a"), [0]),
        (EqualTo(("ratio",), 1.0), None),
        (EqualNullSafe(("text",), "b"), None),
        (Not(In(("number",), (1,))), None),
        (In(("text",), ("a", None)), None),
        (EqualTo(("text", "inner"), "b"), None),
        (EqualTo(("absent",), "b"), None),
        (EqualTo(("number",), "1"), None),
    ],
)
def test_conditions(spark_filter: Filter, expected: list[int] | None) -> None:
    condition = _condition_of(spark_filter, ROWS.schema)
    assert (condition is None) == (expected is None)
    if expected is not None:
        numbered = ROWS.append_column("row", pa.array(range(3)))
        assert numbered.filter(condition).column("row").to_pylist() == expected


def test_a_run_on_the_tables_of_another(registered: SparkSession, run: Store, tmp_path: Path) -> None:
    other = Store(str(tmp_path / "other"))
    attach_run(other, run)
    assert rows_of(read(registered, other, "verdicts")) == rows_of_files(run, "verdicts")


def test_a_table_joins_another(registered: SparkSession, run: Store) -> None:
    clean, verdicts = read(registered, run, "clean"), read(registered, run, "verdicts").select("doc_id")
    assert clean.join(verdicts, "doc_id").count() == clean.count() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "none"}, "expected a run folder, got no such folder"),
        ({"table": "cleen"}, "got 'cleen' (did you mean 'clean'?)"),
        ({"table": "tokens"}, "expected a table whose files are Parquet, got 'tokens'"),
        ({"columns": "url"}, "expected the option table, got columns. Remove the rest."),
    ],
)
def test_errors_come_before_any_task(
    registered: SparkSession, run: Store, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = str(tmp_path / options.pop("path")) if "path" in options else run.uri
    with pytest.raises(AnalysisException) as raised:
        registered.read.format("penstock").options(**options).load(path)
    assert message in str(raised.value)


def test_a_damaged_file_is_an_error(registered: SparkSession, tmp_path: Path) -> None:
    own = make_run(tmp_path / "run", until="clean")
    frame = read(registered, own, "clean")
    folder, manifest = open_table(own, "clean")
    flip_byte(folder.path(manifest.paths_of()[1]))
    with pytest.raises(PySparkException, match=r"expected SHA-256 .* as the manifest names it, got SHA-256"):
        frame.select("url").collect()


def test_an_empty_result_has_its_columns(registered: SparkSession, run: Store) -> None:
    frame = read(registered, run, "clean").where("url = 'none'").select("url")
    assert frame.collect() == []
    assert Row(url=1).__fields__ == frame.columns
