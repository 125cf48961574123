"""Whole matrices out of shards: each goes to one of the ranks that share it, and what is made of it comes back.

The ranks that share matrices divide them among themselves, so that work on whole matrices is done once and a rank
receives no more numbers than it holds. Along one mesh axis that is one all-to-all; on meshes that split a matrix by
several axes, one per axis: pieces travel to the owner's index along the first axis, then along the next.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.optim.parameter import Coordinate, Member, Region, region_at, shard_axes, sharing

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
