"""Self-attention, its attention masks, and rotary and relative positions.

Documents that share a row do not attend to each other. Each kernel reads that mask in its own form. For FlashAttention
it is the offsets where documents start, for FlexAttention a list of blocks, for the CPU's tiles the document numbers,
for all others a boolean matrix. The first three neither compute masked blocks nor hold a T × T matrix in memory.

Shape suffixes: B rows, T positions, D width, H query heads, G key-value heads, K head width, C width of all key-value
heads, L distances, N documents or blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from train.model.cpu_attention import MAX_TILE_QUERIES, attend_in_tiles
from train.model.dropout import ATTENTION_WEIGHTS, RowDraws, derived_keys, kept, scale_kept
from train.model.flash_attention import KERNEL_DTYPES, attend_varlen
from train.model.shape import LLAMA_TURNS, ModelShape

# Masks of documents that share a row. With a 16-bit dtype, a CUDA device uses FlashAttention
# (train/model/flash_attention.py), or FlexAttention for the shapes that FlashAttention does not support. A CPU cuts the
# row into tiles (train/model/cpu_attention.py).

BLOCK = 128
"""Number of positions in a block of FlexAttention, whose kernels are made for this size."""
MIN_FLEX_HEAD = 16
"""Smallest head width that FlexAttention's kernels support."""


@dataclass(frozen=True)
class RowDocuments:
    """The documents of a batch's rows, and the dtype in which attention is computed."""

    numbers_BT: Tensor
    """Number of each position's document, int32, never decreasing within a row."""
    starts_N: Tensor | None
    """Offset of each document's start in the concatenated rows, then their end, int32; None = unknown."""
    dtype: torch.dtype
    """Dtype of queries, keys and values."""


def uses_blocks(device: torch.device, shape: ModelShape, dtype: torch.dtype) -> bool:
    """Return True if the device has a kernel that masks documents without a T × T matrix."""
    if device.type == "cuda":
        return shape.positions != "relative" and shape.head_dim >= MIN_FLEX_HEAD and dtype in KERNEL_DTYPES
    return shape.positions != "relative" and device.type == "cpu"


def document_mask(documents_BT: Tensor, causal: bool, window: int | None = None) -> Tensor:
    """Return the boolean mask within documents, (B, 1, T, T): True where a query may attend to a key.

    A query may attend to the keys of its own document and, if `causal`, to none after itself. `window`: number of
    latest positions that a causal query attends to; None = all.
    """
    visible_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    if window is not None:
        visible_BTT = visible_BTT.triu(1 - window)
    return (visible_BTT.tril() if causal else visible_BTT)[:, None]


def document_blocks(documents_BT: Tensor, causal: bool, window: int | None = None) -> BlockMask | Tensor:
    """Return `document_mask` in the form that the device's kernel reads: document numbers (CPU) or blocks (CUDA)."""
    return documents_BT if documents_BT.device.type == "cpu" else flex_block_mask(documents_BT, causal, window)


def flex_block_mask(documents_BT: Tensor, causal: bool, window: int | None = None) -> BlockMask:
    """Return `document_mask` as blocks for FlexAttention, without making the T × T matrix."""
    length = documents_BT.shape[1]
    num_blocks = -(-length // BLOCK)
    ends_N = torch.arange(1, num_blocks + 1, device=documents_BT.device) * BLOCK
    first_BN, last_BN = documents_BT[:, ends_N - BLOCK], documents_BT[:, ends_N.clamp(max=length) - 1]
    # Document numbers never decrease in a row, so the numbers at both ends of a block are enough.
    some_BNN = (first_BN[:, :, None] <= last_BN[:, None, :]) & (last_BN[:, :, None] >= first_BN[:, None, :])
    # A block that the row does not fill counts as partial: positions after the row's end are masked.
    single_BN = (first_BN == last_BN) & (ends_N <= length)
    whole_BNN = some_BNN & single_BN[:, :, None] & single_BN[:, None, :]
    if causal:
        some_BNN, whole_BNN = some_BNN.tril(), whole_BNN.tril(-1)
    reach = length if window is None else window
    if window is not None:
        # The nearest query and key of two blocks are BLOCK - 1 closer than the blocks, the farthest as much farther.
        some_BNN = some_BNN.triu(-((window + BLOCK - 2) // BLOCK))
        whole_BNN = whole_BNN.triu(-((window - BLOCK) // BLOCK))

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents_BT[row, query] == documents_BT[row, key]
        return same & (query >= key) & (query - key < reach) if causal else same

    partial, whole = _list_blocks(some_BNN & ~whole_BNN), _list_blocks(whole_BNN)
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK, is_visible, (length, length))


def _list_blocks(chosen_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return each query block's number of chosen key blocks, and the indices of all key blocks, chosen ones first."""
    chosen_B1NN = chosen_BNN[:, None].int()
    places_B1NN = chosen_B1NN.argsort(dim=-1, descending=True, stable=True).int()
    return chosen_B1NN.sum(-1, dtype=torch.int32), places_B1NN


MAX_KERNELS = 64
"""Maximum number of row shapes, with and without a gradient, that FlexAttention is compiled for.

torch's default is 8, which a run with several training stages can exceed; beyond it FlexAttention runs uncompiled and
holds the T × T scores."""

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AttentionMask:
    """The attention mask and the positions of a batch's rows; the same for all layers."""

    positions_T: Tensor
    """Index of each position in its row, int64."""
    rotation: Rotation | None
    """Cosines and sines of these positions, float32, each (T, 1, K/2); None without rotary positions."""
    mask_B1TT: Tensor | None
    """True where a query (rows) may attend to a key (columns); or additive, 0 there and -inf elsewhere.

    None = no mask but that of `causal`."""
    causal: bool
    """True if a position attends only to itself and to earlier positions."""
    blocks: BlockMask | Tensor | None = None
    """`mask_B1TT` in the form of FlexAttention, or on a CPU the document numbers of the rows, (B, T)."""
    starts_N: Tensor | None = None
    """`mask_B1TT` in the form of FlashAttention: offsets of document starts in the concatenated rows, and their end.

    At most one of the three is not None."""
    window: int | None = None
    """Number of latest positions that a causal query attends to, itself included; None = all. A boolean or additive
    matrix, or blocks of FlexAttention, contain this limit already."""
    distances_LD: Tensor | None = None
    """Sinusoids of the distances from T - 1 down to -1 (`causal`) or -T, float32; None without relative positions."""
    draws: RowDraws | None = None
    """What the dropout masks of the rows are drawn from; None = no dropout, as in evaluation."""

    def of_layer(self, layer: int) -> "AttentionMask":
        """Return the mask for one layer, by its number in the whole model: only the draws of dropout differ."""
        return self if self.draws is None else replace(self, draws=self.draws.of_layer(layer))


AttentionFunction = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
"""An attention function: (queries (B, H, T, K), keys and values (B, G, T, K), mask) to the output, (B, H, T, K)."""


def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: AttentionMask) -> Tensor:
    """Return scaled dot-product attention, (B, H, T, K), from the fastest kernel for the device and the mask."""
    grouped, mask_B1TT = q_BHTK.shape[1] != k_BGTK.shape[1], mask.mask_B1TT
    if mask.starts_N is not None:
        return attend_varlen(q_BHTK, k_BGTK, v_BGTK, mask.starts_N, mask.causal, mask.window)
    if isinstance(mask.blocks, BlockMask):
        y_BHTK: Tensor = _flex(q_BHTK.device.type)(q_BHTK, k_BGTK, v_BGTK, block_mask=mask.blocks, enable_gqa=grouped)
        return y_BHTK
    # Up to two tiles gain nothing (4 heads of 24, 8 rows of 256: 0.99 of a step's time on one core, 1.03 on two).
    long = mask.causal and mask_B1TT is None and q_BHTK.shape[2] > 2 * MAX_TILE_QUERIES
    if q_BHTK.device.type == "cpu" and (long or mask.blocks is not None or mask.window is not None):
        return attend_in_tiles(q_BHTK, k_BGTK, v_BGTK, mask.blocks, mask.causal, mask.window)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGTK, v_BGTK, attn_mask=mask_B1TT, is_causal=mask_B1TT is None and mask.causal, enable_gqa=grouped
    )


# Attention with dropout. No fused kernel computes a mask that is given as a hash: torch's own draw from a generator,
# whose numbers depend on the layout, and FlexAttention changes scores before the softmax only, which would renormalize
# the weights that are kept. So the scores of each head are held in memory, and documents are masked by a matrix.


@dataclass(frozen=True)
class DroppedAttention:
    """An attention function that drops a share of the attention weights while a model is trained."""

    rate: float
    """Probability that a weight is dropped."""
    part: int
    """Index of this rank's heads among the ranks that share the heads of a layer."""

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: AttentionMask) -> Tensor:
        """Return scaled dot-product attention, (B, H, T, K), with dropout if the mask has draws."""
        if mask.draws is None:
            return attend(q_BHTK, k_BGTK, v_BGTK, mask)
        num_heads, length, width = q_BHTK.shape[1:]
        times = num_heads // k_BGTK.shape[1]
        k_BHTK, v_BHTK = k_BGTK.repeat_interleave(times, 1), v_BGTK.repeat_interleave(times, 1)
        everywhere_T = mask.draws.counters_N[: k_BHTK.shape[2]]
        # The queries are all positions, or with context_by = keys those of this rank.
        positions_T = everywhere_T if length == len(everywhere_T) else mask.positions_T
        wide = torch.promote_types(q_BHTK.dtype, torch.float32)
        scores_BHTT = (q_BHTK @ k_BHTK.mT).to(wide) / math.sqrt(width)
        if mask.mask_B1TT is not None:
            scores_BHTT = scores_BHTT + mask.mask_B1TT
        elif mask.causal:
            scores_BHTT = scores_BHTT.masked_fill(everywhere_T > positions_T[:, None], -math.inf)
        heads_H = mask.draws.counters_N[:num_heads] + self.part * num_heads
        keys_BHT = derived_keys(derived_keys(mask.draws.keys_of(ATTENTION_WEIGHTS), heads_H), positions_T)
        weights_BHTT = scale_kept(scores_BHTT.softmax(-1), kept(keys_BHT, everywhere_T, self.rate), self.rate)
        return weights_BHTT.type_as(v_BHTK) @ v_BHTK


def additive_mask(mask: AttentionMask, x_BTD: Tensor) -> AttentionMask:
    """Return the mask with 0 and -inf in place of True and False, in the dtype of attention.

    Masks without a boolean matrix, and those of relative positions, are returned unchanged.
    """
    if mask.mask_B1TT is None or mask.distances_LD is not None:
        return mask
    # Once for all layers: torch's attention would convert a boolean matrix in every layer and keep each result.
    added_B1TT = torch.zeros_like(mask.mask_B1TT, dtype=compute_dtype(x_BTD)).masked_fill_(~mask.mask_B1TT, -torch.inf)
    return replace(mask, mask_B1TT=added_B1TT)


def compute_dtype(x_BTD: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: that of autocast if autocast is on, else that of `x_BTD`."""
    kind = x_BTD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BTD.dtype


@cache
def _flex(device_type: str) -> Any:
    """Return FlexAttention: compiled on CUDA; on a CPU not compiled and without a backward pass."""
    # Compiled for each row length and number of rows: a run has few, and dynamic kernels did not compile (torch 2.13).
    if device_type != "cuda":
        return flex_attention
    # The limit is set for the whole process: torch 2.11 does not have it as an argument of torch.compile yet.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_KERNELS)
    return torch.compile(flex_attention, dynamic=False)


class Attention(nn.Module):
    """Self-attention; each key-value head serves H/G query heads. Source: Ainslie 2023, 2305.13245."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.head_dim, self.query_scale = shape.head_dim, shape.query_scale
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.query = nn.Linear(shape.d_model, query_width, bias=shape.bias)
        self.key = nn.Linear(shape.d_model, key_width, bias=shape.bias)
        self.value = nn.Linear(shape.d_model, key_width, bias=shape.bias)
        self.out = nn.Linear(query_width, shape.d_model, bias=shape.bias)
        self.query_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.key_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.relative = RelativeAttention(shape) if shape.positions == "relative" else None
        self.core: AttentionFunction = attend

    def forward(self, x_BTD: Tensor, mask: AttentionMask, added_BTC: Tensor | None = None) -> Tensor:
        """Return the attention output of each position, (B, T, D).

        `added_BTC`: value embeddings of the positions, added to the values of all heads; None = none.
        """
        q_BTHK = self.query(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.key(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.value(x_BTD).unflatten(-1, (-1, self.head_dim))
        if added_BTC is not None:
            v_BTGK = v_BTGK + added_BTC.view_as(v_BTGK).type_as(v_BTGK)
        if self.query_norm is not None and self.key_norm is not None:
            # Under autocast a norm with float32 gains returns float32, and the three must have the same dtype.
            q_BTHK, k_BTGK = (
                self.query_norm(q_BTHK).type_as(v_BTGK),
                self.key_norm(k_BTGK).type_as(v_BTGK),
            )
        if self.query_scale != 1:
            q_BTHK = q_BTHK * self.query_scale
        if mask.rotation is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, mask.rotation), rotate(k_BTGK, mask.rotation)
        q_BHTK, k_BGTK, v_BGTK = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        y_BHTK = (self.relative or self.core)(q_BHTK, k_BGTK, v_BGTK, mask)
        y_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class RelativeAttention(nn.Module):
    """Attention with relative positions: each distance i - j of a query and a key has its own embedding.

    A score is (q + u)·k + (q + v)·r, with r a projection of the distance's sinusoids and u, v learned for each head.
    Source: Dai et al. 2019 (Transformer-XL), arXiv 1901.02860, section 3.3 and appendix B.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.distance = nn.Linear(shape.d_model, shape.query_width, bias=False)
        self.content_bias = nn.Parameter(torch.empty(shape.query_width))
        self.distance_bias = nn.Parameter(torch.empty(shape.query_width))

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: AttentionMask) -> Tensor:
        """Return the attention output, (B, H, T, K). Raises ValueError if the mask has no distances."""
        if mask.distances_LD is None:
            raise ValueError(
                "Relative.forward: expected distances_LD for relative positions, got None. "
                "Set distances_LD with sinusoids()."
            )
        u_H1K, v_H1K = (bias.view(-1, 1, self.head_dim) for bias in (self.content_bias, self.distance_bias))
        r_LHK = self.distance(mask.distances_LD.type_as(q_BHTK)).unflatten(-1, (-1, self.head_dim))
        # Products in the dtype of the queries: a sum with a float32 parameter would be float32 again.
        by_distance_BHTL = (q_BHTK + v_H1K).type_as(q_BHTK) @ r_LHK.permute(1, 2, 0).type_as(q_BHTK)
        scores_BHTT = align_distances(by_distance_BHTL) / math.sqrt(self.head_dim)
        visible = mask.mask_B1TT
        if visible is None and mask.causal:
            visible = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=q_BHTK.device).tril()
        if visible is not None:
            scores_BHTT = scores_BHTT.masked_fill(~visible, -math.inf)
        content = (q_BHTK + u_H1K).type_as(q_BHTK)
        grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
        return F.scaled_dot_product_attention(content, k_BGTK, v_BGTK, attn_mask=scores_BHTT, enable_gqa=grouped)


def align_distances(by_distance_BHTL: Tensor) -> Tensor:
    """Return the scores (B, H, T, T) of each query and key from the scores (B, H, T, L) of each query and distance.

    Column 0 of `by_distance_BHTL` is the distance T - 1; each next column is one distance less.
    """
    length, number = by_distance_BHTL.shape[-2:]
    # Query i and key j have the column T - 1 - i + j. The same memory is read as rows of L - 1 columns, so that each
    # row starts one column earlier than the row before.
    flat = by_distance_BHTL.flatten(-2)[..., length - 1 : -1]
    return flat.view(*flat.shape[:-1], length, number - 1)[..., :length]


def sinusoids(length: int, causal: bool, width: int, device: torch.device) -> Tensor:
    """Return the sinusoids of distances, float32, (L, D): the sines in the first columns, the cosines in the others.

    The first distance is length - 1. The last one is -1 if `causal`, else -length.
    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """
    # No query and key have the last distance, but `align_distances` requires its column.
    distances_L = torch.arange(length - 1, -2 if causal else -length - 1, -1, dtype=torch.float32, device=device)
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    angles = distances_L[:, None] * 10_000.0 ** (-pairs / width)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :width]


def rotation_table(positions_T: Tensor, shape: ModelShape) -> Rotation:
    """Return cosines and sines of rotary positions, float32, each (T, 1, K/2). Source: Su 2021, 2104.09864, 3.4.2."""
    angles = positions_T.float()[:, None] * rotary_frequencies(shape, positions_T.device)
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def rotary_frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """Return the radians per position of each coordinate pair, (K/2,), scaled by the shape's `rope_scaling`."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = shape.rope_theta ** (-pairs / shape.head_dim)
    if shape.rope_scaling == "linear":
        return frequencies / shape.rope_factor
    if shape.rope_scaling == "llama3":
        # Wavelengths up to a quarter of the original length are unchanged; those above that length are fully stretched.
        turns = shape.rope_original * frequencies / (2 * math.pi)
        low, high = LLAMA_TURNS
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / shape.rope_factor)
    return frequencies


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Return heads rotated by their position, in the same dtype; elements i and i + K/2 of a head form a pair."""
    cos, sin = rotation
    first, second = x_BTHK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BTHK)
