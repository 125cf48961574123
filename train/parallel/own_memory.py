"""The memory of a rank that trains a model of the user, from the figures that were counted in the model.

Weights, gradients and optimizer states are exact. Activations are those that a forward pass in fp32 stores, and are
halved for a 16-bit dtype; selective recomputation is estimated as none.
"""

from dataclasses import dataclass

from train.config.layout import LayoutConfig
from train.config.optim import OPTIMIZERS
from train.config.settings import Settings
from train.model.shape import ModelShape, OwnLayers, OwnShape
from train.parallel.layout import axes_of
from train.parallel.memory import LayerMemory, Memory, RankMemory, checkpoint_bytes, memory_of_rank, offloaded


@dataclass(frozen=True)
class OwnLayerMemory(LayerMemory):
    """The bytes of a layer's activations; the layer is the mean of those of the model."""

    layers: OwnLayers

    def saved(self) -> int:
        """Return the bytes that a layer stores for its backward pass, without activation checkpointing."""
        return round(self.tokens * self.layers.saved * self.width / 4)

    def kept(self, recompute: str) -> int:
        """Return the bytes of activations that a layer stores in a recomputation mode: none, selective or full."""
        return self.stream_bytes() if recompute == "full" else self.saved()

    def temporary(self) -> int:
        """Return the peak bytes of activation gradients in a layer's backward pass: half of what it stored."""
        return self.saved() // 2 + self.stream_bytes()


class OwnRankMemory(RankMemory):
    """Estimated memory of one rank at each moment of a step; `params` are those that FSDP2 gathers or ddp holds."""

    def __init__(self, shape: OwnShape, settings: Settings, axes: dict[str, int], batch: tuple[int, int], cuda: bool):
        """`batch`: (positions of a row, rows of a step). `settings` must have no automatic values left."""
        super().__init__(shape, settings, axes, 0, batch, cuda)
        self.counted, plain = shape.counted_layers(), self.stream
        rows, whole = plain.rows, plain.autocast
        self.stream = OwnLayerMemory(shape, settings, batch[0], rows, self.width, whole, cuda, self.counted)
        self.exchanged = self.counted.exchanged if settings.layout.expert_parallel else 0
        self.params, self.embeddings = shape.num_params, shape.embedding_params
        self.layer = self.matrices = self.counted.largest
        in_layers = shape.num_params - shape.embedding_params
        self.outer = shape.num_params - min(in_layers, self.layers * self.counted.largest)

    def states(self) -> int:
        """Return the bytes of optimizer states on this rank, counted as for matrices."""
        declared = OPTIMIZERS[self.settings.optim.optimizer]
        inner, outer = declared.state, declared.of_others.state
        over = self.replicas if self.settings.layout.data == "zero1" else self.shards
        embeddings, average = self.embeddings, 0 if self.settings.optim.ema is None else 4 * self.params
        return (
            max(inner.matrix, inner.vector) * (self.params - embeddings) + outer.matrix * embeddings + average
        ) // over

    def _gathered(self, layers: int, prefetched: int) -> int:
        if not self.sharded:
            return 0
        every = self.settings.layout.data == "zero2"
        layers = (self.layers if every else layers) + (prefetched if self.shards > 1 else 0)
        return self.width * (self.outer + layers * (self.layer - self.exchanged))

    def _unreduced(self) -> int:
        return 4 * (self.layer - self.exchanged) if self.sharded else 0


def memory_of_any(
    shape: ModelShape, settings: Settings, world_size: int, batch: tuple[int, int], device: str = "cpu"
) -> Memory:
    """Return the memory of the rank that needs the most memory, for any model; see `memory_of_rank`.

    `batch`: (positions of a row, rows of a step).
    """
    if not isinstance(shape, OwnShape):
        return memory_of_rank(shape, settings, world_size, *batch, device)
    settings, cuda = settings.for_device(device), device == "cuda"
    rank = OwnRankMemory(shape, settings, axes_of(settings.layout, world_size), batch, cuda)
    return offloaded(rank, settings, cuda)


def checkpoint_bytes_of_any(shape: ModelShape, settings: Settings) -> int:
    """Return the bytes of weights and optimizer states of any model, in float32."""
    if not isinstance(shape, OwnShape):
        return checkpoint_bytes(shape, settings)
    alone = settings.model_copy(update={"layout": LayoutConfig(data="ddp")}).for_device("cpu")
    rank = OwnRankMemory(shape, alone, axes_of(alone.layout, 1), (1, 1), False)
    return 4 * rank.params + rank.states()
