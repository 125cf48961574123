"""The shape of the model, its number of parameters and FLOPs, and the choice of a shape for a number of parameters."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from schemas.errors import ConfigError, ContractError
from train.config.plan import PlanConfig

COPIED_FIELDS = (
    "activation",
    "bias",
    "norm",
    "norm_position",
    "positions",
    "max_positions",
    "num_token_types",
    "head_transform",
    "rope_theta",
    "rope_scaling",
    "rope_factor",
    "rope_original",
    "norm_eps",
    "qk_norm",
    "value_embeddings",
    "residual_mixing",
    "window_pattern",
    "window",
    "logit_softcap",
)
"""Fields that a plan copies from its settings unchanged."""
LATER_FIELDS = (
    *("value_embeddings", "residual_mixing", "window_pattern", "window", "logit_softcap"),
    *("width_multiplier", "query_scale"),
    *("norm", "norm_position", "max_positions", "num_token_types", "head_transform"),
)
"""Fields that older plans and checkpoints do not have. A default is not stored, so their digests are unchanged."""
LLAMA_TURNS = (1.0, 4.0)
"""With rope_scaling = llama3, a frequency with at most the first number of turns over the original length is divided by
the factor; one with at least the second number of turns is unchanged."""
HIDDEN_NAMES = ("blocks.", "transform.")
"""Beginnings of the names of the matrices both of whose sides grow with the width, which muP scales by it."""
MAX_LAYERS = 160
MAX_SIZE = 1 << 40
"""Maximum of each size of a shape. Sizes of stored tensors are compared with the shape before any are allocated."""
TIED_SHARE = 0.2
LOGIT_TILE = 128
"""Columns of logits in a tile on a CUDA device."""
FFW_MULTIPLE, WIDE_MODEL = 256, 512
"""If d_model is at least WIDE_MODEL, a gated d_ffw is a multiple of FFW_MULTIPLE, so that it fills a GPU's tiles."""
ALL_KEY_HEADS = 1e9
"""Number of parameters from which several query heads share a key head: below, models are trained for their loss, and
not for the memory of keys in use."""
MAX_SIZE_ERROR = 0.02
"""Maximum relative error in the number of parameters of a wide model, if any shape has so small an error."""
SIZE_UNIT, ASPECT_UNIT = 0.1, math.log(2)
"""In the choice of a shape, a relative error of 0.1 in size counts as much as a factor of 2 in the aspect ratio."""


class ModelShape(BaseModel):
    """The shape of a transformer: layers of attention and feed-forward, their norms, positions, embeddings and head."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    vocab_size: int = Field(ge=1, le=MAX_SIZE)
    """Rows of the embedding: the tokenizer's ids, not padded."""
    num_layers: int = Field(ge=1, le=10_000)
    """Number of layers."""
    d_model: int = Field(ge=1, le=MAX_SIZE)
    """Width of the residual stream."""
    num_heads: int = Field(ge=1, le=MAX_SIZE)
    """Number of query heads."""
    num_kv_heads: int = Field(ge=1, le=MAX_SIZE)
    """Number of key and value heads, a divisor of num_heads."""
    head_dim: int = Field(ge=1, le=MAX_SIZE)
    """Width of one head; num_heads × head_dim need not be d_model."""
    d_ffw: int = Field(ge=1, le=MAX_SIZE)
    """Hidden width of the feed-forward."""
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu2"] = "swiglu"
    """Feed-forward: three matrices with a gate, or two with GELU, exact or approximated by tanh, or the square of
    ReLU."""
    bias: bool = False
    """True if the matrices of the layers have biases; the projection of relative positions never has."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """RMSNorm with gains, or LayerNorm with gains and biases."""
    norm_position: Literal["pre", "post"] = "pre"
    """pre: the input of each half of a layer is normalized, and the output of the last layer. post: the sum after each
    half of a layer is normalized, and the embeddings."""
    positions: Literal["rope", "relative", "learned"] = "rope"
    """Rotary; Transformer-XL's: a projection of the distances and two vectors for each head; or a learned vector for
    each position of a row."""
    max_positions: int = Field(default=0, ge=0, le=MAX_SIZE)
    """With positions = learned: number of positions that have a vector, the maximum length of a row; else 0."""
    num_token_types: int = Field(default=0, ge=0, le=MAX_SIZE)
    """Number of vectors for kinds of tokens, as BERT has; all tokens are of the first kind. 0 = none."""
    head_transform: bool = False
    """True if the head of BERT is used: a square matrix, GELU and a norm before the output projection, and biases."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """Method that extends rotary frequencies to longer sequences."""
    rope_factor: float = Field(default=1.0, gt=0)
    """With rope_scaling = linear or llama3: the factor by which sequences become longer."""
    rope_original: int = Field(default=8192, ge=1)
    """With rope_scaling = llama3: the sequence length before the extension [tokens]."""
    norm_eps: float = Field(default=1e-5, ge=0)
    """Number added to the mean square, or to the variance, in a norm."""
    qk_norm: bool = False
    """True if queries and keys go through an RMSNorm of head_dim weights each."""
    tie_embeddings: bool
    """True if the output projection is the input embedding."""
    value_embeddings: int = Field(default=0, ge=0)
    """Every n-th layer, counted from the last, adds a learned vector of the token to its values; 0 = no layer."""
    residual_mixing: bool = False
    """True if each layer starts from a weighted sum of the residual stream and the token embeddings."""
    window_pattern: str = ""
    """Attention of the layers in turn: S = the latest `window` positions, L = all; empty = all. The last layer has
    all."""
    window: int | None = Field(default=None, ge=1)
    """Number of latest positions, its own included, that a query of a layer S attends to; None = no such layer."""
    logit_softcap: float | None = Field(default=None, gt=0)
    """Bound of the logits z, which become cap · tanh(z / cap); None = no bound."""

    width_multiplier: float = Field(default=1.0, gt=0)
    """With plan.parametrization = mup: d_model / plan.mup_base_width; 1 is the standard parametrization."""
    query_scale: float = Field(default=1.0, gt=0)
    """With plan.parametrization = mup: factor of the queries. It makes the scale of attention scores proportional to
    1 / head_dim in place of its square root."""

    @model_serializer(mode="wrap")
    def _stored(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        stored: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        return {name: v for name, v in stored.items() if name not in LATER_FIELDS or v != fields[name].default}

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def has_values(self, layer: int) -> bool:
        """Return True if a layer (0 = first) adds value embeddings to its values."""
        return self.value_embeddings > 0 and (self.num_layers - 1 - layer) % self.value_embeddings == 0

    def window_of(self, layer: int) -> int | None:
        """Return the number of latest positions that a layer (0 = first) attends to; None = all positions."""
        pattern = self.window_pattern or "L"
        near = pattern[layer % len(pattern)] == "S" and layer < self.num_layers - 1
        return self.window if near else None


# A model of the user, `plan.model`, has the shape of a dense transformer as a proposal, and what was counted in the
# model that was built from it.


class OwnLayers(BaseModel):
    """What the memory and the FLOPs of a model of the user are estimated from; no part of the identity of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    flops: dict[int, int] = {}
    """FLOPs per token, forward and backward, by sequence length."""
    largest: int
    """Parameters of the layer that has the most."""
    widest: int
    """Numbers in the largest parameter outside the embeddings."""
    exchanged: int
    """Parameters of the experts in the layer that has the most."""
    saved: float
    """Bytes per position that a layer stores for its backward pass in fp32: the mean over the layers."""
    saved_measured: bool
    """True if `saved` was measured; False if it is the rule of train/model/count_own.py."""


class OwnShape(ModelShape):
    """The shape that a model of the user is built from, and the parameters that were counted in it."""

    model: str
    """The function that builds the model, as `package.module:function`."""
    options: dict[str, bool | int | float | str] = {}
    """Options of the model, `[plan.model_options]`."""
    code: str = ""
    """SHA-256 of the source files of the model's package; empty for a model of Penstock."""
    max_positions: int
    """Positions of the longest row of the run."""
    num_params: int = 0
    """Number of parameters; 0 = not counted yet."""
    active_params: int = 0
    """Number of parameters that compute one token; fewer than num_params in a mixture of experts."""
    embedding_params: int = 0
    """Number of parameters of both embedding matrices."""
    num_experts: int = 0
    """Number of experts in a layer that expert parallelism divides among ranks; 0 = the model has none."""
    layers: OwnLayers | None = None
    """Figures for estimates; None in a shape that was read from a checkpoint."""

    def counted_layers(self) -> OwnLayers:
        """Return `layers`. Raises ConfigError if the shape was not counted."""
        if self.layers is None:
            raise ConfigError(
                f"plan.model: expected the figures of {self.model} in the plan, got none. Run `penstock plan` again."
            )
        return self.layers


def shape_in(settings: Mapping[str, Any]) -> ModelShape:
    """Return the shape in the settings of a checkpoint, `shape.…`. Raises ValidationError if there is no valid one."""
    prefix = "shape."
    values = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
    return (OwnShape if "model" in values else ModelShape).model_validate(values)


ESTIMATES = "layers"
"""Field of OwnShape that a run's identity leaves out: a later version of torch may store other activations."""


def active_parameters(shape: ModelShape, embeddings: bool = True) -> int:
    """Return the number of parameters that compute one token, which scaling laws call N."""
    if isinstance(shape, OwnShape):
        return shape.active_params - (0 if embeddings else shape.embedding_params)
    return num_parameters(shape, embeddings)


def matrix_params_of_layer(shape: ModelShape) -> int:
    """Return the number of matrix weights in one layer: q, k, v, out and the matrices of the feed-forward."""
    attention = 2 * shape.d_model * (shape.query_width + shape.key_width)
    return attention + (3 if shape.activation == "swiglu" else 2) * shape.d_model * shape.d_ffw


def params_of_norm(shape: ModelShape) -> int:
    """Return the number of parameters of a norm of the residual stream."""
    return (2 if shape.norm == "layernorm" else 1) * shape.d_model


def params_of_layer(shape: ModelShape) -> int:
    """Return the number of parameters of one layer: matrices, biases, norms, and those of relative positions.

    Source for relative positions: Dai et al. 2019, arXiv 1901.02860, section 3.3 (W_{k,R}, u and v).
    """
    d, q, kv, ffw = shape.d_model, shape.query_width, shape.key_width, shape.d_ffw
    norms = 2 * params_of_norm(shape) + (2 * shape.head_dim if shape.qk_norm else 0)
    norms += 2 * d if shape.residual_mixing else 0
    biases = q + 2 * kv + d + (2 if shape.activation == "swiglu" else 1) * ffw + d
    relative = d * q + 2 * q
    return (
        matrix_params_of_layer(shape)
        + norms
        + (biases if shape.bias else 0)
        + (relative if shape.positions == "relative" else 0)
    )


def num_parameters(shape: ModelShape, embeddings: bool = True) -> int:
    """Return the exact number of parameters.

    Without `embeddings`, both embedding matrices, those of values, and the vectors of positions and of kinds of tokens
    are excluded.
    """
    if isinstance(shape, OwnShape):
        return shape.num_params - (0 if embeddings else shape.embedding_params)
    body = shape.num_layers * params_of_layer(shape) + params_of_norm(shape)
    if shape.head_transform:
        body += shape.d_model * (shape.d_model + 1) + params_of_norm(shape) + shape.vocab_size
    vectors = (1 if shape.tie_embeddings else 2) * shape.vocab_size + shape.max_positions + shape.num_token_types
    return body + (vectors * shape.d_model + value_parameters(shape) if embeddings else 0)


def value_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of all value embeddings, which cost memory but no matrix product."""
    return sum(map(shape.has_values, range(shape.num_layers))) * shape.vocab_size * shape.key_width


def sized_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that a scaling law counts: all but the value embeddings."""
    return active_parameters(shape) if isinstance(shape, OwnShape) else num_parameters(shape) - value_parameters(shape)


def counted_parameters(shape: ModelShape, embeddings: bool) -> int:
    """Return the number of parameters N by the rule of a scaling law, with the two embedding matrices or without."""
    return sized_parameters(shape) if embeddings else active_parameters(shape, False)


def parameter_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the size of every parameter of the torch model, by name and in its order."""
    d, vocabulary = shape.d_model, (shape.vocab_size, shape.d_model)

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        kinds = ("weight", "bias") if shape.norm == "layernorm" else ("weight",)
        return {f"{name}.{kind}": (d,) for kind in kinds}

    sizes: dict[str, tuple[int, ...]] = {"embedding.weight": vocabulary}
    if shape.positions == "learned":
        sizes["extra.positions.weight"] = (shape.max_positions, d)
    if shape.num_token_types:
        sizes["extra.types.weight"] = (shape.num_token_types, d)
    sizes |= norm("extra.norm") if shape.norm_position == "post" else {}
    for layer in range(shape.num_layers):
        sizes |= {f"blocks.{layer}.{name}": size for name, size in _sizes_of_layer(shape, norm).items()}
    with_values = filter(shape.has_values, range(shape.num_layers))
    sizes |= {f"value_embeddings.{layer}.weight": (shape.vocab_size, shape.key_width) for layer in with_values}
    sizes |= norm("norm") if shape.norm_position == "pre" else {}
    if shape.head_transform:
        sizes |= {"transform.output_bias": (shape.vocab_size,), "transform.dense.weight": (d, d)}
        sizes |= {"transform.dense.bias": (d,), **norm("transform.norm")}
    return sizes if shape.tie_embeddings else sizes | {"head.weight": vocabulary}


def check_sizes(actual: Mapping[str, Sequence[int]], shape: ModelShape, where: str) -> None:
    """Raise ContractError unless `actual` has exactly the parameters of a model of this shape."""
    expected = parameter_sizes(shape)
    problems = [f"{name} is missing" for name in expected if name not in actual]
    problems += [f"{name} is not one of its parameters" for name in actual if name not in expected]
    problems += [
        f"{name} is {tuple(actual[name])} and not {size}"
        for name, size in expected.items()
        if name in actual and tuple(actual[name]) != size
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ContractError(
            f"{where}: expected the parameters of the model shape, got {'; '.join(problems[:5])}{more}. "
            "Use weights and a configuration of the same model."
        )


def _sizes_of_layer(shape: ModelShape, norm: Callable[[str], dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    d, q, kv, ffw = shape.d_model, shape.query_width, shape.key_width, shape.d_ffw
    attention = {"query": (q, d), "key": (kv, d), "value": (kv, d), "out": (d, q)}
    mixing = ("mix_stream.weight", "mix_first.weight") if shape.residual_mixing else ()
    sizes = dict.fromkeys(mixing, (d,)) | norm("attention_norm") | _matrices("attention", attention, shape.bias)
    if shape.qk_norm:
        sizes |= dict.fromkeys(("attention.query_norm.weight", "attention.key_norm.weight"), (shape.head_dim,))
    if shape.positions == "relative":
        sizes |= {f"attention.relative.{name}_bias": (q,) for name in ("content", "distance")}
        sizes |= {"attention.relative.distance.weight": (q, d)}
    gate = {"gate": (ffw, d)} if shape.activation == "swiglu" else {}
    return sizes | norm("ffn_norm") | _matrices("ffn", gate | {"up": (ffw, d), "down": (d, ffw)}, shape.bias)


def _matrices(module: str, sizes: Mapping[str, tuple[int, int]], bias: bool) -> dict[str, tuple[int, ...]]:
    named: dict[str, tuple[int, ...]] = {}
    for name, size in sizes.items():
        named[f"{module}.{name}.weight"] = size
        if bias:
            named[f"{module}.{name}.bias"] = size[:1]
    return named


def padded_columns(columns: int, cuda: bool) -> int:
    """Return how many columns of logits a device computes: on CUDA, `columns` rounded up to a multiple of LOGIT_TILE.

    FLOPs do not count the padding.
    """
    return -(-columns // LOGIT_TILE) * LOGIT_TILE if cuda else columns


def flops_per_token(shape: ModelShape, seq_len: int, logits: bool = True) -> int:
    """Return FLOPs per token, forward and backward, as counted for MFU; `logits=False` excludes the output projection.

    A matrix weight counts 6 FLOPs. Attention counts 12·q·seq_len per layer, over the full T × T scores; q is the width
    of all heads. A causal query has half of these scores, so a layer with a window W < T counts twice the scores inside
    of it: W·(2 − W / T) in place of T. Value embeddings are looked up and count nothing.
    Sources: Kaplan et al. 2020, arXiv 2001.08361, section 2.1; Chowdhery et al. 2022, arXiv 2204.02311, appendix B; Dai
    et al. 2019, arXiv 1901.02860, section 3.3 (relative positions).
    """
    if isinstance(shape, OwnShape):
        return _own_flops_per_token(shape, seq_len) - (0 if logits else 6 * shape.vocab_size * shape.d_model)
    layer = 6 * matrix_params_of_layer(shape) + relative_flops(shape, seq_len)
    head = shape.vocab_size * shape.d_model if logits else 0
    if shape.head_transform:
        head += shape.d_model * shape.d_model
    return shape.num_layers * layer + 6 * head + 12 * shape.query_width * counted_keys(shape, seq_len)


def relative_flops(shape: ModelShape, seq_len: int) -> int:
    """Return the FLOPs of a layer and token that relative positions add; 0 for others."""
    if shape.positions != "relative":
        return 0
    # The projection of the distances, which have no gradient, and a third product with the scores.
    return 4 * shape.d_model * shape.query_width + 6 * shape.query_width * seq_len


def counted_keys(shape: ModelShape, seq_len: int) -> int:
    """Return the keys of a query that FLOPs count, summed over all layers."""
    return sum(_keys_of(shape.window_of(layer), seq_len) for layer in range(shape.num_layers))


def _keys_of(window: int | None, seq_len: int) -> int:
    """Return the keys of a query that FLOPs count: all, or with a window twice the mean number inside of it."""
    if window is None or window >= seq_len:
        return seq_len
    return round(window * (2 - window / seq_len))


def _own_flops_per_token(shape: OwnShape, seq_len: int) -> int:
    flops = shape.counted_layers().flops
    if seq_len not in flops:
        raise ConfigError(
            f"plan.model: expected FLOPs of {shape.model} for {seq_len} positions in the plan, got those for "
            f"{sorted(flops)}. Run `penstock plan` again."
        )
    return flops[seq_len]


def choose_shape(num_params: float, vocab_size: int, plan: PlanConfig) -> ModelShape:
    """Return the shape that is nearest to `num_params` parameters and to the usual `aspect` ratio for this size.

    The shape has every value that is set in `[plan]`. Raises ConfigError if no such shape exists.
    """
    tied = plan.tie_embeddings
    shapes = list(_shapes(num_params, vocab_size, plan, bool(tied)))
    best = _best(shapes, num_params)
    # Source: Liu et al. 2024 (MobileLLM), arXiv 2402.14905, section 2.2.
    if tied is None and 2 * vocab_size * best.d_model > TIED_SHARE * sized_parameters(best):
        best = _best(list(_shapes(num_params, vocab_size, plan, True)), num_params)
    return best


def aspect(num_params: float) -> float:
    """Return the usual aspect ratio, d_model / layers, of models with `num_params` parameters.

    Source: least squares over the 50 models of Hoffmann et al. 2022, arXiv 2203.15556, Table A9.
    """
    # Deviation 15 %; a factor of two costs little (Kaplan et al. 2020, arXiv 2001.08361, section 3.1).
    return 55 * math.pow(num_params / 1e8, 0.125)


def _best(shapes: list[ModelShape], num_params: float) -> ModelShape:
    def distance_to(shape: ModelShape) -> float:
        size = math.log(sized_parameters(shape) / num_params)
        proportions = math.log(shape.d_model / shape.num_layers / aspect(num_params))
        return math.hypot(size / SIZE_UNIT, proportions / ASPECT_UNIT)

    best = min(shapes, key=distance_to)
    # Hidden widths rise in large steps, so a wide model may have to deviate from the aspect ratio.
    near = [shape for shape in shapes if abs(sized_parameters(shape) / num_params - 1) <= MAX_SIZE_ERROR]
    return min(near, key=distance_to) if near and best.d_model >= WIDE_MODEL else best


def _shapes(num_params: float, vocab_size: int, plan: PlanConfig, tied: bool) -> Iterator[ModelShape]:
    """Yield, for each number of layers, the widest shape within `num_params`, and the next wider shape."""
    widths = [plan.d_model] if plan.d_model else [d for d in range(32, 32768, 16) if _heads_fit(d, plan)]
    if not widths:
        raise ConfigError(
            "plan: expected a d_model below 32768 that the heads divide, got none for num_heads = "
            f"{plan.num_heads}, num_kv_heads = {plan.num_kv_heads}, head_dim = {plan.head_dim}. Lower these values in "
            "[plan], or set plan.d_model."
        )
    grouped = plan.recipe is None or num_params >= ALL_KEY_HEADS
    for num_layers in [plan.num_layers] if plan.num_layers else range(2, MAX_LAYERS + 1):
        low, high = 0, len(widths) - 1
        while low < high:
            middle = (low + high + 1) // 2
            size = sized_parameters(_shape(vocab_size, num_layers, widths[middle], plan, tied, grouped))
            low, high = (middle, high) if size <= num_params else (low, middle - 1)
        for width in widths[low : low + 2]:
            yield _shape(vocab_size, num_layers, width, plan, tied, grouped)


def _head_dim(d_model: int) -> int:
    """Return the width of a head: 128 if d_model >= 1280 (Hoffmann et al. 2022, Table A9), 64 if >= 512, else less."""
    return 128 if d_model >= 1280 else 64 if d_model >= 512 else 32 if d_model >= 128 else 16


def _heads_fit(d_model: int, plan: PlanConfig) -> bool:
    """Return True if `d_model` divides into heads of a width and number that `plan` allows."""
    if plan.num_heads:
        return plan.head_dim is not None or d_model % (2 * plan.num_heads) == 0
    heads, rest = divmod(d_model, plan.head_dim or _head_dim(d_model))
    return not rest and heads % (plan.num_kv_heads or (8 if heads >= 32 else 4 if heads >= 16 else 2)) == 0


def _mup_scales(d_model: int, head_dim: int, plan: PlanConfig) -> dict[str, Any]:
    """Return `width_multiplier` and `query_scale` of a shape; none for the standard parametrization."""
    if plan.parametrization != "mup":
        return {}
    base = plan.mup_base_width
    heads = plan.num_heads and base / plan.num_heads
    # At the base width, the scores have their usual scale.
    at_base = plan.head_dim or heads or _head_dim(base)
    return {"width_multiplier": d_model / base, "query_scale": math.sqrt(at_base / head_dim)}


def _shape(vocab_size: int, num_layers: int, d_model: int, plan: PlanConfig, tied: bool, grouped: bool) -> ModelShape:
    num_heads = plan.num_heads or max(1, d_model // (plan.head_dim or _head_dim(d_model)))
    # Grouped: a quarter of the heads, at most eight and, if possible, at least two, which a tensor axis can split.
    # Sources: Ainslie et al. 2023, arXiv 2305.13245, section 3.3; Llama 3, arXiv 2407.21783, table 3 (eight to 405 B).
    divisors = [heads for heads in (1, 2, 4, 8) if heads <= max(2, num_heads // 4) and num_heads % heads == 0]
    num_kv_heads = plan.num_kv_heads or (divisors[-1] if grouped else num_heads)
    # 4·d, or two thirds of it so that three matrices have as many weights as two.
    # Source: Shazeer 2020, arXiv 2002.05202, 3.
    gated = (
        (8 * d_model // 3 + FFW_MULTIPLE // 2) // FFW_MULTIPLE * FFW_MULTIPLE
        if d_model >= WIDE_MODEL
        else -(-8 * d_model // 3 // 16) * 16
    )
    ffw = gated if plan.activation == "swiglu" else 4 * d_model
    problems = []
    if plan.head_dim is None and (d_model % num_heads or d_model // num_heads % 2):
        problems.append(("an even d_model / num_heads", f"{d_model} / {num_heads}", "num_heads"))
    if plan.head_dim is not None and plan.head_dim % 2 and plan.positions == "rope":
        problems.append(("an even head_dim for rotary positions", f"{plan.head_dim}", "head_dim"))
    if num_heads % num_kv_heads:
        problems.append((f"num_kv_heads that divides num_heads {num_heads}", f"{num_kv_heads}", "num_kv_heads"))
    if problems:
        expected, got, settings = (" and ".join(texts) for texts in zip(*problems))
        raise ConfigError(
            f"plan: expected {expected}, got {got}. Change plan.{settings.replace(' and ', ' and plan.')}."
        )
    return ModelShape(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=plan.head_dim or d_model // num_heads,
        d_ffw=plan.d_ffw or ffw,
        tie_embeddings=tied,
        **_mup_scales(d_model, plan.head_dim or d_model // num_heads, plan),
        **{name: getattr(plan, name) for name in COPIED_FIELDS},
    )
