"""How long each part of a step took: files beside the tables of a run, in which slow parts and machines can be found.

They are no tables: no manifest names them, and no digest follows from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.part import WrittenPart
from schemas.errors import ContractError
from schemas.storage import Store

FOLDER = "part_times"
"""Folder in a run folder, with a file `STEP.parquet` for each step that has parts."""
PART_TIMES = pa.schema(
    [
        pa.field("part", pa.string()),
        pa.field("input", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("kept", pa.int64()),
        pa.field("written_bytes", pa.int64()),
        pa.field("wall_seconds", pa.float64()),
        pa.field("cpu_seconds", pa.float64()),
        pa.field("requests", pa.int64()),
        pa.field("waited_seconds", pa.int64()),
    ]
)
"""`part`: its key; `input`: its first input file, empty for parts of tables; `requests`, `waited_seconds`: requests to
servers for its files, and the time between repeated ones. Parts of an interrupted run have the times of that run."""


def write_part_times(run: Store, step: str, parts: Sequence[WrittenPart]) -> None:
    """Write the times of a step's parts into a run folder, in place of those of an earlier build; nothing if none."""
    if not parts:
        return
    rows = []
    for part in parts:
        written = part.files.values()
        where = {
            "part": next(iter(written)).key if written else "",
            "written_bytes": sum(file.bytes for file in written),
        }
        rows.append({**where, "input": next((source["name"] for source in part.sources), ""), **part.work})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, PART_TIMES), sink)
    run.write_atomic(f"{FOLDER}/{step}.parquet", sink.getvalue().to_pybytes())


@dataclass(frozen=True)
class StepTimes:
    """How the times of a step's parts are distributed."""

    step: str
    parts: int
    median: float
    """Wall time [s], as the others."""
    percentile_95: float
    longest: float
    slowest: str
    """The input or the key of the part that took longest."""
    rows_per_second: float
    """Rows of all parts over the sum of their wall times."""
    waited_seconds: int
    """Time between repeated requests to servers, of all parts [s]."""


def read_step_times(run: Store, steps: Sequence[str]) -> list[StepTimes]:
    """Return the distribution of the parts' times of those steps that a run folder has times of.

    Raises ContractError if a file is damaged.
    """
    named = [(step, f"{FOLDER}/{step}.parquet") for step in steps]
    return [_step_times(step, _read(run, name)) for step, name in named if run.exists(name)]


def _read(run: Store, name: str) -> pa.Table:
    content = run.read_bytes(name)
    try:
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as error:
        problem = str(error).partition("\n")[0]
    else:
        if (
            table.schema.equals(PART_TIMES)
            and table.num_rows
            and not any(column.null_count for column in table.columns)
        ):
            return table
        problem = f"{table.num_rows} rows of {', '.join(table.column_names)}"
    raise ContractError(
        f"{run.uri}/{name}: expected the times of parts, got {problem:.200}. Delete the file: nothing else reads it."
    )


def _step_times(step: str, table: pa.Table) -> StepTimes:
    wall = table["wall_seconds"]
    median, high = pc.quantile(wall, [0.5, 0.95]).to_pylist()
    at = pc.index(wall, pc.max(wall)).as_py()
    slowest = table["input"][at].as_py() or table["part"][at].as_py()
    total = pc.sum(wall).as_py()
    return StepTimes(
        step,
        table.num_rows,
        median,
        high,
        wall[at].as_py(),
        slowest,
        pc.sum(table["rows"]).as_py() / max(total, 1e-9),
        pc.sum(table["waited_seconds"]).as_py(),
    )
