"""A way of splitting a run over ranks: its axes, its name, and the settings that make it."""

from typing import Any, NamedTuple


class Split(NamedTuple):
    """How a model and a batch are split over ranks, but for the size of micro-batches and what is recomputed."""

    data: str
    replicate: int
    shard: int
    context: int
    context_by: str
    tensor: int
    pipeline: int
    schedule: str
    stages: int

    @property
    def whole(self) -> bool:
        """Whether every rank has the whole model."""
        return self.data in ("ddp", "zero1")

    @property
    def axes(self) -> dict[str, int]:
        """Size of every axis, the outermost first."""
        return {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }


def overrides(split: Split, size: int, mode: str) -> dict[str, Any]:
    """A layout as the settings of `[layout]` that make it."""
    found: dict[str, Any] = {"data": split.data, "micro_batch": size, "activation_checkpointing": mode}
    if not split.whole and split.replicate > 1:
        found["replicate"] = split.replicate
    for name in ("context", "tensor", "pipeline"):
        if getattr(split, name) > 1:
            found[name] = getattr(split, name)
    if split.context > 1:
        found["context_by"] = split.context_by
    if split.pipeline > 1:
        found |= {"schedule": split.schedule, "stages_per_rank": split.stages}
    return found


def shown(split: Split) -> str:
    """A split in words."""
    sizes = {"replicate": split.replicate, "shard": split.shard} if not split.whole else {"replicas": split.replicate}
    sizes |= {"context": split.context, "tensor": split.tensor, "pipeline": split.pipeline}
    axes = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    by = f" by {split.context_by}" if split.context > 1 else ""
    stages = f", {split.stages} stages a rank" if split.stages > 1 else ""
    return f"{split.data}, {axes}{by}" + (f", {split.schedule}{stages}" if split.pipeline > 1 else "")
