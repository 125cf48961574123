"""NorMuon: Muon whose updates have about the same size in every row, that is, for every neuron.

Orthogonal matrices have singular values of 1, but their rows differ in size. A running mean of each row's squares
divides the row; the update then gets the root mean square of Muon's again. The means are those of whole matrices,
equal on all ranks that hold a shard, so a checkpoint of them can be read into any layout.

Source: Li et al. 2025, arXiv 2510.05491, algorithm 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train.optim.muon import MatrixExchange, Muon
from train.optim.parameter import ShardedParameter, UpdateInputs, local_tensor, total_over_shards

EPS = 1e-8
"""Added to the root of a row's mean square; a row of zeros stays zero. Source: Li et al. 2025, algorithm 1."""


@dataclass(frozen=True)
class NorMuon(Muon):
    """NorMuon's update rule for some matrices, with the momentum, orthogonal matrices and exchanges of Muon."""

    normuon_beta2: float = 0.95
    """Decay of the running mean of squares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for member in self.members:
            member.state["row_square"] = local_tensor(member.parameter).new_zeros(member.parameter.shape[0])

    def directions(self, exchange: MatrixExchange, inputs: UpdateInputs) -> list[Tensor]:
        """Return this rank's shards of the updates of some matrices, before the learning rate."""
        members, pieces = exchange.members, self.orthogonal_shards(exchange, inputs)
        totals = total_over_shards(members, [_row_squares(m, p) for m, p in zip(members, pieces, strict=True)])
        for member, piece, total in zip(members, pieces, totals, strict=True):
            held, width = member.state["row_square"], member.parameter.shape[1]
            squares = held.lerp((total / width).float(), 1 - self.normuon_beta2)
            inputs.store([held], [squares])
            factors = 1 / (squares.double().sqrt() + EPS)
            # Of the whole matrix after the division: its Frobenius norm, from which follows the size of the update.
            norm = (total * factors.square()).sum().sqrt().clamp(min=EPS)
            factors *= 0.2 * member.parameter.numel() ** 0.5 / norm
            piece.mul_(factors[member.region[0]].to(piece.dtype)[:, None])
        return pieces


def _row_squares(member: ShardedParameter, piece: Tensor) -> Tensor:
    """Return the sum of squares of each row of a whole matrix over the columns of this rank's shard, float64."""
    sums = torch.zeros(member.parameter.shape[0], dtype=torch.float64, device=piece.device)
    sums[member.region[0]] = piece.double().square().sum(1)
    return sums
