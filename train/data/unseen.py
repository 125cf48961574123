"""Held-out documents of one dataset that another one trains on: found by look-ups, so that nobody is asked about them.

What is held out follows from the hash of a document's cluster, and the clusters of two datasets may differ: a document
that is held out here may be trained on there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from schemas.tokens import HELDOUT, TRAIN, Dataset
from train.data.counter import Ints
from train.data.documents import Documents
from train.data.order import heldout_streams


@dataclass(frozen=True)
class HeldoutDocument:
    """A document with a token in a held-out row."""

    doc_id: bytes
    source: str
    first: int
    """Its first token in the held-out stream of its source."""
    end: int
    """Behind its last token."""


def row_starts(dataset: Dataset, seq_len: int, number: int) -> dict[str, Ints]:
    """First token in the stream of each of the first `number` held-out rows, by source."""
    streams = heldout_streams(dataset, seq_len)
    taken = {source: min(number, stream.num_units // seq_len) for source, stream in streams.items()}
    return {source: streams[source].pieces(np.arange(rows) * seq_len, seq_len).start for source, rows in taken.items()}


def heldout_documents(dataset: Dataset, seq_len: int, number: int) -> list[HeldoutDocument]:
    """Every document of the first `number` held-out rows of each source, in the order of the streams."""
    index, found = Documents(dataset), []
    for source, starts in row_starts(dataset, seq_len, number).items():
        # A row's last target is the token behind its inputs.
        ranges = [(start, start + seq_len + 1) for start in starts.tolist()]
        for row, first in index.covering(f"{source}/{HELDOUT}", ranges):
            found.append(HeldoutDocument(row["doc_id"], source, first, first + row["num_tokens"]))
    return found


def trained_on(doc_ids: Iterable[bytes], dataset: Dataset) -> set[bytes]:
    """Those of the documents that a dataset trains on."""
    index = Documents(dataset)
    placed = ((doc_id, index.of_id(doc_id)) for doc_id in doc_ids)
    return {doc_id for doc_id, found in placed if found is not None and found[0].endswith(f"/{TRAIN}")}
