"""What an update is made from, as tensors on the device, so that clipping and skipping never wait for the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from train.optim.parameter import Member


@dataclass(frozen=True)
class UpdateInputs:
    """The gradients of an update and the numbers that belong to it."""

    gradients: Mapping[str, Tensor]
    """What this rank holds of each gradient; a rule may use the memory."""
    rate: float
    """Learning rate."""
    count: Tensor
    """Number of this update, 1 = first, 0-d float32; that of the update before where this one is skipped."""
    grad_scale: Tensor | None
    """What the gradients are divided by, 0-d float32; None = nothing."""
    found_inf: Tensor
    """1 where the update is skipped, since loss or gradient is not finite; else 0; 0-d float32."""

    def of(self, members: Sequence[Member]) -> list[Tensor]:
        """The gradients of some members as they are."""
        return [self.gradients[member.name] for member in members]

    def scaled(self, members: Sequence[Member]) -> list[Tensor]:
        """The gradients of some members divided by `grad_scale`, in their own memory; call it once for each member."""
        gradients = self.of(members)
        if self.grad_scale is not None and gradients:
            torch._foreach_div_(gradients, self.grad_scale)
        return gradients

    @cached_property
    def skipped(self) -> Tensor:
        """Whether the update is skipped, 0-d bool."""
        return self.found_inf > 0

    def store(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write values into targets; where the update is skipped, every bit of the targets stays."""
        # A product with 0 would not do: 0 * nan is nan, and -0.0 + 0.0 is 0.0.
        for target, value in zip(targets, values, strict=True):
            torch.where(self.skipped, target, value, out=target)
