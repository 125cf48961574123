"""The Euclidean norm of the whole gradient over all ranks, and its scaling, for parameters laid out in any way."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.optim.members import local, local_gradient, shard_axes

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


@torch.no_grad()
def gradient_norm(
    parameters: Mapping[str, Tensor], num_stages: int = 1, copies: Mapping[str, int] | None = None
) -> Tensor:
    """Euclidean norm of the whole gradient, a 0-d float64 tensor, the same on every rank, without waiting for it.

    Every rank of the default group takes part. Ranks form `num_stages` groups of equal size, the stages of a pipeline;
    all ranks of a group hold the same parameters, split over a mesh or not, and each shard counts once however many
    of them hold it. `copies` names the parameters that several groups hold, with their number (an embedding that the
    first and last stage both use: 2). Raises ContractError for a gradient that does not lie on the ranks as its
    parameter does.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    by_count: dict[float, list[Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        num_shards = 1
        if isinstance(parameter, DTensor):
            num_shards = math.prod(parameter.device_mesh.size(axis) for axis in shard_axes(parameter))
        count = world_size / num_stages / num_shards * (copies or {}).get(name, 1)
        by_count.setdefault(count, []).append(local_gradient(name, parameter))
    device = next((local(parameter).device for parameter in parameters.values()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for count, gradients in by_count.items():
        total += squared_norms(gradients).sum() / count
    if world_size > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Mapping[str, Tensor], factor: float) -> None:
    """Multiply every gradient by `factor`; what is not finite stays so."""
    gradients = [local(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
