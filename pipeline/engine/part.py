"""One part of a step's tables: the function that writes its files, and the result that describes them.

A part that an interrupted run completed is not written again, unless other code or libraries completed it, or a
takedown has changed the tables that it was made from since. For this, the result of each part is stored as a small JSON
file in the folder of the step's first table until the manifest exists. The file names code, libraries and tables.
`write_part` writes parts of tables as Parquet; `complete_part` does the same for parts of any format. The results of
parts that later versions of the tables may take over are stored elsewhere, and stay; see `finished_parts.py`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from pipeline.engine.code_digest import code_digest, libraries_digest
from pipeline.engine.failures import FailureCounts, failures_of
from pipeline.engine.finished_parts import FOLDER, FinishedPart
from pipeline.engine.guard import PARTS, RecordGuard, delete_notes
from pipeline.engine.isolation import LIMITS, MEMORY_FACTOR
from pipeline.engine.live_counts import PartMeter, current_meter
from pipeline.engine.parquet import PartWriter, WrittenFile
from pipeline.engine.stage import CPU, Drop, Row, RowStep
from schemas.errors import ContractError, reading
from schemas.ids import canonical_json
from schemas.leases import check_before_delete, delete_files
from schemas.logs import WORKER_LOGGER, log_fields
from schemas.manifest import Counts, part_key
from schemas.paths import check_deletable
from schemas.storage import Store

TaskResult = dict[str, Any]
"""The JSON object that a task returns to the driver if it returns no PartResult."""
SCRATCH, FRAMES = "scratch", "frames"
"""Folder of stored frames in the folder of a table version, and the key in the list of a frame that has its files; see
`materialize.py`."""
INPUT_FILES = "input_files"
"""Key of a result with the input files that a task read, each with its size in `bytes`."""
RANGE = "range"
"""Key of an entry of `input_files` for a range of a file: its first byte, and the offset of its first row."""
FAILED = "failed"
CRASHED = "crashed"
EVERY_STAGE = {
    FAILED: "the stage raised an error on this record",
    CRASHED: "the record ended every process that it ran in alone, by a fault, memory, or its limit of CPU time",
}
"""Reason → meaning, for the reasons of every stage that runs code on records."""


def reason_names(stage: str, reasons: Mapping[str, str], raises: bool = True) -> list[str]:
    """Return `stage/reason` for each reason of a stage, in declared order.

    If `raises` is True, the reasons in EVERY_STAGE follow.
    """
    return [f"{stage}/{reason}" for reason in (*reasons, *(EVERY_STAGE if raises else ()))]


def set_verdict(row: Row, stage: str, drop: Drop) -> None:
    """Write a drop into the `drop_` columns of the row, unless the row has been dropped before."""
    if row.get("drop_stage") is None:
        row["drop_stage"], row["drop_rule"] = stage, drop.rule
        row["drop_value"], row["drop_limit"] = drop.value, drop.limit


_INPUTS: ContextVar[str] = ContextVar("inputs", default="")


def current_inputs() -> str:
    """Return the digest of the tables that parts and stored frames are being made from; empty = none."""
    return _INPUTS.get()


@contextmanager
def made_from(inputs: str) -> Iterator[None]:
    """Set the digest of the tables that parts and stored frames are made from in a block, also in its Spark tasks."""
    token = _INPUTS.set(inputs)
    try:
        yield
    finally:
        _INPUTS.reset(token)


class DropCounter:
    """Counts of a part that is being written: rows kept, rows dropped by reason, and groups such as languages."""

    def __init__(self, stages: Sequence[tuple[str, Mapping[str, str]]], raises: bool = True):
        """Start with a count of 0 for every reason of the stages.

        If `raises` is True, the reasons in EVERY_STAGE have a count, too.
        """
        names = [name for stage, reasons in stages for name in reason_names(stage, reasons, raises)]
        self.dropped: dict[str, int] = dict.fromkeys(names, 0)
        self.dropped_chars: Counter[str] = Counter()
        self.rows_in = self.rows_kept = self.kept_chars = 0
        self._figures: dict[str, Counter[str]] = {}
        self.failures = FailureCounts()
        """The errors that stages raised on the rows."""
        self.cpu: dict[str, dict[str, float]] = {}
        """CPU time by stage: `seconds`, and the number of `rows` that it was spent on."""

    def enter(self, row: Row, chars: int) -> None:
        """Count one row as kept or as dropped for its reason. `chars` is the length of the row's text [code points]."""
        self.rows_in += 1
        self.failures.see(row)
        for stage, seconds in row.get(CPU, {}).items():
            spent = self.cpu.setdefault(stage, {"seconds": 0.0, "rows": 0})
            spent["seconds"], spent["rows"] = spent["seconds"] + seconds, spent["rows"] + 1
        if row.get("drop_stage") is None:
            self.rows_kept += 1
            self.kept_chars += chars
            return
        name = f"{row['drop_stage']}/{row['drop_rule']}"
        if name not in self.dropped:
            raise ContractError(
                f"drops: expected a reason that the stage declares, got {name!r}. Add the reason to `reasons` or "
                "`verdicts` of the stage."
            )
        self.dropped[name] += 1
        self.dropped_chars[name] += chars

    def tally(self, figure: str, name: str, amount: int = 1) -> None:
        """Add `amount` to the count `name` in the group of counts `figure`, such as `de` in `kept_languages`."""
        self._figures.setdefault(figure, Counter())[name] += amount

    def tally_some(self, figure: str, name: str, most: int) -> bool:
        """Add 1 to the count `name` of a group that has at most `most` names. Return False for a name beyond them.

        For names that come from the data and could be many.
        """
        counter = self._figures.setdefault(figure, Counter())
        if name not in counter and len(counter) >= most:
            return False
        counter[name] += 1
        return True

    @property
    def counts(self) -> Counts:
        """Rows in, rows kept, and rows dropped by reason."""
        return Counts(rows_in=self.rows_in, rows_kept=self.rows_kept, dropped=self.dropped)

    @property
    def figures(self) -> dict[str, Any]:
        """Code points of kept rows, code points of dropped rows by reason, and the counts that `tally` added up."""
        return {
            "kept_chars": self.kept_chars,
            "dropped_chars": dict(self.dropped_chars),
            **{name: dict(counter) for name, counter in self._figures.items()},
        }


@dataclass(frozen=True)
class PartResult:
    """The result of a task that wrote one part: the files by table, the row counts, and further counts."""

    files: Mapping[str, WrittenFile]
    counts: Counts
    figures: Mapping[str, Any] = field(default_factory=dict)
    failures: FailureCounts = field(default_factory=FailureCounts)
    """The errors that stages raised on the part's documents."""
    cpu_seconds: float = 0.0
    cpu: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """CPU time by stage, as `DropCounter.cpu`; it is not part of the content of a table."""
    sources: Sequence[Mapping[str, Any]] = ()
    """Name, size and SHA-256 of each input file; empty if the task read only tables of the run."""
    code: str = ""
    """Digest of the code that wrote the part."""
    libraries: str = ""
    """Digest of the libraries with which the part was written."""
    inputs: str = ""
    """Digest of the tables that the part was made from; empty = of none, such as a part of input files."""
    redone: bool = False
    """True if this task has replaced a part that had been completed by other code or from other tables."""
    resumed: bool = field(default=False, compare=False)
    """True if an earlier attempt has completed the part, so that this task wrote nothing; it is not stored."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """How often a process ended on a record, by cause; it is not part of the content of a table."""
    transfers: Mapping[str, int] = field(default_factory=dict)
    """Counts of the requests for files on servers, by kind; they are not part of the content of a table."""
    wall_seconds: float = 0.0
    """Time that the part took, waiting included; 0 for parts of earlier versions."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "files": {table: written.to_json() for table, written in self.files.items()},
            "rows": self.counts.rows_in,  # for the display of progress
            "counts": self.counts.model_dump(),
            "figures": dict(self.figures),
            "errors": self.failures.errors,
            "calls": self.failures.calls,
            "cpu_seconds": self.cpu_seconds,
            "cpu": {stage: dict(spent) for stage, spent in self.cpu.items()},
            INPUT_FILES: [dict(source) for source in self.sources],
            "code": self.code,
            "libraries": self.libraries,
            "inputs": self.inputs,
            "redone": self.redone,
            "ends": dict(self.ends),
            "transfers": dict(self.transfers),
            "wall_seconds": self.wall_seconds,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PartResult":
        """Return the result from the JSON values that `to_json` returned."""
        files = {table: WrittenFile(**written) for table, written in values["files"].items()}
        counts = Counts.model_validate(values["counts"])
        named = {name: values[name] for name in ("figures", "cpu_seconds", "cpu")}
        absent: dict[str, Any] = {"code": "", "libraries": "", "inputs": "", "redone": False, "ends": {}}
        absent |= {"transfers": {}, "wall_seconds": 0.0}
        named |= {name: values.get(name, value) for name, value in absent.items()}
        return cls(files, counts, failures=failures_of([values]), sources=values.get(INPUT_FILES, ()), **named)


@dataclass(frozen=True)
class WrittenPart:
    """What a task wrote and read: its files by table, and its input files with name, size and SHA-256."""

    files: Mapping[str, WrittenFile]
    sources: Sequence[Mapping[str, Any]] = ()
    work: Mapping[str, float] = field(default_factory=dict)
    """What the part took, by column of `pipeline.engine.part_times.PART_TIMES`."""


@dataclass
class PartResults:
    """The results of the parts of a step: what each of them wrote, and the sums of their counts."""

    parts: list[WrittenPart]
    counts: Counts = field(default_factory=lambda: Counts(rows_in=0, rows_kept=0))
    figures: dict[str, Any] = field(default_factory=dict)
    failures: FailureCounts = field(default_factory=FailureCounts)
    cpu_seconds: float = 0.0
    cpu: dict[str, dict[str, float]] = field(default_factory=dict)
    """CPU time by stage, as in `PartResult`."""
    ends: dict[str, int] = field(default_factory=dict)
    """How often a process ended on a record, by cause."""
    transfers: dict[str, int] = field(default_factory=dict)
    """Counts of the requests for files on servers, by kind."""
    by_source: dict[str, Any] = field(default_factory=dict)
    """Counts of rows and code points by source, in a run with several sources."""


@dataclass(frozen=True)
class TableTarget:
    """Where the part of one table is written: folder and schema. The size of `size_column` limits row groups."""

    folder: Store
    schema: pa.Schema
    size_column: str | None = None
    rows_in: str | None = None
    """Field of a row that holds the row of this table, if it has one; None = the row itself."""


@dataclass(frozen=True)
class PartTarget:
    """The part that a task writes: its number, its tables, and the reasons for which its rows may be dropped."""

    ordinal: int
    tables: Mapping[str, TableTarget]
    """Where to write each table; the JSON file with the part's result is in the folder of the first."""
    reasons: Sequence[tuple[str, Mapping[str, str]]] = ()
    """(stage, reason → meaning), in declared order."""
    raises: bool = True
    """True if the stages run code on records, so that a record may also be dropped as failed or crashed."""
    finished: FinishedPart | None = None
    """Where the result is stored if later versions of the tables may take over the part; None = in the version."""


@dataclass
class PartOutput:
    """A part that is being written: its open files, its counters, and further values for its PartResult."""

    writers: Mapping[str, PartWriter]
    books: DropCounter
    place: tuple[Store, str]
    """The folder with the part's result, and the key of the part."""
    figures: dict[str, Any] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, WrittenFile] = field(default_factory=dict)
    """Further files besides those of the tables, by kind, such as those of a snapshot index."""
    counts: Counts | None = None
    """Row counts of a table whose rows have no verdict; None uses the counts of `books`."""
    meter: PartMeter = field(default_factory=current_meter)
    """The counts of this part that are displayed while it is written."""
    rows_in: Mapping[str, str] = field(default_factory=dict)
    """The field of a row that holds the row of a table, by table; see TableTarget."""
    guards: list[RecordGuard] = field(default_factory=list)
    transfers: Counter[str] = field(default_factory=Counter)
    """Counts of the requests for files on servers, by kind."""

    def guard(self, function: RowStep, retried: bool, max_record_bytes: int = 0) -> RecordGuard:
        """Return a guard that calls `function` on one record of this part at a time; `write_part` closes it.

        `retried` is True if an earlier attempt at the part failed. `max_record_bytes`: maximum size of a record.
        """
        memory = max(LIMITS.memory_bytes, MEMORY_FACTOR * max_record_bytes)
        guard = RecordGuard(function, self.place, retried, replace(LIMITS, memory_bytes=memory))
        self.guards.append(guard)
        return guard

    def close_guards(self) -> None:
        """End the child processes of the guards."""
        for guard in self.guards:
            guard.close()

    def write(self, row: Row) -> None:
        """Append a finished row to every table."""
        for name, writer in self.writers.items():
            own = row.get(self.rows_in[name]) if name in self.rows_in else row
            if own is not None:
                writer.add(own)
        self.meter.add()


def write_part(target: PartTarget, fill: Callable[[PartOutput], None]) -> PartResult:
    """Write the rows of a part by calling `fill`. Store and return the result.

    If an interrupted run has completed the part, `fill` is not called and the stored result is returned. If `fill`
    raises, the files of the part are deleted.
    """

    folder, key = next(iter(target.tables.values())).folder, part_key(target.ordinal)

    def write() -> PartResult:
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(PartWriter(table.folder, key, table.schema, table.size_column))
                for name, table in target.tables.items()
            }
            rows_in = {name: table.rows_in for name, table in target.tables.items() if table.rows_in is not None}
            books = DropCounter(target.reasons, target.raises)
            output = PartOutput(writers, books, (folder, key), rows_in=rows_in)
            stack.callback(output.close_guards)
            fill(output)
        return PartResult(
            files={name: writer.written for name, writer in writers.items()} | output.files,
            counts=output.counts or output.books.counts,
            figures=output.figures if output.counts else output.books.figures | output.figures,
            failures=output.books.failures,
            cpu=output.books.cpu,
            sources=output.sources,
            ends=sum((guard.ends for guard in output.guards), Counter()),
            transfers=output.transfers,
        )

    places = {name: table.folder for name, table in target.tables.items()}
    if target.finished is not None:
        return _finished_part(target.finished, key, write, places)
    return complete_part(folder, target.ordinal, write, places)


def complete_part(
    folder: Store, ordinal: int, write: Callable[[], PartResult], places: Mapping[str, Store] | None = None
) -> PartResult:
    """Write a part by calling `write`. Store the result with the CPU time in `folder`, and return the result.

    If an interrupted run of the same code and libraries has completed the part from the same tables, `write` is not
    called and the stored result is returned. Other parts are written again, and so is one whose files are gone or whose
    result is damaged. `places` has the folders of files by their name in the result, others are not looked for; None:
    all files are in `folder`.
    """
    name = f"{PARTS}/{part_key(ordinal)}.json"
    is_stored = folder.exists(name)
    stored = _read_result(folder, name)
    if stored is not None and _is_of_this_code(stored) and stored.inputs == current_inputs():
        places = dict.fromkeys(stored.files, folder) if places is None else places
        if _has_files(stored, places):
            return replace(stored, resumed=True)
    result = replace(_timed(write, part_key(ordinal)), inputs=current_inputs())
    folder.write_atomic(name, canonical_json(result.to_json()))
    return replace(result, redone=is_stored)


def _finished_part(
    finished: FinishedPart, key: str, write: Callable[[], PartResult], places: Mapping[str, Store]
) -> PartResult:
    """Do the same for a part that later versions of its tables may take over, from `places`, or from earlier ones."""
    is_stored = finished.folder.exists(finished.name)
    stored = stored_result(finished)
    if stored is not None and stored.files.keys() == places.keys():
        files = {
            table: replace(file, key=key, path=finished.path_in(places[table], file.path))
            for table, file in stored.files.items()
        }
        found = replace(stored, files=files, resumed=True)
        if _has_files(found, places):
            return found
    result = _timed(write, key)
    paths = {table: finished.stored_path(file.path, places[table]) for table, file in result.files.items()}
    kept = replace(result, files={table: replace(file, path=paths[table]) for table, file in result.files.items()})
    finished.folder.write_atomic(finished.name, canonical_json(kept.to_json()))
    return replace(result, redone=is_stored)


def stored_result(finished: FinishedPart) -> PartResult | None:
    """Return the stored result of a part that this code has completed; None = there is none that can be read."""
    stored = _read_result(finished.folder, finished.name)
    return stored if stored is not None and stored.code == code_digest() else None


def delete_results_of_input(run: Store, step: str, name: str) -> None:
    """Delete the stored results of the finished parts of a step that read the input file `name`.

    The next run then reads the file again. Raises ContractError if a symbolic link leads to one of the results.
    """
    folder = run.child(f"{FOLDER}/{step}")
    stored = {path: _read_result(folder, path) for path in folder.names() if path.endswith(".json")}
    of_file = [
        path
        for path, part in stored.items()
        if part is not None and any(source.get("name") == name for source in part.sources)
    ]
    if of_file:
        check_deletable(run, f"{FOLDER}/{step}/x")
        delete_files(folder, of_file)


def _read_result(folder: Store, name: str) -> PartResult | None:
    """Return the stored result of a part; None = there is none that can be read."""
    if not folder.exists(name):
        return None
    try:
        with reading(f"{folder.uri}/{name}", "the result of a part"):
            return PartResult.from_json(folder.read_json(name))
    except ContractError:
        return None  # a damaged one is worth as much as none: the part is written again, and replaces it


def _is_of_this_code(stored: PartResult) -> bool:
    return (stored.code, stored.libraries) == (code_digest(), libraries_digest())


def _has_files(result: PartResult, places: Mapping[str, Store]) -> bool:
    """Return True if the files of a result in the folders `places` exist with their sizes."""
    # `penstock gc` may delete the files of a part that a worker completes after its driver was killed.
    files = [(places[name], file) for name, file in result.files.items() if name in places]
    return all(place.fs.get_file_info(place.path(file.path)).size == file.bytes for place, file in files)


def _timed(write: Callable[[], PartResult], key: str) -> PartResult:
    """Return the result of `write` with the code and the times that it took. Log when the part begins and ends."""
    with log_fields(part=key):
        WORKER_LOGGER.info("part begins")
        started, began = time.process_time(), time.monotonic()
        result = replace(write(), code=code_digest(), libraries=libraries_digest())
        result = replace(result, cpu_seconds=time.process_time() - started, wall_seconds=time.monotonic() - began)
        _log_result(result)
    return result


def _log_result(result: PartResult) -> None:
    """Log the counts and times of a part, and the errors of its stages without their messages, which may quote text."""
    for kind, entry in result.failures.errors.items():
        WORKER_LOGGER.warning(
            f"{entry['count']:,} record(s) are dropped as {FAILED}: {kind}",
            extra={"cause": kind, "records": entry["count"]},
        )
    rows, seconds, cpu = result.counts, result.wall_seconds, result.cpu_seconds
    WORKER_LOGGER.info(
        f"part ends: {rows.rows_in:,} rows, {rows.rows_kept:,} kept, {seconds:.1f} s, {cpu:.1f} s of CPU time",
        extra={
            "rows": rows.rows_in,
            "kept": rows.rows_kept,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu, 3),
        },
    )


def part_results(folder: Store) -> list[str]:
    """Return the paths of the stored results of completed parts."""
    # A source may be named `parts`; its shards are in subfolders of this folder.
    return [f"{PARTS}/{name}" for name in folder.child(PARTS).names() if name.endswith(".json")]


def delete_part_results(folder: Store) -> None:
    """Delete the stored results of all parts, and the notes on records. Call this after the manifest is written."""
    check_deletable(folder, f"{PARTS}/x", levels=2)
    delete_files(folder, part_results(folder))
    delete_notes(folder)


def delete_incomplete_parts(folder: Store) -> None:
    """Delete every file in the folder except the files of completed parts and their stored results.

    Parts that other code or libraries completed are deleted too. Raises ContractError if a symbolic link leads to one
    of the files.
    """
    check_deletable(folder, "x", levels=2)
    results = {name: _read_result(folder, name) for name in part_results(folder)}
    completed = {name: part for name, part in results.items() if part is not None and _is_of_this_code(part)}
    kept = {*completed, *(written.path for part in completed.values() for written in part.files.values())}
    for name in sorted({*folder.walk()} - kept):
        check_deletable(folder, name, levels=2)
        check_before_delete(folder)
        folder.delete(name)
