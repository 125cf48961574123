"""A mixture of experts: the transformer with several feed-forwards in each layer, of which a token uses the best few.

A router gives each token a probability for each expert. Its output is the sum of the `top_k` most probable experts,
weighted by their probabilities, which sum to 1 if there are several. Two losses keep the router usable: one for
balance, one against large logits. All sums over tokens that decide anything are sums over a row, never over a
micro-batch: losses, dropped tokens and figures do not depend on how rows are split. What a token computes depends on
no later token of its row.

Sources: Shazeer et al. 2017, arXiv 1701.06538 (the layer); Fedus et al. 2021, arXiv 2101.03961 (balance, capacity);
Zoph et al. 2022, arXiv 2202.08906 (router z-loss); Jiang et al. 2024, arXiv 2401.04088 (weights that sum to 1).

Shape suffixes: B rows, T positions, N = B · T tokens, D width, E experts, K experts of a token, M = N · K assignments.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schemas.errors import ConfigError
from train.model.attention import Attention, AttentionMask, compute_dtype
from train.model.draw import normal_part
from train.model.grouped_product import grouped_product
from train.model.own import HiddenStates, OwnModel
from train.model.shape import ModelShape, OwnShape, matrix_params_of_layer, relative_flops
from train.model.transformer import FeedForward

FIGURES = ("dropped", "balance", "z", "rows")
"""Figures of a layer after the number of assignments of each expert."""


class MoeOptions(BaseModel):
    """The options of the mixture of experts, `[plan.model_options]` with `plan.model = "moe"`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    experts: int = Field(8, ge=2)
    """Number of experts in a layer."""
    top_k: int = Field(2, ge=1)
    """Number of experts that a token uses."""
    shared: int = Field(0, ge=0)
    """Number of further experts that every token uses."""
    d_expert: int = Field(0, ge=0)
    """Hidden width of an expert; 0 = d_ffw / (top_k + shared), so that a token costs as much as in the transformer."""
    dense_layers: int = Field(0, ge=0)
    """Number of first layers that have the feed-forward of the transformer."""
    balance: float = Field(0.01, ge=0)
    """Factor of the balance loss: E · Σ over experts of (share of the row's assignments · mean probability)."""
    router_z: float = Field(0.001, ge=0)
    """Factor of the router z-loss: the mean of log² Z of the router's logits."""
    capacity_factor: float = Field(0.0, ge=0)
    """Assignments that an expert takes from a row, as a multiple of an equal share of the longest row of the run; later
    ones are dropped. 0 = all."""

    def expert_width(self, shape: ModelShape) -> int:
        """Return the hidden width of an expert."""
        return self.d_expert or max(1, shape.d_ffw // (self.top_k + self.shared))


def options_of(shape: OwnShape) -> MoeOptions:
    """Return the options of a shape. Raises ConfigError that names every wrong one."""
    where = "plan.model_options"
    try:
        options = MoeOptions.model_validate(shape.options)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(
            f"{where}: expected {', '.join(MoeOptions.model_fields)}, got {wrong}. Correct it."
        ) from error
    if options.top_k > options.experts:
        raise ConfigError(
            f"{where}: expected top_k of at most experts = {options.experts}, got {options.top_k}. Lower it."
        )
    if options.dense_layers >= shape.num_layers:
        raise ConfigError(
            f"{where}: expected dense_layers below {shape.num_layers}, got {options.dense_layers}. Lower it."
        )
    return options


UNUSED = ("bias", "norm", "norm_position", "num_token_types", "head_transform")
"""Fields of a shape that the model does not have, or not in all of its parts; they must have their defaults."""


def _check_shape(shape: OwnShape) -> None:
    """Raise ConfigError if a shape has parts that the model lacks."""
    wrong = [
        f"plan.{name} = {str(value).lower()}"
        for name in UNUSED
        if (value := getattr(shape, name)) != ModelShape.model_fields[name].default
    ]
    wrong += [f"plan.activation = {shape.activation}"] if shape.activation not in ("swiglu", "gelu") else []
    wrong += ["plan.positions = learned"] if shape.positions == "learned" else []
    if wrong:
        raise ConfigError(
            f"plan.model = moe: expected rotary or relative positions, rmsnorm before each half of a layer, swiglu or "
            f"gelu, and no biases, got {', '.join(wrong)}. Remove these settings."
        )


class _Dispatch(torch.autograd.Function):
    """The rows of tokens in the order of their experts: an index, whose gradient is a sum in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, inverse_M: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_M)
        ctx.top_k = top_k
        return x_ND[order_M // top_k]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_M,) = ctx.saved_tensors
        by_token_NKD = gradients[0][inverse_M].view(-1, ctx.top_k, gradients[0].shape[1])
        return by_token_NKD.sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """A permutation of rows, whose gradient is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return y_MD[inverse_M]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (order_M,) = ctx.saved_tensors
        return gradients[0][order_M], None, None


ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""A function of rows in the order of their experts, and of the number of rows of each expert, to the output rows."""
Exchange = Callable[[Tensor, Tensor, ExpertFunction], Tensor]
"""A function that sends rows to the ranks of their experts, applies the experts there, and returns the output rows."""


class Experts(nn.Module):
    """The feed-forwards of a layer: each matrix has one more dimension, for the expert."""

    def __init__(self, shape: ModelShape, num_experts: int, width: int):
        super().__init__()
        gated = shape.activation == "swiglu"
        self.gate = nn.Parameter(torch.empty(num_experts, width, shape.d_model)) if gated else None
        self.up = nn.Parameter(torch.empty(num_experts, width, shape.d_model))
        self.down = nn.Parameter(torch.empty(num_experts, shape.d_model, width))
        self.exchange: Exchange | None = None
        """How tokens reach the ranks of their experts; None = this rank computes all experts."""

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Return the output of each row, (M, D); 0 for rows after those that `counts_E` counts.

        `x_MD`: rows in the order of their experts. `counts_E`: number of rows of each expert.
        """
        if self.exchange is None:
            return self._compute(x_MD, counts_E)
        return self.exchange(x_MD, counts_E, self._compute)

    def _compute(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        ends_E, dtype = counts_E.cumsum(0).int(), compute_dtype(x_MD)
        x_MD = x_MD.to(dtype)
        up = grouped_product(x_MD, _here(self.up, dtype), ends_E)
        if self.gate is None:
            hidden = F.gelu(up)
        else:
            hidden = F.silu(grouped_product(x_MD, _here(self.gate, dtype), ends_E)) * up
        return grouped_product(hidden, _here(self.down, dtype), ends_E)


def _here(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return this rank's experts of a matrix, in the dtype of products."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)


class MixtureFeedForward(nn.Module):
    """Router, experts and shared experts of a layer."""

    def __init__(self, shape: OwnShape, options: MoeOptions):
        super().__init__()
        self.options, width = options, options.expert_width(shape)
        # Of the longest row, so that a text has the same logits alone and at the beginning of a row.
        share = options.capacity_factor * shape.max_positions * options.top_k / options.experts
        self.capacity = math.ceil(share) if options.capacity_factor else None
        self.router = nn.Linear(shape.d_model, options.experts, bias=False)
        self.experts = Experts(shape, options.experts, width)
        self.shared: FeedForward | None = None
        if options.shared:
            self.shared = FeedForward(shape.model_copy(update={"d_ffw": options.shared * width}))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (B, T, D), the auxiliary loss of each row (B,), and its figures (B, E + 4)."""
        top_k = self.options.top_k
        logits_BTE = self._logits(x_BTD)
        probs_BTE = logits_BTE.softmax(-1)
        weights_BTK, experts_BTK = probs_BTE.topk(top_k, dim=-1)
        if top_k > 1:  # of a single expert the probability itself, or the router would have no gradient
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        chosen_BTKE = F.one_hot(experts_BTK, self.options.experts)
        kept_BTK = self._kept(chosen_BTKE)
        loads_BE = chosen_BTKE.sum((1, 2))
        auxiliary_B, measured_B2 = self._losses(logits_BTE, probs_BTE, loads_BE)
        dropped_B = kept_BTK.numel() // len(kept_BTK) - kept_BTK.sum((1, 2))
        ones_B = torch.ones_like(dropped_B)
        figures_BF = torch.cat((loads_BE, dropped_B[:, None], measured_B2, ones_B[:, None]), 1)
        y_BTD = self._mix(x_BTD, experts_BTK, weights_BTK * kept_BTK, kept_BTK)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        return y_BTD, auxiliary_B, figures_BF

    def _logits(self, x_BTD: Tensor) -> Tensor:
        # In float32: the exponentials of a softmax magnify rounding. Source: Fedus et al. 2021, section 2.4.
        with torch.autocast(x_BTD.device.type, enabled=False):
            return F.linear(x_BTD.float(), self.router.weight.float())

    def _kept(self, chosen_BTKE: Tensor) -> Tensor:
        """Return a mask of the assignments that are computed, (B, T, K)."""
        if self.capacity is None:
            return torch.ones_like(chosen_BTKE[..., 0], dtype=torch.bool)
        # In the order of positions. With first choices before all second ones, as in GShard (Lepikhin et al. 2020,
        # arXiv 2006.16668, algorithm 1), a position would depend on the choices of later ones, which it predicts.
        chosen_BME = chosen_BTKE.flatten(1, 2)
        before_BM = (chosen_BME.cumsum(1) * chosen_BME).sum(-1)
        kept_BTK: Tensor = (before_BM <= self.capacity).view(chosen_BTKE.shape[:3])
        return kept_BTK

    def _losses(self, logits_BTE: Tensor, probs_BTE: Tensor, loads_BE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the auxiliary loss of each row, (B,), and its balance loss and z-loss without factors, (B, 2)."""
        shares_BE = loads_BE / loads_BE.sum(1, keepdim=True)
        balance_B = self.options.experts * (shares_BE * probs_BTE.mean(1)).sum(1)
        z_B = logits_BTE.logsumexp(-1).square().mean(1)
        auxiliary_B = self.options.balance * balance_B + self.options.router_z * z_B
        return auxiliary_B, torch.stack((balance_B, z_B), 1).detach()

    def _mix(self, x_BTD: Tensor, experts_BTK: Tensor, weights_BTK: Tensor, kept_BTK: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each token, (B, T, D)."""
        num_experts, top_k = self.options.experts, self.options.top_k
        # Dropped assignments come last, as those of an expert that does not exist.
        experts_M = experts_BTK.masked_fill(~kept_BTK, num_experts).flatten()
        order_M = experts_M.argsort(stable=True)
        inverse_M = order_M.argsort()
        counts_E = (experts_M[:, None] == torch.arange(num_experts, device=experts_M.device)).sum(0)
        sent_MD = _Dispatch.apply(x_BTD.flatten(0, 1), order_M, inverse_M, top_k)  # type: ignore[no-untyped-call]
        back_MD = _Collect.apply(self.experts(sent_MD, counts_E), order_M, inverse_M)  # type: ignore[no-untyped-call]
        outputs_BTKD = back_MD.view(*weights_BTK.shape, -1)
        y_BTD: Tensor = (outputs_BTKD * weights_BTK[..., None].to(outputs_BTKD.dtype)).sum(2)
        return y_BTD


class MoeBlock(nn.Module):
    """One layer: attention, then the feed-forward or the mixture of experts."""

    def __init__(self, shape: OwnShape, options: MoeOptions, dense: bool):
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.ffn: FeedForward | MixtureFeedForward = FeedForward(shape) if dense else MixtureFeedForward(shape, options)

    def forward(self, x_BTD: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the residual stream after this layer, and with experts their auxiliary loss and figures by row."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), mask)
        output = self.ffn(self.ffn_norm(x_BTD))
        if isinstance(output, Tensor):
            return x_BTD + output, None, None
        return x_BTD + output[0], output[1], output[2]


class MixtureOfExperts(OwnModel):
    """The transformer with a mixture of experts in each layer but the first `dense_layers`."""

    def __init__(self, shape: OwnShape, causal: bool):
        super().__init__(shape, causal)
        _check_shape(shape)
        self.options = options_of(shape)
        self.num_experts = self.options.experts
        self.num_figures = (shape.num_layers - self.options.dense_layers) * (self.num_experts + len(FIGURES))
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleDict(
            {str(i): MoeBlock(shape, self.options, i < self.options.dense_layers) for i in range(shape.num_layers)}
        )
        self.norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.head = None if shape.tie_embeddings else nn.Linear(shape.d_model, shape.vocab_size, bias=False)

    def hidden(self, ids_BT: Tensor, documents_BT: Tensor | None, starts_N: Tensor | None) -> HiddenStates:
        """Return the hidden states, and the auxiliary losses and figures of all layers."""
        x_BTD: Tensor = self.embedding(ids_BT)  # type: ignore[misc]
        mask = self.mask(x_BTD, documents_BT, starts_N)
        losses, figures = [], []
        for block in self.blocks.values():
            x_BTD, auxiliary_B, figures_BF = block(x_BTD, mask)
            if auxiliary_B is not None:
                losses.append(auxiliary_B)
                figures.append(figures_BF)
        output_VD: Any = (self.embedding if self.head is None else self.head).weight  # type: ignore[union-attr]
        stream_BTD = self.norm(x_BTD)  # type: ignore[misc]
        return HiddenStates(stream_BTD, output_VD, torch.stack(losses).sum(0), torch.cat(figures, 1))

    def active_parameters(self) -> int:
        """Return the number of parameters that compute one token: `top_k` of the experts of each layer."""
        total = sum(parameter.numel() for parameter in self.parameters())
        routed = sum(p.numel() for module in self.modules() if isinstance(module, Experts) for p in module.parameters())
        return total - routed // self.options.experts * (self.options.experts - self.options.top_k)

    def flops_per_token(self, seq_len: int) -> int:
        """Return FLOPs per token as for the transformer, with the matrices of the experts that a token uses."""
        shape, options = self.shape, self.options
        width = (options.top_k + options.shared) * options.expert_width(shape)
        sparse = matrix_params_of_layer(shape.model_copy(update={"d_ffw": width})) + options.experts * shape.d_model
        num_sparse = shape.num_layers - options.dense_layers
        matrices = num_sparse * sparse + options.dense_layers * matrix_params_of_layer(shape)
        attention = shape.num_layers * (12 * shape.query_width * seq_len + relative_flops(shape, seq_len))
        return 6 * (matrices + shape.vocab_size * shape.d_model) + attention

    def initial_weight(self, name: str, size: torch.Size, seed: int) -> Tensor:
        """Return the initial value of a parameter: an expert's matrix is drawn like that of a feed-forward."""
        if name.endswith("shared.down.weight"):
            return super().initial_weight(name, size, seed) / math.sqrt(2 * self.shape.num_layers)
        if len(size) != 3:
            return super().initial_weight(name, size, seed)
        # As in `train.model.transformer.initial_deviation`, for all experts at once.
        deviation = math.sqrt(2 / (5 * self.shape.d_model))
        if name.endswith("down"):
            deviation /= math.sqrt(2 * self.shape.num_layers)
        whole = [slice(0, length) for length in size]
        return torch.from_numpy(normal_part((seed, name), size, whole, deviation, torch.get_num_threads()))

    def figures_of(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the load of the busiest expert by layer (1 = all equal), dropped assignments, and both losses."""
        step = self.num_experts + len(FIGURES)
        figures, dropped, balance, z = dict[str, float](), 0.0, 0.0, 0.0
        for layer, first in enumerate(range(0, len(sums), step), start=self.options.dense_layers):
            loads, rest = sums[first : first + self.num_experts], sums[first + self.num_experts : first + step]
            own = dict(zip(FIGURES, rest, strict=True))
            rows = max(own["rows"], 1)
            figures[f"load.{layer}"] = max(loads) / max(sum(loads) / self.num_experts, 1e-9)
            figures[f"dropped.{layer}"] = own["dropped"]
            dropped, balance, z = dropped + own["dropped"], balance + own["balance"] / rows, z + own["z"] / rows
        layers = max(1, len(sums) // step)
        return figures | {"dropped": dropped, "balance_loss": balance / layers, "router_z_loss": z / layers}


def build(shape: OwnShape, causal: bool) -> MixtureOfExperts:
    """Return the mixture of experts of a shape."""
    return MixtureOfExperts(shape, causal)
