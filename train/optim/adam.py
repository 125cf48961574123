"""Adam and its relatives: AdamW, LAMB with updates in proportion to the norm of a matrix, and Adafactor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.optim.parameter import (
    ShardedParameter,
    UpdateInputs,
    chunk_members,
    local_tensor,
    squared_norms,
    total_over_shards,
)


@dataclass(frozen=True)
class Lamb:
    """LAMB's update rule for some parameters; vectors are updated at the plain learning rate.

    Source: You et al. 2020, arXiv 1904.00962, algorithm 2, with φ(z) = z.
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
    """Return the norm of each parameter divided by the norm of its update direction, 0-d.

    The norms are those of whole matrices. Each matrix of a stack has a ratio of its own; those of the matrices on this
    rank are returned, (matrices, 1, 1). The ratio is 1 for a vector, and for a matrix if either norm is zero.
    """
    squares = torch.stack([squared_norms(values), squared_norms(directions)], dim=1)
    parts = [
        _squares_of_stack(m, value, direction) if m.is_stack else square
        for m, value, direction, square in zip(members, values, directions, squares, strict=True)
    ]
    ratios = []
    for member, total in zip(members, total_over_shards(members, parts), strict=True):
        norms = total.view(-1, 2)
        ratio = torch.where((norms > 0).all(dim=1), (norms[:, 0] / norms[:, 1]).sqrt(), 1.0).float()
        if member.is_stack:
            ratios.append(ratio[member.region[0]][:, None, None])
        else:
            # With a rate in proportion to its norm, a bias that is initially zero would remain zero.
            ratios.append(ratio[0] if member.is_matrix else torch.ones_like(ratio[0]))
    return ratios


def _squares_of_stack(member: ShardedParameter, values: Tensor, directions: Tensor) -> Tensor:
    """Return the sums of squares of each matrix of a stack and of its update direction, flat, float64.

    Only elements in this rank's shard are summed; matrices outside the shard have the sum 0.
    """
    sums = torch.zeros(member.parameter.shape[0], 2, dtype=torch.float64, device=values.device)
    if len(values):
        sums[member.region[0]] = torch.stack([squared_norms(list(own)) for own in (values, directions)], dim=1)
    return sums.flatten()


# AdamW: Adam with decoupled weight decay, by torch's fused kernel.


@dataclass(frozen=True)
class AdamW:
    """AdamW's update rule for some parameters, with decoupled weight decay.

    Sources: Kingma 2014, arXiv 1412.6980, algorithm 1; Loshchilov 2019, arXiv 1711.05101, algorithm 2.
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
        for decay, factor in dict.fromkeys((m.weight_decay, m.rate_multiplier) for m in self.members):
            alike = [m for m in self.members if (m.weight_decay, m.rate_multiplier) == (decay, factor)]
            members = [m for m in alike if m.values.numel()]
            if not members:
                continue
            torch._fused_adamw_(
                [m.values for m in members],
                inputs.of(members),
                [m.held("exp_avg") for m in members],
                [m.held("exp_avg_sq") for m in members],
                [],
                [inputs.count] * len(members),  # the kernel only reads it, so the same tensor serves all
                lr=inputs.rate * factor,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=decay / factor,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                # The kernel divides the gradients by their scale, and changes nothing if `found_inf` is 1.
                grad_scale=inputs.grad_scale,
                found_inf=inputs.found_inf,
            )


# Adafactor: the second moment of a matrix, stored as a mean per row and per column, without a first moment.

EPS = 1e-30
"""Added to squared gradients (ε₁). Source: Shazeer and Stern 2018, section 9."""
DECAY = 0.8
"""The weight of the new squares in the mean of update t is t^-0.8. Source: Shazeer and Stern 2018, section 9."""
CLIP = 1.0
"""Maximum root mean square of an update before the learning rate (d). Source: Shazeer and Stern 2018, section 9."""


@dataclass(frozen=True)
class Adafactor:
    """Adafactor's update rule for some parameters; learning rates are absolute, not scaled by the weights.

    Source: Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 (matrices) and 5 (vectors), with decoupled decay.
    """

    members: Sequence[ShardedParameter]

    def __post_init__(self) -> None:
        for member in self.members:
            if member.is_matrix:
                num_rows, num_columns = member.parameter.shape
                # Whole plain tensors, equal on all ranks with a shard: a checkpoint of them can be read into any
                # layout.
                member.state["row_mean"] = local_tensor(member.parameter).new_zeros(num_rows)
                member.state["column_mean"] = local_tensor(member.parameter).new_zeros(num_columns)
            else:
                member.state["exp_avg_sq"] = torch.zeros_like(member.parameter)

    def update(self, inputs: UpdateInputs) -> None:
        """Update the parameters and their optimizer state once."""
        # Until the first update that is not skipped, the count is 0 and no result is stored.
        weight = inputs.count.double().clamp(min=1).pow(-DECAY).float()
        for members in chunk_members(self.members):
            gradients = dict(zip([m.name for m in members], inputs.scaled(members), strict=True))
            matrices = [m for m in members if m.is_matrix]
            sums = [_sum_squares(m, gradients[m.name]) for m in matrices]
            for member, total in zip(matrices, total_over_shards(matrices, sums), strict=True):
                rows, columns = torch.split(total, list(member.parameter.shape))
                means = [member.state["row_mean"], member.state["column_mean"]]
                squares = [(rows / len(columns) + EPS).float(), (columns / len(rows) + EPS).float()]
                inputs.store(means, [mean.lerp(new, weight) for mean, new in zip(means, squares, strict=True)])
            for member in (m for m in members if not m.is_matrix):
                moment = member.held("exp_avg_sq")
                inputs.store([moment], [moment.lerp(gradients[member.name].square().add_(EPS), weight)])
            directions = [_direction(m, gradients[m.name]) for m in members]
            totals = total_over_shards(members, list(squared_norms(directions)[:, None]))
            for member, direction, square in zip(members, directions, totals, strict=True):
                clip = (square[0] / member.parameter.numel()).sqrt().div_(CLIP).clamp_(min=1.0)
                direction.mul_((inputs.rate / clip).float())
            values = [m.values for m in members]
            updated = torch._foreach_mul(values, [1 - inputs.rate * m.weight_decay for m in members])
            torch._foreach_sub_(updated, directions)
            inputs.store(values, updated)


def _sum_squares(member: ShardedParameter, gradient: Tensor) -> Tensor:
    """Return the sum of squared gradients of each row, then of each column, of the whole matrix, 1-D, float64.

    Only elements in this rank's shard are summed; rows and columns outside the shard have the sum 0.
    """
    num_rows, num_columns = member.parameter.shape
    rows, columns = member.region
    squares = gradient.square()
    sums = squares.new_zeros(num_rows + num_columns, dtype=torch.float64)
    sums[:num_rows][rows] = squares.sum(dim=1).double()
    sums[num_rows:][columns] = squares.sum(dim=0).double()
    return sums


def _direction(member: ShardedParameter, gradient: Tensor) -> Tensor:
    """Return the gradient divided by the square root of its second moment, before clipping; overwrites the gradient."""
    if not member.is_matrix:
        return gradient.mul_(member.held("exp_avg_sq").rsqrt())
    rows, columns = member.region
    row_mean, column_mean = member.state["row_mean"], member.state["column_mean"]
    by_row = (row_mean[rows] / row_mean.mean(dtype=torch.float64)).rsqrt().to(gradient.dtype)
    return gradient.mul_(by_row[:, None]).mul_(column_mean[columns].rsqrt())
