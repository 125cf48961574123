"""The transformer: norms, grouped-query attention and feed-forward; the whole model or a range of its layers.

It is built without storage (meta device). Weights are then made one parameter at a time from a seed and the parameter's
name, so they are the same for any number of ranks and any layout. The model itself does not communicate: its attention
mask (`mask`), attention function (`core`) and loss (`loss`) are attributes that a layout may replace.

Shape suffixes: B rows, T positions, D width, C width of all key-value heads, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from schemas.errors import ContractError
from train.config.train import TrainConfig
from train.model.attention import (
    MAX_KERNELS,
    Attention,
    AttentionMask,
    DroppedAttention,
    RowDocuments,
    additive_mask,
    compute_dtype,
    document_blocks,
    document_mask,
    rotation_table,
    sinusoids,
    uses_blocks,
)
from train.model.draw import BY_POSITION, BY_TENSOR, normal_part
from train.model.dropout import (
    ATTENTION_OUTPUT,
    BEFORE_LAYERS,
    EMBEDDING,
    FEED_FORWARD_OUTPUT,
    RowDraws,
    drop_channels,
)
from train.model.flash_attention import uses_flash_attention
from train.model.grouped_product import GROUPED_PRODUCT
from train.model.loss import HeadLoss, capped
from train.model.shape import HIDDEN_NAMES, ModelShape

Recompute = Literal["none", "full", "selective"]
MaskFunction = Callable[[int, RowDocuments | None, torch.device, int | None], AttentionMask]
"""A function from (positions of the residual stream, documents, device, window) to the attention mask."""


@dataclass(frozen=True)
class LayerSpan:
    """Layers [first, stop) of a model of `num_layers`: a pipeline stage, or the whole model."""

    first: int
    stop: int
    num_layers: int

    @property
    def begins(self) -> bool:
        """True if the span starts with the first layer, and so includes the embedding."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """True if the span stops after the last layer, and so includes the last norm and the output matrix."""
        return self.stop == self.num_layers


def make_norm(shape: ModelShape, size: int) -> nn.Module:
    """Return a norm of the residual stream, of `size` numbers. Sources: Zhang 2019, 1910.07467; Ba 2016, 1607.06450."""
    if shape.norm == "layernorm":
        return nn.LayerNorm(size, eps=shape.norm_eps)
    return nn.RMSNorm(size, eps=shape.norm_eps)


class FeedForward(nn.Module):
    """SwiGLU, down(silu(gate(x)) * up(x)); GELU, down(gelu(up(x))); or ReLU², down(relu(up(x))²).

    Sources: Shazeer 2020, 2002.05202; Hendrycks 2016, 1606.08415; So et al. 2021, 2109.08668."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        gated = shape.activation == "swiglu"
        self.squared = shape.activation == "relu2"
        self.gate = nn.Linear(shape.d_model, shape.d_ffw, bias=shape.bias) if gated else None
        self.up = nn.Linear(shape.d_model, shape.d_ffw, bias=shape.bias)
        self.down = nn.Linear(shape.d_ffw, shape.d_model, bias=shape.bias)
        self.approximate = "tanh" if shape.activation == "gelu_tanh" else "none"

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the feed-forward's output, position by position, (B, T, D)."""
        up = self.up(x_BTD)
        if self.gate is not None:
            hidden = F.silu(self.gate(x_BTD)) * up
        else:
            hidden = F.relu(up).square() if self.squared else F.gelu(up, approximate=self.approximate)
        y_BTD: Tensor = self.down(hidden)
        return y_BTD


class ChannelGain(nn.Module):
    """A learned gain for each channel, for residual mixing.

    The published models learn one number for each layer. One for each channel is sharded like the gain of a norm.
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the channels times their gains, in the same dtype."""
        return x_BTD * self.weight.type_as(x_BTD)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the stream; a norm before each half, or after each sum.

    With residual mixing, the layer starts from a weighted sum of the stream and the token embeddings."""

    def __init__(self, shape: ModelShape, recompute: Recompute):
        super().__init__()
        self.recompute, self.norm_position, self.dropout = recompute, shape.norm_position, 0.0
        self.mix_stream = ChannelGain(shape.d_model) if shape.residual_mixing else None
        self.mix_first = ChannelGain(shape.d_model) if shape.residual_mixing else None
        self.attention_norm = make_norm(shape, shape.d_model)
        self.attention = Attention(shape)
        self.ffn_norm = make_norm(shape, shape.d_model)
        self.ffn = FeedForward(shape)

    def forward(
        self, x_BTD: Tensor, mask: AttentionMask, first_BTD: Tensor | None = None, added_BTC: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream after this layer, (B, T, D).

        `first_BTD`: normalized token embeddings, for residual mixing. `added_BTC`: value embeddings of this layer.
        """
        # Recomputation is inside the module, not a wrapper: parameter names get no prefix, and FSDP gathers the
        # weights of the block before it starts.
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._layer(x_BTD, mask, first_BTD, added_BTC)
        inputs = (x_BTD, mask, first_BTD, added_BTC)
        if self.recompute == "selective":
            y_BTD: Tensor = checkpoint(
                self._layer, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=selective_contexts
            )
        else:
            y_BTD = checkpoint(self._layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return y_BTD

    def _layer(self, x_BTD: Tensor, mask: AttentionMask, first_BTD: Tensor | None, added_BTC: Tensor | None) -> Tensor:
        if self.mix_stream is not None and self.mix_first is not None:
            x_BTD = self.mix_stream(x_BTD) + self.mix_first(first_BTD)
        if self.norm_position == "post":
            # Under autocast a norm returns float32, the dtype of the residual stream.
            y_BTD = drop_channels(self.attention(x_BTD, mask, added_BTC), self.dropout, mask.draws, ATTENTION_OUTPUT)
            x_BTD = self.attention_norm(x_BTD + y_BTD)
            y_BTD = drop_channels(self.ffn(x_BTD), self.dropout, mask.draws, FEED_FORWARD_OUTPUT)
            return self.ffn_norm(x_BTD + y_BTD)  # type: ignore[no-any-return]
        y_BTD = self.attention(self.attention_norm(x_BTD), mask, added_BTC)
        x_BTD = x_BTD + drop_channels(y_BTD, self.dropout, mask.draws, ATTENTION_OUTPUT)
        y_BTD = self.ffn(self.ffn_norm(x_BTD))
        x_BTD = x_BTD + drop_channels(y_BTD, self.dropout, mask.draws, FEED_FORWARD_OUTPUT)
        return x_BTD


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of selective checkpointing, for the forward pass and for the recomputation."""
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_checkpoint_policy)  # type: ignore[no-untyped-call]
    return contexts


def _checkpoint_policy(context: object, operator: object, *unused: object, **also_unused: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


_ATEN = torch.ops.aten
_PRODUCTS = {
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN._scaled_mm.default),
    *(_ATEN._scaled_dot_product_flash_attention_for_cpu.default, _ATEN._scaled_dot_product_flash_attention.default),
    *(_ATEN._scaled_dot_product_efficient_attention.default, _ATEN._scaled_dot_product_cudnn_attention.default),
    # The two are registered by the import of train.model.attention.
    *(torch.ops.penstock.attend_in_tiles.default, torch.ops.penstock.attend_documents.default),
    *(torch.ops.higher_order.flex_attention, torch.ops.torch_attn._varlen_attn.default, GROUPED_PRODUCT),
}
"""Operators whose outputs selective checkpointing stores: they cost most to recompute for the memory they need."""


def has_extra_embeddings(shape: ModelShape) -> bool:
    """Return True if anything is added to the embeddings of the tokens, or if they are normalized."""
    return shape.positions == "learned" or shape.num_token_types > 0 or shape.norm_position == "post"


class ExtraEmbeddings(nn.Module):
    """What a model adds to the embeddings of the tokens: vectors of positions, and of the first kind of tokens.

    With `norm_position = post`, the sum is normalized. Source: Devlin et al. 2018 (BERT), arXiv 1810.04805, section 3.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        learned = shape.positions == "learned"
        self.positions = nn.Embedding(shape.max_positions, shape.d_model) if learned else None
        self.types = nn.Embedding(shape.num_token_types, shape.d_model) if shape.num_token_types else None
        self.norm = make_norm(shape, shape.d_model) if shape.norm_position == "post" else None

    def forward(self, x_BTD: Tensor, positions_T: Tensor) -> Tensor:
        """Return the residual stream before the first layer. Raises ContractError if a row is too long."""
        if self.positions is not None:
            if positions_T.shape[0] > (most := self.positions.num_embeddings):
                raise ContractError(
                    f"model: expected rows of at most max_positions = {most} tokens, got {positions_T.shape[0]}. Use "
                    "shorter rows, or a model with more positions."
                )
            x_BTD = x_BTD + self.positions(positions_T)
        if self.types is not None:
            x_BTD = x_BTD + self.types.weight[0]
        y_BTD: Tensor = x_BTD if self.norm is None else self.norm(x_BTD)
        return y_BTD


class HeadTransform(nn.Module):
    """The part of BERT's head before its output projection, and the bias of that projection.

    Source: Devlin et al. 2018, arXiv 1810.04805, as published in code.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.dense = nn.Linear(shape.d_model, shape.d_model)
        self.norm = make_norm(shape, shape.d_model)
        self.output_bias = nn.Parameter(torch.empty(shape.vocab_size))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream that the output projection reads, (B, T, D)."""
        y_BTD: Tensor = self.norm(F.gelu(self.dense(x_BTD)))
        return y_BTD


class Transformer(nn.Module):
    """The model, or a range of its layers for a pipeline stage."""

    def __init__(self, shape: ModelShape, span: LayerSpan, causal: bool, recompute: Callable[[int], Recompute]):
        """`recompute` returns the recomputation mode of a layer from the number of the layer."""
        super().__init__()
        self.shape, self.span, self.causal = shape, span, causal
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model) if span.begins else None
        self.extra = ExtraEmbeddings(shape) if span.begins and has_extra_embeddings(shape) else None
        # Keyed by the layer's number in the whole model, so that a parameter has the same name on every rank.
        self.blocks = nn.ModuleDict({str(i): Block(shape, recompute(i)) for i in range(span.first, span.stop)})
        # Outside the layers, so that the optimizer treats the tables like the embedding.
        with_values = [i for i in range(span.first, span.stop) if shape.has_values(i)]
        tables = {str(i): nn.Embedding(shape.vocab_size, shape.key_width) for i in with_values}
        self.value_embeddings = nn.ModuleDict(tables) if tables else None
        self.norm = make_norm(shape, shape.d_model) if span.ends and shape.norm_position == "pre" else None
        self.transform = HeadTransform(shape) if span.ends and shape.head_transform else None
        self.head: nn.Module | None = None
        if span.ends and not (shape.tie_embeddings and span.begins):
            # A tied matrix in the last pipeline stage is a copy of the embedding, which the layout keeps equal.
            self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        self.attention_mask: MaskFunction = self.mask_of_rows
        self.loss = HeadLoss(softcap=shape.logit_softcap)
        self.stream_positions: Callable[[Tensor], Tensor] = lambda positions_T: positions_T
        self.embedding_dropout, self.holds_scores, self.row_parts = 0.0, False, 1  # set by `enable_dropout`
        self._compiled = False

    def compile_layers(self) -> None:
        """Compile each layer with torch.compile."""
        self._compiled = True
        # Layers that differ in window or value embeddings have a graph each, with and without a gradient.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_KERNELS)
        for block in self.layers:
            # Sizes are constants: FlexAttention's kernels did not compile for dynamic sizes (torch 2.13).
            block.compile(dynamic=False)

    def forward(
        self,
        x: Tensor,
        documents_BT: Tensor | None = None,
        targets_BT: Tensor | None = None,
        sources_B: Tensor | None = None,
        starts_N: Tensor | None = None,
        **others: Tensor | None,
    ) -> Tensor:
        """Return the residual stream, the loss or the logits of this part of the model.

        `x`: ids (B, T), or the residual stream (B, T, D) if other layers come before. If other layers follow, the
        result is the residual stream (B, T, D). Otherwise, with targets, the result is the total loss, 0-d. Without
        targets it is the float32 logits (B, T, V) of the next token, or with mlm of the token at the position.
        `others`: `ids_BT`, the ids, where `x` is the stream and a layer of this part has value embeddings; `keys_B`,
        the key of each row, from which dropout is drawn (None = no dropout).
        """
        x_BTD: Tensor = x if self.embedding is None else self.embedding(x)
        documents = None if documents_BT is None else RowDocuments(documents_BT, starts_N, compute_dtype(x_BTD))
        masks = self._with_draws(self._masks(x.shape[1], documents, x_BTD), others.get("keys_B"), x.shape[1])
        if self.extra is not None:
            x_BTD = self.extra(x_BTD, next(iter(masks.values())).positions_T)
        if self.embedding is not None and self.embedding_dropout:
            draws = next(iter(masks.values())).of_layer(BEFORE_LAYERS).draws
            x_BTD = drop_channels(x_BTD, self.embedding_dropout, draws, EMBEDDING)
        first_BTD = F.rms_norm(x_BTD, x_BTD.shape[-1:]) if self.shape.residual_mixing else None
        ids_BT = x if self.embedding is not None else others.get("ids_BT")
        for number, block in self.blocks.items():
            mask = masks[self.shape.window_of(int(number))].of_layer(int(number))
            x_BTD = self._run_layer(block, x_BTD, mask, first_BTD, self._values_of(number, ids_BT))
        return self._head(x_BTD, targets_BT, sources_B) if self.span.ends else x_BTD

    def _head(self, x_BTD: Tensor, targets_BT: Tensor | None, sources_B: Tensor | None) -> Tensor:
        """Return the total loss, or without targets the logits, of the residual stream after the last layer."""
        bias_V = None
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        if self.transform is not None:
            x_BTD, bias_V = self.transform(x_BTD), self.transform.output_bias
        if self.shape.width_multiplier != 1:
            x_BTD = x_BTD / self.shape.width_multiplier  # the factor of the logits of muP
        weight_VD = self.embedding.weight if self.head is None else self.head.weight  # type: ignore[union-attr]
        if targets_BT is None:
            return capped(F.linear(x_BTD, weight_VD, bias_V).float(), self.loss.softcap)  # type: ignore[arg-type]
        return self.loss(x_BTD, weight_VD, targets_BT, sources_B, bias_V)  # type: ignore[arg-type]

    def _masks(
        self, num_positions: int, documents: RowDocuments | None, x_BTD: Tensor
    ) -> dict[int | None, AttentionMask]:
        """Return the attention mask for each window of the layers; None = no window."""
        return {
            window: additive_mask(self.attention_mask(num_positions, documents, x_BTD.device, window), x_BTD)
            for window in dict.fromkeys(self.shape.window_of(int(number)) for number in self.blocks)
        }

    def _with_draws(
        self, masks: dict[int | None, AttentionMask], keys_B: Tensor | None, num_positions: int
    ) -> dict[int | None, AttentionMask]:
        """Return the masks with the draws of dropout; without keys, the masks as they are."""
        if keys_B is None:
            return masks
        number = max(self.shape.d_model, self.shape.num_heads, num_positions * self.row_parts)
        counters_N = torch.arange(number, device=keys_B.device)
        return {
            window: replace(mask, draws=RowDraws(keys_B, self.stream_positions(mask.positions_T), counters_N))
            for window, mask in masks.items()
        }

    def _values_of(self, layer: str, ids_BT: Tensor | None) -> Tensor | None:
        """Return the value embeddings of the ids in a layer, (B, T, C); None if the layer has none."""
        if self.value_embeddings is None or layer not in self.value_embeddings:
            return None
        values_BTC: Tensor = self.value_embeddings[layer](ids_BT)
        return values_BTC

    def _run_layer(self, block: nn.Module, x_BTD: Tensor, mask: AttentionMask, *inputs: Tensor | None) -> Tensor:
        y_BTD: Tensor
        if not self._compiled or torch.is_grad_enabled():
            y_BTD = block(x_BTD, mask, *inputs)
            return y_BTD
        # Without a gradient torch would compile the layers again. The activations that this graph stores for a
        # backward pass are freed after each layer.
        with torch.enable_grad():
            alike = (x if x is None else x.detach().requires_grad_() for x in inputs)
            y_BTD = block(x_BTD.detach().requires_grad_(), mask, *alike)
        return y_BTD.detach()

    @property
    def layers(self) -> list[Block]:
        """The layers of this part of the model, in order."""
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def mask_of_rows(
        self, num_positions: int, documents: RowDocuments | None, device: torch.device, window: int | None = None
    ) -> AttentionMask:
        """Return the attention mask of whole rows, in the form of the device's fastest kernel.

        `window`: number of latest positions that a query attends to; None = all.
        """
        positions_T = torch.arange(num_positions, device=device)
        window = window if window is not None and window < num_positions else None
        if documents is None:
            if device.type == "cpu" and not self.holds_scores:  # the tiles of a CPU need no matrix
                return replace(self.mask_of_positions(positions_T, None), window=window)
            return self.mask_of_positions(positions_T, None, window)
        if self.holds_scores:
            return self.mask_of_positions(positions_T, documents.numbers_BT, window)
        if documents.starts_N is not None and uses_flash_attention(device, self.shape, documents.dtype):
            # The number of documents differs between batches, and must not become a constant of the compiled layers.
            torch._dynamo.maybe_mark_dynamic(documents.starts_N, 0)
            return replace(self.mask_of_positions(positions_T, None), starts_N=documents.starts_N, window=window)
        if not uses_blocks(device, self.shape, documents.dtype):
            return self.mask_of_positions(positions_T, documents.numbers_BT, window)
        blocks = document_blocks(documents.numbers_BT, self.causal, window)
        return replace(self.mask_of_positions(positions_T, None), blocks=blocks, window=window)

    def mask_of_positions(
        self, positions_T: Tensor, documents_BT: Tensor | None, window: int | None = None
    ) -> AttentionMask:
        """Return the attention mask of some positions in matrix form.

        `documents_BT`: document number of each position; None = every row is one document. `window`: number of latest
        positions that a query attends to; None = all.
        """
        shape, device = self.shape, positions_T.device
        if documents_BT is None and window is not None:
            documents_BT = torch.zeros_like(positions_T)[None]
        mask_B1TT = None if documents_BT is None else document_mask(documents_BT, self.causal, window)
        if shape.positions == "relative":
            distances_LD = sinusoids(len(positions_T), self.causal, shape.d_model, device)
            return AttentionMask(positions_T, None, mask_B1TT, self.causal, distances_LD=distances_LD)
        if shape.positions == "learned":
            return AttentionMask(positions_T, None, mask_B1TT, self.causal)
        return AttentionMask(positions_T, rotation_table(positions_T, shape), mask_B1TT, self.causal)


def build_model(
    shape: ModelShape,
    span: LayerSpan | None = None,
    causal: bool = True,
    recompute: Callable[[int], Recompute] = lambda layer: "none",
) -> Transformer:
    """Return the model, or a range of its layers, without storage: shapes and names only, on the meta device."""
    with torch.device("meta"):
        return Transformer(shape, span or LayerSpan(0, shape.num_layers, shape.num_layers), causal, recompute)


def initial_weight(
    name: str,
    size: torch.Size,
    shape: ModelShape,
    seed: int,
    region: tuple[slice, ...] | None = None,
    rule: int = BY_POSITION,
) -> Tensor:
    """Return the initial value of one parameter or of a region of it, float32 on the CPU.

    A value is a function of (seed, name, position), so a rank draws its own region only. `rule`: BY_TENSOR for a run
    of an older version, whose values torch's generator drew for whole tensors.
    """
    region = region or tuple(slice(0, length) for length in size)
    deviation = initial_deviation(name, size, shape)
    if isinstance(deviation, Constant):
        return torch.full([bounds.stop - bounds.start for bounds in region], deviation.value)
    if shape.tie_embeddings and name == "head.weight":
        name = "embedding.weight"
    if rule == BY_TENSOR:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(size).normal_(0.0, deviation, generator=generator)[region]
    return torch.from_numpy(normal_part((seed, name), size, region, deviation, torch.get_num_threads()))


@dataclass(frozen=True)
class Constant:
    """The initial value of all elements of a parameter."""

    value: float


def initial_deviation(name: str, size: torch.Size, shape: ModelShape) -> float | Constant:
    """Return the standard deviation of a parameter's initial values, or the constant that they all are.

    Gains are 1, but for token embeddings in residual mixing 0; biases are 0. Matrices are normal with deviation
    sqrt(2 / 5D). Matrices that write into the residual stream are divided by sqrt(2 * layers). With muP, matrices
    with a row for each id, position or kind have the deviation of the base width.
    Sources: Nguyen 2019, 1910.05895, 2.2 (small init); Radford 2019 (GPT-2), 2.3; Yang 2022, 2203.03466, table 8.
    """
    if name.endswith(("bias", "mix_first.weight")):
        return Constant(0.0)
    if len(size) == 1:
        return Constant(1.0)
    width = shape.d_model if name.startswith(HIDDEN_NAMES) else shape.d_model / shape.width_multiplier
    deviation = math.sqrt(2 / (5 * width))
    if name.endswith(("attention.out.weight", "ffn.down.weight")):
        deviation /= math.sqrt(2 * shape.num_layers)
    return deviation


def enable_dropout(model: Transformer, train: TrainConfig, part: int = 0, row_parts: int = 1) -> None:
    """Enable the dropout of `[train]` in a model, for rows that have keys.

    `part`: index of this rank's heads among the ranks that share the heads of a layer. `row_parts`: number of ranks
    over which the positions of a row are split.
    """
    model.row_parts = row_parts
    model.embedding_dropout = train.embedding_dropout
    model.holds_scores = train.attention_dropout > 0
    for block in model.layers:
        block.dropout = train.dropout
        if train.attention_dropout:
            block.attention.core = DroppedAttention(train.attention_dropout, part)
