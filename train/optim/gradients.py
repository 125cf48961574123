"""The gradients of parameters as this rank holds them, read once a step for the norm and for the update.

To look up what a rank holds of a DTensor costs several microseconds of the host; one pass over the parameters does it,
checks where each gradient lies, and leaves plain tensors. Nothing here waits for the device.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.optim.norm import squared_norms
from train.optim.parameter import check_placements, local, shard_axes


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
