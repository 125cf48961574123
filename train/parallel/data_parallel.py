"""Data parallelism: ZeRO-1 shards optimizer states, FSDP2 weights and gradients too.

With ZeRO-1 the optimizer of a rank gets its rows of every parameter, as DTensors that share the parameters' memory. Any
optimizer that accepts DTensors works, and a checkpoint can read its states at another number of ranks. Source:
Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1 (P_os).
"""

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from schemas.errors import ContractError
from train.config.layout import LayoutConfig
from train.model.transformer import Transformer
from train.optim.disk_tensor import DiskTensor
from train.parallel.ranks import Mesh, all_gather_single

GATHERED_BYTES = 64 << 20
"""Bytes of weights that one collective gathers, unless a single parameter has more."""


class _ParameterRows(NamedTuple):
    """The rows of one parameter, divided among the ranks. The last ranks may have fewer rows, or none."""

    whole: Tensor
    per_rank: int

    @property
    def size(self) -> int:
        """Return the number of elements per rank, with padding."""
        return self.per_rank * (self.whole.numel() // len(self.whole))

    def of(self, rank: int) -> Tensor:
        """Return a view of the rows of one rank."""
        # The split of DTensor's Shard(0).
        return self.whole[rank * self.per_rank : (rank + 1) * self.per_rank]


class ShardedStates:
    """This rank's rows of every parameter, which its optimizer updates (ZeRO-1).

    In each step, sum the gradients over the ranks, then call `view_gradients()`, `optimizer.step()` and `gather()`. The
    parameters must be equal on all ranks. Load weights by copying into the parameters: the shards are views of their
    memory.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
        """`mesh` has one axis. Raises ContractError for a parameter whose rows are not contiguous."""
        self.shards: dict[str, nn.Parameter] = {}
        """This rank's rows by name, for an optimizer: DTensors with the shapes of the parameters."""
        self._mesh, self._whole = mesh, dict(named_parameters)
        self._buckets: list[list[_ParameterRows]] = []
        last: dict[torch.dtype, list[_ParameterRows]] = {}
        for name, parameter in self._whole.items():
            if not parameter.is_contiguous():
                raise ContractError(
                    f"zero1: expected contiguous parameters, got {name} with strides {parameter.stride()}. Set "
                    "parameter.data = parameter.data.contiguous()."
                )
            self.shards[name] = nn.Parameter(self._view(parameter.data), requires_grad=parameter.requires_grad)
            if parameter.ndim and parameter.numel():
                rows = self._parameter_rows(parameter.data)
                bucket = last.get(parameter.dtype, [])
                held = sum(member.whole.nbytes for member in bucket)
                if not bucket or held + parameter.nbytes > GATHERED_BYTES:
                    last[parameter.dtype] = bucket = []
                    self._buckets.append(bucket)
                bucket.append(rows)

    def _parameter_rows(self, whole: Tensor) -> _ParameterRows:
        return _ParameterRows(whole, -(-len(whole) // self._mesh.size()))

    def _view(self, whole: Tensor) -> DTensor:
        """Return this rank's rows of a tensor as a view. A 0-d tensor is replicated on every rank."""
        placement: Placement = Shard(0) if whole.ndim else Replicate()
        local = self._parameter_rows(whole).of(self._mesh.get_local_rank()) if whole.ndim else whole
        return DTensor.from_local(
            local, self._mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def view_gradients(self) -> None:
        """Set the gradient of each shard to the same rows of the parameter's gradient."""
        for name, parameter in self._whole.items():
            gradient = parameter.grad
            self.shards[name].grad = None if gradient is None else self._view(gradient.contiguous())

    @property
    def bytes_gathered(self) -> int:
        """The bytes that this rank sends in `gather`."""
        sizes = (rows.size * rows.whole.element_size() for bucket in self._buckets for rows in bucket)
        return (self._mesh.size() - 1) * sum(sizes)

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the updated rows of every rank into the parameters of all ranks."""
        group, num_ranks = self._mesh.get_group(), self._mesh.size()
        for bucket in self._buckets:
            first = bucket[0].whole
            own = torch.zeros(sum(rows.size for rows in bucket), dtype=first.dtype, device=first.device)
            for span, rows in zip(_split(own, bucket), bucket, strict=True):
                mine = rows.of(self._mesh.get_local_rank())
                span[: mine.numel()] = mine.flatten()
            gathered = torch.empty(num_ranks * own.numel(), dtype=own.dtype, device=own.device)
            all_gather_single(gathered, own, group=group)
            for rank, part in enumerate(gathered.view(num_ranks, -1)):
                for span, rows in zip(_split(part, bucket), bucket, strict=True):
                    theirs = rows.of(rank)
                    theirs.copy_(span[: theirs.numel()].view_as(theirs))


def _split(values: Tensor, bucket: list[_ParameterRows]) -> tuple[Tensor, ...]:
    """Split one rank's flat values of a bucket into a padded flat tensor for each parameter."""
    return torch.split(values, [rows.size for rows in bucket])


# FSDP2 shards weights, gradients and optimizer states over the data-parallel ranks. Gradients are summed over ranks and
# never averaged, because every loss is divided by the targets of the global batch.
# Source: Zhao et al. 2023, arXiv 2304.11277 (fully sharded data parallelism); Rajbhandari et al. 2020, arXiv
# 1910.02054.

NUMBER_FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Number format of gathered weights, and therefore of matrix products, by `train.precision`."""


def shard(
    model: Transformer, mesh: Mesh, layout: LayoutConfig, precision: str, placed: Collection[nn.Parameter] = ()
) -> None:
    """Shard a model, or a pipeline stage of it, layer by layer over `mesh.states`; leave `placed` as they are."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if (number := NUMBER_FORMATS[precision]) is not None:
        # Inputs are not cast: the rotary table is passed in float32, and bf16 would round high positions.
        policy = MixedPrecisionPolicy(number, torch.float32, cast_forward_inputs=False)
    pinned = torch.cuda.is_available() and layout.offload_weights_dir is None
    offload = CPUOffloadPolicy(pin_memory=pinned) if layout.offloads_parameters else OffloadPolicy()
    for module in (*model.blocks.values(), model):
        # The outermost part (embedding, last norm, output matrix) is needed again directly after the forward pass.
        freed = layout.data == "zero3" and module is not model
        fully_shard(
            module,
            mesh=mesh.states,
            mp_policy=policy,
            reshard_after_forward=freed,
            offload_policy=offload,
            ignored_params=set(placed) or None,
        )
    for sharded in sharded_modules(model):
        sharded.set_force_sum_reduction_for_comms(True)
        if mesh.states.size() > 1:  # on a single rank FSDP2 would divide by the factor, even by 1
            sharded.set_gradient_divide_factor(1.0)


def allocate(model: nn.Module, layout: LayoutConfig, device: torch.device) -> list[DiskTensor]:
    """Give the weights of a model their memory, without values, where `layout.offload` keeps them.

    Returns the files of weights on a disk. Raises ConfigError if their folder has no space or cannot be written.
    """
    if layout.offload_weights_dir is None:
        model.to_empty(device="cpu" if layout.offloads_parameters else device)
        return []
    folder, files = Path(layout.offload_weights_dir), list[DiskTensor]()

    def allocated(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            local, spec = tensor.to_local(), tensor._spec
            shards = math.prod(spec.mesh.size(axis) for axis, place in enumerate(spec.placements) if place.is_shard())
            # FSDP2 copies an uneven shard, with padding, to memory of its own.
            if local.numel() and local.numel() * shards == tensor.numel():
                files.append(DiskTensor(folder, local.shape, local.dtype, "layout.offload_weights_dir"))
                return DTensor(files[-1].tensor, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return torch.empty_like(tensor, device="cpu")

    model._apply(allocated)  # type: ignore[no-untyped-call]
    return files


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of `model` to which `fully_shard` was applied."""
    return [cast(FSDPModule, module) for module in model.modules() if isinstance(module, FSDPModule)]
