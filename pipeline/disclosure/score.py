"""The public metrics of summaries of training content, as far as a program can answer them.

Source of identifiers, dimensions, weights and grades: Blankvoort, Pandit and Gahntz 2026, "Quality Assessment of Public
Summary of Training Content for GPAI models", doi 10.1145/3805689.3806755, methodology at
aial.ie/research/gpai-training-transparency, as of November 2026: 242 metrics. One that asks for a judgement stays open,
so the result is a range: all open metrics at 0, and all at 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.disclosure.answers import GIVEN, MISSING, UNUSED
from pipeline.disclosure.paper import COMPUTED, Entry, Paper

DIMENSIONS = {
    "L": "clarity",
    "P": "completeness",
    "N": "consistency",
    "R": "correctness",
    "A": "accessibility",
    "E": "comprehension",
}
USEFULNESS = "AE"
"""Dimensions of usefulness; the others are of transparency."""
GRADES = ((95, "A+"), (90, "A"), (80, "B+"), (75, "B"), (60, "C+"), (50, "C"), (40, "D+"), (25, "D"), (0, "F"))
DOCUMENT = "A3 A1 A1 E3 L1 E3 L1 R2 L1 A1 N1 A3 N3 N3 E2 L1 E1 R1 L1 L3 L3 A1 P3 A3 N1 R1 E3 P1 R1 R1"
"""Dimension and weight of the metrics D1 to D30: of the whole document, its version and its date."""
FIELDS = (
    "1 3 N|1.1.a 5 PEPL|1.1.b 3 PEPL|1.2.a 5 PEPAN|1.2.b 5 PLRPA|1.2.c 1 PR|1.3.a 3 PR|1.3.b 3 PLRLLRP|1.3.c 10 PPL|"
    "1.3.d 1 PRLRER|1.3.e 6 PLPRL|1.3.f 6 PPLRL|1.3.g 2 PPPPL|2.1 3 N|2.1.a 1 PR|2.1.b 3 PR|2.1.c 20 PPANLLL|"
    "2.1.d 16 PLPPPPPELR|2.1.e 3 PPER|2.2 3 N|2.2.1.a 1 PR|2.2.1.b 3 PR|2.2.2.a 1 PR|2.2.2.b 3 PR|2.2.2.c 20 LRLA|"
    "2.2.2.d 16 PLPPPPELR|2.2.2.e 3 PPPLR|2.3 3 N|2.3.a 3 PR|2.3.b 15 LLRPL|2.3.c 10 PPELR|2.3.d 10 PLLLLLPELR|"
    "2.3.e 7 PLLRR|2.3.f 13 PPPPPER|2.3.g 3 PR|2.3.h 25 PRAE|2.3.i 20 LLLER|2.4 3 N|2.4.a 3 PR|2.4.b 5 PR|"
    "2.4.c 15 LEPA|2.4.d 3 PR|2.4.e 1 PLR|2.5 3 N|2.5.a 1 PR|2.5.b 3 PR|2.5.c 12 PLREL|2.5.d 12 PLELR|2.5.e 1 PLR|"
    "2.6 3 N|2.6.a 2 PR|2.6.b 17 PLRA|2.6.c 1 PRA|3 3 N|3.1.a 3 PR|3.1.b 18 EEELR|3.1.c 5 PL|3.2.a 15 PERA|3.3.a 1 PLR"
)
"""Field, weight and the dimension of each of its metrics, in their order."""
BY_FORM = frozenset(
    (
        *("D1", "D5", "D7", "D8", "D9", "D10", "D14", "D22", "D23", "D30", "F1.3.b.2", "F1.3.d.3", "F1.3.e.2"),
        *("F1.3.e.3", "F2.3.e.2", "F2.3.e.3", "F2.3.e.4", "F2.3.h.3"),
    )
)
"""Metrics that the form of the paper meets wherever its field is filled: one document with a table of contents and
origins, a version that is a digest, three formats, sizes in tokens, months as MM/YYYY, and languages as a list."""
ENTRIES = {
    "D23": "dataset",
    "D17": "document.notices",
    "D18": "document.location",
    "D19": "document.previous",
    "D24": "document.previous",
    "D25": "document.previous",
    "D26": "document.previous",
    "D27": "document.previous",
    "D28": "document.updated",
    "D29": "document.updated",
    "D30": "document.updated",
    "F1.1.a.1": "provider.name",
    "F1.1.a.2": "provider.name",
    "F1.1.a.3": "provider.contact",
    "F1.1.a.4": "provider.contact",
    "F1.1.b.1": "representative.name",
    "F1.1.b.2": "representative.name",
    "F1.1.b.3": "representative.contact",
    "F1.1.b.4": "representative.contact",
    "F1.2.a.1": "model.names",
    "F1.2.a.2": "model.names",
    "F1.2.a.3": "model.links",
    "F1.2.a.4": "model.links",
    "F1.2.b.1": "model.base_models",
    "F1.2.b.4": "model.base_summaries",
    "F1.2.b.5": "model.base_summaries",
    "F1.3.b.1": "size.band",
    "F1.3.b.2": "size.stored",
    "F1.3.b.3": "size.stored",
    **dict.fromkeys(("F1.3.b.4", "F1.3.b.5", "F1.3.b.6", "F1.3.b.7"), "size.other"),
    "F1.3.c.1": "content.types",
    "F1.3.c.2": "content.types",
    "F1.3.c.3": "content.types",
    **dict.fromkeys(("F1.3.d.1", "F1.3.d.2", "F1.3.d.3", "F1.3.d.4"), "latest"),
    "F1.3.d.5": "content.continuous_training",
    "F1.3.d.6": "content.continuous_training",
    "F1.3.e.3": "languages.eu",
    "F1.3.f.1": "content.regions",
    "F1.3.f.2": "content.demography",
    "F1.3.g.1": "size.other",
    "F1.3.g.2": "tokenizer",
    "F1.3.g.3": "size.other",
    "F1.3.g.4": "content.comments",
    "F2.3.d.2": "crawler.captchas",
    "F2.3.d.3": "crawler.passwords",
    "F2.3.d.4": "crawler.paywalls",
    "F2.3.d.5": "crawler.robots_txt",
    "F2.3.d.6": "crawler.protocols",
    "F2.3.d.7": "crawler.comments",
    "F2.3.f.1": "crawler.regions",
    "F2.3.f.3": "crawler.demography",
    "F2.3.f.4": "crawler.site_types",
    "F2.3.f.5": "crawler.comments",
    "F3.1.b.1": "rights.robots_txt",
    "F3.1.b.2": "rights.datasets",
    "F3.1.b.3": "rights.requests",
    "F3.3.a.1": "stages",
}
"""The entry that a metric asks for; others ask for all entries of their field."""


@dataclass(frozen=True)
class Metric:
    """One metric."""

    id: str
    field: str
    """Field of the template; empty for the document."""
    dimension: str
    """A key of DIMENSIONS."""
    weight: int


@dataclass(frozen=True)
class Scored:
    """A metric with what a program can say of it."""

    metric: Metric
    points: float | None
    """1 sufficient, 0.5 partly, 0 insufficient; None: a person judges, or it does not apply."""
    applies: bool = True


def metrics() -> Iterator[Metric]:
    """Yield all metrics, in order."""
    for number, pair in enumerate(DOCUMENT.split(), 1):
        yield Metric(f"D{number}", {23: "0.a", 28: "0.b"}.get(number, ""), pair[0], int(pair[1:]))
    for line in FIELDS.split("|"):
        field, weight, dimensions = line.split()
        for number, dimension in enumerate(dimensions, 1):
            yield Metric(f"F{field}.{number}", field, dimension, int(weight))


def score(paper: Paper) -> list[Scored]:
    """Return each metric with the points that follow from the entries of a paper."""
    entries = {entry.key: entry for entry in paper.entries}
    fields = {field.id: field.entries for section in paper.sections for field in section.fields}
    scored = []
    for metric in metrics():
        if metric.id in ENTRIES and ENTRIES[metric.id] in entries:
            asked: Sequence[Entry] = (entries[ENTRIES[metric.id]],)
        else:
            asked = fields.get(metric.field, ())
        needed = [entry for entry in asked if entry.state != MISSING or not entry.optional or len(asked) == 1]
        scored.append(_scored(metric, needed))
    return scored


def _scored(metric: Metric, asked: Sequence[Entry]) -> Scored:
    states = [entry.state for entry in asked if entry.state != UNUSED]
    if asked and not states:
        return Scored(metric, None, applies=False)
    if asked and MISSING in states and metric.dimension == "P":
        return Scored(metric, 0.5 if {COMPUTED, GIVEN} & {*states} else 0.0)
    if states and {*states} == {MISSING}:
        return Scored(metric, 0.0)
    if metric.id in BY_FORM or (asked and metric.dimension == "P"):
        return Scored(metric, 1.0)
    if metric.dimension == "R" and states and {*states} == {COMPUTED}:
        return Scored(metric, 1.0)
    return Scored(metric, None)


def grade(percent: float) -> str:
    """Return the grade of a percentage from 0 to 100."""
    return next(name for limit, name in GRADES if percent >= limit)


@dataclass(frozen=True)
class ScoreRange:
    """The percentage of one of the two sums, if a person finds all open metrics insufficient, or all sufficient."""

    low: float
    high: float


def totals(scored: Sequence[Scored]) -> dict[str, ScoreRange]:
    """Return the ranges of `transparency` and `usefulness` [percent]."""
    found = {}
    for name, is_use in (("transparency", False), ("usefulness", True)):
        own = [one for one in scored if one.applies and (one.metric.dimension in USEFULNESS) == is_use]
        whole = sum(one.metric.weight for one in own)
        sure = sum(one.metric.weight * one.points for one in own if one.points is not None)
        open_points = sum(one.metric.weight for one in own if one.points is None)
        found[name] = ScoreRange(
            *(round(100 * part / whole, 1) if whole else 0.0 for part in (sure, sure + open_points))
        )
    return found


def score_text(scored: Sequence[Scored]) -> str:
    """Return the score in one sentence."""
    ranges = totals(scored)
    applied = [one for one in scored if one.applies]
    open_ones = [one for one in applied if one.points is None]
    parts = [
        f"{name} {own.low} to {own.high} of 100 ({grade(own.low)} to {grade(own.high)})" for name, own in ranges.items()
    ]
    unused, sure = len(scored) - len(applied), len(applied) - len(open_ones)
    return (
        f"Of {len(scored)} public metrics, {unused} do not apply, {sure} are scored from the entries, and "
        f"{len(open_ones)} are for a person to judge: {', '.join(parts)}."
    )


def score_rows(scored: Sequence[Scored]) -> list[tuple[str, str, str, str, str]]:
    """Return a table of all metrics: identifier, field, dimension, weight, and points; `open` is for a person."""
    rows = [("metric", "field", "dimension", "weight", "points")]
    for one in scored:
        points = "open" if one.applies else UNUSED
        points = points if one.points is None else f"{one.points:g}"
        metric = one.metric
        rows.append((metric.id, metric.field or "all", DIMENSIONS[metric.dimension], str(metric.weight), points))
    return rows
