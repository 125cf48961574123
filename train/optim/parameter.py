"""A parameter as an optimiser sees it: the numbers this rank holds, where they lie in the whole, and its state.

Optimisers compute on what a rank holds and never on DTensors: one list may then mix plain tensors with DTensors on any
meshes, kernels that take whole lists serve all of them, and nothing is communicated unasked. What an optimiser must
know of the whole parameter it sums over the ranks that share it, explicitly and in float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, _StridedShard

from schemas.errors import ContractError

Region = tuple[slice, ...]
"""Part of a tensor: one range per dim."""
Coordinate = tuple[int, ...]
"""Place in a mesh: one index per axis."""


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the same numbers, not a copy, and no gradient flows through them."""
    return without_wrapper(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def without_wrapper(tensor: Tensor) -> Tensor:
    """The same numbers as a plain tensor, where torchao has wrapped a weight so that it is all-gathered in 8 bits."""
    return getattr(tensor, "_tensor", tensor)


def as_stored(tensor: Tensor) -> Tensor:
    """The same numbers as a checkpoint stores them: without such a wrapper, laid out on the ranks as before."""
    if not isinstance(tensor, DTensor) or (held := tensor.to_local()) is (plain := without_wrapper(held)):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        plain, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).detach()


def check_placements(name: str, parameter: Tensor, gradient: Tensor) -> None:
    """Raises ContractError if a gradient does not lie on the ranks as its parameter does."""
    here, there = getattr(parameter, "placements", None), getattr(gradient, "placements", None)
    if there != here:
        raise ContractError(
            f"optim: promised a gradient of {name} on the ranks as its parameter, {here or 'a plain tensor'}, found "
            f"{there or 'a plain tensor'}; reduce it before the update"
        )


def shard_axes(tensor: Tensor) -> tuple[int, ...]:
    """The axes of a tensor's mesh that it is split over; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    sizes = enumerate(tensor.device_mesh.shape)
    return tuple(a for a, size in sizes if size > 1 and not isinstance(tensor.placements[a], Replicate))


def region_at(tensor: DTensor, coordinate: Coordinate) -> Region:
    """What the rank at this place of the mesh holds of a tensor.

    FSDP splits what tensor parallelism has left although its axis comes first: such placements are strided, and act
    after the others of their dim. Torch's own offsets are wrong where an uneven split leaves a rank with nothing.
    """
    bounds = [(0, size) for size in tensor.shape]
    axes = shard_axes(tensor)
    strided = [axis for axis in axes if isinstance(tensor.placements[axis], _StridedShard)]
    for axis in (*(axis for axis in axes if axis not in strided), *strided):
        dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
        begin, end = bounds[dim]
        share = -(-(end - begin) // tensor.device_mesh.size(axis))
        first = min(end, begin + coordinate[axis] * share)
        bounds[dim] = (first, min(end, first + share))
    return tuple(slice(*bound) for bound in bounds)


def region_of(name: str, tensor: Tensor) -> Region:
    """What this rank holds of a tensor. Raises ContractError if it holds another number of elements."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    region = region_at(tensor, _coordinate(tensor))
    expected, found = tuple(part.stop - part.start for part in region), tuple(local(tensor).shape)
    if expected != found:
        raise ContractError(
            f"optim: promised a shard of {name} of shape {expected}, as {tensor.placements} says, found {found}; "
            "choose axes that divide the parameter"
        )
    return region


def _coordinate(tensor: DTensor) -> Coordinate:
    found = tensor.device_mesh.get_coordinate()
    if found is None:
        raise ContractError("optim: promised parameters of this rank, found one on a mesh without it; leave it out")
    return tuple(found)


def sharing(tensor: DTensor) -> list[Coordinate]:
    """The places in the mesh that together hold one copy of the tensor, this rank's among them, in order."""
    here, axes = _coordinate(tensor), shard_axes(tensor)
    sizes = [range(tensor.device_mesh.size(axis)) if axis in axes else (here[axis],) for axis in range(len(here))]
    return list(product(*sizes))


@dataclass
class Member:
    """One parameter of an optimiser."""

    name: str
    parameter: nn.Parameter
    region: Region
    """What this rank holds of it."""
    weight_decay: float = 0.0
    state: dict[str, Tensor] = field(default_factory=dict)
    """What the rule remembers of it, allocated when it is made."""
    _locals: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    """The local tensors of the parameter and its state. FSDP2 may replace a parameter's until its first forward pass
    (it pads uneven shards there) and keeps it from then on, so that a look-up at the first update is valid for good."""

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, rather than gains or biases (of which there may be a row per head)."""
        return self.parameter.ndim == 2 and not self.name.endswith("bias")

    @property
    def values(self) -> Tensor:
        """The numbers this rank holds, looked up once."""
        return self._once("", self.parameter)

    def held(self, key: str) -> Tensor:
        """What this rank holds of a state, looked up once."""
        return self._once(key, self.state[key])

    def _once(self, key: str, tensor: Tensor) -> Tensor:
        found = self._locals.get(key)
        if found is None:
            found = self._locals[key] = local(tensor)
        return found

    def look_up_again(self) -> None:
        """Forget which tensors were looked up."""
        self._locals.clear()


def chunks(members: Sequence[Member], max_numel: int = 1 << 24) -> Iterator[list[Member]]:
    """The members in runs of at most so many numbers, or of one member; bounds the memory of what is computed of them.

    Whole parameters are counted, not shards: ranks that share them have the same runs.
    """
    run: list[Member] = []
    for member in members:
        if run and sum(m.parameter.numel() for m in run) + member.parameter.numel() > max_numel:
            yield run
            run = []
        run.append(member)
    if run:
        yield run


def total_over_shards(members: Sequence[Member], parts: Sequence[Tensor]) -> list[Tensor]:
    """For each member the sum of its part (1-D, float64) over the ranks that hold one copy of it together."""
    totals = list(parts)
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for place, member in enumerate(members):
        if isinstance(member.parameter, DTensor) and (axes := shard_axes(member.parameter)):
            groups.setdefault((member.parameter.device_mesh, axes), []).append(place)
    for (mesh, axes), places in groups.items():
        flat = torch.cat([totals[place] for place in places])
        for axis in axes:
            dist.all_reduce(flat, group=mesh.get_group(axis))
        for place, total in zip(places, torch.split(flat, [totals[place].numel() for place in places]), strict=True):
            totals[place] = total
    return totals
