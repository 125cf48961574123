"""Documents that share a row: which keys a query sees, in the form that the attention kernel of each device takes.

On a CUDA device in 16 bits the kernel of FlashAttention takes the places where documents start (`varlen_attn`), and
FlexAttention, for shapes that FlashAttention does not take, a list of blocks. A CPU takes the documents themselves, by
which train/model/tiles cuts the row. None of them computes what nobody sees, nor holds a square of the row. Everything
else gets a matrix of truths.

Shape suffixes: B rows, T positions, H query heads, G key-value heads, K head width, N documents or blocks.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.varlen import varlen_attn

from train.model.shape import ModelShape

BLOCK = 128
"""Positions of a block for FlexAttention, whose kernels are made for this size."""
MIN_FLEX_HEAD = 16
"""Narrowest head that FlexAttention's kernels take."""
FLASH_HEADS = range(8, 257, 8)
"""Widths of heads that FlashAttention's kernels take."""
MIN_FLASH_CAPABILITY = (8, 0)
"""First CUDA devices (Ampere) that these kernels run on."""
FLASH_3 = ("FA3", "flash_attn_interface", (9, 0))
"""torch's name of FlashAttention 3, the module that brings its kernels, and the only devices (Hopper) they are for."""
NARROW = (torch.bfloat16, torch.float16)
"""Number formats that both kernels are for: in float32 their tiles exceed the shared memory of a GPU."""

_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""How grouped heads are asked for; torch 2.11 takes them unasked."""


@dataclass(frozen=True)
class Documents:
    """The documents of some rows, and the number format in which attention will be computed."""

    numbers_BT: Tensor
    """Number of the document of each position, int32, never falling within a row."""
    starts_N: Tensor | None
    """Where each document starts in the rows laid end to end, then the end of all, int32; None = it is not known."""
    number: torch.dtype
    """Number format of queries, keys and values."""


def takes_starts(device: torch.device, shape: ModelShape, number: torch.dtype) -> bool:
    """Whether documents are given to FlashAttention by where they start."""
    if device.type != "cuda" or number not in NARROW:
        return False
    return shape.positions == "rope" and shape.head_dim in FLASH_HEADS and _capability(device) >= MIN_FLASH_CAPABILITY


def takes_blocks(device: torch.device, shape: ModelShape, number: torch.dtype) -> bool:
    """Whether documents are given to attention as blocks on a CUDA device, or as they are on a CPU."""
    if device.type == "cuda":
        return shape.positions == "rope" and shape.head_dim >= MIN_FLEX_HEAD and number in NARROW
    return shape.positions == "rope" and device.type == "cpu"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def activate_flash_3(device: torch.device) -> bool:
    """Let torch compute attention by FlashAttention 3 where that is installed and the device is a Hopper GPU."""
    name, module, capability = FLASH_3
    if device.type != "cuda" or _capability(device) != capability or find_spec(module) is None:
        return False
    activate_flash_attention_impl(name)
    return True


def attend_from_starts(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, starts_N: Tensor, causal: bool) -> Tensor:
    """What each query takes from its document, (B, H, T, K), by FlashAttention's kernel for lengths that vary.

    The longest document is given as the whole row: it only sizes the grid, and its true length would be a constant of
    the compiled graph.
    """
    rows, length = q_BHTK.shape[0], q_BHTK.shape[2]
    q_NHK, k_NGK, v_NGK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTK, k_BGTK, v_BGTK))
    window = (-1, 0) if causal else (-1, -1)
    y_NHK = varlen_attn(q_NHK, k_NGK, v_NGK, starts_N, starts_N, length, length, window_size=window, **_GROUPED)
    y_BHTK: Tensor = y_NHK.unflatten(0, (rows, length)).transpose(1, 2)  # type: ignore[union-attr]
    return y_BHTK


def seen_in_document(documents_BT: Tensor, causal: bool) -> Tensor:
    """Whether a query sees a key: of its own document and, if `causal`, not after it; (B, 1, T, T)."""
    seen_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (seen_BTT.tril() if causal else seen_BTT)[:, None]


def blocks_in_document(documents_BT: Tensor, causal: bool) -> BlockMask | Tensor:
    """The same, as the device's kernel takes it."""
    return documents_BT if documents_BT.device.type == "cpu" else flex_blocks(documents_BT, causal)


def flex_blocks(documents_BT: Tensor, causal: bool) -> BlockMask:
    """The same, as blocks: which hold a pair that sees each other, and which of them nothing else.

    As numbers of documents never fall in a row, those at the ends of a block decide; no square of T is ever made.
    """
    length = documents_BT.shape[1]
    number = -(-length // BLOCK)
    ends_N = torch.arange(1, number + 1, device=documents_BT.device) * BLOCK
    first_BN, last_BN = documents_BT[:, ends_N - BLOCK], documents_BT[:, ends_N.clamp(max=length) - 1]
    some_BNN = (first_BN[:, :, None] <= last_BN[:, None, :]) & (last_BN[:, :, None] >= first_BN[:, None, :])
    # A block that the row does not fill counts as partial: nobody sees positions after the end.
    single_BN = (first_BN == last_BN) & (ends_N <= length)
    whole_BNN = some_BNN & single_BN[:, :, None] & single_BN[:, None, :]
    if causal:
        some_BNN, whole_BNN = some_BNN.tril(), whole_BNN.tril(-1)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents_BT[row, query] == documents_BT[row, key]
        return same & (query >= key) if causal else same

    partial, whole = _listed(some_BNN & ~whole_BNN), _listed(whole_BNN)
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK, sees, (length, length))


def _listed(chosen_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """For every query block the number of key blocks, and which: the chosen ones first."""
    chosen_B1NN = chosen_BNN[:, None].int()
    places_B1NN = chosen_B1NN.argsort(dim=-1, descending=True, stable=True).int()
    return chosen_B1NN.sum(-1, dtype=torch.int32), places_B1NN
