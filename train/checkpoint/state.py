"""The state of a run as a flat mapping of names to tensors, and its loading from a checkpoint into any layout.

A tensor is either plain, the same on every rank that has it, or a DTensor of which each rank has a shard. A rank holds
only the tensors of its own layers. A checkpoint holds the tensors of all ranks, so it can be read on any number of
ranks, and also in part.
"""

import errno
import hashlib
import os
import stat
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from shlex import quote

import pyarrow.fs as pafs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from schemas.config import Section
from schemas.errors import ConfigError, ContractError
from schemas.ids import digest_of
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.folder import (
    CheckpointMetadata,
    Layout,
    StateFile,
    check_plan,
    damaged,
    list_checkpoints,
    setting_of,
    shape_of,
)
from train.checkpoint.reader import CHECK_STORAGE, NOT_READ, CheckpointReader, read_plan_file
from train.model.freeze import frozen_names
from train.model.own import build_any
from train.model.shape import ModelShape, OwnShape, check_sizes, parameter_sizes
from train.model.transformer import Transformer
from train.parallel.ranks import Ranks

State = dict[str, Tensor]
"""Tensors by name: `model.<parameter>`, and `<moment>.<parameter>` for the states of an optimizer."""
AVERAGED = "ema"
"""Prefix of the names of averaged weights."""
STORED_WEIGHTS = ("model", AVERAGED)
"""Weights of a checkpoint that a model may have: those of the last update, or with `optim.ema` their moving average."""
MODEL_PREFIX = "model."
"""Prefix of the names of weights in a state."""
DIGEST_THREADS = 8
"""Files that a rank hashes at once; a core computes SHA-256 of 1.9 GB/s, so a fast disk keeps several threads busy."""


def read_state(run: Store, checkpoint: CheckpointMetadata, state: State, ranks: Ranks | None = None) -> None:
    """Read the tensors in `state` from a checkpoint, in place. The checkpoint may have another layout and more tensors.

    All ranks call this function together, each with its own tensors. Without `ranks`, this process reads alone. No code
    of the checkpoint runs, even of a hostile one. Raises ContractError if a file has changed since it was written, if a
    file holds anything but tensors, or if a tensor is missing or has another shape.
    """
    folder = run.child(checkpoint.name)
    verify_files(folder, checkpoint.files, ranks)
    # Read once for all ranks: the metadata of a large model has many megabytes.
    data = ranks.on_first(lambda: read_plan_file(folder, checkpoint.files)) if ranks else None
    try:
        reader = CheckpointReader(folder, checkpoint.files, data)
        _check_kinds(folder, reader.read_metadata(), state)
    except ContractError as error:
        if ranks is None:
            raise
        ranks.refuse(error)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(
                state,
                storage_reader=reader,
                process_group=ranks.control if ranks else None,
                no_dist=ranks is None,
            )
    except CheckpointException as failed:
        causes = [failure[0] for failure in failed.failures.values()]
        refused = [ContractError(str(cause)) for cause in causes if isinstance(cause, ContractError)]
        reasons = "; ".join(sorted({str(cause) for cause in causes}))
        missing = ContractError(
            f"{_shown(folder)}: expected every tensor of the model, got {reasons}. Plan the run with the model shape "
            "of the checkpoint."
        )
        reason = next(iter(refused), missing)
        if ranks is None:
            raise reason from failed
        ranks.refuse(reason)


def _shown(folder: Store) -> str:
    """Return the path of a local folder, or the URI of another one."""
    return folder.root if folder.is_local else folder.uri


def _check_kinds(folder: Store, stored: Metadata, state: State) -> None:
    """Raise ContractError if a stored tensor has numbers of another kind, which would be converted without a word."""
    for name, tensor in state.items():
        found = stored.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            continue
        dtype = found.properties.dtype
        if (dtype.is_floating_point, dtype.is_complex) != (tensor.is_floating_point(), tensor.is_complex()):
            raise ContractError(
                f"{_shown(folder)}: expected {name} as {tensor.dtype}, got {dtype}. Use a checkpoint that "
                "`penstock train` wrote, or remove its folder."
            )


def stored_shapes(run: Store, checkpoint: CheckpointMetadata) -> dict[str, torch.Size]:
    """Return the shape of every tensor in a checkpoint, by name."""
    metadata = CheckpointReader(run.child(checkpoint.name), checkpoint.files).read_metadata()
    items = metadata.state_dict_metadata.items()
    return {name: item.size for name, item in items if isinstance(item, TensorStorageMetadata)}


def verify_files(folder: Store, files: Mapping[str, StateFile], ranks: Ranks | None = None) -> None:
    """Compare the sizes and digests of a checkpoint's files with its metadata. Each rank reads a share of the files.

    Raises ContractError that names every file that differs, with the expected and the actual value, or that the storage
    does not give.
    """
    names = sorted(files, key=lambda name: (-files[name].size, name))
    mine = names[ranks.rank :: ranks.world_size] if ranks else names
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        differences = pool.map(lambda name: _difference(folder, name, files[name]), mine)
        wrong = [difference for difference in differences if difference]
    if ranks is not None:
        everywhere: list[list[str]] = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(everywhere, wrong, group=ranks.control)
        wrong = [difference for part in everywhere for difference in part]
    if not wrong:
        return
    fix = "Restore these files from a backup, or remove the folder to resume from the previous checkpoint."
    fix = CHECK_STORAGE if any(NOT_READ in text for text in wrong) else fix
    error = ContractError(
        f"{_shown(folder)}: expected files as they were written, got\n  " + "\n  ".join(sorted(wrong)) + f"\n{fix}"
    )
    if ranks is None:
        raise error
    ranks.refuse(error)


def _difference(folder: Store, name: str, expected: StateFile) -> str | None:
    """Describe how a file differs from its expected size and digest; None if it does not."""
    try:
        if folder.is_local and not stat.S_ISREG(os.stat(folder.path(name)).st_mode):
            return f"{name}: expected a file, got a pipe, device or folder"
        if (size := _size(folder, name)) != expected.size:
            return f"{name}: expected {expected.size} bytes, got {size}"
        digest = folder.sha256(name)
    except FileNotFoundError as error:
        return f"{name}: expected {expected.size} bytes, got {error.strerror or error}"
    except OSError as error:
        return f"{name}: {NOT_READ} {error}"
    return f"{name}: expected SHA-256 {expected.sha256}, got {digest}" if digest != expected.sha256 else None


def _size(folder: Store, name: str) -> int:
    info = folder.fs.get_file_info(folder.path(name))
    if info.type != pafs.FileType.File:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return int(info.size)


def layout_of(section: Section, axes: Mapping[str, int], threads: int, device: str) -> Layout:
    """Return the layout that checkpoint metadata will store, for this machine.

    `section`: `[layout]`; `axes`: size of each mesh axis; `threads`: CPU threads of a rank; `device`: cpu or cuda.
    """
    ranks = 1
    for size in axes.values():
        ranks *= size
    chosen = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return Layout(
        ranks=ranks,
        axes=dict(axes),
        settings=section.model_dump(mode="json", include=section.fields_of("execution") - {*axes}),
        threads=threads,
        device=device,
        kernels=f"torch {torch.__version__}, {chosen}",
    )


# The loading of a trained model from a checkpoint, in one process and independent of the training layout.


def open_checkpoint(run: Store, step: int | None, *objectives: str) -> tuple[Dataset, CheckpointMetadata]:
    """Return the run's dataset and the metadata of its checkpoint of `step`; None = the last.

    Raises ContractError if there is no such checkpoint, or if it was not trained with the dataset's tokenizer, with the
    run's plan, or on one of these objectives.
    """
    dataset, checkpoint = open_dataset(run), find_checkpoint(run, step)
    check_tokenizer(checkpoint, dataset)
    check_objective(checkpoint, *objectives)
    check_plan(run, checkpoint)
    return dataset, checkpoint


def find_checkpoint(run: Store, step: int | None) -> CheckpointMetadata:
    """Return the metadata of a run's checkpoint of `step`; None = the last. Raises ContractError if there is none."""
    checkpoints = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(run)}
    if not checkpoints:
        raise ContractError(
            f"{run.uri}: expected a trained model, got a run without checkpoints. Train one with "
            f"`penstock train {quote(run.uri)}`."
        )
    if step is not None and step not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints)))
        raise ContractError(
            f"{run.uri}: expected a checkpoint of step {step}, got checkpoints of steps {steps}. Name one of them."
        )
    return checkpoints[max(checkpoints) if step is None else step]


def check_tokenizer(checkpoint: CheckpointMetadata, dataset: Dataset) -> None:
    """Check that a checkpoint was trained with the dataset's tokenizer. Raises ContractError if it was not."""
    contract = digest_of(dataset.tokenizer.model_dump(mode="json"))
    if checkpoint.identity.tokenizer != contract:
        raise ContractError(
            f"{checkpoint.name}: expected the dataset to have the tokenizer of the checkpoint, with contract "
            f"{checkpoint.identity.tokenizer[:12]}, got {contract[:12]}. Restore the dataset of the checkpoint."
        )


def check_objective(checkpoint: CheckpointMetadata, *objectives: str) -> None:
    """Check that a checkpoint was trained on one of these objectives. Raises ContractError if it was not."""
    objective = setting_of(checkpoint, "train.objective")
    if objective not in objectives:
        raise ContractError(
            f"{checkpoint.name}: expected a model trained with train.objective = {' or '.join(objectives)}, got "
            f"{objective}. Give this command the folder of a run with such an objective."
        )


def sequence_length_of(checkpoint: CheckpointMetadata) -> int:
    """Return the sequence length [tokens] of the training stage in which the checkpoint was written."""
    stages = setting_of(checkpoint, "train.stages")
    try:
        started = [stage for stage in stages if stage["first_step"] < max(checkpoint.step, 1)]
        if (seq_len := int(started[-1]["seq_len"])) < 1:
            raise ValueError("no tokens")
        return seq_len
    except (LookupError, TypeError, ValueError) as error:
        raise damaged(checkpoint, "training stages with their first step and sequence length") from error


def read_tokenizer(dataset: Dataset) -> bytes:
    """Return the bytes of the tokenizer's model file. Raises ContractError if it does not match the contract."""
    data = dataset.tokenizer_folder.read_bytes(dataset.tokenizer_path)
    digest = hashlib.sha256(data).hexdigest()
    if digest != dataset.tokenizer.sha256:
        raise ContractError(
            f"{dataset.tokenizer_folder.uri}/{dataset.tokenizer_path}: expected SHA-256 {dataset.tokenizer.sha256}, "
            f"got {digest}. Restore the file from a backup."
        )
    return data


def read_model(run: Store, checkpoint: CheckpointMetadata, device: torch.device, weights: str = "model") -> Transformer:
    """Return the model of a checkpoint. `weights`: of STORED_WEIGHTS.

    Raises ContractError if its files have changed since they were written, ConfigError if it has no such weights.
    """
    if weights == AVERAGED and checkpoint.identity.settings.get("optim.ema") is None:
        raise ConfigError(
            f"--weights {weights}: expected a checkpoint with averaged weights, got {checkpoint.name} of a run without "
            "optim.ema. Train with --set optim.ema=0.999, or remove --weights."
        )
    causal, shape = setting_of(checkpoint, "train.objective") != "mlm", shape_of(checkpoint)
    frozen = _names_without_average(checkpoint, shape) if weights == AVERAGED else set()
    if not isinstance(shape, OwnShape):
        prefix, stored = f"{weights}.", stored_shapes(run, checkpoint)
        own = {name.removeprefix(prefix): size for name, size in stored.items() if name.startswith(prefix)}
        own |= {name: stored[f"model.{name}"] for name in frozen if f"model.{name}" in stored}
        check_sizes(own, shape, _shown(run.child(checkpoint.name)))
    model = build_any(shape, None, causal).to_empty(device=device)
    names = {name: f"{'model' if name in frozen else weights}.{name}" for name, _ in model.named_parameters()}
    read_state(run, checkpoint, {names[name]: parameter.data for name, parameter in model.named_parameters()})
    return model


def _names_without_average(checkpoint: CheckpointMetadata, shape: ModelShape) -> set[str]:
    """Return the names of the frozen parameters, whose average is the parameter itself."""
    patterns = checkpoint.identity.settings.get("train.freeze", [])
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise damaged(checkpoint, "a list of patterns in train.freeze")
    return frozen_names(parameter_sizes(shape), patterns)


def default_device() -> torch.device:
    """Return the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
