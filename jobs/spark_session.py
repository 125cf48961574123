"""The Spark session: local mode on all cores by default, or whatever spark-submit has set."""

import os
import sys

from pydantic import Field
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from schemas.config import Section, execution


class SparkConfig(Section):
    """How Spark runs; nothing here changes what a run writes."""

    master: str | None = execution(None)
    """Spark master; None: what spark-submit set, else local mode on all cores, which retries a failed task."""
    driver_memory: str = execution("2g")
    """Heap of the driver JVM, which in local mode does all the shuffling; ignored by a running JVM."""
    partitions: int | None = execution(None, ge=1)
    """Spark partitions of the part-wise passes; None: one for each part."""
    shuffle_partitions: int | None = execution(None, ge=1)
    """Partitions of Spark's own shuffles; None: twice the cores."""
    settings: dict[str, str] = Field(default_factory=dict, json_schema_extra={"role": "execution"})
    """Further Spark settings by their own names."""


LOCAL_MASTER = "local[*,4]"
MALLOC = {"MALLOC_TRIM_THRESHOLD_": 1 << 28, "MALLOC_MMAP_THRESHOLD_": 1 << 28, "MALLOC_TOP_PAD_": 1 << 26}
"""glibc settings of the Python workers [bytes]: a parsed page then gives its memory to the pool, not to the kernel,
which saved a quarter of the CPU time of parsing and extraction (2.6 to 1.9 ms a page); a small model trained 1.4 times
as fast, its logits no longer fresh pages at every step."""

STORAGE_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
"""Where object stores are, as pyarrow reads it from the environment: executors hear it from the driver. Credentials
they have themselves, for Spark shows its settings."""


def worker_environment() -> dict[str, str]:
    """This process's environment with the memory settings of workers, for the processes it starts itself."""
    return os.environ | {key: str(value) for key, value in MALLOC.items()}


def open_session(config: SparkConfig, name: str = "penstock") -> SparkSession:
    """The session for this process, started if there is none; quiet, with Arrow batches bounded in rows."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # only a JVM that runs already knows what spark-submit was told
        SparkContext._ensure_initialized()
    given = SparkConf()
    master = config.master or given.get("spark.master") or LOCAL_MASTER
    cores = os.cpu_count() or 1
    builder = (
        SparkSession.builder.appName(name)
        .master(master)
        .config("spark.driver.memory", given.get("spark.driver.memory") or config.driver_memory)
        .config("spark.sql.shuffle.partitions", str(config.shuffle_partitions or 2 * cores))
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "2048")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.ui.enabled", given.get("spark.ui.enabled") or "false")
        .config("spark.log.level", given.get("spark.log.level") or "ERROR")
    )
    if master.startswith("local"):
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    told = {key: str(value) for key, value in MALLOC.items()} | {
        key: os.environ[key] for key in STORAGE_VARIABLES if key in os.environ
    }
    for key, value in ({f"spark.executorEnv.{key}": value for key, value in told.items()} | config.settings).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
