"""Deduplication in the report: clusters, candidate search, audited precision and recall, and repeated passages.

Everything here is read from the manifests of `clusters`, `dedup`, `audit` and `repeats`; no row is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.dedup.survivors import SIMILARITY
from pipeline.engine.step import BY_SOURCE
from pipeline.report.charts import BOTTOM, LEFT, TOP, ColumnPlot, SizeClass, Tick, cluster_plot
from pipeline.report.facts import RunFacts, is_earlier_drop, number, percent

# Plot of the S-curve: the probability that two documents share an LSH bucket, by similarity, in theory and as measured.

CURVE_HEIGHT = 250
STEPS = 100
"""Line segments of the theoretical curve."""
RIGHT_MARGIN = 3.0
"""Margin to the right of similarity 1, so that its points are not clipped [% of the width]."""
TOP_SAMPLE = "anchored"
"""The sample of pairs that is drawn in color, over the other one."""


@dataclass(frozen=True)
class MeasuredBin:
    """Document pairs in one range of similarities, and the share of these pairs that have a common LSH bucket.

    `low` to `high` is the confidence interval of the share.
    """

    lower: float
    upper: float
    jaccard: float
    """Mean similarity of its pairs."""
    share: float
    low: float
    high: float
    pairs: int
    expected: float | None
    """The share that the theory predicts for these pairs; None if there is no formula."""

    @property
    def name(self) -> str:
        """The range of similarities as text, such as `0.5 to 0.55`."""
        return f"{self.lower:g} to {self.upper:g}" if self.lower < self.upper else f"{self.lower:g}"

    @property
    def note(self) -> str:
        """The text of the tooltip of the range in the plot."""
        text = f"similarity {self.name}: {percent(self.share)} of {number(self.pairs)} pairs"
        text += f" ({percent(self.low)} to {percent(self.high)})" if self.low < self.high else ""
        return text if self.expected is None else f"{text}, theory {percent(self.expected)}"


@dataclass(frozen=True)
class PlotPoint:
    """A measured point: `x` in [%], `y` in [px], with its confidence interval from `top` to `bottom` [px]."""

    x: float
    y: float
    top: float
    bottom: float
    accent: bool
    note: str


@dataclass(frozen=True)
class CurvePlot:
    """A plot over the similarity of document pairs: the share of pairs that have a common LSH bucket.

    The curve shows the theory, and the points show the measurements. `limit` is the horizontal position of the minimum
    similarity of copies [% of the width].
    """

    summary: str
    height: int
    inner: int
    left: float
    width: float
    """Left edge and width of the plot area [%]."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    theory: str
    """Points of the curve in a box of 1000 by `inner`; empty if there is no formula."""
    limit: float
    points: tuple[PlotPoint, ...]
    samples: tuple[str, ...]
    """Names of the samples that have points, the sample in color first."""


def curve_plot(
    samples: Mapping[str, Sequence[MeasuredBin]], limit: float, layout: Sequence[int] | None
) -> CurvePlot | None:
    """Return the plot of the points that were measured on samples of document pairs; None if there are no points."""
    if not any(samples.values()):
        return None
    inner = CURVE_HEIGHT - TOP - BOTTOM

    def down(share: float) -> float:
        return round(TOP + inner * (1 - share), 2)

    points = [
        PlotPoint(
            similarity_position(row.jaccard),
            down(row.share),
            down(row.high),
            down(row.low),
            name == TOP_SAMPLE,
            row.note,
        )
        for name in sorted(samples, key=lambda name: name == TOP_SAMPLE)
        for row in samples[name]
    ]
    theory = (
        ""
        if layout is None
        else " ".join(
            f"{1000 * s / STEPS:.1f},{inner * (1 - band_probability(s / STEPS, *layout)):.2f}" for s in range(STEPS + 1)
        )
    )
    named = sorted((name for name in samples if samples[name]), key=lambda name: name != TOP_SAMPLE)
    notes = "; ".join(f"{name} sample: {', '.join(row.note for row in samples[name])}" for name in named)
    return CurvePlot(
        summary=f"Share of pairs that share an LSH bucket, by true similarity; {notes}",
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
    """Return the horizontal position of a similarity [% of the width]."""
    return round(LEFT + (100 - LEFT - RIGHT_MARGIN) * jaccard, 3)


def band_probability(jaccard: float, bands: int, rows: int) -> float:
    """Return the probability that a pair of similarity s agrees in at least one band: 1 - (1 - s^rows)^bands."""
    return 1 - (1 - jaccard**rows) ** bands


SINGLE_SIZES = 8
"""Each cluster size up to this one has a column. Above it, each column covers a range that ends at a power of two."""
SAMPLES = ("anchored", "uniform")
ANY_KIND = "any"
"""Key in the figures of `repeats` of the number of documents in which a passage of any kind was cut."""
EARLIER_INDEX = "/index"
"""Suffix of the names of earlier snapshot indexes among the inputs of `clusters`."""
KINDS = ("within", "across")
"""Pairs of documents of one source, and of two."""
NOT_MEASURED = {"value": None, "low": None, "high": None, "pairs": 0}
PAIR_KINDS = {
    "joined": "with the document to which it was linked",
    "removed": "with the document that is kept in its place",
}


@dataclass(frozen=True)
class Clusters:
    """The number of dropped copies by rule, and the sizes of duplicate clusters."""

    exact: int
    near: int
    same_url: int
    num_clusters: int
    """Number of clusters of two or more documents with a survivor."""
    largest: int
    sizes: tuple[SizeClass, ...]
    kept_similarity: tuple[tuple[str, int], ...]
    """Near copies that were dropped, by similarity to the document kept; empty unless they were compared with it."""


@dataclass(frozen=True)
class MeasuredShare:
    """A measured share, 0..1, with its 95 % confidence interval."""

    value: float | None
    low: float
    high: float
    pairs: int

    @property
    def text(self) -> str:
        """The share in per cent; a dash if nothing was measured."""
        return number(None) if self.value is None else percent(self.value)

    @property
    def interval(self) -> str:
        """The confidence interval as text; empty if the share is exact."""
        if self.value is None or self.low == self.high:
            return ""
        return f"{percent(self.low)} to {percent(self.high)}"


@dataclass(frozen=True)
class Precision:
    """The precision of deduplication: the share of linked pairs of documents that really are copies."""

    kind: str
    near: MeasuredShare
    """Precision over pairs of different texts."""
    all: MeasuredShare
    not_compared: int
    earlier: int
    """Pairs with a document of an earlier snapshot, whose text is not available."""
    spread: tuple[tuple[str, int], ...]
    """Number of pairs by true similarity, in descending order of similarity."""


@dataclass(frozen=True)
class LostPair:
    """A document that was dropped as a copy, and the one that is kept in its place, by doc_id in hexadecimal."""

    removed: str
    kept: str
    jaccard: float | None
    """Their true similarity; None if it is not known."""


@dataclass(frozen=True)
class LostShare:
    """A source or a domain that lost a large share of its documents as copies, with some of them to look at."""

    kind: str
    name: str
    documents: int
    removed: int
    pairs: tuple[LostPair, ...]

    @property
    def share(self) -> float:
        """The share of the documents that were dropped, 0..1."""
        return self.removed / self.documents


@dataclass(frozen=True)
class Recall:
    """The recall of deduplication over the document pairs whose similarity is at least `jaccard`.

    `joined` and `candidates` have one share for each sample, by name of the sample. `joined` is the share of pairs in
    the same cluster. `candidates` is the share of pairs with a common LSH bucket.
    """

    jaccard: float
    is_limit: bool
    joined: Mapping[str, MeasuredShare]
    candidates: Mapping[str, MeasuredShare]


@dataclass(frozen=True)
class SourceAudit:
    """Precision and recall over the pairs of which a document of this source is the one removed.

    The other document of a pair is of the same source (`within`), or of another one (`across`).
    """

    source: str
    precision_within: MeasuredShare
    precision_across: MeasuredShare
    recall_within: MeasuredShare
    recall_across: MeasuredShare


@dataclass(frozen=True)
class Audit:
    """Precision and recall of deduplication, measured by the audit."""

    min_jaccard: float
    layout: tuple[int, int] | None
    precision: tuple[Precision, ...]
    false_positives: MeasuredShare
    """The share of removed near copies that are less similar than `min_jaccard` to the document kept."""
    with_numbers: MeasuredShare
    """The same by shingles in which numbers keep their digits."""
    losses: tuple[LostShare, ...]
    recall: tuple[Recall, ...]
    samples: Mapping[str, Mapping[str, Any]]
    plot: CurvePlot | None
    by_source: tuple[SourceAudit, ...]
    """Empty if the run has one source."""

    @property
    def best(self) -> str:
        """The name of the sample with the most accurate recall.

        This is the uniform sample if it covers the whole run, else the anchored sample.
        """
        return _best_sample(self.samples)

    @property
    def at_limit(self) -> MeasuredShare:
        """The recall at the minimum similarity of copies, measured on the sample `best`."""
        return next(row.joined[self.best] for row in self.recall if row.is_limit)


@dataclass(frozen=True)
class CandidateSearch:
    """Statistics of the search for candidate pairs and of the computation of connected components."""

    compared: tuple[tuple[int, int], ...]
    """(linked pairs, compared pairs) by round of LSH buckets."""
    rounds: int | None
    """Rounds of connected components; None if the run did not record them."""
    edges_by_round: tuple[int, ...]
    shuffled_bytes: int | None
    layout: tuple[int, int] | None
    earlier: tuple[str, ...]
    """Digests of the earlier snapshot indexes."""


@dataclass(frozen=True)
class CutKind:
    """The repeated passages of one kind that were cut."""

    kind: str
    documents: int
    passages: int
    chars: int
    share: float
    """These characters as a share of the cut characters of all kinds, 0..1."""


@dataclass(frozen=True)
class Repeats:
    """The passages that the step `repeats` cut, by kind, and the number of documents that the step dropped."""

    kinds: tuple[CutKind, ...]
    documents: int
    chars: int
    dropped: int
    """Documents that failed a rule after their passages were cut."""


@dataclass(frozen=True)
class Dedup:
    """The deduplication section of the report; a field is None if its table does not exist."""

    clusters: Clusters | None
    plot: ColumnPlot | None
    search: CandidateSearch | None
    audit: Audit | None
    repeats: Repeats | None


def deduplication(facts: RunFacts) -> Dedup:
    """Return the content of the deduplication section."""
    sizes = clusters(facts)
    plot = cluster_plot(sizes.sizes) if sizes else None
    return Dedup(sizes, plot, search(facts), audit(facts), repeats(facts))


def clusters(facts: RunFacts) -> Clusters | None:
    """Return the number of dropped copies by rule and the sizes of clusters; None if deduplication has not run yet."""
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
        kept_similarity=tuple(sorted(figures.get(SIMILARITY, {}).items(), reverse=True)),
    )


def _size_classes(sizes: Mapping[int, int]) -> list[SizeClass]:
    """Return the ranges of cluster sizes from 2 to the largest, including empty ones, so that the axis has no gaps."""
    bounds = [(size, size) for size in range(2, SINGLE_SIZES + 1)]
    while sizes and bounds[-1][1] < max(sizes):
        bounds.append((bounds[-1][1] + 1, 2 * bounds[-1][1]))
    classes = []
    for low, high in bounds:
        inside = {size: count for size, count in sizes.items() if low <= size <= high}
        label = str(low) if low == high else f"{low:,}–{high:,}"
        classes.append(SizeClass(label, sum(inside.values()), sum(size * count for size, count in inside.items())))
    return classes[: next((end for end in range(len(classes), 0, -1) if classes[end - 1].clusters), 0)]


def search(facts: RunFacts) -> CandidateSearch | None:
    """Return the statistics of the candidate search; None if `clusters` does not exist yet."""
    if "clusters" not in facts.tables:
        return None
    table = facts.tables["clusters"]
    figures, notes = table.content.figures, table.run.notes
    layout = figures.get("layout")
    inputs = (entry for entry in table.content.inputs if "/" in entry.name)  # such as `earlier-0/index`
    return CandidateSearch(
        compared=tuple((pairs["joined"], pairs["joined"] + pairs["failed"]) for pairs in notes.get("pairs", ())),
        rounds=notes.get("rounds"),
        edges_by_round=tuple(notes.get("edges_by_round", ())),
        shuffled_bytes=notes.get("shuffled_bytes"),
        layout=(layout["bands"], layout["rows"]) if layout else None,
        earlier=tuple(entry.sha256 for entry in inputs if entry.name.endswith(EARLIER_INDEX)),
    )


def audit(facts: RunFacts) -> Audit | None:
    """Return the results of the audit; None if there was no audit."""
    figures = facts.figures("audit")
    if not figures:
        return None
    limit, layout, samples = figures["min_jaccard"], figures["bands_rows"], figures["recall"]
    removed = figures["precision"].get("removed", {})  # audits by older versions have no such sample
    return Audit(
        min_jaccard=limit,
        layout=tuple(layout) if layout else None,
        precision=tuple(
            Precision(
                meaning,
                _share(row["near"]),
                _share(row["all"]),
                row["not_compared"],
                row["earlier_snapshots"],
                tuple(sorted(row["jaccard"].items(), reverse=True)),
            )
            for kind, meaning in PAIR_KINDS.items()
            if (row := figures["precision"].get(kind))
        ),
        false_positives=_share(removed.get("false_positives", NOT_MEASURED)),
        with_numbers=_share(removed.get("false_positives_with_numbers", NOT_MEASURED)),
        losses=tuple(
            LostShare(**{**loss, "pairs": tuple(LostPair(**pair) for pair in loss["pairs"])})
            for loss in figures.get("losses", ())
        ),
        recall=tuple(_recall(samples, limit)),
        samples=samples,
        plot=curve_plot({name: _points(samples[name]["curve"]) for name in SAMPLES}, limit, layout),
        by_source=tuple(_by_source(figures["precision"]["joined"], samples[_best_sample(samples)])),
    )


def _best_sample(samples: Mapping[str, Mapping[str, Any]]) -> str:
    return SAMPLES[1] if samples[SAMPLES[1]]["is_all"] else SAMPLES[0]


def _by_source(precision: Mapping[str, Any], recall: Mapping[str, Any]) -> list[SourceAudit]:
    found = recall.get(BY_SOURCE, {})
    empty = dict.fromkeys(KINDS, NOT_MEASURED)
    return [
        SourceAudit(
            source,
            *(_share(row[kind]) for row in (precision[BY_SOURCE].get(source, empty), found[source]) for kind in KINDS),
        )
        for source in found
    ]


def _share(figure: Mapping[str, Any]) -> MeasuredShare:
    return MeasuredShare(figure["value"], figure["low"] or 0.0, figure["high"] or 0.0, figure["pairs"])


def _recall(samples: Mapping[str, Any], limit: float) -> list[Recall]:
    by_sample = {name: {row["jaccard"]: row for row in samples[name]["by_jaccard"]} for name in SAMPLES}
    return [
        Recall(
            jaccard,
            jaccard == limit,
            *({name: _share(by_sample[name][jaccard][key]) for name in SAMPLES} for key in ("joined", "candidates")),
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
    """Return the cut passages by kind, most characters first; None if the step `repeats` did not run."""
    if "repeats" not in facts.tables:
        return None
    figures, counts = facts.figures("repeats"), facts.tables["repeats"].content.counts
    chars, spans, documents = (figures.get(name, {}) for name in ("cut_chars", "cut_spans", "cut_documents"))
    total = sum(chars.values())
    kinds = [
        CutKind(kind, documents.get(kind, 0), spans.get(kind, 0), count, count / total if total else 0.0)
        for kind, count in sorted(chars.items(), key=lambda item: (-item[1], item[0]))
    ]
    dropped = sum(count for name, count in counts.dropped.items() if not is_earlier_drop(name))
    return Repeats(tuple(kinds), documents.get(ANY_KIND, 0), total, dropped)
