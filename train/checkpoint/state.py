"""The state of a run as a flat mapping of names to tensors, and its way back from a checkpoint into any layout.

A tensor is plain, the same on every rank that has it, or a DTensor of which each rank has a shard; a rank holds only
the names of its own layers. What is written is the union, so it can be read at any number of ranks, or in part.
"""

import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from schemas.config import Section
from schemas.errors import ContractError
from schemas.ids import file_sha256
from schemas.storage import Store
from train.checkpoint.folder import local_path
from train.checkpoint.metadata import CheckpointMetadata, Layout, StateFile
from train.parallel.ranks import Ranks

State = dict[str, Tensor]
"""Tensors by name: `model.<parameter>`, and `<moment>.<parameter>` for the states of an optimiser."""
DIGEST_THREADS = 8
"""Files that a rank digests at once; SHA-256 takes 1.9 GB/s of a core, so a fast disk feeds several."""


def read_state(run: Store, note: CheckpointMetadata, state: State, ranks: Ranks | None = None) -> None:
    """Fill the tensors of `state`, all or some, from a checkpoint, in place, in any layout.

    All ranks call it together, each with the names it has; without `ranks` it is a matter of this process alone.
    Raises ContractError if a file is not as it was written, or if a tensor is missing or has another shape.
    """
    folder = local_path(run, note.name)
    verify_files(folder, note.files, ranks)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(
                state,
                storage_reader=FileSystemReader(folder),
                process_group=ranks.control if ranks else None,
                no_dist=ranks is None,
            )
    except CheckpointException as failed:
        reasons = "; ".join(sorted({str(failure[0]) for failure in failed.failures.values()}))
        error = ContractError(
            f"{folder}: expected every tensor of the model, got {reasons}. Read it into the model it was written from."
        )
        if ranks is None:
            raise error from failed
        ranks.refuse(error)


def stored_shapes(run: Store, note: CheckpointMetadata) -> dict[str, torch.Size]:
    """Shape of every tensor in a checkpoint, by name."""
    metadata = FileSystemReader(local_path(run, note.name)).read_metadata()
    found = metadata.state_dict_metadata.items()
    return {name: tensor.size for name, tensor in found if isinstance(tensor, TensorStorageMetadata)}


def verify_files(folder: Path, files: Mapping[str, StateFile], ranks: Ranks | None = None) -> None:
    """Compare sizes and digests of a checkpoint's files with its note; ranks share the files out, the largest first.

    Raises ContractError that names every file that differs, with what was expected and what was found.
    """
    names = sorted(files, key=lambda name: (-files[name].size, name))
    mine = names[ranks.rank :: ranks.world_size] if ranks else names
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        found = pool.map(lambda name: _difference(folder / name, files[name]), mine)
        wrong = [difference for difference in found if difference]
    if ranks is not None:
        everywhere: list[list[str]] = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(everywhere, wrong, group=ranks.control)
        wrong = [difference for part in everywhere for difference in part]
    if not wrong:
        return
    error = ContractError(
        f"{folder}: expected files as they were written, got\n  " + "\n  ".join(sorted(wrong)) + "\n"
        "restore them, or remove the folder to go on from the checkpoint before"
    )
    if ranks is None:
        raise error
    ranks.refuse(error)


def _difference(path: Path, expected: StateFile) -> str | None:
    """How a file differs from what was expected; None if it does not."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name}: expected {expected.size} bytes, got {size}"
        digest = file_sha256(path)
    except OSError as error:
        return f"{path.name}: expected {expected.size} bytes, got {error.strerror or error}"
    return f"{path.name}: expected SHA-256 {expected.sha256}, got {digest}" if digest != expected.sha256 else None


# The layout that a checkpoint is written in, as its note tells it.


def layout_of(section: Section, axes: Mapping[str, int], threads: int, device: str) -> Layout:
    """The layout of the section `[layout]` with the sizes of its axes, on this machine's `device`: cpu or cuda."""
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
