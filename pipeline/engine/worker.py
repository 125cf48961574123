"""The fused pass: a row runs through consecutive per-document stages in one worker and gets its verdict.

A stage that raises on a row drops that row as `failed`; the kind and place of the error are counted, never its text.
"""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from pipeline.engine.parquet import PartWriter
from pipeline.engine.spark import worker_path
from pipeline.engine.stage import Drop, PerDocument, Row
from pipeline.engine.step import Answer, keep_answer, standing_answer
from schemas.config import Recipe
from schemas.errors import ContractError, PenstockError
from schemas.ids import canonical_json
from schemas.manifest import part_key
from schemas.storage import Store

FAILED = "failed"
CRASHED = "crashed"
EVERY_STAGE = {
    FAILED: "the stage raised an error on this record",
    CRASHED: "the worker died on this record, as a retry in a child process showed",
}


def reason_names(stage: str, reasons: Mapping[str, str], raises: bool = True) -> list[str]:
    """All `stage/reason` names of a stage in declared order, those of every stage that may raise included."""
    return [f"{stage}/{reason}" for reason in (*reasons, *(EVERY_STAGE if raises else ()))]


def set_verdict(row: Row, stage: str, drop: Drop) -> None:
    """Write the first verdict into the row; a later one does not replace it."""
    if row.get("drop_stage") is None:
        row["drop_stage"], row["drop_rule"] = stage, drop.rule
        row["drop_value"], row["drop_limit"] = drop.value, drop.limit


class Fused:
    """Consecutive per-document stages as one function of a row; built once per worker."""

    def __init__(self, stages: Sequence[PerDocument], recipe: Recipe, models: Mapping[str, Mapping[str, str]]):
        self._steps: list[tuple[PerDocument, Callable[[Row], Drop | None], frozenset[str]]] = [
            (stage, stage.make(recipe[stage.name], models.get(stage.name, {})), frozenset(stage.reasons))
            for stage in stages
        ]
        self.errors: Counter[str] = Counter()

    def __call__(self, row: Row) -> Row:
        """The row with the columns of every stage that saw it, and its verdict if one of them had one."""
        for stage, function, reasons in self._steps:
            try:
                drop = function(row)
            except PenstockError:
                raise  # a broken promise, such as a model that is no model of its kind: no fault of this record
            except Exception as error:
                self.errors[f"{stage.name}: {_place(error)}"] += 1
                set_verdict(row, stage.name, Drop(FAILED))
                break
            if drop is None:
                continue
            if drop.rule not in reasons:
                raise ContractError(
                    f"stage {stage.name}: expected a reason of {sorted(reasons)}, got {drop.rule!r}. Declare it."
                )
            set_verdict(row, stage.name, drop)
            if stage.ends:
                break
        return row


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}" if trace else "?"
    return f"{type(error).__name__} at {where}"


class Books:
    """Counts rows, drops by name, and what the report shows, while a part is written."""

    def __init__(self, stages: Sequence[tuple[str, Mapping[str, str]]], raises: bool = True):
        """Books for the reasons of these stages; and for their failures, where they run (`raises`)."""
        names = [name for stage, reasons in stages for name in reason_names(stage, reasons, raises)]
        self.dropped: dict[str, int] = dict.fromkeys(names, 0)
        self.dropped_chars: Counter[str] = Counter()
        self.rows_in = self.rows_kept = self.kept_chars = 0
        self.figures: dict[str, Counter[str]] = {}

    def enter(self, row: Row, chars: int) -> None:
        """Count one finished row by its verdict; `chars` is the length of its text [code points]."""
        self.rows_in += 1
        if row.get("drop_stage") is None:
            self.rows_kept += 1
            self.kept_chars += chars
            return
        name = f"{row['drop_stage']}/{row['drop_rule']}"
        if name not in self.dropped:
            raise ContractError(f"books: expected a declared reason, got {name!r}. Declare it in its stage.")
        self.dropped[name] += 1
        self.dropped_chars[name] += chars

    def tally(self, figure: str, name: str, amount: int = 1) -> None:
        """Add to one named count of a figure."""
        self.figures.setdefault(figure, Counter())[name] += amount

    def to_json(self) -> dict[str, Any]:
        """Counts and figures of this part."""
        return {
            "counts": {"rows_in": self.rows_in, "rows_kept": self.rows_kept, "dropped": self.dropped},
            "figures": {
                "kept_chars": self.kept_chars,
                "dropped_chars": dict(self.dropped_chars),
                **{name: dict(counter) for name, counter in self.figures.items()},
            },
        }


# A function in a child process: if a record kills the child, the record is named and a new child goes on.
#
# Used only when a task is retried, so that the first attempt pays nothing.

SECONDS_PER_RECORD = 120.0


class Crashed(Exception):
    """The child died, or did not answer in time, on the record it was given."""


class Isolated:
    """`function` over rows, each call made in a forked child that is replaced when it dies. Raises Crashed."""

    def __init__(self, function: Callable[[Row], Row], seconds: float = SECONDS_PER_RECORD):
        self._function, self._seconds = function, seconds
        self._context = multiprocessing.get_context("fork")
        self._child: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def __call__(self, row: Row) -> Row:
        """The function's result. Raises Crashed if the child dies or is silent for too long."""
        pipe = self._pipe or self._start()
        try:
            pipe.send(row)
            if not pipe.poll(self._seconds):
                raise Crashed(f"no answer in {self._seconds:.0f} s")
            answer = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError, Crashed) as error:
            self.close()
            raise Crashed(str(error) or type(error).__name__) from error
        if isinstance(answer, BaseException):
            raise answer
        return dict(answer)

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        self._child = self._context.Process(target=_serve, args=(theirs, self._function), daemon=True)
        self._child.start()
        theirs.close()
        self._pipe = ours
        return ours

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.join()
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = None


def _serve(pipe: Connection, function: Callable[[Row], Row]) -> None:
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        try:
            answer: Row | Exception = function(row)
        except Exception as error:
            answer = error
        pipe.send(answer)


# One part through fused stages into one table: what the passes that read stored text have in common.

Models = dict[str, dict[str, str]]
Enter = Callable[[Row, int, Books], None]
"""(finished row, length of its text before the stages [code points], books): counts the row before it is written."""


@dataclass(frozen=True)
class PartOutput:
    """The part that is written: of which table, where, by which stages."""

    table: str
    folder: Store
    ordinal: int
    schema: pa.Schema
    stages: tuple[PerDocument, ...]
    text: str
    """Column of the text that comes in."""


def run_part(
    output: PartOutput, recipe: Recipe, models: Models, retried: bool, rows: Callable[[], Iterator[Row]], enter: Enter
) -> Answer:
    """Run the rows through the stages and write them; returns files, books and figures."""
    standing = standing_answer(output.folder, output.ordinal)
    if standing is not None:
        return standing
    started = time.process_time()
    local = {stage: {name: worker_path(path) for name, path in paths.items()} for stage, paths in models.items()}
    fused = Fused(output.stages, recipe, local)
    measure = Isolated(fused) if retried else fused
    books = Books([(stage.name, stage.reasons) for stage in output.stages])
    size_column = output.text if output.text in output.schema.names else None
    writer = PartWriter(output.folder, part_key(output.ordinal), output.schema, size_column)
    try:
        for row in rows():
            chars = len(row[output.text])
            try:
                row = measure(row)
            except Crashed:
                set_verdict(row, output.stages[0].name, Drop(CRASHED))
            enter(row, chars, books)
            writer.add(row)
    except BaseException:
        writer.abandon()
        raise
    finally:
        if isinstance(measure, Isolated):
            measure.close()
    answer = {
        "files": {output.table: writer.close()},
        "rows": books.rows_in,
        "errors": dict(fused.errors),
        "cpu_seconds": time.process_time() - started,
        **books.to_json(),
    }
    return keep_answer(output.folder, output.ordinal, answer, canonical_json)
