"""The metrics files of a run: metrics.jsonl at every step, TensorBoard's events, metrics.parquet.

metrics.jsonl is the journal that the other two follow. A resume or rewind truncates it after its checkpoint, so it
contains each step once. The table is rewritten whole and atomically from columns kept in memory.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.errors import UNWRITABLE, ContractError
from schemas.logs import LOGGER
from schemas.paths import METRICS_NAME
from schemas.storage import Store
from train.monitor.metrics import (
    SCALARS,
    HeldoutMetrics,
    StepMetrics,
    metrics_after,
    metrics_backwards,
    read_metrics,
)

# A journal grows by whole lines, is written by a single process and can be read at any time. A full disk does not end a
# run: lines that cannot be written stay in memory, with a single warning, and are written with the next line. An
# incomplete line of a killed process is terminated by the next process that opens the file, and ignored by readers.

NEWLINE = b"\n"


class Journal:
    """An open append-only file of a run on the local disk; `close` after use."""

    def __init__(self, run: Store, name: str):
        self._waiting, self._refused = b"", False
        # Unbuffered: an appended line is in the kernel at once, and survives if the process is killed.
        self._path = run.path(name)
        self._file = os.fdopen(run.open_own(name, os.O_RDWR | os.O_APPEND), "a+b", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        if not size:
            run.sync(name)  # the name of a new file is durable before its lines are
        else:
            self._file.seek(size - 1)
            self._waiting = b"" if self._file.read(1) == NEWLINE else NEWLINE

    def append(self, line: bytes, durable: bool = False) -> None:
        """Append a line, given without its newline; with `durable`, also flush the line to disk."""
        self._waiting += line + NEWLINE
        try:
            if durable:
                self.sync()
            else:
                self._write()
        except OSError as error:
            self._warn(error)

    def sync(self) -> None:
        """Flush all lines appended so far to disk. Raises OSError if the disk rejects them."""
        self._write()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. If lines in memory cannot be written, discard them with a warning."""
        try:
            self._write()
        except OSError as error:
            self._refused = False
            self._warn(error, "lost")
        self._file.close()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        self._refused = False

    def _warn(self, error: OSError, outcome: str = "kept in memory until it can be written") -> None:
        if error.errno not in UNWRITABLE:
            raise error
        if not self._refused:
            lines = f"{self._waiting.count(NEWLINE)} line(s) {outcome}"
            LOGGER.warning(f"penstock: {self._path}: {UNWRITABLE[error.errno]}; {lines}")
        self._refused = True


TENSORBOARD_NAME = "train/tensorboard"
TABLE_NAME = "train/metrics.parquet"
SCALARS_STOPPED = "no more scalars until the run is started again"
ARROW = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def metrics_schema(sources: Sequence[str], held_out: Sequence[str] = ()) -> pa.Schema:
    """Return the schema of metrics.parquet: the scalar fields of a step, then the fields of each source.

    A source `web` has the columns `loss.web`, `tokens.web` and `heldout.web.loss`, `.perplexity`, `.bits_per_byte`;
    sources are in the given order. Null = not measured. Each column has a `description` with its unit as metadata.

    `held_out`: sources with held-out rows. One that is not trained on, as of weight 0, has only the held-out columns.
    """
    fields = [_column(StepMetrics, name, name) for name in SCALARS]
    fields += [_field(f"loss.{name}", float, _text(StepMetrics, "losses")) for name in sources]
    fields += [_field(f"tokens.{name}", int, _text(StepMetrics, "source_tokens")) for name in sources]
    fields += [
        _column(HeldoutMetrics, key, f"heldout.{name}.{key}")
        for name in dict.fromkeys((*sources, *held_out))
        for key in HeldoutMetrics.model_fields
    ]
    return pa.schema(fields)


def _column(model: type[StepMetrics] | type[HeldoutMetrics], key: str, name: str) -> pa.Field:
    annotation = model.model_fields[key].annotation
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind in ARROW]
    return _field(name, kinds[0], _text(model, key))


def _text(model: type[StepMetrics] | type[HeldoutMetrics], key: str) -> str:
    return " ".join((model.model_fields[key].description or "").split())


def _field(name: str, kind: Any, text: str) -> pa.Field:
    return pa.field(name, ARROW[kind], metadata={"description": text})


class StepTable:
    """The metrics of a run's steps as an Arrow table."""

    def __init__(self, sources: Sequence[str], held_out: Sequence[str]):
        self._schema = metrics_schema(sources, held_out)
        self._names = set(self._schema.names)
        self._closed: pa.Table = self._schema.empty_table()
        self._rows: list[dict[str, Any]] = []

    def add(self, record: StepMetrics) -> None:
        """Append the metrics of a step. Raises ContractError if the metrics name a source that the table lacks."""
        row = record.flat(".")
        for name in record.model:
            if (column := f"model.{name}") not in self._names:
                self._add_column(column)
        if unknown := row.keys() - self._names:
            raise ContractError(
                f"step {record.step}: expected metrics of the run's sources, got {sorted(unknown)}, which belong to "
                "other sources. Restore the dataset that the run was planned for, then start the run again."
            )
        self._rows.append(row)

    def load(self, run: Store, last: StepMetrics) -> bool:
        """Load metrics.parquet up to the step `last`; return False if it does not end with the values of that step."""
        try:
            stored = pq.read_table(run.path(TABLE_NAME), filesystem=run.fs) if run.exists(TABLE_NAME) else None
        except (OSError, pa.ArrowException):
            return False  # a damaged table is written again from the lines
        if stored is None or not stored.schema.equals(self._schema) or stored.num_rows < last.step:
            return False
        table = stored.cast(self._schema).slice(0, last.step)
        expected = dict.fromkeys(self._schema.names) | last.flat(".")
        if table.slice(last.step - 1).to_pylist() != [expected]:
            return False
        self._closed = table
        return True

    def _add_column(self, name: str) -> None:
        """Append a column of a figure of `plan.model`, which is null in the steps so far."""
        table, field = self.table(), _field(name, float, _text(StepMetrics, "model"))
        self._closed = table.append_column(field, pa.nulls(len(table), field.type))
        self._schema = self._closed.schema
        self._names.add(name)

    def cut(self, step: int) -> None:
        """Remove the steps after `step`."""
        table = self.table()
        self._closed = table.slice(0, pc.sum(pc.less_equal(table["step"], step)).as_py() or 0)

    def table(self) -> pa.Table:
        """Return the table of all steps so far."""
        if self._rows:
            rows = pa.Table.from_pylist(self._rows, self._schema)
            self._closed = pa.concat_tables([self._closed, rows]).combine_chunks()
            self._rows = []
        return self._closed


class Scalars:
    """An open TensorBoard event file for the steps from `first_step` on."""

    def __init__(self, run: Store, first_step: int):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(run.path(TENSORBOARD_NAME))
        # TensorBoard discards values of earlier files from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step."""
        # A single event for all: 70 µs for 20 scalars, while an event for each takes 580 µs.
        numbers = [self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=numbers)))

    def flush(self) -> None:
        """Flush all values written so far to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class MetricsLog:
    """The open metrics files of a run; `close` after use."""

    def __init__(self, run: Store, sources: Sequence[str], after_step: int, held_out: Sequence[str] = ()):
        """Open the files, and remove the metrics of steps after `after_step`; `held_out`: as in `metrics_schema`."""
        self._run, self._problems = run, set[str]()
        self._table = _table_until(run, StepTable(sources, held_out), self._open(after_step))

    def _open(self, after_step: int) -> StepMetrics | None:
        """Remove the lines of steps after `after_step`, open the files, and return the last step that is left."""
        kept = ((end, step) for end, step in metrics_backwards(self._run) if step.step <= after_step)
        end, last = next(kept, (0, None))
        if self._run.exists(METRICS_NAME):
            # Truncated in place, not rewritten: this works on a full disk too, and needs no second copy of a long run.
            file = self._run.open_own(METRICS_NAME, os.O_RDWR)
            try:
                os.ftruncate(file, end)
            finally:
                os.close(file)
        self._journal = Journal(self._run, METRICS_NAME)
        self._scalars: Scalars | None = None
        try:
            self._scalars = Scalars(self._run, after_step + 1)
        except OSError as error:
            self._warn(TENSORBOARD_NAME, error, SCALARS_STOPPED)
        return last

    def write(self, record: StepMetrics) -> None:
        """Append the metrics of a step. A full disk causes only a warning."""
        self._table.add(record)
        self._journal.append(record.line())
        self._on_scalars(lambda scalars: scalars.write(record.step, record.scalars()))

    def sync(self) -> None:
        """Flush the metrics of all steps so far to disk, then write metrics.parquet.

        Raises OSError if metrics.jsonl cannot be flushed. If metrics.parquet cannot be written, only prints a warning.
        """
        # A checkpoint must not have steps without metrics.
        self._journal.sync()
        self._on_scalars(Scalars.flush)
        self._write_table()

    def after(self, step: int) -> list[StepMetrics]:
        """Return the metrics of the steps after `step`."""
        return metrics_after(self._run, step)

    def rewind(self, to_step: int) -> None:
        """Remove the metrics of the steps after `to_step` from every file."""
        self._journal.close()
        self._on_scalars(Scalars.close)
        self._table.cut(to_step)
        self._open(to_step)

    def close(self) -> None:
        """Write the table and close every file."""
        self._write_table()
        self._journal.close()
        self._on_scalars(Scalars.close)

    def _on_scalars(self, act: Callable[[Scalars], None]) -> None:
        try:
            if self._scalars is not None:
                act(self._scalars)
        except OSError as error:
            # The error has ended the writer thread; closing the file would raise the same error again.
            self._scalars = None
            self._warn(TENSORBOARD_NAME, error, SCALARS_STOPPED)

    def _write_table(self) -> None:
        try:
            write_table(self._run, self._table.table())
        except OSError as error:
            self._warn(TABLE_NAME, error, "written again at the next checkpoint")

    def _warn(self, name: str, error: OSError, outcome: str) -> None:
        if error.errno not in UNWRITABLE:
            raise error
        if name not in self._problems:
            text = f"penstock: {self._run.path(name)}: {UNWRITABLE[error.errno]}; {outcome}"
            LOGGER.warning(text)
        self._problems.add(name)


def _table_until(run: Store, table: StepTable, last: StepMetrics | None) -> StepTable:
    """Return the empty `table` with the steps up to `last`, the last line of metrics.jsonl; None = no step.

    metrics.parquet is used if its row of that step equals the line; the durations in it differ between attempts of a
    step. Otherwise all lines are read.
    """
    if last is None or table.load(run, last):
        return table
    for record in read_metrics(run):
        table.add(record)
    return table


def write_table(run: Store, table: pa.Table) -> None:
    """Replace metrics.parquet atomically with the whole table."""
    # 32 columns take 0.1 s at 100,000 steps. With a checkpoint every 200 steps: 25 s in total over such a run.
    sink = pa.BufferOutputStream()
    # Measurements rarely repeat: dictionary encoding would take four times as long, for a larger file.
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    run.write_atomic(TABLE_NAME, sink.getvalue().to_pybytes())
