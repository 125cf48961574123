"""Selective recomputation: every kind of attention runs once per optimizer step, and is not recomputed."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from train.model import transformer
from train.model.transformer import selective_contexts

FLEX, VARLEN = torch.ops.higher_order.flex_attention, torch.ops.torch_attn._varlen_attn.default
LENGTH = 128


class Counted(TorchDispatchMode):
    """Counts how often operators run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[Any, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func] = self.runs.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def by_flex(x: Tensor) -> Tensor:
    """FlexAttention of values that need no gradient: on a CPU it has no backward pass."""
    blocks = create_block_mask(lambda b, h, q, k: q >= k, 1, None, LENGTH, LENGTH, device="cpu")
    y: Tensor = flex_attention(*(x.detach() + i for i in range(3)), block_mask=blocks) * x
    return y


def by_varlen(x: Tensor) -> Tensor:
    """Run attention of two documents in one row, forward and backward, on tensors without storage."""
    ends = torch.tensor([0, 40, LENGTH], dtype=torch.int32, device=x.device)
    y: Tensor = varlen_attn(x, x, x, ends, ends, LENGTH, LENGTH)
    return y


def runs(attend: Callable[[Tensor], Tensor], operator: Any, size: tuple[int, ...], fake: bool) -> int:
    """Return how often attention runs in a forward and a backward pass with selective recomputation."""
    with FakeTensorMode() if fake else nullcontext():
        x = torch.randn(size, dtype=torch.bfloat16 if fake else None)
        x.requires_grad_()
        with Counted() as counted:
            y = checkpoint(attend, x, use_reentrant=False, preserve_rng_state=False, context_fn=selective_contexts)
            y.sum().backward()
        assert x.grad is not None
    return counted.runs[operator]


CASES = {
    "flex": (by_flex, FLEX, (1, 2, LENGTH, 16), False),
    "varlen": (by_varlen, VARLEN, (LENGTH, 2, 16), True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_not_computed_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, operator, size, fake = CASES[name]
    assert runs(attend, operator, size, fake) == 1
    # Negative control: an operator that is not in the list runs again.
    monkeypatch.setattr(transformer, "_PRODUCTS", transformer._PRODUCTS - {operator})
    assert runs(attend, operator, size, fake) == 2
