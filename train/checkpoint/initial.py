"""The loading of initial weights from another run's checkpoint, or from a folder of Hugging Face, into any layout."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from schemas.checkpoints import METADATA_NAME
from schemas.errors import ContractError, PenstockError
from schemas.exports import TRAINED_ON, write_receipt
from schemas.logs import LOGGER
from schemas.origin import CHECKPOINT, ModelOrigin
from schemas.storage import Store
from schemas.tokens import Dataset
from schemas.versions import DATASET
from train.checkpoint.folder import StateFile, folder_name, parse_metadata
from train.checkpoint.state import MODEL_PREFIX, State, read_state, verify_files
from train.export.weights import StoredWeights
from train.model.shape import ModelShape
from train.model.transformer import initial_weight
from train.optim.parameter import local_tensor, region_of
from train.parallel.ranks import Ranks


def read_origin(origin: ModelOrigin, start: tuple[ModelShape, int], ranks: Ranks, weights: State) -> None:
    """Read the weights of a new run, in place. `weights`: those of this rank, by `model.<parameter>`.

    `start`: shape of the model, and seed of what has no weights there.

    Every rank calls this function and reads only what it holds. Rows of ids that have no weights get those of a new
    model. Raises ContractError if a file has changed since the plan was made.
    """
    if origin.format == CHECKPOINT:
        run, name = Store(origin.path), f"{folder_name(origin.step or 0)}/{METADATA_NAME}"
        ranks.on_first(lambda: _check_digest(run, name, origin.digest))
        read_state(run, parse_metadata(run.read_bytes(name), f"{run.uri}/{name}"), weights, ranks)
        return
    folder = Path(origin.path)
    try:
        sizes = {name: (folder / name).stat().st_size for name in origin.files}
    except OSError as error:
        ranks.refuse(_changed(origin, str(error)))
    files = {name: StateFile(size=sizes[name], sha256=digest) for name, digest in origin.files.items()}
    verify_files(Store(str(folder)), files, ranks)
    try:
        with ExitStack() as stack:
            stored = StoredWeights(folder, stack)
            for name, tensor in weights.items():
                _read_tensor(stored, name.removeprefix(MODEL_PREFIX), tensor, start)
    except PenstockError as error:
        ranks.refuse(error)


def record_beginning(origin: ModelOrigin | None, dataset: Dataset, run: Store) -> None:
    """Write a receipt of a new training into every run that it depends on, by which a takedown there names this run.

    These are the runs of the weights that it began from, directly or not, and those of its dataset. Runs in subfolders
    of these are found without one. A run that cannot be written has a warning instead.
    """
    read: dict[str, tuple[str, str | None]] = {}
    for member in dataset.members:
        if run.uri != member.run.uri and not run.uri.startswith(f"{member.run.uri}/"):
            read[member.run.address] = member.digest, None
    for own in (own for own in (origin.line if origin else ()) if own.format == CHECKPOINT):
        read[own.path] = own.dataset, folder_name(own.step or 0)
    for path, (digest, checkpoint) in read.items():
        try:
            write_receipt(Store(path), run, {"format": TRAINED_ON}, {DATASET: digest}, names=(), checkpoint=checkpoint)
        except (OSError, ContractError) as error:
            LOGGER.warning(f"train: {path} has no receipt of {run.uri}, so a takedown will not name it: {error}")


def _check_digest(run: Store, name: str, digest: str) -> None:
    if not run.exists(name) or (actual := run.sha256(name)) != digest:
        got = f"{actual[:12]}" if run.exists(name) else "no file"
        raise ContractError(
            f"{run.uri}/{name}: expected the checkpoint of the plan, {digest[:12]}, got {got}. Restore it, or run "
            "`penstock plan` again."
        )


def _changed(origin: ModelOrigin, got: str) -> ContractError:
    return ContractError(
        f"{origin.path}: expected the weights of the plan, {origin.digest[:12]}, got {got}. Restore the files, or run "
        "`penstock plan` again."
    )


@torch.no_grad()
def _read_tensor(stored: StoredWeights, name: str, tensor: Tensor, start: tuple[ModelShape, int]) -> None:
    """Read this rank's region of a parameter. `start`: the shape and seed of rows that are not stored."""
    region, target = region_of(name, tensor), local_tensor(tensor)
    shape, seed = start
    if (rows := stored.shape.vocab_size) < shape.vocab_size == tensor.shape[0] and _has_row_per_id(name):
        target.copy_(initial_weight(name, tensor.shape, shape, seed)[region])
        kept = max(0, min(rows, region[0].stop) - region[0].start)
        region, target = (slice(region[0].start, region[0].start + kept), *region[1:]), target[:kept]
    if target.numel():
        target.copy_(stored.read(name, region))


def _has_row_per_id(name: str) -> bool:
    return name in ("embedding.weight", "head.weight", "transform.output_bias")
