"""A model of the user in the place of the transformer: its base class, and its building from `plan.model`.

The base class computes the loss with `HeadLoss`, so losses by source and by document, z-loss and chunks work for any
model. The model itself computes hidden states from token ids, and may report an auxiliary loss and figures by row.
Both are sums over rows, so the split of rows over ranks and micro-batches does not change the result.

Shape suffixes: B rows, T positions, D width, V vocabulary, F figures.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from schemas.errors import ConfigError
from train.data.rows import IGNORED
from train.model.attention import AttentionMask, RowDocuments, additive_mask, compute_dtype
from train.model.declared import load_builder
from train.model.draw import BY_POSITION
from train.model.loss import capped
from train.model.shape import ModelShape, OwnShape
from train.model.transformer import (
    Block,
    LayerSpan,
    Recompute,
    Transformer,
    build_model,
    initial_weight,
    selective_contexts,
)


class HiddenStates(NamedTuple):
    """What a model computes from token ids."""

    stream_BTD: Tensor
    """The residual stream after the last norm."""
    output_VD: Tensor
    """The output matrix; the logits are its product with the stream."""
    auxiliary_B: Tensor | None = None
    """Auxiliary loss of each row: a mean over its positions, weighted by the row's targets like its cross-entropy."""
    figures_BF: Tensor | None = None
    """Figures of each row, `num_figures` of them, which are summed over all rows that have targets."""


class OwnModel(Transformer, ABC):
    """Base class of a model for `plan.model`. A subclass sets `blocks`, and defines `hidden` and `flops_per_token`.

    `blocks` are the layers, keyed by their number: each is sharded, recomputed and compiled as a unit. A constructor
    makes parameters on the meta device, without values. Buffers are not allowed: compute tables in `hidden`.
    """

    num_figures = 0
    """Number of figures in `HiddenStates.figures_BF`."""
    num_experts = 0
    """Number of experts in a layer that `layout.expert_parallel` divides among ranks; 0 = it is not supported."""

    def __init__(self, shape: OwnShape, causal: bool):
        """`causal`: False for an objective whose positions attend to later positions too."""
        # An empty span of layers: no embedding, layers, norm or output matrix is made.
        super().__init__(shape, LayerSpan(1, 1, shape.num_layers + 1), causal, lambda layer: "none")
        self.span = LayerSpan(0, shape.num_layers, shape.num_layers)
        self.figure_sums: Tensor | None = None
        """Sums of the figures since the trainer set them to 0, float64, (F,); None = not summed."""

    # ------------------------------------------------------------------------------- what a subclass defines

    @abstractmethod
    def hidden(self, ids_BT: Tensor, documents_BT: Tensor | None, starts_N: Tensor | None) -> HiddenStates:
        """Return the hidden states of token ids.

        `documents_BT`: number of each position's document, which must not read other documents of its row; None = each
        row is one document. `starts_N`: offsets of documents, for FlashAttention. `mask` takes both.
        """

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> int:
        """Return the FLOPs per token, forward and backward, in rows of `seq_len` positions."""

    def active_parameters(self) -> int:
        """Return the number of parameters that compute one token: all of them, unless a subclass says otherwise."""
        return sum(parameter.numel() for parameter in self.parameters())

    def initial_weight(self, name: str, size: torch.Size, seed: int) -> Tensor:
        """Return the initial value of a parameter, float32 on the CPU, a function of (seed, name, size) alone.

        The rule is that of the transformer: biases 0, gains 1, matrices normal.
        """
        # A head that exists is not the embedding, whatever the shape proposes.
        return initial_weight(name, size, self.shape.model_copy(update={"tie_embeddings": False}), seed)

    def figures_of(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the figures of a step for metrics.jsonl by name; `sums`: sums over the rows of the global batch."""
        return {}

    # ------------------------------------------------------------------------------- what the trainer uses

    def mask(self, x_BTD: Tensor, documents_BT: Tensor | None, starts_N: Tensor | None) -> AttentionMask:
        """Return the attention mask of rows for `train.model.attention.Attention`, in the form of the fastest kernel.

        `x_BTD`: the embedded ids, whose dtype and device decide.
        """
        documents = None if documents_BT is None else RowDocuments(documents_BT, starts_N, compute_dtype(x_BTD))
        return additive_mask(self.attention_mask(x_BTD.shape[1], documents, x_BTD.device, None), x_BTD)

    def forward(
        self,
        x: Tensor,
        documents_BT: Tensor | None = None,
        targets_BT: Tensor | None = None,
        sources_B: Tensor | None = None,
        starts_N: Tensor | None = None,
        **of_transformer: Tensor | None,
    ) -> Tensor:
        """Return the total loss, 0-d, or without targets the float32 logits (B, T, V). `x`: ids (B, T).

        `of_transformer`: inputs for pipeline stages and dropout, which are refused for such a model.
        """
        hidden = self.hidden(x, documents_BT, starts_N)
        if targets_BT is None:
            return capped(F.linear(hidden.stream_BTD, hidden.output_VD).float(), self.loss.softcap)
        total: Tensor = self.loss(hidden.stream_BTD, hidden.output_VD, targets_BT, sources_B)
        targets_B = (targets_BT != IGNORED).sum(1)
        if hidden.figures_BF is not None and self.figure_sums is not None:
            self.figure_sums += (hidden.figures_BF.detach().double() * (targets_B > 0)[:, None]).sum(0)
        if hidden.auxiliary_B is not None:
            total = total + (hidden.auxiliary_B.float() * targets_B).sum() * self.loss.scale
        return total

    @property
    def layers(self) -> list[Block]:
        """The layers of the model, in order; of any class."""
        return [cast(Block, block) for block in self.blocks.values()]

    def recompute_layers(self, mode_of: Callable[[int], Recompute]) -> None:
        """Make layers recompute their activations in the backward pass; `mode_of`: mode of a layer by its number."""
        for number, block in enumerate(self.blocks.values()):
            if (mode := mode_of(number)) != "none":
                # The method of the instance: parameter names get no prefix, and FSDP gathers before it is called.
                block.forward = partial(_recomputed, block.forward, mode)


def _recomputed(forward: Callable[..., Any], mode: Recompute, *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    options: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def build_own(shape: OwnShape, causal: bool) -> OwnModel:
    """Return the model of `plan.model` without storage. Raises ConfigError if it does not meet the interface."""
    build = load_builder(shape)
    where = f"plan.model = {shape.model}"
    try:
        with torch.device("meta"):
            model = build(shape, causal)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: expected a model, got {type(error).__name__}: {error}. Correct it.") from error
    problems = list(_interface_problems(model))
    if problems:
        raise ConfigError(f"{where}: {len(problems)} problem(s)\n  " + "\n  ".join(problems))
    return cast(OwnModel, model)


def _interface_problems(model: Any) -> list[str]:
    """Return an error text for each part of the interface that a model does not meet."""
    if not isinstance(model, OwnModel):
        return [f"expected a train.model.own.OwnModel, got {type(model).__name__}. Derive its class from OwnModel."]
    problems = []
    numbers = [str(number) for number in range(len(model.blocks))]
    if not numbers or list(model.blocks) != numbers:
        problems.append(f"blocks: expected layers named 0, 1, …, got {', '.join(model.blocks) or 'none'}. Rename them.")
    if names := [name for name, _ in model.named_buffers()]:
        problems.append(f"buffers: expected none, got {', '.join(names)}. Compute them in `hidden`.")
    for name, parameter in model.named_parameters():
        if not (parameter.is_meta and parameter.dtype == torch.float32 and parameter.requires_grad):
            problems.append(
                f"{name}: expected a trainable float32 parameter on the meta device, got {parameter.dtype} on "
                f"{parameter.device}. Make it in the constructor, without values."
            )
    return problems


def build_any(
    shape: ModelShape,
    span: LayerSpan | None,
    causal: bool,
    recompute: Callable[[int], Recompute] = lambda layer: "none",
) -> Transformer:
    """Return the model of a shape without storage: the one that `plan.model` names, or a transformer.

    Raises ConfigError if the named model has other parameters than were counted for the plan.
    """
    if not isinstance(shape, OwnShape):
        return build_model(shape, span, causal, recompute)
    model = build_own(shape, causal)
    number = sum(parameter.numel() for parameter in model.parameters())
    if number != shape.num_params:
        raise ConfigError(
            f"plan.model = {shape.model}: expected {shape.num_params:,} parameters as in the plan, got {number:,}. "
            "Install the version of the model that the plan was made with, or run `penstock plan` again."
        )
    model.recompute_layers(recompute)
    return model


def first_value(
    model: Transformer, name: str, size: torch.Size, seed: int, region: tuple[slice, ...], rule: int = BY_POSITION
) -> Tensor:
    """Return the initial value of a region of a parameter of any model; see `initial_weight`."""
    if isinstance(model, OwnModel):
        return model.initial_weight(name, size, seed)[region]
    return initial_weight(name, size, model.shape, seed, region, rule)
