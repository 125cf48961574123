"""Best-fit packing: documents are placed into rows in advance, so that few are cut and little is padding.

Documents longer than a row are first cut into pieces of at most a row. Pieces of a group of neighbouring chunks are
placed by decreasing length into the fullest row with enough space; what remains of a row is padding. Source: Ding et
al. 2024, arXiv 2404.10830, section 3. Before the plan, the rows of each group are counted by several processes. Only
these counts are stored; packed_rows.py computes the rows of a group when they are read.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.ids import canonical_json, digest_of
from schemas.long_work import LongWork
from schemas.paths import is_below
from schemas.storage import Store
from schemas.takedown import positions_digest
from schemas.tokens import TRAIN, Dataset
from train.config.train import TrainConfig
from train.data.document_index import DocumentEnds, read_table
from train.data.packed_rows import PackedIndex, PackingShape, pack_group

PACKING_VERSION = 2
GROUPS_VERSION = 3
"""Version of an index whose groups have more than one chunk; one chunk each keeps the digests of earlier plans."""
SUMMARY = "packing.json"
COUNTS = pa.schema([("first_row", pa.int64())])
"""The number of rows before each group of chunks, then the number of rows."""
PART_TOKENS = 1 << 30
"""Approximate number of tokens whose groups a process counts at a time; at 940 tokens a document it takes 1 s."""


class PackedSource(BaseModel):
    """Counts of the packed rows of one source, and the digests of its files in the packing index."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name of the source."""
    num_tokens: int
    """Number of tokens in its complete chunks."""
    num_rows: int
    """Number of rows that these tokens fill."""
    num_documents: int
    """Number of documents with a token in these chunks."""
    cut: int
    """Number of documents with tokens in more than one row."""
    cut_in_stream: int
    """Number of documents that would have tokens in more than one row without packing."""
    padding: float
    """Share of the rows' positions that are padding."""
    files: dict[str, str]
    """SHA-256 of each file of this source in the index, by path."""


class Packing(BaseModel):
    """The summary of a dataset's packing index for one sequence length; it is written last, to complete the index."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    version: int
    """Version of the index format."""
    dataset: str
    """Digest of the dataset that defines the positions: the version before any takedown."""
    seq_len: int
    """Tokens of a row."""
    pack_chunks: int = 1
    """Number of neighbouring chunks whose documents are packed together."""
    sources: list[PackedSource]
    """The packed rows of each source, in ascending order of name."""


class _CountedRows(BaseModel):
    """The packed rows of some groups, and the documents that start in them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: list[int]
    documents: int
    cut: int
    cut_in_stream: int


@dataclass(frozen=True)
class _Part:
    """A range of groups of a source, which one process counts."""

    stream: str
    shape: PackingShape
    groups: range
    path: str
    """File of the counts, until the index is complete."""


def packing_folder(run: Store, dataset: Dataset, config: TrainConfig) -> Store:
    """Return the folder of a dataset's packing index for a sequence length and `train.pack_chunks`."""
    key = [PACKING_VERSION, positions_digest(dataset.manifest), config.seq_len]
    if config.chunks_together > 1:
        key = [GROUPS_VERSION, *key[1:], config.chunks_together]
    return run.child(f"train/packing/{digest_of(key)[:16]}")


def write_packing(run: Store, dataset: Dataset, config: TrainConfig) -> Packing | None:
    """Write the packing index unless it exists, and return its summary; None if `train.packing` is not best_fit.

    Processes on all cores count the rows for all ranks. A killed count resumes at the parts that it has not finished.
    """
    if config.packing != "best_fit":
        return None
    folder = packing_folder(run, dataset, config)
    if folder.exists(SUMMARY):
        return _read_summary(folder, dataset, config)
    names = sorted(dataset.num_tokens(TRAIN))
    parts = [list(_parts(dataset, config, number, name)) for number, name in enumerate(names)]
    _count_parts(folder, dataset, [part for own in parts for part in own])
    sources = [_join_parts(folder, number, name, own) for number, (name, own) in enumerate(zip(names, parts))]
    packing = Packing(
        version=_version(config),
        dataset=positions_digest(dataset.manifest),
        seq_len=config.seq_len,
        pack_chunks=config.chunks_together,
        sources=sources,
    )
    folder.write_atomic(SUMMARY, packing.model_dump_json(indent=1).encode())
    for own in parts:
        for part in own:
            folder.delete(part.path)
    return packing


def open_packings(run: Store, dataset: Dataset, config: TrainConfig) -> dict[str, PackedIndex] | None:
    """Return the packed rows of every source; None if `train.packing` is not best_fit.

    Raises ContractError if the packing index does not exist, or does not match the dataset.
    """
    if config.packing != "best_fit":
        return None
    folder = packing_folder(run, dataset, config)
    if not folder.exists(SUMMARY):
        raise ContractError(
            f"{folder.uri}: expected an index of packed rows, got no {SUMMARY}. Run `penstock plan` again."
        )
    summary = _read_summary(folder, dataset, config)
    opened = {}
    for number, source in enumerate(summary.sources):
        shape = _shape(dataset, config, source.name)
        begins = read_table(folder, _counts_path(number)).column("first_row").chunk(0).to_numpy()
        expected = shape.num_groups + 1, source.num_rows
        if (len(begins), int(begins[-1])) != expected:
            raise ContractError(
                f"{folder.uri}: expected {source.num_rows} rows of {source.name} in {shape.num_groups} groups, got "
                f"{int(begins[-1])} in {len(begins) - 1}. Remove the folder and run `penstock plan` again."
            )
        documents = DocumentEnds(dataset, f"{source.name}/{TRAIN}")
        opened[source.name] = PackedIndex(folder.root.rpartition("/")[2], shape, documents.between, begins)
    return opened


def packed_files(run: Store, dataset: Dataset, config: TrainConfig) -> Iterator[tuple[Store, str, str]]:
    """Yield folder, path and expected SHA-256 of every file of the packing index; nothing without best_fit packing."""
    if config.packing == "best_fit":
        folder = packing_folder(run, dataset, config)
        for source in _read_summary(folder, dataset, config).sources:
            yield from ((folder, path, sha256) for path, sha256 in source.files.items())


def _version(config: TrainConfig) -> int:
    return GROUPS_VERSION if config.chunks_together > 1 else PACKING_VERSION


def _counts_path(number: int) -> str:
    return f"{number:05d}.chunks.arrow"


def _read_summary(folder: Store, dataset: Dataset, config: TrainConfig) -> Packing:
    where = f"{folder.uri}/{SUMMARY}"
    try:
        summary = Packing.model_validate(folder.read_json(SUMMARY))
    except ValidationError as error:
        raise ContractError(
            f"{where}: expected the summary of a packing index, got an invalid one: {error}. "
            "Remove the folder and run `penstock plan` again."
        ) from error
    if wrong := [path for source in summary.sources for path in source.files if not is_below(path)]:
        raise ContractError(
            f"{where}: expected files in the folder of the index, got {wrong[0]!r:.200}. Remove the folder and run "
            "`penstock plan` again."
        )
    expected = (_version(config), positions_digest(dataset.manifest), config.seq_len, config.chunks_together)
    actual = (summary.version, summary.dataset, summary.seq_len, summary.pack_chunks)
    if actual != expected:
        raise ContractError(
            f"{where}: expected version, dataset, seq_len and pack_chunks {expected}, got {actual}. Remove the folder "
            "and run `penstock plan` again."
        )
    return summary


def _shape(dataset: Dataset, config: TrainConfig, source: str) -> PackingShape:
    size = dataset.chunk_tokens
    end = max(0, dataset.num_tokens(TRAIN)[source] - 1) // size * size
    return PackingShape(end, size, config.chunks_together, config.seq_len)


def _parts(dataset: Dataset, config: TrainConfig, number: int, source: str) -> Iterator[_Part]:
    """Yield the parts of a source, each of about PART_TOKENS tokens."""
    shape = _shape(dataset, config, source)
    size = max(1, PART_TOKENS // shape.group_tokens)
    for first in range(0, shape.num_groups, size):
        groups = range(first, min(first + size, shape.num_groups))
        yield _Part(f"{source}/{TRAIN}", shape, groups, f"{number:05d}.part-{first:010d}.json")


def _count_parts(folder: Store, dataset: Dataset, parts: Iterable[_Part]) -> None:
    """Write the counts of each part that has none yet, in several processes if they are more than PART_TOKENS."""
    missing = [part for part in parts if not _is_counted(folder, part)]
    with LongWork("pack", sum(len(part.groups) for part in missing), "groups") as work:
        tokens = sum(len(part.groups) * part.shape.group_tokens for part in missing)
        processes = min(-(-tokens // PART_TOKENS), len(missing), len(os.sched_getaffinity(0)))
        if processes < 2:
            for part in missing:
                _count_part(folder, dataset, part)
                work.add(len(part.groups))
            return
        with ProcessPoolExecutor(processes, get_context("spawn"), _open_worker, (folder, dataset)) as pool:
            for number in pool.map(_count_in_worker, missing):
                work.add(number)


_WORKER: list[tuple[Store, Dataset]] = []
"""In a process of the pool: the folder of the index, and the dataset, which is sent once because it is large."""


def _open_worker(folder: Store, dataset: Dataset) -> None:
    _WORKER[:] = [(folder, dataset)]


def _count_in_worker(part: _Part) -> int:
    _count_part(*_WORKER[0], part)
    return len(part.groups)


def _is_counted(folder: Store, part: _Part) -> bool:
    return folder.exists(part.path) and len(_read_part(folder, part).rows) == len(part.groups)


def _read_part(folder: Store, part: _Part) -> _CountedRows:
    try:
        return _CountedRows.model_validate(folder.read_json(part.path))
    except ValidationError as error:
        raise ContractError(
            f"{folder.uri}/{part.path}: expected counts of packed rows, got {error}. Remove the folder and run "
            "`penstock plan` again."
        ) from error


def _count_part(folder: Store, dataset: Dataset, part: _Part) -> None:
    """Count the packed rows of a part's groups, and the documents that are cut, and write the counts."""
    shape, documents = part.shape, DocumentEnds(dataset, part.stream)
    rows = [pack_group(shape, group, documents.between(*shape.bounds(group))).num_rows for group in part.groups]
    first, stop = documents.starting_between(shape.bounds(part.groups[0])[0], shape.bounds(part.groups[-1])[1])
    last, seq_len, size = np.minimum(stop, shape.num_tokens) - 1, shape.seq_len, shape.group_tokens
    counted = _CountedRows(
        rows=rows,
        documents=len(first),
        cut=int(((last - first >= seq_len) | (first // size != last // size)).sum()),
        cut_in_stream=int((first // seq_len != last // seq_len).sum()),
    )
    folder.write_atomic(part.path, canonical_json(counted.model_dump()))


def _join_parts(folder: Store, number: int, source: str, parts: list[_Part]) -> PackedSource:
    """Write the file of a source from the counts of its parts, and return its entry in the summary."""
    counted = [_read_part(folder, part) for part in parts]
    begins = np.cumsum([0, *(rows for part in counted for rows in part.rows)], dtype=np.int64)
    path, num_rows = _counts_path(number), int(begins[-1])
    with folder.open_output(path) as sink, pa.ipc.new_file(sink, COUNTS) as writer:
        # With one record batch, a reader maps the column as one array.
        writer.write_batch(pa.RecordBatch.from_arrays([pa.array(begins)], schema=COUNTS))
    folder.sync(path)
    num_tokens, seq_len = (parts[0].shape.num_tokens, parts[0].shape.seq_len) if parts else (0, 1)
    return PackedSource(
        name=source,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_documents=sum(part.documents for part in counted),
        cut=sum(part.cut for part in counted),
        cut_in_stream=sum(part.cut_in_stream for part in counted),
        padding=1 - num_tokens / (num_rows * seq_len) if num_rows else 0.0,
        files={path: folder.sha256(path)},
    )
