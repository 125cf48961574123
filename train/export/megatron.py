"""The export of a dataset to Megatron's indexed format: `<source>.bin` and `<source>.idx`, one sequence per document.

The .idx is b"MMIDIDX\\0\\0", version 1 (u64), type of the ids (u8), numbers of sequences and of document bounds (u64
each), then the sequences' lengths (i32), their first bytes in the .bin (i64), and the document bounds (i64, from 0).
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py, version 1.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schemas.storage import Store
from schemas.tokens import TRAIN, Dataset, open_dataset
from train.data.document_index import shard_documents
from train.data.permutation import Ints
from train.data.shards import OpenShard

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
EXPORT_TYPES = {"uint16": ("<u2", 8), "uint32": ("<i4", 4)}
"""The exported type of token ids and Megatron's code for it, by the type in our shards; Megatron has no uint32."""
BLOCK = 1 << 20


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

    The .idx file of a source is written last: a source without that file is incomplete. Raises ContractError if a
    shard does not match its metadata.
    """
    dataset = open_dataset(run)
    return [_export(dataset, source, folder) for source in sorted(dataset.num_tokens(TRAIN))]


def _export(dataset: Dataset, source: str, folder: Store) -> ExportedSource:
    stream = f"{source}/{TRAIN}"
    kind, code = EXPORT_TYPES[dataset.tokenizer.dtype]
    folder.delete(f"{source}.idx")  # with an older .idx, an incomplete .bin would look complete
    with folder.open_output(f"{source}.bin") as sink:
        for shard in dataset.streams[stream]:
            for view in OpenShard(dataset.folder, shard, dataset.tokenizer.dtype).views:
                for first in range(0, len(view), BLOCK):
                    sink.write(view[first : first + BLOCK].astype(kind).tobytes())
    folder.sync(f"{source}.bin")
    number = sum(len(lengths) for _, lengths in _documents(dataset, stream))
    with folder.open_output(f"{source}.idx") as sink:
        sink.write(MAGIC + struct.pack("<QBQQ", VERSION, code, number, number + 1))
        for _, lengths in _documents(dataset, stream):
            sink.write(lengths.astype("<i4").tobytes())
        for begins, _ in _documents(dataset, stream):
            sink.write((begins * np.dtype(kind).itemsize).astype("<i8").tobytes())
        for first in range(0, number + 1, BLOCK):
            sink.write(np.arange(first, min(first + BLOCK, number + 1), dtype="<i8").tobytes())
    folder.sync(f"{source}.idx")
    return ExportedSource(source, source, number, dataset.num_tokens(TRAIN)[source])


def _documents(dataset: Dataset, stream: str) -> Iterator[tuple[Ints, Ints]]:
    """Yield, for each shard, its documents' start positions in the stream and their lengths [tokens]."""
    for begins, end in shard_documents(dataset, stream):
        yield begins, np.diff(np.append(begins, end))
