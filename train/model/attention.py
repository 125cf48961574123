"""Attention: who sees whom in a row, rotary and relative positions, and the one place where it is computed.

Rows without documents are for torch's fused kernels; train/model/documents has the forms in which documents are given.

Shape suffixes: B rows, T positions, D width, H query heads, G key-value heads, K head width, L distances, N blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from train.model.cpu_attention import MOST, attend_in_tiles
from train.model.shape import ModelShape

# Documents that share a row: which keys a query sees, in the form that the attention kernel of each device takes.
#
# On a CUDA device in 16 bits the kernel of FlashAttention takes the places where documents start (`varlen_attn`), and
# FlexAttention, for shapes that FlashAttention does not take, a list of blocks. A CPU takes the documents themselves,
# by which train/model/tiles cuts the row. None of them computes what nobody sees, nor holds a square of the row.
# Everything else gets a matrix of truths.
#
# Shape suffixes: B rows, T positions, H query heads, G key-value heads, K head width, N documents or blocks.

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


MAX_KERNELS = 64
"""Shapes of rows, with a gradient and without, that FlexAttention is compiled for.

Torch stops at 8, which a run in stages can exceed, and goes on uncompiled, with the square."""

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Look:
    """What a layer must know of its rows beside what they hold; the same for all layers."""

    positions_T: Tensor
    """Place of each position in its row, int64."""
    rotation: Rotation | None
    """Cosines and sines of these places, float32, each (T, 1, K/2); None without rotary positions."""
    seen_B1TT: Tensor | None
    """Whether a query (rows) sees a key (columns), or 0 where it does and -inf where not; None = as `causal` says."""
    causal: bool
    """Whether a position sees those before it only."""
    blocks: BlockMask | Tensor | None = None
    """`seen_B1TT` as FlexAttention takes it, or on a CPU the documents of the rows, (B, T)."""
    starts_N: Tensor | None = None
    """`seen_B1TT` as FlashAttention takes it: where documents start in the rows laid end to end, and the end. At most
    one of the three is not None."""
    distances_LD: Tensor | None = None
    """Sinusoids of the distances from T - 1 down to -1 (`causal`) or -T, float32; None without relative positions."""


Core = Callable[[Tensor, Tensor, Tensor, Look], Tensor]
"""(queries (B, H, T, K), keys and values (B, G, T, K), look) to what each query takes, (B, H, T, K)."""


def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, look: Look) -> Tensor:
    """Scaled dot-product attention by torch's fastest kernel for the device and the look."""
    grouped, seen_B1TT = q_BHTK.shape[1] != k_BGTK.shape[1], look.seen_B1TT
    if look.starts_N is not None:
        return attend_from_starts(q_BHTK, k_BGTK, v_BGTK, look.starts_N, look.causal)
    if isinstance(look.blocks, BlockMask):
        y_BHTK: Tensor = _flex(q_BHTK.device.type)(q_BHTK, k_BGTK, v_BGTK, block_mask=look.blocks, enable_gqa=grouped)
        return y_BHTK
    # Of up to two tiles nothing was gained (4 heads of 24, 8 rows of 256: 0.99 of a step on one core, 1.03 on two).
    long = look.causal and seen_B1TT is None and q_BHTK.shape[2] > 2 * MOST
    if q_BHTK.device.type == "cpu" and (long or look.blocks is not None):
        return attend_in_tiles(q_BHTK, k_BGTK, v_BGTK, look.blocks, look.causal)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGTK, v_BGTK, attn_mask=seen_B1TT, is_causal=seen_B1TT is None and look.causal, enable_gqa=grouped
    )


def added_mask(look: Look, x_BTD: Tensor) -> Look:
    """The look with a mask that is added to scores, in the number format that attention is computed in.

    Made once, it serves all layers; of truths SDPA would make such a matrix in every layer, and keep them all.
    """
    if look.seen_B1TT is None or look.distances_LD is not None:
        return look
    added_B1TT = torch.zeros_like(look.seen_B1TT, dtype=number_format(x_BTD)).masked_fill_(~look.seen_B1TT, -torch.inf)
    return replace(look, seen_B1TT=added_B1TT)


def number_format(x_BTD: Tensor) -> torch.dtype:
    """The number format of products with a stream: that of autocast where it is on."""
    kind = x_BTD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BTD.dtype


@cache
def _flex(device_type: str) -> Any:
    """FlexAttention; on a CUDA device only compiled does it hold no square. On a CPU it has no backward pass."""
    # For each length and number of rows of its own: a run has few, and kernels for any length did not compile (2.13).
    if device_type != "cuda":
        return flex_attention
    # The limit is a setting of the whole process: as an argument of torch.compile it is younger than torch 2.11.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_KERNELS)
    return torch.compile(flex_attention, dynamic=False)


class Attention(nn.Module):
    """Self-attention; each key-value head serves H/G query heads. Source: Ainslie 2023, 2305.13245."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.head_dim = shape.head_dim
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.query = nn.Linear(shape.d_model, query_width, bias=shape.bias)
        self.key = nn.Linear(shape.d_model, key_width, bias=shape.bias)
        self.value = nn.Linear(shape.d_model, key_width, bias=shape.bias)
        self.out = nn.Linear(query_width, shape.d_model, bias=shape.bias)
        self.query_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.key_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.relative = Relative(shape) if shape.positions == "relative" else None
        self.core: Core = attend

    def forward(self, x_BTD: Tensor, look: Look) -> Tensor:
        """What each position takes from those it sees, (B, T, D)."""
        q_BTHK = self.query(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.key(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.value(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None and self.key_norm is not None:
            # Under autocast a norm with float32 gains gives float32, and the three must have one format.
            q_BTHK, k_BTGK = (
                self.query_norm(q_BTHK).type_as(v_BTGK),
                self.key_norm(k_BTGK).type_as(v_BTGK),
            )
        if look.rotation is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, look.rotation), rotate(k_BTGK, look.rotation)
        q_BHTK, k_BGTK, v_BGTK = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        y_BHTK = (self.relative or self.core)(q_BHTK, k_BGTK, v_BGTK, look)
        y_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class Relative(nn.Module):
    """Attention by content and by distance: the distance i - j of a query and a key has an embedding of its own.

    A score is (q + u)·k + (q + v)·r, with r a projection of the distance's sinusoids and u, v learnt for each head.
    Source: Dai et al. 2019 (Transformer-XL), arXiv 1901.02860, section 3.3 and appendix B.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.distance = nn.Linear(shape.d_model, shape.query_width, bias=False)
        self.content_bias = nn.Parameter(torch.empty(shape.query_width))
        self.distance_bias = nn.Parameter(torch.empty(shape.query_width))

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, look: Look) -> Tensor:
        """What each query takes from the keys it sees, (B, H, T, K)."""
        if look.distances_LD is None:
            raise ValueError("relative positions want the distances of their look")
        u_H1K, v_H1K = (bias.view(-1, 1, self.head_dim) for bias in (self.content_bias, self.distance_bias))
        r_LHK = self.distance(look.distances_LD.type_as(q_BHTK)).unflatten(-1, (-1, self.head_dim))
        # Products in the format of the queries: a sum with an unrounded parameter would be float32 again.
        by_distance_BHTL = (q_BHTK + v_H1K).type_as(q_BHTK) @ r_LHK.permute(1, 2, 0).type_as(q_BHTK)
        scores_BHTT = shifted(by_distance_BHTL) / math.sqrt(self.head_dim)
        seen = look.seen_B1TT
        if seen is None and look.causal:
            seen = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=q_BHTK.device).tril()
        if seen is not None:
            scores_BHTT = scores_BHTT.masked_fill(~seen, -math.inf)
        content = (q_BHTK + u_H1K).type_as(q_BHTK)
        grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
        return F.scaled_dot_product_attention(content, k_BGTK, v_BGTK, attn_mask=scores_BHTT, enable_gqa=grouped)


def shifted(by_distance_BHTL: Tensor) -> Tensor:
    """From a column for each distance, T - 1 first, to a column for each key; (B, H, T, T).

    Column j of row i is distance i - j, the one at T - 1 - i + j: read with rows of L - 1, each begins one earlier.
    """
    length, number = by_distance_BHTL.shape[-2:]
    flat = by_distance_BHTL.flatten(-2)[..., length - 1 : -1]
    return flat.view(*flat.shape[:-1], length, number - 1)[..., :length]


def sinusoids(length: int, causal: bool, width: int, device: torch.device) -> Tensor:
    """Sines, then cosines of the distances from length - 1 down to -1 or -length, float32, (L, D).

    The last distance stands for no pair; `shifted` wants it. Source: Vaswani et al. 2017, arXiv 1706.03762, 3.5.
    """
    distances_L = torch.arange(length - 1, -2 if causal else -length - 1, -1, dtype=torch.float32, device=device)
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    angles = distances_L[:, None] * 10_000.0 ** (-pairs / width)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :width]


def rotation_table(positions_T: Tensor, shape: ModelShape) -> Rotation:
    """Cosines and sines of rotary positions, float32, each (T, 1, K/2). Source: Su 2021, 2104.09864, 3.4.2."""
    angles = positions_T.float()[:, None] * rotary_frequencies(shape, positions_T.device)
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def rotary_frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """Radians per position of each pair of coordinates, (K/2,), stretched as the shape says."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = shape.rope_theta ** (-pairs / shape.head_dim)
    if shape.rope_scaling == "linear":
        return frequencies / shape.rope_factor
    if shape.rope_scaling == "llama3":
        # Waves shorter than a quarter of the original length stay, those longer than it are stretched whole.
        turns = shape.rope_original * frequencies / (2 * math.pi)
        kept = ((turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / shape.rope_factor)
    return frequencies


LOW_TURNS, HIGH_TURNS = 1.0, 4.0
"""llama3: turns over the original length up to which a wave is stretched whole, and from which on it stays."""


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Heads turned by their position; the halves of a head are the two coordinates of each pair. Keeps the dtype."""
    cos, sin = rotation
    first, second = x_BTHK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BTHK)
