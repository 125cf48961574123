"""A reference implementation of the model in float64: einsum, softmax and every formula written out, for every option.

It shares no code with train/: weights are looked up by name. `small_model` makes a model whose gains and biases are not
1 and 0, which would hide a missing gain or bias.
"""

import math

import torch
from torch import Tensor

from train.model.shape import ModelShape
from train.model.transformer import Transformer, build_model, initial_weight

TINY = ModelShape(
    vocab_size=97, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ffw=48, tie_embeddings=False
)


def small_model(shape: ModelShape, seed: int = 0, causal: bool = True, recompute: str = "none") -> Transformer:
    """Return a whole model with initial weights, and with gains and biases that differ from their initial values."""
    model = build_model(shape, causal=causal, recompute=lambda layer: recompute).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, shape, seed))
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5, generator=generator))
    return model


def some_ids(rows: int = 3, length: int = 11, seed: int = 1, vocab_size: int = TINY.vocab_size) -> Tensor:
    """Return random ids (rows, length)."""
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def oracle_logits(
    shape: ModelShape, weights: dict[str, Tensor], ids: Tensor, causal: bool = True, documents: Tensor | None = None
) -> Tensor:
    """Return logits (B, T, V) in float64, with gradients for the weights."""
    weights = {name: value.double() for name, value in weights.items()}
    x = weights["embedding.weight"][ids]
    if shape.positions == "learned":
        x = x + weights["extra.positions.weight"][: ids.shape[1]]
    if shape.num_token_types:
        x = x + weights["extra.types.weight"][0]
    if shape.norm_position == "post":
        x = stream_norm(x, weights, "extra.norm", shape)
    first = x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    for layer in range(shape.num_layers):
        at = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"blocks.{layer}.")}
        if shape.residual_mixing:
            x = x * at["mix_stream.weight"] + first * at["mix_first.weight"]
        added = weights[f"value_embeddings.{layer}.weight"][ids] if with_values(shape, layer) else 0.0
        visible = visible_keys(shape, layer, x, causal, documents)
        if shape.norm_position == "post":
            x = stream_norm(x + attention(shape, at, x, visible, added), at, "attention_norm", shape)
            x = stream_norm(x + feed_forward(shape, at, x), at, "ffn_norm", shape)
        else:
            x = x + attention(shape, at, stream_norm(x, at, "attention_norm", shape), visible, added)
            x = x + feed_forward(shape, at, stream_norm(x, at, "ffn_norm", shape))
    if shape.norm_position == "pre":
        x = stream_norm(x, weights, "norm", shape)
    head, bias = weights["embedding.weight" if shape.tie_embeddings else "head.weight"], 0.0
    if shape.head_transform:
        x = linear(weights, "transform.dense", x)
        x = stream_norm(x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), weights, "transform.norm", shape)
        bias = weights["transform.output_bias"]
    logits = torch.einsum("btd,vd->btv", x, head) + bias
    cap = shape.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def with_values(shape: ModelShape, layer: int) -> bool:
    """Return True if the layer is the last one, or a multiple of `value_embeddings` before it."""
    every = shape.value_embeddings
    return every > 0 and layer in range(shape.num_layers - 1, -1, -every)


def visible_keys(shape: ModelShape, layer: int, x: Tensor, causal: bool, documents: Tensor | None) -> Tensor:
    """Return which keys (last dim) each query of a layer attends to, (B, T, T)."""
    rows, length = x.shape[:2]
    visible = torch.ones(rows, length, length, dtype=torch.bool)
    near = layer < shape.num_layers - 1 and (shape.window_pattern * shape.num_layers)[layer : layer + 1] == "S"
    for query in range(length):
        for key in range(length):
            visible[:, query, key] &= not causal or key <= query
            visible[:, query, key] &= not near or query - key < (shape.window or 0)
    return visible if documents is None else visible & (documents[:, :, None] == documents[:, None, :])


def stream_norm(x: Tensor, at: dict[str, Tensor], name: str, shape: ModelShape) -> Tensor:
    if shape.norm == "rmsnorm":
        return norm(x, at[f"{name}.weight"], shape)
    centred = x - x.mean(-1, keepdim=True)
    return norm(centred, at[f"{name}.weight"], shape) + at[f"{name}.bias"]


def norm(x: Tensor, gain: Tensor, shape: ModelShape) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * gain


def linear(at: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, at[f"{name}.weight"])
    return y + at[f"{name}.bias"] if f"{name}.bias" in at else y


def feed_forward(shape: ModelShape, at: dict[str, Tensor], x: Tensor) -> Tensor:
    up = linear(at, "ffn.up", x)
    if shape.activation == "relu2":
        return linear(at, "ffn.down", torch.where(up > 0, up, 0.0) ** 2)
    if shape.activation == "gelu":
        return linear(at, "ffn.down", up * 0.5 * (1 + torch.erf(up / math.sqrt(2))))
    if shape.activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        return linear(at, "ffn.down", up * 0.5 * (1 + torch.tanh(inner)))
    gate = linear(at, "ffn.gate", x)
    return linear(at, "ffn.down", gate / (1 + (-gate).exp()) * up)


def attention(shape: ModelShape, at: dict[str, Tensor], x: Tensor, visible: Tensor, added: Tensor | float) -> Tensor:
    length, width = x.shape[1], shape.head_dim
    q = linear(at, "attention.query", x).unflatten(-1, (shape.num_heads, width))
    k = linear(at, "attention.key", x).unflatten(-1, (shape.num_kv_heads, width))
    v = (linear(at, "attention.value", x) + added).unflatten(-1, (shape.num_kv_heads, width))
    if shape.qk_norm:
        q, k = (norm(q, at["attention.query_norm.weight"], shape), norm(k, at["attention.key_norm.weight"], shape))
    # Query head h reads key head h // (H / G).
    of = torch.arange(shape.num_heads) // (shape.num_heads // shape.num_kv_heads)
    k, v = k[:, :, of], v[:, :, of]
    if shape.positions == "learned":
        scores = torch.einsum("bihk,bjhk->bhij", q, k)
    elif shape.positions == "rope":
        scores = torch.einsum("bihk,bjhk->bhij", turned(shape, q), turned(shape, k))
    else:
        u, w = (at[f"attention.relative.{name}_bias"].view(-1, width) for name in ("content", "distance"))
        scores = torch.einsum("bihk,bjhk->bhij", q + u, k)
        for i in range(length):
            for j in range(length):
                r = linear(at, "attention.relative.distance", sinusoid(i - j, shape.d_model)).view(-1, width)
                scores[:, :, i, j] += torch.einsum("bhk,hk->bh", q[:, i] + w, r)
    scores = (scores / math.sqrt(width)).masked_fill(~visible[:, None], -math.inf)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return linear(at, "attention.out", torch.einsum("bhij,bjhk->bihk", weights, v).flatten(2))


def turned(shape: ModelShape, x: Tensor) -> Tensor:
    """Return x with its coordinate pairs (p, p + K/2), as complex numbers, rotated by position times frequency."""
    half = shape.head_dim // 2
    turns = torch.tensor(
        [[t * frequency(shape, p) for p in range(half)] for t in range(x.shape[1])], dtype=torch.double
    )
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turns), turns)[:, None]
    return torch.cat((z.real, z.imag), -1)


def frequency(shape: ModelShape, pair: int) -> float:
    """Return radians per position, scaled by wavelength as in Llama 3's published configuration."""
    plain = shape.rope_theta ** (-2 * pair / shape.head_dim)
    if shape.rope_scaling == "linear":
        return plain / shape.rope_factor
    if shape.rope_scaling == "none":
        return plain
    wave = 2 * math.pi / plain
    if wave < shape.rope_original / 4:
        return plain
    if wave > shape.rope_original:
        return plain / shape.rope_factor
    smooth = (shape.rope_original / wave - 1) / (4 - 1)
    return (1 - smooth) * plain / shape.rope_factor + smooth * plain


def sinusoid(distance: int, width: int) -> Tensor:
    angles = [distance / 10_000 ** (i / width) for i in range(0, width, 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.double)[:width]
