"""The root and the proofs of a dataset version, computed from the shards that its manifest lists.

The leaves are sorted into buckets by the first bits of their ids, in files of a temporary folder with 48 bytes a
document. One bucket is in memory at a time. The leaf of a document has the SHA-256 of its stream and its tokens, and
not its position: tombstones and compaction of other documents leave it as it is.
"""

import hashlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.membership.tree import Leaf, Proof, build_tree, merge_places
from pipeline.takedown.shards import token_batches
from schemas.ids import DOC_ID_BYTES
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import Shard

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
    stream, places = hashlib.sha256(f"{shard.stream}\0".encode()), list[bytes]()
    for ids, tokens, lengths in token_batches(folder, shard.path):
        data, width, first = memoryview(tokens.data).cast("B"), tokens.itemsize, 0
        for own, length in zip(ids.to_pylist(), lengths.tolist(), strict=True):
            if own != REMOVED_ID:
                value = stream.copy()
                value.update(data[first * width : (first + length) * width])
                places.append(own + value.digest())
            first += length
    return places


def prove_documents(
    stored: Store, streams: Mapping[str, Sequence[Shard]], documents: Collection[bytes]
) -> tuple[str, list[Proof]]:
    """Return the root (hex) of a dataset version, and the proof that each document is, or is not, in it, by id.

    `stored` is the folder of the version, `streams` has its shards. Raises ContractError if one differs from the
    manifest.
    """
    with tempfile.TemporaryDirectory() as folder:
        return write_leaves(stored, [shard for own in streams.values() for shard in own], Path(folder)).prove(documents)
