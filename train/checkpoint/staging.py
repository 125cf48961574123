"""Copies of a rank's tensors in the host's memory, from which a checkpoint is written while training goes on.

One set of buffers, pinned where the tensors lie on a device, serves every save: memory stays where it was after the
first one. What another rank writes, since it holds the same tensor, is copied in the first save only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from train.checkpoint.state import State


class HostCopies:
    """The copies. `take` fills them, and a `CopiesPlanner` hands them to DCP until it is called again."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.problem: Exception | None = None
        self._taken: list[Any] = []
        self._written: tuple[list[Any], set[str]] = [], set()

    @torch.no_grad()
    def take(self, state: State) -> None:
        """Copy the values that this rank has to write; an error is kept for the writing, which tells every rank."""
        self._taken = [(name, value.shape, value.dtype) for name, value in state.items()]
        alike, names = self._written
        mine = names if alike == self._taken else {*state}
        local = {name: _local(value) for name, value in state.items() if name in mine}
        try:
            self.values = {name: self._buffer(name, value) for name, value in local.items()}
            for name, value in local.items():
                self.values[name].copy_(value, non_blocking=True)
            if any(value.is_cuda for value in local.values()):
                torch.cuda.current_stream().synchronize()
            self.problem = None
        except (RuntimeError, MemoryError) as error:
            self.values, self.problem = {}, error

    def remember(self, names: set[str]) -> None:
        """Note what this rank was given to write, and so will be again as long as the state stays alike."""
        self._written = self._taken, names

    def _buffer(self, name: str, value: Tensor) -> Tensor:
        held = self.values.get(name)
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            return held
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)


class CopiesPlanner(DefaultSavePlanner):
    """DCP's plan of who writes what, with values out of the copies instead of the live tensors."""

    def __init__(self, copies: HostCopies):
        super().__init__()
        self._copies = copies

    def create_local_plan(self) -> SavePlan:
        """The plan of this rank. Raises what went wrong with the copies, here, where DCP tells the other ranks."""
        if self._copies.problem is not None:
            raise self._copies.problem
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as rank 0 has returned it, without what other ranks write."""
        plan = super().finish_plan(new_plan)
        self._copies.remember({item.index.fqn for item in plan.items})
        return plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of this rank's part of a tensor."""
        return self._copies.values[index.fqn]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
