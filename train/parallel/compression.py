"""The methods of compression: each sums a buffer of gradients over the ranks and says what its memory becomes.

A buffer is a row of pieces, one for each parameter. Every piece is compressed on its own, so buffers may be cut in any
way. What a rank holds back, its error, is added to its next gradient: all of a gradient arrives, some of it later.
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
from train.parallel.mesh import all_gather_single

# The sums that the ranks of one group make together, and the bytes that leave a rank for them.
#
# A sum is taken rank by rank, in float32: every rank gets the same bits, and they do not depend on where a number
# lies in its buffer. DDP cuts its buckets anew behind the first step, so a ring's sums would differ in a resumed run.


class CountedGroup:
    """The group of ranks that hold the same gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.bytes_sent = 0
        """Bytes that left this rank. A sum costs 2·(n-1)·ceil(N/n) numbers, as a ring's all-reduce does; a gathering
        costs (n-1)·N; N numbers of a rank, n ranks."""

    def all_reduce_bytes(self, count: int, itemsize: int) -> int:
        """What the sum of so many numbers of so many bytes costs."""
        return 2 * (self.size - 1) * -(-count // self.size) * itemsize

    def sum(self, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The sum over the ranks of a flat tensor, in float32; what travels is of type `dtype`.

        Each rank sums one part of the buffer and hands the sum out: two roundings to `dtype` in all, whatever the
        number of ranks.
        """
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
        """The flat tensors of all ranks, one a row."""
        rows = torch.empty(self.size * values.numel(), dtype=values.dtype, device=values.device)
        all_gather_single(rows, values, group=self.group)
        self.bytes_sent += (self.size - 1) * values.numel() * values.element_size()
        return rows.view(self.size, -1)


GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
State = dict[str, Tensor]
"""What a method remembers of a piece, by name."""
Updates = list[tuple[Tensor, Tensor]]
"""Tensors of states, and what they become."""


class BufferEntry(NamedTuple):
    """One parameter's gradient in a buffer."""

    name: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    """Its shape there; of a sharded one, this rank's rows, padded as the buffer is."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Buffer(NamedTuple):
    """Gradients to be summed."""

    values: Tensor
    """All of them, flat."""
    pieces: Sequence[BufferEntry]
    """What lies there, in order and without gaps."""

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """A flat tensor of this length, piece by piece."""
        return torch.split(values, [piece.size for piece in self.pieces])


class Method(Protocol):
    """One way of summing."""

    def fresh(self, piece: BufferEntry, device: torch.device) -> State:
        """What is remembered of a piece before the first step."""

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """The flat sum in float32, and the updates of the states. A sum is not finite if any gradient is not."""


class RoundedSum:
    """Every number sent, rounded to a type; summed in float32; nothing remembered.

    Of float16, numbers below 6e-8 become zero and those above 65504 infinite; bfloat16 has float32's range.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def fresh(self, piece: BufferEntry, device: torch.device) -> State:
        """Nothing."""
        return {}

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """The sum of the rounded gradients, itself rounded."""
        return wire.sum(buffer.values, self._dtype), []


class PowerSGD:
    """Matrices sent as two thin factors by one step of the power method, begun where the step before ended.

    What would not become smaller travels whole, vectors first of all. Source: Vogels et al. 2019, arXiv 1905.13727,
    algorithms 1 and 2; summed instead of averaged, each rank's error being what its own factors leave.
    """

    def __init__(self, rank: int, seed: int) -> None:
        self._rank, self._seed = rank, seed

    def _shape(self, piece: BufferEntry) -> tuple[int, int, int] | None:
        """Rows, columns and rank of a matrix that becomes smaller by factors; None of anything else."""
        if len(piece.shape) < 2 or not piece.size:
            return None
        rows, columns = piece.shape[0], piece.size // piece.shape[0]
        rank = min(self._rank, rows, columns)
        return (rows, columns, rank) if rank * (rows + columns) < rows * columns else None

    def fresh(self, piece: BufferEntry, device: torch.device) -> State:
        """No error, and the same random right factor on every rank."""
        if not (shape := self._shape(piece)):
            return {}
        random = torch.Generator().manual_seed(random_key(self._seed, 0, piece.name))
        right = torch.randn(shape[1], shape[2], generator=random).to(device)
        return {"error": torch.zeros(piece.shape, device=device), "right": right}

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """The sum over the ranks of their projections on a common left factor."""
        parts = {piece.name: part for piece, part in zip(buffer.pieces, buffer.split(buffer.values), strict=True)}
        shapes = {piece.name: shape for piece in buffer.pieces if (shape := self._shape(piece))}
        matrices = {
            name: (parts[name] + states[name]["error"].flatten()).view(rows, columns)
            for name, (rows, columns, _) in shapes.items()
        }
        products = {name: matrix @ states[name]["right"] for name, matrix in matrices.items()}
        sums = _sum_all(parts | products, wire)
        # A product of zeros has a left factor too, so that a parameter without a gradient comes back to life.
        lefts = {name: torch.linalg.qr(sums[name]).Q for name in matrices}
        own = {name: matrix.T @ lefts[name] for name, matrix in matrices.items()}
        rights = _sum_all(own, wire)
        updates = []
        for name, matrix in matrices.items():
            sums[name] = lefts[name] @ rights[name].T
            error = matrix - lefts[name] @ own[name].T
            updates += [
                (states[name]["error"], error.view_as(states[name]["error"])),
                (states[name]["right"], rights[name]),
            ]
        return torch.cat([sums[piece.name].flatten() for piece in buffer.pieces]), updates


class TopK:
    """The numbers of largest magnitude of each piece, with their places; of equals, the first."""

    def __init__(self, share: float) -> None:
        self._share = share

    def fresh(self, piece: BufferEntry, device: torch.device) -> State:
        """No error."""
        return {"error": torch.zeros(piece.shape, device=device)}

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """The sum of what the ranks chose; values and places travel in one message."""
        values = _with_errors(buffer, states)
        places = [largest_indices(part, num_kept(self._share, len(part))) for part in buffer.split(values)]
        begins, chosen = _begins(buffer, places), torch.cat(places)
        rows = wire.gather(torch.cat([values[begins + chosen].view(torch.int32), chosen.int()]))
        result = torch.zeros_like(values)
        for row in rows:
            result.index_add_(0, begins + row[len(chosen) :], row[: len(chosen)].view(torch.float32))
        return result, _errors(buffer, states, values.index_fill_(0, begins + chosen, 0))


class RandomK:
    """Numbers of each piece at random places, the same on every rank, so that only values travel; not scaled up."""

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._seed = share, seed

    def fresh(self, piece: BufferEntry, device: torch.device) -> State:
        """No error."""
        return {"error": torch.zeros(piece.shape, device=device)}

    def sum(self, buffer: Buffer, states: Mapping[str, State], step: int, wire: CountedGroup) -> tuple[Tensor, Updates]:
        """The sum at this step's places."""
        values = _with_errors(buffer, states)
        device = values.device
        places = [
            random_indices(
                piece.size, num_kept(self._share, piece.size), random_key(self._seed, step, piece.name), device
            )
            for piece in buffer.pieces
        ]
        chosen = _begins(buffer, places) + torch.cat(places)
        # A number that is not finite may lie elsewhere: times zero it is no number, which then travels with all.
        total = wire.sum(values[chosen] + (values * 0).sum())
        result = torch.zeros_like(values).index_copy_(0, chosen, total)
        return result, _errors(buffer, states, values.index_fill_(0, chosen, 0))


def num_kept(share: float, size: int) -> int:
    """Numbers sent of so many: the share as it is written in decimals, rounded up."""
    return math.ceil(Fraction(str(share)) * size)


def largest_indices(values: Tensor, count: int) -> Tensor:
    """Places of the numbers of largest magnitude, NaN above all; of equals, the first.

    `topk` leaves open which of equals it takes, so it is given keys that are never equal: the bits of the magnitude
    above the place. It takes as long as `topk` of the numbers themselves (40 ms for 2.6 million on one core).
    """
    last = values.numel() - 1
    keys = values.abs().view(torch.int32).long().bitwise_left_shift_(32)
    keys += torch.arange(last, -1, -1, device=values.device)
    return keys.topk(count, sorted=False).indices


def random_indices(size: int, count: int, key: int, device: torch.device) -> Tensor:
    """`count` different places below `size`: one in each of as many equal stretches, rising.

    Every place is as likely as any other of its stretch, which is all that Stich's definition 2.1 asks of a random
    choice, and needs no permutation.
    """
    number = torch.arange(count, device=device)
    begin = number * size // count
    width = (number + 1) * size // count - begin
    noise = _mix(number * _signed(GOLDEN) + key)
    return begin + (noise & 0x7FFF_FFFF_FFFF_FFFF) % width


def random_key(seed: int, step: int, name: str) -> int:
    """A number below 2^63 of a seed, a step and a piece."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64, whose products wrap around."""
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64. Source: Steele, Lea and Flood 2014, with the constants of Stafford's Mix13."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _sum_all(tensors: Mapping[str, Tensor], wire: CountedGroup) -> dict[str, Tensor]:
    """The sum over the ranks of each tensor, in one message."""
    if not tensors:
        return {}
    total = wire.sum(torch.cat([tensor.flatten() for tensor in tensors.values()]))
    parts = torch.split(total, [tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


def _with_errors(buffer: Buffer, states: Mapping[str, State]) -> Tensor:
    """The gradients and what was held back of those before."""
    return buffer.values + torch.cat([states[piece.name]["error"].flatten() for piece in buffer.pieces])


def _errors(buffer: Buffer, states: Mapping[str, State], values: Tensor) -> Updates:
    """What is held back now, piece by piece."""
    parts = zip(buffer.pieces, buffer.split(values), strict=True)
    return [(states[piece.name]["error"], part.view(piece.shape)) for piece, part in parts]


def _begins(buffer: Buffer, places: Sequence[Tensor]) -> Tensor:
    """For each place within a piece, where that piece begins in the buffer."""
    begin, begins = 0, []
    for piece, chosen in zip(buffer.pieces, places, strict=True):
        begins.append(torch.full_like(chosen, begin))
        begin += piece.size
    return torch.cat(begins)


# Compression put to work: what is remembered between steps, and the hooks into DDP and FSDP2.
#
# Both hooks sum and never average. FSDP2 calls its hook *behind* its own all-reduce if its mesh has a replicate axis;
# so the model is sharded over the mesh `shard` alone, and the hook is the only sum between replicas.

NamedParameters = Iterable[tuple[str, nn.Parameter]]
"""Parameters by the names they have in a checkpoint."""


def method_of(layout: LayoutConfig, seed: int) -> Method:
    """The method that the settings name."""
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
    """Sums buffers of gradients over a group, with the memory that this takes."""

    def __init__(self, method: Method, group: dist.ProcessGroup, device: torch.device) -> None:
        self.bytes_plain = 0
        """Bytes that would have left this rank in this step without compression."""
        self._method, self._device, self._wire = method, device, CountedGroup(group)
        self._states: dict[str, State] = {}
        self._step: int | None = None
        self._updates: Updates = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that have left this rank in this step, as `CountedGroup` counts them."""
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

    def remember(self, pieces: Iterable[BufferEntry]) -> None:
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
    def sum(self, values: Tensor, pieces: Sequence[BufferEntry]) -> None:
        """Replace flat gradients by their sum over the group; what is to be remembered of it waits for `keep`."""
        if self._step is None:
            raise ContractError("compress: expected a step, got a gradient before the first. Call start(step).")
        if (found := values.numel()) != (expected := sum(piece.size for piece in pieces)):
            names = f"{pieces[0].name} to {pieces[-1].name}" if pieces else "no parameter"
            raise ContractError(
                f"compress: expected {expected} numbers for {names}, got {found}. Every parameter wants a gradient."
            )
        total, updates = self._method.sum(Buffer(values, pieces), self._states, self._step, self._wire)
        self._updates += updates
        values.copy_(total)
        self.bytes_plain += self._wire.all_reduce_bytes(values.numel(), values.element_size())


def compress_ddp(model: DistributedDataParallel, named: NamedParameters, compressor: Compressor) -> None:
    """Sum the gradients of a model through the compressor, whose group is the model's."""
    pieces = {id(weight): BufferEntry(name, tuple(weight.shape)) for name, weight in named if weight.requires_grad}
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


def compress_fsdp(models: Iterable[nn.Module], named: NamedParameters, compressor: Compressor) -> None:
    """Sum the sharded gradients of models through the compressor, whose group is one of the mesh axis `replicate`.

    The models are sharded over the axis `shard`; weights that are equal on all replicas stay so.
    """
    names = {id(weight): name for name, weight in named}
    for module in (module for model in models for module in model.modules() if isinstance(module, FSDPModule)):
        for group in param_groups(module):
            if group._is_hsdp:
                raise ContractError(
                    "compress: expected a model sharded over one axis, got a mesh with replicas, which torch sums "
                    "itself. Shard over the axis shard alone."
                )
            # The buffer holds the parameters in torch's own order, each padded to the rows of the largest shard.
            weights = [(getattr(p._module_info.module, p._module_info.param_name), p) for p in group.fsdp_params]
            pieces = [
                BufferEntry(names[id(weight)], tuple(p.padded_sharded_param_size))
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


def _sum_shard(compressor: Compressor, pieces: Sequence[BufferEntry], values: Tensor) -> None:
    """The hook of FSDP2: `values` is what the reduce-scatter left, and what torch goes on with."""
    if values.is_cuda:
        # Allocated on the stream of the reduce-scatter, used on that of the hook.
        values.record_stream(torch.cuda.current_stream())
    compressor.sum(values, pieces)
