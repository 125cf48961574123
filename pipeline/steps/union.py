"""The union of extractors: a page whose text fails the rules gets the text of the next extractor whose text passes.

The rules are the checks of the stages that measure a document in the worker, as far as they need neither quantiles of
the data nor scores of models. Source: Li et al. 2026, arXiv 2602.19548.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa

from pipeline.engine.rules import KEPT, columns_of, evaluate_checks
from pipeline.engine.stage import CPU, Check, PerDocument, Row, extend_schema
from pipeline.engine.worker import FusedStages, ModelPaths
from pipeline.extract.extract import (
    EXTRACT,
    GUARD,
    NESTING_REASONS,
    PLAIN_TEXT,
    ExtractConfig,
    config_of_extractor,
    make_extract,
)
from pipeline.language import LANGUAGE, NOT_WANTED
from schemas.config import Recipe
from schemas.tables import DOCUMENTS, to_entries

TRIED = "_tried"
"""Field of a row: (extractor, whether its text was taken) of each further extractor that read its page."""
SECOND_OPINION = "second_opinion"
MODEL_SCORES = frozenset(("toxicity_score",))
"""Columns of the measured stages that are scores of models."""


def checks_of_text(stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths) -> list[tuple[str, Check]]:
    """Return the checks that the text of one document can be compared with when it is extracted, and their stages."""
    return [
        (stage.name, check)
        for stage in stages
        if not stage.quantiles(recipe[stage.name])
        for check in stage.checks(recipe[stage.name], models.get(stage.name, {}), {})
        if MODEL_SCORES.isdisjoint((check.column, *check.needs))
    ]


class TextRules:
    """The rules of a recipe for the text of one document."""

    def __init__(self, stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths):
        """`models` are paths on this worker."""
        named = checks_of_text(stages, recipe, models)
        self._names = [f"{stage}/{check.reason}" for stage, check in named]
        self._checks = [check for _, check in named]
        self._columns = columns_of(self._checks)
        kinds = {field.name: field.type for field in extend_schema(DOCUMENTS, stages)}
        self._kinds = [kinds[name] for name in self._columns]

    def broken(self, row: Row) -> str | None:
        """Return `stage/reason` of the drop of a measured row, or of the first check that it breaks; None if none."""
        if row.get("drop_stage") is not None:
            return f"{row['drop_stage']}/{row['drop_rule']}"
        if not self._checks:
            return None
        arrays = [pa.array([_stored(row.get(name))], kind) for name, kind in zip(self._columns, self._kinds)]
        first = int(evaluate_checks(self._checks, pa.RecordBatch.from_arrays(arrays, self._columns)).first[0])
        return None if first == KEPT else self._names[first]


def _stored(value: object) -> object:
    return to_entries(value) if isinstance(value, dict) else value


class ExtractorUnion:
    """The measured stages as one function of a row, which tries the extractors of `extract.union` in their order."""

    def __init__(self, stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths):
        """Load the stages once, and every extractor. `models` are paths on this worker."""
        config = recipe.section(EXTRACT.name, ExtractConfig)
        self._config = config
        self._first = FusedStages([stage for stage in stages if stage.name == EXTRACT.name], recipe, models)
        self._rest = FusedStages([stage for stage in stages if stage.name != EXTRACT.name], recipe, models)
        self._rules = TextRules(stages, recipe, models)
        # A library can hang on a page, so the further extractors run where a limit ends them.
        isolated = replace(EXTRACT, make=partial(make_extract, isolated=True))
        self._others = {
            name: FusedStages([isolated], recipe.with_section(EXTRACT.name, config_of_extractor(config, name)), models)
            for name in config.union[1:]
        }

    def __call__(self, row: Row) -> Row:
        """Return the row measured on the text of the first extractor whose text passes; of the first one if none does.

        The fields TRIED and CPU of the row say what the further extractors did, and what that took.
        """
        given = dict(row)
        first = self._measured(self._first, row)
        started = time.process_time()
        if not _has_other_texts(given, first) or self._rules.broken(first) is None:
            return first
        chosen, tried, elsewhere = first, [], 0.0
        for name, extract in self._others.items():
            if first.get("extracted_by") == name and not self._config.favor_precision:
                continue  # the second opinion on this page was the same text
            other = self._measured(extract, dict(given))
            elsewhere += other[CPU].get(SECOND_OPINION, 0.0)
            is_better = self._rules.broken(other) is None
            tried.append((name, is_better))
            if is_better:
                chosen = other
                break
        if chosen is not first:
            chosen[CPU] = first[CPU]
            chosen |= {name: first[name] for name in (GUARD, SECOND_OPINION) if name in first}
        chosen[TRIED] = tried
        if tried:
            chosen[CPU]["union"] = time.process_time() - started + elsewhere
        return chosen

    def _measured(self, extract: FusedStages, row: Row) -> Row:
        row = extract(row)
        return row if row.get("drop_stage") is not None else self._rest(row)


def _has_other_texts(given: Row, first: Row) -> bool:
    """Return False for rows that have no page, and for pages that no other text can save."""
    if given["text"] is not None or given.get("mime") == PLAIN_TEXT:
        return False
    dropped_by = first.get("drop_stage"), first.get("drop_rule")
    if dropped_by == (LANGUAGE.name, NOT_WANTED):
        return False  # the text is not bad: the recipe wants other languages
    return not (dropped_by[0] == EXTRACT.name and dropped_by[1] in NESTING_REASONS)
