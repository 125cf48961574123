"""Sensitivity curves of `penstock whatif`, and the settings that it may change.

A curve is the number of documents kept as a function of one limit, while all other limits stay the same. A what-if may
change only settings that are compared with stored measurements. Every other changed setting is rejected with a reason.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.dedup.config import DEDUP
from pipeline.engine.parquet import read_measured
from pipeline.engine.part import TaskResult
from pipeline.engine.results import SUMMED
from pipeline.engine.rules import columns_of, count_bins, evaluate_checks, has_limit, is_minimum, lower_edge
from pipeline.engine.stage import Check
from pipeline.engine.step import add_figures
from pipeline.engine.worker import local_models
from pipeline.language import LANGUAGE, LanguageConfig
from pipeline.perplexity.paragraphs import PARAGRAPHS
from pipeline.quality.config import QualityConfig
from pipeline.quality.limits import limit_in_force, limits_by_setting, replacement_notes
from pipeline.quality.stage import QUALITY
from pipeline.recipe_stages import SECTION
from pipeline.stages import CHECKED, SCORED, document_columns, stages_of
from pipeline.steps.verdicts import VerdictsTask, checks_of, split_columns
from pipeline.templates.stage import TEMPLATES
from schemas.config import SEPARATOR, Recipe
from schemas.errors import ConfigError
from schemas.field_docs import toml_value
from schemas.tables import SCORES

CUT_BITS = 16
"""Number of low bits of a float32 that a histogram bin ignores: bins are 0.8 % wide, so a histogram stays small."""
SHARES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class SensitivityCurve:
    """Documents kept as a function of one limit, with all other limits unchanged and before deduplication."""

    setting: str
    reason: str
    limits: Mapping[str, float]
    """The limit in the recipe, by language."""
    points: tuple[tuple[float, int], ...]
    """(limit, documents kept) of each point, in ascending order of the limit."""


def curves_of(task: VerdictsTask, alone: Mapping[str, Any]) -> list[SensitivityCurve]:
    """Return the sensitivity curve of every check that keeps documents up to its limit, or from its limit on.

    `alone` has the sums of the counts of `sensitivity_part` over all parts, of which `task` is one.
    """
    named = checks_of(task.stages, task.recipe, task.models, task.cutoffs)
    columns = pa.schema([*document_columns(task.recipe), *(field for field in SCORES if field.name != "doc_id")])
    return [
        SensitivityCurve(
            f"{stage}.{check.setting} {check.label}".strip(),
            check.reason,
            dict(check.limits),
            points(alone[str(row)]["bins"], alone[str(row)]["free"], is_minimum(check), is_whole(check, columns)),
        )
        for row, (stage, check) in enumerate(named)
        if has_limit(check) and check.inclusive
    ]


def is_whole(check: Check, columns: pa.Schema) -> bool:
    """Return True if the check compares whole numbers; `columns` has the types of the stored columns."""
    return check.value is None and pa.types.is_integer(columns.field(check.column).type)


def points(bins: Mapping[str, int], free: int, minimum: bool, whole: bool) -> tuple[tuple[float, int], ...]:
    """Return (limit, documents kept) for limits near the quantiles SHARES of a check's values.

    `bins` is a histogram of the values that are compared with the limit. `free` is the number of documents without such
    a value; they are always kept. `minimum` is True if values below the limit are dropped. `whole` is True if the
    values are whole numbers; then the limits are whole numbers, too.
    """
    # The counts are exact: each limit is the edge of a bin, or the nearest whole number inside the bin.
    keys = sorted(map(int, bins))
    if not keys:
        return ()
    reached = np.cumsum([bins[str(key)] for key in keys])
    total = int(reached[-1])
    chosen = sorted({int(np.searchsorted(reached, max(1, round(share * total)))) for share in SHARES})
    if minimum:
        starts = [math.ceil(edge) if whole else edge for edge in (lower_edge(keys[at], CUT_BITS) for at in chosen)]
        return tuple((start, free + total - (int(reached[at - 1]) if at else 0)) for start, at in zip(starts, chosen))
    ends = [math.floor(edge) if whole else edge for edge in (_last_value(keys[at]) for at in chosen)]
    return tuple((end, free + int(reached[at])) for end, at in zip(ends, chosen))


def _last_value(key: int) -> float:
    """Return the largest float32 in a histogram bin, and 0 for the bin that starts at 0."""
    # The other numbers in the bin of 0 are too small for any signal to have.
    if lower_edge(key, CUT_BITS) == 0:
        return 0.0
    return float(np.nextafter(np.float32(lower_edge(key + 1, CUT_BITS)), np.float32(-np.inf)))


def sensitivity_part(task: VerdictsTask, retried: bool) -> TaskResult:
    """Count the values of each check, over the documents of a part that pass all other checks.

    `rows` is the number of documents read. The counts `alone` map the index of a check to `bins`, the histogram, and
    `free`, the number of documents that the check does not compare.
    """
    named = checks_of(task.stages, task.recipe, local_models(task.models), task.cutoffs)
    checks: list[Check] = [check for _, check in named]
    alone: Any = {str(row): {"bins": {}, "free": 0} for row in range(len(checks))}
    rows = 0
    for batch in read_measured(task.part, split_columns(columns_of(checks), task.part.paths)):
        rows += batch.num_rows
        judgement = evaluate_checks(checks, batch)
        others = judgement.broken.sum(axis=0)
        for row in range(len(checks)):
            passes = others == judgement.broken[row]
            compared = ~np.isnan(judgement.values[row]) & ~np.isnan(judgement.limits[row])
            bins = count_bins(judgement.values[row][passes & compared], CUT_BITS)
            counts = {"bins": {str(key): count for key, count in bins.items()}, "free": int((passes & ~compared).sum())}
            alone[str(row)] = add_figures(alone[str(row)], counts)
    return {SUMMED: {"alone": alone}, "rows": rows}


# Settings that a what-if may change.

Settings = Mapping[str, Any]
SURVIVOR_SETTINGS = {("dedup", "keep"), ("dedup", "source_ranks")}
"""(section, setting) that choose the survivor of a cluster. In a run they also choose the document of an LSH bucket
that the others are compared with, so its clusters could differ slightly. A what-if uses the existing clusters."""
REJECTION_REASONS = {
    **{stage.name: "it changes what is measured, or the text itself" for stage in stages_of("documents")},
    SECTION: "it changes what is measured, or the text itself",
    **{stage.name: "it changes the scores" for stage in SCORED},
    TEMPLATES.name: "it changes the cuts, and so the text that is measured",
    PARAGRAPHS.name: "it changes which paragraphs are stored",
    "dedup": "it changes which documents are copies of one another",
    "pii": "it changes the text that is kept, not which documents are",
    "plant": "it changes the text that is kept, not which documents are",
    "tokens": "it changes the shards, and which clean documents a mix leaves out of them",
}


def changed_settings(committed: Recipe, tried: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two recipes, as `section.setting` → (value committed, value tried).

    Raises ConfigError, with the reasons, if a what-if cannot change some of these settings.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    rejected: list[str] = []
    judged = {DEDUP.name, *(stage.name for stage in CHECKED)}
    for name, old, section in committed.differences(tried):
        before, after = old.model_dump(mode="json"), section.model_dump(mode="json")
        kind = name.rpartition(SEPARATOR)[2]
        decides = section.fields_of("decision") if kind in judged else set()
        execution = section.fields_of("execution")
        for key in after:
            if before[key] == after[key]:
                continue
            changed[f"{name}.{key}"] = before[key], after[key]
            if key in execution:
                rejected.append(f"{name}.{key}: it has no effect on what is kept")
            elif key not in decides and (kind, key) not in SURVIVOR_SETTINGS:
                rejected.append(f"{name}.{key}: {_reason(kind)}")
        rejected += _derived(name, old.content(), section.content(), changed)
    if rejected:
        raise ConfigError(
            "what-if: expected only settings that are compared with stored measurements, got\n  "
            + "\n  ".join(rejected)
            + "\nRun `penstock run` with these settings instead. Unaffected steps are not repeated."
        )
    return changed


def _derived(
    section: str, before: Mapping[str, Any], after: Mapping[str, Any], changed: Mapping[str, Any]
) -> list[str]:
    """Return the rejection reasons of settings that differ only as a consequence of a changed setting.

    For example, the list of signals depends on `quality.dialect`.
    """
    return [
        f"{section}.{key}: would become {after[key]!r} (now {before.get(key)!r}); "
        f"{_reason(section.rpartition(SEPARATOR)[2])}"
        for key in after
        if before.get(key) != after[key] and f"{section}.{key}" not in changed
    ]


def _reason(section: str) -> str:
    return REJECTION_REASONS.get(section, "it has no part in which documents are kept")


def describe_changes(
    committed: Recipe, tried: Recipe, changed: Iterable[str], models: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a line for each changed setting, with the limits in force, and notes on limits that are replaced.

    `changed` are names of settings as `changed_settings` returns them. `models` are the local paths of the models of
    the quality stage by name.
    """
    lines, names = [], [*changed]
    for name in names:
        section, _, key = name.rpartition(SEPARATOR)
        before, after = (_shown(recipe, section, key, models) for recipe in (committed, tried))
        lines.append(f"{name}: {before} -> {after}")
    limits = [key for section, _, key in (name.rpartition(SEPARATOR) for name in names) if section == QUALITY.name]
    if limits:
        lines += [f"note: {note}" for note in replacement_notes(tried, models, limits)]
    return tuple(lines)


def _shown(recipe: Recipe, section: str, key: str, models: Mapping[str, str]) -> str:
    found = recipe.section_at(section)
    value = getattr(found, key)
    if not isinstance(found, QualityConfig):
        return toml_value(value)
    config = found
    languages = recipe.section(LANGUAGE.name, LanguageConfig).languages
    limits = limits_by_setting(config, models).get(key)
    return limit_in_force(key, value, config.dialect, limits, languages) or toml_value(value)
