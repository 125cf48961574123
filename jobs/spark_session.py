"""The Spark session and the environment of worker processes.

Spark runs in local mode on all cores, unless the recipe or spark-submit sets another master.
"""

import os
import sys

from pydantic import Field
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from schemas.config import Section, execution


class SparkConfig(Section):
    """The settings of Spark; none of them changes the data that a run writes."""

    master: str | None = execution(None)
    """Spark master; None: that of spark-submit, or else local mode on all cores, with retries of failed tasks."""
    driver_memory: str = execution("2g")
    """Heap size of the driver JVM, which does all shuffling in local mode; a JVM that already runs ignores it."""
    partitions: int | None = execution(None, ge=1)
    """Number of Spark partitions when tables are processed part by part; None: one for each part."""
    shuffle_partitions: int | None = execution(None, ge=1)
    """Number of partitions of Spark's own shuffles; None: twice the number of cores."""
    settings: dict[str, str] = Field(default_factory=dict, json_schema_extra={"role": "execution"})
    """Further Spark properties by their names in Spark, such as `spark.executor.memory`."""


LOCAL_MASTER = "local[*,4]"
MALLOC = {"MALLOC_TRIM_THRESHOLD_": 1 << 28, "MALLOC_MMAP_THRESHOLD_": 1 << 28, "MALLOC_TOP_PAD_": 1 << 26}
"""glibc malloc settings of the Python workers [bytes]: freed memory of a parsed page stays in the process instead of
returning to the kernel. That saved a quarter of the CPU time of parsing and extraction (2.6 to 1.9 ms a page). A small
model trained 1.4 times as fast, because its logits no longer fault in new pages at every step."""

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of child processes that are started by `-m`: without it, Python searches the current folder first, and a
`train.py` or `pipeline.py` of the user's there would hide ours."""

STORAGE_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
"""Environment variables with the location of object stores, which pyarrow reads; the driver passes them to executors.
Credentials are not passed, because Spark shows its settings, so executors need their own."""


def worker_environment() -> dict[str, str]:
    """Return the environment of this process with the settings MALLOC and SAFE_PATH added, for child processes."""
    return os.environ | SAFE_PATH | {key: str(value) for key, value in MALLOC.items()}


def open_session(config: SparkConfig, name: str = "penstock") -> SparkSession:
    """Return the Spark session of this process, and start it if there is none."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # only the running JVM knows the settings of spark-submit
        SparkContext._ensure_initialized()
    conf = SparkConf()
    master = config.master or conf.get("spark.master") or LOCAL_MASTER
    cores = os.cpu_count() or 1
    builder = (
        SparkSession.builder.appName(name)
        .master(master)
        .config("spark.driver.memory", conf.get("spark.driver.memory") or config.driver_memory)
        .config("spark.sql.shuffle.partitions", str(config.shuffle_partitions or 2 * cores))
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "2048")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.ui.enabled", conf.get("spark.ui.enabled") or "false")
        .config("spark.log.level", conf.get("spark.log.level") or "ERROR")
    )
    if master.startswith("local"):
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    environment = (
        SAFE_PATH
        | {key: str(value) for key, value in MALLOC.items()}
        | {key: os.environ[key] for key in STORAGE_VARIABLES if key in os.environ}
    )
    for key, value in (
        {f"spark.executorEnv.{key}": value for key, value in environment.items()} | config.settings
    ).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
