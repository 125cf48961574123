"""A sample of a run's clean texts: the bottom k by a hash of doc_id, the same at any partitioning.

The rows are counted first; then each part hands over those whose hash falls below a share that holds k of them almost
surely, and k are kept. Parts are read by Spark where there is a session, else one after the other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.spark import frame_of_tasks, run_tasks
from schemas.errors import ContractError
from schemas.ids import below_share, shuffle_key
from schemas.manifest import open_table
from schemas.storage import Store

TABLE = "clean"
TEXTS_AT_ONCE = 512
SAMPLE = pa.schema([("key", pa.int64()), ("doc_id", pa.binary()), ("text", pa.string())])
SPARK_SCHEMA = "key long, doc_id binary, text string"


@dataclass(frozen=True)
class SampleTask:
    """One part of the clean table, and which of its documents are wanted."""

    folder: Store
    path: str
    sources: tuple[str, ...]
    languages: tuple[str, ...]
    seed: int
    share: float = 1.0
    """Documents whose key lies in this lowest share of all keys are handed over."""

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The wanted documents that were kept, with these columns."""
        names = [*columns, "source", "language", "drop_stage"]
        with self.folder.open_input(self.path) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=TEXTS_AT_ONCE, columns=names):
                wanted = pc.is_null(batch.column("drop_stage"))
                for name, values in (("source", self.sources), ("language", self.languages)):
                    if values:
                        wanted = pc.and_(wanted, pc.is_in(batch.column(name), value_set=pa.array(values)))
                yield batch.filter(wanted).select(columns)


@dataclass(frozen=True)
class RunSample:
    """Texts in the order of their keys, and the table they were taken from."""

    texts: list[tuple[int, str]]
    identity: Mapping[str, Any]
    """Size [bytes] and dataset digest of the table."""


def sample_run(spark: Any, run: str, task: tuple[tuple[str, ...], tuple[str, ...], int], size: int) -> RunSample:
    """The `size` documents of the lowest keys, given (sources, languages, seed); all if there are fewer.

    Raises ContractError if the run has no clean table, or none of its documents is wanted.
    """
    folder, manifest = open_table(Store(run), TABLE)
    sources, languages, seed = task
    tasks = [SampleTask(folder, path, sources, languages, seed) for path in manifest.paths_of()]
    total = sum(_answers(spark, tasks))
    if not total:
        raise ContractError(
            f"{run}: promised kept documents of sources {list(sources) or 'all'} and languages "
            f"{list(languages) or 'all'}, found none; see `penstock report`"
        )
    share = (size + 6 * size**0.5 + 10) / total
    while True:
        rows = sorted(_rows(spark, [replace(task, share=min(1.0, share)) for task in tasks]))
        if len(rows) >= size or share >= 1.0:
            break
        share *= 2
    num_bytes = sum(entry.bytes for entry in manifest.content.files)
    texts = [(key, text) for key, _, text in rows[:size]]
    return RunSample(texts, {"bytes": num_bytes, "sha256": manifest.digest})


def count_part(task: SampleTask, retried: bool) -> dict[str, Any]:
    """How many documents of a part are wanted."""
    return {"rows": sum(batch.num_rows for batch in task.batches(["doc_id"]))}


def rows_of_part(task: SampleTask) -> Iterator[pa.RecordBatch]:
    """The documents of a part whose key falls into the share."""
    for batch in task.batches(["doc_id", "text"]):
        keys = [shuffle_key(task.seed, doc_id) for doc_id in batch.column("doc_id").to_pylist()]
        taken = pa.array(np.array([below_share(key, task.share) for key in keys], bool))
        columns = [pa.array(keys, pa.int64()), batch.column("doc_id").cast(pa.binary()), batch.column("text")]
        yield pa.RecordBatch.from_arrays(columns, schema=SAMPLE).filter(taken)


def _answers(spark: Any, tasks: list[SampleTask]) -> list[int]:
    if spark is None:
        return [count_part(task, False)["rows"] for task in tasks]
    return [answer["rows"] for answer in run_tasks(spark, count_part, tasks, "sample", None)]


def _rows(spark: Any, tasks: list[SampleTask]) -> Iterator[tuple[int, bytes, str]]:
    if spark is None:
        batches = [batch for task in tasks for batch in rows_of_part(task)]
        table = pa.Table.from_batches(batches, SAMPLE)
    else:
        table = frame_of_tasks(spark, rows_of_part, tasks, SPARK_SCHEMA).toArrow()
    return zip(*(table.column(name).to_pylist() for name in SAMPLE.names))
