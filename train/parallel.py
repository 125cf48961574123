"""The model over the ranks: sharding (FSDP2), the rows each rank takes, the gradient and loss of a global batch.

Rows may be split over ranks and micro-batches in any way, uneven ones included: each loss is divided by the number of
targets in the global batch, and gradients are summed over ranks, never averaged: the split is not in the mathematics.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from train.config import TrainConfig
from train.model import IGNORED, Transformer, build_model, initial_weight, token_losses
from train.ranks import Ranks
from train.shape import ModelShape

Part = tuple[Tensor, Tensor]
"""Inputs (B, T) and targets (B, T) of one micro-batch; a target of IGNORED counts nowhere."""


def sharded_model(shape: ModelShape, config: TrainConfig, ranks: Ranks) -> Transformer:
    """The model sharded block by block over the mesh, its storage on this rank's device, its values undefined.

    Source: Zhao 2023, 2304.11277 (fully sharded data parallelism).
    """
    model = build_model(shape, recompute=config.activation_checkpointing == "full")
    # Inputs are not cast: the rotary table is passed along in float32, and bf16 would blur high positions.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if config.precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=config.reshard)
    fully_shard(model, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=False)
    for module in map(as_fsdp, (*model.blocks, model)):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return model.to_empty(device=ranks.device)


def as_fsdp(module: nn.Module) -> FSDPModule:
    """The same module; sharding has changed its class in place, which a type checker cannot see."""
    return cast(FSDPModule, module)


def set_initial_weights(model: Transformer, seed: int) -> None:
    """Set every parameter to its initial value; each rank keeps its shard of the same full tensor."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = initial_weight(name, parameter.shape, model.shape, seed).to(parameter.device)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)


def rows_of_rank(num_rows: int, ranks: Ranks) -> range:
    """The contiguous rows of a global batch that this rank takes; counts differ by at most one between ranks."""
    return range(num_rows * ranks.rank // ranks.world_size, num_rows * (ranks.rank + 1) // ranks.world_size)


def micro_batches(rows: Tensor, num_rows: int, size: int, ranks: Ranks, never: Tensor) -> list[Part]:
    """This rank's `rows` of a batch of `num_rows`, at most `size` at a time, on its device.

    Ids in `never` are not predicted. Every rank has as many parts, since each part is a collective: a rank that runs
    out of rows gets a row of ids that are never predicted.
    """
    rows, never = rows.to(ranks.device), never.to(ranks.device)
    most = -(-num_rows // ranks.world_size)
    parts = [rows[first : first + size] for first in range(0, most, size)]
    parts = [part if len(part) else never[:1].expand(1, rows.shape[1]) for part in parts]
    return [(part[:, :-1], part[:, 1:].masked_fill(torch.isin(part[:, 1:], never), IGNORED)) for part in parts]


def count_targets(parts: list[Part]) -> int:
    """Number of targets that count in the loss."""
    return sum(int((targets != IGNORED).sum()) for _, targets in parts)


def accumulate_gradient(model: Transformer, parts: list[Part], num_targets: float) -> float:
    """Add the gradient of (sum of losses / num_targets) over all ranks; returns this rank's sum of losses [nats]."""
    total = 0.0
    for number, (ids, targets) in enumerate(parts, start=1):
        as_fsdp(model).set_requires_gradient_sync(number == len(parts))
        losses = token_losses(model(ids), targets)
        torch.autograd.backward(losses.sum() / num_targets)
        total += losses.detach().double().sum().item()
    return total


@torch.no_grad()
def measure_loss(model: Transformer, parts: list[Part], ranks: Ranks) -> float:
    """Mean loss of a batch over all ranks [nats/token], without a gradient."""
    losses = sum(token_losses(model(ids), targets).double().sum().item() for ids, targets in parts)
    total, num_targets = ranks.total(losses, count_targets(parts))
    # What is kept after the forward pass stays gathered without a backward one, and hides its shards from a checkpoint.
    for module in map(as_fsdp, (*model.blocks, model)):
        module.reshard()
    return total / num_targets
