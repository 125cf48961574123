"""Data parallelism: what the ranks that read different rows share out (FSDP2), or do not (DDP).

Gradients are summed over ranks and never averaged, since every loss is divided by the targets of the global batch.
Source: Zhao et al. 2023, arXiv 2304.11277 (fully sharded data parallelism); Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from train.config.layout import LayoutConfig
from train.model.transformer import Transformer
from train.parallel.mesh import Mesh

NUMBERS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Number format of gathered weights, and so of matrix products, by `train.precision`."""


def shard(model: Transformer, mesh: Mesh, layout: LayoutConfig, precision: str) -> None:
    """Shard a model, or a stage of one, layer by layer over the mesh's states."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if (number := NUMBERS[precision]) is not None:
        # Inputs are not cast: the rotary table is passed along in float32, and bf16 would blur high positions.
        policy = MixedPrecisionPolicy(number, torch.float32, cast_forward_inputs=False)
    pinned = torch.cuda.is_available()
    offload = CPUOffloadPolicy(pin_memory=pinned) if layout.offload else OffloadPolicy()
    for module in (*model.blocks.values(), model):
        # The outermost part (embedding, last norm, output matrix) is needed again at once behind the forward pass.
        freed = layout.data == "zero3" and module is not model
        fully_shard(module, mesh=mesh.states, mp_policy=policy, reshard_after_forward=freed, offload_policy=offload)
    for sharded in sharded_modules(model):
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that are sharded one by one; sharding has changed their class in place."""
    return [cast(FSDPModule, module) for module in model.modules() if isinstance(module, FSDPModule)]
