"""The step `audit`: samples are proposed part by part, chosen, fetched from their parts, and examined in one task.

Only samples move: what reaches the driver or the one task is bounded by `audit.documents`, however large the run.
"""

from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from pipeline.dedup.audit.config import AuditConfig
from pipeline.dedup.audit.examine import ExamineTask, examine
from pipeline.dedup.audit.sample import (
    ANCHORED,
    JOINED,
    PROPOSALS_DDL,
    SAMPLED_DDL,
    UNIFORM,
    ProposeTask,
    TextsTask,
    choose,
    propose,
    read_sampled,
)
from pipeline.dedup.config import DedupConfig
from pipeline.engine.parquet import parts_of
from pipeline.engine.part import PartResult
from pipeline.engine.spark import dataframe_from_tasks, persist_on_disk, run_partitions
from pipeline.engine.step import StepContext, TableResult, combine_parts
from pipeline.minhash.stage import SignatureConfig


def build_audit(build: StepContext) -> dict[str, TableResult]:
    """The table `audit`: one part with the pairs that were looked at; its manifest has what they say."""
    audit, dedup = build.recipe.section("audit", AuditConfig), build.recipe.section("dedup", DedupConfig)
    signature = build.recipe.section("signature", SignatureConfig)
    parts = parts_of(build.inputs)
    clusters = build.inputs["clusters"].manifest.content
    sizes = clusters.counts.rows_in, int(clusters.figures["joined_documents"])
    tasks = [ProposeTask(part, audit, dedup, *sizes) for part in parts]
    proposals = persist_on_disk(dataframe_from_tasks(build.spark, propose, tasks, PROPOSALS_DDL))
    chosen = choose(lowest_proposals(proposals, audit), audit, *sizes)
    proposals.unpersist()
    wanted = chosen.wanted()
    fetches = [TextsTask(part, wanted, dedup, signature) for part in parts]
    texts = dataframe_from_tasks(build.spark, read_sampled, fetches, SAMPLED_DDL)
    task = ExamineTask(chosen, audit, dedup, signature, build.folders["audit"])
    one = texts.repartitionById(1, F.lit(0))
    answers = run_partitions(one, lambda number, batches: examine(task, batches).to_json())
    return combine_parts([PartResult.from_json(answer) for answer in answers], ("audit",))


def lowest_proposals(proposals: DataFrame, audit: AuditConfig) -> Any:
    """The `audit.documents` proposals with the lowest keys of each sample as an Arrow table; of the anchors one group
    more, each row with the size of its whole group."""
    of_anchor = proposals.where(F.col("sample") == ANCHORED)
    group = Window.partitionBy("group")
    ranked = of_anchor.withColumns(
        {"count": F.sum("count").over(group), "place": F.row_number().over(group.orderBy("key", "doc"))}
    )
    chosen = ranked.where((F.col("count") > 1) & (F.col("place") <= audit.group)).drop("place")
    chosen = chosen.orderBy("rank", "group", "key", "doc").limit(audit.documents + audit.group)
    for sample in (JOINED, UNIFORM):
        alike = proposals.where(F.col("sample") == sample).orderBy("key", "doc").limit(audit.documents)
        chosen = chosen.union(alike)
    table: pa.Table = chosen.toArrow()
    return table
