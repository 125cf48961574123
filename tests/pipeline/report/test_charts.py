"""Numbers and plots of the report: formatted for readers, drawn to scale."""

from typing import Any

import pytest

from pipeline.report.charts import SizeClass, average_points, cluster_plot, line_plot, nice_ticks, training_plots
from pipeline.report.facts import PlanFigure, ReportedStep, brief, estimate, number, percent
from pipeline.report.page import figure_text


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (number, 1234567, "1,234,567"),
        (number, 0.123456, "0.1235"),
        (number, 2.0, "2"),
        (number, 12345.6, "12,346"),
        (number, None, "–"),
        (estimate, 740_123.0, "≈ 740 k"),
        (estimate, None, "–"),
        (brief, 99_999, "99,999"),
        (brief, 123_456, "123 k"),
        (brief, None, "–"),
        (percent, 0.0, "0.0 %"),
        (percent, 0.0004, "< 0.1 %"),
        (percent, 0.0005, "0.1 %"),
        (percent, 0.9994, "99.9 %"),
        (percent, 0.9996, "> 99.9 %"),
        (percent, 1.0, "100.0 %"),
        (figure_text, PlanFigure("a", 2_500_000, "bytes", "", ""), "2.5 MB"),
        (figure_text, PlanFigure("a", 9.82e11, "FLOPs", "", ""), "982 G"),
        (figure_text, PlanFigure("a", 184_608, "parameters", "", ""), "184,608"),
    ],
)
def test_numbers_are_formatted_for_readers(function: Any, value: Any, expected: str) -> None:
    assert function(value) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 5, 10]),
        (0, 100, [0, 50, 100]),
        (1, 160, [50, 100, 150]),
        (5.31, 8.6, [6, 7, 8]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == expected


def test_a_curve_keeps_its_ends_and_shrinks_to_means() -> None:
    assert average_points([(1, 2.0), (2, 4.0), (3, 9.0)], limit=2) == [(1.5, 3.0), (3, 9.0)]
    assert average_points([(1, 2.0), (2, 4.0)], limit=2) == [(1, 2.0), (2, 4.0)]
    assert len(average_points([(x, 1.0) for x in range(100_000)])) <= 400
    plot = line_plot("Loss", "", [("", [(1, 0.0), (2, 50.0), (3, 100.0)], True)])
    (curve,) = plot.curves
    positions = [tuple(map(float, point.split(","))) for point in curve.points.split()]
    assert [x for x, _ in positions] == [0, 500, 1000]
    assert positions[0][1] == plot.inner
    assert positions[0][1] > positions[1][1] > positions[2][1] > 0
    assert [x for x, _ in curve.dots] == [11.0, 55.5, 100.0]
    assert plot.summary == "Loss over steps 1 to 3: loss 0 to 100"


def test_a_flat_curve_and_a_single_step_can_be_drawn() -> None:
    (plot,) = (plot for plot in training_plots([ReportedStep(7, 1e-3, 10.0, 2.5, 1.0)]) if plot.title == "Loss")
    assert plot.curves[0].points.startswith("0.0,")
    assert training_plots([]) == []


def test_a_skipped_step_has_no_loss_to_draw() -> None:
    steps = [
        ReportedStep(1, 1e-3, 9.0, 4.0, 1.0),
        ReportedStep(2, 1e-3, 9.0, None, None, True),
        ReportedStep(3, 1e-3, 9.0, 3.0, 2.0),
    ]
    steps.append(ReportedStep(4, 1e-3, 9.0, 2.0, None, True))
    summaries = [plot.summary for plot in training_plots(steps)]
    assert summaries == [
        "Loss over steps 1 to 3: training 4 to 3",
        "Learning rate over steps 1 to 4: learning rate 0.001 to 0.001",
        "Gradient norm over steps 1 to 3: gradient norm 1 to 2",
        "Throughput over steps 1 to 4: throughput 9 to 9",
    ]
    assert training_plots(steps[1:2]) == []


def test_columns_are_logarithmic_if_the_largest_dwarfs_the_others() -> None:
    even = cluster_plot([SizeClass("2", 50, 100), SizeClass("3", 1, 3)])
    uneven = cluster_plot([SizeClass("2", 51, 102), SizeClass("3", 1, 3)])
    assert even is not None
    assert uneven is not None
    assert cluster_plot([]) is None
    assert (even.is_log, uneven.is_log) == (False, True)
    assert even.columns[1].height == pytest.approx(even.columns[0].height / 50, abs=0.01)
    assert uneven.columns[1].height > uneven.columns[0].height / 10
    assert even.columns[1].note == "1 clusters of 3, 3 documents"
