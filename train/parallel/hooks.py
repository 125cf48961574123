"""Compression put to work: what is remembered between steps, and the hooks into DDP and FSDP2.

Both hooks sum and never average. FSDP2 calls its hook *behind* its own all-reduce if its mesh has a replicate axis; so
the model is sharded over the mesh `shard` alone, and the hook is the only sum between replicas.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from schemas.errors import ContractError
from train.config.layout import LayoutConfig
from train.parallel.compression import Buffer, Cast, Method, Piece, PowerSGD, RandomK, State, TopK, Updates
from train.parallel.wire import Wire

Named = Iterable[tuple[str, nn.Parameter]]
"""Parameters by the names they have in a checkpoint."""


def method_of(layout: LayoutConfig, seed: int) -> Method:
    """The method that the settings name."""
    methods: dict[str, Method] = {
        "none": Cast(torch.float32),
        "fp16": Cast(torch.float16),
        "bf16": Cast(torch.bfloat16),
        "powersgd": PowerSGD(layout.compress_rank, seed),
        "topk": TopK(layout.compress_share),
        "randomk": RandomK(layout.compress_share, seed),
    }
    return methods[layout.compress]


class Compressor:
    """Sums buffers of gradients over a group, with the memory that this takes."""

    def __init__(self, method: Method, group: dist.ProcessGroup, device: torch.device) -> None:
        self.bytes_plain = 0
        """Bytes that would have left this rank in this step without compression."""
        self._method, self._device, self._wire = method, device, Wire(group)
        self._states: dict[str, State] = {}
        self._step: int | None = None
        self._updates: Updates = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that have left this rank in this step, as `Wire` counts them."""
        return self._wire.bytes_sent

    def start(self, step: int) -> None:
        """Begin a step: its number chooses the places of randomk, and bytes are counted from zero."""
        self._step, self.bytes_plain, self._wire.bytes_sent = step, 0, 0
        self._updates = []

    def keep(self) -> None:
        """Remember what the step has left: it was made. Of a step that is left out nothing is remembered."""
        for old, new in self._updates:
            old.copy_(new)
        self._updates = []

    def remember(self, pieces: Iterable[Piece]) -> None:
        """Make room for what is remembered of pieces."""
        self._states |= {piece.name: self._method.fresh(piece, self._device) for piece in pieces}

    def state_tensors(self) -> dict[str, Tensor]:
        """All that is remembered, to be saved, and to be loaded in place before the next step of the same layout."""
        prefix = f"compress.rank-{dist.get_rank()}"
        return {
            f"{prefix}.{name}.{key}": tensor
            for name, state in self._states.items()
            for key, tensor in sorted(state.items())
        }

    def rescale(self, factor: float) -> None:
        """Follow a change of the loss scale: what was held back is multiplied."""
        for state in self._states.values():
            if "error" in state:
                state["error"].mul_(factor)

    @torch.no_grad()
    def sum(self, values: Tensor, pieces: Sequence[Piece]) -> None:
        """Replace flat gradients by their sum over the group; what is to be remembered of it waits for `keep`."""
        if self._step is None:
            raise ContractError("compress: promised a step, found a gradient before the first; call start(step)")
        if (found := values.numel()) != (promised := sum(piece.size for piece in pieces)):
            names = f"{pieces[0].name} to {pieces[-1].name}" if pieces else "no parameter"
            raise ContractError(
                f"compress: promised {promised} numbers for {names}, found {found}; every parameter wants a gradient"
            )
        total, updates = self._method.sum(Buffer(values, pieces), self._states, self._step, self._wire)
        self._updates += updates
        values.copy_(total)
        self.bytes_plain += self._wire.sum_bytes(values.numel(), values.element_size())


def compress_ddp(model: DistributedDataParallel, named: Named, compressor: Compressor) -> None:
    """Sum the gradients of a model through the compressor, whose group is the model's."""
    pieces = {id(weight): Piece(name, tuple(weight.shape)) for name, weight in named if weight.requires_grad}
    compressor.remember(pieces.values())
    stream = torch.cuda.Stream() if next(model.parameters()).is_cuda else None  # type: ignore[no-untyped-call]

    def hook(compressor: Compressor, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        values = bucket.buffer()
        # On a GPU the sum has a stream of its own, so that the backward pass goes on beside it.
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream else nullcontext():
            compressor.sum(values, [pieces[id(weight)] for weight in bucket.parameters()])
            future: Future[Tensor] = Future(devices=[values.device] if stream else None)
            future.set_result(values)
        return future

    model.register_comm_hook(compressor, hook)


def compress_fsdp(models: Iterable[nn.Module], named: Named, compressor: Compressor) -> None:
    """Sum the sharded gradients of models through the compressor, whose group is one of the mesh axis `replicate`.

    The models are sharded over the axis `shard`; weights that are equal on all replicas stay so.
    """
    names = {id(weight): name for name, weight in named}
    for module in (module for model in models for module in model.modules() if isinstance(module, FSDPModule)):
        for group in param_groups(module):
            if group._is_hsdp:
                raise ContractError(
                    "compress: promised a model sharded over one axis, found a mesh with replicas, which torch sums "
                    "itself; shard over the axis shard alone"
                )
            # The buffer holds the parameters in torch's own order, each padded to the rows of the largest shard.
            weights = [(getattr(p._module_info.module, p._module_info.param_name), p) for p in group.fsdp_params]
            pieces = [
                Piece(names[id(weight)], tuple(p.padded_sharded_param_size))
                for weight, p in weights
                if weight.requires_grad
            ]
            compressor.remember(pieces)
            module.set_all_reduce_hook(partial(_sum_shard, compressor, pieces))


def param_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 gathers for a module; torch 2.11 has at most one, newer versions a list."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    one = state._fsdp_param_group if groups is None else None
    return [one] if one is not None else list(groups or ())


def _sum_shard(compressor: Compressor, pieces: Sequence[Piece], values: Tensor) -> None:
    """The hook of FSDP2: `values` is what the reduce-scatter left, and what torch goes on with."""
    if values.is_cuda:
        # Allocated on the stream of the reduce-scatter, used on that of the hook.
        values.record_stream(torch.cuda.current_stream())
    compressor.sum(values, pieces)
