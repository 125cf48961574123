"""Rules of a recipe (`[[quality.rule]]`) as checks on stored columns, and all rules applied to given signals.

A rule is parsed once against the columns of a run, so that a wrong name or kind is reported before anything starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.engine.rules import columns_of, evaluate_checks
from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument
from pipeline.quality.config import QualityConfig, RecipeRule
from pipeline.quality.rules import SIGNALS_OF
from pipeline.quality.stage import QUALITY
from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.expressions import Expression, UnknownColumnError, parse_expression
from schemas.tables import DOCUMENTS, META_PREFIX, SCORES, VERDICT_COLUMNS

SIDES: Mapping[str, Any] = {"<": "min", "<=": "min", ">": "max", ">=": "max"}
"""Comparison that drops a document → the kind of its limit."""


class BrokenRule(NamedTuple):
    """A rule that a document breaks."""

    reason: str
    """The name of the rule."""
    value: float | None
    """The value that the rule compared; None for a rule that is not one comparison with a number."""
    limit: float | None
    """The limit of the value; None as for `value`."""


def rule_columns(documents: pa.Schema) -> pa.Schema:
    """Return the columns that rules may name, for a run whose table `documents` has these columns."""
    fields = {field.name: field for field in (*documents, *SCORES) if field.name not in VERDICT_COLUMNS}
    return pa.schema(list(fields.values()))


def parse_rules(config: QualityConfig, columns: pa.Schema, unmeasured: Mapping[str, str]) -> list[Expression]:
    """Return the conditions of the recipe's rules.

    `unmeasured` maps columns that the recipe does not measure, besides those of families of signals, to the fix.
    Raises ConfigError that lists every rule that cannot be evaluated.
    """
    problems: list[str] = []
    conditions: list[Expression] = []
    for rule in config.rule:
        where = f"quality.rule {rule.name}: when"
        try:
            condition = parse_expression(rule.when, columns, where)
        except UnknownColumnError as error:
            problems.append(_about_meta(error.name, where) or str(error))
            continue
        except ConfigError as error:
            problems.append(str(error))
            continue
        problems += _problems_of_columns(condition, config, unmeasured, where)
        conditions.append(condition)
    if problems:
        raise ConfigError("\n".join(problems))
    return conditions


def _about_meta(name: str, where: str) -> str | None:
    """Return the problem of a rule that names a field of the column `meta`; None for another name."""
    if not name.startswith(META_PREFIX):
        return None
    return (
        f"{where}: expected columns that every row has, got {name!r}, a field of `meta`, which only conditions on a "
        f"finished run can name. Declare a column in a [[stage]] whose function reads it from row['meta']."
    )


def _problems_of_columns(
    condition: Expression, config: QualityConfig, unmeasured: Mapping[str, str], where: str
) -> list[str]:
    problems = []
    for name in sorted(condition.columns):
        family = next((family for family, signals in SIGNALS_OF.items() if any(s.name == name for s in signals)), None)
        fix = (
            f"Add {family!r} to quality.families" if family and family not in config.families else unmeasured.get(name)
        )
        if fix is not None:
            of = f" of the family {family!r}" if family else ""
            problems.append(f"{where}: expected columns that the recipe measures, got {name!r}{of}. {fix}.")
    return problems


def canonical_rules(config: QualityConfig, columns: pa.Schema, unmeasured: Mapping[str, str]) -> QualityConfig:
    """Return the section with each rule's condition in canonical form, so that its spelling changes no fingerprint.

    See `parse_rules` for the arguments and errors.
    """
    conditions = parse_rules(config, columns, unmeasured)
    rules = [rule.model_copy(update={"when": condition.canonical}) for rule, condition in zip(config.rule, conditions)]
    return config.model_copy(update={"rule": tuple(rules)}) if rules else config


def with_rules(config: QualityConfig, columns: pa.Schema) -> PerDocument:
    """Return the quality stage with the rules of the recipe; `columns` are the columns that rules may name."""
    if not config.rule:
        return QUALITY
    reasons = {rule.name: rule.reason for rule in config.rule}
    return replace(QUALITY, verdicts={**QUALITY.verdicts, **reasons}, checks=partial(_all_checks, columns))


def _all_checks(
    columns: pa.Schema, config: QualityConfig, models: Mapping[str, str], cutoffs: Cutoffs
) -> Sequence[Check]:
    return [*QUALITY.checks(config, models, cutoffs), *recipe_checks(config, columns)]


def recipe_checks(config: QualityConfig, columns: pa.Schema) -> list[Check]:
    """Return a check for each rule of the recipe, in order; `columns` are the columns that rules may name."""
    return [
        _check(rule, parse_expression(rule.when, columns, f"quality.rule {rule.name}: when")) for rule in config.rule
    ]


def _check(rule: RecipeRule, condition: Expression) -> Check:
    single = condition.single
    return Check(
        reason=rule.name,
        column=single.column if single else "",
        setting="rule",
        limits={EVERY: single.number} if single else {},
        needs=tuple(sorted(condition.columns)),
        drops=partial(_drops, condition),
        side=SIDES.get(single.operator) if single else None,
        inclusive=single is not None and single.operator in ("<", ">"),
    )


def _drops(condition: Expression, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    drops: npt.NDArray[np.bool_] = condition.evaluate(batch).to_numpy(zero_copy_only=False)
    return drops


def check_rules(
    signals: Mapping[str, Any], config: QualityConfig, language: str, more: Sequence[pa.Field] = ()
) -> list[BrokenRule]:
    """Return every quality rule, built-in or of the recipe, that a document breaks, in the order of the checks.

    `signals` are the document's measured values by column name, such as `code_lines`. A missing one is null, and a rule
    that compares it is not broken. `more` are the columns of stages of the recipe, which signals and rules may name.
    Raises ConfigError if a rule or a signal names a column that does not exist.
    """
    known = rule_columns(pa.schema([*DOCUMENTS, *QUALITY.columns, *more]))
    unknown = sorted(set(signals) - set(known.names))
    if unknown:
        close = suggest_name(unknown[0], known.names)
        raise ConfigError(f"check_rules: expected names of columns, got {unknown[0]!r}{close}. Correct the name.")
    checks = _all_checks(known, config, QUALITY.models(config), {})
    row = {**signals, "language": language}
    names = columns_of(checks)
    arrays = [pa.array([row.get(name)], known.field(name).type) for name in names]
    results = evaluate_checks(checks, pa.RecordBatch.from_arrays(arrays, names))
    return [
        BrokenRule(check.reason, _number(results.values[at, 0]), _number(results.limits[at, 0]))
        for at, check in enumerate(checks)
        if results.broken[at, 0]
    ]


def _number(value: float) -> float | None:
    # Checks compare float32; the shortest text of the number has the digits that were meant, such as 0.2.
    return None if np.isnan(value) else float(str(np.float32(value)))
