"""Best-fit packing: an index that places the documents of every chunk into rows in advance, so that few are cut.

Documents longer than a row are first cut into pieces of at most a row. Pieces are placed by decreasing length into the
fullest row with enough space; what remains of a row is padding. Source: Ding et al. 2024, arXiv 2404.10830, section 3.
The index is written once, before the plan, and memory-mapped: a row is a list of pieces (spans of the stream), and no
token is copied.
"""

import tempfile
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import IO

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.paths import is_below
from schemas.storage import Store
from schemas.takedown import positions_digest
from schemas.tokens import TRAIN, Dataset
from train.config.train import TrainConfig
from train.data.document_index import read_table, shard_documents
from train.data.permutation import Ints, PackedIndex, concatenate_ranges

PACKING_VERSION = 2
SUMMARY = "packing.json"
TABLES = {
    "pieces": pa.schema([("start", pa.int64()), ("length", pa.int32()), ("closed", pa.uint8())]),
    "rows": pa.schema([("first_piece", pa.int64())]),
    "chunks": pa.schema([("first_row", pa.int64())]),
}


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
    sources: list[PackedSource]
    """The packed rows of each source, in ascending order of name."""


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack pieces of these lengths into rows of at most `capacity` tokens, by best-fit decreasing.

    Returns the indices of the pieces in each row, ascending; rows are sorted by their first index. No length may exceed
    `capacity`.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for piece in sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece)):
        fitting = bisect_left(room, (lengths[piece], -1))
        if fitting == len(room):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = room.pop(fitting)
        rows[row].append(piece)
        if left > lengths[piece]:
            insort(room, (left - lengths[piece], row))
    return sorted(sorted(row) for row in rows)


def packing_folder(run: Store, dataset: Dataset, seq_len: int) -> Store:
    """Return the folder of a dataset's packing index for a sequence length."""
    return run.child(f"train/packing/{digest_of([PACKING_VERSION, positions_digest(dataset.manifest), seq_len])[:16]}")


def write_packing(run: Store, dataset: Dataset, config: TrainConfig) -> Packing | None:
    """Write the packing index unless it exists, and return its summary; None if `train.packing` is not best_fit.

    A single process writes the index for all ranks.
    """
    if config.packing != "best_fit":
        return None
    folder = packing_folder(run, dataset, config.seq_len)
    if folder.exists(SUMMARY):
        return _read_summary(folder, dataset, config.seq_len)
    names = sorted(dataset.num_tokens(TRAIN))
    sources = [_write_source(folder, dataset, name, number, config.seq_len) for number, name in enumerate(names)]
    packing = Packing(
        version=PACKING_VERSION, dataset=positions_digest(dataset.manifest), seq_len=config.seq_len, sources=sources
    )
    folder.write_atomic(SUMMARY, packing.model_dump_json(indent=1).encode())
    return packing


def open_packings(run: Store, dataset: Dataset, config: TrainConfig) -> dict[str, PackedIndex] | None:
    """Return the packed rows of every source; None if `train.packing` is not best_fit.

    Raises ContractError if the packing index does not exist, or does not match the dataset.
    """
    if config.packing != "best_fit":
        return None
    folder = packing_folder(run, dataset, config.seq_len)
    if not folder.exists(SUMMARY):
        raise ContractError(
            f"{folder.uri}: expected an index of packed rows, got no {SUMMARY}. Run `penstock plan` again."
        )
    summary = _read_summary(folder, dataset, config.seq_len)
    opened = {}
    for number, source in enumerate(summary.sources):
        columns = {
            name: read_table(folder, f"{number:05d}.{table}.arrow").column(name).chunk(0).to_numpy()
            for table, schema in TABLES.items()
            for name in schema.names
        }
        num_rows = len(columns["first_piece"]) - 1
        if num_rows != source.num_rows:
            raise ContractError(
                f"{folder.uri}: expected {source.num_rows} rows of {source.name}, got {num_rows}. "
                "Remove the folder and run `penstock plan` again."
            )
        begins = {"row_begins": columns.pop("first_piece"), "chunk_begins": columns.pop("first_row")}
        opened[source.name] = PackedIndex(digest=folder.root.rpartition("/")[2], **columns, **begins)
    return opened


def packed_files(run: Store, dataset: Dataset, config: TrainConfig) -> Iterator[tuple[Store, str, str]]:
    """Yield folder, path and expected SHA-256 of every file of the packing index; nothing without best_fit packing."""
    if config.packing == "best_fit":
        folder = packing_folder(run, dataset, config.seq_len)
        for source in _read_summary(folder, dataset, config.seq_len).sources:
            yield from ((folder, path, sha256) for path, sha256 in source.files.items())


def _read_summary(folder: Store, dataset: Dataset, seq_len: int) -> Packing:
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
    expected = (PACKING_VERSION, positions_digest(dataset.manifest), seq_len)
    if (summary.version, summary.dataset, summary.seq_len) != expected:
        raise ContractError(
            f"{where}: expected version, dataset and seq_len {expected}, got "
            f"{(summary.version, summary.dataset, summary.seq_len)}. Remove the folder and run `penstock plan` again."
        )
    return summary


def _write_source(folder: Store, dataset: Dataset, source: str, number: int, seq_len: int) -> PackedSource:
    size = dataset.chunk_tokens
    end = max(0, dataset.num_tokens(TRAIN)[source] - 1) // size * size
    documents = cut = cut_in_stream = num_pieces = num_rows = chunk = 0
    edges = np.empty(0, np.int64)
    with ExitStack() as stack:
        names = [name for schema in TABLES.values() for name in schema.names]
        spools: dict[str, IO[bytes]] = {name: stack.enter_context(tempfile.TemporaryFile()) for name in names}
        for begins, known in shard_documents(dataset, f"{source}/{TRAIN}"):
            first, stop = begins[begins < end], np.minimum(np.append(begins[1:], known), end)[: (begins < end).sum()]
            documents += len(first)
            cut += int(((stop - first > seq_len) | (first // size != (stop - 1) // size)).sum())
            cut_in_stream += int((first // seq_len != (stop - 1) // seq_len).sum())
            edges, last = np.concatenate([edges, begins, [known]]), min(known, end) // size
            columns = _pack_chunks(edges, range(chunk, last), size, seq_len)
            columns["first_piece"] += num_pieces
            columns["first_row"] += num_rows
            num_pieces, num_rows = num_pieces + len(columns["start"]), num_rows + len(columns["first_piece"])
            edges, chunk = edges[edges > last * size], last
            _spool(spools, columns)
        _spool(spools, {"first_piece": np.array([num_pieces]), "first_row": np.array([num_rows])})
        paths = {table: f"{number:05d}.{table}.arrow" for table in TABLES}
        for table, schema in TABLES.items():
            _write_table(folder, paths[table], schema, spools)
    return PackedSource(
        name=source,
        num_tokens=end,
        num_rows=num_rows,
        num_documents=documents,
        cut=cut,
        cut_in_stream=cut_in_stream,
        padding=1 - end / (num_rows * seq_len) if num_rows else 0.0,
        files={path: folder.sha256(path) for path in paths.values()},
    )


def _pack_chunks(edges: Ints, chunks: range, size: int, seq_len: int) -> dict[str, Ints]:
    """Return the columns of TABLES, by name, for the packed rows of these chunks.

    `edges`: stream positions of all document boundaries in the chunks. `first_piece` and `first_row` are 0 for the
    first of these chunks."""
    corners = np.arange(chunks.start, chunks.stop + 1) * size
    points = np.unique(np.concatenate([corners, edges[(edges > corners[0]) & (edges < corners[-1])]]))
    long = np.diff(points)
    index, which = concatenate_ranges(np.zeros(len(long), np.int64), -(-long // seq_len))
    start = points[which] + index * seq_len
    length = np.minimum(points[which + 1] - start, seq_len)
    closed = np.isin(start + length, edges)
    order, rows, chunk_rows = [], [], []
    bounds = np.searchsorted(start, corners).tolist()
    for first, stop in pairwise(bounds):
        packed = best_fit(length[first:stop].tolist(), seq_len)
        order += [first + piece for row in packed for piece in row]
        rows += [len(row) for row in packed]
        chunk_rows.append(len(packed))
    taken, in_rows, in_chunks = (np.array(values, np.int64) for values in (order, rows, chunk_rows))
    pieces = {"start": start[taken], "length": length[taken], "closed": closed[taken]}
    begins = {"first_piece": np.cumsum(in_rows) - in_rows, "first_row": np.cumsum(in_chunks) - in_chunks}
    return pieces | begins


def _spool(spools: dict[str, IO[bytes]], columns: dict[str, Ints]) -> None:
    for schema in TABLES.values():
        for field in schema:
            if field.name in columns:
                spools[field.name].write(columns[field.name].astype(field.type.to_pandas_dtype()).tobytes())


def _write_table(folder: Store, path: str, schema: pa.Schema, spools: dict[str, IO[bytes]]) -> None:
    """Write a table of one record batch from the temporary files `spools`, which hold one column each."""
    arrays = []
    for field in schema:
        spool = spools[field.name]
        spool.flush()
        kind = field.type.to_pandas_dtype()
        arrays.append(pa.array(np.memmap(spool, kind, "r") if spool.tell() else np.empty(0, kind)))
    with folder.open_output(path) as sink, pa.ipc.new_file(sink, schema) as writer:
        # With one record batch, a reader maps each column as one array.
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    folder.sync(path)
