"""The model: a decoder-only transformer with RMSNorm, rotary positions, SwiGLU and grouped-query attention.

It is built without storage (meta device); weights are then made one parameter at a time from a seed and the
parameter's name, so they are the same for any number of ranks and any way of sharding.

Shape suffixes: B rows, T positions, D width, H query heads, G key-value heads, K head width, V vocabulary.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.shape import ModelShape

Rotation = tuple[Tensor, Tensor]
IGNORED = -100
"""The target of a position that counts nowhere."""


class Attention(nn.Module):
    """Causal self-attention; each key-value head serves H/G query heads. Source: Ainslie 2023, 2305.13245."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.head_dim = shape.head_dim
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.query = nn.Linear(shape.d_model, query_width, bias=False)
        self.key = nn.Linear(shape.d_model, key_width, bias=False)
        self.value = nn.Linear(shape.d_model, key_width, bias=False)
        self.out = nn.Linear(query_width, shape.d_model, bias=False)
        self.query_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.key_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None

    def forward(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        """What each position takes from itself and those before it, (B, T, D)."""
        q_BTHK = self.query(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.key(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.value(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None and self.key_norm is not None:
            q_BTHK, k_BTGK = self.query_norm(q_BTHK), self.key_norm(k_BTGK)
        q_BTHK, k_BTGK = rotate(q_BTHK, rotation), rotate(k_BTGK, rotation)
        y_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        y_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer 2020, 2002.05202."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.gate = nn.Linear(shape.d_model, shape.d_ffw, bias=False)
        self.up = nn.Linear(shape.d_model, shape.d_ffw, bias=False)
        self.down = nn.Linear(shape.d_ffw, shape.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each position on its own, (B, T, D)."""
        y_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normalised input and added to it."""

    def __init__(self, shape: ModelShape, recompute: bool):
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        """The residual stream after this layer, (B, T, D)."""
        # Inside the module and not a wrapper around it: parameter names stay plain, and FSDP gathers the weights
        # of the block before the recomputation starts.
        if self.recompute and torch.is_grad_enabled():
            x_BTD = checkpoint(self._layer, x_BTD, rotation, use_reentrant=False, preserve_rng_state=False)
            return x_BTD
        return self._layer(x_BTD, rotation)

    def _layer(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation)
        x_BTD = x_BTD + self.ffn(self.ffn_norm(x_BTD))
        return x_BTD


class Transformer(nn.Module):
    """The whole model: token ids to logits."""

    def __init__(self, shape: ModelShape, recompute: bool = False):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape, recompute) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.head = None if shape.tie_embeddings else nn.Linear(shape.d_model, shape.vocab_size, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of the token that follows each position, float32, (B, T, V)."""
        rotation = rotation_table(ids_BT.shape[1], self.shape, ids_BT.device)
        x_BTD = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation)
        x_BTD = self.norm(x_BTD)
        logits_BTV = F.linear(x_BTD, self.embedding.weight) if self.head is None else self.head(x_BTD)
        return logits_BTV.float()


def rotation_table(num_positions: int, shape: ModelShape, device: torch.device) -> Rotation:
    """Cosines and sines of the rotary positions, float32, each (T, 1, K/2). Source: Su 2021, 2104.09864, 3.4.2."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = shape.rope_theta ** (-pairs / shape.head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Heads turned by their position; the halves of a head are the two coordinates of each pair. Keeps the dtype."""
    cos, sin = rotation
    first, second = x_BTHK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BTHK)


def build_model(shape: ModelShape, recompute: bool = False) -> Transformer:
    """The model without storage: shapes and names only, on the meta device."""
    with torch.device("meta"):
        return Transformer(shape, recompute)


def initial_weight(name: str, size: torch.Size, shape: ModelShape, seed: int) -> Tensor:
    """The initial value of one parameter, float32 on the CPU, a function of (seed, name, size) alone.

    Gains are 1, matrices normal with deviation sqrt(2 / 5D), and those that write into the residual stream are
    divided by sqrt(2 * layers). Sources: Nguyen 2019, 1910.05895, 2.2 (small init); Radford 2019 (GPT-2), 2.3.
    """
    if len(size) == 1:
        return torch.ones(size)
    deviation = math.sqrt(2 / (5 * shape.d_model))
    if name.endswith(("attention.out.weight", "ffn.down.weight")):
        deviation /= math.sqrt(2 * shape.num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(size).normal_(0.0, deviation, generator=generator)


def token_losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy of every target [nats], (B*T,); 0 where it is IGNORED."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="none")
