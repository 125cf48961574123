"""The section `[plan]`: how a model is sized for a dataset; a value that is given is never changed."""

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from schemas.config import Section, execution, location
from train.config.own_law import OwnLaw


class PlanConfig(Section):
    """How the model is sized; every override must keep the shape valid, or the plan is refused."""

    law: Literal[
        "ratio", "approach_1", "approach_2", "approach_3", "besiroglu", "kaplan", "deepseek", "llama_3", "own"
    ] = "ratio"
    """Which N belongs to which D; train/scaling/laws.py has all, and a plan shows the others beside it. ratio:
    `tokens_per_parameter`, since approaches 1 and 2 and Chinchilla itself agree on it. own: that of `law_file`."""
    law_file: str | None = location(None)
    """own: file of a law that `penstock ladder` or `penstock fit-scaling` fitted; a plan keeps the law itself."""
    own_law: OwnLaw | None = None
    """own: the law itself, as a plan has it from `law_file`."""
    tokens_per_parameter: float = Field(20.0, gt=0)
    """ratio: training tokens per parameter. Source: Hoffmann et al. 2022, arXiv 2203.15556, Table 3."""
    compute: float | None = Field(None, gt=0)
    """Budget [FLOPs, as 6ND] that N and D are chosen for; None = they follow from the tokens there are."""
    gpu_hours: float | None = Field(None, gt=0)
    """The same as hours of one of `cluster.device` at `cluster.mfu` of its peak."""
    usd: float | None = Field(None, gt=0)
    """The same as money [USD], at `cluster.usd_per_gpu_hour`."""
    params: float | None = Field(None, gt=0)
    """N that D is chosen for [parameters, embeddings included]."""
    inference_tokens: float | None = Field(None, gt=0)
    """Tokens that the model will read and write in use: with it, a smaller model of the same loss is trained longer.
    Source: Sardana et al. 2023, arXiv 2401.00448, section 2."""
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
    head_dim: int | None = Field(None, ge=2)
    """Width of a head; None = d_model / num_heads."""
    d_ffw: int | None = Field(None, ge=1)
    """Hidden width of the feed-forward; None = from the plan."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward: three matrices with a gate, or two. Sources: Shazeer 2020, arXiv 2002.05202; Hendrycks and Gimpel
    2016, arXiv 1606.08415."""
    bias: bool = False
    """Whether the matrices of the layers have biases."""
    tie_embeddings: bool | None = None
    """Whether input and output embedding are one matrix; None = from the plan."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head. Source: Dehghani et al. 2023, arXiv 2302.05442, section 2."""
    positions: Literal["rope", "relative"] = "rope"
    """rope: rotary (Su et al. 2021, arXiv 2104.09864); relative: Transformer-XL's, as in Gopher and Chinchilla (Dai et
    al. 2019, arXiv 1901.02860, section 3.3), which holds a square of scores per head."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary frequencies. Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """How rotary frequencies are stretched to longer sequences. Sources: Chen et al. 2023, arXiv 2306.15595 (linear);
    Llama 3, arXiv 2407.21783, and its published configuration (wave lengths by low and high factors 1 and 4)."""
    rope_factor: float = Field(1.0, ge=1)
    """linear, llama3: how many times longer."""
    rope_original: int = Field(8192, ge=1)
    """llama3: the length that was stretched [tokens]."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    device_memory: int | None = execution(None, ge=1)
    """Memory of one device [bytes], which a micro-batch must fit into; None = unknown, not checked."""
    world_sizes: tuple[PositiveInt, ...] = execution((1, 2, 8, 64), min_length=1)
    """Numbers of ranks that memory is estimated for."""

    @model_validator(mode="after")
    def _used(self) -> "PlanConfig":
        """Refuse a setting that the positions would ignore."""
        rotary = {"rope_theta", "rope_scaling", "rope_factor", "rope_original"}
        given = {name for name in rotary if getattr(self, name) != type(self).model_fields[name].default}
        budgets = [name for name in ("compute", "gpu_hours", "usd", "params") if getattr(self, name) is not None]
        ratio = type(self).model_fields["tokens_per_parameter"].default
        laws = sum(law is not None for law in (self.law_file, self.own_law))
        problems = [
            (len(budgets) > 1, f"{' and '.join(budgets)}: one budget is wanted"),
            (
                self.inference_tokens is not None and budgets in ([], ["params"]),
                "inference_tokens wants compute, gpu_hours or usd: the loss to be reached follows from it",
            ),
            (self.law != "ratio" and self.tokens_per_parameter != ratio, "tokens_per_parameter wants law = ratio"),
            (self.law != "own" and laws > 0, "law_file and own_law want law = own"),
            (self.law == "own" and laws == 0, "law = own wants law_file: fit one with `penstock ladder`"),
            (laws == 2, "law_file and own_law: one law is wanted"),
            (self.positions != "rope" and bool(given), f"{', '.join(sorted(given))}: positions = rope is wanted"),
            (self.rope_scaling == "none" and "rope_factor" in given, "rope_factor wants rope_scaling"),
            (self.rope_scaling != "llama3" and "rope_original" in given, "rope_original wants rope_scaling = llama3"),
        ]
        if found := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(found))
        return self
