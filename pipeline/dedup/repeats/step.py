"""The step `repeats` on Spark: totals of keys over all parts, those that repeat sent back to their parts, the table."""

import functools
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.dedup.repeats.config import REPEATS, RepeatsConfig
from pipeline.dedup.repeats.keys import (
    SUBSTRING,
    MakeReevaluator,
    RepeatsTask,
    seeds_of_part,
    units_of_part,
    windows_of_part,
)
from pipeline.dedup.repeats.write import write_repeats
from pipeline.dedup.totals import TALLIES_DDL, totals
from pipeline.engine.parquet import parts_of
from pipeline.engine.part import PartResult
from pipeline.engine.spark import dataframe_from_tasks, is_retry, map_parts, run_part_writers
from pipeline.engine.step import StepContext, TableResult, combine_parts
from schemas.config import Recipe


def is_enabled(recipe: Recipe) -> bool:
    """Whether any kind of unit is looked for."""
    return bool(recipe.section(REPEATS.name, RepeatsConfig).units)


def build_repeats(build: StepContext, make_reevaluator: MakeReevaluator) -> dict[str, TableResult]:
    """The table `repeats`, one part for each part of `documents`."""
    cutoffs = build.inputs["verdicts"].manifest.content.figures["cutoffs"]
    folder, models = build.folders[REPEATS.name], build.model_paths()
    tasks = [
        RepeatsTask(part, build.recipe, models, cutoffs, folder, make_reevaluator) for part in parts_of(build.inputs)
    ]
    if not tasks:
        return combine_parts([], (REPEATS.name,))
    shared = build.spark.sparkContext.broadcast(tasks)

    def write(number: int, batches: Iterator[pa.RecordBatch]) -> PartResult:
        return write_repeats(shared.value[number], batches, is_retry())

    return combine_parts(run_part_writers(repeats_of(build, tasks), len(tasks), write), (REPEATS.name,))


def repeats_of(build: StepContext, tasks: list[RepeatsTask]) -> DataFrame:
    """The repeats (key, part, first) of every part, units and windows."""
    config = tasks[0].config
    shared = build.spark.sparkContext.broadcast(tasks)

    def windows(number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from windows_of_part(shared.value[number], batches)

    found: list[DataFrame] = []
    if set(config.units) != {SUBSTRING}:
        units = dataframe_from_tasks(build.spark, units_of_part, tasks, TALLIES_DDL)
        found.append(repeated_keys(units, config.min_count, config.keep_first))
    if SUBSTRING in config.units:
        seeds = repeated_keys(
            dataframe_from_tasks(build.spark, seeds_of_part, tasks, TALLIES_DDL), config.min_count, False
        )
        runs = map_parts(seeds, len(tasks), windows, TALLIES_DDL)
        found.append(repeated_keys(runs, config.min_count, config.keep_first))
    return functools.reduce(DataFrame.union, found)


def repeated_keys(tallies: DataFrame, min_count: int, keep_first: bool) -> DataFrame:
    """(key, part, first) of the keys with so many places; `first` is null but in the part of the first place."""
    rows = totals(tallies).where(F.col("total") >= min_count)
    first = F.when(F.col("first") == F.col("best"), F.col("best")) if keep_first else F.lit(None).cast("binary")
    return rows.select("key", "part", first.alias("first"))
