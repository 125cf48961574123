"""What the step `documents` does for the files of Common Crawl: the index, connections, and files that are unreachable.

With `source.where`, a Spark job reads the index of the crawl before the files are read. It writes the ranges of the
chosen records into the folder of the table, by archive, so that each task reads those of its own file.
"""

import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from pipeline.engine.code_digest import code_digest
from pipeline.engine.finished_parts import FinishedPart
from pipeline.engine.materialize import FrameStore
from pipeline.engine.part import FRAMES, SCRATCH, PartResult, PartResults, current_inputs
from pipeline.engine.spark import dataframe_from_tasks, run_part_writers
from pipeline.engine.stage import Split
from pipeline.engine.step import StepContext
from pipeline.engine.tasks import num_cores
from pipeline.sources.common_crawl.columns import ARCHIVE, INDEX_SCHEMA, LENGTH, OFFSET
from pipeline.sources.common_crawl.download import RandomAccessFile
from pipeline.sources.common_crawl.listing import index_files, open_crawl_file
from pipeline.sources.common_crawl.records import RANGES
from pipeline.sources.common_crawl.requests import remote_file
from pipeline.sources.config import SourceConfig
from schemas.errors import ContractError
from schemas.expressions import parse_expression
from schemas.leases import delete_files
from schemas.manifest import Counts
from schemas.storage import Store

CAUSE = "unreachable"
"""Key in the entry of an input file that could not be fetched, or not to its end, with the cause."""
NAME = "ranges"
MAX_LISTS = 2000
"""Maximum number of lists of ranges of a source; archives share them."""
PUSHED_ARCHIVES = 1000
"""Maximum number of archives whose names are part of the filter with which the index is read."""
LIST_DDL = "part int, archive int, first long, end long"
LIST_SCHEMA = pa.schema([("part", pa.int32()), *RANGES])


@dataclass(frozen=True)
class IndexQuery:
    """A condition on the index of a crawl, and the archives whose records are wanted."""

    where: str
    archives: Mapping[str, int]
    """Number of the part of each archive, by its path in the bucket."""
    lists: int
    """Number of lists of ranges."""


def with_ranges(build: StepContext) -> Sequence[Split]:
    """Return the files of a run. Those of a source with `where` have the place of the list of their records.

    The lists are written by a Spark job, unless an interrupted run has written them.
    """
    splits = list(build.splits)
    for name, own in build.recipe.by_source().items():
        config = own.section("source", SourceConfig)
        if config.where is None:
            continue
        files = {split.name: split.ordinal for split in splits if split.source == name}
        query = IndexQuery(config.where, files, min(len(files), MAX_LISTS))
        folder = build.folders["documents"].child(f"{SCRATCH}/{name}")
        _write_lists(build, query, config, folder)
        splits = [
            replace(split, ranges=folder.child(_list_name(split.ordinal % query.lists)).address)
            if split.source == name
            else split
            for split in splits
        ]
    return splits


def clear_ranges(build: StepContext) -> None:
    """Delete the lists of ranges."""
    if any(own.section("source", SourceConfig).where is not None for own in build.recipe.by_source().values()):
        FrameStore(build.spark, build.folders["documents"].child(SCRATCH)).clear()


def _list_name(number: int) -> str:
    return f"{NAME}-{number:05}.parquet"


def _write_lists(build: StepContext, query: IndexQuery, config: SourceConfig, folder: Store) -> None:
    """Write the ranges of the chosen records of all archives, in lists, and then the list of these files."""
    listing, made_by = f"{NAME}.json", {"code": code_digest(), "inputs": current_inputs()}
    stored = folder.read_json(listing) if folder.exists(listing) else {}
    if {key: stored.get(key, "") for key in made_by} == made_by:
        return
    rows = dataframe_from_tasks(build.spark, functools.partial(index_rows, query), index_files(config), LIST_DDL)
    rows = rows.coalesce(config.connections)  # each task has one connection
    lists = [(folder, _list_name(number)) for number in range(query.lists)]
    run_part_writers(build, rows, lists, _write_list, "read the index of the crawl")
    files = [{"path": _list_name(number)} for number in range(query.lists)]
    frames = {NAME: {"schema": LIST_DDL, "files": files}}
    folder.write_atomic(listing, json.dumps({**made_by, FRAMES: frames}).encode())


def index_rows(query: IndexQuery, uri: str) -> Iterator[pa.RecordBatch]:
    """Yield the places of the records of one index file that are in the archives and meet the condition.

    Raises ContractError if the file has no column of the condition.
    """
    condition = parse_expression(query.where, INDEX_SCHEMA, "source.where")
    names = pa.array(query.archives, pa.string())
    numbers = pa.array(query.archives.values(), pa.int32())
    chosen = condition.to_filter()
    if len(names) <= PUSHED_ARCHIVES:
        chosen &= pc.field(ARCHIVE).isin(names)
    file = remote_file(uri)
    with pa.PythonFile(RandomAccessFile(file) if file is not None else open_crawl_file(uri), mode="r") as stream:
        fragment = ds.ParquetFileFormat().make_fragment(stream)
        if missing := sorted((condition.columns | {ARCHIVE, OFFSET, LENGTH}) - {*fragment.physical_schema.names}):
            raise ContractError(
                f"{uri}: expected the columns of source.where, got an index without {', '.join(missing)}. Change "
                "source.where, or read a later crawl."
            )
        scanner = fragment.scanner(
            columns=[ARCHIVE, OFFSET, LENGTH],
            filter=chosen,
            use_threads=False,
            fragment_readahead=1,
            batch_readahead=1,
            fragment_scan_options=ds.ParquetFragmentScanOptions(pre_buffer=False),
        )
        for batch in scanner.to_batches():
            place = pc.index_in(batch.column(ARCHIVE), value_set=names)
            number = pc.take(numbers, place)
            try:
                first, size = (pc.cast(batch.column(name), pa.int64()) for name in (OFFSET, LENGTH))
            except pa.ArrowInvalid as error:
                raise ContractError(
                    f"{uri}: expected whole numbers in {OFFSET} and {LENGTH}, got others ({error}). Correct "
                    "source.mirror."
                ) from error
            end = pc.add(first, size)
            # The remainder, as that of Python for a split, is computed here without a function of Arrow.
            part = pa.array([None if each is None else each % query.lists for each in number.to_pylist()], pa.int32())
            found = pa.RecordBatch.from_arrays([part, number, first, end], schema=LIST_SCHEMA)
            yield found.filter(pc.is_valid(number))


def _write_list(place: tuple[Store, str], batches: Iterator[pa.RecordBatch], _retried: bool) -> PartResult:
    """Write one list: the ranges of some archives, sorted by archive and place, each once."""
    names = RANGES.names
    table = pa.Table.from_batches([batch.select(names).cast(RANGES) for batch in batches], RANGES)
    if any(table.column(name).null_count for name in names):
        raise ContractError(
            "source.where: expected an index with offset and length of each record, got records without. Correct "
            "source.mirror."
        )
    table = table.group_by(names, use_threads=False).aggregate([]).select(names)
    table = table.sort_by([(name, "ascending") for name in names])
    archive, first, end = (table.column(name).to_numpy() for name in names)
    follows = archive[1:] == archive[:-1]
    if (first < 0).any() or (end <= first).any() or (follows & (first[1:] < end[:-1])).any():
        raise ContractError(
            "source.where: expected an index with records one after another, got some that overlap or have no bytes. "
            "Correct source.mirror."
        )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    folder, name = place
    folder.write_atomic(name, sink.getvalue())
    return PartResult({}, Counts(rows_in=len(table), rows_kept=len(table)))


def limited_partitions(build: StepContext, tasks: int) -> int | None:
    """Return the number of Spark partitions, at most the smallest `source.connections` if more tasks could run at once.

    Each task has one connection at a time.
    """
    configs = [own.section("source", SourceConfig) for own in build.recipe.by_source().values()]
    limits = [config.connections for config in configs if config.crawl is not None]
    if not limits or min(limits) >= num_cores(build.spark):
        return build.partitions
    return min(*limits, build.partitions or tasks, tasks)


def check_unreachable(
    build: StepContext, parts: Sequence[tuple[tuple[Split, ...], FinishedPart | None]], results: PartResults
) -> PartResults:
    """Return the results without the causes for which files were unreachable.

    `parts`: the files of each part, and where its result is stored. Raises ContractError if more files of a crawl were
    unreachable than source.max_unreadable allows. The results of the parts of unreachable files are deleted, so that
    the next run, or a later version of the table, tries these files again and keeps all others.
    """
    read = [(files[0], result, finished) for (files, finished), result in zip(parts, results.parts, strict=True)]
    lost = [(split, result, finished) for split, result, finished in read if any(CAUSE in s for s in result.sources)]
    stored = [finished for _, _, finished in lost if finished is not None]
    if stored:
        delete_files(stored[0].folder, [place.name for place in stored])
    for name, own in build.recipe.by_source().items():
        config = own.section("source", SourceConfig)
        missing = [
            (split, entry[CAUSE])
            for split, result, _ in lost
            for entry in result.sources
            if split.source == name and CAUSE in entry
        ]
        number = sum(split.source == name for split, _, _ in read)
        if config.crawl is None or len(missing) <= config.max_unreadable * number:
            continue
        split, cause = missing[0]
        raise ContractError(
            f"source.max_unreadable: expected at most {config.max_unreadable:g} of the files of {config.crawl} to be "
            f"unreachable, got {len(missing):,} of {number:,}, the first {split.name} ({cause}). Run the same "
            "command again, which keeps what was read, or raise source.max_unreadable."
        )
    known = [
        replace(part, sources=[{k: value for k, value in entry.items() if k != CAUSE} for entry in part.sources])
        for part in results.parts
    ]
    return replace(results, parts=known)
