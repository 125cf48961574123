"""The step `clean`: the survivors of deduplication, without the spans that were cut and with personal data replaced.

Identifiers are planted in the same pass, if the recipe asks for them.

Tables are joined part by part: each task reads the same part of `documents`, `text`, `dedup` and, if the run has them,
`templates`, `paragraphs` and `repeats`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from pipeline.engine.finished_parts import FinishedPart
from pipeline.engine.part import PartOutput, PartResult, PartTarget, TableTarget, write_part
from pipeline.engine.progress import WorkTotal
from pipeline.engine.spark import run_parts
from pipeline.engine.stage import PerDocument, Row
from pipeline.engine.step import StepContext, TableResult, combine_parts
from pipeline.engine.worker import FusedStages, local_models, run_rows
from pipeline.pii.stage import NAMES_KEPT, PII, REPLACED_SPANS, PiiConfig
from pipeline.plant.stage import KEY, PLANT
from pipeline.sources.config import SourceConfig
from pipeline.text.spans import Span, union, without
from schemas.config import SOURCE, Recipe
from schemas.errors import ContractError
from schemas.key_file import commitment, read_key
from schemas.manifest import TableVersion, part_key
from schemas.older_tables import read_batches
from schemas.planted import COMMITMENT, DOCUMENTS, LINES, PLANTED, PURPOSE
from schemas.storage import CheckedPath, Store
from schemas.tables import CLEAN, NOT_PLANTED, PERSONAL_DATA

FROM_DOCUMENTS = ["doc_id", "source", "split", "offset", "length", "url", "domain", "date", "snapshot"]
FROM_DOCUMENTS += ["licence", "meta", "language"]
FROM_DEDUP = ["cluster", "cluster_size", "weight"]
ROWS_AT_ONCE = 512
UNKNOWN = "?"
"""Name of the language of a document without one, in figures."""
NAMES_KEPT_FIGURE = "names_kept"
"""Figure: documents whose names were kept because no model reads their language, by language. A takedown does not
change it."""
AUDIT = "personal_data"
"""The table with the places of all replacements."""
NO_ROW = "_no_row"
"""Field that no row has: a document has any number of rows in `personal_data`, so they are written one by one."""


@dataclass(frozen=True)
class CleanTask:
    """One part to build: the folders and paths of the input tables, and the folder of the table `clean`."""

    ordinal: int
    stages: tuple[PerDocument, ...]
    recipe: Recipe
    models: dict[str, dict[str, str]]
    tables: dict[str, Store]
    paths: dict[str, CheckedPath]
    folder: Store
    audit: Store | None = None
    """Folder of the table `personal_data`; None = it is not written."""
    finished: FinishedPart | None = None
    """Where the result is stored for later versions of the table; None = only in this version."""


def build_clean(build: StepContext) -> dict[str, TableResult]:
    """Build the table `clean`, with one part for each part of `documents`, and return its result."""
    paths = [part_paths(build.inputs, ordinal) for ordinal in range(num_parts(build.inputs["documents"]))]
    folders, folder = {name: table.folder for name, table in build.inputs.items()}, build.folders["clean"]
    audit = build.folders.get(AUDIT)
    finished = build.finished_parts()
    tasks = [
        CleanTask(
            ordinal, own.per_document, own.recipe, own.model_paths(), folders, path, folder, audit, finished[ordinal]
        )
        for ordinal, (path, own) in enumerate(build.by_part(paths))
    ]
    last = build.inputs.get("repeats") or build.inputs["dedup"]
    tables = ("clean", *((AUDIT,) if audit is not None else ()))
    size = WorkTotal(rows=last.manifest.content.counts.rows_kept)
    built = combine_parts(run_parts(build, clean_part, tasks, "clean", size), tables, by_source=True)
    if PLANT in build.stages:
        key = read_key(build.models[PLANT.name][KEY].path)
        built["clean"].figures = {**built["clean"].figures, COMMITMENT: commitment(key, PURPOSE)}
    return built


def num_parts(table: TableVersion) -> int:
    """Return the number of parts of a table."""
    return len(table.manifest.content.files)


def part_paths(tables: Any, ordinal: int) -> dict[str, CheckedPath]:
    """Return the path of part `ordinal` in each of the tables, by table name."""
    return {name: table.manifest.paths[part_key(ordinal)] for name, table in tables.items()}


def clean_part(task: CleanTask, retried: bool) -> PartResult:
    """Run the survivors of one part through the stages and write the part of `clean`."""

    def fill(output: PartOutput) -> None:
        fused = FusedStages(task.stages, task.recipe, local_models(task.models))
        rows = ((row | {"_chars": len(row["text"])}, None) for row in survivors(task))
        guard = output.guard(fused, retried, task.recipe.section(SOURCE, SourceConfig).max_record_bytes)
        for row in run_rows(rows, guard, (task.stages[0].name, task.stages[0].name)):
            _count(row, output)
            output.write(row)
            if task.audit is not None and row["drop_stage"] is None and task.recipe.section(PII.name, PiiConfig).audit:
                for place in row[REPLACED_SPANS]:
                    output.writers[AUDIT].add(place)

    reasons = [(stage.name, stage.reasons) for stage in task.stages]
    tables = {"clean": TableTarget(task.folder, CLEAN if PLANT in task.stages else NOT_PLANTED, "text")}
    if task.audit is not None:
        tables[AUDIT] = TableTarget(task.audit, PERSONAL_DATA, rows_in=NO_ROW)
    return write_part(PartTarget(task.ordinal, tables, reasons, finished=task.finished), fill)


def _count(row: Row, output: PartOutput) -> None:
    """Count a row as kept or dropped. Remove what may hold personal data from a dropped row."""
    books = output.books
    kept = row.get("drop_stage") is None
    # `_chars` is the length of the text before the stages ran [code points].
    books.enter(row, row["num_chars"] if kept else row["_chars"])
    found, language = row.get("pii_counts") or {}, row["language"] or UNKNOWN
    for kind, number in found.items() if kept else ():
        books.tally("pii", kind, number)
        books.tally("pii_languages", language, number)
        books.tally("pii_sources", row["source"], number)
    if row.get(NAMES_KEPT) and kept:
        books.tally(NAMES_KEPT_FIGURE, language)
    if kept and found:
        books.tally("pii_documents", row["source"])
    if kept:
        books.tally("kept_bytes", row["source"], row["num_bytes"])
        books.tally("kept_documents", row["source"])
        books.tally("kept_languages", language)
        if row.get(PLANTED):
            books.tally(DOCUMENTS, row["source"])
            books.tally(LINES, row["source"], row[PLANTED])
    else:
        row |= dict.fromkeys(("text", "title", "url", "licence", "meta", "num_chars", "num_bytes"))


def survivors(task: CleanTask) -> Iterator[Row]:
    """Yield the documents of one part that `dedup` and `repeats` kept, with their text after all cuts."""
    verdicts = read_part(task, "dedup", ["doc_id", *FROM_DEDUP, "drop_stage"])
    kept = {row["doc_id"]: row for row in verdicts if row["drop_stage"] is None}
    more_cuts: dict[bytes, list[Span]] = {}
    for row in read_part(task, "paragraphs", ["doc_id", "cuts"]) if "paragraphs" in task.paths else ():
        if row["cuts"]:
            more_cuts[row["doc_id"]] = spans_of(row["cuts"])
    for row in read_part(task, "repeats", ["doc_id", "cuts", "drop_stage"]) if "repeats" in task.paths else ():
        if row["drop_stage"] is not None:
            kept.pop(row["doc_id"], None)
        elif row["cuts"]:
            more_cuts[row["doc_id"]] = union(more_cuts.get(row["doc_id"], []), spans_of(row["cuts"]))
    documents = {row["doc_id"]: row for row in read_part(task, "documents", FROM_DOCUMENTS) if row["doc_id"] in kept}
    num_texts = 0
    own_cuts: dict[bytes, list[Span]] = {}
    for row in read_part(task, "templates", ["doc_id", "text_cuts"]) if "templates" in task.paths else ():
        if row["text_cuts"]:
            own_cuts[row["doc_id"]] = spans_of(row["text_cuts"])
    for row in read_part(task, "text", ["doc_id", "title", "text", "cuts"]):
        identifier = row["doc_id"]
        if identifier not in kept:
            continue
        num_texts += 1
        cuts = own_cuts.get(identifier) or spans_of(row["cuts"] or [])
        text = without(row["text"], union(cuts, more_cuts.get(identifier, [])))
        cluster = {name: kept[identifier][name] for name in FROM_DEDUP}
        yield {**documents[identifier], **cluster, "title": row["title"], "text": text, "drop_stage": None}
    if num_texts != len(kept):
        raise ContractError(
            f"clean {part_key(task.ordinal)}: expected the text of {len(kept)} survivors, got {num_texts}. "
            "Run `penstock run` again: it rebuilds the tables that are out of date."
        )


def spans_of(cuts: Sequence[Row]) -> list[Span]:
    """Return the cuts stored in a row as spans (start, end) [code points]."""
    return [(cut["start"], cut["end"]) for cut in cuts]


def read_part(task: CleanTask, table: str, columns: list[str]) -> Iterator[Row]:
    """Yield the rows of one part of a table; at most ROWS_AT_ONCE are in memory at a time."""
    with task.tables[table].open_input(task.paths[table]) as stream:
        for batch in read_batches(pq.ParquetFile(stream), table, columns, ROWS_AT_ONCE):
            yield from batch.to_pylist()
