"""The index by id of a dataset: the leaves of its Merkle tree in files, each for the ids that begin with the same bits.

A file has a record batch for each part of its ids, in order, with the top of this part of the tree in its metadata. The
manifest has the tops of the files, and the root. So a proof reads one file and joins the leaves of one batch, and a
task or a takedown that writes a file has one batch in memory.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.engine.part import PartResult
from pipeline.membership.check_proof import check_proof
from pipeline.membership.tree import (
    Proof,
    Subtree,
    empty_proofs,
    join_leaves,
    join_parts,
    merge_places,
    prefix_of,
)
from pipeline.tokens.shards import IpcWriter
from schemas.arrow_files import validated
from schemas.errors import ContractError, reading
from schemas.ids import canonical_json
from schemas.manifest import Counts, Manifest, TableVersion
from schemas.storage import CheckedPath, Store
from schemas.tokens import BY_ID, MEMBERSHIP, MEMBERSHIP_PARTS, by_id_key

DOCUMENTS_PER_FILE = 1_000_000
"""Maximum number of documents in a file, about, if the ids are spread evenly [48 bytes each]."""
DOCUMENTS_PER_BATCH = 1 << 12
"""Maximum number of documents in a record batch, about. Joining the leaves of one takes about 30 ms."""
TOP = "top"
"""Key in the metadata of a batch, and in the figures of a part, with the top of its part of the tree."""
RESTORE = "Restore the file and the manifest from a backup."

Place = tuple[bytes, bytes]
"""The id of a document, and the value of one of its places in the dataset."""


class IndexBits(NamedTuple):
    """How many first bits the ids in a file share, and those in a record batch."""

    file: int
    batch: int

    def batches_of(self, number: int) -> range:
        """Return the prefixes of the record batches of file `number`."""
        first = number << self.batch - self.file
        return range(first, first + (1 << self.batch - self.file))


def index_bits(num_documents: int) -> IndexBits:
    """Return the numbers of bits for the index of a dataset; they follow from its number of documents."""
    file, batch = (
        max(0, -(-num_documents // most) - 1).bit_length() for most in (DOCUMENTS_PER_FILE, DOCUMENTS_PER_BATCH)
    )
    return IndexBits(file, max(file, batch))


def write_index_file(folder: Store, number: int, batches: Iterator[pa.RecordBatch], bits: IndexBits) -> PartResult:
    """Write file `number` of the index from rows of BY_ID that are sorted by id; the figure TOP is that of the file.

    Raises ContractError if the rows are not sorted, or are those of another file.
    """
    places = (
        place
        for batch in batches
        for place in zip(batch.column("doc_id").to_pylist(), batch.column("value").to_pylist(), strict=True)
    )
    groups = groupby(places, key=lambda place: prefix_of(place[0], bits.batch))
    group = next(groups, None)

    def write(prefix: int, _: Sequence[Proof]) -> Subtree:
        nonlocal group
        own: list[Place] = []
        if group is not None and group[0] == prefix:
            own, group = sorted(group[1]), next(groups, None)
        return _write_batch(writer, own, bits.batch)

    with IpcWriter(folder, by_id_key(number), BY_ID) as writer:
        top = join_parts(write, bits.batch, place=(bits.file, number))
        if group is not None:
            raise ContractError(
                f"{by_id_key(number)}: expected ids in order that begin with {number:b}, got {group[0]:b} after them. "
                "Run `penstock run` again."
            )
    return _result(writer, top)


def cut_index_file(file: "LeafFile", new: Store, documents: Collection[bytes]) -> PartResult:
    """Write a file of the index without the documents to another folder, as `write_index_file` writes the others.

    The record batches without any of the documents are copied.
    """
    touched = {prefix_of(own, file.bits.batch) for own in documents}

    def write(prefix: int, _: Sequence[Proof]) -> Subtree:
        if prefix in touched:
            kept = [place for place in file.places(prefix) if place[0] not in documents]
            return _write_batch(writer, kept, file.bits.batch)
        rows, top = file.batch(prefix)
        writer.write([pa.concat_arrays([column, column.slice(0, 0)]) for column in rows.columns], _metadata(top))
        return top

    with IpcWriter(new, by_id_key(file.number), BY_ID) as writer:
        top = join_parts(write, file.bits.batch, place=(file.bits.file, file.number))
    return _result(writer, top)


def _result(writer: IpcWriter, top: Subtree) -> PartResult:
    counts = Counts(rows_in=writer.num_rows, rows_kept=writer.num_rows)
    return PartResult({"by_id": writer.written}, counts, {TOP: top.to_json()})


def _write_batch(writer: IpcWriter, places: Sequence[Place], bits: int) -> Subtree:
    top = join_leaves([*merge_places(places)], bits)
    columns = [pa.array([place[column] for place in places], field.type) for column, field in enumerate(BY_ID)]
    writer.write(columns, _metadata(top))
    return top


def _metadata(top: Subtree) -> dict[str, bytes]:
    return {TOP: canonical_json(top.to_json())}


@contextmanager
def _reading_index(where: str) -> Iterator[None]:
    """Turn an error from reading a file of the index into a ContractError."""
    try:
        with reading(where, "a file of the index by id", RESTORE):
            yield
    except OSError as error:
        raise ContractError(f"{where}: expected a file of the index by id, got an error: {error}. {RESTORE}") from error


@dataclass(frozen=True)
class LeafFile:
    """An open file of the index by id."""

    where: str
    reader: Any
    number: int
    bits: IndexBits

    @classmethod
    def open(cls, folder: Store, path: str, number: int, file_bits: int) -> "LeafFile":
        """Open a file. A CheckedPath is compared with the file; another path is of a file that was just compared.

        Raises ContractError if the file is not one of the index.
        """
        source = folder.open_input(path) if isinstance(path, CheckedPath) else folder.open_unchecked(path)
        where = f"{folder.uri}/{path}"
        with _reading_index(where):
            reader = pa.ipc.open_file(source)
            num_batches = int(reader.num_record_batches)
            if reader.schema != BY_ID or num_batches.bit_count() != 1:
                raise ValueError(f"{num_batches} record batches of {reader.schema.names}")
        return cls(where, reader, number, IndexBits(file_bits, file_bits + num_batches.bit_length() - 1))

    def batch(self, prefix: int) -> tuple[pa.RecordBatch, Subtree]:
        """Return the rows with the ids that begin with the bits of `prefix`, and the stored top of their part."""
        with _reading_index(self.where):
            own = self.reader.get_batch_with_custom_metadata(prefix - self.bits.batches_of(self.number).start)
            return validated(own.batch), Subtree.from_json(json.loads(own.custom_metadata[TOP]))

    def places(self, prefix: int) -> list[Place]:
        """Return the rows with the ids that begin with the bits of `prefix`, sorted."""
        rows, _ = self.batch(prefix)
        with _reading_index(self.where):
            places = sorted(zip(rows.column("doc_id").to_pylist(), rows.column("value").to_pylist(), strict=True))
            if {prefix_of(own, self.bits.batch) for own, _ in (*places[:1], *places[-1:])} - {prefix}:
                raise ValueError(f"an id that does not begin with {prefix:0{self.bits.batch}b}")
        return places

    def holds(self, documents: Collection[bytes]) -> bool:
        """Return True if the file has any of the documents."""
        prefixes = {prefix_of(own, self.bits.batch) for own in documents} & {*self.bits.batches_of(self.number)}
        return any(own in documents for prefix in prefixes for own, _ in self.places(prefix))

    def top(self, proofs: Sequence[Proof]) -> Subtree:
        """Return the top of the file's part of the tree from those of its batches, and extend the proofs."""

        def part(prefix: int, own: Sequence[Proof]) -> Subtree:
            return self.top_of_batch(prefix, own) if own else self.batch(prefix)[1]

        return join_parts(part, self.bits.batch, proofs, (self.bits.file, self.number))

    def top_of_rows(self) -> Subtree:
        """Return the top of the file's part of the tree from all of its rows.

        Raises ContractError if the stored top of a batch differs.
        """

        def part(prefix: int, _: Sequence[Proof]) -> Subtree:
            top, stored = self.top_of_batch(prefix), self.batch(prefix)[1]
            if top != stored:
                raise ContractError(
                    f"{self.where}: expected {_shown(stored)} at the top of its part {prefix:0{self.bits.batch}b}, got "
                    f"{_shown(top)} from its rows. {RESTORE}"
                )
            return top

        return join_parts(part, self.bits.batch, place=(self.bits.file, self.number))

    def top_of_batch(self, prefix: int, proofs: Sequence[Proof] = ()) -> Subtree:
        """Return the top of a batch's part of the tree from its rows, and extend the proofs."""
        return join_leaves([*merge_places(self.places(prefix))], self.bits.batch, proofs)


def _shown(top: Subtree) -> str:
    return top.digest.hex()[:12]


def membership_figures(tops: Sequence[Subtree]) -> dict[str, Any]:
    """Return the figures of a dataset whose index has files with these tops: the root and the tops."""
    root = join_parts(lambda number, _: tops[number], _bits_of(len(tops)))
    return {MEMBERSHIP: root.digest.hex(), MEMBERSHIP_PARTS: [top.to_json() for top in tops]}


def _bits_of(number: int) -> int:
    """Return the number of bits that number `number` files. Raises ValueError if it is no power of two."""
    if number.bit_count() != 1:
        raise ValueError(f"{number} files")
    return number.bit_length() - 1


@dataclass(frozen=True)
class MembershipIndex:
    """The index by id of a dataset version."""

    folder: Store
    files: Mapping[int, tuple[Store, str]]
    """Folder and path of every file, by number."""
    tops: tuple[Subtree, ...]
    """The top of each file's part of the tree."""

    @property
    def figures(self) -> dict[str, Any]:
        """The figures in the manifest of this version."""
        return membership_figures(self.tops)

    @property
    def root(self) -> str:
        """The root of the tree (hex)."""
        return str(self.figures[MEMBERSHIP])

    def file(self, number: int) -> LeafFile:
        """Open a file."""
        return LeafFile.open(*self.files[number], number, _bits_of(len(self.files)))

    def files_with(self, documents: Collection[bytes]) -> list[int]:
        """Return the numbers of the files that have any of the documents."""
        numbers = {prefix_of(own, _bits_of(len(self.files))) for own in documents}
        return [number for number in sorted(numbers) if self.file(number).holds(documents)]

    def prove(self, documents: Iterable[bytes]) -> list[Proof]:
        """Return a proof for each of `documents`, sorted by id. Only the files of their ids are read.

        Raises ContractError if such a file does not agree with the manifest.
        """

        def part(number: int, own: Sequence[Proof]) -> Subtree:
            return self._top_of_file(number, own) if own else self.tops[number]

        proofs = empty_proofs(documents)
        join_parts(part, _bits_of(len(self.files)), proofs)
        root = self.root
        for proof in proofs:
            try:
                check_proof(proof.to_json(), root, proof.doc_id.hex())
            except ValueError as error:
                raise ContractError(
                    f"{self.folder.uri}: expected an index by id with proofs against root {root}, got a proof with "
                    f"{error}. {RESTORE}"
                ) from error
        return proofs

    def check(self) -> None:
        """Read all files. Raises ContractError if their rows do not have the root of the manifest."""
        for number in self.files:
            self._compare(number, self.file(number).top_of_rows())

    def replaced(self, folder: Store, parts: Mapping[int, PartResult]) -> "MembershipIndex":
        """Return the index in which files that were written to another folder replace those of the same numbers."""
        files = {number: (folder, part.files["by_id"].checked_path) for number, part in parts.items()}
        tops = {number: Subtree.from_json(part.figures[TOP]) for number, part in parts.items()}
        new = tuple(tops.get(number, top) for number, top in enumerate(self.tops))
        return replace(self, files={**self.files, **files}, tops=new)

    def _top_of_file(self, number: int, proofs: Sequence[Proof]) -> Subtree:
        return self._compare(number, self.file(number).top(proofs))

    def _compare(self, number: int, top: Subtree) -> Subtree:
        if top != self.tops[number]:
            raise ContractError(
                f"{self.files[number][0].uri}/{self.files[number][1]}: expected {_shown(self.tops[number])} at the top "
                f"of its part of the Merkle tree, as in the manifest, got {_shown(top)}. {RESTORE}"
            )
        return top


def open_index(folder: Store, manifest: Manifest, checked: bool = True) -> MembershipIndex | None:
    """Return the index by id of a dataset version; None = an earlier version of penstock wrote it without one.

    `checked`: False = its files are opened also if they differ from the manifest. Raises ContractError if the figures
    of the manifest do not agree with each other, or if the manifest lacks a file.
    """
    number = len(manifest.paths_of("by_id/"))
    if not number:
        return None
    with reading(folder.uri, "a manifest with the Merkle root of its index by id", RESTORE):
        paths = [manifest.paths[by_id_key(place)] for place in range(number)]
        tops = tuple(Subtree.from_json(top) for top in manifest.content.figures[MEMBERSHIP_PARTS])
        if len(tops) != number:
            raise ValueError(f"{number} files and {len(tops)} parts of the tree")
        root, stated = membership_figures(tops)[MEMBERSHIP], manifest.content.figures[MEMBERSHIP]
        if root != stated:
            raise ValueError(f"root {stated}, and {root} from its parts")
    files = {place: (folder, path if checked else str(path)) for place, path in enumerate(paths)}
    return MembershipIndex(folder, files, tops)


def canonical_metadata(table: TableVersion, key: str, batch: int) -> dict[str, bytes] | None:
    """Return the metadata that record batch `batch` (0 = first) of a dataset's file must have, from its rows.

    None = the file is not one of the index by id.
    """
    prefix, _, number = key.partition("/")
    if prefix != "by_id":
        return None
    with reading(f"{table.folder.uri}: {key}", "a file of the index by id", RESTORE):
        bits = _bits_of(len(table.manifest.paths_of("by_id/")))
        file = LeafFile.open(table.folder, str(table.manifest.paths[key]), int(number), bits)
        return _metadata(file.top_of_batch(file.bits.batches_of(file.number)[batch]))
