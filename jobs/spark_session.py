"""The Spark session, the process of its JVM, and the environment of worker processes.

Spark runs in local mode on all cores, unless the recipe or spark-submit sets another master. The messages of the JVM go
to a file, which an error names. An interrupt ends the JVM at once: a session that waits for a job cannot be stopped.
"""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from schemas.config import Section, execution
from schemas.errors import ConfigError, PenstockError


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
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Environment variable that spark-submit sets: the port of the JVM that has started this process."""
SHUTDOWN_SECONDS = 20
"""Time for the JVM to remove its temporary files after SIGTERM; then it is killed."""
SHOWN_LINES = 3
"""Number of lines of the JVM's messages that an error quotes."""
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


@contextmanager
def spark_session(config: SparkConfig, name: str = "penstock", verbose: bool = False) -> Iterator[SparkSession]:
    """Open a Spark session for a block, then stop it and end its JVM.

    `verbose`: print the messages of Spark; else they go to a file that is kept if the block raises an unknown error.
    Raises ConfigError if Spark does not start, and PenstockError if its JVM has ended before the block.
    """
    is_ours = SparkContext._gateway is None and SUBMITTED not in os.environ
    folder = Path(tempfile.mkdtemp(prefix="penstock-spark-"))
    log = None if verbose or not is_ours else folder / "spark.log"
    config = config.model_copy(update={"settings": {"spark.log.level": "WARN", **config.settings}})
    is_kept = False
    previous = signal.getsignal(signal.SIGINT)
    try:
        spark = open_session(config, name, log)
        # The handler that PySpark installs uses the connection to the JVM while this thread reads from it, and fails.
        _handle_interrupts(signal.default_int_handler)
        yield spark
        spark.stop()
    except KeyboardInterrupt:
        _handle_interrupts(signal.SIG_IGN)  # one interrupt is enough: the rest takes seconds
        raise
    except PenstockError:
        raise
    except Exception as error:
        ended = _describe_end(log) if is_ours else None
        is_kept = log is not None and log.exists()
        if ended is not None:
            raise PenstockError(ended) from error
        if is_kept:
            error.add_note(f"The messages of Spark are in {log}.")
        raise
    finally:
        if is_ours:
            _end_java()
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        _handle_interrupts(previous)


def _handle_interrupts(handler: Any) -> None:
    """Set the handler of SIGINT, which only the main thread may do."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def open_session(config: SparkConfig, name: str = "penstock", log: Path | None = None) -> SparkSession:
    """Return the Spark session of this process, and start it if there is none.

    `log`: file for the messages of a JVM that is started; None = standard error. Raises ConfigError if Spark does not
    start.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if SUBMITTED in os.environ:  # only the running JVM knows the settings of spark-submit
        SparkContext._ensure_initialized()
    properties = _properties(config, SparkConf())
    builder = SparkSession.builder.appName(name)
    for key, value in properties.items():
        builder = builder.config(key, value)
    try:
        if log is not None:
            _start_java(properties, log)
        return builder.getOrCreate()
    except Exception as error:
        raise ConfigError(
            f"[spark]: expected settings that Spark starts with, got {_first_cause(error, log)}. Correct the section "
            "[spark] of the recipe, or install Java 17 or 21; --verbose prints all messages of Spark."
        ) from error


def _properties(config: SparkConfig, conf: SparkConf) -> dict[str, str]:
    """Return the properties of the session; `conf`: those that spark-submit sets."""
    master = config.master or conf.get("spark.master") or LOCAL_MASTER
    properties = {
        "spark.master": master,
        "spark.driver.memory": conf.get("spark.driver.memory") or config.driver_memory,
        "spark.sql.shuffle.partitions": str(config.shuffle_partitions or 2 * (os.cpu_count() or 1)),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2048",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.enabled": conf.get("spark.ui.enabled") or "false",
        "spark.log.level": conf.get("spark.log.level") or "ERROR",
    }
    if master.startswith("local"):
        properties |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    environment = SAFE_PATH | {key: str(value) for key, value in MALLOC.items()}
    environment |= {key: os.environ[key] for key in STORAGE_VARIABLES if key in os.environ}
    return properties | {f"spark.executorEnv.{key}": value for key, value in environment.items()} | config.settings


def _start_java(properties: dict[str, str], log: Path) -> None:
    """Start the JVM of this process, with its output in a file."""
    with log.open("wb") as stream:
        # Python workers are children of the JVM and write to the same file.
        output = {"stdout": stream, "stderr": stream}
        launch: Any = launch_gateway
        gateway = launch(SparkConf().setAll(list(properties.items())), output)
    SparkContext._ensure_initialized(gateway=gateway)


def _end_java() -> None:
    """End the JVM that this process has started, if it runs; a later session starts another one."""
    # From here on the JVM answers no request, not even those by which Python frees Java objects.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    context: Any = SparkContext._active_spark_context
    gateway: Any = SparkContext._gateway
    if context is not None:
        context._accumulatorServer.shutdown()  # before its connection closes, which it would report as an error
        context._jsc = context._accumulatorServer = None
    if gateway is not None:
        gateway.proc.terminate()
        try:
            gateway.proc.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            gateway.proc.kill()
            gateway.proc.wait()
    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def _describe_end(log: Path | None) -> str | None:
    """Return a message that the JVM of this process has ended; None if it runs."""
    gateway: Any = SparkContext._gateway
    code = gateway.proc.poll() if gateway is not None else None
    if code is None:
        return None
    end = f"exit code {code}" if code > 0 else f"signal {-code}"
    lines = f": {_last_lines(log)}" if log is not None and _last_lines(log) else ""
    where = f"; its messages are in {log}" if log is not None else ""
    return (
        f"spark: expected a Java process that runs until the last step, got one that ended with {end}{lines}. Raise "
        f"spark.driver_memory if memory was short, and run the same command again{where}."
    )


def _first_cause(error: Exception, log: Path | None) -> str:
    """Return the reason in an error of PySpark: the message of the Java exception, or the last lines of the JVM."""
    if SparkContext._gateway is None and log is not None and log.exists() and _last_lines(log):
        return _last_lines(log)
    java = re.search(r"^: ?(?:[\w.$]+: )?(.+)$", str(error), re.MULTILINE)
    return (java[1] if java else str(error).partition("\n")[0]).rstrip(".")


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " ".join([line.strip() for line in lines if line.strip()][-SHOWN_LINES:]).rstrip(".")
