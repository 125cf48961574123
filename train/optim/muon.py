"""Muon: momentum of a matrix, made orthogonal, so that all its directions are learnt at one speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from train.optim.parameter import Coordinate, Member, Region, UpdateInputs, chunks, region_at, shard_axes, sharing

# Whole matrices out of shards: each goes to one of the ranks that share it, and what is made of it comes back.
#
# The ranks that share matrices divide them among themselves, so that work on whole matrices is done once and a rank
# receives no more numbers than it holds. Along one mesh axis that is one all-to-all; on meshes that split a matrix by
# several axes, one per axis: pieces travel to the owner's index along the first axis, then along the next.

Piece = tuple[int, int]
"""A matrix, by its place in the list, and the rank that holds this piece of it, by its place among those that share."""


class Exchange:
    """The ways of the pieces of some matrices with one mesh and one set of axes, worked out once."""

    def __init__(self, members: Sequence[Member]) -> None:
        first = members[0].parameter
        self.members, self.axes = members, shard_axes(first)
        self.mesh = first.device_mesh if isinstance(first, DTensor) and self.axes else None
        self.ranks: list[Coordinate] = sharing(first) if self.mesh and isinstance(first, DTensor) else [()]
        here = tuple(self.mesh.get_coordinate() or ()) if self.mesh else ()
        self.here = self.ranks.index(here)
        self.owned = [i for i in range(len(members)) if i % len(self.ranks) == self.here]
        """The matrices that come to this rank."""
        self.regions: dict[Piece, Region] = {
            (i, r): region_at(m.parameter, rank) if isinstance(m.parameter, DTensor) and self.mesh else m.region
            for i, m in enumerate(members)
            for r, rank in enumerate(self.ranks)
        }
        stops = [self._stops(hops) for hops in range(len(self.axes) + 1)]
        self._ways = [self._way(stops[hop], stops[hop + 1], axis) for hop, axis in enumerate(self.axes)]

    def gather(self, pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """The whole matrices this rank owns, by their place in the list, from every rank's pieces of all of them."""
        held = {(i, self.here): piece for i, piece in enumerate(pieces)}
        for axis, (leaving, coming) in zip(self.axes, self._ways, strict=True):
            held = self._hop(axis, held, leaving, coming, pieces[0])
        wholes = {i: pieces[0].new_empty(self.members[i].parameter.shape) for i in self.owned}
        for (i, r), piece in held.items():
            wholes[i][self.regions[i, r]] = piece
        return wholes

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """This rank's pieces of all matrices, from the whole ones that every rank owns; dtype and device as `like`."""
        held = {(i, r): wholes[i][region] for (i, r), region in self.regions.items() if i in wholes}
        for axis, (leaving, coming) in reversed(list(zip(self.axes, self._ways, strict=True))):
            held = self._hop(axis, held, coming, leaving, like)
        return [held[i, self.here] for i in range(len(self.members))]

    def _stops(self, hops: int) -> dict[Piece, Coordinate]:
        """Where each piece is after so many hops: at its owner's index along the axes it has travelled."""
        travelled = self.axes[:hops]
        return {
            (i, r): tuple(
                self.ranks[i % len(self.ranks)][axis] if axis in travelled else index
                for axis, index in enumerate(self.ranks[r])
            )
            for i, r in self.regions
        }

    def _way(
        self, before: Mapping[Piece, Coordinate], after: Mapping[Piece, Coordinate], axis: int
    ) -> tuple[list[list[Piece]], list[list[Piece]]]:
        """The pieces that leave this rank for each index along the axis in a hop, and those that come from it."""
        here, size = self.ranks[self.here], self.mesh.size(axis) if self.mesh else 1
        leaving: list[list[Piece]] = [[] for _ in range(size)]
        coming: list[list[Piece]] = [[] for _ in range(size)]
        for piece, stop in before.items():
            if stop == here:
                leaving[after[piece][axis]].append(piece)
            if after[piece] == here:
                coming[stop[axis]].append(piece)
        return leaving, coming

    def _hop(
        self,
        axis: int,
        held: Mapping[Piece, Tensor],
        leaving: Sequence[Sequence[Piece]],
        coming: Sequence[Sequence[Piece]],
        like: Tensor,
    ) -> dict[Piece, Tensor]:
        """What this rank holds after one all-to-all."""
        shapes = {p: [part.stop - part.start for part in self.regions[p]] for ps in coming for p in ps}
        sizes = {p: shape[0] * shape[1] for p, shape in shapes.items()}
        sent = torch.cat([like.new_empty(0), *(held[p].reshape(-1) for ps in leaving for p in ps)])
        received = like.new_empty(sum(sizes.values()))
        dist.all_to_all_single(
            received,
            sent,
            [sum(sizes[p] for p in ps) for ps in coming],
            [sum(held[p].numel() for p in ps) for ps in leaving],
            group=self.mesh.get_group(axis) if self.mesh else None,
        )
        order = [p for ps in coming for p in ps]
        parts = torch.split(received, [sizes[p] for p in order])
        return {p: part.view(shapes[p]) for p, part in zip(order, parts, strict=True)}


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
