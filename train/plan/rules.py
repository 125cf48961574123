"""Figures of a plan, published rules for batch size and learning rate, and FLOPs of a sequence.

The rules disagree by up to five times at a billion parameters, so the plan prints the results of all of them.
"""

import math
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from train.model.shape import ModelShape

DEEPSEEK = "Bi et al. 2024 (DeepSeek LLM), arXiv 2401.02954, section 3.1"
STEP_LAW = "Li et al. 2025 (Step Law), arXiv 2503.04715, equation 1"
PORIAN = "Porian et al. 2024, arXiv 2406.19146, as OLMo-core codes it"
MAX_KAPLAN_PARAMS = 1e10
KAPLAN = "Kaplan et al. 2020, arXiv 2001.08361, appendix D.6"


class SourcedFigure(BaseModel):
    """A value in a plan, with its unit, the formula that it follows from and the source of the formula."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name of the figure; figures of the same kind share the part before the dot."""
    value: int | float
    """Value of the figure."""
    unit: str
    """Unit of the value; empty for a plain number."""
    formula: str
    """Formula: N parameters, N' without embeddings, D tokens, U unique tokens, B sequences a step, L seq_len."""
    source: str
    """Source of the formula."""


Row = tuple[str, int | float, str, str, str]


def figures_of(rows: Iterable[Row]) -> list[SourcedFigure]:
    """Return figures from rows of (name, value, unit, formula, source)."""
    return [SourcedFigure(name=n, value=v, unit=u, formula=f, source=s) for n, v, u, f, s in rows]


def deepseek_learning_rate(compute: float) -> float:
    """Return the peak learning rate for a budget of `compute` [FLOPs without embeddings]. Source: DEEPSEEK."""
    return 0.3118 * math.pow(compute, -0.1250)


def deepseek_batch(compute: float) -> float:
    """Return the batch size [tokens] for a budget of `compute` [FLOPs without embeddings]. Source: DEEPSEEK."""
    return 0.2920 * math.pow(compute, 0.3271)


def step_law_learning_rate(params: float, tokens: float) -> float:
    """Return the peak learning rate for `params` [without embeddings] and `tokens`. Source: STEP_LAW."""
    return 1.79 * math.pow(params, -0.713) * math.pow(tokens, 0.307)


def step_law_batch(tokens: float) -> float:
    """Return the batch size [tokens] for a run of `tokens`. Source: STEP_LAW."""
    return 0.58 * math.pow(tokens, 0.571)


def porian_learning_rate(params: float) -> float:
    """Return the peak learning rate for `params` [without embeddings]. Source: PORIAN."""
    return 0.0047 * math.pow(params / 108e6, -1 / 3)


def porian_batch(params: float) -> float:
    """Return the batch size [tokens] for `params` [without embeddings]. Source: PORIAN."""
    return 160 * 2048 * math.pow(params / 108e6, 2 / 3)


def kaplan_learning_rate(params: float) -> float:
    """Return the peak learning rate for `params` [without embeddings], below MAX_KAPLAN_PARAMS. Source: KAPLAN."""
    return 0.003239 - 0.0001395 * math.log(params)


# FLOPs of a sequence as Hoffmann et al. count them, term by term, with embedding, softmax and logits.
#
# Source: Hoffmann et al. 2022, arXiv 2203.15556, appendix F. Their Table A4 is reproduced to the printed digits only
# without embedding and logits in the FLOPs, though N includes them; `ends` chooses.

SOURCE = "Hoffmann et al. 2022, arXiv 2203.15556, appendix F"


def forward_flops(shape: ModelShape, seq_len: int, ends: bool = True) -> int:
    """Return the FLOPs of a forward pass of one sequence. Attention counts all pairs, without a causal mask.

    `ends`: include the embedding and the logits.
    """
    # Shared key heads and a gate, which Hoffmann et al. do not have, are counted in the same way. Norms, biases and
    # positions are left out, as in their count.
    d, q, kv, s = shape.d_model, shape.query_width, shape.key_width, seq_len
    projections = 2 * s * d * (q + 2 * kv) + 2 * s * q * d
    square = 2 * s * s * q + 3 * shape.num_heads * s * s + 2 * s * s * q
    matrices = 3 if shape.activation == "swiglu" else 2
    layers = shape.num_layers * (projections + square + 2 * s * matrices * d * shape.d_ffw)
    return layers + (4 * s * d * shape.vocab_size if ends else 0)


def training_flops(shape: ModelShape, seq_len: int, ends: bool = True) -> int:
    """Return the FLOPs of a forward and backward pass of one sequence; `ends` as in `forward_flops`."""
    return 3 * forward_flops(shape, seq_len, ends)
