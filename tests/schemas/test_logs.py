"""Tests of the log: its lines as text and as JSON, their fields, the log of workers, and errors."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.logs import (
    JSON,
    LOGGER,
    TEXT,
    WORKER_LOGGER,
    LoggedParser,
    WorkerLog,
    add_log_option,
    add_log_settings,
    log_fields,
    logging_as,
    print_error,
    printable_output,
    set_log,
    show,
    uri_of,
    worker_log,
)
from schemas.text import raw_stream
from tests.support.paths import ROOT

HOSTILE = "\x1b]0;PWNED\x07\x9b\u202e\u2066\u200f\u061c\u2028\u2029\ud800\r\x08"


Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """The settings of the log before and after each test are those of a new process."""
    set_log(TEXT)
    yield
    set_log(TEXT)


def test_text_is_the_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with log_fields(run="s3://b/run", step="clean"):
        LOGGER.info("penstock: a note 100 %", extra={"rows": 3})
        LOGGER.warning(f"lines\n\tof {HOSTILE}")
        LOGGER.debug("not shown")
        WORKER_LOGGER.critical("of a worker")
    shown = r"\x1b]0;PWNED\x07\x9b\u202e\u2066\u200f\u061c\u2028\u2029\ud800\r\x08"
    assert capsys.readouterr() == ("", f"penstock: a note 100 %\nlines\n\tof {shown}\n")


def test_json_is_one_line_whatever_it_contains(json_lines: Lines, capsys: pytest.CaptureFixture[str]) -> None:
    with printable_output():
        LOGGER.warning(f"penstock: lines\n\tof {HOSTILE}", extra={"name of": [HOSTILE, float("nan"), b"\x01"]})
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.removesuffix("\n").isprintable()
    LOGGER.info("x")
    ((values,), written) = json_lines(), json.loads(line)
    assert list(values) == ["time", "level", "run", "step", "part", "message", "logger"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", values.pop("time"))
    nothing = {"run": None, "step": None, "part": None}
    assert values == {"level": "INFO", "message": "x", "logger": "penstock", **nothing}
    assert (written["level"], written["message"]) == ("WARNING", f"lines\n\tof {HOSTILE}")
    assert written["name of"] == [HOSTILE, None, "01"]


def test_fields_are_those_of_the_process_the_block_and_the_record(json_lines: Lines) -> None:
    add_log_settings(run="run", rank=2)
    with log_fields(step="clean"), log_fields(part="part-00003"):
        LOGGER.info("a", extra={"rows": 3, "part": "part-00004"})
        thread = threading.Thread(target=LOGGER.info, args=("b",))
        thread.start()
        thread.join()
    names = ("run", "rank", "step", "part", "rows", "message")
    assert [[line.get(name) for name in names] for line in json_lines()] == [
        ["run", 2, "clean", "part-00004", 3, "a"],
        ["run", 2, None, None, None, "b"],
    ]


@pytest.mark.parametrize(
    ("address", "uri"),
    [
        ("s3://b/run/", "s3://b/run"),
        ("s3://key:secret@b/run?endpoint_override=http://h&secret_key=x", "s3://b/run"),
        (
            "abfs://box:secret@account.dfs.core.windows.net/run?enable_tls=false",
            "abfs://box@account.dfs.core.windows.net/run",
        ),
        ("/a/../run", "/run"),
        ("hf_0123456789012345678901234567890123", f"{Path.cwd()}/hf_0123456789012345678901234567890123"),
    ],
)
def test_the_uri_of_a_run_has_no_secret(address: str, uri: str) -> None:
    assert uri_of(address) == uri


def test_a_line_of_a_worker_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_as(WorkerLog("text", {"run": "r\n2026-01-01 ERROR fake"})):
        WORKER_LOGGER.info("part begins")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_nothing_is_raised_where_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with printable_output():
        print_error("no")


def test_the_level_that_a_program_has_set_stays() -> None:
    program = (
        "import logging; log = logging.getLogger('penstock'); log.setLevel(30); import schemas.logs; print(log.level)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "30\n"


def test_messages_have_no_secret(json_lines: Lines) -> None:
    LOGGER.error("get https://u:geheim@h/x and hf_0123456789012345678901234567890123 failed")
    try:
        raise ValueError("at s3://AKIA0123456789ABCDEF:geheim@b")
    except ValueError:
        LOGGER.exception("no")
    hidden = "<not shown, because it may hold a secret>"
    message, trace = json_lines()
    assert message["message"] == f"get {hidden} and {hidden} failed"
    assert trace["error"] == "ValueError"
    assert "\nValueError: at <not shown" in trace["traceback"]
    assert "geheim" not in str(trace)


LIBRARIES = """
import logging, sys, warnings
from schemas.logs import set_log

if sys.argv[1:]:
    set_log(sys.argv[1])
logging.getLogger("library").warning("a")
logging.getLogger("library").info("not shown")
logging.getLogger("quiet").addHandler(logging.NullHandler())
logging.getLogger("quiet").warning("not shown")
warnings.warn("b")
"""


def test_libraries_print_what_they_printed_as_json_lines() -> None:
    """In a process of its own: pytest has handlers at the root of all loggers."""
    printed = []
    for words in ([], [TEXT], [JSON]):
        command = [sys.executable, "-c", LIBRARIES, *words]
        printed.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr)
    as_json = [json.loads(line) for line in printed[2].splitlines()]
    assert [(line["level"], line["logger"]) for line in as_json] == [("WARNING", "library"), ("WARNING", "py.warnings")]
    text = "<string>:11: UserWarning: b\n"
    assert printed[0] == printed[1] == f"a\n{text}"
    assert "".join(line["message"] for line in as_json) == f"a{text}"


@pytest.mark.parametrize(
    ("form", "verbose", "is_here", "logs"),
    [
        (TEXT, False, True, False),
        (TEXT, True, True, True),
        (JSON, False, True, True),
        (TEXT, False, False, True),
        (JSON, False, False, True),
    ],
)
def test_workers_log_on_a_cluster_or_if_asked_for(form: str, verbose: bool, is_here: bool, logs: bool) -> None:
    set_log(form, verbose, run="s3://b/run")
    with log_fields(step="clean"):
        log = worker_log(is_here)
    assert (log is not None) is logs
    if log is not None:
        assert (log.form, log.fields) == (form, {"run": "s3://b/run", "step": "clean"})


def test_lines_of_text_have_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    message = "expected files at https://u:geheim@h/x, got none"
    LOGGER.error(message)
    print_error(message)
    with logging_as(WorkerLog("text", {"run": "r"})):
        WORKER_LOGGER.info(message)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all("expected files at <not shown, because it may hold a secret> got none" in line for line in lines)


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_lines_of_a_worker_name_the_run_the_step_and_the_part(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_log(form, True, run="s3://b/run")
    with log_fields(step="clean"):
        log = worker_log(True)
    set_log(TEXT)  # in the process of a worker nothing is set
    with logging_as(log), log_fields(part="part-00007"):
        WORKER_LOGGER.info("part begins", extra={"rows": 1})
    WORKER_LOGGER.critical("outside of a part")
    line = capsys.readouterr().err
    if form == TEXT:
        assert re.fullmatch(r"\S+Z INFO s3://b/run clean part-00007: part begins\n", line)
    else:
        values = json.loads(line)
        assert [values[name] for name in ("run", "step", "part", "rows")] == ["s3://b/run", "clean", "part-00007", 1]


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_errors_of_arguments_have_the_form_that_was_asked_for(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = LoggedParser(prog="x")
    parser.add_argument("run")
    add_log_option(parser)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["run", "--log-format", form, "--password=geheim"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "geheim" not in error
    message = "x: unrecognized arguments: <not shown, because it may hold a secret>"
    assert (json.loads(error)["message"] == message) if form == JSON else ("x: error: unrecognized" in error)


def test_notes_on_standard_output_are_records_with_json(json_lines: Lines, capsys: pytest.CaptureFixture[str]) -> None:
    show("a note", logging.WARNING, rows=2)
    (line,) = json_lines()
    assert (line["level"], line["message"], line["rows"]) == ("WARNING", "a note", 2)
    set_log(TEXT)
    show("a note", logging.WARNING, rows=2)
    assert capsys.readouterr() == ("a note\n", "")


def test_an_error_is_one_json_line_with_its_type(json_lines: Lines) -> None:
    print_error(ConfigError("a: expected b, got c.\n  d: e. Correct it."))
    print_error("no type")
    error, other = json_lines()
    assert (error["level"], error["error"]) == ("ERROR", "ConfigError")
    assert error["message"] == "a: expected b, got c.\n  d: e. Correct it."
    assert (other["level"], other["message"], "error" in other) == ("ERROR", "no type", False)


def test_streams_are_printable_whatever_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with printable_output(), printable_output():
        print(f"{HOSTILE}\nnext\tcell")
        sys.stderr.writelines([HOSTILE, "\n"])
        assert raw_stream(sys.stdout) is before[0]
    assert (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    assert out == r"\x1b]0;PWNED\x07\x9b\u202e\u2066\u200f\u061c\u2028\u2029\ud800\r\x08" + "\nnext\tcell\n"
    assert err == out.partition("\n")[0] + "\n"


def test_only_the_first_line_of_an_error_begins_at_the_margin(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ValueError("a: expected b, got 'c\npenstock: all is well'.\n  d: e\x1b"))
    assert capsys.readouterr().err == "penstock: a: expected b, got 'c\n  penstock: all is well'.\n  d: e\\x1b\n"


def test_a_traceback_is_printable(tmp_path: Path) -> None:
    code = f"from schemas.logs import printable_output\nwith printable_output():\n    raise ValueError({HOSTILE!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert r"ValueError: \x1b]0;PWNED\x07" in done.stderr
    assert done.stderr.replace("\n", "").isprintable()
    as_json = "from schemas.logs import set_log\nset_log('json')\n"
    done = subprocess.run([sys.executable, "-c", as_json + code], cwd=ROOT, capture_output=True, text=True, check=False)
    error = json.loads(done.stderr)
    assert (done.returncode, error["level"], error["error"]) == (1, "ERROR", "ValueError")
    assert error["traceback"].startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_charset_of_the_output_lacks_are_escapes(charset: str) -> None:
    code = (
        "import json, sys\nfrom schemas.logs import printable_output\n"
        "with printable_output():\n    text = '\\u4f60 \\u00e9 \\U0001f600'\n"
        "    print(json.dumps(text, ensure_ascii=False))\n    print(text, file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONIOENCODING": charset}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, env=environment)
    assert json.loads(done.stdout.decode(charset)) == "\u4f60 \u00e9 \U0001f600"
    assert (b"\\u4f60" in done.stderr) == (charset != "utf-8")
