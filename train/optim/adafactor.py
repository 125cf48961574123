"""Adafactor: the second moment of a matrix, stored as a mean per row and per column, without a first moment."""

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
    Every rank with a shard of a matrix holds the means of all its rows and columns, as plain tensors that are the same
    on every such rank. A checkpoint of these means can therefore be read into any layout.
    """

    members: Sequence[ShardedParameter]

    def __post_init__(self) -> None:
        for member in self.members:
            if member.is_matrix:
                num_rows, num_columns = member.parameter.shape
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
    """Return the squared gradients of this rank's shard, summed over each row and over each column, 1-D, float64.

    The sums of all rows of the whole matrix come first, then those of all columns; they are 0 outside the shard.
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
