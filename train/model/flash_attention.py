"""Attention within documents by FlashAttention: version 2, which torch contains, or 3 and 4 where they are installed.

Version 3 has kernels for Hopper, and torch's own function calls them once they are activated. Version 4 has kernels for
Hopper and Blackwell, compiled when they are first called. torch 2.11 cannot call its present release (the results have
another number of elements), so the two operators below do.

Source: Dao 2023, 2307.08691; Shah 2024, 2407.08608. Shape suffixes: N positions of all rows, H query heads, G key-value
heads, K head width, D documents, plus one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from schemas.errors import ConfigError
from train.model.shape import ModelShape

FLASH_HEADS = range(8, 257, 8)
"""Head widths that the kernels of versions 2 and 3 support."""
FLASH_4_HEADS = range(8, 129, 8)
"""Head widths that the kernels of version 4 support, on Hopper and on Blackwell."""
MIN_FLASH_CAPABILITY = (8, 0)
"""Minimum CUDA compute capability (Ampere)."""
FLASH_3 = ("FA3", "flash_attn_interface", (9, 0))
"""Version 3: its name in torch, the module that contains its kernels, and the only capability (Hopper)."""
FLASH_4 = ("flash-attn-4", "flash_attn.cute.interface", ((9, 0), (10, 0), (10, 3)))
"""Version 4: its package, the module that contains its kernels, and the capabilities (Hopper, Blackwell)."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that FlashAttention and FlexAttention support; in float32 their tiles exceed a GPU's shared memory."""

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Keyword argument of `varlen_attn` that enables grouped heads; torch 2.11 lacks it and always allows them."""


Kernel = Callable[..., Any]


@dataclass
class Kernels:
    """What FlashAttention 4 computes with; None = versions 2 and 3 are used."""

    forward: Kernel | None = None
    backward: Kernel | None = None


KERNELS_4 = Kernels()


def uses_flash_attention(device: torch.device, shape: ModelShape, dtype: torch.dtype) -> bool:
    """Return True if FlashAttention supports this device, shape and dtype."""
    if device.type != "cuda" or dtype not in KERNEL_DTYPES:
        return False
    return (
        shape.positions != "relative" and shape.head_dim in FLASH_HEADS and _capability(device) >= MIN_FLASH_CAPABILITY
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def activate_flash_attention(device: torch.device) -> int:
    """Activate the newest FlashAttention that is installed and has kernels for the device; return its version, or 0.

    Version 4 takes 4 s to compile at its first call; its own FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps the result.
    Raises ConfigError if version 4 is installed but lacks the functions that are called here.
    """
    if device.type != "cuda" or _capability(device) < MIN_FLASH_CAPABILITY:
        return 0
    if _capability(device) in FLASH_4[2] and _installed_4():
        load_flash_4()
        return 4
    name, module, capability = FLASH_3
    if _capability(device) != capability or find_spec(module) is None:
        return 2
    activate_flash_attention_impl(name)
    return 3


def _installed_4() -> bool:
    try:
        return bool(version(FLASH_4[0]))
    except PackageNotFoundError:
        return False


def load_flash_4() -> tuple[Kernel, Kernel]:
    """Use FlashAttention 4 from now on, and return its two kernels.

    Raises ConfigError if its package lacks them.
    """
    package, name, _ = FLASH_4
    try:
        module = import_module(name)
        kernels: tuple[Kernel, Kernel] = module._flash_attn_fwd, module._flash_attn_bwd
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{package} {version(package)}: expected {name} with its two kernels, got {error}. Install "
            f"{package} 4.0.0b36, or uninstall it to use the FlashAttention of torch."
        ) from None
    KERNELS_4.forward, KERNELS_4.backward = kernels
    return kernels


def attend_varlen(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, starts_D: Tensor, causal: bool, window: int | None = None
) -> Tensor:
    """Return FlashAttention's output within documents, (B, H, T, K).

    `starts_D`: offset of each document's start in the concatenated rows, then their end, int32. `window`: number of
    latest positions that a causal query attends to; None = all.
    """
    rows, length = q_BHTK.shape[0], q_BHTK.shape[2]
    q_NHK, k_NGK, v_NGK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTK, k_BGTK, v_BGTK))
    # The row length in place of the longest document's length, which would become a constant of the compiled graph. The
    # kernels only set the size of their grid by it.
    # Version 4 was never run with a window, so torch's own kernels compute layers that have one.
    if KERNELS_4.forward is not None and q_BHTK.shape[3] in FLASH_4_HEADS and window is None:
        y_NHK, _ = _forward(q_NHK, k_NGK, v_NGK, starts_D, length, causal)
    else:
        size = (-1 if window is None else window - 1, 0) if causal else (-1, -1)
        y_NHK = varlen_attn(q_NHK, k_NGK, v_NGK, starts_D, starts_D, length, length, window_size=size, **_GROUPED)
    y_BHTK: Tensor = y_NHK.unflatten(0, (rows, length)).transpose(1, 2)
    return y_BHTK


@torch.library.custom_op("penstock::attend_documents", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, length: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output of FlashAttention 4, (N, H, K), and the log of each query's softmax denominator, (H, N)."""
    forward = KERNELS_4.forward or load_flash_4()[0]
    limits = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    y_NHK, log_z_HN, *_ = forward(q, k, v, causal=causal, return_lse=True, **limits)
    return y_NHK, log_z_HN


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, length: int, causal: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[1], q.shape[0], dtype=torch.float32
    )


@torch.library.custom_op("penstock::attend_documents_backward", mutates_args=())
def _backward(
    gradient: Tensor, saved: list[Tensor], starts: Tensor, length: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. `saved`: these three, the output and its log Z."""
    backward = KERNELS_4.backward or load_flash_4()[1]
    q, k, v, y, log_z = saved
    limits = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    fixed = torch.are_deterministic_algorithms_enabled()
    found = backward(q, k, v, y, gradient, log_z, causal=causal, deterministic=fixed, **limits)
    return found[0], found[1], found[2]


@_backward.register_fake
def _(
    gradient: Tensor, saved: list[Tensor], starts: Tensor, length: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[:3])
    return of_q, of_k, of_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, ctx.length, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _gradients(ctx: Any, gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    *saved, starts = ctx.saved_tensors
    return *_backward(gradient.contiguous(), saved, starts, ctx.length, ctx.causal), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
