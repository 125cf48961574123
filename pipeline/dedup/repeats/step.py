"""The step `repeats` on Spark: count keys over all parts, return repeated keys to their parts, and write the parts."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.dedup.config import NOTHING_LEFT, REPEATED_SHARE, REPEATS, RepeatsConfig
from pipeline.dedup.keys import scopes_of
from pipeline.dedup.repeats.keys import (
    NO_ORDER,
    SUBSTRING,
    Document,
    KnownRepeats,
    Reevaluator,
    RepeatsTask,
    cut_columns,
    cuts_before,
    known_repeats,
    seeds_of_part,
    template_cuts,
    text_columns,
    units_of_part,
    windows_of_part,
)
from pipeline.dedup.repeats.units import Cut, Tokens, covered_runs, cuts_in_whole_text, cuts_of, grams, scoped, units_of
from pipeline.engine.failures import FAILURE
from pipeline.engine.parquet import TEXTS_AT_ONCE, parts_of, read_measured
from pipeline.engine.part import (
    DropCounter,
    PartOutput,
    PartResult,
    PartResults,
    PartTarget,
    TableTarget,
    set_verdict,
    write_part,
)
from pipeline.engine.spark import TALLIES_DDL, dataframe_from_tasks, map_parts, run_part_writers, totals
from pipeline.engine.stage import Drop, Row
from pipeline.engine.step import StepContext, TableResult, combine_parts
from pipeline.text.spans import Span, complement, union, without
from schemas.config import Recipe
from schemas.tables import DROPPED_BEFORE
from schemas.tables import REPEATS as REPEATS_SCHEMA

# The writer of one part of the table `repeats`: repeats are cut, and the remaining text is judged again.

ANY = "any"
"""Key in the figure `cut_documents` for documents with a cut of any kind."""


def passages_of(
    document: Document, units: KnownRepeats, windows: KnownRepeats, config: RepeatsConfig
) -> list[tuple[str, list[Span]]]:
    """Return (kind of unit, spans to cut [code points]) for each kind in `repeats.units`, in that order."""
    passages: list[tuple[str, list[Span]]] = []
    for kind in config.units:
        if kind == SUBSTRING:
            spans = repeated_runs(document, windows, config)
        else:
            all_units = units_of(document.body, kind, config)
            keys = scoped(all_units.keys, kind, document.scope)
            is_cut = units.is_repeat(keys[:, None], all_units.starts, document.doc_id)
            spans = list(zip(all_units.starts[is_cut].tolist(), all_units.ends[is_cut].tolist()))
        passages.append((kind, spans))
    return passages


def repeated_runs(document: Document, windows: KnownRepeats, config: RepeatsConfig) -> list[Span]:
    """Return the spans of a document that are covered by repeated windows [code points]."""
    if not len(windows):
        return []
    tokens = Tokens(document.body, config.substring_unit)
    prints = scoped(grams(tokens.codes, config.length), SUBSTRING, document.scope)
    near = np.flatnonzero(windows.has_first_number(prints))
    keys = np.stack([prints[near], tokens.checks(near, config.length)], axis=1)
    is_cut = windows.is_repeat(keys, near, document.doc_id)
    return tokens.chars(covered_runs(near[is_cut], config.length))


def write_repeats(task: RepeatsTask, rows: Iterable[pa.RecordBatch], retried: bool) -> PartResult:
    """Write one part of the table `repeats`: cut repeated passages, and evaluate the remaining texts again.

    `rows` (key, part, first) are the repeated keys of the part. `retried` is True if an earlier attempt failed.
    """
    units, windows = known_repeats(rows, (1, 2))

    def fill(output: PartOutput) -> None:
        guard = functools.partial(output.guard, retried=retried)
        judge = task.make_reevaluator(task.recipe, task.models, task.cutoffs, "scores" in task.part.paths, guard)
        output.books = DropCounter([(REPEATS.name, REPEATS.reasons), *judge.reasons], raises=False)
        for batch in read_measured(task.part, columns_for(task, judge), TEXTS_AT_ONCE):
            written = rows_of(batch, task, units, windows)
            reevaluate(written, batch, judge)
            for row in written:
                count_row(row, output.books)
                output.write(row)

    return write_part(PartTarget(task.part.ordinal, {REPEATS.name: TableTarget(task.folder, REPEATS_SCHEMA)}), fill)


def columns_for(task: RepeatsTask, judge: Reevaluator) -> dict[str, Sequence[str]]:
    """Return the stored columns that are read to cut a document and to evaluate it again, by table."""
    own = ["body_chars", "num_bytes", *task.dedup.scope, *judge.columns["documents"]]
    others = {name: columns for name, columns in judge.columns.items() if name != "documents"}
    return {"documents": own, **text_columns(task.part), "dedup": ["drop_stage"], **others}


def rows_of(batch: pa.RecordBatch, task: RepeatsTask, units: KnownRepeats, windows: KnownRepeats) -> list[Row]:
    """Return the rows of the table `repeats` for a batch of documents, with their cuts.

    A row with cuts also has two texts without the repeated passages: `_rest` is the visible text, `_without` the raw
    text without the templates of its host.
    """
    columns = ["doc_id", "text", *cut_columns(task.part), "body_chars", "num_bytes", "drop_stage"]
    rows: list[Row] = []
    for stored, scope in zip(batch.select(columns).to_pylist(), scopes_of(batch, task.dedup)):
        row: dict[str, Any] = {"doc_id": stored["doc_id"], "_chars": stored["body_chars"]}
        rows.append(row)
        if stored["drop_stage"] is not None:
            set_verdict(row, REPEATS.name, Drop(DROPPED_BEFORE))
            continue
        row |= {"cuts": [], "body_chars": stored["body_chars"], "num_bytes": stored["num_bytes"]}
        before = cuts_before(stored)
        body = without(stored["text"], before)
        if stored.get("paragraphs.cuts"):
            row |= {"body_chars": len(body), "num_bytes": len(body.encode("utf-8", "surrogatepass"))}
        document = Document(stored["doc_id"], body, scope, NO_ORDER)
        passages = passages_of(document, units, windows, task.config)
        if task.config.on_substring == "drop":
            passages = without_runs(row, passages, len(body), task.config)
        cuts = cuts_of(body, passages)
        if cuts:
            visible = complement(before, len(stored["text"]))
            cut_row(row, stored["text"], body, (cuts, cuts_in_whole_text(cuts, visible)), template_cuts(stored))
            left = row["body_chars"]
            if left < task.config.min_left_chars:
                set_verdict(row, REPEATS.name, Drop(NOTHING_LEFT, left, task.config.min_left_chars))
    return rows


def without_runs(
    row: Row, passages: list[tuple[str, list[Span]]], size: int, config: RepeatsConfig
) -> list[tuple[str, list[Span]]]:
    """Return the passages of all kinds except SUBSTRING, the kind of the repeated runs.

    If the runs exceed `max_repeated_share` of the text, the document is dropped instead: return no passages, and set
    the verdict in `row`. `size` is the length of the text [code points].
    """
    runs = dict(passages)[SUBSTRING]
    share = sum(end - start for start, end in runs) / max(1, size)
    if share > config.max_repeated_share:
        set_verdict(row, REPEATS.name, Drop(REPEATED_SHARE, share, config.max_repeated_share))
        return []
    return [(kind, spans) for kind, spans in passages if kind != SUBSTRING]


def cut_row(row: Row, text: str, body: str, cuts: tuple[list[Cut], list[Cut]], templates: list[Span]) -> None:
    """Set the cuts, the remaining texts and their sizes in a row.

    `cuts` has all cuts twice: as spans of `body`, the visible text, and as spans of `text`, the raw text. `templates`
    are the spans of the raw text that were cut as templates.
    """
    in_body, in_text = ([(start, end) for start, end, _ in spans] for spans in cuts)
    row["cuts"] = cuts[1]
    row["_rest"], row["_without"] = without(body, in_body), without(text, union(in_text, templates))
    row["body_chars"] = len(row["_rest"])
    row["num_bytes"] = len(row["_rest"].encode("utf-8", "surrogatepass"))


def reevaluate(rows: list[Row], batch: pa.RecordBatch, judge: Reevaluator) -> None:
    """Add new signals and verdicts to the rows with cuts, except those that are already dropped.

    `batch` has the stored values of the same documents in the same order.
    """
    again = [number for number, row in enumerate(rows) if "_rest" in row and row.get("drop_stage") is None]
    names = list(dict.fromkeys(["doc_id", *(name for columns in judge.columns.values() for name in columns)]))
    stored = batch.select(names).take(pa.array(again, pa.int64())).to_pylist()
    judged = [
        known | {"text": rows[number]["_without"], "_rest": rows[number]["_rest"], "drop_stage": None}
        for number, known in zip(again, stored)
    ]
    if judged:
        judge(judged)
    measured = {*REPEATS_SCHEMA.names, FAILURE} - {"cuts", "body_chars", "num_bytes"}
    for number, row in zip(again, judged):
        rows[number] |= {name: row[name] for name in row if name in measured}


def count_row(row: Row, books: DropCounter) -> None:
    """Count one row of the table `repeats` in `books`, and its cuts by kind of unit."""
    kept = row.get("drop_stage") is None
    books.enter(row, row["body_chars"] if kept else row["_chars"])
    cuts = row.get("cuts") or []
    for start, end, kind in cuts:
        books.tally("cut_spans", kind)
        books.tally("cut_chars", kind, end - start)
    for kind in {kind for _, _, kind in cuts} | ({ANY} if cuts else set()):
        books.tally("cut_documents", kind)


def is_enabled(recipe: Recipe) -> bool:
    """Return True if `repeats.units` is not empty, so that the step `repeats` runs."""
    return bool(recipe.section(REPEATS.name, RepeatsConfig).units)


def build_repeats(build: StepContext, make_reevaluator: Callable[..., Reevaluator]) -> dict[str, TableResult]:
    """Build the table `repeats`, one part for each part of `documents`.

    `make_reevaluator` gets the stages of the step, and then the arguments of a `MakeReevaluator`.
    """
    cutoffs = build.inputs["verdicts"].manifest.content.figures["cutoffs"]
    folder = build.folders[REPEATS.name]
    tasks = [
        RepeatsTask(
            part,
            own.recipe,
            own.model_paths(),
            cutoffs,
            folder,
            functools.partial(make_reevaluator, own.per_document),
        )
        for part, own in build.by_part(parts_of(build.inputs))
    ]
    if not tasks:
        return combine_parts(PartResults([]), (REPEATS.name,))
    results = run_part_writers(build, repeats_of(build, tasks), tasks, write_repeats, "cut repeated passages")
    return combine_parts(results, (REPEATS.name,), by_source=True)


def repeats_of(build: StepContext, tasks: list[RepeatsTask]) -> DataFrame:
    """Return rows (key, part, first) of the repeated keys in all parts, both of units and of windows."""
    config = tasks[0].config
    frames: list[DataFrame] = []
    if set(config.units) != {SUBSTRING}:
        units = dataframe_from_tasks(build.spark, units_of_part, tasks, TALLIES_DDL)
        frames.append(repeated_keys(units, config.min_count, config.keep_first))
    if SUBSTRING in config.units:
        seeds = repeated_keys(
            dataframe_from_tasks(build.spark, seeds_of_part, tasks, TALLIES_DDL), config.min_count, False
        )
        runs = map_parts(seeds, tasks, windows_of_part, TALLIES_DDL)
        frames.append(repeated_keys(runs, config.min_count, config.keep_first))
    return functools.reduce(DataFrame.union, frames)


def repeated_keys(tallies: DataFrame, min_count: int, keep_first: bool) -> DataFrame:
    """Return rows (key, part, first) of the keys with at least `min_count` occurrences.

    A key has a row for each part that contains it. `first` locates the first occurrence of the key. It is null if this
    occurrence is in another part, and without `keep_first`.
    """
    rows = totals(tallies).where(F.col("total") >= min_count)
    first = F.when(F.col("first") == F.col("best"), F.col("best")) if keep_first else F.lit(None).cast("binary")
    return rows.select("key", "part", first.alias("first"))
