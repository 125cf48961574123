"""Muon: orthogonalized momentum of matrices, so that all their directions are learned at the same speed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from train.config.optim import NEWTON_SCHULZ_STEPS, NUMBERS_AT_ONCE
from train.optim.parameter import (
    Coordinate,
    Region,
    ShardedParameter,
    UpdateInputs,
    chunk_members,
    region_at,
    shard_axes,
    sharing_coordinates,
)

# Muon computes on whole matrices. The shards of a matrix are gathered on one of the ranks that hold them, its owner,
# and the result is scattered back.
#
# The ranks that hold shards of the same matrices own equally many of them. So work on whole matrices is done once, and
# a rank receives no more numbers than it holds. Along a single mesh axis that is one all-to-all. On meshes that split a
# matrix by several axes, it is one per axis: shards move to the owner's index along the first axis, then along the
# next.

ShardKey = tuple[int, int]
"""A shard: the index of its matrix in the list, and the index of its rank among the ranks with a shard of it."""


class MatrixExchange:
    """The all-to-alls that gather some matrices from their shards, and scatter them back.

    All matrices must be sharded over the same axes of the same mesh.
    """

    def __init__(self, members: Sequence[ShardedParameter]) -> None:
        first = members[0].parameter
        self.members, self.axes = members, shard_axes(first)
        self.mesh = first.device_mesh if isinstance(first, DTensor) and self.axes else None
        self.ranks: list[Coordinate] = sharing_coordinates(first) if self.mesh and isinstance(first, DTensor) else [()]
        here = tuple(self.mesh.get_coordinate() or ()) if self.mesh else ()
        self.here = self.ranks.index(here)
        self.owned = [i for i in range(len(members)) if i % len(self.ranks) == self.here]
        """Indices of the matrices that this rank owns."""
        self.regions: dict[ShardKey, Region] = {
            (i, r): region_at(m.parameter, rank) if isinstance(m.parameter, DTensor) and self.mesh else m.region
            for i, m in enumerate(members)
            for r, rank in enumerate(self.ranks)
        }
        stops = [self._stops(hops) for hops in range(len(self.axes) + 1)]
        self._routes = [self._route(stops[hop], stops[hop + 1], axis) for hop, axis in enumerate(self.axes)]

    def gather(self, pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return, by index, the whole matrices that this rank owns. `pieces`: this rank's shards of all matrices."""
        held = {(i, self.here): shard for i, shard in enumerate(pieces)}
        for axis, (leaving, coming) in zip(self.axes, self._routes, strict=True):
            held = self._hop(axis, held, leaving, coming, pieces[0])
        wholes = {i: pieces[0].new_empty(self.members[i].parameter.shape) for i in self.owned}
        for (i, r), shard in held.items():
            wholes[i][self.regions[i, r]] = shard
        return wholes

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """Return this rank's shards of all matrices, in dtype and device of `like`; `wholes`: the matrices it owns."""
        held = {(i, r): wholes[i][region] for (i, r), region in self.regions.items() if i in wholes}
        for axis, (leaving, coming) in reversed(list(zip(self.axes, self._routes, strict=True))):
            held = self._hop(axis, held, coming, leaving, like)
        return [held[i, self.here] for i in range(len(self.members))]

    def _stops(self, hops: int) -> dict[ShardKey, Coordinate]:
        """Return the coordinate of the rank that holds each shard after the first `hops` all-to-alls."""
        # Along the completed axes it is the owner's coordinate, along the others that of the rank where the shard
        # started.
        completed = self.axes[:hops]
        return {
            (i, r): tuple(
                self.ranks[i % len(self.ranks)][axis] if axis in completed else index
                for axis, index in enumerate(self.ranks[r])
            )
            for i, r in self.regions
        }

    def _route(
        self, before: Mapping[ShardKey, Coordinate], after: Mapping[ShardKey, Coordinate], axis: int
    ) -> tuple[list[list[ShardKey]], list[list[ShardKey]]]:
        """Return the shards that this rank sends to each rank along an axis, and those that it receives from each.

        `before`, `after`: coordinate of the rank that holds each shard before and after the all-to-all.
        """
        here, size = self.ranks[self.here], self.mesh.size(axis) if self.mesh else 1
        leaving: list[list[ShardKey]] = [[] for _ in range(size)]
        coming: list[list[ShardKey]] = [[] for _ in range(size)]
        for shard, stop in before.items():
            if stop == here:
                leaving[after[shard][axis]].append(shard)
            if after[shard] == here:
                coming[stop[axis]].append(shard)
        return leaving, coming

    def _hop(
        self,
        axis: int,
        held: Mapping[ShardKey, Tensor],
        leaving: Sequence[Sequence[ShardKey]],
        coming: Sequence[Sequence[ShardKey]],
        like: Tensor,
    ) -> dict[ShardKey, Tensor]:
        """Return the shards that this rank holds after an all-to-all along an axis."""
        shapes = {p: [bounds.stop - bounds.start for bounds in self.regions[p]] for ps in coming for p in ps}
        sizes = {p: math.prod(shape) for p, shape in shapes.items()}
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
        shards = torch.split(received, [sizes[p] for p in order])
        return {p: shard.view(shapes[p]) for p, shard in zip(order, shards, strict=True)}


Quintic = tuple[float, float, float]
"""Coefficients a, b, c of the odd polynomial ax + bx³ + cx⁵."""
QUINTIC: Quintic = (3.4445, -4.7750, 2.0315)
"""A polynomial that, applied repeatedly, maps singular values to about 1. Source: Jordan 2024."""
POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""A polynomial for each step, which together map singular values of at least 1e-3 to nearly 1 in the largest error.

Source: Amsel et al. 2025, arXiv 2505.16932, section 4 and its listing."""
SAFETY = 1.01
"""Divisor of the argument of all but the last polynomial of POLAR_EXPRESS, so that rounding cannot make a singular
value grow without bound. Source: Amsel et al. 2025, section 4.4."""
COEFFICIENTS: Mapping[str, tuple[Quintic, ...]] = {
    "jordan": (QUINTIC,) * NEWTON_SCHULZ_STEPS,
    "polar_express": (
        *((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS[:-1]),
        POLAR_EXPRESS[-1],
    ),
}
"""The polynomials of the iteration, by the value of `optim.muon_coefficients`."""
MIN_NORM = 1e-7
"""Minimum norm by which a matrix is divided, so that a matrix of zeros is not divided by zero."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Muon:
    """Muon's update rule for some matrices.

    The update of an m x n matrix is 0.2·√max(m, n) times an orthogonal matrix. Its root mean square is about 0.2, like
    that of AdamW, so Muon works with AdamW's learning rate and decay.
    Sources: Jordan 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, arXiv 2502.16982,
    section 2.2.
    """

    members: Sequence[ShardedParameter]
    momentum: float
    muon_precision: str
    """Precision of the iteration, and of the matrices that are sent for it."""
    muon_coefficients: str = "jordan"
    """Name of the iteration's polynomials."""
    exchanges: list[MatrixExchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[ShardedParameter]] = {}
        # Large matrices come first, because owners are assigned in turn; matrices of equal shape are adjacent.
        for member in sorted(self.members, key=lambda m: (-m.parameter.numel(), tuple(m.parameter.shape))):
            member.state["momentum"] = torch.zeros_like(member.parameter)
            axes = shard_axes(member.parameter)
            mesh = member.parameter.device_mesh if isinstance(member.parameter, DTensor) and axes else None
            groups.setdefault((mesh, axes), []).append(member)
        for (mesh, _), members in groups.items():
            first = members[0].parameter
            num_ranks = len(sharing_coordinates(first)) if mesh and isinstance(first, DTensor) else 1
            self.exchanges.extend(MatrixExchange(run) for run in chunk_members(members, num_ranks * NUMBERS_AT_ONCE))

    def update(self, inputs: UpdateInputs) -> None:
        """Update the matrices and their momentum once."""
        for exchange in self.exchanges:
            members, pieces = exchange.members, self.directions(exchange, inputs)
            # The memory of the shards receives the decayed weights minus the update.
            torch._foreach_mul_(pieces, [-inputs.rate * m.rate_multiplier for m in members])
            for decay in dict.fromkeys(member.weight_decay for member in members):
                alike = [(p, m.values) for p, m in zip(pieces, members, strict=True) if m.weight_decay == decay]
                torch._foreach_add_([p for p, _ in alike], [v for _, v in alike], alpha=1 - inputs.rate * decay)
            inputs.store([m.values for m in members], pieces)

    def directions(self, exchange: MatrixExchange, inputs: UpdateInputs) -> list[Tensor]:
        """Return this rank's shards of the updates of some matrices, before the learning rate."""
        pieces = self.orthogonal_shards(exchange, inputs)
        torch._foreach_mul_(pieces, [0.2 * max(m.parameter.shape[-2:]) ** 0.5 for m in exchange.members])
        return pieces

    def orthogonal_shards(self, exchange: MatrixExchange, inputs: UpdateInputs) -> list[Tensor]:
        """Return this rank's shards of the orthogonalized momentum matrices, in the dtype of the weights."""
        gradients, precision = self._apply_momentum(exchange.members, inputs), PRECISIONS[self.muon_precision]
        wholes = exchange.gather([gradient.to(precision) for gradient in gradients])
        for shape in dict.fromkeys(whole.shape for whole in wholes.values()):
            alike = [i for i, whole in wholes.items() if whole.shape == shape]
            stacked = torch.stack([wholes[i] for i in alike])
            # A stack of matrices, such as those of experts, is orthogonalized matrix by matrix.
            separate = orthogonalize(stacked.view(-1, *shape[-2:]), COEFFICIENTS[self.muon_coefficients])
            wholes.update(zip(alike, separate.view(stacked.shape), strict=True))
        like = gradients[0].new_empty(0, dtype=precision)
        return [piece.to(gradients[0].dtype) for piece in exchange.scatter(wholes, like)]

    def _apply_momentum(self, members: Sequence[ShardedParameter], inputs: UpdateInputs) -> list[Tensor]:
        """Update the momentum, and return the gradients with Nesterov momentum; overwrites the gradients."""
        held, gradients = [m.held("momentum") for m in members], inputs.scaled(members)
        momenta = torch._foreach_lerp(held, gradients, 1 - self.momentum)
        inputs.store(held, momenta)
        torch._foreach_lerp_(gradients, momenta, self.momentum)
        return gradients


def orthogonalize(matrices: Tensor, steps: Sequence[Quintic] = COEFFICIENTS["jordan"]) -> Tensor:
    """Return nearly orthogonal matrices with the same singular vectors, (number, m, n), in the same precision.

    The new singular values are roughly 0.7 to 1.2, and 0.88 to 1.12 with the polynomials of Polar Express. They are
    smaller where the old ones are below a thousandth of the matrix's norm. Source: Jordan 2024 (Newton-Schulz iteration
    of fifth order).
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    length = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / length.clamp(min=MIN_NORM)
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
