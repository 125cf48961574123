"""The step `paragraphs`: cuts paragraphs that are out of range from the documents that deduplication keeps.

The stored paragraphs and perplexities decide, and no text is scored. The cuts are spans of the raw text, which stays;
`repeats` and `clean` read the text without them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.dedup.repeats.units import cuts_in_whole_text
from pipeline.engine.parquet import TEXTS_AT_ONCE, Part, apply_cuts, parts_of, read_measured
from pipeline.engine.part import PartOutput, PartResult, PartTarget, TableTarget, write_part
from pipeline.engine.progress import WorkTotal
from pipeline.engine.rules import KEPT
from pipeline.engine.spark import run_parts
from pipeline.engine.stage import Cutoffs, Row
from pipeline.engine.step import StepContext, TableResult, add_figures, combine_parts
from pipeline.perplexity.paragraphs import (
    CAUSES,
    NEEDS,
    Limits,
    ParagraphsConfig,
    cuts_paragraphs,
    judge_paragraphs,
    paragraph_cuts,
    paragraph_limits,
)
from pipeline.steps.verdicts import cutoffs_of_stage
from pipeline.text.spans import complement
from schemas.config import Recipe
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.tables import PARAGRAPHS

NAME = "paragraphs"
READS = {
    "documents": ["language", "body_chars"],
    "text": ["text", "cuts"],
    "scores": [name for name in NEEDS if name != "language"],
    "dedup": ["drop_stage"],
}
"""The columns that the step reads, by table."""


@dataclass(frozen=True)
class ParagraphsTask:
    """One part to cut, the limits in force, and the folder of the table `paragraphs`."""

    part: Part
    limits: Limits
    folder: Store


def build_paragraphs(build: StepContext) -> dict[str, TableResult]:
    """Build the table `paragraphs`, with one part for each part of `documents`, and return its result.

    Its figures are those of `empty_figures`, summed over the parts, and `limits`, the limits in force by cause.
    """
    cutoffs = build.inputs["verdicts"].manifest.content.figures["cutoffs"]
    limits = {name: limits_of_source(own.recipe, cutoffs) for name, own in build.by_source().items()}
    tasks = [
        ParagraphsTask(part, limits[own.recipe.sources[0]], build.folders[NAME])
        for part, own in build.by_part(parts_of(build.inputs))
    ]
    size = WorkTotal(rows=build.inputs["documents"].manifest.content.counts.rows_kept)
    built = combine_parts(run_parts(build, paragraphs_part, tasks, NAME, size), (NAME,))
    built[NAME].figures = {**(built[NAME].figures or empty_figures()), "limits": _limits_by_cause(limits)}
    return built


def limits_of_source(recipe: Recipe, cutoffs: Cutoffs) -> Limits:
    """Return the limits of paragraphs of one source; none if it does not cut paragraphs."""
    if not cuts_paragraphs(recipe):
        return {}
    return paragraph_limits(recipe.section(NAME, ParagraphsConfig), cutoffs_of_stage(cutoffs, recipe, NAME))


def _limits_by_cause(limits: Mapping[str, Limits]) -> dict[str, Any]:
    """Return the limits in force by cause; those of a source that differs are named `cause of SOURCE`."""
    shared = next((found for found in limits.values() if found), {})
    other = {
        f"{cause} of {source}": values
        for source, found in limits.items()
        if found and found != shared
        for cause, values in found.items()
    }
    return {**shared, **other}


def empty_figures() -> dict[str, Any]:
    """Return the figures of no documents.

    `documents`: those in which the cuts are made. `kept_chars`: their length without the cuts [code points].
    `cut_documents`: those with a cut. `cut_paragraphs` and `cut_chars`: paragraphs that are cut, and their length
    [code points] without line ends, by cause.
    """
    zeros = dict.fromkeys(CAUSES, 0)
    return {"documents": 0, "kept_chars": 0, "cut_documents": 0, "cut_paragraphs": zeros, "cut_chars": {**zeros}}


def count_cuts(limits: Limits, batch: pa.RecordBatch) -> dict[str, Any]:
    """Return `cut_documents`, `cut_paragraphs` and `cut_chars` of a batch that has the columns NEEDS."""
    judged = judge_paragraphs(limits, batch)
    is_cut = judged.causes != KEPT
    lengths = judged.ends - judged.starts
    return {
        "cut_documents": len(np.unique(judged.rows[is_cut])),
        "cut_paragraphs": {cause: int((judged.causes == index).sum()) for index, cause in enumerate(CAUSES)},
        "cut_chars": {cause: int(lengths[judged.causes == index].sum()) for index, cause in enumerate(CAUSES)},
    }


def paragraphs_part(task: ParagraphsTask, retried: bool) -> PartResult:
    """Write one part of `paragraphs`."""

    def fill(output: PartOutput) -> None:
        figures, num_rows = empty_figures(), 0
        for batch in read_measured(task.part, READS, TEXTS_AT_ONCE):
            survivors = batch.filter(batch.column("drop_stage").is_null())
            cut = {row["doc_id"]: row for row in cut_rows(task.limits, survivors)}
            for doc_id in batch.column("doc_id").to_pylist():
                output.write(cut.get(doc_id, {"doc_id": doc_id}))
            kept_chars = sum(row["body_chars"] for row in cut.values())
            counted = {"documents": len(cut), "kept_chars": kept_chars, **count_cuts(task.limits, survivors)}
            figures, num_rows = add_figures(figures, counted), num_rows + batch.num_rows
        output.figures |= figures
        output.counts = Counts(rows_in=num_rows, rows_kept=num_rows)

    return write_part(PartTarget(task.part.ordinal, {NAME: TableTarget(task.folder, PARAGRAPHS)}), fill)


def cut_rows(limits: Limits, batch: pa.RecordBatch) -> Iterator[Row]:
    """Yield a row of the table `paragraphs` for each document of a batch that has the columns of READS."""
    judged = judge_paragraphs(limits, batch)
    causes: Sequence[dict[int, str]] = [{} for _ in range(batch.num_rows)]
    (chosen,) = np.nonzero(judged.causes != KEPT)
    for index in chosen.tolist():
        causes[int(judged.rows[index])][int(judged.starts[index])] = CAUSES[int(judged.causes[index])]
    for stored, own in zip(batch.select(["doc_id", "text", "cuts", "body_chars"]).to_pylist(), causes):
        row: Row = {"doc_id": stored["doc_id"], "cuts": [], "body_chars": stored["body_chars"]}
        if own:
            before = stored["cuts"] or []
            cuts = paragraph_cuts(apply_cuts(stored["text"], before), own)
            visible = complement([(cut["start"], cut["end"]) for cut in before], len(stored["text"]))
            row["cuts"] = cuts_in_whole_text(cuts, visible)
            row["body_chars"] -= sum(end - start for start, end, _ in cuts)
        yield row
