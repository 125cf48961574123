"""The shape of the model, and what follows from it exactly or by count: parameters, FLOPs, bytes."""

import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from schemas.errors import ConfigError
from train.config import PlanConfig, TrainConfig
from train.rules import Figure, Row, figures_of

MAX_LAYERS = 160
TIED_SHARE = 0.2
SIZE_UNIT, ASPECT_UNIT = 0.1, math.log(2)
"""A size off by a tenth counts as much as proportions off by two."""


class ModelShape(BaseModel):
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    vocab_size: int
    """Rows of the embedding: the tokenizer's ids, not padded."""
    num_layers: int
    """Number of layers."""
    d_model: int
    """Width of the residual stream, num_heads × head_dim."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads, a divisor of num_heads."""
    d_ffw: int
    """Hidden width of the SwiGLU."""
    tie_embeddings: bool
    """Whether the output projection is the input embedding."""
    qk_norm: bool = False
    """Whether queries and keys go through an RMSNorm of head_dim weights each."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads


def matrix_params_of_layer(shape: ModelShape) -> int:
    """Parameters in one layer's matrices: wq, wo (d·d), wk, wv (d·kv), and three of the SwiGLU (d·ffw)."""
    d, kv = shape.d_model, shape.num_kv_heads * shape.head_dim
    return 2 * d * d + 2 * d * kv + 3 * d * shape.d_ffw


def params_of_layer(shape: ModelShape) -> int:
    """Parameters of one layer: its matrices and its RMSNorm weights."""
    return matrix_params_of_layer(shape) + 2 * shape.d_model + (2 * shape.head_dim if shape.qk_norm else 0)


def num_parameters(shape: ModelShape, embeddings: bool = True) -> int:
    """Exact number of trainable parameters; without `embeddings`, both embedding matrices are left out."""
    body = shape.num_layers * params_of_layer(shape) + shape.d_model
    matrices = 1 if shape.tie_embeddings else 2
    return body + (matrices * shape.vocab_size * shape.d_model if embeddings else 0)


def flops_per_token(shape: ModelShape, seq_len: int, logits: bool = True) -> int:
    """FLOPs per token, forward and backward: 6 per matrix weight, and 12·layers·d·seq_len for attention.

    The attention term counts the whole square, as is usual for MFU; `logits=False` leaves the output projection out.
    Sources: Kaplan et al. 2020, arXiv 2001.08361, section 2.1; Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    matrices = shape.num_layers * matrix_params_of_layer(shape)
    head = shape.vocab_size * shape.d_model if logits else 0
    return 6 * (matrices + head) + 12 * shape.num_layers * shape.d_model * seq_len


def memory_per_rank(shape: ModelShape, train: TrainConfig, world_size: int) -> dict[str, int]:
    """Estimated bytes one rank needs at its peak, by purpose; an attention that never stores its square is assumed.

    Sources: Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 3.1 (states, sharded by world size); Korthikanti
    et al. 2022, arXiv 2205.05198, section 4.1 (activations, counted here for this model's tensors).
    """
    params, layer = num_parameters(shape), params_of_layer(shape)
    number = 2 if train.precision == "bf16" else 4
    rest = params - shape.num_layers * layer
    gathered = rest + layer * (min(2, shape.num_layers) if train.reshard else shape.num_layers)
    d, kv = shape.d_model, shape.num_kv_heads * shape.head_dim
    # Saved per token and layer: of both norms input, normalised and scaled; q, attention's output; k, v; gate, up,
    # silu, product: what torch saves on a CPU (tested). A norm that is one kernel, as on CUDA, would save 2·d less.
    saved = number * (8 * d + 2 * kv + 4 * shape.d_ffw)
    kept = shape.num_layers * saved
    if train.activation_checkpointing == "full":
        kept = shape.num_layers * number * d + saved
    tokens = train.micro_batch * train.seq_len
    return {
        "states": 16 * params // world_size,
        "gathered": number * (gathered + rest + layer),
        "activations": tokens * kept,
        "logits": tokens * shape.vocab_size * (number + 8),
    }


def cost_figures(shape: ModelShape, plan: PlanConfig, train: TrainConfig, tokens: int) -> list[Figure]:
    """FLOPs of the run, time at the device's peak where it is known, and memory per rank for each world size."""
    palm = "Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B"
    per_token = flops_per_token(shape, train.seq_len)
    rows: list[Row] = [
        ("flops_per_token", per_token, "FLOPs", "6·(matrices + V·d) + 12·layers·d·L", palm),
        ("flops", per_token * tokens, "FLOPs", "flops_per_token · D", palm),
    ]
    if train.peak_flops is not None:
        at_peak = per_token * tokens / train.peak_flops
        rows.append(("seconds_at_peak", at_peak, "s", "flops / train.peak_flops, one device", "recipe"))
    how = {
        "states": ("16·N / ranks", "Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1"),
        "gathered": (
            "weights of the embeddings and two layers (without reshard all), gradients of one layer",
            "count for FSDP2",
        ),
        "activations": ("(8·d + 2·kv + 4·ffw) numbers a token and layer", "Korthikanti et al. 2022, 2205.05198, 4.1"),
        "logits": ("micro_batch·L·V·(logits, float32 copy, gradient)", "count"),
    }
    for world_size in plan.world_sizes:
        need = memory_per_rank(shape, train, world_size)
        rows += [(f"memory.{world_size}.{name}", value, "bytes", *how[name]) for name, value in need.items()]
        rows.append((f"memory.{world_size}", sum(need.values()), "bytes", "sum of the four, per rank", "estimate"))
    return figures_of(rows)


def choose_shape(num_params: float, vocab_size: int, plan: PlanConfig) -> ModelShape:
    """The shape nearest to `num_params` and to the proportions of `aspect` that keeps every override.

    Embeddings are tied where both would hold over a fifth of the model. Source: Liu et al. 2024 (MobileLLM), arXiv
    2402.14905, section 2.2. Raises ConfigError if the overrides do not make a shape.
    """
    tied = plan.tie_embeddings
    shapes = list(_shapes(num_params, vocab_size, plan, bool(tied)))
    best = _best(shapes, num_params)
    if tied is None and 2 * vocab_size * best.d_model > TIED_SHARE * num_parameters(best):
        best = _best(list(_shapes(num_params, vocab_size, plan, True)), num_params)
    return best


def aspect(num_params: float) -> float:
    """Width per layer that models of this size have.

    Source: least squares over the 50 models of Hoffmann et al. 2022, arXiv 2203.15556, Table A9 (they deviate by 15 %);
    a shape twice off loses little (Kaplan et al. 2020, arXiv 2001.08361, section 3.1).
    """
    return 55 * math.pow(num_params / 1e8, 0.125)


def _best(shapes: list[ModelShape], num_params: float) -> ModelShape:
    def miss(shape: ModelShape) -> float:
        size = math.log(num_parameters(shape) / num_params)
        proportions = math.log(shape.d_model / shape.num_layers / aspect(num_params))
        return math.hypot(size / SIZE_UNIT, proportions / ASPECT_UNIT)

    return min(shapes, key=miss)


def _shapes(num_params: float, vocab_size: int, plan: PlanConfig, tied: bool) -> Iterator[ModelShape]:
    """For every depth the width that comes nearest to the size from below, and the next one."""
    widths = [plan.d_model] if plan.d_model else [d for d in range(32, 32768, 16) if _heads_share_well(d)]
    for num_layers in [plan.num_layers] if plan.num_layers else range(2, MAX_LAYERS + 1):
        low, high = 0, len(widths) - 1
        while low < high:
            middle = (low + high + 1) // 2
            size = num_parameters(_shape(vocab_size, num_layers, widths[middle], plan, tied))
            low, high = (middle, high) if size <= num_params else (low, middle - 1)
        for width in widths[low : low + 2]:
            yield _shape(vocab_size, num_layers, width, plan, tied)


def _head_dim(d_model: int) -> int:
    """Width of a head: 64, from 1280 on 128 (Hoffmann et al. 2022, Table A9); less where few heads would be left."""
    return 128 if d_model >= 1280 else 64 if d_model >= 512 else 32 if d_model >= 128 else 16


def _heads_share_well(d_model: int) -> bool:
    """Whether the heads come in twos, from 16 on in fours, from 32 on in eights, so that they can share keys."""
    heads, rest = divmod(d_model, _head_dim(d_model))
    return not rest and heads % (8 if heads >= 32 else 4 if heads >= 16 else 2) == 0


def _shape(vocab_size: int, num_layers: int, d_model: int, plan: PlanConfig, tied: bool) -> ModelShape:
    num_heads = plan.num_heads or max(1, d_model // _head_dim(d_model))
    # A quarter of the heads, at least two. Source: Ainslie et al. 2023, arXiv 2305.13245, section 3.3.
    few = [heads for heads in range(1, max(2, num_heads // 4) + 1) if num_heads % heads == 0]
    num_kv_heads = plan.num_kv_heads or few[-1]
    # Two thirds of 4·d, so that three matrices weigh as much as two. Source: Shazeer 2020, arXiv 2002.05202, section 3.
    d_ffw = plan.d_ffw or -(-8 * d_model // 3 // 16) * 16
    problems = []
    if d_model % num_heads or d_model // num_heads % 2:
        problems.append(f"num_heads {num_heads} into which d_model {d_model} goes in even parts")
    if num_heads % num_kv_heads:
        problems.append(f"num_kv_heads {num_kv_heads} that divides num_heads {num_heads}")
    if problems:
        raise ConfigError(f"plan: promised {' and '.join(problems)}, found that it does not; correct the overrides")
    settings: dict[str, Any] = {name: getattr(plan, name) for name in ("qk_norm", "rope_theta", "norm_eps")}
    return ModelShape(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_ffw=d_ffw,
        tie_embeddings=tied,
        **settings,
    )
