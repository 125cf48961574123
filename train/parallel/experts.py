"""Expert parallelism: each rank of the shard axis keeps some experts of every layer, and tokens travel to them.

The matrices of experts are DTensors that are sharded by expert, as FSDP2 would shard them, so optimizers and
checkpoints treat both alike. But they are never gathered: two all-to-alls a layer send tokens to the ranks of their
experts and bring the outputs back. The gradient of an expert then contains the tokens of all ranks already.

Source: Lepikhin et al. 2020 (GShard), arXiv 2006.16668, section 3.2.

Shape suffixes: M rows sent, R rows received, D width, E experts, P ranks, L experts of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from train.model.moe import ExpertFunction, Experts
from train.parallel.ranks import Mesh


def place_experts(model: nn.Module, mesh: Mesh) -> set[nn.Parameter]:
    """Divide the experts of every layer among the ranks of the shard axis; return their parameters on this rank.

    `model` is on the meta device, and its number of experts a multiple of the number of ranks.
    """
    placed: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, Experts):
            for name, parameter in list(module.named_parameters(recurse=False)):
                shards = distribute_tensor(parameter.data, mesh.states, [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(shards))
                placed.add(getattr(module, name))
            module.exchange = TokenExchange(mesh.states.get_group())
    return placed


class TokenExchange:
    """The two all-to-alls around the experts of a layer."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self._size = group, dist.get_world_size(group)

    def __call__(self, x_MD: Tensor, counts_E: Tensor, compute: ExpertFunction) -> Tensor:
        """Return the output of each row, (M, D); 0 for rows after those that `counts_E` counts.

        `compute`: the function of the experts of this rank.
        """
        counts_PL = counts_E.view(self._size, -1)
        received_PL = torch.empty_like(counts_PL)
        dist.all_to_all_single(received_PL, counts_PL.contiguous(), group=self._group)
        # The host must know both: it allocates the memory of the rows that arrive.
        sent, received = counts_PL.sum(1).tolist(), received_PL.sum(1).tolist()
        x_RD = _exchange(x_MD[: sum(sent)], sent, received, self._group)
        # The rows of each rank arrive in the order of experts; now all rows are brought into that order.
        local_L = torch.arange(counts_PL.shape[1], device=x_MD.device).repeat(self._size)
        order_R = local_L.repeat_interleave(received_PL.flatten(), output_size=sum(received)).argsort(stable=True)
        y_RD = compute(x_RD[order_R], received_PL.sum(0))[order_R.argsort()]
        y_MD = _exchange(y_RD, received, sent, self._group)
        return torch.cat((y_MD, y_MD.new_zeros(len(x_MD) - sum(sent), y_MD.shape[1])))


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that all ranks send to this one. `sent`, `received`: numbers of rows, by rank."""
    y: Tensor = _RowExchange.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return y


class _RowExchange(torch.autograd.Function):
    """All-to-all of rows; its backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.places = (received, sent, group)
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradients[0], *ctx.places), None, None, None
