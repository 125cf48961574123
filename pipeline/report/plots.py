"""Plots as geometry: where lines, columns, ticks and labels lie; the templates draw them as SVG.

Across, everything is in per cent of the width, so a plot fits any screen without scaling its text; down, in pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.numbers import number, short
from pipeline.report.training import Step

LINE_HEIGHT, COLUMN_HEIGHT = 190, 200
TOP, BOTTOM = 14, 24
"""Room for half a label above and for the labels below [px]."""
LEFT = 11.0
"""Room for the labels of the vertical axis [% of the width]."""
MAX_POINTS = 400
"""Points of a curve; more steps are averaged in equal groups."""
MIN_BARS = 8
"""Columns that a plot has room for at least, so that few of them do not grow into blocks."""
LOG_FROM = 50
"""Ratio of the largest to the smallest column from which columns are drawn on a logarithmic scale."""


@dataclass(frozen=True)
class Tick:
    """A label and where it stands: [px] down or [%] across."""

    at: float
    label: str


@dataclass(frozen=True)
class Curve:
    """A line through `points` ("x,y …" in a box of 1000 by the plot's inner height), or dots where they are few."""

    name: str
    points: str
    dots: tuple[tuple[float, float], ...]
    """([%] across, [px] down) of each point, for curves that are drawn with dots."""
    accent: bool


@dataclass(frozen=True)
class LinePlot:
    """One or two curves over the steps of the training run."""

    title: str
    unit: str
    summary: str
    height: int
    inner: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class SizeClass:
    """Clusters of a range of sizes."""

    label: str
    clusters: int
    documents: int


@dataclass(frozen=True)
class Column:
    """One column: [%] across, [px] down."""

    left: float
    width: float
    top: float
    height: float
    label: str
    value: str
    note: str


@dataclass(frozen=True)
class ColumnPlot:
    """Columns side by side."""

    summary: str
    height: int
    base: float
    is_log: bool
    columns: tuple[Column, ...]


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers in [low, high] about `count` steps apart: 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def training_plots(steps: Sequence[Step]) -> list[LinePlot]:
    """Loss, learning rate, gradient norm and speed over the steps; empty if no update was made."""
    losses = [(step.step, step.loss) for step in steps if step.loss is not None and not step.skipped]
    norms = [(step.step, step.grad_norm) for step in steps if step.grad_norm is not None and not step.skipped]
    if not losses:
        return []
    heldout = [(step.step, step.heldout_loss) for step in steps if step.heldout_loss is not None]
    loss = [("training", losses, False)]
    return [
        line_plot("Loss", "nats per token", [*loss, *([("held out", heldout, True)] if heldout else [])]),
        line_plot("Learning rate", "", [("", [(step.step, step.learning_rate) for step in steps], False)]),
        line_plot("Gradient norm", "before clipping", [("", norms, False)]),
        line_plot("Speed", "tokens per second", [("", [(step.step, step.tokens_per_second) for step in steps], False)]),
    ]


def line_plot(title: str, unit: str, series: Sequence[tuple[str, Sequence[tuple[float, float]], bool]]) -> LinePlot:
    """A plot of (name, points, with dots) series."""
    thin = [(name, averaged(points), dotted) for name, points, dotted in series]
    values = [y for _, points, _ in thin for _, y in points]
    steps = [x for _, points, _ in thin for x, _ in points]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = (0.0 if 0 <= low < 0.35 * high else low - margin), high + margin
    left, right = min(steps), max(max(steps), min(steps) + 1)
    inner = LINE_HEIGHT - TOP - BOTTOM

    def down(y: float) -> float:
        return round(inner * (high - y) / (high - low), 2)

    def across(x: float) -> float:
        return (x - left) / (right - left)

    curves = [
        Curve(
            name=name,
            points=" ".join(f"{1000 * across(x):.1f},{down(y):.2f}" for x, y in points),
            dots=tuple((_percent(across(x)), TOP + down(y)) for x, y in points) if dotted else (),
            accent=dotted or len(thin) == 1,
        )
        for name, points, dotted in thin
    ]
    last = "; ".join(f"{name or title.lower()} {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points, _ in thin)
    return LinePlot(
        title=title,
        unit=unit,
        summary=f"{title} over steps {number(left)} to {number(right)}: {last}",
        height=LINE_HEIGHT,
        inner=inner,
        x_ticks=tuple(Tick(_percent(across(x)), number(x)) for x in nice_ticks(left, right) if float(x).is_integer()),
        y_ticks=tuple(Tick(TOP + down(y), axis_label(y)) for y in nice_ticks(low, high)),
        curves=tuple(curves),
    )


def _percent(share: float) -> float:
    return round(LEFT + (100 - LEFT) * share, 3)


def axis_label(value: float) -> str:
    """A number in as few characters as an axis has room for."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return short(round(value, 6))


def averaged(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """The points, or their means over equal groups where there are more than `limit`."""
    size = -(-len(points) // limit)
    groups = [points[start : start + size] for start in range(0, len(points), size or 1)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def cluster_plot(sizes: Sequence[SizeClass]) -> ColumnPlot | None:
    """Clusters by size; None if there is no cluster."""
    if not sizes:
        return None
    counts = [size.clusters for size in sizes]
    is_log = max(counts) > LOG_FROM * min(count for count in counts if count)
    base, room = COLUMN_HEIGHT - BOTTOM, COLUMN_HEIGHT - BOTTOM - TOP - 8
    slot = 100 / max(len(sizes), MIN_BARS)
    columns = []
    for place, size in enumerate(sizes):
        share = math.log1p(size.clusters) / math.log1p(max(counts)) if is_log else size.clusters / max(counts)
        height = round(room * share, 2)
        note = f"{number(size.clusters)} clusters of {size.label}, {number(size.documents)} documents"
        columns.append(
            Column(
                round(slot * place + 0.12 * slot, 3),
                round(0.76 * slot, 3),
                base - height,
                height,
                size.label,
                number(size.clusters) if size.clusters else "",
                note,
            )
        )
    summary = f"Number of clusters by size: {'; '.join(f'size {s.label}: {number(s.clusters)}' for s in sizes)}"
    return ColumnPlot(summary, COLUMN_HEIGHT, base, is_log, tuple(columns))
