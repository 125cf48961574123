"""The report on whom the filters hit: the comparisons of the bias audit, from the manifests of a run.

No text is shown: a row counts the documents of a group, and names no document.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.bias.audit import BIAS_FIGURE, JudgedComparison, judge, stored_comparisons
from pipeline.bias.groups import COUNTRY, DIALECT, IDENTITY, PAGE, TOPIC, built_in_meanings
from pipeline.bias.stage import BIAS, BiasConfig
from pipeline.report.facts import RunFacts, percent

SHOWN = 40
"""Maximum number of findings that are listed of each direction, and of other comparisons."""
TABLES = ("verdicts", "dedup")
"""Tables whose manifests have comparisons."""
PEOPLE = (IDENTITY, DIALECT)
"""Kinds of groups whose findings are named at the top of the report."""
KINDS = {IDENTITY: "people", DIALECT: "dialects", TOPIC: "topics", PAGE: "page types", COUNTRY: "countries"}


@dataclass(frozen=True)
class BiasRow:
    """One comparison as the report shows it; rates are shares in 0..1, and texts are formatted."""

    filter: str
    group: str
    meaning: str
    documents: int
    rate: float
    low: float
    high: float
    """Ends of the 95 % interval of `rate`."""
    expected: float
    difference: str
    ratio: str
    adjusted: str
    order: tuple[float, float, float]
    """Numbers by which a reader may sort: difference, ratio and adjusted p."""


@dataclass(frozen=True)
class BiasReport:
    """The bias audit of a run."""

    worse: Sequence[BiasRow]
    """Findings of groups whose documents are dropped more often than comparable others, the largest first."""
    better: Sequence[BiasRow]
    """Findings of groups whose documents are dropped less often."""
    others: Sequence[BiasRow]
    """The largest differences that are no finding."""
    num_worse: int
    num_better: int
    num_compared: int
    num_groups: int
    config: BiasConfig
    is_measured: bool
    """False if the tables were made without groups."""

    @property
    def gist(self) -> str:
        """The outcome in a few words; empty if nothing was compared."""
        if not self.num_compared:
            return ""
        return f"{self.num_worse:,} of {self.num_compared:,} pairs of a filter and a group are dropped more often"


def bias_report(facts: RunFacts) -> BiasReport:
    """Return the bias audit of a run; without comparisons if no table has them."""
    config = BiasConfig.model_validate(facts.recipe.get(BIAS.name, {}))
    figures = [facts.figures(table) for table in TABLES if table in facts.tables]
    judged = judge(stored_comparisons(figures), config)
    worse = [one for one in judged if one.is_significant and one.is_worse]
    better = [one for one in judged if one.is_significant and not one.is_worse]
    others = [one for one in judged if not one.is_significant]
    return BiasReport(
        worse=_rows(worse),
        better=_rows(better),
        others=_rows(others),
        num_worse=len(worse),
        num_better=len(better),
        num_compared=len(judged),
        num_groups=len({one.comparison.group for one in judged}),
        config=config,
        is_measured=bool(config.kinds) and any(BIAS_FIGURE in each for each in figures),
    )


def worst_of_people(report: BiasReport) -> BiasRow | None:
    """Return the largest finding about people or a dialect that is dropped more often; None if there is none."""
    return next((row for row in report.worse if row.group.partition("/")[0] in PEOPLE), None)


def _rows(findings: Sequence[JudgedComparison]) -> list[BiasRow]:
    return [_row(one) for one in findings[:SHOWN]]


def _row(finding: JudgedComparison) -> BiasRow:
    comparison, rates = finding.comparison, finding.comparison.rates
    low, high = rates.interval
    kind, _, name = comparison.group.partition("/")
    points = [f"{100 * value:+.1f}" for value in (rates.difference, *rates.difference_interval)]
    ratios = [_ratio(value) for value in (rates.ratio, *rates.ratio_interval)]
    return BiasRow(
        filter=comparison.filter,
        group=comparison.group,
        meaning=built_in_meanings().get(comparison.group, f"{KINDS.get(kind, kind)}: {name}"),
        documents=rates.documents,
        rate=rates.rate,
        low=low,
        high=high,
        expected=rates.expected,
        difference=f"{points[0]} ({points[1]} to {points[2]})",
        ratio=f"{ratios[0]} ({ratios[1]} to {ratios[2]})",
        adjusted="< 0.0001" if finding.adjusted < 1e-4 else f"{finding.adjusted:.4f}",
        order=(rates.difference, min(rates.ratio, 1e9), finding.adjusted),
    )


def _ratio(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.2f}"


def sentence(row: BiasRow) -> str:
    """Return a finding as a sentence."""
    return (
        f"The filter {row.filter} drops {percent(row.rate)} of the documents of {row.group}, "
        f"and {percent(row.expected)} of comparable others."
    )
