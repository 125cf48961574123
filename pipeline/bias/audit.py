"""The bias audit of a run: which filters drop the documents of a group more often, or less often, than others.

Each step that drops documents stores its comparisons as rows of its manifest. All pairs of a filter and a group of a
run are judged together, so that a run with thousands of pairs has few false findings.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.bias.count import DROPPED, EVERYONE, REACHED, stage_of
from pipeline.bias.stage import BiasConfig
from pipeline.bias.statistics import Ints, Rates, adjusted, compare
from schemas.errors import ContractError

BIAS_FIGURE = "bias"
"""Figure of a table that drops documents: the rows of the comparisons of its filters; see `GroupComparison.row`."""
DIGITS = 9
"""Significant digits of the numbers that are stored."""


@dataclass(frozen=True)
class GroupComparison:
    """A filter and a group: how often the filter drops documents of the group, and comparable others."""

    filter: str
    """`stage/rule`, or `stage` for all rules of a stage."""
    group: str
    reached: int
    """Documents of the group that reached the filter, those without comparable others included."""
    rates: Rates

    @property
    def row(self) -> list[Any]:
        """The values that are stored: filter, group, reached, documents, dropped, expected, others, p."""
        rates = self.rates
        numbers = [float(f"{value:.{DIGITS}g}") for value in (rates.expected, rates.others, rates.p)]
        return [self.filter, self.group, self.reached, rates.documents, rates.dropped, *numbers]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> "GroupComparison":
        """Return the comparison that `row` describes."""
        name, group, reached, *rates = row
        return cls(name, group, reached, Rates(*rates))


@dataclass(frozen=True)
class JudgedComparison:
    """A comparison among all of a run."""

    comparison: GroupComparison
    adjusted: float
    """p, adjusted for the number of comparisons."""
    is_significant: bool
    """True if it is a finding: `adjusted` and the difference are as the section `[bias]` asks."""

    @property
    def is_worse(self) -> bool:
        """True if documents of the group are dropped more often than others."""
        return self.comparison.rates.difference > 0


def comparisons_of(counts: Mapping[str, Any], min_documents: int) -> list[GroupComparison]:
    """Return the comparisons of all filters and groups, given the sum of the counts of all parts.

    `counts` are figures of `GroupCounter`. Groups with fewer documents are left out, and so are pairs in whose strata
    the filter drops nothing.
    """
    found = []
    for name, dropped in sorted(counts.get(DROPPED, {}).items()):
        reached = counts[REACHED][stage_of(name)]
        everyone = reached[EVERYONE]
        places = {stratum: at for at, stratum in enumerate(sorted(everyone))}
        totals = _by_place(everyone, places), _by_place(dropped.get(EVERYONE, {}), places)
        for group, documents in sorted(reached.items()):
            number = sum(documents.values())
            if group == EVERYONE or number < min_documents:
                continue
            rates = compare((_by_place(documents, places), _by_place(dropped.get(group, {}), places)), totals)
            if rates is not None and rates.documents >= min_documents and (rates.dropped or rates.expected):
                found.append(GroupComparison(name, group, number, rates))
    return found


def _by_place(counts: Mapping[str, int], places: Mapping[str, int]) -> Ints:
    found = np.zeros(len(places), np.int64)
    for name, number in counts.items():
        found[places[name]] = number
    return found


def judge(comparisons: Sequence[GroupComparison], config: BiasConfig) -> list[JudgedComparison]:
    """Return the comparisons with their adjusted p, findings first, and then the largest differences."""
    levels = adjusted([each.rates.p for each in comparisons])
    found = [
        JudgedComparison(each, level, level <= config.max_error and abs(each.rates.difference) >= config.min_difference)
        for each, level in zip(comparisons, levels)
    ]
    return sorted(
        found,
        key=lambda one: (
            not one.is_significant,
            -abs(one.comparison.rates.difference),
            one.comparison.filter,
            one.comparison.group,
        ),
    )


def stored_comparisons(figures: Iterable[Mapping[str, Any]]) -> list[GroupComparison]:
    """Return the comparisons that are stored in the figures of tables."""
    return [GroupComparison.from_row(row) for each in figures for row in each.get(BIAS_FIGURE, ())]


def check_ratio(step: str, comparisons: Sequence[GroupComparison], config: BiasConfig) -> None:
    """Raise ContractError if the findings have a ratio above `bias.max_ratio`; `step` is named as the place."""
    if config.max_ratio is None:
        return
    worst = [one for one in judge(comparisons, config) if one.is_significant and _ratio(one) > config.max_ratio]
    if not worst:
        return
    first = max(worst, key=lambda one: (_ratio(one), one.comparison.rates.difference))
    name, group, rates = first.comparison.filter, first.comparison.group, first.comparison.rates
    more = f", and {len(worst) - 1} other pair{'s' if len(worst) > 2 else ''}" if len(worst) > 1 else ""
    ratio = "infinite" if math.isinf(rates.ratio) else f"{rates.ratio:.3g}"
    raise ContractError(
        f"step {step}: expected every filter to drop documents of a group at most {config.max_ratio:g} times as often "
        f"as comparable others, got {name} and {group}: {rates.rate:.1%} of {rates.documents:,} documents against "
        f"{rates.expected:.1%} (ratio {ratio}, adjusted p {first.adjusted:.2g}){more}. "
        "Change the filter, or set bias.max_ratio."
    )


def _ratio(finding: JudgedComparison) -> float:
    return finding.comparison.rates.ratio
