"""The device mesh of a run: its axes over the ranks, and the process group of each parallel method."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train.config.layout import LayoutConfig
from train.parallel.layout import axes_of


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout and this rank's coordinates."""

    axes: dict[str, int]
    """Size of every axis, in the order of AXES."""
    whole: DeviceMesh
    """All ranks, with the axes larger than 1 and `shard`."""
    states: DeviceMesh
    """The mesh over which FSDP2 shards weights and states: `shard` times `context`. Replicas are a first axis, unless
    gradients between them are compressed, which FSDP2 does not handle."""

    def place(self, axis: str) -> int:
        """Return the coordinate of this rank on an axis."""
        return self.whole.get_local_rank(axis) if self.axes[axis] > 1 else 0

    def along(self, axis: str) -> DeviceMesh:
        """Return the mesh of the ranks that differ from this rank on that axis only; its size is larger than 1."""
        return self.whole[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks of `along(axis)` as a process group."""
        return self.whole.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's data-parallel group, whose ranks read the same rows."""
        return self.place("replicate") * self.axes["shard"] + self.place("shard")

    @property
    def is_group_leader(self) -> bool:
        """True if this rank is the leader of the ranks that read the same rows, whose counts enter global sums."""
        return not any(self.place(axis) for axis in ("pipeline", "context", "tensor"))


def build_mesh(layout: LayoutConfig, world_size: int, device_type: str) -> Mesh:
    """Build the mesh of a layout over all ranks. Raises ConfigError if the product of its axes is not `world_size`."""
    axes = axes_of(layout, world_size)
    kept = {axis: size for axis, size in axes.items() if size > 1 or axis == "shard"}
    whole = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    states = whole["shard"]
    if axes["context"] > 1:
        states = whole["shard", "context"]._flatten("states")
    if axes["replicate"] > 1 and layout.compress == "none":
        # FSDP2 uses the first of two axes for replicas and the second for shards.
        states = whole["replicate", "shard"]
        if axes["context"] > 1:
            whole["shard", "context"]._flatten("states")
            states = whole["replicate", "states"]
    return Mesh(axes, whole, states)


# Collectives on a flat tensor, with their names since torch 2.12. Older versions call them `all_gather_into_tensor` and
# `reduce_scatter_tensor`; newer versions warn about those names.

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Call as (output, input, group=...): concatenates the inputs of all ranks in the output of every rank."""
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Call as (output, input, group=...): writes this rank's part of the sum of the ranks' inputs."""
