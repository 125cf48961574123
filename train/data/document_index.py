"""The document index of a dataset: look-ups by position in a stream, by id, by URL and by host, without scans.

Every index file is sorted, so a binary search reads only a few of its record batches. The index of a shard is sorted by
token offset. It is also sorted by a hash of the document id, because the global shuffle orders documents by that hash.
A bucket of the URL index is sorted by SURT.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.arrow_files import ArrowFile
from schemas.blocks import numbers_of
from schemas.errors import ContractError
from schemas.ids import shuffle_key
from schemas.storage import CheckedPath, Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import Dataset, Shard
from schemas.urls import canonical_url, host_suffixes, is_host_of, surt
from train.data.permutation import Ints

DOCUMENT_COLUMNS = (
    *("doc_id", "source", "url", "split", "offset", "length", "language", "cluster", "token_offset", "num_tokens"),
)
MAX_CACHED_BATCHES = 1024
"""Maximum number of cached record batches of an index file; those of a local file are memory-mapped, not copied."""
LAST_KEY = (1 << 64, b"")
"""A key that sorts after those of all documents."""

Row = dict[str, Any]
LocatedDocument = tuple[str, Row, int]
"""Stream of a document, its row in the document index, and the position of its first token in the stream."""


class IndexFile:
    """A sorted Arrow IPC file whose record batches are read at first use."""

    def __init__(self, folder: Store, path: CheckedPath):
        self._where, self._batches = f"{folder.uri}/{path}", dict[int, pa.RecordBatch]()
        try:
            self._reader = ArrowFile(folder.open_input(path))
        except (OSError, pa.ArrowInvalid) as error:
            raise self._unreadable(error) from error

    def __len__(self) -> int:
        """Number of record batches."""
        return int(self._reader.num_record_batches)

    def batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch. Raises ContractError if it cannot be read."""
        if number not in self._batches:
            if len(self._batches) >= MAX_CACHED_BATCHES:
                self._batches.clear()
            try:
                self._batches[number] = self._reader.get_batch(number)
            except (OSError, pa.ArrowInvalid) as error:
                raise self._unreadable(error) from error
        return self._batches[number]

    def value(self, number: int, column: str, row: int) -> Any:
        """Return the value in a column and row of a record batch. Raises ContractError if there is no such column."""
        try:
            return self.batch(number).column(column)[row].as_py()
        except KeyError as error:
            raise self._unreadable(error) from error

    def rows_between(self, column: str, low: Any, high: Any) -> Iterator[tuple[pa.RecordBatch, int, int]]:
        """Yield (record batch, first row, end row) for rows whose value in the sorted `column` is in [low, high)."""
        first = bisect_left(range(len(self)), low, key=lambda number: self.value(number, column, 0))
        for number in range(max(0, first - 1), len(self)):
            if number > first - 1 and self.value(number, column, 0) >= high:
                return
            rows, key = range(self.batch(number).num_rows), partial(self.value, number, column)
            begin = bisect_left(rows, low, key=key)
            end = bisect_left(rows, high, lo=begin, key=key)
            if begin < end:
                yield self.batch(number), begin, end

    def _unreadable(self, error: Exception) -> ContractError:
        return ContractError(
            f"{self._where}: expected a readable index file, got an error: {error}. Restore the file from a backup."
        )


class _ShardIndex(IndexFile):
    """The document index of one shard."""

    def __init__(self, dataset: Dataset, shard: Shard, seed: int):
        """`seed`: that of the hash by which its documents are sorted."""
        super().__init__(dataset.folder, shard.docs_path)
        self._seed = seed

    def between(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the index rows of documents with a token in [start, stop) of the shard, except removed documents."""
        column = "token_offset"
        first = bisect_right(range(len(self)), start, key=lambda number: self.value(number, column, 0)) - 1
        for number in range(max(0, first), len(self)):
            begins = numbers_of(self.batch(number).column(column))
            if begins[0] >= stop:
                return
            low = max(0, int(np.searchsorted(begins, start, side="right")) - 1)
            high = int(np.searchsorted(begins, stop, side="left"))
            # Where documents were removed, the document before the gap may end before `start`.
            for row in rows_of(self.batch(number), low, high):
                if row[column] + row["num_tokens"] > start and row["doc_id"] != REMOVED_ID:
                    yield row

    def key(self, number: int, row: int = 0) -> tuple[int, bytes]:
        """Return the sort key of the document in this row of record batch `number`.

        If a takedown removed the document, return the key of the next remaining document; LAST_KEY if there is none.
        """
        for later in range(number, len(self)):
            column = self.batch(later).column("doc_id")
            for place in range(row if later == number else 0, len(column)):
                if (identifier := column[place].as_py()) != REMOVED_ID:
                    return shuffle_key(self._seed, identifier), identifier
        return LAST_KEY

    def of_id(self, doc_id: bytes) -> Row | None:
        """Return the index row of the document with this id; None if it is not in the shard."""
        key = shuffle_key(self._seed, doc_id), doc_id
        number = bisect_right(range(len(self)), key, key=self.key) - 1
        if number < 0:
            return None
        rows = range(self.batch(number).num_rows)
        row = bisect_right(rows, key, key=lambda row: self.key(number, row)) - 1
        found = row >= 0 and self.value(number, "doc_id", row) == doc_id
        return next(rows_of(self.batch(number), row, row + 1)) if found else None


def rows_of(batch: pa.RecordBatch, low: int, high: int) -> Iterator[Row]:
    """Yield the rows [low, high) of a record batch of a document index."""
    names = [name for name in DOCUMENT_COLUMNS if name in batch.schema.names]
    yield from batch.select(names).slice(low, high - low).to_pylist()


class DocumentIndex:
    """The document index of a dataset; the index of a shard is opened at first use."""

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        self._indexes: dict[tuple[str, int], _ShardIndex] = {}
        self._buckets: dict[int, IndexFile] = {}
        self._stream_begins: dict[str, Ints] = {}

    @property
    def num_documents(self) -> int:
        """Number of documents of the dataset, by its manifest."""
        return sum(shard.num_documents for shards in self._dataset.streams.values() for shard in shards)

    def between(self, stream: str, start: int, stop: int) -> Iterator[tuple[Row, int]]:
        """Yield the documents with a token in [start, stop) of a stream, each with the position of its first token."""
        begins = self._begins(stream)
        first = int(np.searchsorted(begins, start, side="right")) - 1
        last = int(np.searchsorted(begins, stop, side="left"))
        for number in range(first, min(last, len(begins) - 1)):
            begin, end = int(begins[number]), int(begins[number + 1])
            if begin < end:
                part = self._index(stream, number).between(max(start, begin) - begin, min(stop, end) - begin)
                yield from ((row, begin + row["token_offset"]) for row in part if row["num_tokens"])

    def covering(self, stream: str, ranges: Sequence[tuple[int, int]]) -> list[tuple[Row, int]]:
        """Return the documents with a token in one of the ranges [start, stop), each once, in stream order."""
        documents: list[tuple[Row, int]] = []
        for start, stop in _merged(ranges):
            in_range = list(self.between(stream, start, stop))
            documents += in_range[bool(documents and in_range and documents[-1][1] == in_range[0][1]) :]
        return documents

    def of_id(self, doc_id: bytes) -> LocatedDocument | None:
        """Return the document with this id; None if the dataset has none. Of a union, the first member that has it."""
        return next(self.all_of_id(doc_id), None)

    def all_of_id(self, doc_id: bytes) -> Iterator[LocatedDocument]:
        """Yield the document with this id in every member of the dataset that has it."""
        for member in self._dataset.members:
            sort_key = shuffle_key(member.seed, doc_id), doc_id
            for stream, numbers in member.shards.items():
                shards = self._dataset.streams[stream]
                filled = [number for number in numbers if shards[number].num_documents]
                key = partial(self._first_key, stream, filled)
                place = bisect_right(range(len(filled)), sort_key, key=key)
                if place and (found := self._placed(stream, filled[place - 1], doc_id)):
                    yield found
                    break

    def _first_key(self, stream: str, filled: list[int], place: int) -> tuple[int, bytes]:
        """Return the sort key of the first document in the shards `filled[place:]` that no takedown has removed.

        LAST_KEY if there is none.
        """
        keys = (self._index(stream, number).key(0) for number in filled[place:])
        return next((key for key in keys if key != LAST_KEY), LAST_KEY)

    def of_url(self, url: str) -> list[LocatedDocument]:
        """Return the documents with exactly this URL; if there are none, those with the same canonical URL.

        URLs are compared as stored, after redaction. Documents are sorted by stream and position.
        """
        keys = {surt(form) for form in (url, *_other_hosts(url))}
        rows = [row for key in sorted(keys) for row in self._rows_between(self._buckets_of(url), key, key + "\0")]
        exact = [row for row in rows if row["url"] == url]
        same = [row for row in rows if row["url"] and canonical_url(row["url"]) == canonical_url(url)]
        return sorted(self._all_placed(exact or same), key=lambda placed: (placed[0], placed[2]))

    def of_host(self, host: str) -> Iterator[LocatedDocument]:
        """Yield the documents of a domain: of the host with this name, and of all hosts below it.

        The index files of the domain and of its parents are read first. They have all of the documents if one of them
        names the domain, or a parent, as the registrable domain of another host. If none does, hosts below the domain
        may be registrable domains themselves, as below a top-level domain without public suffixes, and each index file
        is searched.
        """
        url, is_whole = f"http://{host}/", False
        own = self._buckets_of(url)
        for buckets in (own, sorted({*range(len(self._dataset.by_url))} - {*own})):
            for row in self._rows_of_host(url, buckets):
                located, domain = host_suffixes(row["url"] or "")[:1], row["domain"] or ""
                if located and is_host_of(located[0], host):
                    is_whole |= domain != located[0] and is_host_of(host, domain)
                    yield from self._all_placed([row])
            if is_whole:
                return

    def _rows_of_host(self, url: str, buckets: Sequence[int]) -> Iterator[Row]:
        """Yield the rows of some files of the URL index with the host of a URL, or a host below it."""
        stem = surt(url).removesuffix(")/")
        # `)` ends the host, `,` precedes a subdomain; keys between and after them belong to other hosts.
        for end in (")", ","):
            yield from self._rows_between(buckets, stem + end, stem + chr(ord(end) + 1))

    def _buckets_of(self, url: str) -> list[int]:
        """Return the numbers of the files of the URL index that have the registrable domain of a URL, or no domain."""
        domains = {*host_suffixes(url), ""}
        keys = {shuffle_key(0, domain.encode()) for domain in domains}
        files = (member.by_url for member in self._dataset.members if member.by_url)
        return sorted({numbers[key % len(numbers)] for numbers in files for key in keys})

    def _rows_between(self, buckets: Sequence[int], low: str, high: str) -> Iterator[Row]:
        """Yield the rows of some files of the URL index with a SURT in [low, high)."""
        for bucket in buckets:
            shards = next(member.shards for member in self._dataset.members if bucket in member.by_url)
            for batch, first, stop in self._bucket(bucket).rows_between("surt", low, high):
                for row in batch.slice(first, stop - first).to_pylist():
                    # A file names shards by their numbers in the dataset of its own run.
                    if (number := row["shard"]) not in range(len(own := shards.get(row["stream"], ()))):
                        folder = self._dataset.folder
                        raise ContractError(
                            f"{folder.uri}: expected shards of the dataset in the index by URL, got shard {number} of "
                            f"{row['stream']!r}. {folder.repair_fix}"
                        )
                    yield row | {"shard": own[number]}

    def _all_placed(self, rows: Iterator[Row] | list[Row]) -> Iterator[LocatedDocument]:
        for row in rows:
            if found := self._placed(row["stream"], row["shard"], row["doc_id"]):
                yield found

    def _placed(self, stream: str, number: int, doc_id: bytes) -> LocatedDocument | None:
        row = self._index(stream, number).of_id(doc_id)
        return None if row is None else (stream, row, int(self._begins(stream)[number]) + row["token_offset"])

    def _bucket(self, number: int) -> IndexFile:
        if number not in self._buckets:
            path = self._dataset.manifest.paths[f"by_url/{number:05d}"]
            self._buckets[number] = IndexFile(self._dataset.folder, path)
        return self._buckets[number]

    def _index(self, stream: str, number: int) -> _ShardIndex:
        if (stream, number) not in self._indexes:
            members = self._dataset.members
            seed = next(member.seed for member in members if number in member.shards.get(stream, ()))
            self._indexes[stream, number] = _ShardIndex(self._dataset, self._dataset.streams[stream][number], seed)
        return self._indexes[stream, number]

    def _begins(self, stream: str) -> Ints:
        """Return the start of every shard as a position in the stream, then the length of the stream."""
        if stream not in self._stream_begins:
            tokens = [shard.num_tokens for shard in self._dataset.streams[stream]]
            self._stream_begins[stream] = np.cumsum([0, *tokens])
        return self._stream_begins[stream]


def _merged(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges in order; those that touch or overlap are merged."""
    begin = end = -1
    for start, stop in sorted(ranges):
        if start > end:
            if begin < end:
                yield begin, end
            begin, end = start, stop
        end = max(end, stop)
    if begin < end:
        yield begin, end


def _other_hosts(url: str) -> list[str]:
    """Return the URL without and with `www.` before its host; an empty list for a URL without a scheme.

    Two URLs that differ only in `www.` have the same canonical URL but different SURTs, so both must be looked up."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return []
    return [f"{scheme}://{rest.removeprefix('www.')}", f"{scheme}://www.{rest.removeprefix('www.')}"]


def read_table(folder: Store, path: str, columns: tuple[str, ...] | None = None) -> pa.Table:
    """Return the table in an index file, or some of its columns. Raises ContractError if it cannot be read.

    A file of the dataset is compared with its manifest. `verify_dataset` compares those of packed rows.
    """
    try:
        file = folder.open_input(path) if isinstance(path, CheckedPath) else folder.open_unchecked(path)
        table = ArrowFile(file).read_all()
        return table if columns is None else table.select(columns)
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise ContractError(
            f"{folder.uri}/{path}: expected a readable index file, got an error: {error}. "
            "Restore the file from a backup."
        ) from error


OPEN_INDEXES = 32
"""Maximum number of shards whose document ends are kept; each takes 8 bytes per document."""


class DocumentEnds:
    """The positions at which the documents of a stream end, read from the document index of a shard at first use.

    Every end but that of an empty document counts, and so does the end of a shard. Not thread-safe.
    """

    def __init__(self, dataset: Dataset, stream: str):
        self._dataset, self._shards = dataset, dataset.streams[stream]
        self._begins: Ints = np.cumsum([0, *(shard.num_tokens for shard in self._shards)])
        self._points: OrderedDict[int, Ints] = OrderedDict()

    def between(self, begin: int, stop: int) -> Ints:
        """Return the ends in (begin, stop], ascending."""
        ends = [np.empty(0, np.int64)]
        for number in self._numbers(begin, stop):
            points = self._of_shard(number)
            low, high = np.searchsorted(points, [begin, stop], side="right")
            ends.append(points[low:high])
        return np.unique(np.concatenate(ends))

    def starting_between(self, begin: int, stop: int) -> tuple[Ints, Ints]:
        """Return the start and the end of every document that starts in [begin, stop) and is not empty."""
        starts, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number in self._numbers(begin, stop):
            points = self._of_shard(number)
            low, high = np.searchsorted(points[:-1], [begin, stop])
            starts.append(points[low:high])
            ends.append(points[low + 1 : high + 1])
        return np.concatenate(starts), np.concatenate(ends)

    def _numbers(self, begin: int, stop: int) -> Iterator[int]:
        """Yield the numbers of the shards, except empty ones, with a token in [begin, stop)."""
        first = int(np.searchsorted(self._begins, begin, side="right")) - 1
        last = int(np.searchsorted(self._begins, stop, side="left"))
        yield from (i for i in range(first, min(last, len(self._shards))) if self._shards[i].num_tokens)

    def _of_shard(self, number: int) -> Ints:
        """Return the starts of the shard's documents, except empty ones, and its end, as positions in the stream."""
        if number not in self._points:
            if len(self._points) >= OPEN_INDEXES:
                self._points.popitem(last=False)
            shard = self._shards[number]
            table = read_table(self._dataset.folder, shard.docs_path, ("token_offset", "num_tokens"))
            offset, length = (column.to_numpy().astype(np.int64) for column in table.columns)
            starts = offset[length > 0]
            if len(starts) and (starts[0] or (np.diff(starts) <= 0).any() or starts[-1] >= shard.num_tokens):
                raise ContractError(
                    f"{self._dataset.folder.uri}/{shard.docs_path}: expected documents sorted by token_offset within "
                    f"{shard.num_tokens} tokens, got others. Restore the file from a backup."
                )
            self._points[number] = int(self._begins[number]) + np.append(starts, shard.num_tokens)
        self._points.move_to_end(number)
        return self._points[number]
