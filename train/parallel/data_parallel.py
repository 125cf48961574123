"""Optimiser states shared out over the data-parallel ranks (ZeRO-1), weights and gradients whole on each.

Every rank gives an optimiser its rows of every parameter, as DTensors that share the parameters' memory; so any
optimiser that takes DTensors does, and its states are DTensors that a checkpoint can read at another number of ranks.
Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1 (P_os).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from schemas.errors import ContractError
from train.parallel.collectives import all_gather_single

GATHERED_BYTES = 64 << 20
"""Bytes of weights that are gathered in one collective, unless one parameter has more."""


class _Rows(NamedTuple):
    """A parameter in a bucket: its weights and the rows of a rank, those of the last ranks being fewer or none."""

    whole: Tensor
    per_rank: int

    @property
    def size(self) -> int:
        """Numbers of a rank, with padding."""
        return self.per_rank * (self.whole.numel() // len(self.whole))

    def of(self, rank: int) -> Tensor:
        """The rows of one rank, in the parameter's own memory; cut as DTensor's Shard(0) cuts them."""
        return self.whole[rank * self.per_rank : (rank + 1) * self.per_rank]


class ShardedStates:
    """The parameters as each rank's optimiser sees them.

    A step is: sum the gradients over the ranks, `link_gradients()`, `optimizer.step()`, `gather()`. The parameters must
    be the same on all ranks, and keep their memory: they are loaded by copying into them.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
        """`mesh` has one axis. Raises ContractError for a parameter whose rows are not contiguous."""
        self.shards: dict[str, nn.Parameter] = {}
        """This rank's rows by name, for an optimiser: DTensors of the parameters' own shapes."""
        self._mesh, self._whole = mesh, dict(named_parameters)
        self._buckets: list[list[_Rows]] = []
        last: dict[torch.dtype, list[_Rows]] = {}
        for name, parameter in self._whole.items():
            if not parameter.is_contiguous():
                raise ContractError(
                    f"zero1: promised contiguous parameters, found {name} with strides {parameter.stride()}; make it so"
                )
            self.shards[name] = nn.Parameter(self._view(parameter.data), requires_grad=parameter.requires_grad)
            if parameter.ndim and parameter.numel():
                rows = self._rows(parameter.data)
                bucket = last.get(parameter.dtype, [])
                held = sum(member.whole.nbytes for member in bucket)
                if not bucket or held + parameter.nbytes > GATHERED_BYTES:
                    last[parameter.dtype] = bucket = []
                    self._buckets.append(bucket)
                bucket.append(rows)

    def _rows(self, whole: Tensor) -> _Rows:
        return _Rows(whole, -(-len(whole) // self._mesh.size()))

    def _view(self, whole: Tensor) -> DTensor:
        """This rank's rows of a tensor, sharing its memory; a single number belongs to every rank."""
        placement: Placement = Shard(0) if whole.ndim else Replicate()
        local = self._rows(whole).of(self._mesh.get_local_rank()) if whole.ndim else whole
        return DTensor.from_local(
            local, self._mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def link_gradients(self) -> None:
        """Make the gradients of the shards this rank's rows of the parameters' gradients, sharing their memory."""
        for name, parameter in self._whole.items():
            gradient = parameter.grad
            self.shards[name].grad = None if gradient is None else self._view(gradient.contiguous())

    @torch.no_grad()
    def gather(self) -> None:
        """Write every rank's rows into the parameters of all, in few collectives."""
        group, num_ranks = self._mesh.get_group(), self._mesh.size()
        for bucket in self._buckets:
            first = bucket[0].whole
            own = torch.zeros(sum(rows.size for rows in bucket), dtype=first.dtype, device=first.device)
            for place, rows in zip(_split(own, bucket), bucket, strict=True):
                mine = rows.of(self._mesh.get_local_rank())
                place[: mine.numel()] = mine.flatten()
            gathered = torch.empty(num_ranks * own.numel(), dtype=own.dtype, device=own.device)
            all_gather_single(gathered, own, group=group)
            for rank, part in enumerate(gathered.view(num_ranks, -1)):
                for place, rows in zip(_split(part, bucket), bucket, strict=True):
                    theirs = rows.of(rank)
                    theirs.copy_(place[: theirs.numel()].view_as(theirs))


def _split(values: Tensor, bucket: list[_Rows]) -> tuple[Tensor, ...]:
    """One rank's part of a bucket, parameter by parameter."""
    return torch.split(values, [rows.size for rows in bucket])
