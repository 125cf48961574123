"""One part through fused stages into one table: what the passes that read stored text have in common."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from pipeline.engine.isolate import Crashed, Isolated
from pipeline.engine.parquet import PartWriter
from pipeline.engine.spark import worker_path
from pipeline.engine.stage import Drop, PerDocument, Row
from pipeline.engine.step import Answer, keep_answer, standing_answer
from pipeline.engine.worker import CRASHED, Books, Fused, set_verdict
from schemas.config import Recipe
from schemas.ids import canonical_json
from schemas.manifest import part_key
from schemas.storage import Store

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
