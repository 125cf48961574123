"""What the checks looked at: for every rule the spread of its measure by language, the limits, and what lies beyond.

Everything here is read from the manifest of `verdicts`; no row is read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.engine.stage import EVERY
from pipeline.perplexity.stage import ALL, BUCKETS, HEAD_CUT, MIDDLE_CUT
from pipeline.report.charts import Side
from pipeline.report.facts import Facts
from pipeline.report.funnel import RuleDrops
from pipeline.report.spread import OTHER, Measured, Spread, make_spread
from schemas.entries import value_type
from schemas.tables import DOCUMENTS, SCORES

OWN_SECTION = ("decontaminate", "toxicity", "perplexity", "classifier", "importance")
"""Stages whose checks are drawn in a section of their own."""
BUCKET_COLOURS = ("kept", "part", "lost")
"""Of head, middle and tail."""
SHARES = ("ratio", "0..1")
"""Units that say no more than the meaning of their column."""


@dataclass(frozen=True)
class Chart:
    """One measure as it spread, with the limits of one rule; a measure that no rule looks at has no name."""

    name: str
    """`stage/rule`; with a number from the second on where one rule has several checks, as with two classifiers."""
    meaning: str
    setting: str
    side: Side
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


def charts(facts: Facts, drops: Mapping[str, Sequence[RuleDrops]]) -> dict[str, list[Chart]]:
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


def _chart(name: str, check: Mapping[str, Any], measured: Sequence[Measured], drops: RuleDrops | None) -> Chart:
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


def _measured(facts: Facts, name: str, limits: Mapping[str, float]) -> list[Measured]:
    figures = facts.figures("verdicts")
    spread: Mapping[str, Mapping[str, int]] = figures.get("distributions", {}).get(name, {})
    beyond = _beyond(figures["beyond"].get(name, {}), spread) if "beyond" in figures else {}
    return [
        Measured(
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
    return {"column_meaning": metadata.get("meaning", ""), "unit": "" if unit in SHARES else unit}


def _is_whole(field: pa.Field | None) -> bool:
    """Whether the measure is a whole number; so is what is compared of entries that are."""
    if field is None:
        return False
    return bool(pa.types.is_integer(value_type(field.type) or field.type))


def buckets(facts: Facts) -> list[Buckets]:
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


def bucket_chart(facts: Facts) -> Chart | None:
    """Perplexity as it spread by language, parted into head, middle and tail; None where it was not counted."""
    figures = facts.figures("verdicts")
    cutoffs = figures.get("cutoffs", {})
    rows = [
        Measured(language, {int(key): count for key, count in bins.items()}, tuple(_cuts(cutoffs, language)))
        for language, bins in figures.get("measures", {}).get("perplexity", {}).items()
    ]
    if not rows:
        return None
    spread = make_spread(rows, "max", False, BUCKET_COLOURS)
    return Chart("", "", "", "max", "perplexity", **_described(_field("perplexity")), dropped=0, spread=spread)


def _cuts(cutoffs: Mapping[str, Mapping[str, float]], language: str) -> Iterator[float]:
    for name in (HEAD_CUT, MIDDLE_CUT):
        if language in cutoffs.get(name, {}):
            yield cutoffs[name][language]
