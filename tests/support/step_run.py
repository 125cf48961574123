"""A step of a run that is built in this process, without Spark, on the tables of a synthetic run."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from jobs.recipe import recipe_sections
from pipeline.engine.part import PartResult, PartResults
from pipeline.engine.results import SUMMED, answer_of_part, gather, result_rows, results_of_parts
from pipeline.engine.step import PartSources, StepContext
from pipeline.run import Run, commit
from pipeline.stages import steps_for
from schemas.config import build_recipe
from schemas.manifest import RunFile, TableVersion, open_table, read_run, write_run
from schemas.storage import Store


def add_step(run: Store, name: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Build the tables of a step with these settings, commit them and make them current."""
    recipe = build_recipe({"source": {"paths": ["none"]}, **settings}, recipe_sections(), "test")
    (step,) = [step for step in steps_for(recipe) if step.name == name]
    state = read_run(run)
    inputs = {read: TableVersion(*open_table(run, read)) for read in step.inputs(recipe) if read in state.tables}
    folders = {table: run.child(f"{table}/v-00000000057e") for table in step.writes}
    with patch.object(sys.modules[step.build.__module__], "run_parts", run_here):
        built = step.build(StepContext(None, recipe, step.stages, folders, inputs, (), {}, None))
    timing = {"started": "2026-01-01T00:00:00+00:00", "wall_seconds": 1.0}
    for table in reversed(step.writes):
        session = Run(recipe, (step,), (), {}, spark=None, folder=run, partitions=None)
        commit(session, step, folders[table], (table, built[table], inputs, timing))
    write_run(run, RunFile(tables=state.tables | dict.fromkeys(step.writes, "v-00000000057e"), recipe=state.recipe))


def run_here(
    spark: None, function: Callable[[Any, bool], PartResult], tasks: Sequence[Any], *options: Any
) -> PartResults:
    """Run the tasks of a step one after another, in place of `run_parts`."""
    return gathered([function(task, False) for task in tasks])


def added_up(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the counts of tasks, without Spark."""
    results = (result_rows(number, {SUMMED: each}) for number, each in enumerate(counts))
    return gather(row for rows in results for row in rows.to_pylist()).summed


def gathered(results: Sequence[PartResult], sources: PartSources | None = None) -> PartResults:
    """Return what the driver gets of the results of parts, without Spark."""
    rows = [
        row
        for number, result in enumerate(results)
        for row in result_rows(number, answer_of_part(result, sources[number] if sources else None)).to_pylist()
    ]
    return results_of_parts(gather(rows))
