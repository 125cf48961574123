"""The progress line says parts, rows, rate and time left."""

import io

from pipeline.engine.spark import StepProgress, progress_line


def test_line_with_time_left():
    line = progress_line("documents", 3, 8, 1203, 30.0)
    assert line == "documents  3/8 parts  1,203 rows  40 rows/s  0:50 left"


def test_line_at_the_end_and_before_the_first_part():
    assert progress_line("clean", 2, 2, 10, 3700.0).endswith("1:01:40")
    assert progress_line("clean", 0, 2, 0, 0.0) == "clean      0/2 parts  0 rows  0 rows/s  0:00"


def test_the_last_line_is_always_printed():
    stream = io.StringIO()
    with StepProgress("clean", 2, lambda: (2, 7), stream):
        pass
    assert stream.getvalue().startswith("clean      2/2 parts  7 rows")
    assert stream.getvalue().endswith("\n")
