"""The Spark session, the process of its JVM, and the environment of worker processes.

Spark runs in local mode on all cores, unless the recipe or spark-submit sets another master. The messages of the JVM go
to a file, which an error names. An interrupt ends the JVM at once: a session that waits for a job cannot be stopped.
"""

import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pyspark
from py4j.protocol import Py4JError
from pydantic import Field, field_validator
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from jobs.scratch import Scratch, followed, open_scratch
from pipeline.engine.spark import error_of_worker
from schemas.config import Section, execution
from schemas.errors import ConfigError, PenstockError
from schemas.logs import logs_json
from schemas.secrets import HOW_TO_PASS, secret_in, secret_of


class SparkConfig(Section):
    """The settings of Spark; none of them changes the data that a run writes."""

    master: str | None = execution(None)
    """Spark master; None: that of spark-submit, or else local mode on all cores, with retries of failed tasks."""
    driver_memory: str = execution("2g")
    """Heap size of the driver JVM, which does all shuffling in local mode; a JVM that already runs ignores it."""
    partitions: int | None = execution(None, ge=1)
    """Maximum number of Spark tasks when tables are processed part by part; None: eight for each core."""
    shuffle_partitions: int | None = execution(None, ge=1)
    """Number of partitions of Spark's own shuffles; None: that of spark-submit, or else in local mode twice the number
    of cores, and on a cluster Spark's own."""
    settings: dict[str, str] = Field(default_factory=dict, json_schema_extra={"role": "execution"})
    """Further Spark properties by their names in Spark, such as `spark.executor.memory`; none may be a key or password,
    since the run folder stores them."""

    @field_validator("settings")
    @classmethod
    def _no_secrets(cls, settings: dict[str, str]) -> dict[str, str]:
        if found := [name for name, value in settings.items() if secret_of(name, value)]:
            raise ValueError(f"expected settings without secrets, got {', '.join(found)}. {HOW_TO_PASS}")
        return settings


HARMLESS = {
    "master": r"local(\[[\d*, ]+\])?",
    "driver_memory": r"\d+[kmgtKMGT]?[bB]?",
    "partitions": r"\d+",
    "shuffle_partitions": r"\d+",
}
"""Patterns of the settings, by name, with which Spark starts no program of a stranger and sends data nowhere."""
LOCAL_MASTER = "local[*,4]"
LOOPBACK = "127.0.0.1"
FULL_DISK = re.compile(r"No space left on device|Disk quota exceeded")
"""Part of an error of Java or of a worker whose disk is full, such as that of the shuffle."""
ENDED_WORKERS = re.compile(r"failed (\d+) times, most recent failure: [^\n]*Python worker exited unexpectedly")
"""Part of the error of Spark for a task whose Python worker has ended in each attempt."""
LOCAL_DIRS = "SPARK_LOCAL_DIRS"
"""Environment variable with the folders for temporary files, which replaces the property `spark.local.dir`."""
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
MIN_VERSION = (4, 1)
"""Oldest Spark that sends rows to the partition of their part (`DataFrame.repartitionById`)."""
SMALL_INPUTS = 1 << 26
"""Size of the inputs of a run, by `Prepared.jvm_bytes`, up to which the JVM has no optimizing compiler [bytes]."""
FIRST_COMPILER = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"
"""Options of a JVM without the optimizing compiler, which takes half of the JVM's CPU time, also in runs of minutes: 20
of 38 s for 3,940 pages of archives, 31 of 59 s for 15,760. With 240,000 records of JSON lines in 40 MB, time is equal
with and without it. The code cache is made as large as it is with both compilers."""
ARCHIVES = "~/.cache/penstock/java"
"""Folder of archives of the classes of Spark, with which a JVM starts in less time; see `class_archive.py`."""
WRITES_ARCHIVE = "-XX:ArchiveClassesAtExit="
"""Option of a JVM that writes an archive when it ends."""
SHARING_OPTIONS = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
"""Options of a JVM that leaves out an archive that does not fit it, and prints nothing about it."""
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Environment variable that spark-submit sets: the port of the JVM that has started this process."""
SHUTDOWN_SECONDS = 60
"""Time for the JVM to remove its temporary files after SIGTERM, and to write its archive; then it is killed."""
EXIT_SECONDS = 2
"""Time in which a JVM that has closed its connections ends, if it ends."""
HARMLESS_LINE = re.compile(
    r"WARNING: |NOTE: |Picked up |[^A-Z]* WARN |Using Spark's |Setting |To adjust |at |OpenJDK .* warning: "
)
"""Pattern of a line that the JVM also writes when it starts without an error, or of a stack trace."""
JAVA_CLASS = re.compile(r'(?:Exception in thread "[^"]*" )?(?:[\w.$]+\.\w*(?:Exception|Error): |Error: )?')
"""Pattern of what precedes the message of an error of the JVM."""
MALLOC = {"MALLOC_TRIM_THRESHOLD_": 1 << 28, "MALLOC_MMAP_THRESHOLD_": 1 << 28, "MALLOC_TOP_PAD_": 1 << 26}
"""glibc malloc settings of the Python workers [bytes]: freed memory of a parsed page stays in the process instead of
returning to the kernel. That saved a quarter of the CPU time of parsing and extraction (2.6 to 1.9 ms a page). A small
model trained 1.4 times as fast, because its logits no longer fault in new pages at every step."""

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of child processes that are started by `-m`: without it, Python searches the current folder first, and a
`train.py` or `pipeline.py` of the user's there would hide ours."""

WORKERS = "jobs.workers"
"""Module that forks the Python workers in local mode on Linux. Elsewhere Spark's own does: forks of a process with
threads are unsafe on macOS, and the executors of a cluster may get the package only after they start."""
REDACTING_WORKERS = "jobs.workers.redacting"
"""The same for runs that replace personal data."""

STORAGE_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
"""Environment variables with the location of object stores, which pyarrow reads; the driver passes them to executors.
Credentials are not passed, because Spark shows its settings, so executors need their own."""


def harmless_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the section [spark] of a foreign run that are safe to use: numbers, and a local master."""
    return {
        name: value
        for name, value in stored.items()
        if name in HARMLESS and isinstance(value, str | int) and re.fullmatch(HARMLESS[name], str(value))
    }


def worker_environment() -> dict[str, str]:
    """Return the environment of this process with the settings MALLOC and SAFE_PATH added, for child processes."""
    return os.environ | SAFE_PATH | {key: str(value) for key, value in MALLOC.items()}


@contextmanager
def spark_session(
    config: SparkConfig,
    name: str = "penstock",
    verbose: bool = False,
    input_bytes: int | None = None,
    workers: str = WORKERS,
) -> Iterator[SparkSession]:
    """Open a Spark session for a block, then stop it and end its JVM. A running session is used and stays open.

    `verbose`: print the messages of Spark; else they go to a file that is kept if the block raises an unknown error.
    `input_bytes`: size of the inputs of the run, if known; in local mode a small one takes less of the JVM's time.
    `workers`: the module that forks the Python workers in local mode.
    Raises ConfigError if Spark is too old or does not start, PenstockError if its JVM has ended, and KeyboardInterrupt
    after SIGINT.
    """
    check_version(pyspark.__version__)
    if SparkContext._active_spark_context is not None:  # as in a notebook of somebody who uses Spark
        yield open_session(config, name)
        return
    is_ours = SparkContext._gateway is None and SUBMITTED not in os.environ
    config = config.model_copy(update={"settings": {"spark.log.level": "WARN", **config.settings}})
    with ExitStack() as held:
        interrupted = held.enter_context(_interrupts())
        scratch = held.enter_context(open_scratch(_temporary_folders(config))) if is_ours else None
        log = None if scratch is None or (verbose and not logs_json()) else scratch.log
        if log is not None and logs_json():
            held.enter_context(followed(log, verbose))
        try:
            if scratch is not None:
                is_small = input_bytes is not None and input_bytes <= SMALL_INPUTS
                _start_java(config, scratch, log, (FIRST_COMPILER if is_small else "", workers))
            interrupted.check()
            spark = open_session(config, name, workers)
            held.enter_context(_quiet_loss(spark))
            interrupted.install()  # the handler that PySpark has installed uses the connection that this thread reads
            yield spark
            interrupted.check()
            spark.stop()
        except Exception as error:
            interrupted.check()
            if isinstance(error, PenstockError):
                raise
            # Spark asks its JVM for the text of its own errors, and the JVM ends before they are printed.
            text = str(error)
            if (known := error_of_worker(error) or _full_disk(text, scratch) or ended_workers(text)) is not None:
                raise known from error
            if scratch is not None and log is not None:
                scratch.keep_log()
            if is_ours and (end := _describe_end(log)) is not None:
                raise PenstockError(end) from error
            if isinstance(error, (PySparkException, Py4JError)):
                raise _noted(RuntimeError(text), log) from None
            _noted(error, log)
            raise
        finally:
            interrupted.ignore()
            if is_ours:
                _end_java()


@contextmanager
def _quiet_loss(spark: SparkSession) -> Iterator[None]:
    """Print no tracebacks in a block when the JVM ends: an error with one sentence follows."""
    root = logging.getLogger()
    server: Any = getattr(spark.sparkContext, "_accumulatorServer", None)

    def is_other(record: logging.LogRecord) -> bool:
        return "while sending command" not in record.getMessage()  # of py4j, to the root logger

    def report(*request: Any) -> None:
        if not isinstance(sys.exception(), (EOFError, ConnectionError)):
            type(server).handle_error(server, *request)

    root.addFilter(is_other)
    if server is not None:
        server.handle_error = report
    try:
        yield
    finally:
        root.removeFilter(is_other)


class _Interrupts:
    """The handler of SIGINT while a session is open.

    An interrupt raises KeyboardInterrupt and ends the JVM. Without the latter the block might not end: Python discards
    an exception that is raised while an object is freed, and PySpark raises others when it cleans up.
    """

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        """Handle SIGINT from now on."""
        _set_handler(self._interrupt)

    def ignore(self) -> None:
        """Ignore SIGINT from now on: the end of the JVM takes seconds, in which another interrupt is of no use."""
        _set_handler(signal.SIG_IGN)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was an interrupt."""
        if self.is_set:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        logging.disable(logging.CRITICAL)  # py4j logs a traceback of an interrupt, and of requests without an answer
        context, gateway = _context_and_gateway()
        if gateway is None and SUBMITTED not in os.environ:
            return  # the JVM is being started; when it runs, it can be ended
        if context is not None and getattr(context, "_accumulatorServer", None) is not None:
            context._accumulatorServer.handle_error = lambda *_: None  # its connection is closed by the JVM's end
        if gateway is not None and gateway.proc is not None:
            gateway.proc.terminate()
        raise KeyboardInterrupt


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Handle SIGINT in a block, and restore the handler, the logging and the hook for discarded exceptions after it."""
    interrupts, handler, hook = _Interrupts(), signal.getsignal(signal.SIGINT), sys.unraisablehook

    def report(discarded: Any) -> None:
        if not issubclass(discarded.exc_type, KeyboardInterrupt):  # `check` raises it again
            hook(discarded)

    sys.unraisablehook = report
    interrupts.install()
    try:
        yield interrupts
    finally:
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)
        _set_handler(handler)


def _set_handler(handler: Any) -> None:
    """Set the handler of SIGINT, which only the main thread may do."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _context_and_gateway() -> tuple[Any, Any]:
    """Return the active SparkContext and the connection to the JVM of this process; None for what there is not."""
    return SparkContext._active_spark_context, SparkContext._gateway


def check_version(installed: str) -> None:
    """Raise ConfigError if this version of Spark lacks what the steps need."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if numbers < MIN_VERSION:
        raise ConfigError(
            f"pyspark: expected version {'.'.join(map(str, MIN_VERSION))} or newer, got {installed}. Install a newer "
            "one, on the cluster too."
        )


def open_session(config: SparkConfig, name: str = "penstock", workers: str = WORKERS) -> SparkSession:
    """Return the Spark session of this process, and start it if there is none.

    `workers`: the module that forks the Python workers of a new session in local mode.

    Raises ConfigError if Spark does not start.
    """
    _set_python()
    if SUBMITTED in os.environ:  # only the running JVM knows the settings of spark-submit
        SparkContext._ensure_initialized()
    builder = SparkSession.builder.appName(name)
    for key, value in _properties(config, SparkConf(), workers).items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:
        # The text of a Java exception has the line `: class: message`.
        java = re.search(r"^: ?(?:[\w.$]+: )?(.+)$", str(error), re.MULTILINE)
        raise _not_started(java[1] if java else str(error).partition("\n")[0]) from error


def _temporary_folders(config: SparkConfig) -> list[Path]:
    """Return the folders for temporary files: those of `spark.local.dir` or SPARK_LOCAL_DIRS, or that of the system."""
    named = os.environ.get(LOCAL_DIRS) or config.settings.get("spark.local.dir") or _default_property("spark.local.dir")
    folders = [Path(name.strip()) for name in (named or tempfile.gettempdir()).split(",") if name.strip()]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"spark.local.dir {folder}: expected a folder that can be written, got an error: {error.strerror}. "
                "Name another folder."
            ) from error
    return folders


def archive_file() -> Path | None:
    """Return the place of the archive of classes for this Java and Spark; None = there is no Java.

    The file need not exist.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin") if home else None)
    if java is None:
        return None
    parts = [os.path.realpath(java), os.path.realpath(os.path.dirname(pyspark.__file__)), pyspark.__version__]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return Path(ARCHIVES).expanduser() / f"spark-{pyspark.__version__}-{digest}.jsa"


def _archive_options(options: str) -> str:
    """Return the options of a JVM that uses the archive of classes; empty if there is none or `options` name one."""
    file = archive_file()
    if file is None or not file.is_file() or "SharedArchiveFile" in options or WRITES_ARCHIVE in options:
        return ""
    return f'"-XX:SharedArchiveFile={file}" {SHARING_OPTIONS}'


def _default_property(name: str) -> str | None:
    """Return a property of `spark-defaults.conf`, which only the JVM reads; None if it is not set there."""
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(_find_spark_home(), "conf")
    try:
        text = Path(folder, "spark-defaults.conf").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.findall(rf"^[ \t]*{re.escape(name)}(?:[ \t]*[=:][ \t]*|[ \t]+)(.*\S)", text, re.MULTILINE)
    return found[-1] if found else None


def _local_properties(config: SparkConfig, scratch: Scratch, options: str) -> dict[str, str]:
    """Return the properties of a JVM in local mode: its options, and private folders for its temporary files.

    `options`: options of the JVM, which those of the recipe or of `spark-defaults.conf` may replace.
    """
    folders = scratch.local_folders
    java = config.settings.get(JAVA_OPTIONS) or _default_property(JAVA_OPTIONS) or ""
    every = (_archive_options(java), options, java, f'"-Djava.io.tmpdir={folders[0]}"')
    return {"spark.local.dir": ",".join(map(str, folders)), JAVA_OPTIONS: " ".join(filter(None, every))}


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables in a block, for a process that is started there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start_java(config: SparkConfig, scratch: Scratch, log: Path | None, local: tuple[str, str]) -> None:
    """Start the JVM of this process. Its output, and that of the Python workers, goes to a file (None: standard error).

    `local`: options of the JVM in local mode, and the module that forks the workers. Raises ConfigError if it does not
    start.
    """
    options, workers = local
    _set_python()
    launch: Any = launch_gateway
    properties, environment = _properties(config, SparkConf(), workers), {}
    if is_local(properties["spark.master"]):
        properties |= _local_properties(config, scratch, options)
        # Without the first, Spark's own page listens on all interfaces; the second would replace the property.
        environment = {"SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP") or LOOPBACK}
        if LOCAL_DIRS in os.environ:
            environment[LOCAL_DIRS] = properties["spark.local.dir"]
    given = SparkConf().setAll(list(properties.items()))
    with ExitStack() as files:
        stream = None if log is None else files.enter_context(log.open("wb"))
        files.enter_context(_environment(environment))
        output = {"stdout": stream or sys.stderr, "stderr": stream or sys.stderr}
        try:
            gateway = launch(given, {**output, "pass_fds": scratch.locks})
        except Exception as error:
            reason = "" if log is None else _first_error(log)
            raise _not_started(reason or str(error).partition("\n")[0]) from error
    SparkContext._ensure_initialized(gateway=gateway)


def _not_started(reason: str) -> ConfigError:
    return ConfigError(
        f"[spark]: expected settings that Spark starts with, got {reason.rstrip('.')}. Correct the section [spark], or "
        "install Java 17 or 21; --verbose prints all messages of Spark."
    )


def _set_python() -> None:
    """Set the Python of the workers to that of this process."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def is_local(master: str) -> bool:
    """Return True if a Spark master is this process and its threads, such as `local[2,4]`."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def _properties(config: SparkConfig, conf: SparkConf, workers: str) -> dict[str, str]:
    """Return the properties of the session. `conf`: those that spark-submit sets. `workers`: see `spark_session`."""
    master = config.master or conf.get("spark.master") or LOCAL_MASTER
    properties = {
        "spark.master": master,
        "spark.driver.memory": conf.get("spark.driver.memory") or config.driver_memory,
        "spark.sql.session.timeZone": "UTC",
    }
    defaults = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2048",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    if is_local(master):
        defaults |= {"spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)), "spark.ui.enabled": "false"}
    properties |= {name: conf.get(name) or value for name, value in defaults.items()}
    if config.shuffle_partitions is not None:
        properties["spark.sql.shuffle.partitions"] = str(config.shuffle_partitions)
    if is_local(master):
        # The JVM makes the secret itself, so it is on no command line; without it, another user of this machine could
        # ask its ports for blocks of data.
        properties |= {
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
            "spark.authenticate": "true",
        }
        if sys.platform == "linux" and SUBMITTED not in os.environ:
            properties["spark.python.daemon.module"] = workers
    environment = SAFE_PATH | {key: str(value) for key, value in MALLOC.items()}
    environment |= {key: os.environ[key] for key in STORAGE_VARIABLES if key in os.environ}
    for key in STORAGE_VARIABLES:
        if what := secret_in(environment.get(key, "")):
            raise ConfigError(
                f"{key}: expected the place of an object store, got {what}. Put the secret into AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY."
            )
    return properties | {f"spark.executorEnv.{key}": value for key, value in environment.items()} | config.settings


def _end_java() -> None:
    """End the JVM that this process has started, if it runs; a later session starts another one."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # the requests by which Python frees Java objects fail now
    context, gateway = _context_and_gateway()
    if context is not None and getattr(context, "_accumulatorServer", None) is not None:
        context._accumulatorServer.shutdown()
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
    _, gateway = _context_and_gateway()
    if gateway is None:
        return None
    try:
        code = gateway.proc.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    end = f"exit code {code}" if code > 0 else f"signal {-code}"
    where = "" if log is None else f"; its messages are in {log}"
    return (
        f"spark: expected a Java process that runs until the last step, got one that ended with {end}. Raise "
        f"spark.driver_memory if memory was short, and run the same command again{where}."
    )


def _noted(error: Exception, log: Path | None) -> Exception:
    """Return an error with a note on where the messages of Spark are."""
    if log is not None:
        error.add_note(f"The messages of Spark are in {log}.")
    return error


def _full_disk(text: str, scratch: Scratch | None) -> PenstockError | None:
    """Return the error of a full disk, by the text of another one; None = the text is about something else.

    `scratch`: the private folders of the session; None = others have started Spark.
    """
    if not FULL_DISK.search(text):
        return None
    folders = "spark.local.dir" if scratch is None else ", ".join(str(folder.parent) for folder in scratch.folders)
    return PenstockError(
        f"spark: expected free disk space for temporary files in {folders} and for the run, got a full disk. Free "
        "space there, or set TMPDIR to a folder on another disk, then run the same command again."
    )


def ended_workers(text: str) -> PenstockError | None:
    """Return the error for a task whose workers other processes have ended, if `text` is Spark's error of one."""
    if (match := ENDED_WORKERS.search(text)) is None:
        return None
    return PenstockError(
        f"spark: expected Python workers that finish a task, got {match[1]} that have ended in it, such as by the "
        "system when memory is short. Run the same command again, which resumes; if they end again, use fewer cores, "
        "such as --set 'spark.master=local[1,4]'."
    )


def _first_error(log: Path) -> str:
    """Return the first line of a log of the JVM that a start without an error does not write; empty if none is left."""
    lines = (line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines())
    unusual = (line for line in lines if line and not HARMLESS_LINE.match(line))
    return JAVA_CLASS.sub("", next(unusual, ""), count=1)
