"""What deduplication joined, how it went about it, how good it was, and which passages were cut.

Everything here is read from the manifests of `clusters`, `dedup`, `audit` and `repeats`; no row is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.report.charts import BOTTOM, LEFT, TOP, ColumnPlot, SizeClass, Tick, cluster_plot
from pipeline.report.facts import RunFacts, is_of_another_run, number, percent

# The S-curve as geometry: how likely two documents share a bucket, by their similarity, in theory and as measured.

CURVE_HEIGHT = 250
STEPS = 100
"""Line pieces of the theoretical curve."""
RIGHT_MARGIN = 3.0
"""Room right of similarity 1, so that its points are whole [% of the width]."""
TOP_SAMPLE = "anchored"
"""The sample that is drawn on top, in colour."""


@dataclass(frozen=True)
class MeasuredBin:
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
class PlotPoint:
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
    points: tuple[PlotPoint, ...]
    samples: tuple[str, ...]
    """Names of the samples that have points, those in colour first."""


def curve_plot(
    samples: Mapping[str, Sequence[MeasuredBin]], limit: float, layout: Sequence[int] | None
) -> CurvePlot | None:
    """The plot of the points of each sample; None if there are none."""
    if not any(samples.values()):
        return None
    inner = CURVE_HEIGHT - TOP - BOTTOM

    def down(share: float) -> float:
        return round(TOP + inner * (1 - share), 2)

    points = [
        PlotPoint(
            similarity_position(one.jaccard),
            down(one.share),
            down(one.high),
            down(one.low),
            name == TOP_SAMPLE,
            one.note,
        )
        for name in sorted(samples, key=lambda name: name == TOP_SAMPLE)
        for one in samples[name]
    ]
    theory = (
        ""
        if layout is None
        else " ".join(
            f"{1000 * s / STEPS:.1f},{inner * (1 - band_probability(s / STEPS, *layout)):.2f}" for s in range(STEPS + 1)
        )
    )
    named = sorted((name for name in samples if samples[name]), key=lambda name: name != TOP_SAMPLE)
    told = "; ".join(f"{name} sample: {', '.join(one.note for one in samples[name])}" for name in named)
    return CurvePlot(
        summary=f"Share of pairs that shared a bucket, by true similarity; {told}",
        height=CURVE_HEIGHT,
        inner=inner,
        left=LEFT,
        width=100 - LEFT - RIGHT_MARGIN,
        x_ticks=tuple(Tick(similarity_position(tenth / 10), f"{tenth / 10:g}") for tenth in range(0, 11, 2)),
        y_ticks=tuple(Tick(down(quarter / 4), f"{25 * quarter} %") for quarter in range(5)),
        theory=theory,
        limit=similarity_position(limit),
        points=tuple(points),
        samples=tuple(named),
    )


def similarity_position(jaccard: float) -> float:
    """Where a similarity stands [% of the width]."""
    return round(LEFT + (100 - LEFT - RIGHT_MARGIN) * jaccard, 3)


def band_probability(jaccard: float, bands: int, rows: int) -> float:
    """The probability that two documents of this similarity share a band: 1 - (1 - s^rows)^bands."""
    return 1 - (1 - jaccard**rows) ** bands


SINGLE_SIZES = 8
"""Clusters up to this size have a column of their own; above, a column spans a power of two."""
SAMPLES = ("anchored", "uniform")
ANY_KIND = "any"
"""How the figures of `repeats` name documents with a cut of whatever kind."""
EARLIER_INDEX = "/index"
"""How the names of earlier indexes end among the inputs of `clusters`."""
PAIR_KINDS = {"joined": "with the document each was joined with", "cluster": "with the first document of its cluster"}


@dataclass(frozen=True)
class Clusters:
    """What deduplication joined."""

    exact: int
    near: int
    same_url: int
    num_clusters: int
    """Clusters of two or more documents of which a copy stayed."""
    largest: int
    sizes: tuple[SizeClass, ...]


@dataclass(frozen=True)
class MeasuredShare:
    """A measured share, 0..1, with its interval of 95 %."""

    value: float | None
    low: float
    high: float
    pairs: int

    @property
    def text(self) -> str:
        """The share in per cent; a dash where nothing was measured."""
        return number(None) if self.value is None else percent(self.value)

    @property
    def interval(self) -> str:
        """From where to where; empty where nothing is left to chance."""
        if self.value is None or self.low == self.high:
            return ""
        return f"{percent(self.low)} to {percent(self.high)}"


@dataclass(frozen=True)
class Precision:
    """How many joined pairs are as similar as expected."""

    kind: str
    near: MeasuredShare
    """Of texts that differ."""
    all: MeasuredShare
    not_compared: int
    earlier: int
    """Pairs with a document of an earlier snapshot, whose text is not here."""
    spread: tuple[tuple[str, int], ...]
    """Pairs by true similarity, the most similar first."""


@dataclass(frozen=True)
class Recall:
    """Of the pairs from one similarity on, by sample: how many are in one cluster, and how many shared a key."""

    jaccard: float
    is_limit: bool
    joined: Mapping[str, MeasuredShare]
    candidates: Mapping[str, MeasuredShare]


@dataclass(frozen=True)
class Audit:
    """What the audit measured."""

    min_jaccard: float
    layout: tuple[int, int] | None
    documents: int
    """Documents of the precision sample."""
    precision: tuple[Precision, ...]
    recall: tuple[Recall, ...]
    samples: Mapping[str, Mapping[str, Any]]
    plot: CurvePlot | None

    @property
    def best(self) -> str:
        """The sample that says most: the uniform one where it is the whole run."""
        return SAMPLES[1] if self.samples[SAMPLES[1]]["is_all"] else SAMPLES[0]

    @property
    def at_limit(self) -> MeasuredShare:
        """Recall from the least similarity of a copy on."""
        return next(row.joined[self.best] for row in self.recall if row.is_limit)


@dataclass(frozen=True)
class CandidateSearch:
    """How copies were found."""

    compared: tuple[tuple[int, int], ...]
    """Pairs that were joined and pairs that were compared, by round of buckets."""
    rounds: int | None
    """Of the components; None where the run does not say."""
    edges_by_round: tuple[int, ...]
    shuffled_bytes: int | None
    layout: tuple[int, int] | None
    earlier: tuple[str, ...]
    """Digests of the earlier indexes."""


@dataclass(frozen=True)
class CutKind:
    """Passages of one kind that stand elsewhere."""

    kind: str
    documents: int
    passages: int
    chars: int
    share: float
    """Of all characters that were cut, 0..1."""


@dataclass(frozen=True)
class Repeats:
    """What the step `repeats` cut and dropped."""

    kinds: tuple[CutKind, ...]
    documents: int
    chars: int
    dropped: int
    """Documents that did not pass once their passages were cut."""


@dataclass(frozen=True)
class Dedup:
    """The whole section; None where its table does not stand."""

    clusters: Clusters | None
    plot: ColumnPlot | None
    search: CandidateSearch | None
    audit: Audit | None
    repeats: Repeats | None


def deduplication(facts: RunFacts) -> Dedup:
    """What the report says of deduplication."""
    found = clusters(facts)
    plot = cluster_plot(found.sizes) if found else None
    return Dedup(found, plot, search(facts), audit(facts), repeats(facts))


def clusters(facts: RunFacts) -> Clusters | None:
    """Sizes of the duplicate clusters; None while deduplication has not run."""
    if "dedup" not in facts.tables:
        return None
    figures, dropped = facts.figures("dedup"), facts.tables["dedup"].content.counts.dropped
    sizes = {int(size): count for size, count in figures.get("cluster_sizes", {}).items()}
    return Clusters(
        exact=dropped.get("dedup/exact_duplicate", 0),
        near=dropped.get("dedup/near_duplicate", 0),
        same_url=dropped.get("dedup/same_url", 0),
        num_clusters=sum(sizes.values()),
        largest=max(sizes, default=1),
        sizes=tuple(_size_classes(sizes)),
    )


def _size_classes(sizes: Mapping[int, int]) -> list[SizeClass]:
    """Every class from 2 to the largest, empty ones included, so that the axis has no gaps."""
    bounds = [(size, size) for size in range(2, SINGLE_SIZES + 1)]
    while sizes and bounds[-1][1] < max(sizes):
        bounds.append((bounds[-1][1] + 1, 2 * bounds[-1][1]))
    classes = []
    for low, high in bounds:
        inside = {size: count for size, count in sizes.items() if low <= size <= high}
        label = str(low) if low == high else f"{low:,}–{high:,}"
        classes.append(SizeClass(label, sum(inside.values()), sum(size * count for size, count in inside.items())))
    return classes[: next((place for place in range(len(classes), 0, -1) if classes[place - 1].clusters), 0)]


def search(facts: RunFacts) -> CandidateSearch | None:
    """How copies were found; None while clusters do not stand."""
    if "clusters" not in facts.tables:
        return None
    table = facts.tables["clusters"]
    figures, notes = table.content.figures, table.run.notes
    layout = figures.get("layout")
    inputs = (entry for entry in table.content.inputs if is_of_another_run(entry.name))
    return CandidateSearch(
        compared=tuple((pairs["joined"], pairs["joined"] + pairs["failed"]) for pairs in notes.get("pairs", ())),
        rounds=notes.get("rounds"),
        edges_by_round=tuple(notes.get("edges_by_round", ())),
        shuffled_bytes=notes.get("shuffled_bytes"),
        layout=(layout["bands"], layout["rows"]) if layout else None,
        earlier=tuple(entry.sha256 for entry in inputs if entry.name.endswith(EARLIER_INDEX)),
    )


def audit(facts: RunFacts) -> Audit | None:
    """What the audit measured; None where there was none."""
    figures = facts.figures("audit")
    if not figures:
        return None
    limit, layout, samples = figures["min_jaccard"], figures["bands_rows"], figures["recall"]
    return Audit(
        min_jaccard=limit,
        layout=tuple(layout) if layout else None,
        documents=figures["precision"]["documents"],
        precision=tuple(
            Precision(
                meaning,
                _share(found["near"]),
                _share(found["all"]),
                found["not_compared"],
                found["earlier_snapshots"],
                tuple(sorted(found["jaccard"].items(), reverse=True)),
            )
            for kind, meaning in PAIR_KINDS.items()
            if (found := figures["precision"][kind])
        ),
        recall=tuple(_recall(samples, limit)),
        samples=samples,
        plot=curve_plot({name: _points(samples[name]["curve"]) for name in SAMPLES}, limit, layout),
    )


def _share(found: Mapping[str, Any]) -> MeasuredShare:
    return MeasuredShare(found["value"], found["low"] or 0.0, found["high"] or 0.0, found["pairs"])


def _recall(samples: Mapping[str, Any], limit: float) -> list[Recall]:
    by_sample = {name: {row["jaccard"]: row for row in samples[name]["by_jaccard"]} for name in SAMPLES}
    return [
        Recall(
            jaccard,
            jaccard == limit,
            *({name: _share(by_sample[name][jaccard][what]) for name in SAMPLES} for what in ("joined", "candidates")),
        )
        for jaccard in by_sample[SAMPLES[0]]
    ]


def _points(curve: Sequence[Mapping[str, Any]]) -> list[MeasuredBin]:
    return [
        MeasuredBin(
            row["lower"],
            row["upper"],
            row["jaccard"],
            row["share"]["value"],
            row["share"]["low"],
            row["share"]["high"],
            row["pairs"],
            row["expected"],
        )
        for row in curve
    ]


def repeats(facts: RunFacts) -> Repeats | None:
    """What was cut, the kind that cut most first; None where nothing was looked for."""
    if "repeats" not in facts.tables:
        return None
    figures, counts = facts.figures("repeats"), facts.tables["repeats"].content.counts
    chars, spans, documents = (figures.get(name, {}) for name in ("cut_chars", "cut_spans", "cut_documents"))
    total = sum(chars.values())
    kinds = [
        CutKind(kind, documents.get(kind, 0), spans.get(kind, 0), count, count / total if total else 0.0)
        for kind, count in sorted(chars.items(), key=lambda item: (-item[1], item[0]))
    ]
    dropped = sum(count for name, count in counts.dropped.items() if not name.endswith("/dropped_before"))
    return Repeats(tuple(kinds), documents.get(ANY_KIND, 0), total, dropped)
