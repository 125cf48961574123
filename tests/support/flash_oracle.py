"""FlashAttention's variable-length operator on a CPU, document by document, by torch's own attention.

torch has CUDA kernels of the operator alone. With these kernels the code around it runs on a CPU as it does on a GPU:
the same operator is traced, compiled and differentiated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from train.model.flash_attention import KERNELS_4


def _attend(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, starts: list[int], causal: bool) -> Tensor:
    documents = []
    for first, stop in pairwise(starts):
        q, k, v = (x[first:stop].transpose(0, 1)[None] for x in (q_NHK, k_NGK, v_NGK))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        documents.append(y[0].transpose(0, 1))
    return torch.cat(documents)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    starts, causal = cu_seq_q.tolist(), others[0]
    if starts[0] != 0 or starts[-1] != len(query) or any(b - a > max_q for a, b in pairwise(starts)):
        raise ValueError(f"expected documents of at most {max_q} positions that fill {len(query)}, got {starts}")
    y_NHK = _attend(query, key, value, starts, causal)
    return y_NHK, query.new_zeros(query.shape[1], len(query), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


def _backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return the gradients by formula: autograd is not available inside an operator."""
    _, _, starts_N, _, _, _, causal = others[:7]
    results = [torch.empty_like(x) for x in (query, key, value)]
    times = query.shape[1] // key.shape[1]
    starts = starts_N.tolist()
    for first, stop in pairwise(starts):
        part = slice(first, stop)
        q, dy = (x[part].transpose(0, 1) for x in (query, gradient))
        k, v = (x[part].transpose(0, 1).repeat_interleave(times, 0) for x in (key, value))
        scale = q.shape[-1] ** -0.5
        scores = q @ k.mT * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        shares = scores.softmax(-1)
        of_shares = dy @ v.mT
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True))
        computed = (of_scores @ k * scale, of_scores.mT @ q * scale, shares.mT @ dy)
        for result, computed_heads in zip(results, computed):
            heads = result.shape[1]
            result[part] = computed_heads.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
    return tuple(results)


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Register the operator for the CPU, for the rest of this process."""
    varlen._varlen_attn.register_kernel("cpu", _forward)
    varlen._varlen_attn_backward.register_kernel("cpu", _backward)
    yield


@contextmanager
def flash_4_on_cpu() -> Iterator[None]:
    """Put CPU functions in the place of the kernels of FlashAttention 4."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool, **limits: Any) -> tuple[Any, ...]:
        assert return_lse
        starts, longest = limits["cu_seqlens_q"], limits["max_seqlen_q"]
        y_NHK, log_z_HN, _ = _forward(q, k, v, starts, limits["cu_seqlens_k"], longest, limits["max_seqlen_k"], causal)
        return y_NHK, log_z_HN, None, None, None

    def backward(
        q: Tensor, k: Tensor, v: Tensor, y: Tensor, gradient: Tensor, log_z: Tensor, **limits: Any
    ) -> tuple[Tensor, ...]:
        assert gradient.is_contiguous()
        assert limits["deterministic"] == torch.are_deterministic_algorithms_enabled()
        starts = limits["cu_seqlens_q"]
        return _backward(gradient, q, k, v, y, log_z, starts, starts, 0, 0, limits["causal"])

    with _kernels_4(forward, backward):
        yield


@contextmanager
def no_flash_4() -> Iterator[None]:
    """Leave attention to the FlashAttention of torch, also where version 4 is installed."""
    with _kernels_4(None, None):
        yield


@contextmanager
def _kernels_4(*kernels: Any) -> Iterator[None]:
    before = (KERNELS_4.forward, KERNELS_4.backward)
    KERNELS_4.forward, KERNELS_4.backward = kernels
    yield
    KERNELS_4.forward, KERNELS_4.backward = before
