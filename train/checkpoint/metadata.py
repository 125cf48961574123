"""The note of a checkpoint: which step of which run its state is, how it was computed, and what its files must hold.

It is written last, so a checkpoint exists when its note exists. Nothing random has a state here: masks come from a
counter hash and there is no dropout, so the generators of torch are neither stored nor set.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.ids import canonical_json, digest_of
from train.monitor.guard import GuardState

CHECKPOINTS = "train/checkpoints"
METADATA_NAME = "checkpoint.json"


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings")


class Identity(_Block):
    """What decides the weights at a given step; a run goes on from a checkpoint only if they agree."""

    dataset: str
    """Digest of the dataset: of its content, so shards may be renamed or moved."""
    tokenizer: str
    """Digest of the tokenizer contract, which says where separators go."""
    order: str
    """Digest of the order of the samples."""
    settings: dict[str, Any]
    """Every content setting, `shape.…`, `train.…` and so on, with the values the plan filled in."""
    skip_list: str
    """Digest of the skip list."""
    skip_length: int
    """Number of entries of the skip list, which may grow afterwards."""
    code_version: str
    """Version of the code that wrote the checkpoint; recorded, not compared."""

    @property
    def plan(self) -> str:
        """Digest of the settings."""
        return digest_of(self.settings)


class Layout(_Block):
    """How the steps were computed; a run resumed in an equal layout on CPUs equals an uninterrupted one bit for bit."""

    ranks: int
    """Number of ranks."""
    axes: dict[str, int]
    """Size of each axis of the mesh."""
    settings: dict[str, Any]
    """Every other setting of `[layout]` that is not content: data, micro_batch, schedule, compile and so on."""
    threads: int
    """CPU threads of a rank: the sums of the backward pass are split over them, which shows in the last bits."""
    device: str
    """Type of the devices."""
    kernels: str
    """What chooses the kernels: version of torch, and the instructions of the CPU or the name of the device."""

    def differences(self, found: "Layout") -> list[str]:
        """Everything in which another layout differs, as `name expected, found`, in fixed order."""
        pairs = _pairs(_flat(self), _flat(found))
        return [f"{name} {old}, found {new}" for name, (old, new) in pairs.items() if old != new]


class TrainerState(_Block):
    """What the loop has to know beside the tensors; every number comes back as it was, infinite ones included."""

    heldout: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss) of every evaluation, oldest first: plateau schedules look at them."""
    guard: GuardState = GuardState()
    """What the guard remembers: skipped steps, latest losses, rewinds, the best held-out loss."""
    loss_scale: float | None = None
    """fp16: factor of the loss; None = not scaled."""
    finite_steps: int = 0
    """fp16: finite steps in a row since that factor last changed."""


class StateFile(_Block):
    """A file of the state, as it was written."""

    size: int
    """Size [bytes]."""
    sha256: str
    """SHA-256 (hex) of the bytes that were handed to the filesystem."""


class CheckpointMetadata(_Block):
    """`checkpoint.json`."""

    step: int
    """Number of updates made."""
    identity: Identity
    """What the checkpoint belongs to."""
    layout: Layout
    """How it was computed."""
    progress: TrainerState = TrainerState()
    """Where the loop stood."""
    files: dict[str, StateFile] = {}
    """Every file of the state, by name."""

    @property
    def name(self) -> str:
        """The folder of the checkpoint, relative to the run."""
        return folder_name(self.step)

    @property
    def size(self) -> int:
        """Size of the state [bytes]."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """The file's content."""
        return canonical_json(json.loads(self.model_dump_json()))


def folder_name(step: int) -> str:
    """The folder of the checkpoint of a step, relative to the run."""
    return f"{CHECKPOINTS}/step-{step:06d}"


def parse_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """The note in a file. Raises ContractError that says what is wrong with it."""
    try:
        note = CheckpointMetadata.model_validate_json(data)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, found['loc'])) or 'JSON'}: {found['msg']}" for found in error.errors()]
        raise ContractError(
            f"{where}: expected the note of a checkpoint, got {'; '.join(problems[:5])}. It is damaged or of another "
            "version: remove its folder to go on from the checkpoint before."
        ) from error
    if not where.endswith(f"{note.name}/{METADATA_NAME}"):
        raise ContractError(
            f"{where}: expected the note of this folder, got one of step {note.step}. Name it so again."
        )
    return note


def check_identity(note: CheckpointMetadata, found: Identity) -> None:
    """Raises ContractError that names every difference between what a checkpoint belongs to and the run at hand."""
    expected = note.identity
    pairs = {name: (getattr(expected, name), getattr(found, name)) for name in ("dataset", "tokenizer", "order")}
    pairs |= dict(sorted(_pairs(expected.settings, found.settings).items()))
    wrong = [f"{name}: expected {old}, got {new}" for name, (old, new) in pairs.items() if old != new]
    if wrong:
        raise ContractError(
            f"{note.name}: the run is no longer the one this checkpoint belongs to\n  " + "\n  ".join(wrong) + "\n"
            f"undo the change, or remove {CHECKPOINTS} to train from the beginning"
        )


def _flat(layout: Layout) -> dict[str, Any]:
    rest = layout.model_dump(mode="json", include={"threads", "device", "kernels"})
    return {"ranks": layout.ranks, **layout.axes, **layout.settings, **rest}


def _pairs(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*expected, *sorted(found.keys() - expected.keys())]
    return {name: (expected.get(name), found.get(name)) for name in names}
