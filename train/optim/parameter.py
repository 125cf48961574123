"""A rank's shard of a parameter, with its optimizer state; and the gradients, their norm, and the inputs of an update.

Optimizers compute on local tensors and never on DTensors. A list may then mix plain tensors with DTensors on any mesh,
multi-tensor kernels can process all of them, and there is no implicit communication. Sums over a whole parameter are
computed explicitly, in float64, over the ranks that hold its shards.
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
from train.config.optim import NUMBERS_AT_ONCE

Region = tuple[slice, ...]
"""A region of a tensor: a range of indices for each dimension."""
Coordinate = tuple[int, ...]
"""A rank's position in a mesh: an index for each axis."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor: the same memory, detached from the graph."""
    return without_wrapper(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def without_wrapper(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside torchao's wrapper for fp8 all-gathers; return any other tensor unchanged."""
    return getattr(tensor, "_tensor", tensor)


def without_torchao_wrapper(tensor: Tensor) -> Tensor:
    """Return a tensor as a checkpoint stores it: without torchao's wrapper, with the same placement."""
    if not isinstance(tensor, DTensor) or (held := tensor.to_local()) is (plain := without_wrapper(held)):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        plain, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).detach()


def check_placements(name: str, parameter: Tensor, gradient: Tensor) -> None:
    """Raise ContractError if a gradient and its parameter have different placements."""
    here, there = getattr(parameter, "placements", None), getattr(gradient, "placements", None)
    if there != here:
        raise ContractError(
            f"optim: expected a gradient of {name} placed like the parameter, {here or 'a plain tensor'}, got "
            f"{there or 'a plain tensor'}. Reduce the gradient over the ranks before the update."
        )


def shard_axes(tensor: Tensor) -> tuple[int, ...]:
    """Return the mesh axes over which a tensor is sharded; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    sizes = enumerate(tensor.device_mesh.shape)
    return tuple(a for a, size in sizes if size > 1 and not isinstance(tensor.placements[a], Replicate))


def region_at(tensor: DTensor, coordinate: Coordinate) -> Region:
    """Return the region of a tensor that the rank at a mesh coordinate holds."""
    # FSDP shards what tensor parallelism has sharded already, although FSDP's mesh axis comes first. FSDP's placements
    # are then strided, and apply after the others of the same dimension. torch's own offsets are wrong if an uneven
    # split leaves a rank without elements.
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
    """Return this rank's region of a tensor. Raises ContractError if the local tensor's shape is not the region's."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    region = region_at(tensor, _coordinate(tensor))
    expected, actual = tuple(bounds.stop - bounds.start for bounds in region), tuple(local_tensor(tensor).shape)
    if expected != actual:
        raise ContractError(
            f"optim: expected a shard of {name} of shape {expected}, by its placement {tensor.placements}, got "
            f"{actual}. Set the axes in [layout] to sizes that divide the shape of the parameter."
        )
    return region


def _coordinate(tensor: DTensor) -> Coordinate:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ContractError(
            f"optim: expected parameters on a device mesh that includes this rank, got one on {tensor.device_mesh}. "
            "Pass the optimizer only the parameters of this rank's pipeline stage."
        )
    return tuple(coordinate)


def sharing_coordinates(tensor: DTensor) -> list[Coordinate]:
    """Return, in order, the mesh coordinates of this rank and of the ranks with the remaining shards of its tensor."""
    here, axes = _coordinate(tensor), shard_axes(tensor)
    sizes = [range(tensor.device_mesh.size(axis)) if axis in axes else (here[axis],) for axis in range(len(here))]
    return list(product(*sizes))


@dataclass
class ShardedParameter:
    """A parameter of an optimizer, with this rank's shard and its state."""

    name: str
    parameter: nn.Parameter
    region: Region
    """The region of the parameter that this rank holds."""
    weight_decay: float = 0.0
    rate_multiplier: float = 1.0
    """Factor of the learning rate. Weight decay per update is rate · weight_decay, without this factor: with it, wide
    models would hardly decay (Wang and Aitchison 2024, arXiv 2405.13698)."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Optimizer state of the parameter, allocated by the update rule at construction."""
    _locals: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    """The local tensors of the parameter and its state. FSDP2 may replace a parameter's local tensor until the first
    forward pass (where it pads uneven shards) and never later, so a look-up at the first update remains valid."""

    @property
    def is_matrix(self) -> bool:
        """True for a matrix; False for gains and biases, even for a bias with two dimensions."""
        return self.parameter.ndim == 2 and not self.name.endswith("bias")

    @property
    def is_stack(self) -> bool:
        """True for a stack of matrices, such as those of the experts of a layer."""
        return self.parameter.ndim == 3

    @property
    def values(self) -> Tensor:
        """This rank's shard of the parameter as a plain tensor."""
        return self._once("", self.parameter)

    def held(self, key: str) -> Tensor:
        """Return this rank's shard of the optimizer state `key` as a plain tensor."""
        return self._once(key, self.state[key])

    def _once(self, key: str, tensor: Tensor) -> Tensor:
        shard = self._locals.get(key)
        if shard is None:
            shard = self._locals[key] = local_tensor(tensor)
        return shard

    def look_up_instead(self, key: str, tensor: Tensor) -> None:
        """Let `held(key)`, or `values` for an empty key, return `tensor` until the look-ups are reset."""
        self._locals[key] = tensor

    def reset_lookups(self) -> None:
        """Discard the cached local tensors."""
        self._locals.clear()


def chunk_members(
    members: Sequence[ShardedParameter], max_numel: int = NUMBERS_AT_ONCE
) -> Iterator[list[ShardedParameter]]:
    """Yield consecutive parameters in groups of at most `max_numel` elements; a larger parameter is a group of its own.

    The elements of whole parameters are counted, not those of shards.
    """
    run: list[ShardedParameter] = []
    for member in members:
        # Not shards: all ranks with shards of the same parameters form the same groups.
        if run and sum(m.parameter.numel() for m in run) + member.parameter.numel() > max_numel:
            yield run
            run = []
        run.append(member)
    if run:
        yield run


def total_over_shards(members: Sequence[ShardedParameter], parts: Sequence[Tensor]) -> list[Tensor]:
    """Return each parameter's partial results (1-D, float64), summed element-wise over the ranks with its shards."""
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
"""Number of elements that a CPU sums in float32. torch's norm of 10^7 normal numbers has an error of 4e-4 on a CPU,
because it sums them sequentially, so the norm also depends on the sharding. A norm of blocks takes no longer and has
an error below 1e-8."""


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each tensor, float64, (number of tensors,)."""
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors))).double().square()
    return torch.stack([_squared_norm(tensor) for tensor in tensors])


def _squared_norm(tensor: Tensor) -> Tensor:
    flat = tensor.flatten()
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
    return blocks.double().square().sum() + flat[whole:].double().square().sum()


# The local gradients of parameters, read once per optimizer step for the norm and for the update.
#
# To look up the local tensor of a DTensor costs the host several microseconds. A single pass over the parameters does
# that, checks the placement of each gradient, and returns plain tensors. Nothing here waits for the device.


class Gradients:
    """The gradients of some parameters; `take` reads them once per optimizer step."""

    def __init__(
        self, parameters: Mapping[str, Tensor], num_stages: int = 1, copies: Mapping[str, int] | None = None
    ) -> None:
        """`num_stages`: number of pipeline stages; each has the same number of ranks. `copies`: number of stages that
        hold a parameter, by name; 1 if not listed.
        """
        self._parameters = parameters
        self._num_stages, self._copies = num_stages, copies or {}
        self._strides: dict[str, tuple[int, ...]] = {}
        self._counts: dict[str, float] = {}
        self.taken: dict[str, Tensor] = {}
        """The last result of `take`, by parameter name."""

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """Return the local tensors of all gradients, by name, with the strides of their parameters.

        An update may overwrite the tensors. Raises ContractError for a gradient whose placement differs from its
        parameter's.
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
                # Multi-tensor kernels may ignore strides and read memory in order, as torch's fused AdamW on CPU does.
                numbers = torch.empty_like(local_tensor(parameter)).copy_(numbers)
            self.taken[name] = numbers
        return self.taken

    def _look_up(self) -> None:
        """Store the strides of each shard, and the number of ranks that hold each element."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        for name, parameter in self._parameters.items():
            num_shards = 1
            if isinstance(parameter, DTensor):
                num_shards = math.prod(parameter.device_mesh.size(axis) for axis in shard_axes(parameter))
            self._strides[name] = local_tensor(parameter).stride()
            self._counts[name] = world_size / self._num_stages / num_shards * self._copies.get(name, 1)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the Euclidean norm of the gradients of all ranks, 0-d float64.

        Every rank of the default group must call it.
        """
        by_count: dict[float, list[Tensor]] = {}
        for name, gradient in self.taken.items():
            by_count.setdefault(self._counts[name], []).append(gradient)
        device = next((local_tensor(parameter).device for parameter in self._parameters.values()), torch.device("cpu"))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for count, gradients in by_count.items():
            # Each shard counts once, however many ranks hold it.
            total += squared_norms(gradients).sum() / count
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.sqrt()


def gradient_norm(
    parameters: Mapping[str, Tensor], num_stages: int = 1, copies: Mapping[str, int] | None = None
) -> Tensor:
    """Return the norm of the parameters' current gradients, as `Gradients.norm` does."""
    gradients = Gradients(parameters, num_stages, copies)
    gradients.take()
    return gradients.norm()


# The inputs of an update, as tensors on the device, so that clipping and skipping require no synchronization.


@dataclass(frozen=True)
class UpdateInputs:
    """The inputs of one update: gradients, their scale, the learning rate, and the number of the update."""

    gradients: Mapping[str, Tensor]
    """Local tensor of each gradient; an update rule may overwrite it."""
    rate: float
    """Learning rate."""
    count: Tensor
    """Number of updates made, 0-d float32; includes this update (1 = first) unless it is skipped."""
    grad_scale: Tensor | None
    """Divisor of the gradients, 0-d float32; None = 1."""
    found_inf: Tensor
    """1 if the update is skipped because loss or gradient is not finite, else 0; 0-d float32."""

    def of(self, members: Sequence[ShardedParameter]) -> list[Tensor]:
        """Return the local gradients of some parameters, not yet divided by `grad_scale`."""
        return [self.gradients[member.name] for member in members]

    def scaled(self, members: Sequence[ShardedParameter]) -> list[Tensor]:
        """Return the local gradients of some parameters, divided by `grad_scale` in place; call once per parameter."""
        gradients = self.of(members)
        if self.grad_scale is not None and gradients:
            torch._foreach_div_(gradients, self.grad_scale)
        return gradients

    @cached_property
    def skipped(self) -> Tensor:
        """True if the update is skipped, 0-d bool."""
        return self.found_inf > 0

    def store(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write `values` into `targets`, or change nothing if the update is skipped."""
        # A product with 0 would be wrong: 0 * nan is nan, and -0.0 + 0.0 is 0.0.
        for target, value in zip(targets, values, strict=True):
            torch.where(self.skipped, target, value, out=target)
