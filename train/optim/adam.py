"""Adam's variants: LAMB, whose update of a matrix has a norm proportional to that of the matrix, and AdamW."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.optim.parameter import ShardedParameter, UpdateInputs, chunk_members, squared_norms, total_over_shards


@dataclass(frozen=True)
class Lamb:
    """LAMB's update rule for some parameters.

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2, with φ(z) = z. Vectors are updated at the plain learning
    rate: with a rate in proportion to its norm, a bias that is initially zero would remain zero.
    """

    members: Sequence[ShardedParameter]
    beta1: float
    beta2: float
    eps: float

    def __post_init__(self) -> None:
        for member in self.members:
            for key in ("exp_avg", "exp_avg_sq"):
                member.state[key] = torch.zeros_like(member.parameter)

    def update(self, inputs: UpdateInputs) -> None:
        """Update the parameters and their optimizer state once."""
        for members in chunk_members(self.members):
            values, directions = [m.values for m in members], self._directions(members, inputs)
            torch._foreach_mul_(directions, trust_ratios(members, values, directions))
            inputs.store(values, torch._foreach_add(values, directions, alpha=-inputs.rate))

    def _directions(self, members: Sequence[ShardedParameter], inputs: UpdateInputs) -> list[Tensor]:
        """Return Adam's update direction of each parameter, with weight decay; overwrites the gradients."""
        gradients = inputs.scaled(members)
        held_first, held_second = [m.held("exp_avg") for m in members], [m.held("exp_avg_sq") for m in members]
        first = torch._foreach_lerp(held_first, gradients, 1 - self.beta1)
        second = torch._foreach_mul(held_second, self.beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - self.beta2)
        inputs.store(held_first, first)
        inputs.store(held_second, second)
        # m / (1 - β₁ᵗ) / (√(v / (1 - β₂ᵗ)) + ε) with both corrections in one factor, which saves a pass over memory.
        count = inputs.count.double()
        root = (1 - self.beta2**count).sqrt()
        torch._foreach_copy_(gradients, second)
        torch._foreach_sqrt_(gradients)
        torch._foreach_add_(gradients, (self.eps * root).float())
        torch._foreach_reciprocal_(gradients)
        torch._foreach_mul_(gradients, first)
        torch._foreach_mul_(gradients, (root / (1 - self.beta1**count)).float())
        for member, direction in zip(members, gradients, strict=True):
            if member.weight_decay:
                direction.add_(member.values, alpha=member.weight_decay)
        return gradients


def trust_ratios(
    members: Sequence[ShardedParameter], values: Sequence[Tensor], directions: Sequence[Tensor]
) -> list[Tensor]:
    """Return, for each parameter, the norm of the whole matrix divided by that of its update direction, 0-d.

    The ratio is 1 for a vector, and for a matrix if either norm is zero.
    """
    squares = torch.stack([squared_norms(values), squared_norms(directions)], dim=1)
    totals = torch.stack(total_over_shards(members, list(squares)))
    ratios = (totals[:, 0] / totals[:, 1]).sqrt()
    ratios = torch.where((totals > 0).all(dim=1), ratios, 1.0).float()
    unit = torch.ones((), device=ratios.device)
    return [ratio if m.is_matrix else unit for m, ratio in zip(members, ratios, strict=True)]


# AdamW: Adam with decoupled weight decay, by torch's fused kernel.


@dataclass(frozen=True)
class AdamW:
    """AdamW's update rule for some parameters.

    Sources: Kingma 2014, arXiv 1412.6980, algorithm 1; Loshchilov 2019, arXiv 1711.05101, algorithm 2 (each update
    shrinks the weights by learning rate x decay).
    """

    members: Sequence[ShardedParameter]
    beta1: float
    beta2: float
    eps: float

    def __post_init__(self) -> None:
        for member in self.members:
            for key in ("exp_avg", "exp_avg_sq"):
                member.state[key] = torch.zeros_like(member.parameter)

    def update(self, inputs: UpdateInputs) -> None:
        """Update the parameters and their optimizer state once.

        torch's kernel divides the gradients by their scale, and changes nothing if the update is skipped.
        """
        for decay in dict.fromkeys(member.weight_decay for member in self.members):
            members = [m for m in self.members if m.weight_decay == decay and m.values.numel()]
            if not members:
                continue
            torch._fused_adamw_(
                [m.values for m in members],
                inputs.of(members),
                [m.held("exp_avg") for m in members],
                [m.held("exp_avg_sq") for m in members],
                [],
                [inputs.count] * len(members),  # the kernel only reads it, so the same tensor serves all
                lr=inputs.rate,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=inputs.grad_scale,
                found_inf=inputs.found_inf,
            )
