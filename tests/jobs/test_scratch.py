"""The lines of workers in the file with the messages of the JVM, which are logged while a session is open."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.scratch import followed

WORKER = {"time": "2026-01-01T00:00:00.000Z", "level": "INFO", "part": "part-00001", "logger": "penstock.worker"}
LINES = [
    "26/11/27 22:00:00 WARN Utils: a warning",
    json.dumps(WORKER),
    'Setting default log level to "WARN".',
    '{"logger": "other"}',
    "[" * 100_000,
    "",
    "26/11/27 22:00:00 ERROR Executor: an error \x1b]0;PWNED\x07",
]


CUT = '{"logger": "penstock.worker", "mess'
"""The incomplete line of a killed worker."""


@pytest.mark.parametrize("everything", [False, True])
def test_lines_of_workers_are_logged_and_the_others_if_asked_for(
    tmp_path: Path, everything: bool, json_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    log = tmp_path / "spark.log"
    with followed(log, everything), log.open("w") as file:
        for line in LINES:
            file.write(line[:20])
            file.flush()
            file.write(f"{line[20:]}\n")
        file.write(CUT)
    lines = json_lines()
    others = [line for line in lines if line["logger"] != WORKER["logger"]]
    assert [line for line in lines if line not in others] == [WORKER]
    assert (others[-1]["message"], others[-1]["logger"]) == (CUT, "penstock.spark")
    if not everything:
        assert len(others) == 1
        return
    assert [(line["level"], line["message"][:30]) for line in others] == [
        ("WARNING", LINES[0][:30]),
        ("INFO", LINES[2][:30]),
        ("INFO", LINES[3]),
        ("INFO", LINES[4][:30]),
        ("ERROR", LINES[6][:30]),
        ("INFO", CUT[:30]),
    ]
    assert {line["logger"] for line in others} == {"penstock.spark"}
