"""The settings of the training half: how a model is sized (`[plan]`) and how it is trained (`[train]`).

A value of None is filled in by the plan from the dataset's token counts; a value that is given is never changed.
"""

from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from schemas.config import Section, execution


class PlanConfig(Section):
    """How the model is sized; every override must keep the shape valid, or the plan is refused."""

    tokens_per_parameter: float = Field(20.0, gt=0)
    """Training tokens per parameter. Source: Hoffmann et al. 2022, arXiv 2203.15556, Table 3."""
    max_epochs: float = Field(4.0, gt=0)
    """Most passes over a source; 4 are nearly as good as new. Source: Muennighoff et al. 2023, arXiv 2305.16264."""
    min_params: int = Field(200_000, ge=1)
    """Smallest model [parameters] to plan for; a dataset too small for it is repeated, at most max_epochs times."""
    num_layers: int | None = Field(None, ge=1)
    """Number of layers; None = from the plan."""
    d_model: int | None = Field(None, ge=2)
    """Width of the residual stream; None = from the plan."""
    num_heads: int | None = Field(None, ge=1)
    """Number of query heads; None = from the plan."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Number of key and value heads, a divisor of num_heads; None = from the plan."""
    d_ffw: int | None = Field(None, ge=1)
    """Hidden width of the SwiGLU; None = from the plan."""
    tie_embeddings: bool | None = None
    """Whether input and output embedding are one matrix; None = from the plan."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head. Source: Dehghani et al. 2023, arXiv 2302.05442, section 2."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary frequencies. Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    device_memory: int | None = execution(None, ge=1)
    """Memory of one device [bytes], which a micro-batch must fit into; None = unknown, not checked."""
    world_sizes: tuple[PositiveInt, ...] = execution((1, 2, 8, 64), min_length=1)
    """Numbers of ranks that memory is estimated for."""


class TrainConfig(Section):
    """How the model is trained; content fields decide the weights, execution fields only how they are reached."""

    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the data order and of the initial weights."""
    seq_len: int = Field(512, ge=1)
    """Tokens the model sees at once; divides the dataset's chunk_tokens. A sequence holds seq_len + 1 tokens."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Share of each source in the samples, in any unit; names every source, 0 leaves one out. Empty = by tokens."""
    window_shards: int = Field(8, ge=1)
    """Shards that are shuffled together; more = better mixed, fewer = fewer files open at once."""
    global_batch: int | None = Field(None, ge=1)
    """Sequences per optimiser step over all ranks; None = from the plan."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps; None = from the plan."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate; None = from the plan."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up; None = from the plan."""
    final_lr_share: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end of the cosine, as a share of the peak. Source: Hoffmann et al. 2022, section 3 (10×)."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices. Source: Brown et al. 2020, arXiv 2005.14165, appendix B."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW, first moment. Source: Brown et al. 2020, appendix B."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW, second moment. Source: Brown et al. 2020, appendix B."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW, added to the denominator. Source: Brown et al. 2020, appendix B."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient. Source: Brown et al. 2020, appendix B."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the matrix products; weights, gradients and optimiser states stay fp32."""
    skip_file: str = execution("")
    """Skip list relative to the run's train folder; empty = none. Not content: checkpoints carry its digest instead."""
    micro_batch: int = execution(8, ge=1)
    """Sequences per rank that go through the model at once."""
    activation_checkpointing: Literal["none", "full"] = execution("none")
    """Whether each layer's activations are recomputed in the backward pass."""
    reshard: bool = execution(True)
    """Whether parameters are freed after the forward pass (less memory, one more gather)."""
    eval_every: int = execution(100, ge=0)
    """Steps between two held-out losses; 0 = never."""
    eval_sequences: int = execution(64, ge=1)
    """Held-out sequences per evaluation; fewer when the dataset holds fewer."""
    checkpoint_every: int = execution(200, ge=0)
    """Steps between two checkpoints; 0 = only at the end."""
    keep_checkpoints: int = execution(2, ge=1)
    """Newest checkpoints that are kept."""
    log_every: int = execution(10, ge=1)
    """Steps between two progress lines."""
    peak_flops: float | None = execution(None, gt=0)
    """Peak of one device [FLOP/s] in the chosen precision; None = unknown, so no MFU is shown."""

    @field_validator("weights")
    @classmethod
    def _weights(cls, weights: dict[str, float]) -> dict[str, float]:
        if weights and (min(weights.values()) < 0 or sum(weights.values()) <= 0):
            raise ValueError("shares are >= 0 and at least one is positive")
        return weights
