"""The step `documents`: one worker turns an input file into a part of `documents` (rows and signals) and of `text`.

Raw pages never leave the worker. A document that extraction or the language stage drops is not processed further. The
other stages measure all remaining documents, so that thresholds can be changed later without reading text.
"""

import functools
import re
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.bias.count import COUNTS, DECLARED, GroupCounter, stratum_of
from pipeline.bias.stage import GROUPS
from pipeline.decontaminate.stage import DECONTAMINATE, SETS, contamination_table, figures_of, set_sizes
from pipeline.engine.finished_parts import FinishedPart
from pipeline.engine.guard import RecordGuard, StuckReaderError
from pipeline.engine.part import RANGE, DropCounter, PartOutput, PartResult, PartTarget, TableTarget, write_part
from pipeline.engine.progress import WorkTotal
from pipeline.engine.spark import run_parts
from pipeline.engine.stage import Drop, PerDocument, Relation, Row, RowStep, Source, Split, extend_schema
from pipeline.engine.step import StepContext, TableResult, combine_parts
from pipeline.engine.worker import FusedStages, ModelPaths, local_models, run_rows
from pipeline.extract.extract import EMPTY_PAGE, ERRORS, EXTRACT, GUARD, LIMITED, ExtractConfig
from pipeline.language import EARLY, LANGUAGE, LanguageConfig, make_early_language
from pipeline.sources.common_crawl.records import ChosenRecords
from pipeline.sources.common_crawl.requests import UnreachableFileError
from pipeline.sources.config import SourceConfig
from pipeline.sources.first_rows import TextWatch, spread
from pipeline.sources.formats import FORMATS
from pipeline.sources.ranges import check_unchanged
from pipeline.sources.source import gap_to_end, reasons_of
from pipeline.sources.splits import HashedStream, files_by_part, open_stream
from pipeline.steps.crawl_files import CAUSE, check_unreachable, clear_ranges, limited_partitions, with_ranges
from pipeline.steps.file_ranges import clear_file_ranges, with_file_ranges
from pipeline.steps.several_extractors import COMPARED, STOPPED, TRIED, SeveralExtractors, figures_of_comparison
from pipeline.toxicity.stage import MEASURED_BY
from pipeline.urls.config import UrlsConfig
from pipeline.urls.stage import URLS, make_early_urls
from schemas.config import Recipe, Section
from schemas.errors import ContractError
from schemas.ids import is_in_share, shuffle_key
from schemas.logs import LOGGER
from schemas.storage import Store
from schemas.tables import COMPARISONS, DERIVED, DOCUMENTS, META_CUT, META_FIELDS, META_NUMBERS, PARENTS, TEXT

MAX_META_NAMES = 32
"""Maximum number of fields of `meta` that the result of one part counts: the first in the part."""
PLAIN_NAME = re.compile(r"(?=(?:\D*\d){0,4}\D*\Z)(?=.{1,100}\Z)[^\W\d]\w*(?:[.:/-]\w+)*")
"""Names of fields of `meta` that are counted: words that single signs join, such as `dc:title`. An address, a number or
a sentence may be personal data, and a manifest has none."""
AS_STORED = "_as_stored"
"""Field of a row: True if its length counts bytes of the stored file; else decompressed bytes, or rows."""
MAX_TYPES, OTHER_TYPE = 32, "other"
"""Maximum number of record types whose rows and bytes are counted in a part, and the name under which others are."""
MAX_FIELDS = 256
"""Maximum number of fields of `meta` that the manifest counts: the most frequent."""


class TextConfig(Section):
    """The section `[text]` of a recipe: whether to store the text of documents that extraction or language drops.

    Their rows are always stored. The text of all other documents is stored too, as thresholds may be changed later.
    """

    dropped: Literal["keep", "sample", "leave_out"] = "keep"
    """"keep" stores the text of all documents that extraction or the language stage drops, "sample" that of a share of
    them, "leave_out" none."""
    sample_share: float = Field(0.01, ge=0, le=1)
    """Share of dropped documents whose text is stored if `dropped` is `sample`, chosen by a hash of doc_id."""

    @model_validator(mode="after")
    def _used(self) -> "TextConfig":
        if self.dropped != "sample" and "sample_share" in self.model_fields_set:
            raise ValueError(
                f"sample_share: expected text.dropped = 'sample' with it, got {self.dropped!r}. Set text.dropped, or "
                "remove text.sample_share."
            )
        return self


KEEP_TEXT = Relation(name="text", version=1, config=TextConfig)


@dataclass(frozen=True)
class DocumentsTask:
    """The files to read into one part, and the folders of the tables `documents` and `text`."""

    splits: tuple[Split, ...]
    """Files of one source and format, in order, or a range of a file."""
    source: Source
    stages: tuple[PerDocument, ...]
    recipe: Recipe
    models: dict[str, dict[str, str]]
    documents: Store
    text: Store
    comparisons: Store | None = None
    """Folder of the table `comparisons`; None = no extractors are compared."""
    others: tuple[Split, ...] = ()
    """Files of the same source whose first rows are read if the files of the part have no text."""
    finished: FinishedPart | None = None
    """Where the result is stored for later versions of the tables; None = only in this version."""
    has_parents: bool = False
    """True if a source of the recipe has parents, so that `documents` has the column."""


def build_documents(build: StepContext) -> dict[str, TableResult]:
    """Build the tables `documents` and `text`, and `comparisons` if the recipe compares extractors.

    Each has one part for each input file, for several small ones, or for a range of a large one; see
    `pipeline.sources.splits.part_numbers`.
    """
    (source,) = (stage for stage in build.stages if isinstance(stage, Source))
    folders = build.folders["documents"], build.folders["text"], build.folders.get("comparisons")
    others = {name: spread([split for split in build.splits if split.source == name]) for name in build.recipe.sources}
    parts = files_by_part(with_file_ranges(build, with_ranges(build)))
    with_parents = has_parents(build.recipe, build.splits)
    finished = [build.finished_part(identity_of_part(files, with_parents), files[0].source) for files in parts]
    tasks = [
        DocumentsTask(
            files,
            source,
            own.per_document,
            own.recipe,
            own.model_paths(),
            *folders,
            others=others[files[0].source],
            finished=finished[at],
            has_parents=with_parents,
        )
        for at, (files, own) in enumerate(build.by_part(parts))
    ]
    size = WorkTotal(bytes=sum(split.size for split in build.splits))
    limited = replace(build, partitions=limited_partitions(build, len(tasks)))
    results = run_parts(limited, documents_part, tasks, "documents", size)
    read = [(files, finished[at]) for at, files in enumerate(parts) if build.only is None or at in build.only]
    results = check_unreachable(build, read, results)
    clear_ranges(build)
    clear_file_ranges(build)
    tables = ("documents", "text", *(("comparisons",) if "comparisons" in build.folders else ()))
    built = combine_parts(results, tables, by_source=True)
    built["documents"].failures.check(failure_limits(build.per_document), is_complete=True)
    _limit_names(built["documents"].figures)
    figures = built["documents"].figures
    for own in build.by_source().values():  # a source may have sets of its own
        if (index := own.model_paths().get(DECONTAMINATE.name, {}).get("index")) is not None:
            figures[SETS] = figures.get(SETS, {}) | set_sizes(index)
    if SETS in figures:
        LOGGER.info(contamination_table(figures))
    return built


def documents_part(task: DocumentsTask, retried: bool) -> PartResult:
    """Run the rows of a part's files through the per-document stages, and write them to the tables of the step.

    Raises ConfigError if neither these files nor the first rows of the other ones have a text; see `TextWatch`.
    """
    schema = extend_schema(DOCUMENTS, task.stages)
    if not task.has_parents:
        schema = schema.remove(schema.get_field_index(PARENTS.name))
    limits = failure_limits(task.stages)
    columns = frozenset((*schema.names, *TEXT.names))

    def fill(output: PartOutput) -> None:
        fused = document_stages(task.stages, task.recipe, local_models(task.models))
        config = task.recipe.section("text", TextConfig)
        settings = task.recipe.section(task.source.name, SourceConfig)
        watch = TextWatch(task.splits, task.others, settings, task.source.open)
        guard = output.guard(fused, retried, settings.max_record_bytes)
        counter = GroupCounter()
        deciding = [stage.name for stage in task.stages if stage.reasons and stage.name != EXTRACT.name]
        with closing(rows_of_files(task, settings, output, guard, retried)) as rows:
            for row in run_rows(rows, guard, (task.source.name, EXTRACT.name)):
                check_columns(row, columns)
                watch.see(row)
                count_filters(row, counter, deciding)
                if settings.parents_field is not None and row.get("drop_stage") is None and row.get(PARENTS.name):
                    output.books.tally(DERIVED, row["source"])
                write_row(row, output, config)
                output.books.failures.check(limits, is_complete=False)
        output.figures[COUNTS] = counter.figures
        watch.end()

    tables = {"documents": TableTarget(task.documents, schema), "text": TableTarget(task.text, TEXT, "text")}
    if task.comparisons is not None:
        tables["comparisons"] = TableTarget(task.comparisons, COMPARISONS, "first_text", rows_in=COMPARED)
    first = task.splits[0]
    of_source = reasons_of(first.format, first.is_crawl, parents_field_of(task.recipe) is not None)
    reasons: list[tuple[str, Mapping[str, str]]] = [(task.source.name, of_source)]
    reasons += [(stage.name, stage.reasons) for stage in task.stages]
    return write_part(PartTarget(first.ordinal, tables, reasons, finished=task.finished), fill)


def parents_field_of(recipe: Recipe) -> str | None:
    """Return the field with the parents of a row, by the recipe of one source; None = its rows have no parents."""
    return recipe.section("source", SourceConfig).parents_field


def has_parents(recipe: Recipe, splits: Iterable[Split]) -> bool:
    """Return True if rows of a run may have parents; the column is then in the parts of all sources."""
    fields = (parents_field_of(own) for own in recipe.by_source().values())
    return any(field is not None for field in fields) or any(FORMATS[split.format].has_parents for split in splits)


def identity_of_part(files: Iterable[Split], with_parents: bool) -> list[Any]:
    """Return JSON values that identify what is read into a part. `with_parents`: see `has_parents`."""
    return [*map(identity_of, files), *(["parents"] if with_parents else [])]


def identity_of(split: Split) -> list[Any]:
    """Return JSON values that identify the rows that are read from a file, or from a range of one."""
    span = None if split.span is None else [split.num_ranges, *astuple(split.span)]
    return [split.key, split.name, split.size, split.identity, split.format, split.snapshot, [*split.companions], span]


def rows_of_files(
    task: DocumentsTask, settings: SourceConfig, output: PartOutput, guard: RecordGuard, retried: bool
) -> Generator[tuple[Row, Drop | None]]:
    """Yield (row, drop) for each record of a part's files, and add each file that was read to `output.sources`.

    If the reader has ended several workers on one record of a file, or asks for too much memory in a retry, the rest of
    the file is a gap. So is a file of a crawl that is unreachable, if some may be. Raises ContractError if a file does
    not have the size that it had when the run was prepared.
    """
    done = 0
    for split in task.splits:
        cause, end, as_stored = "", split.first.offset, FORMATS[split.format].as_stored
        with closing(ChosenRecords(split) if split.ranges else open_stream(split)) as stream:
            begin = 0 if split.span is None else split.span.begin
            output.meter.position = functools.partial(_position, stream, done - begin)
            try:
                for row, drop in guard.read(task.source.open(split, stream, settings), stream):
                    end = row["offset"] + row["length"]
                    row[AS_STORED] = as_stored
                    yield row, drop
            except (StuckReaderError, MemoryError) as error:
                if isinstance(error, MemoryError) and not retried:
                    raise  # other files of the part may have taken the memory
                gap, drop = gap_to_end(split, end, error, stream)
                yield gap | {AS_STORED: as_stored}, drop
            except UnreachableFileError as error:
                if not settings.max_unreadable:
                    raise ContractError(str(error)) from error
                cause = error.cause
                gap, drop = gap_to_end(split, end, error, stream)
                yield gap | {AS_STORED: as_stored}, drop
            sha256, size = stream.digest_so_far() if cause else stream.finish()
            output.transfers.update(stream.transfers)
        check_size(split, size)
        entry = {"name": split.key, "bytes": size, "sha256": sha256}
        if split.span is not None:
            check_unchanged(split)
            entry[RANGE] = {"begin": begin, "first": None if split.span.first is None else split.first.offset}
        output.sources.append(entry | ({CAUSE: cause} if cause else {}))
        if not as_stored:
            output.books.tally("other_inputs", split.format, size)
        done += size


def _position(stream: HashedStream | ChosenRecords, done: int) -> int:
    # A range of a compressed file may be read from bytes before it.
    return max(0, done if stream.closed else done + stream.tell())


def document_stages(stages: Sequence[PerDocument], recipe: Recipe, models: ModelPaths) -> RowStep:
    """Return the measured stages of a recipe as one function of a row. `models` are paths on this worker."""
    has_several = len(recipe.section(EXTRACT.name, ExtractConfig).extractors) > 1
    measure: RowStep = (SeveralExtractors if has_several else FusedStages)(stages, recipe, models)
    early: list[PerDocument] = []
    if recipe.section(URLS.name, UrlsConfig).early_lists:
        early.append(replace(URLS, make=make_early_urls, ends=True))
    if recipe.section(LANGUAGE.name, LanguageConfig).early:
        early.append(replace(LANGUAGE, make=make_early_language))
    if not early:
        return measure
    drop_early = FusedStages(early, recipe, models)

    def measure_wanted(row: Row) -> Row:
        row = drop_early(row)
        return row if row.get("drop_stage") is not None else measure(row)

    return measure_wanted


def failure_limits(stages: Iterable[PerDocument]) -> dict[str, float]:
    """Return the share of documents that each stage of the recipe may fail on, by stage."""
    return {stage.name: stage.max_failed_share for stage in stages if stage.max_failed_share is not None}


def check_size(split: Split, size: int) -> None:
    """Raise ContractError unless `size` is the size that the file had when the run was prepared, if it is known."""
    expected = split.size if split.span is None else split.span.end - split.span.begin
    if size != expected and not split.is_crawl:
        raise ContractError(
            f"{split.uri}: expected {expected} bytes, got {size} while reading. "
            "Run `penstock run` again when the file is complete and no longer changes."
        )


def check_columns(row: Row, columns: Container[str]) -> None:
    """Raise ContractError if the row has a value for which the tables have no column."""
    unknown = [name for name in row if name not in columns and name[0] != "_"]
    if unknown:
        raise ContractError(
            f"step documents: expected only columns of the tables `documents` and `text`, got also {unknown}. "
            "Declare them in the field `columns` of the stage that adds them."
        )


def write_row(row: Row, output: PartOutput, config: TextConfig) -> None:
    """Count a finished row and write it to the tables of the step."""
    books = output.books
    books.enter(row, row.get("num_chars") or 0)
    if row.get("language") is not None:
        books.tally("languages", row["language"])
    if row.get(EARLY):
        books.tally("dropped_early", row["language"])
    if row.get("drop_stage") is None:
        row["body_chars"] = len(row["_body"])
        if row.get(MEASURED_BY) is not None:
            books.tally(MEASURED_BY, f"{row['language'] or '?'}/{row[MEASURED_BY]}")
        for measure, number in (row.get("toxic_word_counts") or {}).items():
            books.tally("toxic_documents", measure)
            books.tally("toxic_words", measure, number)
        for figure in figures_of(row):
            books.tally(*figure)
        if row.get("second_language") is not None:
            books.tally("mixed_languages", f"{row['language']}+{row['second_language']}")
    for name, is_better in row.get(TRIED, ()):
        books.tally("union_tried", name)
        if is_better:
            books.tally("union_taken", name)
            books.tally("union_chars", name, row["body_chars"])
    for name in row.get(STOPPED, ()):
        books.tally("stopped_extractors", name)
    if row.get(COMPARED) is not None:
        for figure in figures_of_comparison(row[COMPARED]):
            books.tally(*figure)
    _count_meta(row.get("_meta"), books)
    if row.get("charset") is not None:
        books.tally("charsets", row["charset"])
    if row.get(GUARD) is not None:
        books.tally("second_opinions", row[GUARD])
    if row.get(EMPTY_PAGE) is not None:
        books.tally("empty_pages", f"{row.get('declared_language') or '?'}/{row[EMPTY_PAGE]}")
    for limit in row.get(LIMITED, ()):
        books.tally("limited_pages", limit)
    for error in row.get(ERRORS, ()):
        books.tally("extractor_errors", error)
    for kind, number in (row.get("unicode_repairs") or {}).items():
        books.tally("unicode_repairs", kind, number)
    kind = row["record_type"] or "?"
    if not books.tally_some("record_types", kind, MAX_TYPES):
        kind = OTHER_TYPE
        books.tally("record_types", kind)
    cause = f"gap/{row.get('drop_rule')}" if kind == "gap" else kind
    if row.get(AS_STORED):
        books.tally("stored_bytes", cause, row["length"] or 0)
    if row.get("drop_stage") is not None and not _keeps_text(row, config):
        row["text"] = row["title"] = row["cuts"] = None
    output.write(row)


def count_filters(row: Row, counter: GroupCounter, stages: Sequence[str]) -> None:
    """Count which of `stages` a document reached, and which dropped it, for the bias audit.

    For the language stage, the stratum has the language that the page declares, since the predicted one is what the
    stage decides by. Pages that declare none are not counted there: most of a group would be in other languages than
    most of the others.
    """
    declared = row.get("declared_language")
    for stage in stages if row.get(GROUPS) is not None else ():
        dropped = row.get("drop_stage") == stage
        language = declared if stage == LANGUAGE.name else row["language"]
        if stage != LANGUAGE.name or declared in DECLARED:
            names = (stage, f"{stage}/{row['drop_rule']}") if dropped else ()
            counter.add_row(row[GROUPS], stratum_of(row["source"], language, row.get("num_chars")), stage, names)
        if dropped:
            return


def _count_meta(note: Any, books: DropCounter) -> None:
    """Count the fields that `meta` holds of a row, and the causes for which fields were left out."""
    if note is None:
        return
    for name, is_number in note.numbers.items():
        if PLAIN_NAME.fullmatch(name) is None:
            continue
        if books.tally_some(META_FIELDS, name, MAX_META_NAMES) and is_number:
            books.tally(META_NUMBERS, name)
    for cause in note.cut:
        books.tally(META_CUT, cause)


def _limit_names(figures: dict[str, Any]) -> None:
    """Keep the counts of the most frequent fields of `meta` only, so that the manifest stays small."""
    counted = figures.get(META_FIELDS, {})
    kept = sorted(counted, key=lambda name: (-counted[name], name))[:MAX_FIELDS]
    for figure in (META_FIELDS, META_NUMBERS):
        if figure in figures:
            figures[figure] = {name: count for name, count in figures[figure].items() if name in kept}


def _keeps_text(row: Row, config: TextConfig) -> bool:
    if config.dropped == "sample":
        return is_in_share(shuffle_key(0, row["doc_id"]), config.sample_share)
    return config.dropped == "keep"
