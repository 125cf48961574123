"""The mesh of a run: its axes over the ranks, and the groups that each way of splitting talks in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train.config.layout import LayoutConfig
from train.parallel.layout import axes_of


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout and this rank's place on them."""

    axes: dict[str, int]
    """Size of every axis, in the order of AXES."""
    whole: DeviceMesh
    """All ranks, with the axes that are longer than 1, and with `shard`."""
    states: DeviceMesh
    """Ranks that share out weights and states: shards, times the parts of a sequence; replicas are an axis before,
    unless gradients between them are compressed, which is not FSDP2's business."""

    def place(self, axis: str) -> int:
        """Coordinate of this rank on an axis."""
        return self.whole.get_local_rank(axis) if self.axes[axis] > 1 else 0

    def along(self, axis: str) -> DeviceMesh:
        """The mesh of the ranks that differ from this one on that axis alone, which is longer than 1."""
        return self.whole[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The same ranks as a process group."""
        return self.whole.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Which of the groups of ranks with rows of their own this one belongs to."""
        return self.place("replicate") * self.axes["shard"] + self.place("shard")

    @property
    def is_group_leader(self) -> bool:
        """Whether this rank counts among those that read the same rows."""
        return not any(self.place(axis) for axis in ("pipeline", "context", "tensor"))


def build_mesh(layout: LayoutConfig, world_size: int, device_type: str) -> Mesh:
    """The mesh of a layout over all ranks. Raises ConfigError if its axes do not multiply up to them."""
    axes = axes_of(layout, world_size)
    kept = {axis: size for axis, size in axes.items() if size > 1 or axis == "shard"}
    whole = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    states = whole["shard"]
    if axes["context"] > 1:
        states = whole["shard", "context"]._flatten("states")
    if axes["replicate"] > 1 and layout.compress == "none":
        # FSDP2 takes the first of two axes for replicas and the second for shards.
        states = whole["replicate", "shard"]
        if axes["context"] > 1:
            whole["shard", "context"]._flatten("states")
            states = whole["replicate", "states"]
    return Mesh(axes, whole, states)


# Collectives on one flat tensor, by the names that they have from torch 2.12 on.
#
# Older versions call them `all_gather_into_tensor` and `reduce_scatter_tensor`; newer ones warn about those names.

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group=...): the ranks' inputs, one after the other, in the output of every rank."""
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(output, input, group=...): this rank's part of the sum of the ranks' inputs."""
