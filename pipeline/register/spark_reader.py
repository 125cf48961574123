"""`spark.read.format("penstock").load(RUN)`: a table of a run as a data source of Spark, one partition for each file.

The files are those of the table's manifest, and each is compared with its digest before its rows are used.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from pipeline.register.tables import ParquetTable, parquet_tables
from schemas.errors import ConfigError
from schemas.older_tables import read_batches
from schemas.storage import CheckedPath, Store
from schemas.versions import open_run_to_read

FORMAT = "penstock"
DEFAULT_TABLE = "clean"
OPTIONS = ("path", "table")
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
"""Setting of Spark without which a data source in Python that takes filters is an error."""
ROWS_AT_ONCE = 1024
"""Number of rows of a batch; texts may have megabytes."""
COMPARISONS = {
    EqualTo: pc.equal,
    GreaterThan: pc.greater,
    GreaterThanOrEqual: pc.greater_equal,
    LessThan: pc.less,
    LessThanOrEqual: pc.less_equal,
}
MATCHES = {StringContains: pc.match_substring, StringEndsWith: pc.ends_with, StringStartsWith: pc.starts_with}


def register_source(spark: SparkSession) -> None:
    """Make `spark.read.format("penstock")` read tables of runs in this session.

    It also turns on `spark.sql.python.filterPushdown.enabled`, so that rows are filtered before they reach the JVM.
    """
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(PenstockSource)


@dataclass(frozen=True)
class FilePartition(InputPartition):
    """A file of a table: the folder of its version, and its path there with size and digest."""

    folder: Store
    path: CheckedPath


class PenstockSource(DataSource):
    """A table of a run: `load(RUN)`, with the option `table`, by default `clean`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of the table. Raises ConfigError or ContractError if there is no such run or table."""
        schema: StructType = from_arrow_schema(self._table().schema)
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the columns in `schema`: all, or those that `spark.read.schema(...)` names."""
        return _TableReader(self._table(), schema)

    def _table(self) -> ParquetTable:
        options = dict(self.options)
        if unknown := sorted(options.keys() - {*OPTIONS}):
            raise ConfigError(
                f"spark.read.format({FORMAT!r}): expected the option table, got {', '.join(unknown)}. Remove the rest."
            )
        if "path" not in options:
            raise ConfigError(f"spark.read.format({FORMAT!r}): expected load(RUN), got no run folder. Name one.")
        run = open_run_to_read(options["path"])
        return parquet_tables(run, [options.get("table", DEFAULT_TABLE)])[0]


class _TableReader(DataSourceReader):
    """Reads the files of a table. Rows that Spark's filters reject are left out where Arrow decides as Spark does."""

    def __init__(self, table: ParquetTable, schema: StructType):
        self._name = table.name
        self._partitions = [FilePartition(table.version, file.path) for file in table.files]
        self._schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self._condition: pc.Expression | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Keep what Arrow can compute of the filters, and return all of them: Spark applies each of them again."""
        found = [condition for each in filters if (condition := _condition_of(each, self._schema)) is not None]
        self._condition = reduce(and_, found) if found else None
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Return a partition for each file."""
        return self._partitions

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a FilePartition. Raises ContractError if it is not the file that the manifest names."""
        with partition.folder.open_input(partition.path) as stream:
            file = pq.ParquetFile(stream)
            for batch in read_batches(file, self._name, self._schema.names, ROWS_AT_ONCE):
                rows = batch if self._condition is None else batch.filter(self._condition)
                if rows.num_rows:
                    yield rows.cast(self._schema)


def _condition_of(spark_filter: Filter, schema: pa.Schema) -> pc.Expression | None:
    """Return a filter of Spark as a condition of Arrow that is met by the same rows; None if there may be others.

    Numbers with a decimal point are left to Spark, for which NaN equals itself.
    """
    if isinstance(spark_filter, Not):
        inner = None if isinstance(spark_filter.child, In) else _condition_of(spark_filter.child, schema)
        return None if inner is None else ~inner
    path: tuple[str, ...] = getattr(spark_filter, "attribute", ())
    if len(path) != 1 or path[0] not in schema.names:
        return None
    column, kind = pc.field(path[0]), schema.field(path[0]).type
    if isinstance(spark_filter, IsNull | IsNotNull):
        return column.is_null() if isinstance(spark_filter, IsNull) else column.is_valid()
    value: Any = getattr(spark_filter, "value", None)
    type_of_values = str if pa.types.is_string(kind) else int if pa.types.is_integer(kind) else None
    values = value if isinstance(spark_filter, In) else [value]
    if not values or any(type(each) is not type_of_values for each in values):
        return None
    if isinstance(spark_filter, In):
        return column.isin(pa.array(values, kind))
    if type(spark_filter) in COMPARISONS:
        return COMPARISONS[type(spark_filter)](column, pa.scalar(value, kind))
    return MATCHES[type(spark_filter)](column, pattern=value) if type(spark_filter) in MATCHES else None
