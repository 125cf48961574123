"""Tallies of a part: its keys, each once a chunk, with the number of its places and the first of them in keep order."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.dedup.copies import words
from pipeline.dedup.keep_order import Bytes, big_endian, binary_array
from pipeline.dedup.totals import TALLIES
from pipeline.text.words import Codes, Ints

PLACES_AT_ONCE = 1 << 20
"""Places that are tallied together: what a task holds does not grow with its part."""
POSITION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Places:
    """Where keys stand in one document."""

    order: Bytes
    """(order_bytes,) the document's place in keep order."""
    keys: Codes
    """(places, 1 or 2): one number for units and seeds, two for windows."""
    positions: Ints
    """(places,) where in the document."""


def tallies(found: Iterator[Places], part: int, at_once: int = PLACES_AT_ONCE) -> Iterator[pa.RecordBatch]:
    """The places of a part's documents as TALLIES; `first` is the order of a document and a position in it."""
    held: list[Places] = []
    size = 0
    for places in found:
        if len(places.keys):
            held.append(places)
            size += len(places.keys)
        if size >= at_once:
            yield tally(held, part)
            held, size = [], 0
    if held:
        yield tally(held, part)


def tally(held: list[Places], part: int) -> pa.RecordBatch:
    """One row (TALLIES) for each key of some documents, of which each has at least one."""
    orders = np.stack([places.order for places in held])
    document = np.repeat(np.arange(len(held)), [len(places.keys) for places in held])
    keys = np.concatenate([places.keys for places in held])
    positions = np.concatenate([places.positions for places in held])
    rank = np.empty(len(held), np.int64)
    rank[np.lexsort(words(orders))] = np.arange(len(held))
    ranking = np.lexsort((positions, rank[document], *keys.T[::-1]))
    ranked = keys[ranking]
    begins = np.flatnonzero(np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1)))
    counts = np.diff(np.append(begins, len(ranked)))
    firsts = ranking[begins]
    first = np.concatenate(
        [orders[document[firsts]], big_endian(positions[firsts].astype(np.uint64), POSITION_BYTES)], axis=1
    )
    return pa.RecordBatch.from_arrays(
        [
            binary_array(key_bytes(keys[firsts])),
            pa.array(np.full(len(firsts), part, np.int32)),
            pa.array(counts.astype(np.int64)),
            binary_array(first),
        ],
        schema=TALLIES,
    )


def key_bytes(keys: Codes) -> Bytes:
    """The keys as bytes, most significant first (keys, 8 or 16)."""
    count, numbers = keys.shape
    return keys.astype(">u8").view(np.uint8).reshape(count, 8 * numbers)
