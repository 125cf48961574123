"""The documents pass: one split goes in, its rows, signals, verdicts and texts come out, in one worker.

Raw pages never leave the worker. Only extraction and the language gate end the pass for a document; every other stage
measures all that remain, so that thresholds can be tried again without reading text.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from pipeline.decontaminate.stage import DECONTAMINATE, contamination_table, figures_of, set_sizes
from pipeline.engine.parquet import PartWriter
from pipeline.engine.spark import run_tasks, worker_path
from pipeline.engine.stage import Drop, PerDocument, Relation, Row, Source, Split
from pipeline.engine.step import Build, Built, gather, keep_answer, standing_answer
from pipeline.engine.worker import CRASHED, Books, Crashed, Fused, Isolated, set_verdict
from pipeline.extract.extract import EXTRACT
from pipeline.language import LANGUAGE
from pipeline.minhash.stage import SIGNATURE
from pipeline.quality.stage import QUALITY
from pipeline.sources.source import SOURCE
from pipeline.sources.splits import open_stream
from pipeline.toxicity import TOXICITY
from schemas.config import Recipe, Section
from schemas.errors import ContractError
from schemas.ids import below_share, canonical_json, shuffle_key
from schemas.manifest import part_key
from schemas.storage import Store
from schemas.tables import DOCUMENTS, TEXT

MEASURED: tuple[PerDocument, ...] = (EXTRACT, LANGUAGE, QUALITY, DECONTAMINATE, TOXICITY, SIGNATURE)
COLUMNS = frozenset((*DOCUMENTS.names, *TEXT.names))


class TextConfig(Section):
    """What becomes of the text of documents that extraction or the language gate dropped; their rows always stay.

    The text of every document that was measured is kept: its verdict is not known yet, and may be tried again.
    """

    dropped: Literal["keep", "sample", "leave_out"] = "keep"
    """Keep the text of every document dropped there, of a share of them, or of none."""
    sample_share: float = Field(0.01, ge=0, le=1)
    """Share of dropped documents whose text is kept when `dropped` is `sample`, chosen by hash of doc_id."""


KEEP_TEXT = Relation(name="text", version=1, config=TextConfig)
COUNTED: tuple[Source | PerDocument, ...] = (SOURCE, *MEASURED)
STAGES: tuple[Source | PerDocument | Relation, ...] = (*COUNTED, KEEP_TEXT)


@dataclass(frozen=True)
class DocumentsTask:
    """One split to read, and where its parts go."""

    split: Split
    recipe: Recipe
    models: dict[str, dict[str, str]]
    documents: Store
    text: Store


def build_documents(build: Build) -> dict[str, Built]:
    """The tables `documents` and `text`, one part for each split."""
    tasks = [
        DocumentsTask(split, build.recipe, build.model_paths(), build.folders["documents"], build.folders["text"])
        for split in build.splits
    ]
    answers = run_tasks(build.spark, documents_part, tasks, "documents", build.partitions)
    built = gather(answers, ("documents", "text"))
    index = build.model_paths().get(DECONTAMINATE.name, {}).get("index")
    if index is not None:
        figures = built["documents"].figures
        figures["evaluation_sets"] = set_sizes(index)
        print(contamination_table(figures), file=sys.stderr)
    return built


def documents_part(task: DocumentsTask, retried: bool) -> dict[str, Any]:
    """Read one split through the fused pass and write its parts; returns files, books and figures."""
    ordinal = task.split.ordinal
    standing = standing_answer(task.documents, ordinal)
    if standing is not None:
        return standing
    started = time.process_time()
    models = {stage: {k: worker_path(p) for k, p in paths.items()} for stage, paths in task.models.items()}
    fused = Fused(MEASURED, task.recipe, models)
    books = Books([(stage.name, stage.reasons) for stage in COUNTED])
    writers = (
        PartWriter(task.documents, part_key(ordinal), DOCUMENTS),
        PartWriter(task.text, part_key(ordinal), TEXT, size_column="text"),
    )
    try:
        with closing(open_stream(task.split)) as stream:
            rows = SOURCE.open(task.split, stream, task.recipe["source"])
            for row in verdicts(rows, Isolated(fused) if retried else fused):
                write_row(row, writers, books, task.recipe.section("text", TextConfig))
            sha256, size = stream.finish()
        check_size(task.split, size)
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise
    answer = {
        "files": {"documents": writers[0].close(), "text": writers[1].close()},
        "rows": books.rows_in,
        "source": {"name": task.split.name, "bytes": size, "sha256": sha256},
        "errors": dict(fused.errors),
        "cpu_seconds": time.process_time() - started,
        **books.to_json(),
    }
    return keep_answer(task.documents, ordinal, answer, canonical_json)


def check_size(split: Split, size: int) -> None:
    """Raise ContractError if the file is not of the size [bytes] that it had when the run was planned."""
    if size != split.size:
        raise ContractError(
            f"{split.uri}: expected {split.size} bytes, got {size} while reading. "
            "Let the file be written to its end and run again."
        )


def verdicts(rows: Iterator[tuple[Row, Drop | None]], measure: Any) -> Iterator[Row]:
    """Every row of a source with its verdict: the source's own, or that of the stages it runs through."""
    try:
        for row, drop in rows:
            if drop is not None:
                set_verdict(row, SOURCE.name, drop)
                yield row
                continue
            try:
                yield measure(row)
            except Crashed:
                set_verdict(row, EXTRACT.name, Drop(CRASHED))
                yield row
    finally:
        if isinstance(measure, Isolated):
            measure.close()


def write_row(row: Row, writers: Sequence[PartWriter], books: Books, config: TextConfig) -> None:
    """Write a finished row to both tables and into the books."""
    unknown = [name for name in row if name not in COLUMNS and name[0] != "_"]
    if unknown:
        raise ContractError(f"documents pass: expected the columns of its schema, got {unknown}. Declare them.")
    chars = row.get("num_chars") or 0
    books.enter(row, chars)
    if row.get("language") is not None:
        books.tally("languages", row["language"])
    if row.get("drop_stage") is None:
        row["body_chars"] = len(row["_body"])
        for figure in figures_of(row):
            books.tally(*figure)
        if row.get("second_language") is not None:
            books.tally("mixed_languages", f"{row['language']}+{row['second_language']}")
    if row.get("charset") is not None:
        books.tally("charsets", row["charset"])
    books.tally("record_types", row["record_type"] or "?")
    cause = f"gap/{row.get('drop_rule')}" if row["record_type"] == "gap" else row["record_type"] or "?"
    books.tally("stored_bytes", cause, row["length"] or 0)
    if row.get("drop_stage") is not None and not _keeps_text(row, config):
        row["text"] = row["title"] = row["cuts"] = None
    for writer in writers:
        writer.add(row)


def _keeps_text(row: Row, config: TextConfig) -> bool:
    if config.dropped == "sample":
        return below_share(shuffle_key(0, row["doc_id"]), config.sample_share)
    return config.dropped == "keep"
