"""The history of a run's dataset: certified takedowns, and the replays of training that the user chose after them.

A checkpoint names its dataset by digest. Training resumes from it on another dataset only if that dataset comes from
the checkpoint's by certified takedowns that kept all token positions, and if the user chose this checkpoint for a
replay.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from shlex import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.takedown import Certificate, takedown_ancestry
from schemas.tokens import Dataset

REPLAYS_NAME = "train/replays.json"
CLEAN = "clean"
"""The value of --replay-from for the last checkpoint that saw none of the removed documents."""


class Replay(BaseModel):
    """A decision to train again from a checkpoint on a dataset without some documents."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    at: str
    """Time of the decision, ISO 8601, UTC."""
    from_step: int
    """Step of the checkpoint; 0 = from the beginning."""
    clean: bool
    """True if the checkpoint was trained on no document that a takedown has removed, even before an earlier replay."""
    before: str
    """Digest of the dataset that the run was trained on so far."""
    after: str
    """Digest of the dataset on which training resumes."""
    takedowns: list[str]
    """Ids of the takedowns between the two datasets, newest first."""
    order: str
    """Digest of the order of the samples, the same on both datasets."""
    set_aside: list[str]
    """Folders of the checkpoints that were set aside, relative to the run."""
    unknown_before: bool = False
    """True if it is not known whether the weights that the run began from had read a removed document."""


def comparable_digest(run: Store, dataset: Dataset, checkpoint: tuple[str, int], expected: str) -> str:
    """Return the dataset digest that a checkpoint must have, so that the run may resume from the checkpoint.

    `checkpoint`: its folder and step; `expected`: the digest stored in it. The result is `expected` if the user
    chose this checkpoint for a replay on the dataset, else `dataset.digest`. Raises ContractError if takedowns made the
    dataset from the checkpoint's dataset, and no such replay was chosen or tokens have moved.
    """
    (name, step), digest = checkpoint, dataset.digest
    since = [] if expected == digest else takedowns_since(dataset, expected)
    if not since:
        return digest
    if moved := [certificate.id for certificate in since if certificate.mode == "compact"]:
        raise ContractError(
            f"{name}: expected dataset {expected}, got {digest}, in which takedown {moved[-1]} has moved positions of "
            "tokens (--compact), so no earlier checkpoint can be resumed. Remove the folder train/checkpoints and run "
            "`penstock plan` again."
        )
    chosen = [replay for replay in read_replays(run) if replay.after == digest]
    if chosen and chosen[-1].from_step == step:
        return expected
    ids = ", ".join(certificate.id for certificate in since)
    raise ContractError(
        f"{name}: expected dataset {expected}, got {digest}, from which takedown {ids} has removed documents. Choose "
        f"where to resume: `penstock train {quote(run.uri)} --replay-from {CLEAN}` for the last checkpoint that saw "
        f"none of them, or --replay-from {step} to keep this checkpoint."
    )


def _run_of(dataset: Dataset) -> Store:
    """Return the run folder that holds a dataset, with the certificates of its takedowns; a run may train elsewhere."""
    return dataset.folder.child("../..")


def takedowns_since(dataset: Dataset, expected: str) -> list[Certificate]:
    """Return the certified takedowns that led from an earlier dataset to this one, newest first; empty if none did.

    `expected`: digest of the earlier dataset. Raises ContractError if a manifest and a certificate disagree.
    """
    line = takedown_ancestry(_run_of(dataset), dataset.manifest)
    befores = [certificate.tables["tokens"].before for certificate in line]
    return line[: befores.index(expected) + 1] if expected in befores else []


def takedowns_at_same_positions(dataset: Dataset) -> list[Certificate]:
    """Return the takedowns that led to a dataset without moving any token, newest first."""
    certificates = []
    for certificate in takedown_ancestry(_run_of(dataset), dataset.manifest):
        if certificate.mode == "compact":
            break
        certificates.append(certificate)
    return certificates


def digests_at_same_positions(dataset: Dataset) -> set[str]:
    """Return the digests of a dataset and of the earlier versions of it that have the same token positions."""
    earlier = takedowns_at_same_positions(dataset)
    return {dataset.digest, *(certificate.tables["tokens"].before for certificate in earlier)}


def takedowns_seen(
    checkpoint: tuple[int, str, str], takedowns: Sequence[Certificate], replays: Sequence[Replay]
) -> list[Certificate]:
    """Return the takedowns, newest first, whose removed documents a checkpoint was trained on.

    `checkpoint`: its step, the digest of its dataset, and that of the weights that its training began from (empty =
    random weights). `takedowns`: those that led to the current dataset, newest first. A replay from a checkpoint that
    had seen documents passes this on to all later checkpoints, and so do weights that training began from.
    """
    step, dataset, began_from = checkpoint
    trained = _datasets_of_steps(step, dataset, replays)
    versions = [certificate.tables["tokens"].before for certificate in takedowns]
    seen = []
    for number, certificate in enumerate(takedowns):
        with_documents = versions[number:]  # the version before this takedown, and all older ones
        parts = [part for part, digest in trained if digest in with_documents]
        own = any(used in part for used in certificate.effects.steps for part in parts)
        if own or saw_before(began_from, certificate):
            seen.append(certificate)
    return seen


def saw_before(weights: str, certificate: Certificate) -> bool | None:
    """Return True if the weights that a training began from had read documents of a takedown; None = not known.

    `weights`: their digest; empty = random weights.
    """
    if not weights:
        return False
    return certificate.effects.saw_before if certificate.effects.began_from == weights else None


def _datasets_of_steps(last: int, digest: str, replays: Sequence[Replay]) -> list[tuple[range, str]]:
    """Return (steps, digest of the dataset they were trained on) for all steps of a checkpoint, oldest first.

    `last`: step of the checkpoint; `digest`: that of its dataset.
    """
    begins: list[tuple[int, str]] = []
    """(number of steps before, dataset) of each part of the training."""
    for replay in replays:
        if not begins or begins[-1][1] not in (replay.before, replay.after):
            begins = [(0, replay.before)]  # the training before this replay began anew, from step 0
        begins = [part for part in begins if part[0] < replay.from_step]
        begins.append((replay.from_step, replay.after))
    begins = [part for part in begins if part[0] < last] or begins[:1]
    if not begins or begins[-1][1] != digest:
        begins = [(0, digest)]  # no replay led to this checkpoint
    ends = [first for first, _ in begins[1:]] + [last]
    return [(range(first + 1, end + 1), own) for (first, own), end in zip(begins, ends, strict=True)]


def write_replays(run: Store, replays: Sequence[Replay]) -> None:
    """Store the replays of a run."""
    run.write_atomic(REPLAYS_NAME, canonical_json([replay.model_dump(mode="json") for replay in replays]))


def now() -> str:
    """Return the current time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_replays(run: Store) -> list[Replay]:
    """Return every replay of a run, oldest first."""
    if not run.exists(REPLAYS_NAME):
        return []
    try:
        return [Replay.model_validate(entry) for entry in run.read_json(REPLAYS_NAME)]
    except ValidationError as error:
        raise ContractError(
            f"{run.uri}/{REPLAYS_NAME}: expected a list of replays, got one that is not valid ({error}). "
            "Restore the file from a backup."
        ) from error
