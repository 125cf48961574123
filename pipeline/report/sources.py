"""The report on sources: what each source of a run lost at each step, to which rules, and to which other source.

Everything here is a sum over manifests. A run with one source has no such section.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.dedup.survivors import LOST_TO
from pipeline.engine.step import BY_SOURCE
from pipeline.report.facts import RunFacts, is_earlier_drop
from pipeline.tokens.streams import BUCKET_SEPARATOR
from schemas.tables import LATER_VERDICTS

STEPS = ("documents", *LATER_VERDICTS)
"""The tables that drop documents, in order."""
SHOWN_RULES = 6
"""Number of rules that are shown of each source: those that drop most of its documents."""


@dataclass(frozen=True)
class SourceDrop:
    """Documents of a source that one rule dropped."""

    name: str
    """`stage/rule`."""
    count: int
    share: float
    """Share of the records of the source, 0..1."""


@dataclass(frozen=True)
class SourceRow:
    """One source: the documents after each step, the tokens, and the rules that dropped most."""

    name: str
    records: int
    kept: tuple[int, ...]
    """Documents that are left after each step of `SourceFigures.steps`."""
    share: float
    """Share of the records that is left after the last step, 0..1."""
    chars: int
    """Length of the texts of the documents that are left, before personal data is replaced [code points]."""
    tokens: int | None
    """Tokens in the dataset, held-out ones included; None without a dataset."""
    token_share: float
    """Share of all tokens of the dataset, 0..1."""
    drops: tuple[SourceDrop, ...]
    other_drops: int
    """Documents that rules dropped which are not in `drops`."""


@dataclass(frozen=True)
class LostRow:
    """Documents of one source that were dropped as copies, by the source of the document that was kept."""

    name: str
    counts: tuple[int, ...]
    """For each column of `SourceFigures.winners`."""


@dataclass(frozen=True)
class SourceFigures:
    """What the report says about the sources of a run."""

    steps: tuple[str, ...]
    rows: tuple[SourceRow, ...]
    """Empty if the run has one source."""
    winners: tuple[str, ...]
    """Sources of the documents that were kept in place of copies."""
    lost: tuple[LostRow, ...]


def sources(facts: RunFacts) -> SourceFigures:
    """Return what the report says about the sources of a run."""
    steps = tuple(name for name in STEPS if BY_SOURCE in facts.figures(name))
    if not steps:
        return SourceFigures((), (), (), ())
    counts = {step: facts.figures(step)[BY_SOURCE] for step in steps}
    tokens = _tokens(facts)
    rows = tuple(_row(name, counts, tokens) for name in counts[steps[0]])
    lost = facts.figures("dedup").get(LOST_TO, {})
    pairs = {tuple(name.split("/", 1)): count for name, count in lost.items()}
    winners = tuple(sorted({winner for _, winner in pairs}))
    names = [row.name for row in rows if any(own == row.name for own, _ in pairs)]
    table = tuple(LostRow(name, tuple(pairs.get((name, winner), 0) for winner in winners)) for name in names)
    return SourceFigures(steps, rows, winners, table)


def _tokens(facts: RunFacts) -> Mapping[str, int] | None:
    """Return the tokens of each source, over its quality buckets and held-out documents; None without a dataset."""
    if "tokens" not in facts.tables:
        return None
    total: dict[str, int] = {}
    for stream, number in facts.tokens_left.items():
        name = stream.rpartition("/")[0].partition(BUCKET_SEPARATOR)[0]
        total[name] = total.get(name, 0) + number
    return total


def _row(name: str, counts: Mapping[str, Mapping[str, Any]], tokens: Mapping[str, int] | None) -> SourceRow:
    own = [by_source.get(name, {"rows_in": 0, "rows_kept": 0, "dropped": {}}) for by_source in counts.values()]
    records = own[0]["rows_in"]
    dropped = [(rule, count) for each in own for rule, count in each["dropped"].items() if not is_earlier_drop(rule)]
    ranked = sorted(dropped, key=lambda drop: (-drop[1], drop[0]))
    kept = tuple(each["rows_kept"] for each in own)
    return SourceRow(
        name=name,
        records=records,
        kept=kept,
        share=kept[-1] / records if records else 0.0,
        chars=own[-1].get("kept_chars", 0),
        tokens=None if tokens is None else tokens.get(name, 0),
        token_share=tokens.get(name, 0) / max(1, sum(tokens.values())) if tokens else 0.0,
        drops=tuple(SourceDrop(rule, count, count / max(1, records)) for rule, count in ranked[:SHOWN_RULES]),
        other_drops=sum(count for _, count in ranked[SHOWN_RULES:]),
    )
