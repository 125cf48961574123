"""Products of rows with one matrix for each group of rows, such as the tokens of each expert.

The rows of a group are adjacent. Rows after the last group belong to none: their results and gradients are 0.
torch's `grouped_mm` computes all groups in one kernel. It requires bf16 on a CUDA device, and lengths that are a
multiple of 16 bytes. Everything else is computed group by group, which on a CPU is as fast.

Shape suffixes: N rows, E groups, I columns of the rows, O columns of the result.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16
"""Bytes by which the length of each row must be divisible for torch's kernels."""


def grouped_product(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Return the product of each row with the transposed matrix of its group, (N, O).

    `ends_E`: index after the last row of each group, int32, never decreasing.
    """
    y_NO: Tensor = _product(x_NI, weight_EOI, ends_E)
    return y_NO


@torch.library.custom_op("penstock::grouped_product", mutates_args=())
def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(x, weight):
        y = F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
        # The kernel leaves the memory of rows without a group as it was.
        return y.masked_fill_(_without_group(x, ends)[:, None], 0.0)
    y, begin = x.new_zeros(len(x), weight.shape[1]), 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(x[begin:end], weight[group].T, out=y[begin:end])
        begin = end
    return y


@_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@torch.library.custom_op("penstock::grouped_product_backward", mutates_args=())
def _backward(gradient: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the matrices."""
    gradient = gradient.contiguous()
    if _has_kernel(x, weight):
        gradient_of_x = F.grouped_mm(gradient, weight, offs=ends)
        gradient_of_x.masked_fill_(_without_group(x, ends)[:, None], 0.0)
        return gradient_of_x, F.grouped_mm(gradient.T, x.contiguous(), offs=ends)
    gradient_of_x, gradient_of_weight, begin = torch.zeros_like(x), torch.zeros_like(weight), 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(gradient[begin:end], weight[group], out=gradient_of_x[begin:end])
            torch.mm(gradient[begin:end].T, x[begin:end], out=gradient_of_weight[group])
        begin = end
    return gradient_of_x, gradient_of_weight


@_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(gradient, *ctx.saved_tensors), None)


_product.register_autograd(_differentiate, setup_context=_save)


GROUPED_PRODUCT = torch.ops.penstock.grouped_product.default
"""The operator of `grouped_product`, as selective recomputation names it."""


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch's `grouped_mm` supports these lengths and this dtype, and the rows are not empty."""
    aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and len(x) > 0


def _without_group(x: Tensor, ends: Tensor) -> Tensor:
    """Return a mask, (N,): True for rows after the last group."""
    return torch.arange(len(x), device=x.device) >= ends[-1]
