"""Two runs on one page: settings that differ, documents that only one run keeps, lengths, domains, tokens, training.

Differences are those that `penstock diff` prints; all other figures are those of the reports of the two runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.inspect.diff import Difference, Example, compare_runs, open_compared_run
from pipeline.inspect.diff_training import NAMES, PairRow
from pipeline.report.charts import LinePlot, line_plot
from pipeline.report.commands import Commands
from pipeline.report.corpus import Kept, LengthRow
from pipeline.report.facts import RunFacts, collect_facts
from pipeline.report.funnel import drops_by_rule, funnel_rows
from pipeline.report.page import render
from pipeline.report.recipe import to_toml
from pipeline.report.samples import survey
from pipeline.report.signals import Histogram, Spread, make_spread
from pipeline.report.tallies import languages
from pipeline.stages import declared_reasons
from schemas.storage import Store

EXAMPLES = 3
"""Number of example documents of each source and rule."""


@dataclass(frozen=True)
class MovedRow:
    """Documents that only one run keeps: their source, and the rule that dropped them in the other run."""

    source: str
    rule: str
    documents: int
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class PairedLengths:
    """The lengths of the kept documents of both runs in one unit."""

    unit: str
    rows: tuple[LengthRow, ...]
    spread: Spread


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str
    """`A` or `B`."""
    title: str
    address: str
    digest: str
    is_dataset: bool
    facts: RunFacts
    kept: Kept | None
    commands: Commands


def write_comparison(a: tuple[str, Store], b: tuple[str, Store], output: Store, name: str) -> str:
    """Write the page that compares two runs, each given as (name by the user, run), and return its path.

    Raises ContractError if a run has neither a dataset nor a table `clean`.
    """
    compared = [open_compared_run(run) for _, run in (a, b)]
    difference = compare_runs(compared[0], compared[1], EXAMPLES)
    sides = []
    for label, (address, run), side in zip(NAMES, (a, b), compared, strict=True):
        facts = collect_facts(run)
        title = address.rstrip("/").rpartition("/")[2]
        commands = Commands(address, facts)
        sides.append(
            Side(label, title, address, side.digest, side.dataset is not None, facts, survey(facts)[0], commands)
        )
    output.write_atomic(name, render("compare.html", _view(sides[0], sides[1], difference)))
    return f"{output.uri}/{name}"


def _view(a: Side, b: Side, difference: Difference) -> dict[str, Any]:
    return {
        "sides": (a, b),
        "is_equal": difference.is_equal,
        "has_documents": all("clean" in side.facts.tables for side in (a, b)),
        "kept_documents": PairRow("documents kept", *difference.kept),
        "tokens_total": _sum(difference.tokens),
        "settings": [
            (name, *(_text(value) or text for value, text in zip(pair, difference.setting_texts[name], strict=True)))
            for name, pair in difference.settings.items()
        ],
        "unshared": list(zip(NAMES, difference.unshared, strict=True)),
        "funnel": _joined(*(_funnel(side) for side in (a, b))),
        "drops": sorted(_joined(*(_drops(side) for side in (a, b))), key=lambda row: (-abs(row.change or 0), row.name)),
        "moved": [("A", _moved(difference, True)), ("B", _moved(difference, False))],
        "both_dropped": sum(count for (_, *pair), count in difference.documents.items() if "kept" not in pair),
        "languages": _joined(_languages(a), _languages(b)),
        "lengths": list(_lengths(a, b)),
        "domains": _joined(_domains(a), _domains(b)),
        "streams": [PairRow(name, *pair) for name, pair in difference.tokens.items()],
        "plot": _loss_plot(a, b),
        "training": difference.training,
        "notes": difference.notes,
    }


def _text(value: Any) -> str:
    return "" if value is None else to_toml(value)


def _sum(tokens: Mapping[str, tuple[int, int]]) -> PairRow | None:
    if not tokens:
        return None
    return PairRow("tokens", sum(pair[0] for pair in tokens.values()), sum(pair[1] for pair in tokens.values()))


Figures = Mapping[str, tuple[float | None, str]]
"""Name → (value, meaning)."""


def _joined(a: Figures, b: Figures) -> list[PairRow]:
    """Return the figures of both runs by name, in the order of A, followed by those that only B has."""
    nothing: tuple[float | None, str] = (None, "")
    rows = []
    for name in {**a, **b}:
        (left, meaning), (right, other) = a.get(name, nothing), b.get(name, nothing)
        rows.append(PairRow(name, left, right, meaning or other))
    return rows


def _funnel(side: Side) -> Figures:
    rows = funnel_rows(side.facts, declared_reasons(side.facts.tables))
    return {row.name: (row.documents, row.meaning) for row in rows}


def _drops(side: Side) -> Figures:
    by_stage = drops_by_rule(side.facts, declared_reasons(side.facts.tables))
    rows = (row for rows in by_stage.values() for row in rows)
    return {row.name: (row.count, row.meaning) for row in rows if row.count}


def _languages(side: Side) -> Figures:
    return {row.code: (row.clean, "") for row in languages(side.facts)[0] if row.clean is not None}


def _domains(side: Side) -> Figures:
    return {row.name: (row.documents, "") for row in (side.kept.domains if side.kept else ())}


def _moved(difference: Difference, out: bool) -> list[MovedRow]:
    """Return the documents that only A keeps (`out`), or that only B keeps, most documents first."""
    moved = sorted(difference.moved(out).items(), key=lambda item: (-item[1], item[0]))
    rows = []
    for (source, rule), count in moved:
        key = (source, "kept", rule) if out else (source, rule, "kept")
        rows.append(MovedRow(source, rule, count, tuple(difference.examples.get(key, ()))))
    return rows


def _lengths(a: Side, b: Side) -> Iterator[PairedLengths]:
    by_unit = [{row.unit: row for row in side.kept.lengths} if side.kept else {} for side in (a, b)]
    for unit in (unit for unit in by_unit[0] if unit in by_unit[1]):
        pair = [lengths[unit] for lengths in by_unit]
        rows = tuple(replace(lengths.all, name=name) for name, lengths in zip(NAMES, pair, strict=True))
        histograms = [Histogram(name, lengths.bins) for name, lengths in zip(NAMES, pair, strict=True)]
        yield PairedLengths(unit, rows, make_spread(histograms, "max", True, ()))


def _loss_plot(a: Side, b: Side) -> LinePlot | None:
    """Return the training losses of the runs in one plot; None if neither has any."""
    series: list[tuple[str, Sequence[tuple[float, float]], bool]] = []
    for side in (a, b):
        losses = [(step.step, step.loss) for step in side.facts.training.steps if step.loss is not None]
        series += [(side.name, losses, False)] if losses else []
    if not series:
        return None
    plot = line_plot("Training loss", "nats per token", series)
    return replace(plot, curves=(*plot.curves[:-1], replace(plot.curves[-1], accent=True)))
