"""Title, signals and text of the documents of a dataset, and a scan for documents that contain a string.

Title and signals come from the tables from which the dataset was made, where a document is found by its input file and
its byte offset in that file. Row groups are compressed, and shuffling spreads the documents of a step over all files,
so each look-up takes some milliseconds. Text is decoded from the tokens of the shards. This module does not import
torch.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.arrow_files import ArrowFile
from schemas.entries import to_mapping, value_type
from schemas.errors import ContractError
from schemas.long_work import LongWork
from schemas.manifest import MANIFEST_NAME, Manifest, part_key, read_manifest, read_run
from schemas.older_tables import read_batches
from schemas.storage import CheckedPath, Store
from schemas.tables import DOCUMENTS, PROVENANCE, TABLES, VERDICT_COLUMNS
from schemas.takedown import REMOVED_ID
from schemas.tokens import Dataset, Member, Shard, unescape
from train.data.shards import StreamReader

NO_SIGNALS = {*(column.name for column in PROVENANCE), *VERDICT_COLUMNS, "raw_digest", "text_digest", "anchor"}
COLUMNS = {
    **{t.name: [name for name in t.searchable if name not in NO_SIGNALS] for t in TABLES.values() if t.searchable},
    "clean": ["title", "cluster_size", "weight", "pii_counts", "planted"],
}
"""The columns of a document that are shown, by table."""


@dataclass(frozen=True)
class DocumentDetail:
    """Title and signals of a document."""

    title: str | None = None
    """Title, with personal data replaced."""
    signals: dict[str, Any] = field(default_factory=dict)
    """Values of the signals, by column."""


def origin_table(folder: Store, made: Manifest, name: str) -> tuple[Store, Manifest] | None:
    """Return folder and manifest of the version of table `name` that the table in `folder` was made from.

    `made`: the manifest in `folder`. None if no such table was used, or if its version was deleted.
    """
    if (version := made.run.lineage.get(name)) is None:
        return None
    run = folder.child("../..")
    attached = {f"{table}/{path}" for table, path in read_run(run).tables.items() if "/" in path}
    owners = [run, *(run.child(f"{path}/../..") for path in sorted(attached))]
    tables = (owner.child(f"{name}/{version}") for owner in owners if owner.exists(f"{name}/{version}/{MANIFEST_NAME}"))
    return next(((table, read_manifest(table)) for table in tables), None)


class DetailReader:
    """Reads title and signals of documents from the tables that a dataset was made from, as far as they still exist."""

    def __init__(self, dataset: Dataset):
        self._members = [_MemberTables(member) for member in dataset.members]

    @property
    def missing(self) -> list[str]:
        """Names of the tables that no longer exist for some member, so that their columns cannot be shown."""
        return sorted({name for member in self._members for name in member.missing}, reverse=True)

    def of(self, split: str, offset: int, doc_id: str) -> DocumentDetail:
        """Return title and signals of the document whose record begins at byte `offset` of the input file `split`."""
        found = (member.of(split, offset, doc_id) for member in self._members)
        return next((detail for detail in found if detail is not None), DocumentDetail())

    def record(self, split: str, offset: int, doc_id: str) -> dict[str, Any]:
        """Return the document's row of the table `documents`; empty if the table or the row does not exist."""
        found = (member.record(split, offset, doc_id) for member in self._members)
        return next((row for row in found if row), {})


def _parts_at(firsts: Sequence[tuple[int, int]], offset: int) -> Iterator[int]:
    """Yield the parts of a file that may have a row at an offset. `firsts`: (offset of its first row, part), sorted.

    Records in one frame of a compressed file have the same offset, also if ranges begin between them.
    """
    end = bisect_right(firsts, offset, key=lambda own: own[0])
    begin = bisect_left(firsts, offset, key=lambda own: own[0])
    yield from (part for _, part in firsts[max(0, begin - 1) : end])


class _MemberTables:
    """The tables that one member of a dataset was made from."""

    def __init__(self, member: Member):
        self._tables: dict[str, tuple[Store, Manifest]] = {}
        self._files: dict[tuple[str, int], _PartFile] = {}
        self._add("clean", (member.folder, read_manifest(member.folder)))
        if "clean" in self._tables:
            for name in COLUMNS.keys() - {"clean"}:
                self._add(name, self._tables["clean"])
        documents = self._tables.get("documents")
        parts = documents[1].parts_of_inputs if documents else {}
        self._is_shared = len({own[0] for own in parts.values()}) < len(parts)
        self._parts: dict[str, list[list[tuple[int, int]]]] = {}
        """By split, for each input file of this name: (offset of the first row, part) of each part of the file."""
        for entry in documents[1].content.inputs if documents else ():
            firsts = [0] if entry.ranges is None else [each.first for each in entry.ranges]
            own = [(first, part) for first, part in zip(firsts, parts[entry.name]) if first is not None]
            # With several sources, the name of an input is `source/split`.
            for split in {entry.name, entry.name.partition("/")[2]} - {""}:
                self._parts.setdefault(split, []).append(own)

    @property
    def missing(self) -> list[str]:
        """Names of the tables that no longer exist, so that their columns cannot be shown."""
        return [name for name in ("documents", "clean") if name not in self._tables]

    def of(self, split: str, offset: int, doc_id: str) -> DocumentDetail | None:
        """Return title and signals of a document; None if the tables do not have it."""
        values: dict[str, Any] = {}
        for name, columns in COLUMNS.items():
            row = self._row(name, (split, offset, doc_id), columns)
            values |= {column: value for column, value in row.items() if value is not None}
        title = values.pop("title", None)
        return DocumentDetail(title, values) if title is not None or values else None

    def record(self, split: str, offset: int, doc_id: str) -> dict[str, Any]:
        """Return the document's row of the table `documents`; empty if the table or the row does not exist."""
        return self._row("documents", (split, offset, doc_id), DOCUMENTS.names)

    def _row(self, name: str, place: tuple[str, int, str], columns: list[str]) -> dict[str, Any]:
        """Return columns of a document in the table `name`; empty if the table or the document does not exist.

        `place`: (split, offset, doc_id).
        """
        split, offset, doc_id = place
        files = self._parts.get(split, ()) if name in self._tables else ()
        parts = {part for firsts in files for part in _parts_at(firsts, offset)}
        rows = (self._part(name, part).row(bytes.fromhex(doc_id), offset, columns) for part in sorted(parts))
        return next((row for row in rows if row), {})

    def _add(self, name: str, made: tuple[Store, Manifest]) -> None:
        """Open the version of table `name` that the table `made` was made from, if the version still exists."""
        if (origin := origin_table(*made, name)) is not None:
            self._tables[name] = origin

    def _part(self, name: str, number: int) -> "_PartFile":
        if (name, number) not in self._files:
            folder, manifest = self._tables[name]
            path = manifest.paths[part_key(number)]
            self._files[name, number] = _PartFile(name, folder, path, is_sorted=not self._is_shared)
        return self._files[name, number]


class _PartFile:
    """One part file of a table."""

    def __init__(self, name: str, folder: Store, path: CheckedPath, is_sorted: bool):
        """`is_sorted`: the rows are sorted by offset, because they are those of one input file."""
        self._is_sorted = is_sorted
        self._file = _open_parquet(name, folder, path)
        self._names = set(self._file.schema_arrow.names)
        self._offsets: dict[int, int] = {}

    def row(self, doc_id: bytes, offset: int, columns: list[str]) -> dict[str, Any]:
        """Return the values of `columns` for the document `doc_id`; empty if this part file has no such document.

        `offset`: byte of the input file at which the record of the document begins.
        """
        target = pa.scalar(doc_id, pa.binary(16))
        for group in self._groups(offset):
            ids = self._file.read_row_group(group, columns=["doc_id"]).column(0)
            place = pc.index(ids, target).as_py()
            if place >= 0:
                names = [name for name in columns if name in self._names]
                table = self._file.read_row_group(group, columns=names, use_threads=False).slice(place, 1)
                row: dict[str, Any] = table.to_pylist()[0]
                entries = (field.name for field in table.schema if value_type(field.type) is not None)
                return row | {name: to_mapping(row[name]) for name in entries}
        return {}

    def _groups(self, offset: int) -> list[int]:
        """Return the row groups that may hold documents whose record begins at `offset`, the most likely first."""
        groups = range(self._file.num_row_groups)
        if "offset" not in self._names or not self._is_sorted:
            return list(groups)
        # All records of one gzip member have its offset: they may begin in the middle of a row group and fill others.
        before = bisect_left(groups, offset, key=self._first_offset) - 1
        after = bisect_right(groups, offset, key=self._first_offset)
        return [group for group in reversed(range(before, after)) if group >= 0]

    def _first_offset(self, group: int) -> int:
        if group not in self._offsets:
            self._offsets[group] = int(self._file.read_row_group(group, columns=["offset"]).column(0)[0].as_py())
        return self._offsets[group]


def _open_parquet(name: str, folder: Store, path: CheckedPath) -> pq.ParquetFile:
    """Return an open part file of the table `name`. Raises ContractError if it cannot be read."""
    try:
        return pq.ParquetFile(folder.open_input(path))
    except (OSError, pa.ArrowInvalid) as error:
        raise ContractError(
            f"{folder.uri}/{path}: expected a readable Parquet file of the table `{name}`, got an "
            f"error: {error}. "
            "Restore the file from a backup."
        ) from error


# The text of documents as the model read it, decoded from the tokens of the shards.

Decode = Callable[[list[int]], str]


class Texts:
    """Decodes token spans of a dataset. Reserved tokens appear by name, such as `<tombstone>`; separators do not."""

    def __init__(self, dataset: Dataset):
        """Open the tokenizer. Raises ContractError if its model file does not match the tokenizer contract."""
        self._dataset, self._decode = dataset, open_decoder(dataset)
        contract = dataset.tokenizer
        hidden = {*contract.before, *contract.after}
        self._shown = {number: "" if name in hidden else f"<{name}>" for name, number in contract.reserved.items()}
        self._readers: dict[str, StreamReader] = {}

    def read(self, stream: str, start: int, stop: int) -> str:
        """Return the text of tokens [start, stop) of a stream; an incomplete character becomes U+FFFD."""
        if stream not in self._readers:
            shards = self._dataset.streams[stream]
            self._readers[stream] = StreamReader(self._dataset.folder, shards, self._dataset.tokenizer.dtype)
        out = np.empty(stop - start, self._dataset.tokenizer.dtype)
        self._readers[stream].read(out, np.zeros(1, np.int64), np.array([start]), np.array([stop - start]))
        return self.decode(out.tolist())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        parts, plain = list[str](), list[int]()
        for number in ids:
            if number not in self._shown:
                plain.append(number)
                continue
            parts += [self._decode(plain)] * bool(plain) + [self._shown[number]]
            plain = []
        return "".join([*parts, self._decode(plain) if plain else ""])


def open_decoder(dataset: Dataset) -> Decode:
    """Return the function that decodes token ids of a dataset to text; it does not accept reserved ids.

    Raises ContractError if the tokenizer's model file does not match the tokenizer contract.
    """
    folder, path, contract = dataset.tokenizer_folder, dataset.tokenizer_path, dataset.tokenizer
    data = folder.read_bytes(path)
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != contract.sha256:
        raise ContractError(
            f"{folder.uri}/{path}: expected SHA-256 {contract.sha256}, got {sha256}. Restore the file from a backup."
        )
    if contract.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_proto=data)
        return lambda ids: unescape(processor.decode(ids))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(data)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


# The scan for documents whose text contains a string, since there is no index of texts. It reads the table of clean
# texts, or decodes the shards if that table no longer exists.

ROWS_AT_ONCE = 2048


def describe_scan(dataset: Dataset) -> str:
    """Return a line of text on what a scan reads: the rows of the table of clean text, or the tokens of the shards."""
    parts = []
    for member, table in _clean_tables(dataset):
        if table is not None:
            parts.append(f"scanning the clean text of {table[1].content.counts.rows_in:,} rows")
        else:
            tokens = sum(shard.num_tokens for shard in _shards_of(dataset, member))
            parts.append(f"there is no table of clean text: decoding {tokens:,} tokens of the shards")
    return "; ".join(parts)


def documents_containing(dataset: Dataset, text: str) -> Iterator[bytes]:
    """Yield the ids of all documents whose text contains exactly this string, in the order of the files.

    Reports progress on standard error. Raises ContractError if a file cannot be read.
    """
    for member, table in _clean_tables(dataset):
        yield from _in_shards(dataset, member, text) if table is None else _in_table(*table, text)


def _clean_tables(dataset: Dataset) -> Iterator[tuple[Member, tuple[Store, Manifest] | None]]:
    """Yield every member of a dataset, with its table of clean text if that still exists."""
    for member in dataset.members:
        yield member, origin_table(member.folder, read_manifest(member.folder), "clean")


def _shards_of(dataset: Dataset, member: Member) -> list[Shard]:
    return [dataset.streams[stream][number] for stream, numbers in member.shards.items() for number in numbers]


def _in_table(folder: Store, manifest: Manifest, text: str) -> Iterator[bytes]:
    total = sum(entry.rows for entry in manifest.content.files)
    with LongWork("scan", total, "rows") as work:
        for path in manifest.paths_of():
            file = _open_parquet("clean", folder, path)
            for batch in read_batches(file, "clean", ["doc_id", "text", "drop_stage"], ROWS_AT_ONCE):
                hits = pc.and_(pc.match_substring(batch.column("text"), text), batch.column("drop_stage").is_null())
                yield from batch.filter(hits).column("doc_id").to_pylist()
                work.add(batch.num_rows)


def _in_shards(dataset: Dataset, member: Member, text: str) -> Iterator[bytes]:
    texts, shards = Texts(dataset), _shards_of(dataset, member)
    with LongWork("scan", sum(shard.num_tokens for shard in shards), "tokens") as work:
        for shard in shards:
            reader = ArrowFile(dataset.folder.open_input(shard.path), f"{dataset.folder.uri}/{shard.path}")
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                for doc_id, tokens in zip(batch.column("doc_id"), batch.column("tokens"), strict=True):
                    ids = tokens.as_py()
                    if doc_id.as_py() != REMOVED_ID and text in texts.decode(ids):
                        yield doc_id.as_py()
                    work.add(len(ids))
