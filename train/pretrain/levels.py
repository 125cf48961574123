"""The losses with which the documents of a spike are compared: those of other documents of their source and language.

The loss of a rare language is high for every one of its documents. Reference documents of the same source and language
are taken from the shards beside each document of the spike. Documents are shuffled globally, so that neighbours are a
random sample. Their losses are measured under the weights of the spike, as those of its documents are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from schemas.takedown import REMOVED_ID
from schemas.tokens import TRAIN, Dataset
from train.data.batches import FIRST_HELDOUT_INDEX, Batches, HeldoutRows
from train.data.document_index import read_table
from train.data.order import Samples
from train.data.permutation import Pieces
from train.data.rows import Rows
from train.model.loss import LossTally
from train.monitor.events import SpikeDocument
from train.monitor.quarantine import GroupLevels, SourceLevels

REFERENCES = 16
"""Number of reference documents of a source and language. They cost a forward pass at a spike."""
MAX_SHARDS = 8
"""Maximum number of shards that are searched for the references of a source and language."""
COLUMNS = ("doc_id", "language", "token_offset", "num_tokens")


@dataclass(frozen=True)
class Reference:
    """The beginning of a reference document, which fills at most one row."""

    source: str
    language: str
    start: int
    """Position of its first token in the stream of its source."""
    length: int
    """Number of inputs in the row; the target of each is a token of the document."""


def reference_documents(
    batches: Batches, dataset: Dataset, step: int, parts: Sequence[SpikeDocument], left_out: Iterable[str] = ()
) -> list[Reference]:
    """Return reference documents for each source and language in the batch of a step, at most REFERENCES of each.

    `parts`: the document spans of the batch. Documents in it are no references, nor are those with the ids `left_out`.
    Spans without a language have no references.
    """
    samples, groups = batches.samples(step - 1), {(part.source, part.language) for part in parts if part.language}
    taken = {bytes.fromhex(doc_id) for doc_id in ({part.doc_id for part in parts} | {*left_out})}
    candidates, references = _Candidates(dataset, taken | {REMOVED_ID}), []
    for source, language in sorted(groups):
        own = samples.source[samples.pieces.row] == batches.order.sources.index(source)
        for start, num_tokens in candidates.near(source, language, int(samples.pieces.start[own][0])):
            references.append(Reference(source, language, start, min(num_tokens - 1, samples.seq_len)))
    return references


class _Candidates:
    """The documents of shards by language; an index file is read once."""

    def __init__(self, dataset: Dataset, left_out: set[bytes]):
        self._dataset, self._left_out = dataset, left_out
        self._shards: dict[tuple[str, int], dict[str, list[tuple[int, int]]]] = {}

    def near(self, source: str, language: str, position: int) -> list[tuple[int, int]]:
        """Return (start, number of tokens) of at most REFERENCES documents, from the shard of a position on."""
        shards = self._dataset.streams[f"{source}/{TRAIN}"]
        begins = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        first = int(np.searchsorted(begins, position, side="right")) - 1
        documents: list[tuple[int, int]] = []
        for number in (i % len(shards) for i in range(first, first + min(MAX_SHARDS, len(shards)))):
            own = self._of_shard(source, number).get(language, [])
            documents += [(int(begins[number]) + offset, num_tokens) for offset, num_tokens in own]
            if len(documents) >= REFERENCES:
                break
        return documents[:REFERENCES]

    def _of_shard(self, source: str, number: int) -> dict[str, list[tuple[int, int]]]:
        if (source, number) not in self._shards:
            shard = self._dataset.streams[f"{source}/{TRAIN}"][number]
            table = read_table(self._dataset.folder, shard.docs_path, COLUMNS)
            own: dict[str, list[tuple[int, int]]] = {}
            for doc_id, language, offset, num_tokens in zip(*(column.to_pylist() for column in table), strict=True):
                if language and num_tokens > 1 and doc_id not in self._left_out:
                    own.setdefault(language, []).append((offset, num_tokens))
            self._shards[source, number] = {name: documents[:REFERENCES] for name, documents in own.items()}
        return self._shards[source, number]


def measure_levels(
    measure: Callable[[HeldoutRows], LossTally],
    batches: Batches,
    seq_len: int,
    references: Sequence[Reference],
    sources: SourceLevels,
) -> GroupLevels:
    """Return the losses with which documents are compared, from the losses of reference documents.

    Call it on all ranks, with the same references. `measure`: returns the losses of rows by group, as
    `Learner.measure`. `seq_len`: tokens of a row. `sources`: mean losses of the sources in previous steps.
    """
    if not references:
        return GroupLevels([], sources)
    number = len(references)
    tally = measure(HeldoutRows(tuple(map(str, range(number))), _rows(batches, references, seq_len)))
    measured = zip(references, tally.losses_S.tolist(), tally.counts_S.tolist(), strict=True)
    losses = [(own.source, own.language, loss / count) for own, loss, count in measured if count]
    return GroupLevels(losses, sources)


def _rows(batches: Batches, references: Sequence[Reference], seq_len: int) -> Rows:
    """Return a row with the beginning of each reference document; every row is a loss group of its own."""
    number = np.arange(len(references))
    source = np.array([batches.order.sources.index(own.source) for own in references], np.int64)
    start, length = (np.array([getattr(own, name) for own in references], np.int64) for name in ("start", "length"))
    none = np.zeros_like(number)
    pieces = Pieces(number, none, none, start, length, none.astype(np.bool_))
    rows = batches.read(Samples(FIRST_HELDOUT_INDEX + number, source, pieces, seq_len))
    return replace(rows, sources_B=torch.from_numpy(number))
