"""What the checks looked at: for every rule the spread of its measure by language, the limits, and what lies beyond.

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
from pipeline.report.facts import RunFacts, number, percent, short
from pipeline.report.funnel import RuleDrops
from schemas.tables import DOCUMENTS, SCORES, value_type

# How documents spread over what was measured: one row for each language, cut where its limits lie, as geometry.
#
# Heights are cube roots: a bin with a thousandth of the fullest one's documents has a tenth of its height and is seen.

OTHER = "other"
"""The languages that are not told apart."""
NEUTRAL = "unparted"
"""The colour of a row that has no limit."""
MAX_ROWS = 5
"""Languages that are shown at once; the others are folded away."""
HEIGHTS = (58, 42, 34, 28)
"""Height of a row [px] where there are one, two, three or more of them."""
MIN_BAR_HEIGHT = 1.2
"""Height of a bin that holds a single document [px]."""
INFINITY = 3e38


@dataclass(frozen=True)
class Histogram:
    """What the documents of one language measured, and the limits drawn in."""

    language: str
    bins: Mapping[int, int]
    limits: tuple[float, ...] = ()
    """Ascending; each parts one colour from the next."""
    beyond: int | None = None
    """Documents beyond the limit; None where that was not counted."""

    @property
    def documents(self) -> int:
        """How many were measured."""
        return sum(self.bins.values())

    @property
    def limit(self) -> float | None:
        """The one limit of a check."""
        return self.limits[0] if len(self.limits) == 1 else None

    @property
    def share(self) -> float | None:
        """Documents beyond the limit over documents."""
        return None if self.beyond is None or not self.documents else self.beyond / self.documents


@dataclass(frozen=True)
class HistogramRow:
    """The drawing of one language: an outline for each part, and where the limits stand."""

    measured: Histogram
    note: str
    parts: tuple[tuple[str, str], ...]
    """(class, path) of the parts that hold anything."""
    cuts: tuple[str, ...]
    """Their places across."""


@dataclass(frozen=True)
class Spread:
    """Rows on one axis."""

    rows: tuple[HistogramRow, ...]
    more: tuple[HistogramRow, ...]
    """Rows after the first MAX_ROWS."""
    height: int
    grid: str
    labels: tuple[Label, ...]


def make_spread(measured: Sequence[Histogram], side: LimitSide, whole: bool, classes: Sequence[str]) -> Spread:
    """The drawing; `classes` name the colours of the parts from the lowest values up.

    The most frequent languages come first, those that are not told apart last.
    """
    total: dict[int, int] = {}
    for one in measured:
        for key, count in one.bins.items():
            total[key] = total.get(key, 0) + count
    axis = make_axis(total, [limit for one in measured for limit in one.limits], whole)
    ranked = sorted(measured, key=lambda one: (one.language == OTHER, -one.documents, one.language))
    height = HEIGHTS[min(len(ranked), len(HEIGHTS)) - 1]
    rows = tuple(_row(one, axis, side, height, classes) for one in ranked)
    labelled = labels(axis)
    grid = "".join(f"M{10 * label.at:.0f} 0V{height}" for label in labelled)
    return Spread(rows[:MAX_ROWS], rows[MAX_ROWS:], height, grid, tuple(labelled))


def _row(one: Histogram, axis: Axis, side: LimitSide, height: int, classes: Sequence[str]) -> HistogramRow:
    counts: dict[Slot, int] = {}
    for key in sorted(one.bins):
        slot = axis.slot(key)
        counts[slot] = counts.get(slot, 0) + one.bins[key]
    cuts = [axis.cut(limit, side) for limit in one.limits]
    bars: list[Bar] = [(slot.left, slot.right, count) for slot, count in counts.items()]
    if one.beyond is not None and len(cuts) == 1:
        bars = _parted(bars, cuts[0], one.beyond if side == "min" else one.documents - one.beyond)
    most = max(counts.values())
    drawn = [
        (left, right, max(MIN_BAR_HEIGHT, (height - 3) * (count / most) ** (1 / 3))) for left, right, count in bars
    ]
    classes = classes if cuts else (NEUTRAL,)
    bounds = [-math.inf, *cuts, math.inf]
    parts = [(name, _outline(_between(drawn, *ends), height)) for name, ends in zip(classes, pairwise(bounds))]
    return HistogramRow(one, note(one), tuple(part for part in parts if part[1]), tuple(f"{cut:.0f}" for cut in cuts))


Bar = tuple[float, float, float]
"""From, to, and the documents or the height."""


def _parted(bars: Sequence[Bar], cut: float, below: int) -> list[Bar]:
    """The bars with that one in two which the limit crosses, so that exactly `below` documents lie before it."""
    found: list[Bar] = []
    before = below - sum(count for _, right, count in bars if right <= cut)
    for left, right, count in bars:
        first = min(max(before, 0), count)
        pieces = [(left, cut, first), (cut, right, count - first)] if left < cut < right else [(left, right, count)]
        found += [piece for piece in pieces if piece[2] > 0]
    return found


def _between(bars: Sequence[Bar], low: float, high: float) -> Iterator[Bar]:
    """What of the bars lies between two places; a bar that a limit crosses is parted there."""
    for left, right, rise in bars:
        left, right = max(left, low), min(right, high)
        if round(left) < round(right):
            yield left, right, rise


def _outline(bars: Iterator[Bar], height: int) -> str:
    """The path around bars, one for all that touch."""
    path: list[str] = []
    end = ""
    for left, right, rise in bars:
        start, top = f"{left:.0f}", f"{height - rise:.1f}".removesuffix(".0")
        if start != end:
            path.append(f"{f'V{height}' if path else ''}M{start} {height}")
        end = f"{right:.0f}"
        path.append(f"V{top}H{end}")
    return "".join([*path, f"V{height}"]) if path else ""


def note(one: Histogram) -> str:
    """A row in words: how many documents, where half of them lie, how many are beyond the limit."""
    low, high = (_edge(one.bins, share) for share in (0.25, 0.75))
    where = f"at {short(low[0])}" if low == high and low[0] == 0 else f"from {_text(low[0])} to {_text(high[1])}"
    documents = f"{number(one.documents)} document{'s' if one.documents != 1 else ''}"
    found = f"{one.language}: {documents}, half of them or more {where}"
    if one.share is None:
        return found
    return f"{found}; {number(one.beyond)} ({percent(one.share)}) beyond the limit of {number(one.limit)}"


def _text(value: float) -> str:
    return short(value) if abs(value) < INFINITY else "∞"


def _edge(bins: Mapping[int, int], share: float) -> tuple[float, float]:
    """Both ends of the bin in which a share of the documents is reached."""
    wanted, reached, keys = share * sum(bins.values()), 0, sorted(bins)
    for key in keys:
        reached += bins[key]
        if reached >= wanted:
            break
    low = lower_edge(key, COARSE)
    return low, 0.0 if low == 0 else lower_edge(key + 1, COARSE)


STAGES_WITH_SECTION = ("decontaminate", "toxicity", "perplexity", "classifier", "importance")
"""Stages whose checks are drawn in a section of their own."""
BUCKET_CLASSES = ("kept", "part", "lost")
"""Of head, middle and tail."""
HIDDEN_UNITS = ("ratio", "0..1")
"""Units that say no more than the meaning of their column."""


@dataclass(frozen=True)
class Chart:
    """One measure as it spread, with the limits of one rule; a measure that no rule looks at has no name."""

    name: str
    """`stage/rule`; with a number from the second on where one rule has several checks, as with two classifiers."""
    meaning: str
    setting: str
    side: LimitSide
    column: str
    column_meaning: str
    unit: str
    dropped: int
    """Documents that this rule was the first to drop."""
    spread: Spread

    @property
    def rule(self) -> str:
        """The rule alone, with its number."""
        return self.name.rpartition("/")[2]

    @property
    def counted_as(self) -> str:
        """`stage/rule`, as its drops are counted."""
        return self.name.partition(" ")[0]

    @property
    def anchor(self) -> str:
        """Its place in the page."""
        return "rule-" + re.sub(r"\W+", "-", self.name)


@dataclass(frozen=True)
class Buckets:
    """The documents of one language by bucket, and the perplexity that parts them."""

    language: str
    counts: Mapping[str, int]
    head_cut: float | None
    middle_cut: float | None

    @property
    def documents(self) -> int:
        """How many there are, those that were not measured included."""
        return sum(self.counts.values())


def charts(facts: RunFacts, drops: Mapping[str, Sequence[RuleDrops]]) -> dict[str, list[Chart]]:
    """The charts of every stage that checks something, the rules that dropped most first."""
    limits: Mapping[str, Any] = facts.figures("verdicts").get("limits", {})
    counted = {row.name: row for rows in drops.values() for row in rows}
    found: dict[str, list[Chart]] = {stage: [] for stage in drops}
    for name, check in limits.items():
        measured = _measured(facts, name, check["limits"])
        if measured:
            found.setdefault(name.partition("/")[0], []).append(
                _chart(name, check, measured, counted.get(name.partition(" ")[0]))
            )
    return {stage: sorted(rows, key=lambda row: (-row.dropped, row.name)) for stage, rows in found.items() if rows}


def _chart(name: str, check: Mapping[str, Any], measured: Sequence[Histogram], drops: RuleDrops | None) -> Chart:
    field = _field(check["column"])
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
    """The limit of a language; of those that are not told apart only if they all have the same."""
    if language == OTHER:
        values = {limit for name, limit in limits.items() if name not in shown}
        return (*values,) if len(values) == 1 else ()
    limit = limits.get(language, limits.get(EVERY))
    return () if limit is None else (limit,)


def _field(column: str) -> pa.Field | None:
    """The stored column; of entries, by the name before that of the entry."""
    name = re.split(r"[^\w]", column)[0]
    return next((schema.field(name) for schema in (DOCUMENTS, SCORES) if name in schema.names), None)


def _described(field: pa.Field | None) -> dict[str, str]:
    metadata = {} if field is None else {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    unit = metadata.get("unit", "")
    return {"column_meaning": metadata.get("meaning", ""), "unit": "" if unit in HIDDEN_UNITS else unit}


def _is_whole(field: pa.Field | None) -> bool:
    """Whether the measure is a whole number; so is what is compared of entries that are."""
    if field is None:
        return False
    return bool(pa.types.is_integer(value_type(field.type) or field.type))


def buckets(facts: RunFacts) -> list[Buckets]:
    """The perplexity buckets of every language, the most frequent first; empty where none was measured."""
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
    """Perplexity as it spread by language, parted into head, middle and tail; None where it was not counted."""
    figures = facts.figures("verdicts")
    cutoffs = figures.get("cutoffs", {})
    rows = [
        Histogram(language, {int(key): count for key, count in bins.items()}, tuple(_cuts(cutoffs, language)))
        for language, bins in figures.get("measures", {}).get("perplexity", {}).items()
    ]
    if not rows:
        return None
    spread = make_spread(rows, "max", False, BUCKET_CLASSES)
    return Chart("", "", "", "max", "perplexity", **_described(_field("perplexity")), dropped=0, spread=spread)


def _cuts(cutoffs: Mapping[str, Mapping[str, float]], language: str) -> Iterator[float]:
    for name in (HEAD_CUT, MIDDLE_CUT):
        if language in cutoffs.get(name, {}):
            yield cutoffs[name][language]
