"""Geometry of the report's plots: line plots, column plots, and the axis of the histograms; templates draw them as SVG.

In line and column plots, horizontal positions are in per cent of the width, so that a plot fits any screen without
scaling its text; vertical positions are in pixels.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from pipeline.engine.rules import COARSE, bins_of, lower_edge
from pipeline.report.facts import ReportedStep, number
from schemas.text import format_short

LINE_HEIGHT, COLUMN_HEIGHT = 190, 200
TOP, BOTTOM = 14, 24
"""Margins for half a label at the top and for the labels at the bottom [px]."""
LEFT = 11.0
"""Margin for the labels of the vertical axis [% of the width]."""
MAX_POINTS = 400
"""Maximum number of points of a curve; if there are more steps, groups of equal size are averaged."""
MIN_BARS = 8
"""Minimum number of columns for which space is reserved, so that few columns do not become too wide."""
LOG_FROM = 50
"""Ratio of the largest to the smallest count above which the columns have a logarithmic scale."""


@dataclass(frozen=True)
class Tick:
    """A label of an axis and its position: [px] on a vertical axis, [% of the width] on a horizontal one."""

    at: float
    label: str


@dataclass(frozen=True)
class PlotCurve:
    """A curve of a `LinePlot`."""

    name: str
    points: str
    """Points of the SVG line, "x,y x,y …": x from 0 to 1000, y from 0 to `inner` of the plot."""
    dots: tuple[tuple[float, float], ...]
    """Position (horizontal [%], vertical [px]) of each point; empty for curves without dots."""
    accent: bool


@dataclass(frozen=True)
class LinePlot:
    """One or two curves over the optimizer steps of the training run."""

    title: str
    unit: str
    summary: str
    height: int
    inner: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[PlotCurve, ...]


@dataclass(frozen=True)
class SizeClass:
    """The number of clusters with sizes in one range, and the number of documents in these clusters."""

    label: str
    clusters: int
    documents: int


@dataclass(frozen=True)
class Column:
    """One column of a bar chart; horizontal positions in [%], vertical positions in [px]."""

    left: float
    width: float
    top: float
    height: float
    label: str
    value: str
    note: str


@dataclass(frozen=True)
class ColumnPlot:
    """A bar chart with vertical columns."""

    summary: str
    height: int
    base: float
    is_log: bool
    columns: tuple[Column, ...]


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers in [low, high], at intervals of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def training_plots(steps: Sequence[ReportedStep]) -> list[LinePlot]:
    """Return plots of loss, accuracy, learning rate, gradient norm and throughput; empty if no step made an update."""
    losses = [(step.step, step.loss) for step in steps if step.loss is not None and not step.skipped]
    norms = [(step.step, step.grad_norm) for step in steps if step.grad_norm is not None and not step.skipped]
    if not losses:
        return []
    heldout = [(step.step, step.heldout_loss) for step in steps if step.heldout_loss is not None]
    loss = [("training", losses, False)]
    right = [(step.step, step.accuracy) for step in steps if step.accuracy is not None]
    heldout_right = [(step.step, step.heldout_accuracy) for step in steps if step.heldout_accuracy is not None]
    accuracy = [("training", right, False)] if right else []
    accuracy += [("held-out", heldout_right, True)] if heldout_right else []
    return [
        line_plot("Loss", "nats per token", [*loss, *([("held-out", heldout, True)] if heldout else [])]),
        *([line_plot("Token accuracy", "share of tokens ranked first", accuracy)] if accuracy else []),
        line_plot("Learning rate", "", [("", [(step.step, step.learning_rate) for step in steps], False)]),
        line_plot("Gradient norm", "before clipping", [("", norms, False)]),
        line_plot(
            "Throughput", "tokens per second", [("", [(step.step, step.tokens_per_second) for step in steps], False)]
        ),
    ]


def line_plot(title: str, unit: str, series: Sequence[tuple[str, Sequence[tuple[float, float]], bool]]) -> LinePlot:
    """Return a plot with a curve for each item of `series`: (name, points, True to draw the points as dots)."""
    thin = [(name, average_points(points), dotted) for name, points, dotted in series]
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
        PlotCurve(
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
    """Format a number in the few characters for which an axis has space."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return format_short(round(value, 6))


def average_points(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return the means of at most `limit` groups of consecutive points; up to `limit` points are returned unchanged."""
    size = -(-len(points) // limit)
    groups = [points[start : start + size] for start in range(0, len(points), size or 1)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def cluster_plot(sizes: Sequence[SizeClass]) -> ColumnPlot | None:
    """Return the plot of clusters by size; None if there are no clusters."""
    if not sizes:
        return None
    counts = [size.clusters for size in sizes]
    is_log = max(counts) > LOG_FROM * min(count for count in counts if count)
    base, room = COLUMN_HEIGHT - BOTTOM, COLUMN_HEIGHT - BOTTOM - TOP - 8
    slot = 100 / max(len(sizes), MIN_BARS)
    columns = []
    for index, size in enumerate(sizes):
        share = math.log1p(size.clusters) / math.log1p(max(counts)) if is_log else size.clusters / max(counts)
        height = round(room * share, 2)
        note = f"{number(size.clusters)} clusters of {size.label}, {number(size.documents)} documents"
        columns.append(
            Column(
                round(slot * index + 0.12 * slot, 3),
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


# The axis of the histograms. It is divided into slots, one for each bin of the histograms that the manifest stores, so
# octaves are equally wide; zero has a slot of its own. On an axis of whole numbers, only bins that contain a whole
# number have a slot. Positions are in thousandths of the width.

LimitSide = Literal["min", "max"]
Anchor = Literal["start", "middle", "end"]
WIDTH = 1000.0
ZERO_WIDTH, GAP = 44.0, 16.0
MIN_SLOTS, MAX_SLOTS, MAX_OF_TWO = 8, 72, 24
"""Minimum and maximum number of slots above or below zero: few slots do not become too wide, and 18 octaves are enough
for any signal; a signal with both signs has 6 octaves on each side."""
AT_LIMIT = 0.2
"""Share of a bin's width that is given to values equal to its lower edge, if that is the limit."""
CHARACTER_WIDTH, LABEL_SPACE = 29.0, 40.0
"""Width of a character of a label, and minimum space between two labels, on a narrow screen."""
EXTRA_MULTIPLES = (5, 2, 3, 7)
"""Multiples of powers of ten that get labels too. The labels of a multiple are added only if all of them fit."""
MAX_FINITE = 1e38
"""Values of at least this size count as infinity."""


def bin_of(value: float) -> int:
    """Return the number of the histogram bin that contains a value."""
    return int(bins_of(np.array([value], np.float64), COARSE)[0])


BIN_OF_ZERO, BIN_OF_ONE = bin_of(0.0), bin_of(1.0)


@dataclass(frozen=True)
class Slot:
    """A histogram bin on the axis: values in [low, high), drawn from `left` to `right` [thousandths of the width].

    If values need not be whole numbers, the bin of zero has `low` = `high` = 0.
    """

    key: int
    low: float
    high: float
    left: float
    right: float


@dataclass(frozen=True)
class Label:
    """The label of a round number on the axis."""

    at: float
    """Position of the text anchor [% of the width]."""
    text: str
    anchor: Anchor
    """The SVG text anchor: which point of the text is at the position `at`."""
    start: float
    """Left end of the text [thousandths of the width]."""
    end: float
    """Right end of the text [thousandths of the width]."""


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a histogram: its bins (slots) in ascending order."""

    slots: tuple[Slot, ...]
    whole: bool

    def slot(self, key: int) -> Slot:
        """Return the slot of a bin, or the nearest slot if the bin is not on the axis."""
        return next((slot for slot in self.slots if slot.key >= key), self.slots[-1])

    def place(self, value: float) -> float:
        """Return the horizontal position of a value [thousandths of the width]."""
        for slot in self.slots:
            if value < slot.low:
                return slot.left
            if value < slot.high:
                return slot.left + (value - slot.low) / (slot.high - slot.low) * (slot.right - slot.left)
        return self.slots[-1].right

    def cut(self, limit: float, side: LimitSide) -> float:
        """Return the position that separates kept from dropped values [thousandths of the width].

        A value equal to the limit is kept.
        """
        if self.whole:
            return self.place(math.ceil(limit) if side == "min" else math.floor(limit) + 1)
        if limit == 0 and side == "min":
            return self.slot(BIN_OF_ZERO).left
        position = self.place(limit)
        slot = self.slot(bin_of(limit))
        if limit == slot.low and limit and side == "max":  # values equal to the limit are kept, and are in this bin
            return position + AT_LIMIT * (slot.right - slot.left)
        return position

    def middle(self, value: float) -> float:
        """Return the horizontal position of the middle of a value's label [thousandths of the width]."""
        if value == 0 or not self.whole:
            slot = self.slot(bin_of(value))
            return (slot.left + slot.right) / 2 if value == 0 else self.place(value)
        return (self.place(value) + self.place(value + 1)) / 2


def make_axis(counts: Mapping[int, int], limits: Sequence[float], whole: bool) -> Axis:
    """Return an axis with all finite limits and, as far as there is room, all bins with documents.

    `counts` is the number of documents by bin.
    """
    shown = {bin_of(limit) for limit in limits if math.isfinite(limit)}
    present = {*counts, *shown}
    under, over = (
        {key for key in present if (key < BIN_OF_ZERO) is less and key != BIN_OF_ZERO} for less in (True, False)
    )
    room = MAX_OF_TWO if under and over else MAX_SLOTS
    above = _padded(_span(counts, shown, over or ({BIN_OF_ONE} if whole else set()), room), whole)
    mirrored = _span(
        {-key: counts.get(key, 0) for key in under}, {-key for key in shown}, {-key for key in under}, room
    )
    below = range(-max(mirrored), 1 - min(mirrored)) if mirrored else range(0)
    below = range(below.start, max(below.stop, min(below.start + MIN_SLOTS, BIN_OF_ZERO))) if below else below
    groups = [_holding(below, whole), [BIN_OF_ZERO] if BIN_OF_ZERO in present else [], _holding(above, whole)]
    return Axis(tuple(_slots([group for group in groups if group], whole)), whole)


def _span(counts: Mapping[int, int], shown: set[int], keys: set[int], room: int) -> range:
    """Return the range from the lowest to the highest bin of `keys`, without outer bins if it exceeds `room` bins.

    Bins in `shown` contain a limit. They are never removed, even if the range remains longer than `room`.
    """
    if not keys:
        return range(0)
    first, last = min(keys), max(keys)
    low, high = min(shown & keys, default=last), max(shown & keys, default=first)
    # Bins are removed from the end with fewer documents. Bin numbers increase with the distance from zero.
    left, right = counts.get(first, 0), counts.get(last, 0)
    while last - first >= room and (first < low or last > high):
        if first < low and (left <= right or last <= high):
            first += 1
            left += counts.get(first, 0)
        else:
            last -= 1
            right += counts.get(last, 0)
    return range(first, last + 1)


def _padded(keys: range, whole: bool) -> range:
    """Return the range of bins, extended to at least MIN_SLOTS slots unless it is empty."""
    if not keys:
        return keys
    first, last = keys[0], keys[-1]
    while len(_holding(range(first, last + 1), whole)) < MIN_SLOTS:
        first, last = (first, last + 1) if whole else (first - 1, last)
    return range(first, last + 1)


def _holding(keys: range, whole: bool) -> list[int]:
    """Return the bins of `keys` that get a slot. If `whole` is True, these are the bins that contain a whole number."""
    return [key for key in keys if not whole or _edges(key, whole)[0] < _edges(key, whole)[1]]


def _edges(key: int, whole: bool) -> tuple[float, float]:
    if key == BIN_OF_ZERO:
        return 0.0, float(whole)
    low, high = lower_edge(key, COARSE), lower_edge(key + 1, COARSE)
    if not whole or not math.isfinite(high):
        return low, high
    return math.ceil(low), math.ceil(high)


def _slots(groups: Sequence[Sequence[int]], whole: bool) -> Iterator[Slot]:
    """Yield the slots of all bins from left to right, with a gap between two groups of bins."""
    others = sum(len(group) for group in groups if group != [BIN_OF_ZERO])
    room = WIDTH - GAP * (len(groups) - 1) - ZERO_WIDTH * ([BIN_OF_ZERO] in groups)
    left = 0.0
    for group in groups:
        for key in group:
            right = left + (ZERO_WIDTH if group == [BIN_OF_ZERO] else room / others)
            yield Slot(key, *_edges(key, whole), left, right)
            left = right
        left += GAP


def labels(axis: Axis) -> list[Label]:
    """Return labels for as many round numbers as fit; zero always has a label."""
    slots = [slot for slot in axis.slots if slot.key != BIN_OF_ZERO]
    zero = [0.0] if len(slots) < len(axis.slots) else []
    sizes = [abs(end) for slot in slots for end in (slot.low, slot.high) if 0 < abs(end) < MAX_FINITE]
    decades = range(math.floor(math.log10(min(sizes))), math.floor(math.log10(max(sizes))) + 1) if sizes else range(0)
    candidates = [(1, decades[(len(decades) - 1) % step :: step]) for step in range(1, len(decades) + 1)]
    chosen = [_label(axis, value) for value in zero]
    for sign in (1, -1):
        chosen = next(
            filter(_fit, (_with(axis, chosen, sign * factor, powers) for factor, powers in candidates)), chosen
        )
        for multiple in EXTRA_MULTIPLES:
            more = _with(axis, chosen, sign * multiple, decades)
            chosen = more if _fit(more) else chosen
    return chosen


def _with(axis: Axis, chosen: Sequence[Label], multiple: int, decades: range) -> list[Label]:
    """Return `chosen` with labels added for the numbers `multiple` * 10^d, for each d in `decades`.

    A number gets no label if it is not on the axis, or if its label would overlap the label of zero.
    """
    values = [float(f"{multiple}e{decade}") for decade in decades]
    held = [value for value in values if any(slot.low <= value < slot.high for slot in axis.slots)]
    held += [value for value in values if value == axis.slots[-1].high]
    added = [_label(axis, value) for value in held if value.is_integer() or not axis.whole]
    zero = [label for label in chosen if label.text == "0"]
    added = [label for label in added if _fit(sorted([*zero, label], key=_start))]
    return sorted([*chosen, *added], key=_start)


def _start(label: Label) -> float:
    return label.start


def _label(axis: Axis, value: float) -> Label:
    position, text = axis.middle(value), axis_label(value)
    width = CHARACTER_WIDTH * len(text)
    anchor: Anchor = "start" if position < width / 2 else "end" if position > WIDTH - width / 2 else "middle"
    start = position - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return Label(round(position / 10, 2), text, anchor, start, start + width)


def _fit(labels: Sequence[Label]) -> bool:
    return all(left.end + LABEL_SPACE <= right.start for left, right in pairwise(labels))
