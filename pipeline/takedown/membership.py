"""The proofs of a takedown: each removed document was in the dataset version before, and is not in the one after.

They are files beside the certificate, which has the two roots only, because a proof names its document and neighbours.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.membership.check_proof import check_proof
from pipeline.membership.dataset import prove_documents, write_leaves
from pipeline.membership.index import MembershipIndex, open_index
from pipeline.membership.tree import Proof
from pipeline.takedown.check_result import CheckResult
from schemas.ids import canonical_json
from schemas.manifest import TableVersion
from schemas.storage import Store
from schemas.takedown import Certificate, MembershipRoots, proofs_name, salted_digest
from schemas.tokens import MEMBERSHIP, Dataset, read_shards

WHEN = ("before", "after")


@dataclass(frozen=True)
class RemovalProofs:
    """The proofs of the removed documents against the roots before and after."""

    before: str
    """Root (hex) of the version before."""
    after: str
    """Root (hex) of the version after."""
    proofs: tuple[list[Proof], list[Proof]]
    """Proofs against the root before, and against the root after."""

    @property
    def roots(self) -> MembershipRoots:
        """The two roots, for the certificate."""
        return MembershipRoots(before=self.before, after=self.after)


def prove_removal(
    dataset: Dataset, documents: frozenset[bytes], indexes: tuple[MembershipIndex, MembershipIndex] | None
) -> RemovalProofs:
    """Return the proofs of documents against the roots of a dataset with them and without them.

    `indexes` are those before and after; None = the dataset has no index by id, so every shard is read.
    """
    if indexes is not None:
        old, new = indexes
        return RemovalProofs(old.root, new.root, (old.prove(documents), new.prove(documents)))
    with tempfile.TemporaryDirectory() as folder:
        shards = [shard for own in dataset.streams.values() for shard in own]
        leaves = write_leaves(dataset.folder, shards, Path(folder))
        (before, with_them), (after, without) = leaves.prove(documents), leaves.prove(documents, without=documents)
    return RemovalProofs(before, after, (with_them, without))


def write_proofs(run: Store, identifier: str, membership: RemovalProofs) -> None:
    """Write the proofs of a takedown: a file for each root, with a JSON object in each line."""
    for when, proofs in zip(WHEN, membership.proofs, strict=True):
        run.write_atomic(proofs_name(identifier, when), encode_proofs(proofs))


def encode_proofs(proofs: Sequence[Proof]) -> bytes:
    """Return proofs as JSON lines."""
    return b"".join(canonical_json(proof.to_json()) + b"\n" for proof in proofs)


def check_membership(run: Store, table: TableVersion, certificate: Certificate, checked: CheckResult) -> None:
    """Check the index by id of the dataset, and the roots and proofs of a certificate that has them.

    The root is computed again from all shards and from the index. The root after is compared with it unless a later
    takedown has replaced that version. A file of proofs that this copy of the run lacks is noted.
    """
    roots, change = certificate.membership, certificate.tables.get("tokens")
    index = open_index(table.folder, table.manifest, checked=False)
    after = roots.after if roots and change and table.manifest.digest == change.after else None
    if index is not None or after is not None:
        actual = prove_documents(table.folder, read_shards(table.folder, table.manifest)[1], ())[0]
        stated = table.manifest.content.figures.get(MEMBERSHIP)
        if not stated == actual == (after or actual):
            checked.problems.append(
                f"tokens: expected Merkle root {after or stated}, got {stated} in its manifest and {actual} from its "
                "shards. Restore them from a backup."
            )
    if index is not None:
        index.check()
    if roots is None:
        return
    for when, root in zip(WHEN, (roots.before, roots.after), strict=True):
        name = proofs_name(certificate.id, when)
        if run.exists(name):
            _check_proofs(name, (run.read_bytes(name), root, when), certificate, checked)
        else:
            checked.notes.append(f"{name} is absent, so the proofs in it were not checked")


def _check_proofs(name: str, file: tuple[bytes, str, str], certificate: Certificate, checked: CheckResult) -> None:
    """Check every proof of a file (content, root, when), and that there is one for each removed document."""
    content, root, when = file
    in_dataset = {own.document for own in certificate.documents if own.num_tokens}
    left = {own.document for own in certificate.documents}
    try:
        for line in content.splitlines():
            proof = json.loads(line)
            own = salted_digest(certificate.salt, "document", bytes.fromhex(proof["doc_id"]))
            if check_proof(proof, root, proof["doc_id"]) != (when == "before" and own in in_dataset):
                raise ValueError("a document in the wrong version")
            left.remove(own)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        checked.problems.append(f"{name}: expected valid proofs against root {root}, got {error!r:.80}. Restore it.")
    else:
        if left:
            checked.problems.append(f"{name}: expected a proof for each document, got {len(left)} less. Restore it.")
