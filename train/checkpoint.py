"""Checkpoints: sharded weights and optimiser state, and a note, written last, that says what they belong to.

A checkpoint exists when its note exists; a folder without one is what an interrupted save left, and is removed. The
state is a flat mapping of names to tensors, so it can be read at any number of ranks, or in part.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, digest_of
from schemas.storage import Store
from train.ranks import Ranks

CHECKPOINTS = "train/checkpoints"
NOTE_NAME = "checkpoint.json"


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Identity(_Block):
    """What decides the weights at a given step; a run goes on from a checkpoint only if they agree."""

    dataset: str
    """Digest of the dataset."""
    tokenizer: str
    """Digest of the tokenizer contract."""
    order: str
    """Digest of the order of the samples."""
    settings: dict[str, Any]
    """Every content setting, `shape.…` and `train.…`, with the values the plan filled in."""
    skip_list: str
    """Digest of the skip list."""
    skip_length: int
    """Number of entries of the skip list, which may grow afterwards."""

    @property
    def plan(self) -> str:
        """Digest of the settings."""
        return digest_of(self.settings)


class Layout(_Block):
    """How the steps were computed; on CPUs a run resumed in the same layout equals an uninterrupted one bit for bit."""

    ranks: int
    """Number of ranks."""
    micro_batch: int
    """Most sequences that go through the model at once."""
    threads: int
    """CPU threads of a rank: the sums of the backward pass are split over them, which shows in the last bits."""
    device: str
    """Type of the devices."""


class Note(_Block):
    """`checkpoint.json`."""

    step: int
    """Number of updates made."""
    identity: Identity
    """What the checkpoint belongs to."""
    layout: Layout
    """How it was computed."""
    files: dict[str, int]
    """Size of every file of the state [bytes], by name."""

    @property
    def name(self) -> str:
        """The folder of the checkpoint, relative to the run."""
        return f"{CHECKPOINTS}/step-{self.step:06d}"


def training_state(model: nn.Module, optimizer: torch.optim.AdamW | None) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, the very ones in use: saved from and read into in place."""
    state: dict[str, Tensor] = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return state


def write_checkpoint(run: Store, note: Note, state: dict[str, Tensor], ranks: Ranks) -> Note:
    """Write a checkpoint, its note last; returns the note with its files. Raises ContractError if it cannot be."""
    folder = local_path(run, note.name)
    ranks.on_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    try:
        save(state, checkpoint_id=str(folder), process_group=ranks.control)
    except CheckpointException as error:
        reasons = "; ".join(str(failure[0]) for failure in error.failures.values())
        ranks.refuse(_unwritten(folder, reasons))
    return ranks.on_first(lambda: _commit(run, note, folder))


def _commit(run: Store, note: Note, folder: Path) -> Note:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    note = note.model_copy(update={"files": files})
    try:
        run.write_atomic(f"{note.name}/{NOTE_NAME}", canonical_json(note.model_dump(mode="json")))
    except OSError as error:
        raise _unwritten(folder, str(error)) from error
    return note


def _unwritten(folder: Path, reason: str) -> ContractError:
    return ContractError(
        f"{folder}: promised a checkpoint, found {reason}; the checkpoint before it stands: make room and start again"
    )


def read_state(run: Store, note: Note, state: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill the tensors of `state`, all or some, from a checkpoint, in place, at any number of ranks.

    Raises ContractError if a file is missing or has another size than when it was written.
    """
    folder = local_path(run, note.name)
    sizes = {name: (folder / name).stat().st_size if (folder / name).exists() else None for name in note.files}
    if wrong := [f"{name} {sizes[name]}, not {size}" for name, size in note.files.items() if sizes[name] != size]:
        raise ContractError(
            f"{folder}: promised files of the sizes in {NOTE_NAME}, found {', '.join(wrong)}; remove the folder to go "
            "on from the checkpoint before"
        )
    load(state, checkpoint_id=str(folder), process_group=ranks.control)


def standing_notes(run: Store) -> list[Note]:
    """The notes of all complete checkpoints, oldest first."""
    found = (folder / NOTE_NAME for folder in _folders(run))
    notes = (Note.model_validate_json(path.read_bytes()) for path in found if path.exists())
    return sorted(notes, key=lambda note: note.step)


def remove_halves(run: Store) -> list[str]:
    """Remove every checkpoint folder without a note; returns their names."""
    halves = [folder for folder in _folders(run) if not (folder / NOTE_NAME).exists()]
    for folder in halves:
        shutil.rmtree(folder)
    return sorted(folder.name for folder in halves)


def keep_newest(run: Store, number: int) -> None:
    """Remove all but the newest checkpoints; each stops existing, by its note, before its files go."""
    for note in standing_notes(run)[:-number]:
        run.delete(f"{note.name}/{NOTE_NAME}")
        shutil.rmtree(local_path(run, note.name))


def check_identity(note: Note, found: Identity) -> None:
    """Raises ContractError that names every difference between what a checkpoint belongs to and the run at hand."""
    promised = note.identity
    pairs = {name: (getattr(promised, name), getattr(found, name)) for name in ("dataset", "tokenizer", "order")}
    pairs |= {
        name: (promised.settings.get(name), found.settings.get(name))
        for name in sorted({*promised.settings, *found.settings})
    }
    wrong = [f"{name}: promised {old}, found {new}" for name, (old, new) in pairs.items() if old != new]
    if wrong:
        raise ContractError(
            f"{note.name}: the run is no longer the one this checkpoint belongs to\n  " + "\n  ".join(wrong) + "\n"
            f"undo the change, or remove {CHECKPOINTS} to train from the beginning"
        )


def local_path(run: Store, name: str) -> Path:
    """The path of a folder that torch writes. Raises ConfigError if the run is not on a mounted filesystem."""
    if not run.is_local:
        raise ConfigError(f"train: promised a run folder on a mounted filesystem, found {run.uri}; mount or copy it")
    return Path(run.path(name))


def _folders(run: Store) -> list[Path]:
    root = local_path(run, CHECKPOINTS)
    found: Mapping[str, Path] = {path.name: path for path in root.iterdir()} if root.exists() else {}
    return [path for name, path in found.items() if re.fullmatch(r"step-\d{6,}", name)]
