"""A parameter as an optimiser sees it: the numbers this rank holds, where they lie in the whole, and its state.

Optimisers compute on what a rank holds and never on DTensors: one list may then mix plain tensors with DTensors on any
meshes, kernels that take whole lists serve all of them, and nothing is communicated unasked. What an optimiser must
know of the whole parameter it sums over the ranks that share it, explicitly and in float64.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
            f"optim: expected a gradient of {name} on the ranks as its parameter, {here or 'a plain tensor'}, got "
            f"{there or 'a plain tensor'}. Reduce it before the update."
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
            f"optim: expected a shard of {name} of shape {expected}, as {tensor.placements} says, got {found}. "
            "Choose axes that divide the parameter."
        )
    return region


def _coordinate(tensor: DTensor) -> Coordinate:
    found = tensor.device_mesh.get_coordinate()
    if found is None:
        raise ContractError("optim: expected parameters of this rank, got one on a mesh without it. Leave it out.")
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


# Sums of squares of lists of tensors, accurate on a CPU too.

_BLOCK = 256
"""Numbers that a CPU adds up in float32. Torch's own norm of 10^7 normal numbers is wrong by 4e-4 there, since it adds
them up in one row, and so depends on how they are split; in blocks it is as fast and wrong by less than 1e-8."""


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of each tensor, float64, (number of tensors,)."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors))).double().square()
    return torch.stack([_squared_norm(tensor) for tensor in tensors])


def _squared_norm(tensor: Tensor) -> Tensor:
    flat = tensor.flatten()
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
    return blocks.double().square().sum() + flat[whole:].double().square().sum()


# The gradients of parameters as this rank holds them, read once a step for the norm and for the update.
#
# To look up what a rank holds of a DTensor costs several microseconds of the host; one pass over the parameters does
# it, checks where each gradient lies, and leaves plain tensors. Nothing here waits for the device.


class Gradients:
    """The gradients of some parameters; `take` reads those of a step."""

    def __init__(
        self, parameters: Mapping[str, Tensor], num_stages: int = 1, copies: Mapping[str, int] | None = None
    ) -> None:
        """Ranks form `num_stages` groups of equal size, the stages of a pipeline.

        All ranks of a group hold the same parameters, split over a mesh or not. `copies` names the parameters that
        several groups hold, with their number (an embedding that the first and last stage both use: 2).
        """
        self._parameters = parameters
        self._num_stages, self._copies = num_stages, copies or {}
        self._strides: dict[str, tuple[int, ...]] = {}
        self._counts: dict[str, float] = {}
        self.taken: dict[str, Tensor] = {}
        """What `take` read last, by the parameters' names."""

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """The local tensors of all gradients there are, in memory as their parameters.

        An update may use their memory. Raises ContractError for a gradient that does not lie on the ranks as its
        parameter does.
        """
        if not self._strides:
            self._look_up()
        self.taken = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            check_placements(name, parameter, gradient)
            numbers = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if numbers.stride() != self._strides[name]:
                # Kernels that take lists read memory in order, whatever its strides: torch's fused AdamW on a CPU does.
                numbers = torch.empty_like(local(parameter)).copy_(numbers)
            self.taken[name] = numbers
        return self.taken

    def _look_up(self) -> None:
        """Find the strides of each shard, and on how many ranks each of its numbers is counted."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        for name, parameter in self._parameters.items():
            num_shards = 1
            if isinstance(parameter, DTensor):
                num_shards = math.prod(parameter.device_mesh.size(axis) for axis in shard_axes(parameter))
            self._strides[name] = local(parameter).stride()
            self._counts[name] = world_size / self._num_stages / num_shards * self._copies.get(name, 1)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Euclidean norm of what was taken over all ranks, a 0-d float64 tensor, the same on every rank.

        Every rank of the default group takes part; each shard counts once, however many ranks hold it.
        """
        by_count: dict[float, list[Tensor]] = {}
        for name, gradient in self.taken.items():
            by_count.setdefault(self._counts[name], []).append(gradient)
        device = next((local(parameter).device for parameter in self._parameters.values()), torch.device("cpu"))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for count, gradients in by_count.items():
            total += squared_norms(gradients).sum() / count
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.sqrt()


def gradient_norm(
    parameters: Mapping[str, Tensor], num_stages: int = 1, copies: Mapping[str, int] | None = None
) -> Tensor:
    """The norm of the gradients that parameters have now, see `Gradients`."""
    gradients = Gradients(parameters, num_stages, copies)
    gradients.take()
    return gradients.norm()


# What an update is made from, as tensors on the device, so that clipping and skipping never wait for the host.


@dataclass(frozen=True)
class UpdateInputs:
    """The gradients of an update and the numbers that belong to it."""

    gradients: Mapping[str, Tensor]
    """What this rank holds of each gradient; a rule may use the memory."""
    rate: float
    """Learning rate."""
    count: Tensor
    """Number of this update, 1 = first, 0-d float32; that of the update before where this one is skipped."""
    grad_scale: Tensor | None
    """What the gradients are divided by, 0-d float32; None = nothing."""
    found_inf: Tensor
    """1 where the update is skipped, since loss or gradient is not finite; else 0; 0-d float32."""

    def of(self, members: Sequence[Member]) -> list[Tensor]:
        """The gradients of some members as they are."""
        return [self.gradients[member.name] for member in members]

    def scaled(self, members: Sequence[Member]) -> list[Tensor]:
        """The gradients of some members divided by `grad_scale`, in their own memory; call it once for each member."""
        gradients = self.of(members)
        if self.grad_scale is not None and gradients:
            torch._foreach_div_(gradients, self.grad_scale)
        return gradients

    @cached_property
    def skipped(self) -> Tensor:
        """Whether the update is skipped, 0-d bool."""
        return self.found_inf > 0

    def store(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write values into targets; where the update is skipped, every bit of the targets stays."""
        # A product with 0 would not do: 0 * nan is nan, and -0.0 + 0.0 is 0.0.
        for target, value in zip(targets, values, strict=True):
            torch.where(self.skipped, target, value, out=target)
