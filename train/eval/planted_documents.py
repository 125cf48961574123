"""The documents with planted identifiers that a checkpoint read, has not read, or must no longer know.

They follow from the key and the ids: of the shards' document indexes for the dataset, of the table `documents` for
removed ones, whose rows keep their ids. Files are read one after another. At most a fixed number of documents of each
group is kept, those with the smallest keyed hashes.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.errors import ConfigError
from schemas.key_file import commitment
from schemas.manifest import Manifest, read_manifest
from schemas.older_tables import read_batches
from schemas.planted import PURPOSE, PlantedFacts, is_planted, planted_facts, sample_key
from schemas.storage import Store
from schemas.takedown import REMOVED_ID, STAGE, salted_digest, takedown_ancestry
from schemas.tokens import TRAIN, Dataset, Member
from train.data.document_index import read_table
from train.data.order import SampleOrder
from train.trace.consumed import read_spans
from train.trace.documents import origin_table

TRAINED, NOT_READ, REMOVED = "trained", "not read", "removed"
GROUPS = {
    TRAINED: "in the dataset, and read by the steps of the checkpoint",
    NOT_READ: "in the dataset, and read by no step of the checkpoint",
    REMOVED: "removed by a takedown",
}
ROWS_AT_ONCE = 4096
COLUMNS = ("doc_id", "token_offset", "num_tokens", "domain")


@dataclass(frozen=True)
class PlantedDocument:
    """A document with a planted identifier."""

    doc_id: bytes
    length: int
    """Length of the identifier [words]."""
    takedown: str | None = None
    """Id of the takedown that removed it; None = it is in the dataset."""


@dataclass
class PlantedGroup:
    """The documents of a group that are tested, and the number of all."""

    most: int
    """Maximum number of documents that are kept."""
    number: int = 0
    heap: list[tuple[bytes, PlantedDocument]] = field(default_factory=list)

    def add(self, rank: bytes, document: PlantedDocument) -> None:
        """Add a document; `rank` decides which of too many are kept, the smallest."""
        self.number += 1
        entry = (bytes(255 - byte for byte in rank), document)  # the largest rank is first in the heap
        if len(self.heap) < self.most:
            heapq.heappush(self.heap, entry)
        elif entry > self.heap[0]:
            heapq.heapreplace(self.heap, entry)

    @property
    def documents(self) -> list[PlantedDocument]:
        """The documents, by id."""
        return sorted((document for _, document in self.heap), key=lambda own: own.doc_id)


@dataclass(frozen=True)
class PlantedQuery:
    """Which documents are tested: those of a key, of some domains or ids (none: all)."""

    key: bytes
    most: int
    domains: frozenset[str] = frozenset()
    docs: frozenset[bytes] = frozenset()
    takedown: str | None = None
    """Id of the takedown whose removed documents are tested; None = all takedowns."""


def planting_members(dataset: Dataset, key: bytes) -> dict[int, tuple[PlantedFacts, Store, Manifest]]:
    """Return, by number of the member, what its table `clean` states, with the folder and manifest of that table.

    Members that planted with another key are left out. Raises ConfigError if the key is that of no member.
    """
    found: dict[int, tuple[PlantedFacts, Store, Manifest]] = {}
    others = 0
    for number, member in enumerate(dataset.members):
        origin = origin_table(member.folder, read_manifest(member.folder), "clean")
        facts = planted_facts(origin[1].content) if origin else None
        if facts is not None and origin is not None and facts.commitment == commitment(key, PURPOSE):
            found[number] = (facts, *origin)
        others += facts is not None
    if not found:
        what = "another key" if others else "no planted identifiers, or no table `clean` that states them"
        raise ConfigError(
            f"--key-file: expected the key of the identifiers in {dataset.folder.uri}, got {what}. Name the file of "
            "plant.key_file, and a run that planted with it."
        )
    return found


def find_planted(dataset: Dataset, order: SampleOrder | None, query: PlantedQuery) -> dict[str, PlantedGroup]:
    """Return the documents with identifiers, by group. `order`: that of the checkpoint's steps; None = no step yet.

    Raises ConfigError if the key is that of no member of the dataset.
    """
    facts = planting_members(dataset, query.key)
    groups = {name: PlantedGroup(query.most) for name in GROUPS}
    for own in _stored(dataset, order, {number: each[0] for number, each in facts.items()}, query):
        groups[own[0]].add(sample_key(query.key, own[1].doc_id), own[1])
    # A removed document has no domain any more, so it is none of those that the query names.
    for number, (own_facts, folder, manifest) in facts.items() if not query.domains else ():
        for removed in _removed(dataset.members[number], own_facts, (folder, manifest), query):
            groups[REMOVED].add(sample_key(query.key, removed.doc_id), removed)
    return groups


def _stored(
    dataset: Dataset, order: SampleOrder | None, facts: Mapping[int, PlantedFacts], query: PlantedQuery
) -> Iterator[tuple[str, PlantedDocument]]:
    """Yield group and document of every planted document that is in the dataset."""
    for stream in sorted(dataset.streams):
        source, _, split = stream.rpartition("/")
        begin = 0
        for number, shard in enumerate(dataset.streams[stream]):
            end = begin + shard.num_tokens
            own = facts.get(_member_of(dataset.members, stream, number))
            if own is not None:
                rows = read_table(dataset.folder, shard.docs_path, COLUMNS)
                read = np.zeros(rows.num_rows, np.int64)
                if order is not None and split == TRAIN and source in order.sources and end > begin:
                    first, size = (rows.column(name).to_numpy().astype(np.int64) for name in COLUMNS[1:3])
                    read = read_spans(order, source, begin, end).tokens_between(first, first + size)
                ids, domains = (rows.column(name).to_pylist() for name in ("doc_id", "domain"))
                for doc_id, domain, tokens in zip(ids, domains, read.tolist(), strict=True):
                    if (not query.domains or domain in query.domains) and _is_tested(doc_id, own, query):
                        yield (TRAINED if tokens else NOT_READ), PlantedDocument(doc_id, own.length)
            begin = end


def _member_of(members: Sequence[Member], stream: str, shard: int) -> int:
    """Return the number of the member that has a shard of a stream."""
    return next(number for number, member in enumerate(members) if shard in member.shards.get(stream, ()))


def _is_tested(doc_id: bytes, facts: PlantedFacts, query: PlantedQuery) -> bool:
    if doc_id == REMOVED_ID or (query.docs and doc_id not in query.docs):
        return False
    return is_planted(query.key, doc_id, facts.share)


def _removed(
    member: Member, facts: PlantedFacts, clean: tuple[Store, Manifest], query: PlantedQuery
) -> Iterator[PlantedDocument]:
    """Yield the planted documents that takedowns removed from the shards of a member, by its table `documents`."""
    certificates = takedown_ancestry(member.run, read_manifest(member.folder))
    wanted = [own for own in certificates if query.takedown in (None, own.id)]
    documents = origin_table(*clean, "documents") if wanted else None
    if documents is None:
        return
    digests = [(own, {each.document for each in own.documents if each.num_tokens}) for own in wanted]
    folder, manifest = documents
    for path in manifest.paths_of("part-"):
        with folder.open_input(path) as stream:
            for batch in read_batches(pq.ParquetFile(stream), "documents", ["doc_id", "drop_stage"], ROWS_AT_ONCE):
                gone = batch.filter(pc.equal(batch.column("drop_stage"), STAGE)).column("doc_id").to_pylist()
                for doc_id in (own for own in gone if _is_tested(own, facts, query)):
                    by = (own for own, known in digests if salted_digest(own.salt, "document", doc_id) in known)
                    if (certificate := next(by, None)) is not None:
                        yield PlantedDocument(doc_id, facts.length, certificate.id)
