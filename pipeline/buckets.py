"""The bucket of quality that each document falls into, read from the stored tables, part by part beside the clean text.

Nothing else is touched, so sources can be cut otherwise without a text cleaned again.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.parts import Part, measured
from schemas.errors import ContractError


def buckets_of_part(
    part: Part, signal: str | None, cuts: Sequence[float], names: Sequence[str]
) -> Iterator[tuple[bytes, str]]:
    """(doc_id, bucket) of every measured document of a part, in order; `signal` None: by perplexity.

    A document that passages were cut from counts by what was measured of the rest; its perplexity is that of the whole.
    Raises ContractError if the tables do not hold the same documents.
    """
    if signal is None:
        for batch in measured(part, {"documents": [], "verdicts": ["perplexity_bucket"]}):
            yield from zip(*(batch.column(name).to_pylist() for name in ("doc_id", "perplexity_bucket")))
        return
    named, again = np.array(names, object), "repeats" in part.paths
    for batch in measured(part, {"documents": [signal], **({"repeats": ["cuts", signal]} if again else {})}):
        values = batch.column(signal)
        if again:
            was_cut = pc.fill_null(pc.greater(pc.list_value_length(batch.column("cuts")), 0), False)
            values = pc.if_else(was_cut, batch.column(f"repeats.{signal}"), values)
        yield from zip(batch.column("doc_id").to_pylist(), named[bucket_numbers(values, cuts)].tolist())


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
