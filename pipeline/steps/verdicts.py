"""The step `verdicts`: compares stored signals with the limits of the recipe; no text is read.

First, limits that are quantiles of a language's documents are computed from exact histograms. Then the checks of every
document are evaluated, and distributions for the report are counted in the same pass.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.bias.audit import BIAS_FIGURE, check_ratio, comparisons_of
from pipeline.bias.count import COLUMNS, COUNTS, Filter, GroupCounter, rule_filters
from pipeline.bias.stage import BIAS, BiasConfig
from pipeline.engine.finished_parts import FinishedPart
from pipeline.engine.isolation import Crashed
from pipeline.engine.parquet import Part, parts_of, read_measured
from pipeline.engine.part import (
    CRASHED,
    EVERY_STAGE,
    DropCounter,
    PartOutput,
    PartResult,
    PartTarget,
    TableTarget,
    TaskResult,
    set_verdict,
    write_part,
)
from pipeline.engine.progress import WorkTotal
from pipeline.engine.results import SUMMED
from pipeline.engine.rules import (
    COARSE,
    FINE,
    KEPT,
    CheckResults,
    columns_of,
    count_bins,
    elements_of,
    evaluate_checks,
    has_limit,
    is_minimum,
    languages_of,
    of_sources,
    quantile,
)
from pipeline.engine.spark import gather_tasks, run_parts
from pipeline.engine.stage import Check, Cutoffs, Drop, PerDocument, Quantile, Row, RowStep, extend_schema
from pipeline.engine.step import StepContext, TableResult, add_figures, combine_parts
from pipeline.engine.worker import FusedStages, ModelPaths, local_models
from pipeline.perplexity.stage import ALL, HEAD_CUT, MIDDLE_CUT, PERPLEXITY, perplexity_buckets
from schemas.config import Recipe, own_key
from schemas.entries import to_entries
from schemas.storage import Store
from schemas.tables import DOC_ID, DOCUMENTS, SCORES, TEMPLATE_COLUMNS, TEMPLATES, VERDICT_COLUMNS, VERDICTS

SHOWN_LANGUAGES = 12
FACTS = ["source", "body_chars", "perplexity", *COLUMNS]


@dataclass(frozen=True)
class VerdictsTask:
    """One part of `documents`, `templates` and `scores` to check, and the folder of the table `verdicts`."""

    part: Part
    stages: tuple[PerDocument, ...]
    recipe: Recipe
    models: ModelPaths
    cutoffs: Cutoffs
    folder: Store
    finished: FinishedPart | None = None
    """Where the result is stored for later versions of the table; None = only in this version."""


def build_verdicts(build: StepContext) -> dict[str, TableResult]:
    """Build the table `verdicts`, with one part for each part of `documents`, and return its result."""
    tasks = [
        VerdictsTask(part, build.per_document, build.recipe, build.model_paths(), {}, build.folders["verdicts"])
        for part in parts_of(build.inputs)
    ]
    cutoffs: dict[str, dict[str, float]] = {}
    measures: dict[str, Any] = {}
    quantiles = quantiles_of(build.per_document, build.recipe)
    if quantiles:
        results = gather_tasks(build.spark, histograms_of_part, tasks, "compute cut-offs", build.partitions)
        histograms = results.summed["histograms"]
        cutoffs, measures = cutoffs_of(quantiles, histograms), measures_of(quantiles, histograms)
    finished = build.finished_parts(cutoffs)
    tasks = [replace(task, cutoffs=cutoffs, finished=finished[task.part.ordinal]) for task in tasks]
    size = WorkTotal(rows=build.inputs["documents"].manifest.content.counts.rows_kept)
    written = run_parts(build, verdicts_part, tasks, "verdicts", size)
    built = combine_parts(written, ("verdicts",), by_source=True)
    figures = built["verdicts"].figures
    figures["cutoffs"] = cutoffs
    figures["limits"] = limits_of(checks_of(build.per_document, build.recipe, build.model_paths(), cutoffs))
    figures["measures"] = {column: fold(found) for column, found in measures.items()}
    figures["distributions"] = {name: fold(found) for name, found in figures.get("distributions", {}).items()}
    config = build.recipe.section(BIAS.name, BiasConfig)
    counted = [build.inputs["documents"].manifest.content.figures.get(COUNTS, {}), figures.pop(COUNTS, {})]
    compared = [each for counts in counted for each in comparisons_of(counts, config.min_documents)]
    check_ratio("verdicts", compared, config)
    figures[BIAS_FIGURE] = [each.row for each in compared]
    return built


@dataclass(frozen=True)
class StageSettings:
    """The settings of a stage that apply to the documents of some sources."""

    section: Any
    """The section of the stage."""
    key: str
    """Name under which the run keeps the models of the stage."""
    sources: frozenset[str] | None
    """The sources; None: all of the recipe."""
    own_source: str | None = None
    """The source that has the section for itself; None: the section is that of the run."""

    @property
    def suffix(self) -> str:
        """What distinguishes the checks and quantiles of one source's own settings, such as ` of books`; else empty."""
        return f" of {self.own_source}" if self.own_source is not None else ""


def settings_by_source(recipe: Recipe, stage: str) -> list[StageSettings]:
    """Return the settings of a stage: those of the run, and those of each source that has the section for itself."""
    if not recipe.has_several_sources:
        return [StageSettings(recipe[stage], stage, None, recipe.sources[0] if stage in recipe.own else None)]
    own = {name: each[stage] for name, each in recipe.by_source().items() if stage in each.own}
    others = frozenset(recipe.sources) - own.keys()
    shared = [StageSettings(recipe[stage], stage, others if own else None)] if others else []
    return shared + [
        StageSettings(section, own_key(name, stage), frozenset((name,)), name) for name, section in own.items()
    ]


def quantiles_of(stages: Sequence[PerDocument], recipe: Recipe) -> list[Quantile]:
    """Return every quantile of the data that the stages' checks use as a limit.

    A stage that a source has for itself has quantiles of its own, over the documents of this source.
    """
    return [
        replace(item, name=f"{item.name}{settings.suffix}", sources=settings.sources)
        for stage in stages
        for settings in settings_by_source(recipe, stage.name)
        for item in stage.quantiles(settings.section)
    ]


def cutoffs_of_stage(cutoffs: Cutoffs, recipe: Recipe, stage: str) -> Cutoffs:
    """Return the cut-offs that apply to a stage with the recipe of one source, by the stage's names of its quantiles.

    Those of a stage that the source has for itself are stored under names that end with ` of SOURCE`.
    """
    return _with_suffix(cutoffs, settings_by_source(recipe, stage)[0].suffix)


def _with_suffix(cutoffs: Cutoffs, suffix: str) -> Cutoffs:
    return {name.removesuffix(suffix): found for name, found in cutoffs.items() if name.endswith(suffix)}


def checks_of(
    stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths, cutoffs: Cutoffs
) -> list[tuple[str, Check]]:
    """Return every check with the name of its stage, in the order in which documents are checked.

    The label of a check that a source has for itself ends with `of SOURCE`.
    """
    return [
        (
            stage.name,
            replace(
                check,
                label=f"{check.label}{settings.suffix}".strip(),
                sources=settings.sources,
                own_source=settings.own_source,
            ),
        )
        for stage in stages
        for settings in settings_by_source(recipe, stage.name)
        for check in stage.checks(
            settings.section, models.get(settings.key, {}), _with_suffix(cutoffs, settings.suffix)
        )
    ]


def names_of(named: Sequence[tuple[str, Check]]) -> list[str]:
    """Return `stage/reason` for each check, followed by a space and the check's label if it has one."""
    return [f"{stage}/{check.reason} {check.label}".strip() for stage, check in named]


def limits_of(named: Sequence[tuple[str, Check]]) -> dict[str, Any]:
    """Return the setting, column, kind (min or max) and limits of each check that has a limit, by `stage/reason`.

    A check of some sources also has their names, as `sources`; one of a section that a source has for itself, the name
    of the source, as `own_source`.
    """
    return {
        name: {
            "setting": f"{stage}.{check.setting}",
            "column": check.column,
            "side": "min" if is_minimum(check) else "max",
            "limits": dict(sorted(check.limits.items())),
            **({} if check.sources is None else {"sources": sorted(check.sources)}),
            **({} if check.own_source is None else {"own_source": check.own_source}),
        }
        for name, (stage, check) in zip(names_of(named), named)
        if has_limit(check)
    }


def split_columns(names: Sequence[str], tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """Group column names by the table that has them: `documents`, and `templates` and `scores` if the run has them."""
    later = {"templates": TEMPLATE_COLUMNS, "scores": {*SCORES.names} - {DOC_ID.name}}
    columns = {"documents": [name for name in names if not any(name in known for known in later.values())]}
    for table, known in later.items():
        if table in tables:
            columns[table] = [name for name in names if name in known]
    return columns


def histograms_of_part(task: VerdictsTask, retried: bool) -> TaskResult:
    """Return `rows`, the number of documents, and as counts `histograms` of the values by quantile and language."""
    quantiles = quantiles_of(task.stages, task.recipe)
    columns = split_columns(columns_of(quantiles), task.part.paths)
    found: dict[str, Any] = {}
    rows = 0
    for batch in read_measured(task.part, columns):
        rows += batch.num_rows
        numbers, languages = languages_of(batch)
        for item in quantiles:
            values, documents = elements_of(item, batch)
            language_of = numbers[documents]
            by_language = {
                name: {str(key): count for key, count in count_bins(values[language_of == number], FINE).items()}
                for number, name in enumerate(languages)
            }
            found[item.name] = add_figures(found.get(item.name, {}), by_language)
    return {SUMMED: {"histograms": found}, "rows": rows}


def cutoffs_of(quantiles: Sequence[Quantile], histograms: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the value of every quantile, by quantile and language, from `histograms_of_part` of all parts."""
    return {
        item.name: {
            language: quantile({int(key): count for key, count in counts.items()}, item.share, FINE, item.keeps_highest)
            for language, counts in sorted(histograms.get(item.name, {}).items())
            if counts
        }
        for item in quantiles
    }


def measures_of(quantiles: Sequence[Quantile], histograms: Mapping[str, Any]) -> dict[str, Any]:
    """Return histograms for plots, by column and language. The columns are the stored columns of `quantiles`."""
    found: dict[str, Any] = {}
    for item in {item.column: item for item in quantiles if item.value is None}.values():
        for language, counts in histograms.get(item.name, {}).items():
            coarse: Counter[str] = Counter()
            for key, count in counts.items():
                coarse[str(int(key) >> COARSE - FINE)] += count
            found.setdefault(item.column, {}).update({language: coarse} if coarse else {})
    return found


def verdicts_part(task: VerdictsTask, retried: bool) -> PartResult:
    """Evaluate the checks on one part and write its verdicts."""

    def fill(output: PartOutput) -> None:
        named = checks_of(task.stages, task.recipe, local_models(task.models), task.cutoffs)
        checks = [check for _, check in named]
        distributions: Any = {}
        beyond: Any = {}
        buckets: dict[str, Counter[str]] = {}
        counter = GroupCounter()
        columns = split_columns(list(dict.fromkeys([*columns_of(checks), *FACTS])), task.part.paths)
        for batch in read_measured(task.part, columns):
            judgement = evaluate_checks(checks, batch)
            distributions = add_figures(distributions, distributions_of(named, judgement, batch))
            beyond = add_figures(beyond, beyond_of(named, judgement, batch))
            counter.add(batch, filters_of(named, judgement))
            for name, (row, chars) in zip(buckets_of(batch, task), rows_of(named, judgement, batch)):
                row["perplexity_bucket"] = name
                buckets.setdefault(row["language"] or "?", Counter())[name] += 1
                count_verdict(row, chars, output.books)
                output.write(row)
        output.figures["distributions"], output.figures["beyond"] = distributions, beyond
        output.figures[COUNTS] = counter.figures
        output.figures["buckets"] = {language: dict(counter) for language, counter in buckets.items()}

    reasons = [(stage.name, stage.verdicts) for stage in task.stages]
    tables = {"verdicts": TableTarget(task.folder, VERDICTS)}
    return write_part(PartTarget(task.part.ordinal, tables, reasons, raises=False, finished=task.finished), fill)


def distributions_of(
    named: Sequence[tuple[str, Check]], judgement: CheckResults, batch: pa.RecordBatch
) -> dict[str, Any]:
    """Return histograms for plots, by check and language, of the values that the check compares with its limit."""
    numbers, languages = languages_of(batch)
    found: dict[str, Any] = {}
    rows = zip(named, names_of(named), judgement.values, judgement.limits)
    for name, values, limits in (row[1:] for row in rows if has_limit(row[0][1])):
        applies = ~np.isnan(values) & ~np.isnan(limits)
        by_language = {
            language: {str(key): count for key, count in count_bins(values[applies & (numbers == at)], COARSE).items()}
            for at, language in enumerate(languages)
        }
        found[name] = {language: counts for language, counts in by_language.items() if counts}
    return found


def beyond_of(named: Sequence[tuple[str, Check]], judgement: CheckResults, batch: pa.RecordBatch) -> dict[str, Any]:
    """Return the number of documents that break each check, by check and language.

    A document that breaks several checks is counted for each of these checks.
    """
    numbers, languages = languages_of(batch)
    counts = [np.bincount(numbers[broken], minlength=len(languages)).tolist() for broken in judgement.broken]
    return {
        name: {language: count for language, count in zip(languages, row) if count}
        for name, row in zip(names_of(named), counts)
    }


def filters_of(named: Sequence[tuple[str, Check]], judgement: CheckResults) -> list[Filter]:
    """Return the filters of all stages with checks, for the bias audit: a stage is reached if none before it drops."""
    filters: list[Filter] = []
    first = judgement.first
    for stage in dict.fromkeys(stage for stage, _ in named):
        places = [at for at, (name, _) in enumerate(named) if name == stage]
        reasons = dict.fromkeys(named[at][1].reason for at in places)
        dropped: dict[str, npt.NDArray[np.bool_]] = {
            reason: np.any(judgement.broken[[at for at in places if named[at][1].reason == reason]], axis=0)
            for reason in reasons
        }
        filters += rule_filters(stage, (first == KEPT) | (first >= places[0]), dropped)
    return filters


def fold(by_language: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the histograms of the SHOWN_LANGUAGES most frequent languages.

    `other` is the sum of all other histograms.
    """
    ranked = sorted(by_language, key=lambda name: (-sum(by_language[name].values()), name))
    folded: dict[str, Any] = {name: dict(by_language[name]) for name in sorted(ranked[:SHOWN_LANGUAGES])}
    for name in ranked[SHOWN_LANGUAGES:]:
        folded["other"] = add_figures(folded.get("other", {}), by_language[name])
    return folded


def rows_of(
    named: Sequence[tuple[str, Check]], judgement: CheckResults, batch: pa.RecordBatch
) -> Iterator[tuple[Row, int]]:
    """Yield (row with the verdict, length of the text after cuts [code points]) for every document of a batch."""
    first = judgement.first
    places = np.arange(len(first))
    # The index KEPT is -1, so it selects the row of NaN that is appended; without checks, this is the only row.
    nothing = np.full((1, len(first)), np.nan)
    values, limits = (
        np.concatenate((measured_of_all, nothing))[first, places].tolist()
        for measured_of_all in (judgement.values, judgement.limits)
    )
    marking = [(at, f"{stage}/{check.reason}") for at, (stage, check) in enumerate(named) if check.marks]
    facts = batch.select(["doc_id", "source", "language", "body_chars"]).to_pylist()
    for number, (row, check, value, limit) in enumerate(zip(facts, first.tolist(), values, limits)):
        chars = row.pop("body_chars")
        if marking:
            row["marked_by"] = [name for at, name in marking if judgement.broken[at, number]] or None
        if check != KEPT:
            stage, broken = named[check]
            numbers = _or_none(value), _or_none(limit)
            row.update(zip(VERDICT_COLUMNS, (stage, broken.reason, *numbers), strict=True))
        yield row, chars


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else value


def buckets_of(batch: pa.RecordBatch, task: VerdictsTask) -> list[str]:
    """Return the perplexity bucket of each document: head, middle or tail.

    The bucket is `all` if the perplexity was not measured, or if the document's language has no cut-offs.
    """
    if "perplexity" not in batch.schema.names:
        return [ALL] * batch.num_rows
    numbers, languages = languages_of(batch)
    measured_values = batch.column("perplexity").to_numpy(zero_copy_only=False)
    found = np.full(batch.num_rows, ALL, object)
    for settings in settings_by_source(task.recipe, PERPLEXITY.name):
        cutoffs = _with_suffix(task.cutoffs, settings.suffix)
        cuts = [
            np.array([cutoffs.get(name, {}).get(language, np.nan) for language in languages])[numbers]
            for name in (HEAD_CUT, MIDDLE_CUT)
        ]
        names = perplexity_buckets(measured_values, *cuts)
        applies = of_sources(settings.sources, batch)
        found = names if applies is None else np.where(applies, names, found)
    return list(found.tolist())


def count_verdict(row: Row, chars: int, books: DropCounter) -> None:
    """Count one document as kept or dropped. Count the characters of a kept document by source and by language."""
    books.enter(row, chars)
    language, source = row.pop("language") or "?", row.pop("source")
    if row.get("drop_stage") is None:
        books.tally("kept_languages", language)
        books.tally("kept_language_chars", language, chars)
        books.tally("kept_sources", source)
        books.tally("kept_source_chars", source, chars)
        for mark in row.get("marked_by") or ():
            books.tally("marked", mark)


# Re-evaluation: documents from which passages were cut are measured again and compared with the same limits.
#
# A document is measured as if the passages had never existed. A stage that read the whole text reads it without them; a
# stage that read the text after cuts reads what is left. Limits that are quantiles of the data are not computed again.

CONTEXT = ("source", "language")
"""Columns that the stages read, besides those that checks compare with limits."""


def is_score(stage: PerDocument) -> bool:
    """Return True if the columns of the stage are stored in the table `scores`."""
    return not set(stage.adds).isdisjoint(SCORES.names)


class Reevaluation:
    """Measures documents again after passages were cut from them, and evaluates the checks on the new values."""

    def __init__(
        self,
        stages: Sequence[PerDocument],
        recipe: Recipe,
        models: ModelPaths,
        cutoffs: Cutoffs,
        scored: bool,
        guard: Callable[[RowStep], RowStep],
    ):
        """Load the stages.

        `scored` is True if the run has a table `scores`. `guard` returns the guard of a function of a row.
        """
        local = local_models(models)
        of_text = [stage for stage in stages if stage.again == "text"]
        of_rest = [stage for stage in stages if stage.again == "rest" and (scored or not is_score(stage))]
        self._first = of_text[0].name
        self._of_text, self._of_rest = FusedStages(of_text, recipe, local), FusedStages(of_rest, recipe, local)
        self._measure = guard(self._measured)
        self._named = checks_of(stages, recipe, local, cutoffs)
        self._checks = [check for _, check in self._named]
        schemas = (TEMPLATES, SCORES, extend_schema(DOCUMENTS, stages))
        self._kinds = {field.name: field.type for schema in schemas for field in schema}
        names = list(dict.fromkeys([*columns_of(self._checks), *CONTEXT]))
        self.columns: Mapping[str, Sequence[str]] = split_columns(names, {"scores": None} if scored else {})
        again = {stage.name for stage in (*of_text, *of_rest)}
        self.reasons: Sequence[tuple[str, Mapping[str, str]]] = [
            (stage.name, {**stage.verdicts, **(EVERY_STAGE if stage.name in again else {})}) for stage in stages
        ]

    def __call__(self, rows: list[Row]) -> None:
        """Measure each row again, and add a drop to each row that breaks a check.

        The `text` of a row is the whole text without the cut passages. `_rest` is the text after all cuts.
        """
        for row in rows:
            try:
                row.update(self._measure(row))
            except Crashed:
                set_verdict(row, self._first, Drop(CRASHED))
        names = columns_of(self._checks)
        columns = [pa.array([_stored(row.get(name)) for row in rows], self._kinds[name]) for name in names]
        judgement = evaluate_checks(self._checks, pa.RecordBatch.from_arrays(columns, names))
        for number, (row, first) in enumerate(zip(rows, judgement.first.tolist())):
            if first != KEPT:
                stage, check = self._named[first]
                value, limit = (float(numbers[first, number]) for numbers in (judgement.values, judgement.limits))
                set_verdict(row, stage, Drop(check.reason, _or_none(value), _or_none(limit)))

    def _measured(self, row: Row) -> Row:
        row = self._of_text(row)
        if row.get("drop_stage") is None:
            row["_body"] = row["_rest"]
            row = self._of_rest(row)
        return row


def _stored(value: object) -> object:
    # New measurements may return a dict, which Arrow stores as (name, value) pairs.
    return to_entries(value) if isinstance(value, dict) else value
