"""The Merkle tree of a dataset version: one root for all documents, with short proofs of presence and of absence.

An id is a path from the root: 0 is left, 1 is right. A part without a document is 32 zero bytes,
a part with one document is that document's leaf, and any other part is a node with two children. So the root depends
only on the set of leaves. Each id has one place, which holds its leaf or shows that it is absent: one root cannot prove
both. Ids are digests, so a proof of n documents has about log2(n) hashes.

Leaves and nodes are hashed with distinct first bytes, so that neither passes for the other. Source: RFC 6962, section
2.1; the tree by the bits of a key replaces its list.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from schemas.ids import DOC_ID_BYTES

EMPTY = bytes(32)
"""The hash of a part of the tree without documents."""
MAX_DEPTH = 8 * DOC_ID_BYTES


class Leaf(NamedTuple):
    """A document of a dataset version."""

    doc_id: bytes
    """Id of the document [16 bytes]."""
    values: tuple[bytes, ...]
    """SHA-256 of the stream and the tokens of each of its places in the dataset, sorted."""

    @property
    def digest(self) -> bytes:
        """The hash of the leaf [32 bytes]."""
        return hashlib.sha256(b"\0" + self.doc_id + b"".join(self.values)).digest()

    def to_json(self) -> list[str]:
        """Return the id and the values in hex digits."""
        return [self.doc_id.hex(), *(value.hex() for value in self.values)]


class Subtree(NamedTuple):
    """The top of a part of the tree."""

    digest: bytes
    leaf: Leaf | None = None
    """The only document of this part; None = it has no document, or several."""

    def to_json(self) -> str | list[str]:
        """Return the hash in hex digits, or the only document of this part."""
        return self.leaf.to_json() if self.leaf else self.digest.hex()

    @classmethod
    def from_json(cls, value: Any) -> "Subtree":
        """Return the top that `to_json` returned. Raises ValueError or TypeError if the value has another form."""
        digests = [bytes.fromhex(text) for text in ([value] if isinstance(value, str) else value)]
        first, *others = (len(digest) for digest in digests)
        if isinstance(value, str) and first == len(EMPTY):
            return cls(digests[0])
        if isinstance(value, str) or first != DOC_ID_BYTES or {*others} != {len(EMPTY)}:
            raise ValueError(f"neither a hash nor a document: {value!r:.80}")
        leaf = Leaf(digests[0], tuple(digests[1:]))
        return cls(leaf.digest, leaf)


@dataclass
class Proof:
    """The proof that a document is, or is not, in the version with some root."""

    doc_id: bytes
    leaf: Leaf | None = None
    """The document at the end of the path: this one, or another one in its place; None = the place is empty."""
    path: list[bytes] = field(default_factory=list)
    """The hashes beside the path, from the end to the root."""

    @property
    def is_present(self) -> bool:
        """True if the proof is that the document is in the version."""
        return self.leaf is not None and self.leaf.doc_id == self.doc_id

    def to_json(self) -> dict[str, object]:
        """Return the proof as the JSON object that `check_proof` reads, in hex digits and from the root to the end."""
        leaf = self.leaf.to_json() if self.leaf else None
        return {"doc_id": self.doc_id.hex(), "leaf": leaf, "path": [digest.hex() for digest in reversed(self.path)]}


PartOfTree = Callable[[int, Sequence[Proof]], Subtree]
"""Returns the part of the tree whose ids begin with the bits of a number, and extends the proofs that lead there."""


def build_tree(
    bucket: Callable[[int], Sequence[Leaf]], bucket_bits: int, documents: Sequence[bytes] = ()
) -> tuple[bytes, list[Proof]]:
    """Return the root of a tree, and a proof for each of `documents`, which may be in the tree or not.

    `bucket(i)` returns the leaves whose ids begin with the `bucket_bits` bits of i, sorted by id; it is called once for
    each i, in order, so that one bucket is in memory. The root does not depend on `bucket_bits`.
    """
    proofs = empty_proofs(documents)
    top = join_parts(lambda prefix, own: join_leaves(bucket(prefix), bucket_bits, own), bucket_bits, proofs)
    return top.digest, proofs


def empty_proofs(documents: Iterable[bytes]) -> list[Proof]:
    """Return a proof without a path for each of `documents`, sorted by id."""
    return [Proof(own) for own in sorted({*documents})]


def join_parts(part: PartOfTree, bits: int, proofs: Sequence[Proof] = (), place: tuple[int, int] = (0, 0)) -> Subtree:
    """Return the part of the tree at a place (depth, first bits of the ids), and extend the proofs that lead there.

    It is joined from the parts at depth `bits`. `part` is called once for each of them, in order.
    """
    depth, prefix = place
    if depth == bits:
        return part(prefix, proofs)
    cut = _cut([proof.doc_id for proof in proofs], depth)
    sides = (proofs[:cut], proofs[cut:])
    nodes = [join_parts(part, bits, own, (depth + 1, 2 * prefix + side)) for side, own in enumerate(sides)]
    return _join((nodes[0], nodes[1]), sides)


def join_leaves(leaves: Sequence[Leaf], depth: int, proofs: Sequence[Proof] = ()) -> Subtree:
    """Return the part of the tree with these leaves, which share the first `depth` bits, and extend the proofs.

    The leaves are sorted by id.
    """
    if len(leaves) < 2:
        only = leaves[0] if leaves else None
        for proof in proofs:
            proof.leaf = only
        return Subtree(only.digest, only) if only else Subtree(EMPTY)
    cut = _cut([leaf.doc_id for leaf in leaves], depth)
    middle = _cut([proof.doc_id for proof in proofs], depth)
    sides = (proofs[:middle], proofs[middle:])
    nodes = (join_leaves(leaves[:cut], depth + 1, sides[0]), join_leaves(leaves[cut:], depth + 1, sides[1]))
    return _join(nodes, sides)


def _join(nodes: tuple[Subtree, Subtree], sides: tuple[Sequence[Proof], Sequence[Proof]]) -> Subtree:
    """Return the part with these two halves, and extend the proofs that lead to each half."""
    left, right = nodes
    for half, other in ((left, right), (right, left)):
        if other.digest == EMPTY and (half.leaf or half.digest == EMPTY):
            for proof in (*sides[0], *sides[1]):
                proof.leaf = half.leaf
            return half
    for proofs, other in ((sides[0], right), (sides[1], left)):
        for proof in proofs:
            proof.path.append(other.digest)
    return Subtree(hashlib.sha256(b"\1" + left.digest + right.digest).digest())


def _cut(ids: Sequence[bytes], depth: int) -> int:
    """Return the number of ids whose bit at `depth` is 0; the ids are sorted and share the bits before it."""
    byte, mask = depth // 8, 128 >> depth % 8
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if ids[middle][byte] & mask:
            high = middle
        else:
            low = middle + 1
    return low


def merge_places(places: Sequence[tuple[bytes, bytes]]) -> Iterator[Leaf]:
    """Yield one leaf for each document of the sorted (id, value) pairs of its places."""
    first = 0
    for row in range(1, len(places) + 1):
        if row == len(places) or places[row][0] != places[first][0]:
            yield Leaf(places[first][0], tuple(value for _, value in places[first:row]))
            first = row


def prefix_of(doc_id: bytes, bits: int) -> int:
    """Return the first `bits` bits of an id as a number."""
    return int.from_bytes(doc_id, "big") >> MAX_DEPTH - bits


def value_of(stream: str, tokens: bytes | memoryview) -> bytes:
    """Return the value of a document's leaf: SHA-256 of the name of its stream, a zero byte, and its tokens."""
    digest = hashlib.sha256(f"{stream}\0".encode())
    digest.update(tokens)
    return digest.digest()
