"""A trained model read back from the checkpoint of a run, in one process and without knowing how it was trained."""

import hashlib

import torch

from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.storage import Store
from schemas.tokens import Dataset
from train.checkpoint.folder import list_checkpoints
from train.checkpoint.metadata import CheckpointMetadata
from train.checkpoint.state import read_state
from train.model.shape import ModelShape
from train.model.transformer import Transformer, build_model


def find_checkpoint(run: Store, step: int | None) -> CheckpointMetadata:
    """The note of a checkpoint, None = the last. Raises ContractError if there is none."""
    notes = {note.step: note for note in list_checkpoints(run)}
    if not notes or (step is not None and step not in notes):
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise ContractError(f"{run.uri}: expected {wanted}, got those of steps {sorted(notes)}. Train, or choose one.")
    return notes[max(notes) if step is None else step]


def check_tokenizer(note: CheckpointMetadata, dataset: Dataset) -> None:
    """Raises ContractError if a checkpoint was trained on another tokenizer than the dataset's."""
    contract = digest_of(dataset.tokenizer.model_dump(mode="json"))
    if note.identity.tokenizer != contract:
        raise ContractError(
            f"{note.name}: expected tokenizer contract {note.identity.tokenizer[:12]}, the run now holds "
            f"{contract[:12]}. Restore the dataset it was trained on."
        )


def check_objective(note: CheckpointMetadata, *objectives: str) -> None:
    """Raises ContractError if a checkpoint was trained on another objective than these."""
    found = note.identity.settings["train.objective"]
    if found not in objectives:
        raise ContractError(
            f"{note.name}: expected a model trained with train.objective = {' or '.join(objectives)}, got {found}. "
            "Choose another checkpoint."
        )


def sequence_length_of(note: CheckpointMetadata) -> int:
    """Tokens of a sequence in the stage that the last step before a checkpoint belongs to."""
    stages = note.identity.settings["train.stages"]
    begun = [stage for stage in stages if stage["first_step"] < max(note.step, 1)]
    return int(begun[-1]["seq_len"])


def read_tokenizer(dataset: Dataset) -> bytes:
    """The tokenizer's model file. Raises ContractError if it is not the one of the contract."""
    data = dataset.tokenizer_folder.read_bytes(dataset.tokenizer_path)
    found = hashlib.sha256(data).hexdigest()
    if found != dataset.tokenizer.sha256:
        raise ContractError(
            f"{dataset.tokenizer_folder.uri}/{dataset.tokenizer_path}: expected SHA-256 {dataset.tokenizer.sha256}, "
            f"found {found}. Restore the file."
        )
    return data


def shape_of(note: CheckpointMetadata) -> ModelShape:
    """The shape of a checkpoint's model."""
    settings = note.identity.settings
    return ModelShape.model_validate({name: settings[f"shape.{name}"] for name in ModelShape.model_fields})


def read_model(run: Store, note: CheckpointMetadata, device: torch.device) -> Transformer:
    """The model of a checkpoint. Raises ContractError if its files are not as they were written."""
    causal = note.identity.settings["train.objective"] != "mlm"
    model = build_model(shape_of(note), causal=causal).to_empty(device=device)
    read_state(run, note, {f"model.{name}": parameter.data for name, parameter in model.named_parameters()})
    return model


def default_device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
