"""Muon: momentum of a matrix, made orthogonal, so that all its directions are learnt at one speed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from train.optim.exchange import Exchange
from train.optim.inputs import UpdateInputs
from train.optim.parameter import Member, chunks, shard_axes, sharing

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic x -> ax + bx³ + cx⁵ that pushes singular values to about 1. Source: Jordan 2024."""
ITERATIONS = 5
"""Times it is applied. Source: Jordan 2024."""
TINY = 1e-7
"""Least length that a matrix is divided by."""


@dataclass(frozen=True)
class Muon:
    """The rule, for the matrices it updates.

    The update of an m x n matrix is 0.2·√max(m, n) times an orthogonal one, so that its root mean square is about 0.2,
    as AdamW's: one learning rate and one decay serve both. The iteration runs on whole matrices, each on one of the
    ranks that share it, and batched where shapes are equal.
    Sources: Jordan 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, arXiv 2502.16982,
    section 2.2.
    """

    members: Sequence[Member]
    momentum: float
    precision: torch.dtype
    """Of the iteration, and of what is sent for it."""
    exchanges: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Member]] = {}
        # Large ones first: they are dealt out in turn, and equal shapes stand side by side.
        for member in sorted(self.members, key=lambda m: (-m.parameter.numel(), tuple(m.parameter.shape))):
            member.state["momentum"] = torch.zeros_like(member.parameter)
            axes = shard_axes(member.parameter)
            mesh = member.parameter.device_mesh if isinstance(member.parameter, DTensor) and axes else None
            groups.setdefault((mesh, axes), []).append(member)
        for (mesh, _), members in groups.items():
            first = members[0].parameter
            num_ranks = len(sharing(first)) if mesh and isinstance(first, DTensor) else 1
            self.exchanges.extend(Exchange(run) for run in chunks(members, num_ranks << 24))

    def update(self, inputs: UpdateInputs) -> None:
        """Make an update; it does not depend on its number."""
        for exchange in self.exchanges:
            members, pieces = exchange.members, self._orthogonal_pieces(exchange, inputs)
            # In the memory of the pieces: decayed weights less the step along them.
            torch._foreach_mul_(pieces, [-inputs.rate * 0.2 * max(m.parameter.shape) ** 0.5 for m in members])
            for decay in dict.fromkeys(member.weight_decay for member in members):
                alike = [(p, m.values) for p, m in zip(pieces, members, strict=True) if m.weight_decay == decay]
                torch._foreach_add_([p for p, _ in alike], [v for _, v in alike], alpha=1 - inputs.rate * decay)
            inputs.store([m.values for m in members], pieces)

    def _orthogonal_pieces(self, exchange: Exchange, inputs: UpdateInputs) -> list[Tensor]:
        """What this rank holds of the orthogonal matrices, in the dtype of the weights."""
        gradients = self._averaged(exchange.members, inputs)
        wholes = exchange.gather([gradient.to(self.precision) for gradient in gradients])
        for shape in dict.fromkeys(whole.shape for whole in wholes.values()):
            alike = [i for i, whole in wholes.items() if whole.shape == shape]
            wholes.update(zip(alike, orthogonal(torch.stack([wholes[i] for i in alike])), strict=True))
        like = gradients[0].new_empty(0, dtype=self.precision)
        return [piece.to(gradients[0].dtype) for piece in exchange.scatter(wholes, like)]

    def _averaged(self, members: Sequence[Member], inputs: UpdateInputs) -> list[Tensor]:
        """Nesterov's mean of the gradients, in their memory; the momentum is brought forward."""
        held, gradients = [m.held("momentum") for m in members], inputs.scaled(members)
        momenta = torch._foreach_lerp(held, gradients, 1 - self.momentum)
        inputs.store(held, momenta)
        torch._foreach_lerp_(gradients, momenta, self.momentum)
        return gradients


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices with the singular vectors of these, (number, m, n), in their own precision.

    Singular values come out between 0.7 and 1.2, roughly; those below a thousandth of the matrix's length come out
    smaller. Source: Jordan 2024 (Newton-Schulz iteration of fifth order).
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    length = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / length.clamp(min=TINY)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
