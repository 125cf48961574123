"""Every matrix of a layer shared by several ranks, and between layers the sequence (tensor and sequence parallel).

Columns of the first matrix and rows of the second are split, so that one exchange before and one behind each pair is
enough; norms and residual stream hold T / ranks positions each. Sources: Shoeybi et al. 2019, arXiv 1909.08053,
section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from train.model.chunk_loss import VocabularyPart
from train.model.loss import HeadLoss
from train.model.transformer import Transformer


def share_matrices(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the matrices of a model over the ranks of a mesh, and set its look and loss for that."""
    sequence = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    attention = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    in_layer: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": attention,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.query_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.key_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "ffn": sequence,
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    outside: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(),
    }
    for block in model.layers:
        present = {name for name, module in block.named_modules() if module is not None}
        parallelize_module(block, mesh, {name: style for name, style in in_layer.items() if name in present})
    present = {name for name, module in model.named_children() if module is not None}
    parallelize_module(model, mesh, {name: style for name, style in outside.items() if name in present})
    if model.embedding is not None:
        model.embedding.register_forward_hook(lambda module, inputs, x_BTD: _waited(x_BTD))
    # The stream of a later stage of a pipeline holds a part of the positions.
    look, times = model.look, mesh.size() if model.embedding is None else 1
    model.look = lambda width, documents, device: look(width * times, documents, device)
    model.loss = SharedHeadLoss(model.loss, mesh)


class _Waited(torch.autograd.Function):
    """The result of a collective once it has arrived, a plain tensor.

    A layer that torch.compile has compiled gives a gradient of zero to a tensor that is still on its way (torch 2.13).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _waited(x: Tensor) -> Tensor:
    return cast(Tensor, _Waited.apply(x))  # type: ignore[no-untyped-call]


class SharedHeadLoss(HeadLoss):
    """The loss where the vocabulary and the positions of the stream are shared by the ranks of a mesh."""

    def __init__(self, head: HeadLoss, mesh: DeviceMesh):
        super().__init__(head.z_loss, head.chunk_tokens, fused=head.fused, multiple=head.multiple)
        self._mesh = mesh

    def __call__(self, x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, sources_B: Tensor | None) -> Tensor:
        """The same sum on every rank of the mesh; the gradient of the stream goes back to who holds its positions."""
        if not isinstance(weight_VD, DTensor):
            raise TypeError(f"the output matrix is not shared over {self._mesh}")
        largest = -(-weight_VD.shape[0] // self._mesh.size())
        self.part = VocabularyPart(self._mesh.get_group(), largest * self._mesh.get_local_rank())
        stream = DTensor.from_local(x_BTD, self._mesh, [Shard(1)], run_check=False)
        whole_BTD = stream.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return super().__call__(whole_BTD, weight_VD.to_local(), targets_BT, sources_B)
