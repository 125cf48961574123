"""The S-curve as geometry: how likely two documents share a bucket, by their similarity, in theory and as measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.numbers import number, percent
from pipeline.report.plots import BOTTOM, LEFT, TOP, Tick

CURVE_HEIGHT = 250
STEPS = 100
"""Line pieces of the theoretical curve."""
ROOM = 3.0
"""Room right of similarity 1, so that its points are whole [% of the width]."""
FIRST = "anchored"
"""The sample that is drawn on top, in colour."""


@dataclass(frozen=True)
class Measured:
    """One bin of similarities: the share of its pairs that shared a key, with its interval."""

    lower: float
    upper: float
    jaccard: float
    """Mean of its pairs."""
    share: float
    low: float
    high: float
    pairs: int
    expected: float | None
    """What theory says of just these pairs; None where there is no formula."""

    @property
    def name(self) -> str:
        """Its similarities."""
        return f"{self.lower:g} to {self.upper:g}" if self.lower < self.upper else f"{self.lower:g}"

    @property
    def note(self) -> str:
        """The point in words."""
        text = f"similarity {self.name}: {percent(self.share)} of {number(self.pairs)} pairs"
        text += f" ({percent(self.low)} to {percent(self.high)})" if self.low < self.high else ""
        return text if self.expected is None else f"{text}, theory {percent(self.expected)}"


@dataclass(frozen=True)
class Point:
    """A measured point: [%] across, [px] down, its interval from `top` to `bottom`."""

    x: float
    y: float
    top: float
    bottom: float
    accent: bool
    note: str


@dataclass(frozen=True)
class CurvePlot:
    """Theory as a line, measured points with their intervals, and the least similarity of a copy."""

    summary: str
    height: int
    inner: int
    left: float
    width: float
    """Where the plane begins and how wide it is [%]."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    theory: str
    """Points of the line in a box of 1000 by `inner`; empty where there is no formula."""
    limit: float
    points: tuple[Point, ...]
    samples: tuple[str, ...]
    """Names of the samples that have points, those in colour first."""


def curve_plot(
    samples: Mapping[str, Sequence[Measured]], limit: float, layout: Sequence[int] | None
) -> CurvePlot | None:
    """The plot of the points of each sample; None if there are none."""
    if not any(samples.values()):
        return None
    inner = CURVE_HEIGHT - TOP - BOTTOM

    def down(share: float) -> float:
        return round(TOP + inner * (1 - share), 2)

    points = [
        Point(across(one.jaccard), down(one.share), down(one.high), down(one.low), name == FIRST, one.note)
        for name in sorted(samples, key=lambda name: name == FIRST)
        for one in samples[name]
    ]
    theory = (
        ""
        if layout is None
        else " ".join(
            f"{1000 * s / STEPS:.1f},{inner * (1 - likely(s / STEPS, *layout)):.2f}" for s in range(STEPS + 1)
        )
    )
    named = sorted((name for name in samples if samples[name]), key=lambda name: name != FIRST)
    told = "; ".join(f"{name} sample: {', '.join(one.note for one in samples[name])}" for name in named)
    return CurvePlot(
        summary=f"Share of pairs that shared a bucket, by true similarity; {told}",
        height=CURVE_HEIGHT,
        inner=inner,
        left=LEFT,
        width=100 - LEFT - ROOM,
        x_ticks=tuple(Tick(across(tenth / 10), f"{tenth / 10:g}") for tenth in range(0, 11, 2)),
        y_ticks=tuple(Tick(down(quarter / 4), f"{25 * quarter} %") for quarter in range(5)),
        theory=theory,
        limit=across(limit),
        points=tuple(points),
        samples=tuple(named),
    )


def across(jaccard: float) -> float:
    """Where a similarity stands [% of the width]."""
    return round(LEFT + (100 - LEFT - ROOM) * jaccard, 3)


def likely(jaccard: float, bands: int, rows: int) -> float:
    """The probability that two documents of this similarity share a band: 1 - (1 - s^rows)^bands."""
    return 1 - (1 - jaccard**rows) ** bands
