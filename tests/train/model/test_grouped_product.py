"""Products by group: each group by its own matrix, empty groups, rows without a group, gradients and compilation."""

import pytest
import torch
from torch import Tensor

from train.model.grouped_product import grouped_product


def operands(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ten rows in groups of 4, 0 and 3, so that three rows have no group."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(10, width, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(3, 8, width, generator=draw).to(dtype).requires_grad_()
    return x, weight, torch.tensor([4, 4, 7], dtype=torch.int32)


@pytest.mark.parametrize(("dtype", "width", "near"), [(torch.float32, 6, 1e-6), (torch.bfloat16, 16, 2e-2)])
def test_every_group_has_its_matrix_and_its_gradients(dtype: torch.dtype, width: int, near: float) -> None:
    x, weight, ends = operands(dtype, width)
    actual = grouped_product(x, weight, ends)
    (actual.float().square().sum()).backward()
    gradients = x.grad, weight.grad
    x.grad = weight.grad = None
    parts = [x[:4] @ weight[0].T, x[4:7] @ weight[2].T, torch.zeros(3, 8, dtype=dtype)]
    expected = torch.cat(parts)
    (expected.float().square().sum()).backward()
    torch.testing.assert_close(actual, expected, rtol=near, atol=near)
    torch.testing.assert_close(gradients[0], x.grad, rtol=near, atol=near)
    torch.testing.assert_close(gradients[1], weight.grad, rtol=near, atol=near)
    assert not actual[7:].any()
    assert not gradients[0][7:].any()
    assert not gradients[1][1].any()


def test_no_rows() -> None:
    x, weight, _ = operands(torch.float32, 6)
    y = grouped_product(x[:0], weight, torch.zeros(3, dtype=torch.int32))
    y.sum().backward()
    assert y.shape == (0, 8)
    assert not weight.grad.any()


def test_the_operator_is_registered_correctly() -> None:
    torch.library.opcheck(torch.ops.penstock.grouped_product.default, operands(torch.float32, 6))
