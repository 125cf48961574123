"""The loading of a trained model from a checkpoint, in one process and independent of the training layout."""

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
    """Return the metadata of the checkpoint of a step, None = the last. Raises ContractError if there is none."""
    checkpoints = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(run)}
    if not checkpoints or (step is not None and step not in checkpoints):
        expected = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise ContractError(
            f"{run.uri}: expected {expected}, got those of steps {sorted(checkpoints)}. Run `penstock train` first, or "
            "choose one of these steps."
        )
    return checkpoints[max(checkpoints) if step is None else step]


def check_tokenizer(checkpoint: CheckpointMetadata, dataset: Dataset) -> None:
    """Check that a checkpoint was trained with the dataset's tokenizer. Raises ContractError if it was not."""
    contract = digest_of(dataset.tokenizer.model_dump(mode="json"))
    if checkpoint.identity.tokenizer != contract:
        raise ContractError(
            f"{checkpoint.name}: expected tokenizer contract {checkpoint.identity.tokenizer[:12]}, got "
            f"{contract[:12]}. Restore the dataset that it was trained on."
        )


def check_objective(checkpoint: CheckpointMetadata, *objectives: str) -> None:
    """Check that a checkpoint was trained on one of these objectives. Raises ContractError if it was not."""
    objective = checkpoint.identity.settings["train.objective"]
    if objective not in objectives:
        raise ContractError(
            f"{checkpoint.name}: expected a model trained with train.objective = {' or '.join(objectives)}, got "
            f"{objective}. Choose another checkpoint."
        )


def sequence_length_of(checkpoint: CheckpointMetadata) -> int:
    """Return the sequence length [tokens] of the training stage that the checkpoint's last step belongs to."""
    stages = checkpoint.identity.settings["train.stages"]
    started = [stage for stage in stages if stage["first_step"] < max(checkpoint.step, 1)]
    return int(started[-1]["seq_len"])


def read_tokenizer(dataset: Dataset) -> bytes:
    """Return the bytes of the tokenizer's model file. Raises ContractError if its digest is not the contract's."""
    data = dataset.tokenizer_folder.read_bytes(dataset.tokenizer_path)
    digest = hashlib.sha256(data).hexdigest()
    if digest != dataset.tokenizer.sha256:
        raise ContractError(
            f"{dataset.tokenizer_folder.uri}/{dataset.tokenizer_path}: expected SHA-256 {dataset.tokenizer.sha256}, "
            f"got {digest}. Restore the file."
        )
    return data


def shape_of(checkpoint: CheckpointMetadata) -> ModelShape:
    """Return the shape of a checkpoint's model."""
    settings = checkpoint.identity.settings
    return ModelShape.model_validate({name: settings[f"shape.{name}"] for name in ModelShape.model_fields})


def read_model(run: Store, checkpoint: CheckpointMetadata, device: torch.device) -> Transformer:
    """Return the model of a checkpoint. Raises ContractError if its files have changed since they were written."""
    causal = checkpoint.identity.settings["train.objective"] != "mlm"
    model = build_model(shape_of(checkpoint), causal=causal).to_empty(device=device)
    read_state(run, checkpoint, {f"model.{name}": parameter.data for name, parameter in model.named_parameters()})
    return model


def default_device() -> torch.device:
    """Return the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
