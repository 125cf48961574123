"""What a prediction says, as text: kept before and after, by rule, language and source, and how steep each limit is."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pipeline.inspect.whatif import KEPT_VERDICT, Prediction, PredictionCell
from pipeline.inspect.whatif_limits import SensitivityCurve

Row = tuple[str, ...]
Rates = Mapping[tuple[str, str], float]
CELL = [field.name for field in fields(PredictionCell)]


def to_json(prediction: Prediction, changed: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The whole prediction as JSON values."""
    return {
        "changed": {name: {"committed": before, "tried": after} for name, (before, after) in changed.items()},
        "cells": [{name: getattr(cell, name) for name in CELL} for cell in prediction.cells],
        "curves": [
            {
                "setting": curve.setting,
                "reason": curve.reason,
                "limits": dict(curve.limits),
                "points": [{"limit": limit, "kept": kept} for limit, kept in curve.points],
            }
            for curve in prediction.curves
        ],
    }


def format_prediction(prediction: Prediction, changed: Mapping[str, tuple[Any, Any]]) -> str:
    """The prediction as text, with the curves of the settings that are tried."""
    lines = [f"{name}: {before} -> {after}" for name, (before, after) in changed.items()] or ["no setting is changed"]
    rates = token_rates(prediction.cells) if prediction.has_tokens else None
    if prediction.cuts_repeats:
        lines.append("before repeated passages are cut: what that drops or shortens is not predicted")
    lines += [
        "",
        *_table(("kept", "documents", "", "characters", "", "tokens", ""), [_total("all", prediction.cells, rates)]),
    ]
    lines += ["", *_table(("dropped by", "documents", "", "characters", ""), _by_rule(prediction.cells))]
    for title, key in (("language", _language), ("source", _source)):
        rows = [_total(name, group, rates) for name, group in _grouped(prediction.cells, key)]
        lines += ["", *_table((f"kept, by {title}", "documents", "", "characters", "", "tokens", ""), rows)]
    shown = [curve for curve in prediction.curves if curve.points and curve.setting.partition(" ")[0] in changed]
    if shown:
        lines += ["", "documents that the verdicts keep (copies not yet left out) if one limit alone were another:"]
    lines += [f"  {curve.setting} ({curve.reason}) = {_limits(curve)}: {_points(curve)}" for curve in shown]
    lines += ["", f"curves of all {len(prediction.curves)} limits: --json FILE"]
    return "\n".join(lines)


def token_rates(cells: Sequence[PredictionCell]) -> Rates:
    """Tokens per character of each language and source, and of all documents (under two empty names)."""
    tokens: Counter[tuple[str, str]] = Counter()
    chars: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        for key in ((cell.language, cell.source), ("", "")):
            tokens[key] += cell.tokens
            chars[key] += cell.chars - cell.uncounted_chars
    return {key: tokens[key] / number for key, number in chars.items() if number}


def kept_tokens(cells: Sequence[PredictionCell], after: bool, rates: Rates) -> tuple[int, bool]:
    """Tokens of the documents kept (after, or before the change), and whether some of them are estimated.

    A document that the dataset does not hold is counted by the tokens per character of its language and source, or of
    all documents where that is not known.
    """
    exact, estimate = 0, 0.0
    for cell in cells:
        if (cell.after if after else cell.before) == KEPT_VERDICT:
            exact += cell.tokens
            estimate += cell.uncounted_chars * rates.get((cell.language, cell.source), rates.get(("", ""), 0.0))
    return exact + round(estimate), estimate > 0


def _language(cell: PredictionCell) -> str:
    return cell.language


def _source(cell: PredictionCell) -> str:
    return cell.source


def _grouped(
    cells: Iterable[PredictionCell], key: Callable[[PredictionCell], str]
) -> Iterator[tuple[str, list[PredictionCell]]]:
    groups: dict[str, list[PredictionCell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    yield from sorted(groups.items())


def _total(name: str, cells: Sequence[PredictionCell], rates: Rates | None) -> Row:
    before, after = ([cell for cell in cells if fate(cell) == KEPT_VERDICT] for fate in (_before, _after))
    row = [name]
    for amount in (_documents, _chars):
        row += _pair(sum(map(amount, before)), sum(map(amount, after)))
    if rates is None:
        return (*row, "", "")
    (had, _), (has, estimated) = kept_tokens(cells, False, rates), kept_tokens(cells, True, rates)
    count, change = _pair(had, has)
    return (*row, ("≈" if estimated else "") + count, change)


def _before(cell: PredictionCell) -> str:
    return cell.before


def _after(cell: PredictionCell) -> str:
    return cell.after


def _documents(cell: PredictionCell) -> int:
    return cell.documents


def _chars(cell: PredictionCell) -> int:
    return cell.chars


def _pair(before: int, after: int) -> tuple[str, str]:
    return f"{after:,}", f"({after - before:+,})" if after != before else "(same)"


def _by_rule(cells: Sequence[PredictionCell]) -> list[Row]:
    totals: dict[str, list[int]] = {}
    for cell in cells:
        for fate, place in ((cell.before, 0), (cell.after, 1)):
            row = totals.setdefault(fate, [0, 0, 0, 0])
            row[place] += cell.documents
            row[place + 2] += cell.chars
    return [
        (name, *_pair(row[0], row[1]), *_pair(row[2], row[3]))
        for name, row in sorted(totals.items())
        if name != KEPT_VERDICT
    ]


def _limits(curve: SensitivityCurve) -> str:
    found = sorted(set(curve.limits.values()))
    return " to ".join(f"{limit:g}" for limit in ([found[0], found[-1]] if len(found) > 1 else found))


def _points(curve: SensitivityCurve) -> str:
    return "  ".join(f"{limit:.6g} → {kept:,}" for limit, kept in curve.points)


def _table(head: Row, rows: Sequence[Row]) -> list[str]:
    table = [head, *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in table
    ]
