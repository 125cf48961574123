"""What the step `documents` does for large files: it finds the rows with which their ranges begin, before any is read.

One task reads each file, and stores what it found, so that a resumed run does not read the file again. To find a record
takes a small part of the time that its page takes later: the file is decompressed, and nothing is parsed but headers.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from pipeline.engine.code_digest import code_digest
from pipeline.engine.guard import RecordGuard
from pipeline.engine.isolation import LIMITS, MEMORY_FACTOR
from pipeline.engine.live_counts import current_meter
from pipeline.engine.materialize import FrameStore
from pipeline.engine.part import FRAMES, INPUT_FILES, SCRATCH, TaskResult
from pipeline.engine.progress import WorkTotal
from pipeline.engine.spark import run_tasks
from pipeline.engine.stage import RangeStart, Row, Split
from pipeline.engine.step import StepContext
from pipeline.sources.config import SourceConfig
from pipeline.sources.ranges import check_unchanged, find_starts, ranges_of, with_starts
from pipeline.sources.splits import open_stream
from schemas.ids import canonical_json
from schemas.manifest import part_key
from schemas.storage import Store

NAME = "file-ranges"
"""Folder, among those of stored frames, of the starts of ranges: a file for each input file."""
STARTS = "starts"


@dataclass(frozen=True)
class StartsTask:
    """A large file whose ranges are to be found."""

    split: Split
    config: SourceConfig
    folder: Store


def with_file_ranges(build: StepContext, splits: Sequence[Split]) -> list[Split]:
    """Return the splits of a run, in which the ranges of a large file take its place.

    If only some parts are built, the ranges of other files are not found, and have no rows.
    """
    folder = build.folders["documents"].child(f"{SCRATCH}/{NAME}")
    configs = {name: own.section("source", SourceConfig) for name, own in build.recipe.by_source().items()}
    ranges = [own for split in splits for own in ranges_of(split)]
    wanted = {own.key for own in ranges if build.only is None or own.ordinal in build.only}
    large = [split for split in splits if split.num_ranges > 1 and split.key in wanted]
    tasks = [StartsTask(split, configs[split.source], folder) for split in large]
    size = WorkTotal(bytes=sum(split.size for split in large))
    answers = run_tasks(build.spark, file_starts, tasks, "find the ranges of large files", build.partitions, size)
    found = {split.key: _starts(answer[STARTS]) for split, answer in zip(large, answers, strict=True)}
    known: list[Split] = []
    for key, group in groupby(ranges, key=lambda split: split.key):
        own = [*group]
        known += with_starts(own, found[key]) if key in found else own
    return known


def known_ranges(splits: Sequence[Split], documents: Store) -> list[Split]:
    """Return the splits of a run, with the ranges of a large file in its place, if an interrupted run has found them.

    Other large files are left out. `documents`: the folder of the version of the table.
    """
    folder = documents.child(f"{SCRATCH}/{NAME}")
    known: list[Split] = []
    for split in splits:
        starts = [] if split.num_ranges == 1 else _stored_starts(split, folder)
        known += [] if starts is None else with_starts(ranges_of(split), _starts(starts))
    return known


def _stored_starts(split: Split, folder: Store) -> list[Any] | None:
    """Return the starts of the ranges of a file that a task of the same code has stored; None = there are none."""
    name = f"{part_key(split.ordinal)}.json"
    stored: dict[str, Any] = folder.read_json(name) if folder.exists(name) else {}
    made_by = _made_by(split)
    return stored[STARTS] if {key: stored.get(key) for key in made_by} == made_by else None


def _made_by(split: Split) -> dict[str, Any]:
    return {"code": code_digest(), "file": [split.key, split.size, split.identity, split.num_ranges]}


def clear_file_ranges(build: StepContext) -> None:
    """Delete the starts of ranges."""
    if any(split.num_ranges > 1 for split in build.splits):
        FrameStore(build.spark, build.folders["documents"].child(SCRATCH)).clear()


def file_starts(task: StartsTask, retried: bool) -> TaskResult:
    """Find the starts of the ranges of a file, and store them. Return them as JSON values.

    Raises ContractError if the file has changed since the run was prepared.
    """
    split = task.split
    if (stored := _stored_starts(split, task.folder)) is not None:
        return {STARTS: stored, "resumed": True}
    memory = max(LIMITS.memory_bytes, MEMORY_FACTOR * task.config.max_record_bytes)
    place = task.folder, part_key(split.ordinal)
    with (
        closing(RecordGuard(_unchanged, place, retried, replace(LIMITS, memory_bytes=memory))) as guard,
        closing(open_stream(split)) as stream,
    ):
        current_meter().position = lambda: 0 if stream.closed else stream.tell()
        starts: list[RangeStart | None] = find_starts(split, stream, task.config, guard.read, retried)
        stream.check()
    check_unchanged(split)
    stored_as = f"{part_key(split.ordinal)}.json"
    task.folder.write_atomic(stored_as, canonical_json({**_made_by(split), STARTS: starts, FRAMES: {}}))
    return {STARTS: starts, INPUT_FILES: [{"bytes": split.size}]}


def _unchanged(row: Row) -> Row:
    return row


def _starts(values: Sequence[Any]) -> list[RangeStart | None]:
    return [None if value is None else RangeStart(value[0], value[1], tuple(value[2])) for value in values]
