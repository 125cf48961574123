"""Prediction of the documents that a finished run would keep with other thresholds (`penstock whatif`).

Every document that has signals gets a new verdict from them, survivors of duplicate clusters are chosen again, and the
result is compared with the run. No text is read: only the columns that the rules need, and the token counts of the
dataset.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.dedup.config import DEDUP, EXACT, NEAR, SAME_URL, TAKEN_DOWN, DedupConfig
from pipeline.dedup.decide import DROPPED, NOT_DROPPED, SurvivorComparison, facts_columns, facts_of
from pipeline.dedup.index import representatives_of
from pipeline.dedup.keys import DIGEST_BYTES
from pipeline.dedup.survivors import (
    RECOGNIZED_BY,
    earlier_clusters,
    earlier_signatures,
    earlier_urls,
    removed_before,
    taken_down_of,
)
from pipeline.engine.parquet import Part, parts_of, read_measured
from pipeline.engine.part import TaskResult
from pipeline.engine.results import SUMMED
from pipeline.engine.rules import KEPT, columns_of, evaluate_checks
from pipeline.engine.spark import dataframe_from_tasks, gather_tasks, persist_on_disk
from pipeline.engine.step import add_figures
from pipeline.engine.worker import local_models
from pipeline.inspect.cells import KEPT_VERDICT, PredictionCell, Rates, counts_of_shard, kept_tokens, token_rates
from pipeline.inspect.whatif_limits import SensitivityCurve, curves_of, sensitivity_part
from pipeline.minhash.stage import SignatureConfig
from pipeline.perplexity.paragraphs import cuts_paragraphs
from pipeline.stages import STEPS, checked_stages, uses_union
from pipeline.steps.paragraphs import count_cuts, limits_of_source
from pipeline.steps.verdicts import (
    VerdictsTask,
    checks_of,
    cutoffs_of,
    histograms_of_part,
    quantiles_of,
    split_columns,
)
from pipeline.tokens.streams import BUCKET_TABLES, MIX_RULE, TOKENS, Sorting, sorting_of, streams_of_part
from pipeline.tokens.tokenizer import TokenizerConfig
from pipeline.tokens.train_tokenizer import TOKENIZER
from schemas.config import Recipe
from schemas.errors import ContractError
from schemas.manifest import TableVersion, open_table, read_run
from schemas.removed import RemovedDocuments
from schemas.storage import Store
from schemas.text import printable, text_table

JUDGED = pa.schema(
    [
        *(pa.field(name, pa.binary()) for name in ("doc", "cluster", "order", "url", "url_order", "signature")),
        *(pa.field(name, pa.string()) for name in ("language", "source", "before", "verdict")),
        pa.field("joined", pa.bool_()),
        pa.field("dropped", pa.bool_()),
        pa.field("left_out", pa.bool_()),
        pa.field("chars", pa.int64()),
    ]
)
JUDGED_DDL = (
    "doc binary, cluster binary, order binary, url binary, url_order binary, signature binary, language string, "
    "source string, before string, verdict string, joined boolean, dropped boolean, left_out boolean, chars long"
)


@dataclass(frozen=True)
class Prediction:
    """The documents that a run would keep with other settings, compared with the documents that the run keeps."""

    cells: tuple[PredictionCell, ...]
    curves: tuple[SensitivityCurve, ...]
    has_tokens: bool
    """True if the run has a dataset, whose token counts the cells contain."""
    cuts_repeats: bool = False
    """True if the run has the step `repeats`. It cuts repeated passages and checks the remaining text again, which
    cannot be predicted without text."""
    chooses_texts: bool = False
    """True if the run has a union of extractors: other limits would also choose other texts, which is not predicted."""
    trains_tokenizer: bool = False
    """True if a run with the new settings trains its tokenizer, so that its tokens are not those of the present one."""
    paragraphs: Mapping[str, Any] | None = None
    """What the new limits of paragraphs cut from the documents that pass the checks, as `count_cuts` returns it; None =
    no limit. The characters of `cells` are counted before these cuts."""


def predict(spark: SparkSession, run: Store, recipe: Recipe, models: Mapping[str, Mapping[str, str]]) -> Prediction:
    """Predict the verdicts that the run would have with the settings of `recipe`.

    `models` are the paths of the models of each stage. Raises ContractError if the run has no table `dedup` yet.
    """
    tables = open_tables(run)
    parts = parts_of({name: table for name, table in tables.items() if name != "index"})
    stages = checked_stages(recipe)
    empty = VerdictsTask(parts[0], stages, recipe, models, {}, run)
    tasks = [replace(empty, part=part) for part in parts]
    quantiles = quantiles_of(stages, recipe)
    if quantiles:
        results = gather_tasks(spark, histograms_of_part, tasks, "cut-offs", None)
        cutoffs = cutoffs_of(quantiles, results.summed["histograms"])
        tasks = [replace(task, cutoffs=cutoffs) for task in tasks]
    curves = curves_of(tasks[0], gather_tasks(spark, sensitivity_part, tasks, "curves", None).summed["alone"])
    has_tokens = "tokens" in read_run(run).tables
    earlier = representatives_of(recipe, [])
    sorting = mix_of(run, tables) if has_tokens else None
    judge_task = partial(predict_part, sorting=sorting, removed=removed_before(earlier))
    judged = persist_on_disk(dataframe_from_tasks(spark, judge_task, tasks, JUDGED_DDL))
    tables |= earlier
    verdicts = apply_mix(with_survivors(judged, recipe, spark, tables))
    cells = count_cells(verdicts, token_counts(spark, run) if has_tokens else None)
    judged.unpersist()
    trains = recipe.section(TOKENIZER.name, TokenizerConfig).model is None
    cuts = None
    if any(cuts_paragraphs(own) for own in recipe.by_source().values()):
        cuts = gather_tasks(spark, paragraphs_part, tasks, "paragraphs", None).summed["cuts"]
    repeats = "repeats" in read_run(run).tables
    return Prediction(tuple(cells), tuple(curves), has_tokens, repeats, uses_union(recipe), trains, cuts)


def open_tables(run: Store) -> dict[str, TableVersion]:
    """Open the tables that a prediction reads.

    Raises ContractError if `dedup` was not made from the current versions of the other tables.
    """
    existing = read_run(run).tables
    reads = next(step.reads for step in STEPS if step.name == DEDUP.name)
    names = [*(name for name in reads if name in existing), DEDUP.name]
    tables = {name: TableVersion(*open_table(run, name, even_replaced=True)) for name in names}
    repeats = TableVersion(*open_table(run, "repeats", even_replaced=True)) if "repeats" in existing else None
    if repeats is not None and _made_from(repeats, tables[DEDUP.name]):
        tables["repeats"] = repeats
    lineage = tables[DEDUP.name].manifest.run.lineage
    for name in (name for name in reads if name in tables):
        version = tables[name].folder.uri.rsplit("/", 1)[-1]
        if lineage.get(name) != version:
            raise ContractError(
                f"{run.uri}: expected `dedup` made from {name}/{version}, got `dedup` made from version "
                f"{lineage.get(name)}. Run `penstock run` until all its steps are complete."
            )
    return tables


def mix_of(run: Store, tables: Mapping[str, TableVersion]) -> Sorting | None:
    """Return the `Sorting` that decides which documents the mix leaves out of the dataset.

    None if the mix leaves no document out, or if the dataset's quality buckets come from tables that are not in
    `tables`.
    """
    dataset = open_table(run, "tokens", even_replaced=True)[1]
    digests = {name: table.manifest.digest for name, table in tables.items()}
    reads = {entry.name: entry.sha256 for entry in dataset.content.inputs if entry.name in BUCKET_TABLES}
    sorting = sorting_of(dataset)
    return sorting if sorting.may_drop and reads.items() <= digests.items() else None


def _made_from(table: TableVersion, other: TableVersion) -> bool:
    return other.manifest.digest in {entry.sha256 for entry in table.manifest.content.inputs}


def predict_part(
    task: VerdictsTask, sorting: Sorting | None, removed: Sequence[RemovedDocuments] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the schema JUDGED, with a row for every measured document of a part.

    `before` is the verdict in the run. `verdict` is the verdict of the checks with the new settings, or that of a
    takedown of an earlier snapshot (`removed`). `sorting` decides which documents the mix leaves out of the dataset;
    None = no document is left out.
    """
    named = checks_of(task.stages, task.recipe, local_models(task.models), task.cutoffs)
    checks = [check for _, check in named]
    names = np.array([*(f"{stage}/{check.reason}" for stage, check in named), KEPT_VERDICT], object)
    config = task.recipe.section("dedup", DedupConfig)
    columns = split_columns(columns_of(checks), task.part.paths)
    for table, names_read in facts_columns(config).items():
        columns[table] = list(dict.fromkeys([*columns.get(table, []), *names_read]))
    recognized_by = RECOGNIZED_BY if removed else ()
    columns["documents"] = list(dict.fromkeys([*columns["documents"], "source", "language", *recognized_by]))
    columns |= {"verdicts": ["drop_stage", "drop_rule"], "dedup": ["drop_stage", "drop_rule"]}
    left_out = left_out_of(task.part, sorting)
    for batch in read_measured(task.part, columns):
        first = evaluate_checks(checks, batch).first
        facts = facts_of(batch, task.part.ordinal, config)
        verdicts, dropped = names[first].tolist(), (first != KEPT).tolist()
        for number in taken_down_of(batch, dropped, removed):
            verdicts[number], dropped[number] = f"{DEDUP.name}/{TAKEN_DOWN}", True
        is_joined = [similarity is not None for similarity in facts.similarities]
        signatures: Sequence[bytes | None] = facts.signatures or [None] * batch.num_rows
        rows = {
            "doc": facts.ids,
            "cluster": facts.clusters,
            "order": facts.orders,
            "url": facts.urls,
            "url_order": facts.url_orders,
            **{name: batch.column(name).fill_null("?").to_pylist() for name in ("language", "source")},
            "before": verdicts_before(batch),
            "verdict": verdicts,
            "signature": [signature if joined else None for signature, joined in zip(signatures, is_joined)],
            "joined": is_joined,
            "dropped": dropped,
            "left_out": [next(left_out) for _ in range(batch.num_rows)],
            "chars": facts.chars,
        }
        yield pa.RecordBatch.from_pydict(rows, schema=JUDGED)


def paragraphs_part(task: VerdictsTask, retried: bool) -> TaskResult:
    """Return as counts `cuts`, what limits of paragraphs cut from the documents of a part that pass the checks."""
    checks = [check for _, check in checks_of(task.stages, task.recipe, local_models(task.models), task.cutoffs)]
    limits = {name: limits_of_source(own, task.cutoffs) for name, own in task.recipe.by_source().items()}
    cuts: dict[str, Any] = {}
    rows = 0
    columns = list(dict.fromkeys([*columns_of(checks), "source"]))
    for batch in read_measured(task.part, split_columns(columns, task.part.paths)):
        passed = batch.filter(pa.array(evaluate_checks(checks, batch).first == KEPT))
        for name, own in limits.items():
            counted = count_cuts(own, passed.filter(pc.equal(passed.column("source"), name)))
            cuts = add_figures(cuts, counted) if cuts else counted
        rows += batch.num_rows
    return {SUMMED: {"cuts": cuts}, "rows": rows}


def left_out_of(part: Part, sorting: Sorting | None) -> Iterator[bool]:
    """Yield, for each measured document of a part, True if the mix leaves the document out of the dataset.

    If `sorting` is None, yield False without end. The value of a document that a rule drops has no meaning.
    """
    while sorting is None:
        yield False
    stream_of = streams_of_part(part, sorting)
    # A document that only the new settings keep has no weight yet, and counts as one that is read once.
    for batch in read_measured(part, {"documents": ["source"], "clusters": ["cluster"], "dedup": ["weight"]}):
        for row in batch.to_pylist():
            yield sorting.drop(stream_of(row), row["doc_id"]) is not None


def apply_mix(verdicts: DataFrame) -> DataFrame:
    """Replace `kept` by the rule of the mix, in `before` and `after`, for documents that the mix leaves out.

    The new settings do not change the quality bucket of a document.
    """
    rule = F.lit(f"{TOKENS.name}/{MIX_RULE}")
    names = ("before", "after")
    chosen = {
        name: F.when(F.col("left_out") & (F.col(name) == KEPT_VERDICT), rule).otherwise(F.col(name)) for name in names
    }
    return verdicts.withColumns(chosen)


def verdicts_before(batch: pa.RecordBatch) -> list[str]:
    """Return the verdict on each document of a batch in the run: `kept`, or the `stage/rule` that dropped it."""
    both = [batch.column(name).to_pylist() for name in ("drop_stage", "drop_rule")]
    later = [batch.column(name).to_pylist() for name in ("dedup.drop_stage", "dedup.drop_rule")]
    return [
        f"{verdict}/{verdict_rule}" if verdict else f"{stage}/{rule}" if stage else KEPT_VERDICT
        for verdict, verdict_rule, stage, rule in zip(*both, *later)
    ]


def with_survivors(
    judged: DataFrame, recipe: Recipe, spark: SparkSession, tables: Mapping[str, TableVersion]
) -> DataFrame:
    """Add the column `after`: the final verdict with the new settings.

    A document that no check drops is dropped by a deduplication rule unless it is the survivor of its URL, and the
    survivor of its cluster or no copy of the survivors that the rounds choose.
    """
    config = recipe.section("dedup", DedupConfig)
    stays = ~F.col("dropped")
    if config.by_url != "off":
        urls = judged.where(stays & F.col("url").isNotNull()).select("url", F.col("url_order").alias("first"))
        urls = urls.union(earlier_urls(spark, tables).select("key", "first"))
        best = urls.groupBy("url").agg(F.min("first").alias("best_url"))
        judged = judged.join(best, "url", "left")
        stays &= F.col("url").isNull() | (F.col("url_order") == F.col("best_url"))
    flag = F.when(stays, F.lit(NOT_DROPPED)).otherwise(F.lit(DROPPED))
    after = F.when(F.col("dropped"), F.col("verdict")).when(~stays, F.lit(f"{DEDUP.name}/{SAME_URL}"))
    after = after.when(~F.col("joined"), F.lit(KEPT_VERDICT))
    judged = judged.withColumns({"own": F.concat(flag, "order"), "after": after})
    copies = judged.where("joined").select("cluster", "own", "signature")
    if config.indexes:
        earlier = earlier_clusters(spark, tables, config).select("key", F.col("first").alias("best"))
        if config.compares_survivors:
            earlier = earlier.join(earlier_signatures(spark, tables, earlier, config), "key", "left")
        else:
            earlier = earlier.withColumn("payload", F.lit(None).cast("binary"))
        copies = copies.union(earlier.select("key", "best", "payload"))
    comparison = SurvivorComparison(config, recipe.section("signature", SignatureConfig), {}, 1)
    for _ in range(config.rounds if config.requires_survivors else 1):
        judged = persist_on_disk(after_round(judged, copies, comparison))
        copies = judged.where("after is null").select("cluster", "own", "signature")
        if copies.isEmpty():
            break
    return judged.fillna(KEPT_VERDICT, ["after"])


def after_round(judged: DataFrame, copies: DataFrame, comparison: SurvivorComparison) -> DataFrame:
    """Set the column `after` of the survivors that a round chooses among `copies`, and of the copies of these.

    Documents whose `after` is null before are undecided, and those that are no copies stay undecided.
    """
    config = comparison.dedup
    best = copies.groupBy("cluster").agg(F.min("own").alias("best"), F.min_by("signature", "own").alias("kept"))
    joined = judged.join(best, "cluster", "left").withColumn("is_copy", F.lit(True))
    if config.requires_survivors:

        def compare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                pairs = zip(batch.column("signature").to_pylist(), batch.column("kept").to_pylist())
                values = [None if None in pair else comparison.similarity(*pair) for pair in pairs]
                is_copy = pa.array([comparison.is_copy(value) for value in values], pa.bool_())
                yield batch.set_column(batch.num_columns - 1, "is_copy", is_copy)

        joined = joined.mapInArrow(compare, joined.schema)
    digest = DIGEST_BYTES if config.exact != "off" else 0
    same = F.substring("own", -digest, digest) == F.substring("best", -digest, digest) if digest else F.lit(False)
    after = F.when(F.col("after").isNotNull(), F.col("after")).when(F.col("own") == F.col("best"), F.lit(KEPT_VERDICT))
    after = after.when(same, F.lit(f"{DEDUP.name}/{EXACT}")).when(F.col("is_copy"), F.lit(f"{DEDUP.name}/{NEAR}"))
    return joined.withColumn("after", after).drop("best", "kept", "is_copy")


def token_counts(spark: SparkSession, run: Store) -> DataFrame:
    """Return the doc_id and number of tokens of every document of the dataset, as columns `doc` and `tokens`."""
    folder, manifest = open_table(run, "tokens", even_replaced=True)
    paths = [path for key, path in manifest.paths.items() if key.endswith(".docs")]
    return dataframe_from_tasks(
        spark, counts_of_shard, [(folder, path) for path in sorted(paths)], "doc binary, tokens long"
    )


def count_cells(verdicts: DataFrame, tokens: DataFrame | None) -> list[PredictionCell]:
    """Return the counts of documents by verdict in the run, new verdict, language and source, as sorted cells.

    `tokens` is the result of `token_counts`; None = there is no dataset.
    """
    if tokens is None:
        verdicts = verdicts.withColumn("tokens", F.lit(None).cast("long"))
    else:
        verdicts = verdicts.join(tokens, "doc", "left")
    rows = (
        verdicts.groupBy("before", "after", "language", "source")
        .agg(
            F.count("*").alias("documents"),
            F.sum("chars").alias("chars"),
            F.coalesce(F.sum("tokens"), F.lit(0)).alias("tokens"),
            F.coalesce(F.sum(F.when(F.col("tokens").isNull(), F.col("chars"))), F.lit(0)).alias("uncounted_chars"),
        )
        .collect()
    )
    return sorted(
        (PredictionCell(**row.asDict()) for row in rows), key=lambda c: (c.before, c.after, c.language, c.source)
    )


# Formats of a prediction as text and JSON: documents kept before and after, by rule, language and source, and the
# sensitivity curves.

Row = tuple[str, ...]
CELL = [field.name for field in fields(PredictionCell)]


def to_json(
    prediction: Prediction, changed: Mapping[str, tuple[Any, Any]], settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the whole prediction as a JSON value; see `format_prediction` for the arguments."""
    return {
        "settings": [*settings],
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
        **({"chooses_texts": True} if prediction.chooses_texts else {}),
        **({} if prediction.paragraphs is None else {"paragraphs": prediction.paragraphs}),
    }


def format_prediction(
    prediction: Prediction, changed: Mapping[str, tuple[Any, Any]], settings: Sequence[str] = ()
) -> str:
    """Format the prediction as text, with the sensitivity curves of the changed settings only.

    `changed` is setting → (value in the run, value tried). `settings` are lines about them; see `describe_changes`.
    """
    lines = [*settings] or ["no setting is changed"]
    rates = token_rates(prediction.cells) if prediction.has_tokens else None
    if prediction.cuts_repeats:
        lines.append("before repeated passages are cut: documents dropped or shortened by that step are not predicted")
    if prediction.chooses_texts:
        lines.append(
            "on the texts that the run has: by `extract.union`, other limits would take some texts from another "
            "extractor, which is not predicted"
        )
    counted = ("documents", "", "characters", "")
    lines += ["", *text_table([("kept", *counted, "tokens", ""), _total("all", prediction.cells, rates)], "<>")]
    lines += [*_about_tokens(prediction, rates), *_about_paragraphs(prediction)]
    lines += ["", *text_table([("dropped by", *counted), *_by_rule(prediction.cells)], "<>")]
    for title, key in (("language", _language), ("source", _source)):
        rows = [_total(name, group, rates) for name, group in _grouped(prediction.cells, key)]
        lines += ["", *text_table([(f"kept, by {title}", *counted, "tokens", ""), *rows], "<>")]
    shown = [curve for curve in prediction.curves if curve.points and curve.setting.partition(" ")[0] in changed]
    if shown:
        lines += ["", "documents kept before deduplication, if only this limit is changed:"]
    lines += [f"  {curve.setting} ({curve.reason}) = {_limits(curve)}: {_points(curve)}" for curve in shown]
    lines += ["", f"curves of all {len(prediction.curves)} limits: --json FILE"]
    return "\n".join(map(printable, lines))


def _about_tokens(prediction: Prediction, rates: Rates | None) -> Iterator[str]:
    """Yield what the numbers of tokens of a prediction are, if they differ from those of a run."""
    if rates is None or all(cell.before == cell.after for cell in prediction.cells):
        return
    if kept_tokens(prediction.cells, True, rates)[1]:
        yield "≈: the tokens of the documents that enter are estimated from their numbers of characters"
    if prediction.trains_tokenizer:
        yield (
            "tokens: as the present tokenizer counts them; a run with these settings trains another one on its own "
            "documents, so its numbers differ"
        )


def _about_paragraphs(prediction: Prediction) -> Iterator[str]:
    """Yield what the limits of paragraphs cut, if there are any."""
    if prediction.paragraphs is None:
        return
    numbers, chars = prediction.paragraphs["cut_paragraphs"], prediction.paragraphs["cut_chars"]
    causes = [f"{cause} {number:,} ({chars[cause]:,} characters)" for cause, number in numbers.items() if number]
    yield (
        f"paragraphs cut from {prediction.paragraphs['cut_documents']:,} of the documents that pass the checks: "
        f"{', '.join(causes) or 'none'}; characters are counted before these cuts"
    )


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
    before, after = ([cell for cell in cells if verdict(cell) == KEPT_VERDICT] for verdict in (_before, _after))
    row = [name]
    for amount in (_documents, _chars):
        row += _pair(sum(map(amount, before)), sum(map(amount, after)))
    if rates is None:
        return (*row, "", "")
    (old, _), (new, estimated) = kept_tokens(cells, False, rates), kept_tokens(cells, True, rates)
    count, change = _pair(old, new)
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
        for verdict, column in ((cell.before, 0), (cell.after, 1)):
            row = totals.setdefault(verdict, [0, 0, 0, 0])
            row[column] += cell.documents
            row[column + 2] += cell.chars
    return [
        (name, *_pair(row[0], row[1]), *_pair(row[2], row[3]))
        for name, row in sorted(totals.items())
        if name != KEPT_VERDICT
    ]


def _limits(curve: SensitivityCurve) -> str:
    limits = sorted(set(curve.limits.values()))
    return " to ".join(f"{limit:g}" for limit in ([limits[0], limits[-1]] if len(limits) > 1 else limits))


def _points(curve: SensitivityCurve) -> str:
    return "  ".join(f"{limit:.6g} → {kept:,}" for limit, kept in curve.points)
