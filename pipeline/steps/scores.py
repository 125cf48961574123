"""The step `scores`: models score the stored text after cuts. A run without models does not have this step.

It is separate from the step `documents` because models change more often: with a new model, only the stored text is
read, and no page is extracted again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow.parquet as pq

from pipeline.engine.finished_parts import FinishedPart
from pipeline.engine.parquet import TEXTS_AT_ONCE, Part, PartWriter, apply_cuts, parts_of, read_measured, unique_name
from pipeline.engine.part import PartOutput, PartResult, PartTarget, TableTarget, TaskResult, write_part
from pipeline.engine.progress import WorkTotal, doing
from pipeline.engine.spark import run_parts, run_tasks
from pipeline.engine.stage import PerDocument, Row
from pipeline.engine.step import StepContext, TableResult, combine_parts
from pipeline.engine.worker import FusedStages, local_models, run_rows
from pipeline.perplexity.stage import CHECKPOINT, TO_SCORE, PerplexityConfig, score_with_checkpoint
from pipeline.sources.config import SourceConfig
from schemas.config import SOURCE, Recipe
from schemas.errors import ContractError
from schemas.manifest import part_key
from schemas.storage import Store
from schemas.tables import SCORES


@dataclass(frozen=True)
class ScoresTask:
    """One part to score, and the folder of the table `scores`."""

    part: Part
    stages: tuple[PerDocument, ...]
    recipe: Recipe
    models: dict[str, dict[str, str]]
    folder: Store
    scored: str | None = None
    """The file with the scores that a checkpoint computed for the part; None if no checkpoint scores texts."""
    finished: FinishedPart | None = None
    """Where the result is stored for later versions of the table; None = only in this version."""


def has_models(stages: Sequence[PerDocument], recipe: Recipe) -> bool:
    """Return True if the recipe configures a model for any of the stages."""
    return any(stage.models(recipe[stage.name]) for stage in stages)


def build_scores(build: StepContext) -> dict[str, TableResult]:
    """Build the table `scores`, with one part for each part of `documents`, and return its result."""
    folder, finished = build.folders["scores"], build.finished_parts()
    tasks = [
        ScoresTask(part, own.per_document, own.recipe, own.model_paths(), folder, finished=finished[part.ordinal])
        for part, own in build.by_part(parts_of(build.inputs))
    ]
    scored: list[str] = []
    for own in build.by_source().values():
        perplexity = own.recipe.section("perplexity", PerplexityConfig)
        chosen = [at for at, task in enumerate(tasks) if task.recipe.sources == own.recipe.sources]
        if (perplexity.scorer or "").startswith(CHECKPOINT) and chosen:
            files = scored_by_checkpoint(build, perplexity, [tasks[at] for at in chosen])
            for at, name in zip(chosen, files, strict=True):
                tasks[at] = replace(tasks[at], scored=name, finished=None)
            scored += files
    size = WorkTotal(rows=build.inputs["documents"].manifest.content.counts.rows_kept)
    built = combine_parts(run_parts(build, scores_part, tasks, "scores", size), ("scores",))
    for name in scored:
        folder.delete(name)
    return built


def scored_by_checkpoint(build: StepContext, config: PerplexityConfig, tasks: Sequence[ScoresTask]) -> list[str]:
    """Score all texts with a checkpoint in a separate process; return the name of each part's file of scores.

    The folder of the table `scores` must be on a local or mounted file system, because the process reads and writes
    files in this folder.
    """
    folder = build.folders["scores"]
    texts = [result["path"] for result in run_tasks(build.spark, texts_part, tasks, "write texts", build.partitions)]
    scored = [unique_name(f"scored/{part_key(task.part.ordinal)}", "parquet") for task in tasks]
    for name in scored:
        folder.make_parent(name)
    doing("score texts with the checkpoint")
    score_with_checkpoint(config, [folder.path(name) for name in texts], [folder.path(name) for name in scored])
    for name in texts:
        folder.delete(name)
    return scored


def texts_part(task: ScoresTask, retried: bool) -> TaskResult:
    """Write the texts of one part to a file for the process with the checkpoint.

    Return the file's path and number of rows.
    """
    with PartWriter(task.folder, f"texts/{part_key(task.part.ordinal)}", TO_SCORE, size_column="text") as writer:
        for row in texts(task.part):
            writer.add(row | {"text": row["_body"]})
    return {"path": writer.written.path, "rows": writer.written.rows}


def scores_part(task: ScoresTask, retried: bool) -> PartResult:
    """Score the texts of one part and write its part of `scores`."""

    def fill(output: PartOutput) -> None:
        fused = FusedStages(task.stages, task.recipe, local_models(task.models))
        rows = ((row, None) for row in with_scores(task))
        guard = output.guard(fused, retried, task.recipe.section(SOURCE, SourceConfig).max_record_bytes)
        for row in run_rows(rows, guard, (task.stages[0].name, task.stages[0].name)):
            _count(row, output)
            output.write(row)

    reasons = [(stage.name, stage.reasons) for stage in task.stages]
    tables = {"scores": TableTarget(task.folder, SCORES)}
    return write_part(PartTarget(task.part.ordinal, tables, reasons, finished=task.finished), fill)


def _count(row: Row, output: PartOutput) -> None:
    """Count one row as kept. If a stage failed on the row, count the row as unscored too, and remove its drop."""
    if row.get("drop_stage") is not None:
        output.books.tally("unscored", f"{row['drop_stage']}/{row['drop_rule']}")
        row["drop_stage"] = None
    output.books.enter(row, len(row["_body"]))


def texts(part: Part) -> Iterator[Row]:
    """Yield the measured documents of a part as rows, with the text after cuts in `_body`."""
    columns = {"documents": ["source", "language"], "text": ["text", "cuts"]}
    for batch in read_measured(part, columns, TEXTS_AT_ONCE):
        for row in batch.to_pylist():
            row["_body"] = apply_cuts(row.pop("text"), row.pop("cuts") or [])
            yield row


def with_scores(task: ScoresTask) -> Iterator[Row]:
    """Yield the rows of `texts`. Add the scores of a checkpoint if the part has a file of such scores."""
    if task.scored is None:
        yield from texts(task.part)
        return
    with task.folder.open_unchecked(task.scored) as stream:
        scores = (row for batch in pq.ParquetFile(stream).iter_batches() for row in batch.to_pylist())
        for row, scored in zip(texts(task.part), scores, strict=True):
            if row["doc_id"] != scored["doc_id"]:
                raise ContractError(
                    f"scores {part_key(task.part.ordinal)}: expected the checkpoint's scores in the order of the "
                    "documents, got a different order. Run `penstock run` again."
                )
            yield row | scored
