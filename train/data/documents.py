"""The documents of a dataset: by their place in a stream, and by URL."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ContractError
from schemas.ids import shuffle_key
from schemas.storage import Store
from schemas.tokens import Dataset, Shard
from train.data.counter import Ints

DOCUMENT = ("doc_id", "source", "url", "split", "offset", "length", "token_offset", "num_tokens")


class _Index:
    """The document index of one shard."""

    def __init__(self, dataset: Dataset, shard: Shard):
        self._table = read_table(dataset.folder, shard.docs_path)

    @cached_property
    def _begins(self) -> Ints:
        return np.asarray(self._table.column("token_offset").to_numpy(), np.int64)

    def between(self, start: int, stop: int) -> list[dict[str, Any]]:
        """The documents that have a token in [start, stop) of the shard."""
        first = int(np.searchsorted(self._begins, start, side="right")) - 1
        last = int(np.searchsorted(self._begins, stop, side="left"))
        return _rows(self._table.slice(first, last - first))

    def of_id(self, doc_id: bytes) -> list[dict[str, Any]]:
        """The document with this id."""
        return _rows(self._table.filter(pc.equal(self._table.column("doc_id"), pa.scalar(doc_id, pa.binary(16)))))


def _rows(documents: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = documents.select(DOCUMENT).to_pylist()
    return rows


class Documents:
    """The document index of a dataset; a shard's is read when first asked for."""

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        self._indexes: dict[tuple[str, int], _Index] = {}

    def between(self, stream: str, start: int, stop: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Documents with a token in [start, stop) of a stream, each with its own first token in the stream."""
        begins = self._begins(stream)
        first = int(np.searchsorted(begins, start, side="right")) - 1
        last = int(np.searchsorted(begins, stop, side="left"))
        for number in range(first, last):
            begin, end = int(begins[number]), int(begins[number + 1])
            if begin < end:
                part = self._index(stream, number).between(max(start, begin) - begin, min(stop, end) - begin)
                yield from ((row, begin + row["token_offset"]) for row in part if row["num_tokens"])

    def of_url(self, url: str) -> Iterator[tuple[str, dict[str, Any], int]]:
        """Stream, row and first token in the stream of every document of a URL, as it is stored (redacted)."""
        for row in self._rows_of_url(url):
            stream, number = row["stream"], row["shard"]
            begin = int(self._begins(stream)[number])
            for document in self._index(stream, number).of_id(row["doc_id"]):
                yield stream, document, begin + document["token_offset"]

    def _rows_of_url(self, url: str) -> list[dict[str, Any]]:
        """The rows of the index by URL; its registrable domain is an ending of its host, so few buckets are read."""
        dataset, labels = self._dataset, _host(url).split(".")
        domains = {".".join(labels[first:]) for first in range(len(labels))} | {""}
        size = len(dataset.by_url)
        rows = []
        for bucket in sorted({shuffle_key(0, domain.encode()) % size for domain in domains} if size else ()):
            table = read_table(dataset.folder, dataset.manifest.run.paths[f"by_url/{bucket:05d}"])
            rows += table.filter(pc.equal(table.column("url"), url)).to_pylist()
        return rows

    def _index(self, stream: str, number: int) -> _Index:
        if (stream, number) not in self._indexes:
            self._indexes[stream, number] = _Index(self._dataset, self._dataset.streams[stream][number])
        return self._indexes[stream, number]

    def _begins(self, stream: str) -> Ints:
        """First token of every shard in its stream, and the end of the stream."""
        return np.cumsum([0, *(shard.num_tokens for shard in self._dataset.streams[stream])])


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def read_table(folder: Store, path: str, columns: tuple[str, ...] | None = None) -> pa.Table:
    """An index file, or some columns of it. Raises ContractError if it cannot be read."""
    try:
        table = pa.ipc.open_file(folder.open_input(path)).read_all()
        return table if columns is None else table.select(columns)
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise ContractError(f"{folder.uri}/{path}: promised an index file, found {error}; restore it") from error


def shard_documents(dataset: Dataset, stream: str) -> Iterator[tuple[Ints, int]]:
    """By shard, the first token in the stream of every document that has one, and the end of the shard."""
    begin = 0
    for shard in dataset.streams[stream]:
        table = read_table(dataset.folder, shard.docs_path, ("token_offset", "num_tokens"))
        offset, length = (column.to_numpy().astype(np.int64) for column in table.columns)
        yield begin + offset[length > 0], begin + shard.num_tokens
        begin += shard.num_tokens
