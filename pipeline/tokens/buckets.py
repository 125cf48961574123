"""The bucket of quality that each document falls into, read from the stored tables, part by part beside the clean text.

Nothing else is touched, so sources can be cut otherwise without a text cleaned again. With the buckets come the
streams, and with them what a mix leaves out: whoever tells of a dataset asks here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.parts import ROWS_AT_ONCE, Part, measured
from pipeline.engine.stage import Drop, Row
from pipeline.tokens.streams import Sorting, TokensConfig
from schemas.entries import lookup
from schemas.errors import ContractError
from schemas.manifest import Table, part_key

MEASURES = ("documents", "scores", "verdicts", "repeats")
"""Tables that buckets are read from; `scores` and `repeats` only where a run has them."""
READS = (*MEASURES, "clean")
"""Tables that the streams of a dataset follow from."""


def buckets_of_part(part: Part, config: TokensConfig) -> Iterator[tuple[bytes, str]]:
    """(doc_id, bucket) of every measured document of a part, in order, where the config cuts sources.

    A document that passages were cut from counts by the signals of the rest; perplexity and scores are of the whole.
    Raises ContractError if the tables do not hold the same documents.
    """
    measure = config.measure
    if measure is None:
        for batch in measured(part, {"documents": [], "verdicts": ["perplexity_bucket"]}):
            yield from zip(*(batch.column(name).to_pylist() for name in ("doc_id", "perplexity_bucket")))
        return
    column, named = measure.column, np.array(config.bucket_names, object)
    again = measure.table == "documents" and "repeats" in part.paths
    columns = {"documents": [], measure.table: [column]} | ({"repeats": ["cuts", column]} if again else {})
    for batch in measured(part, columns):
        values = batch.column(column)
        if measure.name:
            values = lookup(values, measure.name)
        if again:
            was_cut = pc.fill_null(pc.greater(pc.list_value_length(batch.column("cuts")), 0), False)
            values = pc.if_else(was_cut, batch.column(f"repeats.{column}"), values)
        numbers = bucket_numbers(values, config.bucket_cuts)
        yield from zip(batch.column("doc_id").to_pylist(), named[numbers].tolist())


def bucket_numbers(values: pa.Array, cuts: Sequence[float]) -> Any:
    """(documents,) the number of the bucket of each value, in single precision: a cut belongs to the bucket above it.

    A value that is null falls into the one behind the last.
    """
    found = pc.fill_null(pc.cast(values, pa.float32(), safe=False), np.nan).to_numpy(zero_copy_only=False)
    numbers = np.searchsorted(np.asarray(cuts, np.float32), found, side="right")
    return np.where(np.isnan(found), len(cuts) + 1, numbers)


def bucket_of(buckets: Iterator[tuple[bytes, str]], doc_id: bytes) -> str:
    """The bucket of a document, found by going on to it. Raises ContractError if it does not come."""
    for identifier, bucket in buckets:
        if identifier == doc_id:
            return bucket
    raise ContractError(
        f"{doc_id.hex()}: promised the documents of `clean` in the order of `documents`, found none of this id behind "
        "the one before; the tables are not of the same run: run the stages again"
    )


def streams_of_part(part: Part, sorting: Sorting) -> Callable[[Row], str]:
    """The stream of a document of a part by its doc_id, source and cluster, asked for in the order of the part."""
    buckets = buckets_of_part(part, sorting.config) if sorting.config.bucket_names else None

    def stream(row: Row) -> str:
        bucket = bucket_of(buckets, row["doc_id"]) if buckets is not None else None
        return sorting.stream(row["source"], bucket, row["cluster"])

    return stream


def left_out(tables: Mapping[str, Table], number: int, sorting: Sorting) -> Iterator[tuple[bytes, Drop | None]]:
    """(doc_id, why the mix leaves it out) of every kept clean document of a part, in order; None = it stays.

    `tables` are those of READS that the run has.
    """
    key = part_key(number)
    folders = {name: table.folder for name, table in tables.items()}
    part = Part(number, folders, {name: table.manifest.run.paths[key] for name, table in tables.items()})
    stream_of = streams_of_part(part, sorting)
    with folders["clean"].open_input(part.paths["clean"]) as stream:
        wanted = ["doc_id", "source", "cluster", "drop_stage"]
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
            for row in batch.to_pylist():
                if row["drop_stage"] is None:
                    yield row["doc_id"], sorting.drop(stream_of(row), row["doc_id"])
