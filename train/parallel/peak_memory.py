"""The memory of one rank, by purpose and by moment of a step, before anything is started.

Every number is a count of tensors that the code makes; nothing is fitted. The peak is the largest of five moments: the
loss at the end of the forward pass, where the gradients of the head begin, the backward pass of the last layer, its
end, and the update.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schemas.errors import ConfigError
from train.config.layout import LayoutConfig
from train.config.settings import Settings
from train.model.shape import ModelShape
from train.parallel.layout import axes_of
from train.parallel.memory import RankNeeds

ZERO = "Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 3.1"
FSDP = "Zhao et al. 2023 (FSDP), arXiv 2304.11277, section 3.3"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, section 4.1"
SOURCES = {
    "weights": ("4·N, of zero2 and zero3 / (shard · context)", ZERO),
    "states": ("4 to 8·N by optimizer, of ddp whole, else / ranks that share them", ZERO),
    "gradients": ("4·N, of zero2 and zero3 / (shard · context); whole while micro-batches add up", ZERO),
    "gathered": ("weights of the outermost part and of one layer, or of all, and what one more is gathered in", FSDP),
    "unreduced": ("gradients of one layer or of the outermost part, and what they are reduced from", FSDP),
    "activations": ("what layers keep, times the micro-batches in flight", KORTHIKANTI),
    "temporaries": ("gradients of activations in one layer, and what it computed again", "count"),
    "loss": ("logits of chunk_tokens, gradients of head and stream", "count"),
    "transfer": ("buffers of a pipeline, errors of a compression", "count"),
    "update": ("what the optimiser computes with", "count"),
    "batch": ("ids, targets, documents of a step; the mask", "count"),
}
"""Formula and source of every purpose: N parameters of the rank's layers and matrices."""


class Widths(NamedTuple):
    """Bytes of a parameter."""

    weight: int
    """Of the weights that are computed with."""
    gradient: int
    """Of the gradients."""
    states: int
    """Of what only the update needs: float32 weights and two moments."""


def zero_bytes(num_params: int, ranks: int, data: str, widths: Widths) -> dict[str, int]:
    """Weights, gradients and states of a rank for ddp, zero1, zero2 and zero3. Source: ZERO, figure 1."""
    shared = ("ddp", "zero1", "zero2", "zero3").index(data)
    over = {name: ranks if shared >= stage else 1 for stage, name in ((3, "weight"), (2, "gradient"), (1, "states"))}
    return {name: num_params * width // over[name] for name, width in widths._asdict().items()}


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one rank."""

    moments: dict[str, dict[str, int]]
    """By moment of a step, then by purpose."""
    host: int
    """In the host's memory besides: what is offloaded."""

    @property
    def peak_moment(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by purpose at that moment."""
        return self.moments[self.peak_moment]

    @property
    def peak(self) -> int:
        """Bytes at that moment."""
        return sum(self.at_peak.values())


def memory_of_rank(
    shape: ModelShape, settings: Settings, world_size: int, seq_len: int, global_batch: int, device: str = "cpu"
) -> Memory:
    """The memory of the rank that needs most, on a device of this type ("cpu", "cuda"), by which automatic settings go.

    Raises ConfigError if the axes of the layout do not multiply up to `world_size`.
    """
    settings = settings.for_device(device)
    axes = axes_of(settings.layout, world_size)
    batch, cuda = (seq_len, global_batch), device == "cuda"
    ranks = [RankNeeds(shape, settings, axes, place, batch, cuda) for place in range(axes["pipeline"])]
    return max((_offloaded(rank.moments(), settings, cuda) for rank in ranks), key=lambda memory: memory.peak)


def _offloaded(moments: dict[str, dict[str, int]], settings: Settings, cuda: bool) -> Memory:
    if not (cuda and settings.layout.offload):
        return Memory(moments, 0)
    away = ("weights", "states", "gradients")
    host = max(sum(need.get(name, 0) for name in away) for need in moments.values())
    here = {name: {key: size for key, size in need.items() if key not in away} for name, need in moments.items()}
    return Memory(here, host)


def layers_to_recompute(
    shape: ModelShape, settings: Settings, world_size: int, seq_len: int, global_batch: int, device: str = "cpu"
) -> int:
    """How many layers of each rank must compute everything again to keep within `layout.activation_budget`.

    Raises ConfigError if all of them are not enough.
    """
    settings = settings.for_device(device)
    axes, budget = axes_of(settings.layout, world_size), settings.layout.activation_budget or 0
    batch, cuda = (seq_len, global_batch), device == "cuda"
    ranks = [RankNeeds(shape, settings, axes, place, batch, cuda) for place in range(axes["pipeline"])]
    least = max(rank.kept_of_layers(rank.layers) for rank in ranks)
    if least > budget:
        raise ConfigError(
            f"layout.activation_budget: promised {budget:,} bytes of activations at most, found {least:,} although "
            "every layer keeps its input alone; raise it, or lower layout.micro_batch"
        )
    return max(rank.recomputed() for rank in ranks)


def checkpoint_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of weights and optimiser states of the whole model, in float32."""
    alone = settings.model_copy(update={"layout": LayoutConfig(data="ddp")}).for_device("cpu")
    whole = RankNeeds(shape, alone, axes_of(alone.layout, 1), 0, (1, 1), False)
    return 4 * whole.params + whole.states()
