"""Gradient compression: lossy sums of gradients over data-parallel ranks, with error feedback, for DDP and FSDP2.

A buffer concatenates the gradients of several parameters. Each gradient is compressed on its own, so the result does
not depend on how parameters are grouped into buffers. What a rank does not send, its error, is added to its next
gradient, so that all of a gradient is sent in the end.
Sources: Stich et al. 2018, arXiv 1809.07599; Karimireddy et al. 2019, arXiv 1901.09847.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from schemas.errors import ContractError
from train.config.layout import LayoutConfig
from train.parallel.ranks import all_gather_single

# Sums are added rank by rank in float32: every rank gets the same bits, and they do not depend on the position of a
# number in its buffer. DDP rebuilds its buckets after the first step, so the sums of a ring all-reduce would differ in
# a resumed run.


class CountedGroup:
    """Collective operations of a process group, with a count of the bytes that this rank sends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.bytes_sent = 0
        """Bytes that this rank has sent. A sum of N numbers over n ranks costs 2·(n-1)·ceil(N/n) numbers, like a ring
        all-reduce; an all-gather costs (n-1)·N."""

    def all_reduce_bytes(self, count: int, itemsize: int) -> int:
        """Return the bytes that a rank sends to sum `count` numbers of `itemsize` bytes."""
        return 2 * (self.size - 1) * -(-count // self.size) * itemsize

    def sum(self, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the float32 sum of a flat tensor over the ranks. Numbers are sent as `dtype`.

        A number is rounded to `dtype` twice, for any number of ranks.
        """
        # Each rank sums one part of the tensor, then the summed parts are all-gathered.
        share = -(-values.numel() // self.size)
        sent = torch.empty(share * self.size, dtype=dtype, device=values.device)
        sent[: values.numel()] = values
        sent[values.numel() :] = 0
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        total, *others = received.view(self.size, share).float()
        for other in others:
            total += other
        all_gather_single(sent, total.to(dtype), group=self.group)
        self.bytes_sent += self.all_reduce_bytes(values.numel(), sent.element_size())
        return sent[: values.numel()].float()

    def gather(self, values: Tensor) -> Tensor:
        """Return the flat tensors of all ranks, all-gathered as the rows of a matrix."""
        rows = torch.empty(self.size * values.numel(), dtype=values.dtype, device=values.device)
        all_gather_single(rows, values, group=self.group)
        self.bytes_sent += (self.size - 1) * values.numel() * values.element_size()
        return rows.view(self.size, -1)


GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
State = dict[str, Tensor]
"""The tensors that a compression method keeps between steps for the gradient of one parameter, by name."""
Updates = list[tuple[Tensor, Tensor]]
"""Pairs of a state tensor and its new value."""


class BufferEntry(NamedTuple):
    """The gradient of one parameter in a buffer."""

    name: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the gradient in the buffer; for a sharded parameter, that of this rank's rows with padding."""

    @property
    def size(self) -> int:
        """Return the number of elements of the gradient."""
        return math.prod(self.shape)


class Buffer(NamedTuple):
    """Concatenated gradients that are summed together."""

    values: Tensor
    """All gradients, flat."""
    entries: Sequence[BufferEntry]
    """The gradients in the buffer, in order and without gaps."""

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split a flat tensor of the buffer's length into one flat tensor per gradient."""
        return torch.split(values, [entry.size for entry in self.entries])


class Method(Protocol):
    """The interface of a compression method."""

    def fresh(self, entry: BufferEntry, device: torch.device) -> State:
        """Return the state of one parameter before the first step."""

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """Return the sum of a buffer over the ranks, and the state updates.

        The sum is flat and in float32. It is not finite if a gradient of any rank is not finite.
        """


class RoundedSum:
    """Compression by rounding: numbers are sent as `dtype` and summed in float32.

    In float16, numbers below 6e-8 become zero, and numbers above 65504 become infinite.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def fresh(self, entry: BufferEntry, device: torch.device) -> State:
        """Return no state."""
        return {}

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """Return the sum of the rounded gradients over the ranks; the sum is rounded too."""
        return wire.sum(buffer.values, self._dtype), []


class PowerSGD:
    """Low-rank compression: each matrix is sent as two smaller matrices, its factors.

    A tensor that factors would not make smaller, such as a vector, is sent whole. Source: Vogels et al. 2019, arXiv
    1905.13727, algorithms 1 and 2.
    """

    def __init__(self, rank: int, seed: int) -> None:
        self._rank, self._seed = rank, seed

    def _shape(self, entry: BufferEntry) -> tuple[int, int, int] | None:
        """Return (rows, columns, rank of the factors) if two factors are smaller than the gradient, else None."""
        if len(entry.shape) < 2 or not entry.size:
            return None
        rows, columns = entry.shape[0], entry.size // entry.shape[0]
        rank = min(self._rank, rows, columns)
        return (rows, columns, rank) if rank * (rows + columns) < rows * columns else None

    def fresh(self, entry: BufferEntry, device: torch.device) -> State:
        """Return a compression error of zero and a random right factor; empty if the gradient is sent whole."""
        if not (shape := self._shape(entry)):
            return {}
        # The seed makes the random factor equal on every rank.
        random = torch.Generator().manual_seed(random_key(self._seed, 0, entry.name))
        right = torch.randn(shape[1], shape[2], generator=random).to(device)
        return {"error": torch.zeros(entry.shape, device=device), "right": right}

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """Return the sum of the buffer over the ranks, and the state updates. The sum of matrices is approximate."""
        parts = {entry.name: part for entry, part in zip(buffer.entries, buffer.split(buffer.values), strict=True)}
        shapes = {entry.name: shape for entry in buffer.entries if (shape := self._shape(entry))}
        matrices = {
            name: (parts[name] + states[name]["error"].flatten()).view(rows, columns)
            for name, (rows, columns, _) in shapes.items()
        }
        products = {name: matrix @ states[name]["right"] for name, matrix in matrices.items()}
        sums = _sum_all(parts | products, wire)
        # A product of zeros has a left factor too, so a parameter whose gradient was zero can be updated later.
        lefts = {name: torch.linalg.qr(sums[name]).Q for name in matrices}
        # The left factors are the same on every rank. Unlike in the source, factors are summed, not averaged.
        own = {name: matrix.T @ lefts[name] for name, matrix in matrices.items()}
        rights = _sum_all(own, wire)
        updates = []
        for name, matrix in matrices.items():
            sums[name] = lefts[name] @ rights[name].T
            # Unlike in the source, a rank computes its error from its own right factor.
            error = matrix - lefts[name] @ own[name].T
            updates += [
                (states[name]["error"], error.view_as(states[name]["error"])),
                (states[name]["right"], rights[name]),
            ]
        return torch.cat([sums[entry.name].flatten() for entry in buffer.entries]), updates


class TopK:
    """Sparse compression: sends the elements of largest magnitude of each gradient, with their indices.

    Of elements with equal magnitude, the first is sent.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def fresh(self, entry: BufferEntry, device: torch.device) -> State:
        """Return the state before the first step: a compression error of zero, in the shape of the gradient."""
        return {"error": torch.zeros(entry.shape, device=device)}

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """Return the sum over the ranks of the largest elements of each rank; elements that no rank sends are 0."""
        values = _with_errors(buffer, states)
        indices = [largest_indices(part, num_kept(self._share, len(part))) for part in buffer.split(values)]
        offsets, chosen = _offsets(buffer, indices), torch.cat(indices)
        rows = wire.gather(torch.cat([values[offsets + chosen].view(torch.int32), chosen.int()]))
        result = torch.zeros_like(values)
        for row in rows:
            result.index_add_(0, offsets + row[len(chosen) :], row[: len(chosen)].view(torch.float32))
        return result, _errors(buffer, states, values.index_fill_(0, offsets + chosen, 0))


class RandomK:
    """Sparse compression: sends the elements of each gradient at random indices.

    The indices are the same on every rank, so they are not sent. The values are not rescaled.
    """

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._seed = share, seed

    def fresh(self, entry: BufferEntry, device: torch.device) -> State:
        """Return the state before the first step: a compression error of zero, in the shape of the gradient."""
        return {"error": torch.zeros(entry.shape, device=device)}

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """Return the sum over the ranks of the elements at the random indices of this step; other elements are 0."""
        values = _with_errors(buffer, states)
        device = values.device
        indices = [
            random_indices(
                entry.size, num_kept(self._share, entry.size), random_key(self._seed, step, entry.name), device
            )
            for entry in buffer.entries
        ]
        chosen = _offsets(buffer, indices) + torch.cat(indices)
        # A number that is not finite may be at an index that is not sent. Times zero it is NaN, which the sum adds to
        # all values.
        total = wire.sum(values[chosen] + (values * 0).sum())
        result = torch.zeros_like(values).index_copy_(0, chosen, total)
        return result, _errors(buffer, states, values.index_fill_(0, chosen, 0))


def num_kept(share: float, size: int) -> int:
    """Return the number of elements to send: `share` times `size`, rounded up."""
    # Exact for the decimal digits of `share`: a product of floats could round up to one element more.
    return math.ceil(Fraction(str(share)) * size)


def largest_indices(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` numbers with the largest magnitude, in any order.

    NaN counts as the largest magnitude. Of two equal magnitudes, the one with the lower index is taken.
    """
    # `topk` does not define which of equal numbers it returns. It is therefore applied to integers that are never
    # equal: the bits of the magnitude above those of the reversed index. That takes as long as `topk` of the numbers
    # themselves (40 ms for 2.6 million on one core).
    last = values.numel() - 1
    keys = values.abs().view(torch.int32).long().bitwise_left_shift_(32)
    keys += torch.arange(last, -1, -1, device=values.device)
    return keys.topk(count, sorted=False).indices


def random_indices(size: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return `count` distinct random indices below `size`, in ascending order.

    The range is divided into `count` spans, and one index is drawn from each span. Source: Stich et al. 2018,
    definition 2.1.
    """
    # Each index of a span is equally likely, which satisfies the definition without a permutation.
    number = torch.arange(count, device=device)
    begin = number * size // count
    width = (number + 1) * size // count - begin
    noise = _mix(number * _signed(GOLDEN) + key)
    return begin + (noise & 0x7FFF_FFFF_FFFF_FFFF) % width


def random_key(seed: int, step: int, name: str) -> int:
    """Return a number below 2^63 computed from a seed, a step and a parameter name."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits as the unsigned `value`."""
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64. Source: Steele, Lea and Flood 2014, with the constants of Stafford's Mix13."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _sum_all(tensors: Mapping[str, Tensor], wire: CountedGroup) -> dict[str, Tensor]:
    """Return the sum over the ranks of each tensor, in one collective."""
    if not tensors:
        return {}
    total = wire.sum(torch.cat([tensor.flatten() for tensor in tensors.values()]))
    parts = torch.split(total, [tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


def _with_errors(buffer: Buffer, states: Mapping[str, State]) -> Tensor:
    """Return the gradients of a buffer plus their compression errors, as a flat tensor."""
    return buffer.values + torch.cat([states[entry.name]["error"].flatten() for entry in buffer.entries])


def _errors(buffer: Buffer, states: Mapping[str, State], values: Tensor) -> Updates:
    """Return the updates that store `values`, the unsent numbers of the buffer, as compression errors."""
    parts = zip(buffer.entries, buffer.split(values), strict=True)
    return [(states[entry.name]["error"], part.view(entry.shape)) for entry, part in parts]


def _offsets(buffer: Buffer, indices: Sequence[Tensor]) -> Tensor:
    """Return, for each index in `indices`, where its gradient starts in the buffer."""
    begin, offsets = 0, []
    for entry, chosen in zip(buffer.entries, indices, strict=True):
        offsets.append(torch.full_like(chosen, begin))
        begin += entry.size
    return torch.cat(offsets)


# `Compressor` keeps the state between steps; two functions hook it into DDP and FSDP2. Both hooks sum and never
# average. FSDP2 calls its hook *after* its own all-reduce if its mesh has a replicate axis; so the model is sharded
# over the mesh `shard` alone, and the hook is the only sum between replicas.

NamedParameters = Iterable[tuple[str, nn.Parameter]]
"""Parameters with their names in a checkpoint."""


def method_of(layout: LayoutConfig, seed: int) -> Method:
    """Return the compression method that `layout.compress` names."""
    methods: dict[str, Method] = {
        "none": RoundedSum(torch.float32),
        "fp16": RoundedSum(torch.float16),
        "bf16": RoundedSum(torch.bfloat16),
        "powersgd": PowerSGD(layout.compress_rank, seed),
        "topk": TopK(layout.compress_share),
        "randomk": RandomK(layout.compress_share, seed),
    }
    return methods[layout.compress]


class Compressor:
    """Sums gradient buffers over a group of ranks with a compression method, and keeps the state of the method."""

    def __init__(self, method: Method, group: dist.ProcessGroup, device: torch.device) -> None:
        self.bytes_plain = 0
        """Bytes that this rank would have sent in this step without compression."""
        self._method, self._device, self._wire = method, device, CountedGroup(group)
        self._states: dict[str, State] = {}
        self._step: int | None = None
        self._updates: Updates = []

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent in this step, as `CountedGroup` counts them."""
        return self._wire.bytes_sent

    def start(self, step: int) -> None:
        """Start a step and reset the byte counts. `step` seeds the indices of randomk."""
        self._step, self.bytes_plain, self._wire.bytes_sent = step, 0, 0
        self._updates = []

    def keep(self) -> None:
        """Apply the state updates of this step. Do not call it for a step that did not update the weights."""
        for old, new in self._updates:
            old.copy_(new)
        self._updates = []

    def remember(self, entries: Iterable[BufferEntry]) -> None:
        """Allocate the compression state of parameters."""
        self._states |= {entry.name: self._method.fresh(entry, self._device) for entry in entries}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state tensors by name. A checkpoint of the same layout can be read into them."""
        prefix = f"compress.rank-{dist.get_rank()}"
        return {
            f"{prefix}.{name}.{key}": tensor
            for name, state in self._states.items()
            for key, tensor in sorted(state.items())
        }

    def rescale(self, factor: float) -> None:
        """Multiply the compression errors by `factor`, after the loss scale has changed by that factor."""
        for state in self._states.values():
            if "error" in state:
                state["error"].mul_(factor)

    @torch.no_grad()
    def sum(self, values: Tensor, entries: Sequence[BufferEntry]) -> None:
        """Replace the flat gradients in `values` by their sum over the group. The state is unchanged until `keep`."""
        if self._step is None:
            raise ContractError(
                "compress: expected a step, got a gradient before the first step. Call Compressor.start(step)."
            )
        if (number := values.numel()) != (expected := sum(entry.size for entry in entries)):
            names = f"{entries[0].name} to {entries[-1].name}" if entries else "no parameter"
            raise ContractError(
                f"compress: expected {expected} gradient elements for {names}, got {number}. Compute a gradient for "
                "every parameter."
            )
        total, updates = self._method.sum(Buffer(values, entries), self._states, self._step, self._wire)
        self._updates += updates
        values.copy_(total)
        self.bytes_plain += self._wire.all_reduce_bytes(values.numel(), values.element_size())


def compress_ddp(model: DistributedDataParallel, named: NamedParameters, compressor: Compressor) -> None:
    """Make DDP sum the gradients of `model` with `compressor`."""
    entries = {id(weight): BufferEntry(name, tuple(weight.shape)) for name, weight in named if weight.requires_grad}
    compressor.remember(entries.values())
    stream = torch.cuda.Stream() if next(model.parameters()).is_cuda else None  # type: ignore[no-untyped-call]

    def hook(compressor: Compressor, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        values = bucket.buffer()
        # On a GPU the sum runs on its own stream, concurrently with the backward pass.
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream else nullcontext():
            compressor.sum(values, [entries[id(weight)] for weight in bucket.parameters()])
            future: Future[Tensor] = Future(devices=[values.device] if stream else None)
            future.set_result(values)
        return future

    model.register_comm_hook(compressor, hook)


def compress_fsdp(models: Iterable[nn.Module], named: NamedParameters, compressor: Compressor) -> None:
    """Make FSDP2 sum the gradients of `models` over their replicas with `compressor`.

    Raises ContractError if the mesh of a model has a replicate axis.
    """
    names = {id(weight): name for name, weight in named}
    for module in (module for model in models for module in model.modules() if isinstance(module, FSDPModule)):
        for group in param_groups(module):
            if group._is_hsdp:
                raise ContractError(
                    "compress: expected a mesh without a replicate axis, got one with it, so FSDP2 would sum the "
                    "gradients itself. Pass fully_shard only the mesh of the axis `shard`."
                )
            # The buffer holds the parameters in torch's order, each padded to the rows of the largest shard.
            weights = [(getattr(p._module_info.module, p._module_info.param_name), p) for p in group.fsdp_params]
            entries = [
                BufferEntry(names[id(weight)], tuple(p.padded_sharded_param_size))
                for weight, p in weights
                if weight.requires_grad
            ]
            compressor.remember(entries)
            module.set_all_reduce_hook(partial(_sum_shard, compressor, entries))


def param_groups(module: FSDPModule) -> list[Any]:
    """Return the parameter groups of a module that `fully_shard` was applied to."""
    # A module has at most one group in torch 2.11, any number later.
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    single = state._fsdp_param_group if groups is None else None
    return [single] if single is not None else list(groups or ())


def _sum_shard(compressor: Compressor, entries: Sequence[BufferEntry], values: Tensor) -> None:
    """Replace `values`, the result of a reduce-scatter, by their sum over the replicas."""
    if values.is_cuda:
        # The tensor is allocated on the stream of the reduce-scatter and used on that of the hook.
        values.record_stream(torch.cuda.current_stream())
    compressor.sum(values, entries)
