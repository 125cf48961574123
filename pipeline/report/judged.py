"""The parts of a run that the report reads: rows of `documents` with their final verdicts.

A report reads at most MAX_ROWS rows, whatever the size of the run. If the run has more, it reads whole parts in the
order of a hash of their numbers, so the choice is the same in every report and does not favor the first files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.parquet import TEMPLATES, Part, table_without_templates
from pipeline.report.facts import RunFacts
from pipeline.tokens.streams import TOKENS
from schemas.ids import shuffle_key
from schemas.manifest import part_key
from schemas.tables import DROPPED_BEFORE, LATER_VERDICTS, SCORES, VERDICT_COLUMNS

MAX_ROWS = 200_000
"""Maximum number of rows of `documents` that a report reads."""
BATCH_ROWS = 8192
FACTS = ("doc_id", "source", "language", "domain", "date", "url", "num_chars", "page_bytes")
"""Columns of `documents` that are read besides verdicts and signals."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class JudgedPart:
    """One part of `documents` with the final verdict of every row."""

    number: int
    table: pa.Table
    """The columns FACTS, and the numeric columns that were asked for."""
    verdicts: Sequence[tuple[str | None, str | None, float | None, float | None]]
    """Stage, rule, value and limit of each row; the stage is None if the document is kept."""
    clean_chars: Floats
    """Length of each row's text in `clean` [code points]; NaN if the row is not in `clean`."""

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Whether each row is a document that the run keeps."""
        kept: npt.NDArray[np.bool_] = ~np.isnan(self.clean_chars)
        kept &= np.array([stage is None for stage, *_ in self.verdicts], bool)
        return kept

    def numbers(self, column: str) -> Floats:
        """Return a numeric column; NaN where it was not measured or does not exist."""
        if column not in self.table.column_names:
            return np.full(self.table.num_rows, np.nan)
        values = pc.fill_null(pc.cast(self.table.column(column), pa.float64()), np.nan)
        numbers: Floats = values.to_numpy()
        return numbers

    def strings(self, column: str) -> list[Any]:
        """Return the values of a column as Python values; None where it does not exist."""
        if column not in self.table.column_names:
            return [None] * self.table.num_rows
        values: list[Any] = self.table.column(column).to_pylist()
        return values


@dataclass(frozen=True)
class PartChoice:
    """The parts that a report reads, and the share of the run that they are."""

    parts: Sequence[int]
    rows: int
    """Number of rows of these parts that are read."""
    all_parts: int
    all_rows: int

    @property
    def is_all(self) -> bool:
        """True if the whole run is read."""
        return self.rows == self.all_rows


def choose_parts(facts: RunFacts, limit: int = MAX_ROWS) -> PartChoice:
    """Return the parts to read: all of them, or as many as have `limit` rows, and at least one."""
    if "documents" not in facts.tables:
        return PartChoice((), 0, 0, 0)
    sizes = [entry.rows for entry in facts.tables["documents"].content.files]
    chosen: list[int] = []
    rows = 0
    for number in sorted(range(len(sizes)), key=lambda part: shuffle_key(0, part_key(part).encode())):
        if chosen and rows + sizes[number] > limit:
            break
        chosen.append(number)
        rows += sizes[number]
    return PartChoice(sorted(chosen), min(rows, limit), len(sizes), sum(sizes))


def read_judged(facts: RunFacts, reading: PartChoice, columns: Sequence[str]) -> Iterator[JudgedPart]:
    """Yield the parts of a reading with the numeric `columns`, one part at a time."""
    left = reading.rows
    for number in reading.parts:
        part = _judged(facts, number, columns, left)
        left -= part.table.num_rows
        yield part


def _judged(facts: RunFacts, number: int, columns: Sequence[str], limit: int) -> JudgedPart:
    own = _columns(facts, "documents", number, (*FACTS, *VERDICT_COLUMNS, *columns), limit)
    if TEMPLATES in facts.tables:  # the verdicts compare the values without the templates
        paths = {TEMPLATES: facts.tables[TEMPLATES].paths_of()[number]}
        own = table_without_templates(Part(number, facts.folders, paths), "documents", own)
    row_of = {identifier: row for row, identifier in enumerate(own.column("doc_id").to_pylist())}
    verdicts = list(zip(*(own.column(name).to_pylist() for name in VERDICT_COLUMNS), strict=True))
    scores = [name for name in columns if name in SCORES.names]
    if scores and "scores" in facts.tables:
        own = _joined(own, _columns(facts, "scores", number, ("doc_id", *scores)), row_of)
    clean_chars = np.full(own.num_rows, np.nan)
    for name in (name for name in LATER_VERDICTS if name in facts.tables):
        wanted = ("doc_id", *VERDICT_COLUMNS, *(("num_chars",) if name == "clean" else ()))
        later = _columns(facts, name, number, wanted)
        is_dropped = pc.is_valid(later.column("drop_stage"))
        if name == "clean":
            _fill(clean_chars, later.filter(pc.invert(is_dropped)), row_of)
        for row in later.filter(is_dropped).to_pylist():
            if row["drop_rule"] != DROPPED_BEFORE and row["doc_id"] in row_of:
                verdicts[row_of[row["doc_id"]]] = tuple(row[column] for column in VERDICT_COLUMNS)
    for identifier, drop in facts.left_out(number).items():
        if identifier in row_of:
            verdicts[row_of[identifier]] = (TOKENS.name, drop.rule, drop.value, drop.limit)
    return JudgedPart(number, own.drop_columns(list(VERDICT_COLUMNS)), verdicts, clean_chars)


def _columns(facts: RunFacts, table: str, number: int, names: Sequence[str], limit: int | None = None) -> pa.Table:
    """Return the columns of one part of a table that exist in it, and at most `limit` rows; None = all rows."""
    batches: list[pa.RecordBatch] = []
    rows = 0
    with facts.open_part(table, number) as stream:
        file = pq.ParquetFile(stream)
        present = [name for name in dict.fromkeys(names) if name in file.schema_arrow.names]
        schema = pa.schema([file.schema_arrow.field(name) for name in present])
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=present):
            batches.append(batch.select(present).slice(0, None if limit is None else limit - rows))
            rows += batches[-1].num_rows
            if limit is not None and rows >= limit:
                break
    return pa.Table.from_batches(batches, schema.remove_metadata()) if not batches else pa.Table.from_batches(batches)


def _joined(own: pa.Table, other: pa.Table, row_of: Mapping[bytes, int]) -> pa.Table:
    """Return the table with the columns of another table appended, joined by doc_id."""
    indices = np.full(own.num_rows, -1, np.int64)
    for index, identifier in enumerate(other.column("doc_id").to_pylist()):
        if identifier in row_of:
            indices[row_of[identifier]] = index
    rows = pa.array(indices, mask=indices < 0)
    for name in other.column_names:
        if name != "doc_id":
            own = own.append_column(name, other.column(name).combine_chunks().take(rows))
    return own


def _fill(values: Floats, clean: pa.Table, row_of: Mapping[bytes, int]) -> None:
    for identifier, chars in zip(*(clean.column(name).to_pylist() for name in ("doc_id", "num_chars")), strict=True):
        if identifier in row_of:
            values[row_of[identifier]] = chars
