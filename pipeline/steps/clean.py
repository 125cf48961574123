"""The clean pass: survivors of deduplication lose what was cut from them and personal data.

Verdicts travel to the text part by part: each task reads the same part of `documents`, `text`, `dedup` and, where the
run has it, `repeats`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from pipeline.engine.spark import run_tasks
from pipeline.engine.stage import PerDocument, Row
from pipeline.engine.step import Answer, Build, Built, gather
from pipeline.engine.worker import Books, PartOutput, run_part
from pipeline.pii.stage import PII
from pipeline.text.spans import Span, union, without
from schemas.config import Recipe
from schemas.errors import ContractError
from schemas.manifest import Table, part_key
from schemas.storage import Store
from schemas.tables import CLEAN

STAGES: tuple[PerDocument, ...] = (PII,)
FROM_DOCUMENTS = ["doc_id", "source", "split", "offset", "length", "url", "domain", "date", "snapshot", "language"]
FROM_DEDUP = ["cluster", "cluster_size", "weight"]
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class CleanTask:
    """One part of the tables, and where its clean part goes."""

    ordinal: int
    recipe: Recipe
    models: dict[str, dict[str, str]]
    tables: dict[str, Store]
    paths: dict[str, str]
    folder: Store


def build_clean(build: Build) -> dict[str, Built]:
    """The table `clean`, one part for each part of `documents`."""
    paths = [part_paths(build.inputs, ordinal) for ordinal in range(num_parts(build.inputs["documents"]))]
    folders = {name: table.folder for name, table in build.inputs.items()}
    tasks = [
        CleanTask(ordinal, build.recipe, build.model_paths(), folders, path, build.folders["clean"])
        for ordinal, path in enumerate(paths)
    ]
    return gather(run_tasks(build.spark, clean_part, tasks, "clean", build.partitions), ("clean",))


def num_parts(table: Table) -> int:
    """How many parts a part-wise table has."""
    return len(table.manifest.content.files)


def part_paths(tables: Any, ordinal: int) -> dict[str, str]:
    """The path of one part in each of the tables."""
    return {name: table.manifest.run.paths[part_key(ordinal)] for name, table in tables.items()}


def clean_part(task: CleanTask, retried: bool) -> Answer:
    """Run one part through the fused pass and write it; returns files, books and figures."""
    output = PartOutput("clean", task.folder, task.ordinal, CLEAN, STAGES, "text")
    return run_part(output, task.recipe, task.models, retried, lambda: survivors(task), _enter)


def _enter(row: Row, chars: int, books: Books) -> None:
    kept = row.get("drop_stage") is None
    books.enter(row, row["num_chars"] if kept else chars)
    for kind, number in (row.get("pii_counts") or {}).items():
        books.tally("pii", kind, number)
    if kept:
        books.tally("kept_bytes", row["source"], row["num_bytes"])
        books.tally("kept_documents", row["source"])
        books.tally("kept_languages", row["language"] or "?")
    else:
        row["text"] = row["title"] = None


def survivors(task: CleanTask) -> Iterator[Row]:
    """The documents of one part that deduplication and `repeats` kept, without what was cut from them."""
    verdicts = read_part(task, "dedup", ["doc_id", *FROM_DEDUP, "drop_stage"])
    kept = {row["doc_id"]: row for row in verdicts if row["drop_stage"] is None}
    repeats: dict[bytes, list[Span]] = {}
    for row in read_part(task, "repeats", ["doc_id", "cuts", "drop_stage"]) if "repeats" in task.paths else ():
        if row["drop_stage"] is not None:
            kept.pop(row["doc_id"], None)
        elif row["cuts"]:
            repeats[row["doc_id"]] = spans_of(row["cuts"])
    documents = {row["doc_id"]: row for row in read_part(task, "documents", FROM_DOCUMENTS) if row["doc_id"] in kept}
    found = 0
    for row in read_part(task, "text", ["doc_id", "title", "text", "cuts"]):
        identifier = row["doc_id"]
        if identifier not in kept:
            continue
        found += 1
        text = without(row["text"], union(spans_of(row["cuts"] or []), repeats.get(identifier, [])))
        cluster = {name: kept[identifier][name] for name in FROM_DEDUP}
        yield {**documents[identifier], **cluster, "title": row["title"], "text": text, "drop_stage": None}
    if found != len(kept):
        raise ContractError(
            f"clean {part_key(task.ordinal)}: expected the text of {len(kept)} survivors, got {found}. "
            "Documents, text and dedup are not of the same run: run the stages again."
        )


def spans_of(cuts: Sequence[Row]) -> list[Span]:
    """Stored cuts as spans [code points]."""
    return [(cut["start"], cut["end"]) for cut in cuts]


def read_part(task: CleanTask, table: str, columns: list[str]) -> Iterator[Row]:
    """The rows of one part of a table, a few hundred in memory at a time."""
    with task.tables[table].open_input(task.paths[table]) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
            yield from batch.to_pylist()
