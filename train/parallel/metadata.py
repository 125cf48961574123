"""The size of a checkpoint's metadata, which names every shard of every tensor.

Rank 0 gathers it at each save, and every rank parses it at a resume. It grows with the shards of a tensor, not with the
ranks: copies of a sharded model (HSDP) store each shard once.
"""

from collections.abc import Iterator

from train.config.layout import LayoutConfig
from train.config.optim import OPTIMIZERS
from train.config.settings import Settings
from train.model.shape import ModelShape
from train.parallel.layout import axes_of

ENTRY_BYTES = 160
"""Bytes of the metadata of one shard of one tensor; tests/test_scale_on_paper.py compares it with torch's."""
MAX_METADATA_BYTES = 64 << 20
"""Size of the metadata above which a plan advises replicas; 64 MiB are parsed in about half a minute."""


def num_tensors(shape: ModelShape) -> int:
    """Return the number of parameters of a model, as tensors."""
    return sum(1 for _ in _matrices_and_vectors(shape))


def _matrices_and_vectors(shape: ModelShape) -> Iterator[tuple[bool, bool]]:
    """Yield, for each parameter, whether it is a matrix, and whether it is in a layer."""
    linear = 4 + (3 if shape.activation == "swiglu" else 2)
    vectors = 2 + 2 * shape.qk_norm + 2 * shape.residual_mixing + (linear if shape.bias else 0)
    relative = shape.positions == "relative"
    yield from [(True, True)] * (shape.num_layers * (linear + (3 if relative else 0)))
    yield from [(False, True)] * (shape.num_layers * vectors)
    tables = sum(map(shape.has_values, range(shape.num_layers)))
    yield from [(True, False)] * ((1 if shape.tie_embeddings else 2) + tables)
    yield False, False


def num_entries(shape: ModelShape, settings: Settings, world_size: int) -> int:
    """Return the shards of all weights and optimizer states that the metadata of a checkpoint names."""
    layout, axes = settings.layout, axes_of(settings.layout, world_size)
    of_weights = 1 if layout.data in ("ddp", "zero1") else axes["shard"] * axes["context"] * axes["tensor"]
    of_states = world_size if layout.data == "zero1" else of_weights
    inner = OPTIMIZERS[settings.optim.optimizer]
    total = 0
    for is_matrix, in_layer in _matrices_and_vectors(shape):
        state = (inner if is_matrix and in_layer else inner.of_others).state
        total += of_weights + (state.matrix if is_matrix else state.vector) // 4 * of_states
        total += 2 if is_matrix and state.side else 0  # one value per row and per column, not sharded
    return total


def metadata_bytes(shape: ModelShape, settings: Settings, world_size: int) -> int:
    """Return the size of the metadata of a checkpoint [bytes]."""
    return ENTRY_BYTES * num_entries(shape, settings, world_size)


def metadata_advice(shape: ModelShape, settings: Settings, world_size: int) -> Iterator[str]:
    """Yield a sentence if the metadata of checkpoints is large, with the number of replicas that bounds it."""
    size = metadata_bytes(shape, settings, world_size)
    if size <= MAX_METADATA_BYTES:
        return
    sentence = f"The metadata of a checkpoint has {size / 1e6:,.0f} MB, which every rank parses at a resume"
    for replicas in _more_replicas(settings.layout, world_size):
        changed = settings.layout.model_copy(update={"replicate": replicas, "shard": None})
        smaller = metadata_bytes(shape, settings.model_copy(update={"layout": changed}), world_size)
        if smaller <= MAX_METADATA_BYTES:
            yield f"{sentence}: layout.replicate = {replicas} makes it {smaller / 1e6:,.0f} MB."
            return
    yield f"{sentence}, and no number of replicas makes it smaller than {MAX_METADATA_BYTES / 1e6:,.0f} MB."


def _more_replicas(layout: LayoutConfig, world_size: int) -> Iterator[int]:
    """Yield the numbers of replicas above the current one that divide the ranks of a layout that can have replicas."""
    if layout.data in ("zero2", "zero3"):
        left = axes_of(layout, world_size)["shard"] * layout.replicate
        yield from (number for number in range(layout.replicate + 1, left + 1) if left % number == 0)
