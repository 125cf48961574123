"""Where the dataset of a run comes from, and from which checkpoint it was decided to train on: certified takedowns.

A checkpoint belongs to a dataset by digest. It goes on with another one only where that one declares itself its
descendant by takedowns that kept every position, certified, and where the user has chosen the checkpoint to go on from.
"""

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.takedown import Certificate, takedown_ancestry
from schemas.tokens import Dataset

REPLAYS_NAME = "train/replays.json"
CLEAN = "clean"
"""The choice of the last checkpoint that has seen none of the removed documents."""


class Replay(BaseModel):
    """A decision to train again from a checkpoint on a dataset without some documents."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    at: str
    """When, ISO 8601, UTC."""
    from_step: int
    """Step of the checkpoint; 0 = from the beginning."""
    clean: bool
    """Whether that checkpoint has seen none of the removed documents."""
    before: str
    """Digest of the dataset that the run was trained on so far."""
    after: str
    """Digest of the dataset that it goes on with."""
    takedowns: list[str]
    """The takedowns between the two, newest first."""
    order: str
    """Digest of the order of the samples, the same on both."""
    set_aside: list[str]
    """Checkpoints that were left behind, by their folders relative to the run."""


def as_before(run: Store, dataset: Dataset, checkpoint: tuple[str, int], expected: str) -> str:
    """The digest of a dataset as a checkpoint has to see it: `expected`, its own, where a declared replay allows it.

    `checkpoint`: its folder and step. Raises ContractError, naming both datasets, if the dataset comes from the
    checkpoint's by takedowns and nobody has chosen to go on from this checkpoint.
    """
    (name, step), found = checkpoint, dataset.digest
    since = [] if expected == found else since_dataset(run, dataset, expected)
    if not since:
        return found
    if moved := [certificate.id for certificate in since if certificate.mode == "compact"]:
        raise ContractError(
            f"{name}: expected dataset {expected}, got {found}, in which takedown {moved[-1]} has moved positions "
            "(--compact), so no checkpoint of the old one can go on. Remove the checkpoints and plan again."
        )
    chosen = [one for one in read_replays(run) if one.after == found]
    if chosen and chosen[-1].from_step == step:
        return expected
    ids = ", ".join(certificate.id for certificate in since)
    raise ContractError(
        f"{name}: expected dataset {expected}, got {found}, from which takedown {ids} has removed documents. Choose "
        f"where to go on: `penstock train {run.uri} --replay-from {CLEAN}` for the last checkpoint that saw none of "
        f"them, or --replay-from {step} to keep what this one has learnt."
    )


def since_dataset(run: Store, dataset: Dataset, expected: str) -> list[Certificate]:
    """The certified takedowns between an earlier dataset and this one, newest first; empty if it does not come of it.

    Raises ContractError where a manifest and a certificate do not agree.
    """
    line = takedown_ancestry(run, dataset.manifest)
    befores = [certificate.tables["tokens"].before for certificate in line]
    return line[: befores.index(expected) + 1] if expected in befores else []


def read_replays(run: Store) -> list[Replay]:
    """Every replay of a run, oldest first."""
    if not run.exists(REPLAYS_NAME):
        return []
    try:
        return [Replay.model_validate(one) for one in run.read_json(REPLAYS_NAME)]
    except ValidationError as error:
        raise ContractError(f"{run.uri}/{REPLAYS_NAME}: expected replays, got {error}. Restore it.") from error
