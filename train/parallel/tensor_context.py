"""Context and tensor parallelism: sequences and matrices split over ranks.

Context parallelism splits positions. heads: an all-to-all gives every rank whole sequences of some heads (Jacobs et al.
2023, Ulysses, arXiv 2309.14509); keys: every rank all-gathers keys and values (Llama 3, arXiv 2407.21783, section
3.3.2). Tensor parallelism splits the matrices of each layer, and the sequence between layers.

Shape suffixes: B rows, T positions (t: of this rank), H query heads, G key-value heads, K head width, C ranks.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
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

from train.data.rows import Rows
from train.model.attention import AttentionFunction, AttentionMask, RowDocuments
from train.model.loss import HeadLoss, VocabularyPart
from train.model.transformer import Transformer
from train.parallel.ranks import all_gather_single, reduce_scatter_single


def context_part(rows: Rows, parts: int, part: int) -> Rows:
    """Return the rows cut to part `part` of `parts` equal parts of their positions. `documents_BT` stays whole."""
    width = rows.inputs_BT.shape[1] // parts
    mine = slice(part * width, (part + 1) * width)
    groups = rows.sources_B[:, mine] if rows.sources_B.dim() == 2 else rows.sources_B
    return Rows(rows.inputs_BT[:, mine], rows.targets_BT[:, mine], rows.documents_BT, groups, keys_B=rows.keys_B)


def apply_context_parallel(model: Transformer, group: dist.ProcessGroup, by: str) -> None:
    """Make the attention of a model cover whole sequences, of which each rank in `group` has some positions.

    `by`: heads or keys, as in `layout.context_by`.
    """
    parts, part = dist.get_world_size(group), dist.get_rank(group)

    def attention_mask(
        width: int, documents: RowDocuments | None, device: torch.device, window: int | None
    ) -> AttentionMask:
        if by == "heads":
            whole = model.mask_of_rows(parts * width, documents, device, window)
        else:
            numbers_BT = None if documents is None else documents.numbers_BT
            whole = model.mask_of_positions(torch.arange(parts * width, device=device), numbers_BT, window)
        mine = slice(part * width, (part + 1) * width)
        rotation = None if whole.rotation is None else (whole.rotation[0][mine], whole.rotation[1][mine])
        mask_B1TT = whole.mask_B1TT
        if by == "keys" and mask_B1TT is None and whole.causal:
            mask_B1TT = (whole.positions_T[:, None] >= whole.positions_T)[None, None]
        if by == "keys" and mask_B1TT is not None:
            mask_B1TT = mask_B1TT[:, :, mine]
        return replace(whole, positions_T=whole.positions_T[mine], rotation=rotation, mask_B1TT=mask_B1TT)

    model.attention_mask = attention_mask
    share = attend_by_heads if by == "heads" else attend_by_keys
    for block in model.layers:
        block.attention.core = share(block.attention.core, group)


def attend_by_heads(core: AttentionFunction, group: dist.ProcessGroup) -> AttentionFunction:
    """Return an attention function that calls `core` on each rank with whole sequences of some heads."""
    parts = dist.get_world_size(group)

    def attend(q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, attention_mask: AttentionMask) -> Tensor:
        if k_BGtK.shape[1] % parts:  # too few key-value heads to split: repeat them for every query head
            times = q_BHtK.shape[1] // k_BGtK.shape[1]
            k_BGtK, v_BGtK = k_BGtK.repeat_interleave(times, 1), v_BGtK.repeat_interleave(times, 1)
        heads = [_to_heads(x, group, parts) for x in (q_BHtK, k_BGtK, v_BGtK)]
        return _to_positions(core(heads[0], heads[1], heads[2], attention_mask), group, parts)

    return attend


def attend_by_keys(core: AttentionFunction, group: dist.ProcessGroup) -> AttentionFunction:
    """Return an attention function that calls `core` with this rank's queries and the keys and values of all ranks."""

    def attend(q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, attention_mask: AttentionMask) -> Tensor:
        k_CBGtK, v_CBGtK = _gather(torch.stack((k_BGtK, v_BGtK)), group).unbind(1)
        k_BGTK, v_BGTK = (x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in (k_CBGtK, v_CBGtK))
        return core(q_BHtK, k_BGTK, v_BGTK, attention_mask)

    return attend


def _to_heads(x_BHtK: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Exchange all heads at this rank's positions for some heads at all positions."""
    x_CBHtK = _cut(x_BHtK, 1, parts)
    return _exchange(x_CBHtK, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_positions(x_BHTK: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Exchange some heads at all positions for all heads at this rank's positions."""
    x_CBHtK = _cut(x_BHTK, 2, parts)
    return _exchange(x_CBHtK, group).movedim(0, 1).flatten(1, 2)


def _cut(x: Tensor, dim: int, parts: int) -> Tensor:
    return torch.stack(x.chunk(parts, dim))


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension; its backward pass is the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """All-gather that stacks the tensors of all ranks; its backward pass is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = dist.get_world_size(group)
        out = x.new_empty((parts * x.shape[0], *x.shape[1:]))
        all_gather_single(out, x.contiguous(), group=group)
        return out.view(parts, *x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        out = gradients[0].new_empty(gradients[0].shape[1:])
        reduce_scatter_single(out, gradients[0].flatten(0, 1).contiguous(), group=ctx.group)
        return out, None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Exchange.apply(x, group))  # type: ignore[no-untyped-call]


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Gather.apply(x, group))  # type: ignore[no-untyped-call]


# Tensor and sequence parallelism splits the columns of the first matrix of a pair and the rows of the second, so one
# collective before and one after each pair are enough; norms and residual stream hold T / ranks positions each.
# Sources: Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the matrices of a model over the ranks of a mesh, and adapt its attention mask and loss."""
    sequence = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    attention = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    in_layer: dict[str, ParallelStyle] = {
        "mix_stream": SequenceParallel(use_local_output=True),
        "mix_first": SequenceParallel(use_local_output=True),
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
    # The value embeddings of each rank's heads.
    outside |= {f"value_embeddings.{number}": ColwiseParallel() for number in model.blocks}
    present = {name for name, module in model.named_modules() if module is not None}
    parallelize_module(model, mesh, {name: style for name, style in outside.items() if name in present})
    if model.embedding is not None:
        model.embedding.register_forward_hook(lambda module, inputs, x_BTD: _wait_for(x_BTD))
    # In a later pipeline stage, the residual stream holds only this rank's positions.
    attention_mask, times = model.attention_mask, mesh.size() if model.embedding is None else 1
    model.attention_mask = lambda width, *others: attention_mask(width * times, *others)
    # Dropout outside the matrices draws for this rank's positions.
    model.stream_positions = lambda positions_T: positions_T.chunk(mesh.size())[mesh.get_local_rank()]
    model.loss = VocabularyParallelLoss(model.loss, mesh)


class _WaitFor(torch.autograd.Function):
    """Waits for the result of a collective, and returns it as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # A layer compiled by torch.compile gives a gradient of zero to a tensor whose collective is pending (torch
        # 2.13).
        return x.wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _wait_for(x: Tensor) -> Tensor:
    return cast(Tensor, _WaitFor.apply(x))  # type: ignore[no-untyped-call]


class VocabularyParallelLoss(HeadLoss):
    """The loss for a vocabulary and a residual stream that are split over the ranks of a mesh."""

    def __init__(self, head: HeadLoss, mesh: DeviceMesh):
        super().__init__(head.z_loss, head.chunk_tokens, fused=head.fused, multiple=head.multiple, softcap=head.softcap)
        self._mesh = mesh

    def __call__(
        self,
        x_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor,
        sources_B: Tensor | None,
        bias_V: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of all positions on every rank; each rank gets the gradient of its own positions."""
        if not isinstance(weight_VD, DTensor):
            raise TypeError(f"output matrix: expected a DTensor over {self._mesh}, got a plain tensor")
        largest = -(-weight_VD.shape[0] // self._mesh.size())
        self.part = VocabularyPart(self._mesh.get_group(), largest * self._mesh.get_local_rank())
        stream = DTensor.from_local(x_BTD, self._mesh, [Shard(1)], run_check=False)
        whole_BTD = stream.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return super().__call__(whole_BTD, weight_VD.to_local(), targets_BT, sources_B, bias_V)
