"""Histograms of the signals that rules check: by language, with the limits and the number of documents beyond them.

Everything here is read from the manifest of `verdicts`; no row is read.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from pipeline.engine.rules import COARSE, lower_edge
from pipeline.engine.stage import EVERY
from pipeline.perplexity.stage import ALL, BUCKETS, HEAD_CUT, MIDDLE_CUT
from pipeline.report.charts import Axis, Label, LimitSide, Slot, labels, make_axis
from pipeline.report.facts import RunFacts, number, percent
from pipeline.report.funnel import RuleDrops
from schemas.entries import value_type
from schemas.text import format_short

# Layout of the histograms: one row for each language, divided at its limits. Heights are cube roots of counts, so that
# a bin with a thousandth of the documents of the fullest bin has a tenth of its height and is visible.

OTHER = "other"
"""The row of all languages that are not counted separately."""
NEUTRAL = "neutral"
"""The CSS class of a row that has no limit."""
MAX_ROWS = 5
"""Number of languages that are shown; the others are folded."""
HEIGHTS = (58, 42, 34, 28)
"""Height of a row [px] in a chart of one, two, three, or more rows."""
MIN_BAR_HEIGHT = 1.2
"""Minimum height of a bin that holds a document [px]."""
INFINITY = 3e38


@dataclass(frozen=True)
class Histogram:
    """The histogram of a signal over the documents of one language, with the limits of the rules on that signal."""

    language: str
    bins: Mapping[int, int]
    limits: tuple[float, ...] = ()
    """Limits in ascending order; the color of the histogram changes at each limit."""
    beyond: int | None = None
    """Number of documents beyond the limit; None = not counted."""

    @property
    def documents(self) -> int:
        """The number of measured documents."""
        return sum(self.bins.values())

    @property
    def limit(self) -> float | None:
        """The limit of a check; None if the histogram has no limit or several."""
        return self.limits[0] if len(self.limits) == 1 else None

    @property
    def share(self) -> float | None:
        """The share of documents beyond the limit, 0..1.

        None if these documents were not counted or nothing was measured.
        """
        return None if self.beyond is None or not self.documents else self.beyond / self.documents


@dataclass(frozen=True)
class HistogramRow:
    """The histogram of one language, drawn as one outline for each range between limits."""

    measured: Histogram
    note: str
    parts: tuple[tuple[str, str], ...]
    """(CSS class, SVG path) of the ranges that are not empty."""
    cuts: tuple[str, ...]
    """Horizontal positions of the limits."""


@dataclass(frozen=True)
class Spread:
    """The drawn histograms of one signal, a row for each language, on a common axis."""

    rows: tuple[HistogramRow, ...]
    more: tuple[HistogramRow, ...]
    """Rows after the first MAX_ROWS, in a section to expand."""
    height: int
    grid: str
    labels: tuple[Label, ...]


def make_spread(measured: Sequence[Histogram], side: LimitSide, whole: bool, classes: Sequence[str]) -> Spread:
    """Return the drawing of the histograms of one signal, with a row for each language.

    Languages with more documents come first, and OTHER comes last. `side` is the kind of the limits, and `whole` is
    True if values are whole numbers. `classes` has the CSS class of each range between limits, in ascending order.
    """
    total: dict[int, int] = {}
    for histogram in measured:
        for key, count in histogram.bins.items():
            total[key] = total.get(key, 0) + count
    axis = make_axis(total, [limit for histogram in measured for limit in histogram.limits], whole)
    ranked = sorted(measured, key=lambda row: (row.language == OTHER, -row.documents, row.language))
    height = HEIGHTS[min(len(ranked), len(HEIGHTS)) - 1]
    rows = tuple(_row(histogram, axis, side, height, classes) for histogram in ranked)
    labelled = labels(axis)
    grid = "".join(f"M{10 * label.at:.0f} 0V{height}" for label in labelled)
    return Spread(rows[:MAX_ROWS], rows[MAX_ROWS:], height, grid, tuple(labelled))


def _row(histogram: Histogram, axis: Axis, side: LimitSide, height: int, classes: Sequence[str]) -> HistogramRow:
    counts: dict[Slot, int] = {}
    for key in sorted(histogram.bins):
        slot = axis.slot(key)
        counts[slot] = counts.get(slot, 0) + histogram.bins[key]
    cuts = [axis.cut(limit, side) for limit in histogram.limits]
    bars: list[Bar] = [(slot.left, slot.right, count) for slot, count in counts.items()]
    if histogram.beyond is not None and len(cuts) == 1:
        below = histogram.beyond if side == "min" else histogram.documents - histogram.beyond
        bars = _divided(bars, cuts[0], below)
    most = max(counts.values())
    drawn = [
        (left, right, max(MIN_BAR_HEIGHT, (height - 3) * (count / most) ** (1 / 3))) for left, right, count in bars
    ]
    classes = classes if cuts else (NEUTRAL,)
    bounds = [-math.inf, *cuts, math.inf]
    parts = [(name, _outline(_between(drawn, *ends), height)) for name, ends in zip(classes, pairwise(bounds))]
    return HistogramRow(
        histogram, note(histogram), tuple(part for part in parts if part[1]), tuple(f"{cut:.0f}" for cut in cuts)
    )


Bar = tuple[float, float, float]
"""Left edge, right edge, and number of documents or height."""


def _divided(bars: Sequence[Bar], cut: float, below: int) -> list[Bar]:
    """Return the bars; a bar that crosses the position `cut` is divided there.

    `below` is the number of documents to the left of `cut`.
    """
    divided: list[Bar] = []
    before = below - sum(count for _, right, count in bars if right <= cut)
    for left, right, count in bars:
        first = min(max(before, 0), count)
        halves = [(left, cut, first), (cut, right, count - first)] if left < cut < right else [(left, right, count)]
        divided += [bar for bar in halves if bar[2] > 0]
    return divided


def _between(bars: Sequence[Bar], low: float, high: float) -> Iterator[Bar]:
    """Yield the parts of the bars that are between the positions `low` and `high`."""
    for left, right, rise in bars:
        left, right = max(left, low), min(right, high)
        if round(left) < round(right):
            yield left, right, rise


def _outline(bars: Iterator[Bar], height: int) -> str:
    """Return the SVG path around the bars, with one outline for all bars that touch."""
    path: list[str] = []
    end = ""
    for left, right, rise in bars:
        start, top = f"{left:.0f}", f"{height - rise:.1f}".removesuffix(".0")
        if start != end:
            path.append(f"{f'V{height}' if path else ''}M{start} {height}")
        end = f"{right:.0f}"
        path.append(f"V{top}H{end}")
    return "".join([*path, f"V{height}"]) if path else ""


def note(measured: Histogram) -> str:
    """Describe a histogram: number of documents, interquartile range of the values, and documents beyond the limit."""
    low, high = (_quantile_bin(measured.bins, share) for share in (0.25, 0.75))
    where = f"at {format_short(low[0])}" if low == high and low[0] == 0 else f"from {_text(low[0])} to {_text(high[1])}"
    documents = f"{number(measured.documents)} document{'s' if measured.documents != 1 else ''}"
    text = f"{measured.language}: {documents}, at least half of them {where}"
    if measured.share is None:
        return text
    beyond = f"{number(measured.beyond)} ({percent(measured.share)})"
    return f"{text}; {beyond} beyond the limit of {number(measured.limit)}"


def _text(value: float) -> str:
    return format_short(value) if abs(value) < INFINITY else "∞"


def _quantile_bin(bins: Mapping[int, int], share: float) -> tuple[float, float]:
    """Return the edges (low, high) of the bin that contains the quantile at `share` (0..1) of the values.

    The bin of zero has the edges (0, 0).
    """
    target, reached, keys = share * sum(bins.values()), 0, sorted(bins)
    for key in keys:
        reached += bins[key]
        if reached >= target:
            break
    low = lower_edge(key, COARSE)
    return low, 0.0 if low == 0 else lower_edge(key + 1, COARSE)


@dataclass(frozen=True)
class PairedSpread:
    """The histograms of one signal in kept documents (upwards) and in dropped ones (downwards), on a common axis."""

    height: int
    """Height of one of the two histograms [px]."""
    kept: str
    dropped: str
    """SVG paths over the same base line; the one of `dropped` is mirrored when it is drawn."""
    cuts: tuple[str, ...]
    grid: str
    labels: tuple[Label, ...]
    unit: str
    meaning: str
    note: str


PAIRED_HEIGHT = 34
"""Height of each of the two histograms of a `PairedSpread` [px]."""


def make_paired_spread(
    field: pa.Field, kept: Mapping[int, int], dropped: Mapping[int, int], limits: Sequence[float]
) -> PairedSpread:
    """Return the drawing of the COARSE bins of a column in kept and in dropped documents.

    Heights are cube roots of the shares of the kept, or of the dropped documents, on one scale.
    """
    total = {key: kept.get(key, 0) + dropped.get(key, 0) for key in {*kept, *dropped}}
    axis = make_axis(total, limits, _is_whole(field))
    shares = [_slot_shares(axis, bins) for bins in (kept, dropped)]
    most = max(share for by_slot in shares for share in by_slot.values())
    paths = []
    for by_slot in shares:
        bars = [
            (slot.left, slot.right, max(MIN_BAR_HEIGHT, (PAIRED_HEIGHT - 2) * (share / most) ** (1 / 3)))
            for slot, share in by_slot.items()
        ]
        paths.append(_outline(_between(bars, -math.inf, math.inf), PAIRED_HEIGHT))
    described, labelled = _described(field), labels(axis)
    middles = [_text(_quantile_bin(bins, 0.5)[0]) for bins in (kept, dropped)]
    return PairedSpread(
        height=PAIRED_HEIGHT,
        kept=paths[0],
        dropped=paths[1],
        cuts=tuple(dict.fromkeys(f"{axis.place(limit):.0f}" for limit in limits if math.isfinite(limit))),
        grid="".join(f"M{10 * label.at:.0f} 0V{2 * PAIRED_HEIGHT}" for label in labelled),
        labels=tuple(labelled),
        unit=described["unit"],
        meaning=described["column_meaning"],
        note=f"{field.name}: half of the kept documents are below {middles[0]}, of the dropped ones below {middles[1]}",
    )


def _slot_shares(axis: Axis, bins: Mapping[int, int]) -> dict[Slot, float]:
    shares: dict[Slot, float] = {}
    for key in sorted(bins):
        slot = axis.slot(key)
        shares[slot] = shares.get(slot, 0.0) + bins[key] / sum(bins.values())
    return shares


STAGES_WITH_SECTION = ("decontaminate", "toxicity", "perplexity", "classifier", "importance")
"""Stages whose charts are in a section of their own."""
BUCKET_CLASSES = ("kept", "part", "lost")
"""CSS classes of head, middle and tail."""
HIDDEN_UNITS = ("ratio", "0..1")
"""Units that are not shown, since the description of the column implies them."""


@dataclass(frozen=True)
class Chart:
    """The histograms of one signal with the limits of one rule; `name` is empty if no rule checks the signal."""

    name: str
    """`stage/rule`, followed by a number for the second and later checks of a rule, as with two classifiers."""
    meaning: str
    setting: str
    side: LimitSide
    column: str
    column_meaning: str
    unit: str
    dropped: int
    """Number of documents that this rule dropped; each document is counted for the first rule that drops it."""
    spread: Spread

    @property
    def rule(self) -> str:
        """The name of the rule without its stage. The second and later checks of a rule have a number at the end."""
        return self.name.rpartition("/")[2]

    @property
    def counted_as(self) -> str:
        """`stage/rule`, the name under which manifests count the documents that the rule dropped."""
        return self.name.partition(" ")[0]

    @property
    def anchor(self) -> str:
        """The HTML id of the chart in the page."""
        return "rule-" + re.sub(r"\W+", "-", self.name)


@dataclass(frozen=True)
class Buckets:
    """The number of documents of one language in each perplexity bucket, and the cut-offs between the buckets."""

    language: str
    counts: Mapping[str, int]
    head_cut: float | None
    middle_cut: float | None

    @property
    def documents(self) -> int:
        """The number of documents, including those that no model measured."""
        return sum(self.counts.values())


def charts(facts: RunFacts, drops: Mapping[str, Sequence[RuleDrops]]) -> dict[str, list[Chart]]:
    """Return the charts of every stage that has checks.

    The charts of a stage are sorted by the number of documents that the rule dropped, most first.
    """
    limits: Mapping[str, Any] = facts.figures("verdicts").get("limits", {})
    counted = {row.name: row for rows in drops.values() for row in rows}
    by_stage: dict[str, list[Chart]] = {stage: [] for stage in drops}
    for name, check in limits.items():
        measured = _measured(facts, name, check["limits"])
        if measured:
            by_stage.setdefault(name.partition("/")[0], []).append(
                _chart(name, check, _field(facts, check["column"]), measured, counted.get(name.partition(" ")[0]))
            )
    return {stage: sorted(rows, key=lambda row: (-row.dropped, row.name)) for stage, rows in by_stage.items() if rows}


def _chart(
    name: str, check: Mapping[str, Any], field: pa.Field | None, measured: Sequence[Histogram], drops: RuleDrops | None
) -> Chart:
    classes = ("beyond", "kept") if check["side"] == "min" else ("kept", "beyond")
    return Chart(
        name=name,
        meaning=drops.meaning if drops else "",
        setting=check["setting"],
        side=check["side"],
        column=check["column"],
        **_described(field),
        dropped=drops.count if drops else 0,
        spread=make_spread(measured, check["side"], _is_whole(field), classes),
    )


def _measured(facts: RunFacts, name: str, limits: Mapping[str, float]) -> list[Histogram]:
    figures = facts.figures("verdicts")
    spread: Mapping[str, Mapping[str, int]] = figures.get("distributions", {}).get(name, {})
    beyond = _beyond(figures["beyond"].get(name, {}), spread) if "beyond" in figures else {}
    return [
        Histogram(
            language=language,
            bins={int(key): count for key, count in bins.items()},
            limits=_limit_of(language, limits, spread),
            beyond=beyond.get(language),
        )
        for language, bins in spread.items()
    ]


def _beyond(counts: Mapping[str, int], shown: Mapping[str, Any]) -> dict[str, int]:
    others = sum(number for language, number in counts.items() if language not in shown)
    return {language: others if language == OTHER else counts.get(language, 0) for language in shown}


def _limit_of(language: str, limits: Mapping[str, float], shown: Mapping[str, Any]) -> tuple[float, ...]:
    """Return a tuple with the limit for a language; empty if the language has no limit.

    OTHER is the row of all languages not in `shown`. It has a limit only if all of these languages have the same limit.
    """
    if language == OTHER:
        values = {limit for name, limit in limits.items() if name not in shown}
        return (*values,) if len(values) == 1 else ()
    limit = limits.get(language, limits.get(EVERY))
    return () if limit is None else (limit,)


def _field(facts: RunFacts, column: str) -> pa.Field | None:
    """Return the Arrow field of a column; for a score, the field of the column that contains all scores.

    None if there is no such column.
    """
    name = re.split(r"[^\w]", column)[0]
    return facts.columns.field(name) if name in facts.columns.names else None


def _described(field: pa.Field | None) -> dict[str, str]:
    metadata = {} if field is None else {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    unit = metadata.get("unit", "")
    return {"column_meaning": metadata.get("meaning", ""), "unit": "" if unit in HIDDEN_UNITS else unit}


def _is_whole(field: pa.Field | None) -> bool:
    """Return True if the values of a column, or of the lists in a column, are whole numbers."""
    if field is None:
        return False
    return bool(pa.types.is_integer(value_type(field.type) or field.type))


def buckets(facts: RunFacts) -> list[Buckets]:
    """Return the perplexity buckets of every language, most documents first; empty if no model measured a document."""
    figures = facts.figures("verdicts")
    cutoffs: Mapping[str, Mapping[str, float]] = figures.get("cutoffs", {})
    heads, middles = cutoffs.get(HEAD_CUT, {}), cutoffs.get(MIDDLE_CUT, {})
    rows = [
        Buckets(
            language,
            {bucket: counts.get(bucket, 0) for bucket in (*BUCKETS, ALL)},
            heads.get(language),
            middles.get(language),
        )
        for language, counts in figures.get("buckets", {}).items()
    ]
    measured = any(row.counts[bucket] for row in rows for bucket in BUCKETS)
    return sorted(rows, key=lambda row: (-row.documents, row.language)) if measured else []


def bucket_chart(facts: RunFacts) -> Chart | None:
    """Return histograms of perplexity by language with the buckets' cut-offs; None if no perplexity was measured."""
    figures = facts.figures("verdicts")
    cutoffs = figures.get("cutoffs", {})
    rows = [
        Histogram(language, {int(key): count for key, count in bins.items()}, tuple(_cuts(cutoffs, language)))
        for language, bins in figures.get("measures", {}).get("perplexity", {}).items()
    ]
    if not rows:
        return None
    spread = make_spread(rows, "max", False, BUCKET_CLASSES)
    return Chart("", "", "", "max", "perplexity", **_described(_field(facts, "perplexity")), dropped=0, spread=spread)


def _cuts(cutoffs: Mapping[str, Mapping[str, float]], language: str) -> Iterator[float]:
    for name in (HEAD_CUT, MIDDLE_CUT):
        if language in cutoffs.get(name, {}):
            yield cutoffs[name][language]
