"""The log on standard error: lines of text, or JSON lines with the run, the step and the part that each is about.

Whatever is no result of a command is a record of the logger `penstock`. As text, a line is the message of its record.
With `--log-format json` a record is one JSON object on one line, whatever its message contains, and so are the warnings
of libraries. Fields that hold for all records of a block are set by `log_fields`, those of a record by `extra`.
"""

import argparse
import codecs
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, TextIO

from schemas.secrets import shown_uri, without_secrets
from schemas.text import PrintableStream, printable, printable_block, printable_json

TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
OPTION = "--log-format"
PREFIX = "penstock: "
"""Beginning of a line of text that would not otherwise show which program has printed it."""
ALWAYS: Mapping[str, None] = {"run": None, "step": None, "part": None}
"""Fields of every JSON line."""
OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"taskName"}
"""Attributes of a record that are not `extra`."""
_FIELDS: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default=MappingProxyType({}))


@dataclass
class _LogSettings:
    """The settings of the log of this process."""

    form: str = TEXT
    verbose: bool = False
    """True = workers on this machine log too."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of every record, in every thread."""


_SETTINGS = _LogSettings()


class TextLines(logging.Formatter):
    """Formats a record as its message, printable."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return printable_block(_without_secrets(record.getMessage()))


class WorkerLines(logging.Formatter):
    """Formats a record of a worker as a line with its time, level, run, step and part."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields = fields_of(record)
        known = (printable(str(fields[name])) for name in ALWAYS if fields[name] is not None)
        start = " ".join((_time_of(record), record.levelname, *known))
        return printable_block(f"{start}: {_without_secrets(record.getMessage())}")


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields = fields_of(record)
        line = {"time": _time_of(record), "level": record.levelname, **{name: fields.pop(name) for name in ALWAYS}}
        line["message"] = _without_secrets(record.getMessage().removeprefix(PREFIX))
        line |= {**fields, "logger": record.name}
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line["error"] = type(error).__name__
            line["traceback"] = _without_secrets("".join(traceback.format_exception(error)))
        return printable_json(line)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record: those of the process, of the block that logs it, and its own."""
    own = {name: value for name, value in vars(record).items() if name not in OF_EVERY_RECORD}
    return {**ALWAYS, **_SETTINGS.fields, **_FIELDS.get(), **own}


def _without_secrets(text: str) -> str:
    """Return a text of several lines in which each word that may hold a secret is replaced."""
    return "\n".join(map(without_secrets, text.split("\n")))


def _time_of(record: logging.LogRecord) -> str:
    """Return the time of a record as RFC 3339 in UTC, with milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class StandardError(logging.Handler):
    """Writes records to what is standard error at the time, such as that of a test or a display."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            self.write(self.format(record))
        except Exception:
            self.handleError(record)

    def write(self, line: str) -> None:
        """Write a line at once, so that lines of several processes do not mix."""
        if sys.stderr is not None:  # it is closed
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


HANDLER = StandardError()
HANDLER.setFormatter(TextLines())


def _own_logger() -> logging.Logger:
    logger = logging.getLogger("penstock")
    if not logger.handlers:  # a program that uses the package may have set others
        logger.setLevel(logger.level or logging.INFO)
        logger.propagate = False
        logger.addHandler(HANDLER)
    return logger


LOGGER = _own_logger()
WORKER_LOGGER = LOGGER.getChild("worker")
"""The logger of what Spark's workers do; it is silent except in `logging_as`."""
WORKER_LOGGER.setLevel(logging.CRITICAL + 1)


def set_log(form: str, verbose: bool = False, **fields: Any) -> None:
    """Set the form of the log of this process, whether workers on this machine log too, and fields of every record."""
    was_json = logs_json()
    _SETTINGS.form, _SETTINGS.verbose, _SETTINGS.fields = form, verbose, fields
    HANDLER.setFormatter(JsonLines() if form == JSON else TextLines())
    if form != JSON and not was_json:
        return  # a program that uses the package may have set what libraries print
    # Libraries print the same warnings as without this, as JSON lines.
    own = HANDLER if form == JSON else None
    logging.lastResort = own or _LAST_RESORT
    logging.captureWarnings(form == JSON)
    logging.getLogger("py.warnings").handlers = [own] if own else []


_LAST_RESORT = logging.lastResort


def add_log_settings(verbose: bool = False, **fields: Any) -> None:
    """Set what `set_log` sets, except the form of the log."""
    set_log(_SETTINGS.form, verbose, **fields)


def format_libraries() -> None:
    """Make JSON lines of what libraries log through handlers of their own, such as torch, if the log is JSON."""
    loggers = [*logging.root.manager.loggerDict.values()] if logs_json() else []
    for handler in (each for logger in loggers for each in getattr(logger, "handlers", ())):
        if isinstance(handler, logging.StreamHandler):
            handler.setFormatter(JsonLines())


def logs_json() -> bool:
    """Return True if the log of this process consists of JSON lines."""
    return _SETTINGS.form == JSON


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Give every record of this thread in a block these fields."""
    token = _FIELDS.set({**_FIELDS.get(), **fields})
    try:
        yield
    finally:
        _FIELDS.reset(token)


def uri_of(address: str) -> str:
    """Return the URI of a run folder for log records: without options and secrets; an absolute path on a disk."""
    return without_secrets(shown_uri(address).rstrip("/")) if "://" in address else os.path.abspath(address)


# ----------------------------------------------------------------------------------------------------------- workers


@dataclass(frozen=True)
class WorkerLog:
    """The log of the workers of a driver; it is part of the functions that Spark sends to them."""

    form: str
    fields: Mapping[str, Any]
    """The run and the step."""


def worker_log(is_here: bool) -> WorkerLog | None:
    """Return the log of workers for what the driver does now; None = they log nothing.

    `is_here`: they run on this machine, so that their lines are printed between those of this process. Then they log
    only if that was asked for, or as JSON.
    """
    if is_here and not (_SETTINGS.verbose or logs_json()):
        return None
    return WorkerLog(_SETTINGS.form, {**_SETTINGS.fields, **_FIELDS.get()})


@contextmanager
def logging_as(log: WorkerLog | None) -> Iterator[None]:
    """Log what happens in a block, on a worker."""
    if log is None:
        yield
        return
    before = HANDLER.formatter
    HANDLER.setFormatter(JsonLines() if log.form == JSON else WorkerLines())
    WORKER_LOGGER.setLevel(logging.INFO)
    try:
        with log_fields(**log.fields):
            yield
    finally:
        WORKER_LOGGER.setLevel(logging.CRITICAL + 1)
        HANDLER.setFormatter(before)


# ------------------------------------------------------------------------------------------------------ command lines


class LoggedParser(argparse.ArgumentParser):
    """A parser whose errors are records if the log is JSON, and quote no word that may hold a secret."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with code 2."""
        message = without_secrets(message)
        if logs_json():
            LOGGER.error(f"{self.prog}: {message}", extra={"error": "usage"})
            self.exit(2)
        super().error(message)


class _SetForm(argparse.Action):
    """Sets the form of the log when it is parsed, so that an error in later arguments has it too."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        set_log(str(values))
        setattr(namespace, self.dest, values)


def add_log_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--log-format`."""
    parser.add_argument(
        OPTION,
        action=_SetForm,
        choices=FORMATS,
        help="lines on standard error: text (default), or json, an object a line with time, level, run, step and part",
    )


JSON_WORDS = (f"{OPTION}={JSON}",)
"""The words after `train.start` by which a child process logs JSON lines."""


def log_words() -> Sequence[str]:
    """Return the words after `train.start` by which the log of a child process has the form that this one's has."""
    return JSON_WORDS if logs_json() else ()


def show(text: str, level: int = logging.INFO, **fields: Any) -> None:
    """Print lines on standard output that are no result; with JSON lines, log them instead."""
    if logs_json():
        LOGGER.log(level, text, extra=fields)
    else:
        print(text, flush=True)


# ------------------------------------------------------------------------------------------------------------- errors


def print_error(error: BaseException | str) -> None:
    """Log an explained error. Only its first line begins at the margin, whatever it quotes."""
    first, *rest = printable_block(str(error)).split("\n")
    lines = [f"{PREFIX}{first}", *(line if line[:1] in ("", " ") else f"  {line}" for line in rest)]
    LOGGER.error("\n".join(lines), extra={"error": type(error).__name__} if isinstance(error, BaseException) else {})


def log_traceback(error: BaseException) -> None:
    """Log an error that is not explained, with its traceback, as a JSON line."""
    LOGGER.error(f"{type(error).__name__}: {error}", exc_info=error)


ESCAPED = "penstock.escaped"
"""Name of the error handler of streams whose charset is not UTF-8."""


@contextmanager
def printable_output() -> Iterator[None]:
    """Make standard output and standard error printable in a block, and the traceback of an error that leaves it."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_printable_stream(stream) for stream in streams)
    sys.excepthook = _print_exception
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _printable_stream(stream: TextIO) -> Any:
    if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
        codecs.register_error(ESCAPED, _escape)
        stream.reconfigure(errors=ESCAPED)
    return stream if stream is None or isinstance(stream, PrintableStream) else PrintableStream(stream)


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Return characters that the charset of a stream lacks as escapes of JSON, and the place after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an error that ends the process, with control characters as escapes."""
    if logs_json():
        log_traceback(error)
    else:
        print(printable_block("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
