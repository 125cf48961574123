"""The sums that the ranks of one group make together, and the bytes that leave a rank for them.

A sum is taken rank by rank, in float32: every rank gets the same bits, and they do not depend on where a number lies in
its buffer. DDP cuts its buckets anew behind the first step, so a ring's sums would differ in a resumed run.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from train.parallel.collectives import all_gather_single


class Wire:
    """The group of ranks that hold the same gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.bytes_sent = 0
        """Bytes that left this rank. A sum costs 2·(n-1)·ceil(N/n) numbers, as a ring's all-reduce does; a gathering
        costs (n-1)·N; N numbers of a rank, n ranks."""

    def sum_bytes(self, count: int, itemsize: int) -> int:
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
        self.bytes_sent += self.sum_bytes(values.numel(), sent.element_size())
        return sent[: values.numel()].float()

    def gather(self, values: Tensor) -> Tensor:
        """The flat tensors of all ranks, one a row."""
        rows = torch.empty(self.size * values.numel(), dtype=values.dtype, device=values.device)
        all_gather_single(rows, values, group=self.group)
        self.bytes_sent += (self.size - 1) * values.numel() * values.element_size()
        return rows.view(self.size, -1)
