"""A sequence shared by several ranks: each holds its positions, and attention brings together what a query must see.

heads: all-to-all gives every rank whole sequences of some heads (Jacobs et al. 2023, Ulysses, arXiv 2309.14509);
keys: every rank gathers all keys and values (Llama 3, arXiv 2407.21783, section 3.3.2).

Shape suffixes: B rows, T positions (t: of this rank), H query heads, G key-value heads, K head width, C ranks.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from train.data.rows import Rows
from train.model.attention import Core, Look
from train.model.documents import Documents
from train.model.transformer import Transformer
from train.parallel.collectives import all_gather_single, reduce_scatter_single


def part_of_rows(rows: Rows, parts: int, part: int) -> Rows:
    """The rows with this rank's positions of inputs, targets and groups; the documents of the whole rows stay."""
    width = rows.inputs_BT.shape[1] // parts
    mine = slice(part * width, (part + 1) * width)
    groups = rows.sources_B[:, mine] if rows.sources_B.dim() == 2 else rows.sources_B
    return Rows(rows.inputs_BT[:, mine], rows.targets_BT[:, mine], rows.documents_BT, groups)


def share_sequences(model: Transformer, group: dist.ProcessGroup, by: str) -> None:
    """Let attention see whole sequences although this rank holds a part of them."""
    parts, part = dist.get_world_size(group), dist.get_rank(group)

    def look(width: int, documents: Documents | None, device: torch.device) -> Look:
        if by == "heads":
            whole = model.look_at(parts * width, documents, device)
        else:
            numbers_BT = None if documents is None else documents.numbers_BT
            whole = model.look_from(torch.arange(parts * width, device=device), numbers_BT)
        mine = slice(part * width, (part + 1) * width)
        rotation = None if whole.rotation is None else (whole.rotation[0][mine], whole.rotation[1][mine])
        seen_B1TT = whole.seen_B1TT
        if by == "keys" and seen_B1TT is None and whole.causal:
            seen_B1TT = (whole.positions_T[:, None] >= whole.positions_T)[None, None]
        if by == "keys" and seen_B1TT is not None:
            seen_B1TT = seen_B1TT[:, :, mine]
        return replace(whole, positions_T=whole.positions_T[mine], rotation=rotation, seen_B1TT=seen_B1TT)

    model.look = look
    share = by_heads if by == "heads" else by_keys
    for block in model.layers:
        block.attention.core = share(block.attention.core, group)


def by_heads(core: Core, group: dist.ProcessGroup) -> Core:
    """Attention over whole sequences, each rank with its share of the heads."""
    parts = dist.get_world_size(group)

    def attend(q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, look: Look) -> Tensor:
        if k_BGtK.shape[1] % parts:  # too few key-value heads to share: as many as there are query heads
            times = q_BHtK.shape[1] // k_BGtK.shape[1]
            k_BGtK, v_BGtK = k_BGtK.repeat_interleave(times, 1), v_BGtK.repeat_interleave(times, 1)
        heads = [_to_heads(x, group, parts) for x in (q_BHtK, k_BGtK, v_BGtK)]
        return _to_positions(core(heads[0], heads[1], heads[2], look), group, parts)

    return attend


def by_keys(core: Core, group: dist.ProcessGroup) -> Core:
    """Attention of this rank's queries over all keys."""

    def attend(q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, look: Look) -> Tensor:
        k_CBGtK, v_CBGtK = _gather(torch.stack((k_BGtK, v_BGtK)), group).unbind(1)
        k_BGTK, v_BGTK = (x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in (k_CBGtK, v_CBGtK))
        return core(q_BHtK, k_BGTK, v_BGTK, look)

    return attend


def _to_heads(x_BHtK: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """From all heads at some positions to some heads at all positions."""
    x_CBHtK = _cut(x_BHtK, 1, parts)
    return _exchange(x_CBHtK, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_positions(x_BHTK: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """From some heads at all positions to all heads at some positions."""
    x_CBHtK = _cut(x_BHTK, 2, parts)
    return _exchange(x_CBHtK, group).movedim(0, 1).flatten(1, 2)


def _cut(x: Tensor, dim: int, parts: int) -> Tensor:
    """A dimension cut into equal parts, which become the first dimension."""
    return torch.stack(x.chunk(parts, dim))


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension, which is its own transposition."""

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
    """A tensor of every rank, stacked; backward, the sum of what the ranks want of it."""

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
