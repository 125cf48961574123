"""The transformer: norms, grouped-query attention and feed-forward; the whole model or a range of its layers.

It is built without storage (meta device). Weights are then made one parameter at a time from a seed and the parameter's
name, so they are the same for any number of ranks and any layout. The model itself does not communicate: its attention
mask (`mask`), attention function (`core`) and loss (`loss`) are attributes that a layout may replace.

Shape suffixes: B rows, T positions, D width, V vocabulary.
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
from train.model.attention import (
    Attention,
    AttentionMask,
    RowDocuments,
    additive_mask,
    compute_dtype,
    document_blocks,
    document_mask,
    rotation_table,
    sinusoids,
    uses_blocks,
)
from train.model.flash_attention import uses_flash_attention
from train.model.loss import HeadLoss
from train.model.shape import ModelShape

Recompute = Literal["none", "full", "selective"]


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
    """SwiGLU, down(silu(gate(x)) * up(x)), or GELU, down(gelu(up(x))). Sources: Shazeer 2020, 2002.05202; Hendrycks
    2016, 1606.08415."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        gated = shape.activation == "swiglu"
        self.gate = nn.Linear(shape.d_model, shape.d_ffw, bias=shape.bias) if gated else None
        self.up = nn.Linear(shape.d_model, shape.d_ffw, bias=shape.bias)
        self.down = nn.Linear(shape.d_ffw, shape.d_model, bias=shape.bias)
        self.approximate = "tanh" if shape.activation == "gelu_tanh" else "none"

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the feed-forward's output, position by position, (B, T, D)."""
        up = self.up(x_BTD)
        hidden = F.gelu(up, approximate=self.approximate) if self.gate is None else F.silu(self.gate(x_BTD)) * up
        y_BTD: Tensor = self.down(hidden)
        return y_BTD


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the stream; a norm before each half, or after each sum."""

    def __init__(self, shape: ModelShape, recompute: Recompute):
        super().__init__()
        self.recompute, self.norm_position = recompute, shape.norm_position
        self.attention_norm = make_norm(shape, shape.d_model)
        self.attention = Attention(shape)
        self.ffn_norm = make_norm(shape, shape.d_model)
        self.ffn = FeedForward(shape)

    def forward(self, x_BTD: Tensor, mask: AttentionMask) -> Tensor:
        """Return the residual stream after this layer, (B, T, D)."""
        # Recomputation is inside the module, not a wrapper: parameter names get no prefix, and FSDP gathers the
        # weights of the block before it starts.
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._layer(x_BTD, mask)
        if self.recompute == "selective":
            y_BTD: Tensor = checkpoint(
                self._layer, x_BTD, mask, use_reentrant=False, preserve_rng_state=False, context_fn=_selective_contexts
            )
        else:
            y_BTD = checkpoint(self._layer, x_BTD, mask, use_reentrant=False, preserve_rng_state=False)
        return y_BTD

    def _layer(self, x_BTD: Tensor, mask: AttentionMask) -> Tensor:
        if self.norm_position == "post":
            # Under autocast a norm returns float32, the dtype of the residual stream.
            x_BTD = self.attention_norm(x_BTD + self.attention(x_BTD, mask))
            x_BTD = self.ffn_norm(x_BTD + self.ffn(x_BTD))
            return x_BTD
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), mask)
        x_BTD = x_BTD + self.ffn(self.ffn_norm(x_BTD))
        return x_BTD


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
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
    *(torch.ops.higher_order.flex_attention, torch.ops.torch_attn._varlen_attn.default),
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
        self.norm = make_norm(shape, shape.d_model) if span.ends and shape.norm_position == "pre" else None
        self.transform = HeadTransform(shape) if span.ends and shape.head_transform else None
        self.head: nn.Module | None = None
        if span.ends and not (shape.tie_embeddings and span.begins):
            # A tied matrix in the last pipeline stage is a copy of the embedding, which the layout keeps equal.
            self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        self.attention_mask: Callable[[int, RowDocuments | None, torch.device], AttentionMask] = self.mask_of_rows
        self.loss = HeadLoss()
        self._compiled = False

    def compile_layers(self) -> None:
        """Compile each layer with torch.compile."""
        self._compiled = True
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
    ) -> Tensor:
        """Return the residual stream, the loss or the logits of this part of the model.

        `x`: ids (B, T), or the residual stream (B, T, D) if other layers come before. If other layers follow, the
        result is the residual stream (B, T, D). Otherwise, with targets, the result is the total loss, 0-d. Without
        targets it is the float32 logits (B, T, V) of the next token, or with mlm of the token at the position.
        """
        x_BTD: Tensor = x if self.embedding is None else self.embedding(x)
        documents = None if documents_BT is None else RowDocuments(documents_BT, starts_N, compute_dtype(x_BTD))
        mask = additive_mask(self.attention_mask(x.shape[1], documents, x.device), x_BTD)
        if self.extra is not None:
            x_BTD = self.extra(x_BTD, mask.positions_T)
        for block in self.blocks.values():
            x_BTD = self._run_layer(block, x_BTD, mask)
        if not self.span.ends:
            return x_BTD
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        bias_V = None
        if self.transform is not None:
            x_BTD, bias_V = self.transform(x_BTD), self.transform.output_bias
        weight_VD = self.embedding.weight if self.head is None else self.head.weight  # type: ignore[union-attr]
        if targets_BT is None:
            return F.linear(x_BTD, weight_VD, bias_V).float()  # type: ignore[arg-type]
        return self.loss(x_BTD, weight_VD, targets_BT, sources_B, bias_V)  # type: ignore[arg-type]

    def _run_layer(self, block: nn.Module, x_BTD: Tensor, mask: AttentionMask) -> Tensor:
        y_BTD: Tensor
        if not self._compiled or torch.is_grad_enabled():
            y_BTD = block(x_BTD, mask)
            return y_BTD
        # Without a gradient torch would compile the layers again. The activations that this graph stores for a
        # backward pass are freed after each layer.
        with torch.enable_grad():
            y_BTD = block(x_BTD.detach().requires_grad_(), mask)
        return y_BTD.detach()

    @property
    def layers(self) -> list[Block]:
        """The layers of this part of the model, in order."""
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def mask_of_rows(self, num_positions: int, documents: RowDocuments | None, device: torch.device) -> AttentionMask:
        """Return the attention mask of whole rows, in the form of the device's fastest kernel."""
        positions_T = torch.arange(num_positions, device=device)
        if documents is None:
            return self.mask_of_positions(positions_T, None)
        if documents.starts_N is not None and uses_flash_attention(device, self.shape, documents.dtype):
            # The number of documents differs between batches, and must not become a constant of the compiled layers.
            torch._dynamo.maybe_mark_dynamic(documents.starts_N, 0)
            return replace(self.mask_of_positions(positions_T, None), starts_N=documents.starts_N)
        if not uses_blocks(device, self.shape, documents.dtype):
            return self.mask_of_positions(positions_T, documents.numbers_BT)
        blocks = document_blocks(documents.numbers_BT, self.causal)
        return replace(self.mask_of_positions(positions_T, None), blocks=blocks)

    def mask_of_positions(self, positions_T: Tensor, documents_BT: Tensor | None) -> AttentionMask:
        """Return the attention mask of some positions in matrix form.

        `documents_BT`: document number of each position; None = every row is one document.
        """
        shape, device = self.shape, positions_T.device
        mask_B1TT = None if documents_BT is None else document_mask(documents_BT, self.causal)
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


def initial_weight(name: str, size: torch.Size, shape: ModelShape, seed: int) -> Tensor:
    """Return the initial value of one parameter, float32 on the CPU, a function of (seed, name, size) alone.

    Gains are 1 and biases 0. Matrices are normal with deviation sqrt(2 / 5D). Matrices that write into the residual
    stream are divided by sqrt(2 * layers).
    Sources: Nguyen 2019, 1910.05895, 2.2 (small init); Radford 2019 (GPT-2), 2.3.
    """
    if name.endswith("bias"):
        return torch.zeros(size)
    if len(size) == 1:
        return torch.ones(size)
    deviation = math.sqrt(2 / (5 * shape.d_model))
    if name.endswith(("attention.out.weight", "ffn.down.weight")):
        deviation /= math.sqrt(2 * shape.num_layers)
    if shape.tie_embeddings and name == "head.weight":
        name = "embedding.weight"
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(size).normal_(0.0, deviation, generator=generator)
