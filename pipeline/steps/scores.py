"""The scores pass: what models say of the stored text after cuts; left out where the recipe asks for no model.

It stands apart from the documents pass because models are what users try again: another model reads text, never pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow.parquet as pq

from pipeline.classifier.importance import IMPORTANCE
from pipeline.classifier.stage import CLASSIFIER
from pipeline.engine.parquet import TEXTS_AT_ONCE, Part, PartWriter, apply_cuts, measured, parts_of, unique_name
from pipeline.engine.spark import run_tasks
from pipeline.engine.stage import PerDocument, Row
from pipeline.engine.step import Answer, Build, Built, gather
from pipeline.engine.worker import Books, PartOutput, run_part
from pipeline.perplexity.stage import CHECKPOINT, PERPLEXITY, TO_SCORE, PerplexityConfig, score_with_checkpoint
from schemas.config import Recipe
from schemas.errors import ContractError
from schemas.manifest import part_key
from schemas.storage import Store
from schemas.tables import SCORES

STAGES: tuple[PerDocument, ...] = (PERPLEXITY, CLASSIFIER, IMPORTANCE)


@dataclass(frozen=True)
class ScoresTask:
    """One part to score, and where its scores go."""

    part: Part
    recipe: Recipe
    models: dict[str, dict[str, str]]
    folder: Store
    scored: str | None = None
    """File of what a checkpoint has said of the part."""


def wanted(recipe: Recipe) -> bool:
    """Whether any of the stages has a model to ask."""
    return any(stage.models(recipe[stage.name]) for stage in STAGES)


def build_scores(build: Build) -> dict[str, Built]:
    """The table `scores`, one part for each part of `documents`."""
    folder = build.folders["scores"]
    tasks = [ScoresTask(part, build.recipe, build.model_paths(), folder) for part in parts_of(build.inputs)]
    perplexity = build.recipe.section("perplexity", PerplexityConfig)
    scored: list[str] = []
    if (perplexity.scorer or "").startswith(CHECKPOINT):
        scored = scored_by_checkpoint(build, perplexity, tasks)
        tasks = [replace(task, scored=name) for task, name in zip(tasks, scored)]
    built = gather(run_tasks(build.spark, scores_part, tasks, "scores", build.partitions), ("scores",))
    for name in scored:
        folder.delete(name)
    return built


def scored_by_checkpoint(build: Build, config: PerplexityConfig, tasks: Sequence[ScoresTask]) -> list[str]:
    """Files of what a checkpoint says of each part, found by a process apart that has torch; the workers need none.

    The texts go through the table's own folder, which therefore lies on a local or mounted file system.
    """
    folder = build.folders["scores"]
    texts = [answer["path"] for answer in run_tasks(build.spark, texts_part, tasks, "texts", build.partitions)]
    scored = [unique_name(f"scored/{part_key(task.part.ordinal)}", "parquet") for task in tasks]
    for name in scored:
        folder.make_parent(name)
    score_with_checkpoint(config, [folder.path(name) for name in texts], [folder.path(name) for name in scored])
    for name in texts:
        folder.delete(name)
    return scored


def texts_part(task: ScoresTask, retried: bool) -> Answer:
    """Write the texts of one part for a scorer of another process; returns where they are."""
    writer = PartWriter(task.folder, f"texts/{part_key(task.part.ordinal)}", TO_SCORE, size_column="text")
    rows = 0
    try:
        for row in texts(task.part):
            writer.add(row | {"text": row["_body"]})
            rows += 1
    except BaseException:
        writer.abandon()
        raise
    return {"path": writer.close()["path"], "rows": rows}


def scores_part(task: ScoresTask, retried: bool) -> Answer:
    """Score one part and write it; returns files, books and figures."""
    output = PartOutput("scores", task.folder, task.part.ordinal, SCORES, STAGES, "_body")
    return run_part(output, task.recipe, task.models, retried, lambda: with_scores(task), enter)


def enter(row: Row, chars: int, books: Books) -> None:
    """Count one row; no score is no verdict: the document stays, its scores are null."""
    if row.get("drop_stage") is not None:
        books.tally("unscored", f"{row['drop_stage']}/{row['drop_rule']}")
        row["drop_stage"] = None
    books.enter(row, chars)


def texts(part: Part) -> Iterator[Row]:
    """The measured documents of a part with their text after cuts."""
    columns = {"documents": ["source", "language"], "text": ["text", "cuts"]}
    for batch in measured(part, columns, TEXTS_AT_ONCE):
        for row in batch.to_pylist():
            row["_body"] = apply_cuts(row.pop("text"), row.pop("cuts") or [])
            yield row


def with_scores(task: ScoresTask) -> Iterator[Row]:
    """The texts of a part, with what a checkpoint has said of them if one was asked."""
    if task.scored is None:
        yield from texts(task.part)
        return
    with task.folder.open_input(task.scored) as stream:
        scores = (row for batch in pq.ParquetFile(stream).iter_batches() for row in batch.to_pylist())
        for row, scored in zip(texts(task.part), scores, strict=True):
            if row["doc_id"] != scored["doc_id"]:
                raise ContractError(
                    f"scores {part_key(task.part.ordinal)}: expected the documents that were given, got others. "
                    "Score again."
                )
            yield row | scored
