"""The progress line says parts, rows, rate and time left."""

from pipeline.engine.spark import progress_line


def test_line_with_time_left():
    line = progress_line("documents", 3, 8, 1203, 30.0)
    assert line == "documents  3/8 parts  1,203 rows  40 rows/s  0:00:50 left"


def test_line_at_the_end_and_before_the_first_part():
    assert progress_line("clean", 2, 2, 10, 3700.0).endswith("in 1:01:40")
    assert progress_line("clean", 0, 2, 0, 0.0) == "clean      0/2 parts  0 rows  0 rows/s  in 0:00:00"
