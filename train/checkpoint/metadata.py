"""Checkpoint metadata: the step, the identity of the run, its layout, and the size and digest of each state file.

It is written last, so a checkpoint exists when its metadata exists. No random state is needed: masks come from a
counter-based hash and there is no dropout, so torch's generators are neither stored nor set.
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


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings")


class Identity(_FrozenModel):
    """Everything that decides the weights at a given step; a run resumes from a checkpoint only if it agrees."""

    dataset: str
    """Digest of the dataset: of its content, so shards may be renamed or moved."""
    tokenizer: str
    """Digest of the tokenizer contract, which defines where separators go."""
    order: str
    """Digest of the order of the samples."""
    settings: dict[str, Any]
    """Every setting that decides content, `shape.…`, `train.…` and so on, with the values that the plan filled in."""
    skip_list: str
    """Digest of the skip list."""
    skip_length: int
    """Number of entries of the skip list, which may grow later."""
    code_version: str
    """Version of the code that wrote the checkpoint; recorded, not compared."""

    @property
    def plan(self) -> str:
        """Return the digest of the settings."""
        return digest_of(self.settings)


class Layout(_FrozenModel):
    """The layout of a run; a run resumed in an equal layout on CPUs equals an uninterrupted run bit for bit."""

    ranks: int
    """Number of ranks."""
    axes: dict[str, int]
    """Size of each axis of the mesh."""
    settings: dict[str, Any]
    """Every other setting of `[layout]` that does not decide content: data, micro_batch, schedule, compile, …"""
    threads: int
    """CPU threads of a rank; the backward pass splits sums over them, which changes the last bits."""
    device: str
    """Type of the devices."""
    kernels: str
    """What selects the kernels: torch version, and the CPU's instruction set or the name of the GPU."""

    def differences(self, other: "Layout") -> list[str]:
        """Return the differences of another layout, as `name old, now new`, in fixed order."""
        pairs = _pairs(_flat(self), _flat(other))
        return [f"{name} {old}, now {new}" for name, (old, new) in pairs.items() if old != new]


class TrainerState(_FrozenModel):
    """The trainer state beside the tensors; every number is restored exactly, infinite values included."""

    heldout: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss) of every evaluation, oldest first, for plateau schedules."""
    guard: GuardState = GuardState()
    """State of the guard: skipped steps, latest losses, rewinds, the best held-out loss."""
    loss_scale: float | None = None
    """fp16: factor of the loss; None = not scaled."""
    finite_steps: int = 0
    """fp16: consecutive finite steps since that factor last changed."""


class StateFile(_FrozenModel):
    """Size and digest of a state file as it was written."""

    size: int
    """Size [bytes]."""
    sha256: str
    """SHA-256 (hex) of the bytes passed to the filesystem."""


class CheckpointMetadata(_FrozenModel):
    """The content of `checkpoint.json`."""

    step: int
    """Number of optimizer steps made."""
    identity: Identity
    """Identity of the run that the checkpoint belongs to."""
    layout: Layout
    """Layout in which it was computed."""
    progress: TrainerState = TrainerState()
    """Trainer state at that step."""
    files: dict[str, StateFile] = {}
    """Every state file, by name."""

    @property
    def name(self) -> str:
        """Return the folder of the checkpoint, relative to the run."""
        return folder_name(self.step)

    @property
    def size(self) -> int:
        """Return the size of the state [bytes]."""
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return canonical_json(json.loads(self.model_dump_json()))


def folder_name(step: int) -> str:
    """Return the folder of the checkpoint of a step, relative to the run."""
    return f"{CHECKPOINTS}/step-{step:06d}"


def parse_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Parse checkpoint metadata. Raises ContractError that names each invalid field, or the wrong step."""
    try:
        checkpoint = CheckpointMetadata.model_validate_json(data)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or 'JSON'}: {item['msg']}" for item in error.errors()]
        raise ContractError(
            f"{where}: expected checkpoint metadata, got {'; '.join(problems[:5])}. The file is damaged or of another "
            "version: remove its folder to resume from the previous checkpoint."
        ) from error
    if not where.endswith(f"{checkpoint.name}/{METADATA_NAME}"):
        raise ContractError(
            f"{where}: expected the metadata of this folder, got that of step {checkpoint.step}. Rename the folder to "
            f"{checkpoint.name}."
        )
    return checkpoint


def check_identity(checkpoint: CheckpointMetadata, identity: Identity) -> None:
    """Check that a checkpoint belongs to the current run. Raises ContractError that names every difference."""
    expected = checkpoint.identity
    pairs = {name: (getattr(expected, name), getattr(identity, name)) for name in ("dataset", "tokenizer", "order")}
    pairs |= dict(sorted(_pairs(expected.settings, identity.settings).items()))
    wrong = [f"{name}: expected {old}, got {new}" for name, (old, new) in pairs.items() if old != new]
    if wrong:
        raise ContractError(
            f"{checkpoint.name}: the run is no longer the one this checkpoint belongs to\n  "
            + "\n  ".join(wrong)
            + "\n"
            f"Undo the change, or remove {CHECKPOINTS} to train from the beginning."
        )


def _flat(layout: Layout) -> dict[str, Any]:
    rest = layout.model_dump(mode="json", include={"threads", "device", "kernels"})
    return {"ranks": layout.ranks, **layout.axes, **layout.settings, **rest}


def _pairs(expected: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*expected, *sorted(given.keys() - expected.keys())]
    return {name: (expected.get(name), given.get(name)) for name in names}
