"""The prediction: every measured document judged anew, copies chosen anew, and counted against the committed run.

It reads narrow columns of `documents`, `scores`, `verdicts` and `dedup`, and the token counts of the dataset; no text.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.dedup.config import DEDUP, EXACT, NEAR, SAME_URL, DedupConfig
from pipeline.dedup.decide import DROPPED, NOT_DROPPED, facts_columns, facts_of
from pipeline.dedup.index import representatives_of
from pipeline.dedup.keys import DIGEST_BYTES
from pipeline.dedup.survivors import earlier_clusters, earlier_urls
from pipeline.engine.parquet import Part, parts_of, read_measured
from pipeline.engine.rules import KEPT, columns_of, evaluate_checks
from pipeline.engine.spark import dataframe_from_tasks, persist_on_disk, run_tasks
from pipeline.engine.worker import local_models
from pipeline.inspect.whatif_limits import SensitivityCurve, curves_of, sensitivity_part
from pipeline.stages import CHECKED
from pipeline.steps.verdicts import (
    VerdictsTask,
    checks_of,
    cutoffs_of,
    histograms_of_part,
    quantiles_of,
    split_columns,
)
from pipeline.tokens.streams import BUCKET_TABLES, MIX_RULE, TOKENS, Sorting, sorting_of, streams_of_part
from schemas.config import Recipe
from schemas.errors import ContractError
from schemas.manifest import TableVersion, open_table, read_run
from schemas.storage import Store

KEPT_VERDICT = "kept"
JUDGED = pa.schema(
    [
        *(pa.field(name, pa.binary()) for name in ("doc", "cluster", "order", "url", "url_order")),
        *(pa.field(name, pa.string()) for name in ("language", "source", "before", "verdict")),
        pa.field("joined", pa.bool_()),
        pa.field("dropped", pa.bool_()),
        pa.field("left_out", pa.bool_()),
        pa.field("chars", pa.int64()),
    ]
)
JUDGED_DDL = (
    "doc binary, cluster binary, order binary, url binary, url_order binary, language string, source string, "
    "before string, verdict string, joined boolean, dropped boolean, left_out boolean, chars long"
)


@dataclass(frozen=True)
class PredictionCell:
    """Documents that met one fate before and one after, of one language and source."""

    before: str
    after: str
    language: str
    source: str
    documents: int
    chars: int
    tokens: int
    """Of those documents that the dataset holds."""
    uncounted_chars: int
    """Of those that it does not hold: their tokens are not known."""


@dataclass(frozen=True)
class Prediction:
    """What a run with other settings would keep."""

    cells: tuple[PredictionCell, ...]
    curves: tuple[SensitivityCurve, ...]
    has_tokens: bool
    cuts_repeats: bool = False
    """Whether the run cuts passages after that and judges again, which takes text to predict."""


def predict(spark: SparkSession, run: Store, recipe: Recipe, models: Mapping[str, Mapping[str, str]]) -> Prediction:
    """The fate of every measured document under `recipe`. Raises ContractError if the run has no `dedup` yet."""
    tables = open_tables(run)
    parts = parts_of({name: table for name, table in tables.items() if name != "index"})
    empty = VerdictsTask(parts[0], CHECKED, recipe, models, {}, run)
    tasks = [replace(empty, part=part) for part in parts]
    wanted = quantiles_of(CHECKED, recipe)
    if wanted:
        answers = run_tasks(spark, histograms_of_part, tasks, "cut-offs", None)
        cutoffs = cutoffs_of(wanted, [answer["histograms"] for answer in answers])
        tasks = [replace(task, cutoffs=cutoffs) for task in tasks]
    curves = curves_of(tasks, run_tasks(spark, sensitivity_part, tasks, "curves", None))
    has_tokens = "tokens" in read_run(run).tables
    judge_them = partial(predict_part, sorting=mix_of(run, tables) if has_tokens else None)
    judged = persist_on_disk(dataframe_from_tasks(spark, judge_them, tasks, JUDGED_DDL))
    tables |= representatives_of(recipe, [])
    fates = apply_mix(with_survivors(judged, recipe.section("dedup", DedupConfig), spark, tables))
    cells = count_cells(fates, token_counts(spark, run) if has_tokens else None)
    judged.unpersist()
    return Prediction(tuple(cells), tuple(curves), has_tokens, "repeats" in read_run(run).tables)


def open_tables(run: Store) -> dict[str, TableVersion]:
    """The tables that a prediction reads. Raises ContractError if they are not of one run."""
    some = [name for name in ("scores", "repeats") if name in read_run(run).tables]
    names = ["documents", "verdicts", "clusters", "index", "dedup", *some]
    tables = {name: TableVersion(*open_table(run, name)) for name in names}
    if "repeats" in tables and not _made_from(tables["repeats"], tables["dedup"]):
        del tables["repeats"]
    lineage = tables["dedup"].manifest.run.lineage
    for name in ("documents", "scores", "verdicts", "clusters"):
        if name not in tables:
            continue
        standing = tables[name].folder.uri.rsplit("/", 1)[-1]
        if lineage.get(name) != standing:
            raise ContractError(
                f"{run.uri}: expected `dedup` made from {name}/{standing}, got it made from {lineage.get(name)}. "
                "Run the recipe to its end first."
            )
    return tables


def mix_of(run: Store, tables: Mapping[str, TableVersion]) -> Sorting | None:
    """How the mix of the dataset chose among its documents; None = it did not, or its buckets are of other tables."""
    dataset = open_table(run, "tokens")[1]
    standing = {name: table.manifest.digest for name, table in tables.items()}
    reads = {entry.name: entry.sha256 for entry in dataset.content.inputs if entry.name in BUCKET_TABLES}
    sorting = sorting_of(dataset)
    return sorting if sorting.may_drop and reads.items() <= standing.items() else None


def _made_from(table: TableVersion, other: TableVersion) -> bool:
    return other.manifest.digest in {entry.sha256 for entry in table.manifest.content.inputs}


def predict_part(task: VerdictsTask, sorting: Sorting | None) -> Iterator[pa.RecordBatch]:
    """Every measured document of a part: what a keep rule looks at, its fate before, and the verdict now.

    `sorting` says which of them the dataset's mix leaves out; None: none of them.
    """
    named = checks_of(task.stages, task.recipe, local_models(task.models), task.cutoffs)
    checks = [check for _, check in named]
    names = np.array([*(f"{stage}/{check.reason}" for stage, check in named), KEPT_VERDICT], object)
    config = task.recipe.section("dedup", DedupConfig)
    columns = split_columns(columns_of(checks), task.part.paths)
    for table, wanted in facts_columns(config).items():
        columns[table] = list(dict.fromkeys([*columns.get(table, []), *wanted]))
    columns["documents"] = list(dict.fromkeys([*columns["documents"], "source", "language"]))
    columns |= {"verdicts": ["drop_stage", "drop_rule"], "dedup": ["drop_stage", "drop_rule"]}
    left_out = left_out_of(task.part, sorting)
    for batch in read_measured(task.part, columns):
        first = evaluate_checks(checks, batch).first
        facts = facts_of(batch, task.part.ordinal, config)
        found = {
            "doc": facts.ids,
            "cluster": facts.clusters,
            "order": facts.orders,
            "url": facts.urls,
            "url_order": facts.url_orders,
            **{name: batch.column(name).fill_null("?").to_pylist() for name in ("language", "source")},
            "before": verdicts_before(batch),
            "verdict": names[first].tolist(),
            "joined": [similarity is not None for similarity in facts.similarities],
            "dropped": (first != KEPT).tolist(),
            "left_out": [next(left_out) for _ in range(batch.num_rows)],
            "chars": facts.chars,
        }
        yield pa.RecordBatch.from_pydict(found, schema=JUDGED)


def left_out_of(part: Part, sorting: Sorting | None) -> Iterator[bool]:
    """Whether a mix leaves out each measured document of a part, in order, if nothing else drops it."""
    while sorting is None:
        yield False
    stream_of = streams_of_part(part, sorting)
    for batch in read_measured(part, {"documents": ["source"], "clusters": ["cluster"]}):
        for row in batch.to_pylist():
            yield sorting.drop(stream_of(row), row["doc_id"]) is not None


def apply_mix(fates: DataFrame) -> DataFrame:
    """The fates, of documents that stay those that the mix leaves out; the buckets are those of the committed run."""
    rule = F.lit(f"{TOKENS.name}/{MIX_RULE}")
    names = ("before", "after")
    chosen = {
        name: F.when(F.col("left_out") & (F.col(name) == KEPT_VERDICT), rule).otherwise(F.col(name)) for name in names
    }
    return fates.withColumns(chosen)


def verdicts_before(batch: pa.RecordBatch) -> list[str]:
    """`kept`, or `stage/rule` of what dropped the document in the committed run."""
    both = [batch.column(name).to_pylist() for name in ("drop_stage", "drop_rule")]
    later = [batch.column(name).to_pylist() for name in ("dedup.drop_stage", "dedup.drop_rule")]
    return [
        f"{verdict}/{verdict_rule}" if verdict else f"{stage}/{rule}" if stage else KEPT_VERDICT
        for verdict, verdict_rule, stage, rule in zip(*both, *later)
    ]


def with_survivors(
    judged: DataFrame, config: DedupConfig, spark: SparkSession, tables: Mapping[str, TableVersion]
) -> DataFrame:
    """Adds `after`: the verdict, or that another document of its URL or of its cluster stays."""
    stays = ~F.col("dropped")
    if config.by_url != "off":
        urls = judged.where(stays & F.col("url").isNotNull()).select("url", F.col("url_order").alias("first"))
        urls = urls.union(earlier_urls(spark, tables).select("key", "first"))
        best = urls.groupBy("url").agg(F.min("first").alias("best_url"))
        judged = judged.join(best, "url", "left")
        stays &= F.col("url").isNull() | (F.col("url_order") == F.col("best_url"))
    flag = F.when(stays, F.lit(NOT_DROPPED)).otherwise(F.lit(DROPPED))
    judged = judged.withColumns({"stays": stays, "own": F.concat(flag, "order")})
    copies = judged.where("joined").select("cluster", "own")
    copies = copies.union(earlier_clusters(spark, tables).select("key", "first"))
    judged = judged.join(copies.groupBy("cluster").agg(F.min("own").alias("best")), "cluster", "left")
    loses = F.col("stays") & F.col("joined") & (F.col("own") != F.col("best"))
    digest = DIGEST_BYTES if config.exact != "off" else 0
    same = F.substring("own", -digest, digest) == F.substring("best", -digest, digest) if digest else F.lit(False)
    copy = F.when(same, F.lit(f"{DEDUP.name}/{EXACT}")).otherwise(F.lit(f"{DEDUP.name}/{NEAR}"))
    after = F.when(F.col("dropped"), F.col("verdict")).when(~F.col("stays"), F.lit(f"{DEDUP.name}/{SAME_URL}"))
    return judged.withColumn("after", after.when(loses, copy).otherwise(F.lit(KEPT_VERDICT)))


def token_counts(spark: SparkSession, run: Store) -> DataFrame:
    """(doc, tokens) of every document of the dataset, read from its document indexes."""
    folder, manifest = open_table(run, "tokens")
    paths = [path for key, path in manifest.run.paths.items() if key.endswith(".docs")]
    return dataframe_from_tasks(
        spark, counts_of_shard, [(folder, path) for path in sorted(paths)], "doc binary, tokens long"
    )


def counts_of_shard(task: tuple[Store, str]) -> Iterator[pa.RecordBatch]:
    """(doc, tokens) of the documents of one shard."""
    folder, path = task
    with folder.open_input(path) as stream:
        reader = pa.ipc.open_file(stream)
        places = [reader.schema.get_field_index(name) for name in ("doc_id", "num_tokens")]
        for number in range(reader.num_record_batches):
            doc, tokens = (reader.get_batch(number).column(place) for place in places)
            yield pa.RecordBatch.from_arrays([doc.cast(pa.binary()), tokens], ["doc", "tokens"])


def count_cells(fates: DataFrame, tokens: DataFrame | None) -> list[PredictionCell]:
    """The cells of a prediction, sorted."""
    if tokens is None:
        fates = fates.withColumn("tokens", F.lit(None).cast("long"))
    else:
        fates = fates.join(tokens, "doc", "left")
    rows = (
        fates.groupBy("before", "after", "language", "source")
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
