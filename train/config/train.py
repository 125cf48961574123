"""The section `[train]`: what a model learns from, in which order and stages; a value of None is the plan's."""

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from schemas.config import Section, execution


def _shares(weights: dict[str, float]) -> dict[str, float]:
    if weights and (min(weights.values()) < 0 or sum(weights.values()) <= 0):
        raise ValueError("shares are >= 0 and at least one is positive")
    return weights


MODERN, OLDER = (8, 0), (7, 0)
"""CUDA compute capability from which auto is bf16, and from which fp16."""
Shares = Annotated[dict[str, float], AfterValidator(_shares)]
"""Share of each source in the samples, in any unit."""


class StageConfig(Section):
    """A range of the run's tokens with settings of its own; an absent one is that of `[train]` or `[optim]`."""

    tokens: int | None = Field(None, ge=1)
    """Tokens of the stage, rounded to whole steps; None = what is left, in the last stage only."""
    seq_len: int | None = Field(None, ge=1)
    """Tokens the model sees at once."""
    global_batch: int | None = Field(None, ge=1)
    """Sequences per step."""
    weights: Shares | None = None
    """Share of each source in the samples; names every source."""
    learning_rate: float | None = Field(None, gt=0)
    """Rate at the beginning of the stage, which then has a schedule of its own; None = the run's schedule goes on."""
    schedule: Literal["cosine", "linear", "constant"] = "linear"
    """Course of that rate."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """Where it ends, as a share."""

    @model_validator(mode="after")
    def _used(self) -> "StageConfig":
        given = self.model_fields_set & {"schedule", "final_lr_share"}
        if self.learning_rate is None and given:
            raise ValueError(f"{' and '.join(sorted(given))} want a learning_rate of the stage's own")
        return self


class TrainConfig(Section):
    """What is learnt from; content fields decide the weights, execution fields only how they are reached."""

    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the data order, of the initial weights and of what is masked."""
    objective: Literal["causal", "mlm", "span"] = "causal"
    """causal: the next token; mlm: tokens hidden from a model that sees both sides (Devlin et al. 2018, arXiv
    1810.04805); span: the spans cut out of a text, behind it (Raffel et al. 2019, arXiv 1910.10683, section 3.1.4)."""
    mask_share: float = Field(0.15, gt=0, lt=1)
    """mlm, span: share of the tokens to be predicted. Source: Devlin et al. 2018, section 3.1."""
    mean_span: float = Field(3.0, ge=1)
    """span: mean length of a span [tokens]. Source: Raffel et al. 2019, section 3.3.4."""
    seq_len: int = Field(512, ge=1)
    """Tokens of the stream in a sequence; divides the dataset's chunk_tokens."""
    packing: Literal["stream", "best_fit"] = "stream"
    """stream: sequences are cut from the stream as it stands; best_fit: the documents of a chunk are laid out so that
    few are cut, and rows filled up with padding. Source: Ding et al. 2024, arXiv 2404.10830."""
    document_mask: bool = True
    """Whether a token sees only its own document; else the whole sequence before it."""
    weights: Shares = Field(default_factory=dict)
    """Share of each source in the samples, in any unit; names every source, 0 leaves one out. Empty = by tokens."""
    mix: str = execution("", pattern="^([0-9a-f]{64})?$")
    """SHA-256 of the mix that the weights are of, written by `penstock plan --mix`; empty = of none. Not content: the
    weights are."""
    window_shards: int = Field(8, ge=1)
    """Shards that are shuffled together; more = better mixed, fewer = fewer files open at once."""
    global_batch: int | None = Field(None, ge=1)
    """Sequences per optimiser step over all ranks; None = from the plan."""
    steps: int | None = Field(None, ge=1)
    """Optimiser steps; None = from the plan."""
    stages: tuple[StageConfig, ...] = ()
    """Stages of the run, one after the other; empty = one, with the settings of this section."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Number format of the matrix products; weights, reductions and optimiser states stay fp32. auto: bf16 on a CUDA
    device of compute capability 8.0 or newer, fp16 on 7.0 to 7.5, else fp32, and fp32 on a CPU; a run keeps what it
    began with. fp16 scales the loss dynamically; fp8: matrices of the layers in 8 bits, the rest in bf16."""
    fp8_scaling: Literal["auto", "tensor", "row", "gather"] = "auto"
    """fp8: what has a scale of its own, and by whose products. tensor: a matrix, by ours; row: a row of it, by torchao;
    gather: a matrix, by torchao, and zero2 and zero3 all-gather weights in 8 bits. auto: row where torchao is installed
    when training starts, else tensor; a run keeps what it began with."""
    skip_file: str = execution("")
    """Skip list relative to the run's train folder; empty = none. Not content: checkpoints carry its digest instead."""
    eval_every: int = execution(100, ge=0)
    """Steps between two held-out losses; 0 = never."""
    eval_sequences: int = execution(64, ge=1)
    """Held-out sequences of each source per evaluation; fewer when the dataset holds fewer."""
    log_every: int = execution(10, ge=1)
    """Steps between two progress lines."""
    peak_flops: float | None = execution(None, gt=0)
    """Dense bf16 peak of one device [FLOP/s], which an MFU is a share of in every precision; None = that of
    `cluster.device`, else of the device by its name; where neither is known, no MFU is shown."""
    profile: str = execution("")
    """Steps FIRST-LAST that torch's profiler records on rank 0, such as 10-12, into train/profile; empty = none."""

    def for_device(self, kind: str, capability: tuple[int, int] | None = None) -> "TrainConfig":
        """The same with nothing automatic left that is used; a CUDA device without a `capability` counts as modern."""
        if self.precision == "fp8" and self.fp8_scaling == "auto":
            return self.model_copy(update={"fp8_scaling": "row" if find_spec("torchao") else "tensor"})
        if self.precision != "auto":
            return self
        found = "fp32"
        if kind == "cuda":
            found = next(
                (name for name, least in (("bf16", MODERN), ("fp16", OLDER)) if (capability or MODERN) >= least), "fp32"
            )
        return self.model_copy(update={"precision": found})

    @model_validator(mode="after")
    def _used(self) -> "TrainConfig":
        """Refuse a setting that the objective or the stages would ignore."""
        given = self.model_fields_set
        problems = [
            (self.precision != "fp8" and "fp8_scaling" in given, "fp8_scaling wants precision = fp8"),
            (self.objective == "causal" and "mask_share" in given, "mask_share wants objective = mlm or span"),
            (self.objective != "span" and "mean_span" in given, "mean_span wants objective = span"),
            (
                self.objective == "span" and self.document_mask,
                "objective = span cuts spans from whole sequences: it wants document_mask = false",
            ),
            (
                self.objective == "span" and self.packing == "best_fit",
                "objective = span wants packing = stream",
            ),
            (
                any(stage.tokens is None for stage in self.stages[:-1]),
                "stages: only the last one may be without tokens",
            ),
            (
                bool(self.mix) and not self.weights,
                "mix wants weights: `penstock plan --mix` sets both",
            ),
            (
                bool(self.mix) and any(stage.weights is not None for stage in self.stages),
                "mix wants stages without weights of their own, which would take its place",
            ),
            (
                self.packing == "best_fit" and any(stage.seq_len not in (None, self.seq_len) for stage in self.stages),
                "packing = best_fit lays out one seq_len: stages cannot have others",
            ),
        ]
        if found := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(found))
        return self
