"""Adafactor: the second moment of a matrix as one mean per row and one per column, no first moment."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.optim.members import Member, chunks, total_over_shards
from train.optim.norm import squared_norms

EPS = 1e-30
"""Added to squared gradients (ε₁). Source: Shazeer and Stern 2018, section 9."""
DECAY = 0.8
"""The mean of update t forgets t^-0.8 of what was. Source: Shazeer and Stern 2018, section 9."""
CLIP = 1.0
"""Largest root mean square of an update before the learning rate (d). Source: Shazeer and Stern 2018, section 9."""


@dataclass(frozen=True)
class Adafactor:
    """The rule, for the parameters it updates; rates are absolute, not relative to the size of the weights.

    Source: Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 (matrices) and 5 (vectors), with decoupled decay.
    Every rank holds the means of all rows and columns of the matrices that it holds a part of, plain tensors which are
    those of the whole matrix and the same on every rank: a checkpoint of them can be read into any layout.
    """

    members: Sequence[Member]

    def __post_init__(self) -> None:
        for member in self.members:
            if member.is_matrix:
                num_rows, num_columns = member.parameter.shape
                member.state["row_mean"] = member.values.new_zeros(num_rows)
                member.state["column_mean"] = member.values.new_zeros(num_columns)
            else:
                member.state["exp_avg_sq"] = torch.zeros_like(member.parameter)

    def update(self, rate: float, step: int) -> None:
        """Make update `step` (1 = first)."""
        weight = step**-DECAY
        for members in chunks(self.members):
            matrices = [m for m in members if m.is_matrix]
            for member, sums in zip(matrices, total_over_shards(matrices, [_sums(m) for m in matrices]), strict=True):
                rows, columns = torch.split(sums, list(member.parameter.shape))
                member.state["row_mean"].lerp_((rows / len(columns) + EPS).float(), weight)
                member.state["column_mean"].lerp_((columns / len(rows) + EPS).float(), weight)
            directions = [_direction(m, weight) for m in members]
            squares = total_over_shards(members, list(squared_norms(directions)[:, None]))
            for member, direction, square in zip(members, directions, squares, strict=True):
                clip = (square[0] / member.parameter.numel()).sqrt().div_(CLIP).clamp_(min=1.0)
                direction.mul_((rate / clip).float())
            values = [m.values for m in members]
            torch._foreach_mul_(values, [1 - rate * m.weight_decay for m in members])
            torch._foreach_sub_(values, directions)


def _sums(member: Member) -> Tensor:
    """Squared gradients summed over each row, then each column of what this rank holds; 0 elsewhere, float64."""
    num_rows, num_columns = member.parameter.shape
    rows, columns = member.region
    squares = member.gradient.square()
    sums = squares.new_zeros(num_rows + num_columns, dtype=torch.float64)
    sums[:num_rows][rows] = squares.sum(dim=1).double()
    sums[num_rows:][columns] = squares.sum(dim=0).double()
    return sums


def _direction(member: Member, weight: float) -> Tensor:
    """The gradient divided by the root of its second moment, in the memory of the gradient; not yet clipped."""
    gradient = member.gradient
    if not member.is_matrix:
        moment = member.held("exp_avg_sq").lerp_(gradient.square().add_(EPS), weight)
        return gradient.mul_(moment.rsqrt())
    rows, columns = member.region
    row_mean, column_mean = member.state["row_mean"], member.state["column_mean"]
    by_row = (row_mean[rows] / row_mean.mean(dtype=torch.float64)).rsqrt().to(gradient.dtype)
    return gradient.mul_(by_row[:, None]).mul_(column_mean[columns].rsqrt())
