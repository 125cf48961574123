"""The step `templates` on Spark: count pages of hosts and blocks over all parts, return the counts, write the parts.

Hosts with few pages are found first, so that no block of such a host leaves the worker. All counts are summed by key
with one row for each part that has the key, so no task has all pages of a large host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.dedup.repeats.keys import known_repeats
from pipeline.dedup.repeats.step import repeated_keys
from pipeline.dedup.repeats.units import cuts_of
from pipeline.engine.isolation import Crashed
from pipeline.engine.parquet import TEXTS_AT_ONCE, Part, parts_of, read_measured
from pipeline.engine.part import (
    CRASHED,
    PartOutput,
    PartResult,
    PartResults,
    PartTarget,
    TableTarget,
    set_verdict,
    write_part,
)
from pipeline.engine.progress import doing
from pipeline.engine.spark import (
    TALLIES_DDL,
    dataframe_from_tasks,
    map_parts,
    persist_on_disk,
    run_part_writers,
    totals,
)
from pipeline.engine.stage import Drop, PerDocument, Row, RowStep, extend_schema
from pipeline.engine.step import StepContext, TableResult, add_figures, combine_parts
from pipeline.engine.worker import FusedStages, ModelPaths, local_models
from pipeline.language import LANGUAGE
from pipeline.recipe_stages import RecipeStage
from pipeline.templates.blocks import (
    BLOCK_BYTES,
    HOST_BYTES,
    PageCounts,
    addresses_and_texts,
    begins_title,
    blocks_of,
    host_number,
    key_numbers,
    pages_of_blocks,
    pages_of_hosts,
)
from pipeline.templates.stage import ROUNDING, TEMPLATES, TemplatesConfig
from pipeline.text.spans import Span, complement, map_visible_spans, union, without
from pipeline.text.words import Codes
from schemas.config import Recipe
from schemas.entries import to_mapping, value_type
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.tables import DOCUMENTS, MEASURED_AGAIN, VERDICT_COLUMNS
from schemas.tables import TEMPLATES as TEMPLATES_SCHEMA

NAME = TEMPLATES.name

# The writer of one part: blocks of a page, the cuts of its templates, and what is measured without them.

KIND = "template"
"""Reason of every cut."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class TemplatesTask:
    """One part, the stages that measure a text again, and the folder of the table `templates`."""

    part: Part
    recipe: Recipe
    stages: tuple[PerDocument, ...]
    models: ModelPaths
    folder: Store

    @property
    def config(self) -> TemplatesConfig:
        """Return the settings of the step."""
        return self.recipe.section(TEMPLATES.name, TemplatesConfig)

    @property
    def context(self) -> list[str]:
        """Return the columns of `documents` that the stages read; those of a recipe may read any."""
        own = [stage for stage in self.stages if isinstance(self.recipe[stage.name], RecipeStage)]
        again = {*MEASURED_AGAIN, *VERDICT_COLUMNS, *(name for stage in self.stages for name in stage.adds)}
        return [name for name in DOCUMENTS.names if name not in again] if own else ["language", "source"]


def write_templates(task: TemplatesTask, counts: PageCounts, retried: bool) -> PartResult:
    """Write one part of the table `templates`. `retried` is True if an earlier attempt failed."""
    schema = extend_schema(TEMPLATES_SCHEMA, task.stages)
    columns = {
        "documents": list(dict.fromkeys(["url", "num_chars", *task.context])),
        "text": ["text", "title"],
    }

    def fill(output: PartOutput) -> None:
        fused = FusedStages(task.stages, task.recipe, local_models(task.models))
        measure = output.guard(fused, retried)
        figures, num_rows = empty_figures(), 0
        for batch in read_measured(task.part, columns, TEXTS_AT_ONCE):
            for row in rows_of(batch, counts, task, measure):
                output.books.failures.see(row)
                figures = add_figures(figures, count_row(row))
                output.write(row)
            num_rows += batch.num_rows
        output.figures |= figures
        output.counts = Counts(rows_in=num_rows, rows_kept=num_rows)

    return write_part(PartTarget(task.part.ordinal, {TEMPLATES.name: TableTarget(task.folder, schema)}), fill)


def rows_of(batch: pa.RecordBatch, counts: PageCounts, task: TemplatesTask, measure: RowStep) -> Iterator[Row]:
    """Yield the row of the table `templates` for each document of a batch, in order.

    `_language` and `_chars` of a row are the language and the length of the text [code points].
    """
    facts = batch.select(["doc_id", "url", "language", "num_chars", "text", "title"]).to_pylist()
    for number, stored in enumerate(facts):
        row: Row = {"doc_id": stored["doc_id"], "_language": stored["language"], "_chars": stored["num_chars"]}
        find_templates(row, stored, counts, task.config)
        if row.get("cuts"):
            cuts = [(start, end) for start, end, _ in row["cuts"]]
            (known,) = batch.slice(number, 1).select(task.context).to_pylist()
            measured = measure_without(_as_measured(known, batch.schema), stored["text"], cuts, measure)
            if "remainder_drop" in measured:
                row |= {"cuts": [], "template_chars": 0}
            row |= measured
        yield row


def find_templates(row: Row, stored: Row, counts: PageCounts, config: TemplatesConfig) -> None:
    """Add the blocks of a page to its row, and the cuts of those that reach the limits.

    Nothing is added for a page without a host, or of a host with few pages.
    """
    host = host_number(stored["url"])
    host_pages = 0 if host is None else counts.of_host(host)
    if host is None or host_pages < config.min_host_pages:
        return
    blocks = blocks_of(stored["text"])
    pages = counts.of_blocks(host, blocks)
    spans = list(zip(blocks.starts.tolist(), blocks.ends.tolist(), pages.tolist()))
    row["host_pages"] = host_pages
    row["blocks"] = [span for span in spans if span[2] >= config.min_pages]
    is_cut = (pages >= config.pages_needed(host_pages)) & ~begins_title(blocks, stored["title"])
    chosen = [(start, end) for (start, end, _), cut in zip(spans, is_cut.tolist()) if cut]
    row["_lines"] = len(chosen)
    row["cuts"] = cuts_of(stored["text"], [(KIND, chosen)])
    row["template_chars"] = sum(end - start for start, end, _ in row["cuts"])


def _as_measured(known: Row, schema: pa.Schema) -> Row:
    """Return stored columns as the stages of `documents` set them: entries as mappings."""
    return {
        name: to_mapping(value) if value_type(schema.field(name).type) is not None else value
        for name, value in known.items()
    }


def measure_without(known: Row, text: str, cuts: Sequence[Span], measure: RowStep) -> Row:
    """Return the columns of a text without the spans `cuts`, as the stages measure them.

    If a stage drops the text or fails on it, return `remainder_drop` alone, with the error.
    """
    rest = without(text, cuts)
    row = known | {"text": rest, "num_chars": len(rest), "drop_stage": None}
    try:
        row = measure(row)
    except Crashed:
        set_verdict(row, TEMPLATES.name, Drop(CRASHED))
    if row["drop_stage"] is not None:
        notes = {name: value for name, value in row.items() if name[0] == "_"}
        return notes | {"remainder_drop": f"{row['drop_stage']}/{row['drop_rule']}"}
    visible = complement(cuts, len(text))
    line_cuts = map_visible_spans(visible, [tuple(span) for span in row["cuts"] or ()])
    row["text_cuts"] = union(cuts, line_cuts)
    row["body_chars"] = len(row["_body"])
    if row.get("lines") is not None:
        row["lines"] = [_whole_span(map_visible_spans(visible, [tuple(span)])) for span in row["lines"]]
    return {name: value for name, value in row.items() if name not in ("text", "cuts", *known)}


def _whole_span(spans: Sequence[Span]) -> Span:
    """Return the span from the first to the last of the spans; an empty span if there are none."""
    return (spans[0][0], spans[-1][1]) if spans else (0, 0)


# The figures of the manifest.

SHARES = 10
"""Number of classes of the share of a host's pages that have a block."""


def empty_figures() -> Figures:
    """Return the figures of no documents; see `count_row`."""
    return {"kept_chars": 0, "documents": 0, "cut_documents": {}, "cut_lines": {}, "cut_chars": {}, "by_share": {}} | {
        "remainder_drop": {}
    }


def count_row(row: Mapping[str, Any]) -> Figures:
    """Return the figures of one row of the table `templates`.

    `documents` is 1 for a page of a host with enough pages. `kept_chars` is the length of its text without the cuts
    [code points]. `cut_documents`, `cut_lines` and `cut_chars` count cuts by language. `by_share` counts lines and code
    points of the stored blocks by the tenth of the host's pages that have them: `0.3` is a share from 0.3 up to 0.4.
    """
    figures = empty_figures() | {"kept_chars": row["_chars"] - (row.get("template_chars") or 0)}
    if row.get("host_pages") is None:
        return figures
    figures["documents"] = 1
    if row.get("remainder_drop") is not None:
        figures["remainder_drop"] = {row["remainder_drop"]: 1}
    if row["cuts"]:
        language = row["_language"] or "?"
        figures["cut_documents"] = {language: 1}
        figures["cut_lines"] = {language: row["_lines"]}
        figures["cut_chars"] = {language: row["template_chars"]}
    for start, end, pages in row["blocks"]:
        share = f"{min(1.0, pages * SHARES // row['host_pages'] / SHARES):g}"
        counted = figures["by_share"].setdefault(share, {"lines": 0, "chars": 0})
        counted["lines"] += 1
        counted["chars"] += end - start
    return figures


# The counts over all parts.


def build_templates(build: StepContext) -> dict[str, TableResult]:
    """Build the table `templates`, with one part for each part of `documents`, and return its result.

    Its figures are those of `empty_figures`, summed over the parts, and `hosts`: those with enough pages, and those of
    them with a line that reaches the limits.
    """
    tasks = [
        TemplatesTask(part, own.recipe, measured_again(own.per_document), own.model_paths(), build.folders[NAME])
        for part, own in build.by_part(parts_of(build.inputs))
    ]
    if not tasks:
        return combine_parts(PartResults([]), (NAME,))
    config = tasks[0].config

    def write(task: TemplatesTask, batches: Iterator[pa.RecordBatch], retried: bool) -> PartResult:
        return write_templates(task, PageCounts(batches), retried)

    doing("count pages of hosts")
    large = persist_on_disk(large_hosts(build, tasks))
    counts = persist_on_disk(page_counts(build, tasks, large))
    built = combine_parts(run_part_writers(build, counts, tasks, write, "cut templates"), (NAME,))
    figures = built[NAME].figures or empty_figures()
    built[NAME].figures = {**figures, "hosts": count_hosts(counts, config)}
    counts.unpersist()
    large.unpersist()
    return built


def measured_again(stages: tuple[PerDocument, ...]) -> tuple[PerDocument, ...]:
    """Return the stages that measure a text: those of the step `documents` after the language, in order.

    The language and the groups of the bias audit are not measured again; nor is what depends on the URL alone.
    """
    names = [stage.name for stage in stages]
    later = stages[names.index(LANGUAGE.name) + 1 :]
    return tuple(stage for stage in later if stage.reads_text and not stage.after_drops)


def large_hosts(build: StepContext, tasks: list[TemplatesTask]) -> DataFrame:
    """Return rows (key, part) of the hosts that have at least `min_host_pages` pages, copies included.

    A host has a row for each part that contains a page of it.
    """
    parts = [task.part for task in tasks]
    pages = totals(dataframe_from_tasks(build.spark, pages_of_hosts, parts, TALLIES_DDL))
    large = pages.where(F.col("total") >= tasks[0].config.min_host_pages)
    return large.select("key", "part", F.lit(None).cast("binary").alias("first"))


def page_counts(build: StepContext, tasks: list[TemplatesTask], large: DataFrame) -> DataFrame:
    """Return rows (key, part, total) of the hosts in `large`, and of their blocks that enough pages have.

    Pages with the same URL or text count once.
    """
    parts = [task.part for task in tasks]

    def pages(part: Part, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        hosts, _ = hosts_and_rows(batches)
        yield from addresses_and_texts(part, hosts) if len(hosts) else ()

    def blocks(part: Part, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        hosts, rows = hosts_and_rows(batches)
        (copies,) = known_repeats(rows, (1,))
        yield from pages_of_blocks(part, hosts, copies) if len(hosts) else ()

    copies = repeated_keys(map_parts(large, parts, pages, TALLIES_DDL), 2, True)
    # the keys of hosts and of copies have one length; the rows of copies are marked
    marked = large.withColumn("copy", F.lit(False)).unionByName(copies.withColumn("copy", F.lit(True)))
    counted = totals(map_parts(marked, parts, blocks, TALLIES_DDL))
    is_host = F.length("key") == HOST_BYTES
    return counted.where(is_host | (F.col("total") >= tasks[0].config.min_pages)).select("key", "part", "total")


def hosts_and_rows(batches: Iterator[pa.RecordBatch]) -> tuple[Codes, list[pa.RecordBatch]]:
    """Return the sorted hashes of the hosts among the rows of a part, and the rows of copies."""
    hosts, rows = [np.zeros(0, np.uint64)], []
    for batch in batches:
        names = batch.schema.names
        is_copy = batch.column("copy").to_numpy(zero_copy_only=False).astype(bool) if "copy" in names else None
        is_host = np.ones(batch.num_rows, bool) if is_copy is None else ~is_copy
        hosts.append(key_numbers(batch, is_host, 1)[:, 0])
        rows.append(batch.filter(pa.array(~is_host)))
    return np.unique(np.concatenate(hosts)), rows


def count_hosts(counts: DataFrame, config: TemplatesConfig) -> dict[str, int]:
    """Return the numbers of hosts with enough pages (`measured`), and of those with a line that is cut (`cut`)."""
    is_host, is_block = (F.length("key") == size for size in (HOST_BYTES, BLOCK_BYTES))
    by_host: Any = counts.groupBy(F.substring("key", 1, HOST_BYTES).alias("host")).agg(
        F.max(F.when(is_host, F.col("total"))).alias("pages"), F.max(F.when(is_block, F.col("total"))).alias("most")
    )
    # as in TemplatesConfig.pages_needed
    needed = F.greatest(F.lit(config.min_pages), F.ceil(F.col("pages") * F.lit(config.min_share) - F.lit(ROUNDING)))
    is_cut = F.coalesce(F.col("most") >= needed, F.lit(False))
    (row,) = (
        by_host.where(F.col("pages") >= config.min_host_pages)
        .agg(F.count("*").alias("measured"), F.coalesce(F.sum(is_cut.cast("long")), F.lit(0)).alias("cut"))
        .collect()
    )
    return {"measured": row["measured"], "cut": row["cut"]}
