"""The export of a dataset to Megatron's indexed format: `<source>.bin` and `<source>.idx`, one sequence per document.

The .idx is b"MMIDIDX\\0\\0", version 1 (u64), type of the ids (u8), numbers of sequences and of document bounds (u64
each), then the sequences' lengths (i32), their first bytes in the .bin (i64), and the document bounds (i64, from 0).
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py, version 1.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import TRAIN, Dataset, Shard, open_dataset
from train.data.document_index import read_table
from train.data.permutation import Ints
from train.data.shards import OpenShard

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
EXPORT_TYPES = {"uint16": ("<u2", 8), "uint32": ("<i4", 4)}
"""The exported type of token ids and Megatron's code for it, by the type in our shards; Megatron has no uint32."""
BLOCK = 1 << 20
PUBLISHED_AT_ONCE = ("s3://", "gs://", "gcs://")
"""Stores on which no file is seen before its stream is closed. To rename one, they copy it, up to a size."""


@dataclass(frozen=True)
class ExportedSource:
    """The exported files of one source."""

    source: str
    prefix: str
    """Path of the two files without their suffixes, relative to the folder: Megatron's `--data-path`."""
    num_documents: int
    num_tokens: int


def export_megatron(run: Store, folder: Store) -> list[ExportedSource]:
    """Write the training documents of every source of a run's dataset into a folder, in the order of the shards.

    Documents that a takedown removed are left out, as are the tombstones in their place: Megatron would train on them.
    The .idx file of a source is written last: a source without that file is incomplete. Raises ContractError if a
    shard does not match its metadata or its SHA-256.
    """
    dataset = open_dataset(run).by_sha256()
    return [_export(dataset, source, folder) for source in sorted(dataset.num_tokens(TRAIN))]


def _export(dataset: Dataset, source: str, folder: Store) -> ExportedSource:
    stream = f"{source}/{TRAIN}"
    kind, code = EXPORT_TYPES[dataset.tokenizer.dtype]
    folder.delete(f"{source}.idx")  # with an older .idx, an incomplete .bin would look complete
    with folder.open_output(f"{source}.bin") as sink:
        for shard in dataset.streams[stream]:
            opened = OpenShard(dataset.folder, shard, dataset.tokenizer.dtype)
            for begin, end in _ranges(*_documents(dataset, shard)):
                for first in range(begin, end, BLOCK):
                    block = np.empty(min(BLOCK, end - first), dataset.tokenizer.dtype)
                    opened.copy(block, *(np.array([value]) for value in (0, first, len(block))))
                    if (largest := int(block.max())) >= (size := dataset.tokenizer.vocab_size):
                        raise ContractError(
                            f"{dataset.folder.uri}/{shard.path}: expected ids below the vocabulary size {size}, got "
                            f"{largest}. {dataset.folder.repair_fix}"
                        )
                    sink.write(block.astype(kind).tobytes())
    folder.sync(f"{source}.bin")
    counts = [(len(lengths), int(lengths.sum())) for lengths in _lengths(dataset, stream)]
    number, num_tokens = sum(documents for documents, _ in counts), sum(tokens for _, tokens in counts)
    with _whole_file(folder, f"{source}.idx") as sink:
        sink.write(MAGIC + struct.pack("<QBQQ", VERSION, code, number, number + 1))
        for lengths in _lengths(dataset, stream):
            sink.write(lengths.astype("<i4").tobytes())
        begin = 0
        for lengths, (_, tokens) in zip(_lengths(dataset, stream), counts, strict=True):
            sink.write(((begin + np.cumsum(lengths) - lengths) * np.dtype(kind).itemsize).astype("<i8").tobytes())
            begin += tokens
        for first in range(0, number + 1, BLOCK):
            sink.write(np.arange(first, min(first + BLOCK, number + 1), dtype="<i8").tobytes())
    return ExportedSource(source, source, number, num_tokens)


@contextmanager
def _whole_file(folder: Store, name: str) -> Iterator[Any]:
    """Open a file that exists only after the block has ended without an error.

    An index that is cut would make its source look complete. A stream to an object store is published when it is
    closed, also by an error.
    """
    unfinished = name if folder.uri.startswith(PUBLISHED_AT_ONCE) else f"{name}.partial"
    try:
        with folder.open_output(unfinished) as stream:
            yield stream
    except BaseException:
        folder.delete(unfinished)
        raise
    if unfinished != name:
        folder.sync(unfinished)
        folder.move(unfinished, name)


def _documents(dataset: Dataset, shard: Shard) -> tuple[Ints, Ints]:
    """Return the starts in a shard and the lengths [tokens] of its documents, without those that were removed."""
    table = read_table(dataset.folder, shard.docs_path, ("doc_id", "token_offset", "num_tokens"))
    columns = [table[name] for name in ("token_offset", "num_tokens")]
    whole = all(pa.types.is_integer(column.type) and not column.null_count for column in columns)
    starts, lengths = (column.to_numpy().astype(np.int64) if whole else np.zeros(0, np.int64) for column in columns)
    ends = np.cumsum(lengths)
    fits = whole and np.array_equal(starts, ends - lengths) and not (lengths < 0).any()
    if not fits or (int(ends[-1]) if len(ends) else 0) != shard.num_tokens:
        raise ContractError(
            f"{dataset.folder.uri}/{shard.docs_path}: expected documents that have the {shard.num_tokens} tokens of "
            f"the shard one after another, got other offsets or lengths. {dataset.folder.repair_fix}"
        )
    kept = pc.not_equal(table["doc_id"], REMOVED_ID).to_numpy() & (lengths > 0)
    return starts[kept], lengths[kept]


def _ranges(starts: Ints, lengths: Ints) -> Iterator[tuple[int, int]]:
    """Yield the ranges of tokens [begin, end) that the documents fill without a gap between them."""
    edges = np.flatnonzero(starts[1:] != (starts + lengths)[:-1]) + 1 if len(starts) else np.empty(0, np.int64)
    for own in np.split(np.arange(len(starts)), edges):
        if len(own):
            yield int(starts[own[0]]), int(starts[own[-1]] + lengths[own[-1]])


def _lengths(dataset: Dataset, stream: str) -> Iterator[Ints]:
    """Yield, for each shard, the lengths of its documents [tokens]."""
    for shard in dataset.streams[stream]:
        yield _documents(dataset, shard)[1]
