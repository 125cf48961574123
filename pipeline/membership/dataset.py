"""The root and the proofs of a dataset version, from its index by id, or from its shards if it has no index.

The leaf of a document has the SHA-256 of its stream and its tokens, and not its position: tombstones and compaction of
other documents leave it as it is. Leaves from shards are sorted into buckets by the first bits of their ids, in files
of a temporary folder with 48 bytes a document. One bucket is in memory at a time.
"""

import hashlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.membership.index import open_index
from pipeline.membership.tree import Leaf, Proof, build_tree, merge_places, value_of
from pipeline.takedown.shards import token_batches
from schemas.errors import ContractError
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import TableVersion, read_manifest
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import MEMBERSHIP, Dataset, Shard, read_shards

DOCUMENTS_PER_BUCKET = 1 << 16
MAX_BUCKET_BITS = 12
"""Maximum number of bits by which leaves are sorted into buckets; 2^12 files are appended for each shard."""
PLACE_BYTES = DOC_ID_BYTES + hashlib.sha256().digest_size


@dataclass(frozen=True)
class MembershipLeaves:
    """The leaves of a dataset version, in files of a temporary folder that the caller deletes."""

    folder: Path
    bucket_bits: int

    def prove(self, documents: Collection[bytes], without: Collection[bytes] = ()) -> tuple[str, list[Proof]]:
        """Return the root (hex) and a proof for each of `documents`, sorted by id.

        The tree is that of the version without the documents `without`, as a takedown leaves it.
        """

        def bucket(prefix: int) -> Sequence[Leaf]:
            return [leaf for leaf in self._read(prefix) if leaf.doc_id not in without]

        root, proofs = build_tree(bucket, self.bucket_bits, [*documents])
        return root.hex(), proofs

    def _read(self, prefix: int) -> list[Leaf]:
        path = self.folder / str(prefix)
        stored = path.read_bytes() if path.exists() else b""
        rows = sorted(stored[first : first + PLACE_BYTES] for first in range(0, len(stored), PLACE_BYTES))
        return [*merge_places([(row[:DOC_ID_BYTES], row[DOC_ID_BYTES:]) for row in rows])]


def write_leaves(stored: Store, shards: Sequence[Shard], folder: Path) -> MembershipLeaves:
    """Read all shards of a dataset in `stored` once, write their leaves to files of an empty folder, and return them.

    Raises ContractError if a shard differs from the manifest.
    """
    num_buckets = sum(shard.num_documents for shard in shards) // DOCUMENTS_PER_BUCKET
    leaves = MembershipLeaves(folder, min(num_buckets.bit_length(), MAX_BUCKET_BITS))
    for shard in shards:
        buckets: dict[int, bytearray] = {}
        for place in places_of(stored, shard):
            prefix = int.from_bytes(place[:2], "big") >> 16 - leaves.bucket_bits
            buckets.setdefault(prefix, bytearray()).extend(place)
        for prefix, rows in buckets.items():
            with (folder / str(prefix)).open("ab") as file:
                file.write(rows)
    return leaves


def places_of(folder: Store, shard: Shard) -> list[bytes]:
    """Return the id and the value of each document of a shard [48 bytes each]; removed documents have none."""
    places = list[bytes]()
    for ids, tokens, lengths in token_batches(folder, shard.path):
        data, width, first = memoryview(tokens.data).cast("B"), tokens.itemsize, 0
        for own, length in zip(ids.to_pylist(), lengths.tolist(), strict=True):
            if own != REMOVED_ID:
                places.append(own + value_of(shard.stream, data[first * width : (first + length) * width]))
            first += length
    return places


def prove_documents(
    stored: Store, streams: Mapping[str, Sequence[Shard]], documents: Collection[bytes]
) -> tuple[str, list[Proof]]:
    """Return the root (hex) of a dataset from its shards, and the proof that each document is, or is not, in it, by id.

    `stored` is the folder of the version, `streams` has its shards. All of them are read. Raises ContractError if one
    differs from the manifest.
    """
    with tempfile.TemporaryDirectory() as folder:
        return write_leaves(stored, [shard for own in streams.values() for shard in own], Path(folder)).prove(documents)


@dataclass(frozen=True)
class DatasetProofs:
    """The proofs of some documents against the root of one dataset version, which is no union."""

    digest: str
    """Digest of the dataset."""
    root: str
    """Its root (hex)."""
    proofs: list[Proof]
    """A proof for each document, sorted by id."""
    has_index: bool
    """False = an earlier version of penstock wrote the dataset, so all of its shards were read."""


def prove_in(table: TableVersion, documents: Collection[bytes]) -> DatasetProofs:
    """Return the proof that each document is, or is not, in a dataset that is no union.

    Raises ContractError if a file that is read, or the root in the manifest, differs from the others.
    """
    folder, manifest = table.folder, table.manifest
    index = open_index(folder, manifest)
    if index is not None:
        return DatasetProofs(manifest.digest, index.root, index.prove(documents), has_index=True)
    root, proofs = prove_documents(folder, read_shards(folder, manifest)[1], documents)
    stated = manifest.content.figures.get(MEMBERSHIP, root)
    if stated != root:
        raise ContractError(
            f"{folder.uri}: expected Merkle root {str(stated)[:64]!r}, as in its manifest, got {root} from its shards. "
            "Restore the manifest from a backup."
        )
    return DatasetProofs(manifest.digest, root, proofs, has_index=False)


def tables_of(dataset: Dataset) -> list[TableVersion]:
    """Return the versions of `tokens` that a dataset has documents of: the members of a union, or itself."""
    return [TableVersion(member.folder, read_manifest(member.folder)) for member in dataset.members]


def check_index(table: TableVersion) -> bool:
    """Compare the index by id of a dataset with its shards; return False if it has none. All of its shards are read.

    Raises ContractError if they differ.
    """
    index = open_index(table.folder, table.manifest)
    if index is None:
        return False
    index.check()
    root = prove_documents(table.folder, read_shards(table.folder, table.manifest)[1], ())[0]
    if root != index.root:
        raise ContractError(
            f"{table.folder.uri}: expected Merkle root {index.root} of its index by id, got {root} from its shards. "
            "Restore the dataset from a backup."
        )
    return True
