"""The section `[optim]`: which optimiser, at which rate, and how a step is kept within bounds; all of it content."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.config import Section

ScheduleName = Literal["cosine", "linear", "wsd", "inverse_sqrt", "step", "plateau", "constant"]


class OptimConfig(Section):
    """How weights are updated; a value of None is filled in by the plan."""

    optimizer: Literal["adamw", "adafactor", "lamb", "muon"] = "adamw"
    """Rule of the update. muon: matrices of the layers by Muon, everything else by AdamW."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate; None = from the plan, whose rules are for AdamW. Muon's fits AdamW's; LAMB, whose updates are
    relative to the length of a matrix, wants a larger one (You et al. 2020: 5e-3 for BERT at 32k sequences)."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up; None = from the plan."""
    schedule: ScheduleName = "cosine"
    """Course of the learning rate behind the warm-up."""
    final_lr_share: float = Field(0.1, ge=0, le=1)
    """cosine, linear, wsd: rate at the end, as a share of the peak. Source: Hoffmann et al. 2022, section 3 (10×)."""
    decay_share: float = Field(0.1, gt=0, le=1)
    """wsd: share of the steps over which the rate falls, at the end. Source: Hu et al. 2024, arXiv 2404.06395, 4.1."""
    decay_steps: tuple[int, ...] = ()
    """step: the updates behind which the rate is multiplied by `decay_factor`, rising."""
    decay_factor: float = Field(0.5, gt=0, lt=1)
    """step, plateau: what the rate is multiplied by."""
    plateau_patience: int = Field(3, ge=1)
    """plateau: held-out losses in a row without a new minimum before the rate falls."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices. Source: Brown et al. 2020, arXiv 2005.14165, appendix B."""
    decay_embeddings: bool = False
    """Whether embeddings decay too; norms and biases never do."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First moment (AdamW, also beside Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Second moment (AdamW, also beside Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator (AdamW, also beside Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon: momentum of the matrices. Source: Jordan 2024."""
    muon_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Muon: of the orthogonalisation; auto: bf16 on a CUDA device, fp32 on a CPU. In bf16, as in Jordan
    2024, it is several times as fast on a GPU, but the last bits of a gradient, which differ between layouts, then
    change an update by 1e-2 of its length instead of 1e-5."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Largest norm of the gradient; None = not clipped. Source: Brown et al. 2020, appendix B."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of (log Z)² beside the cross-entropy. Source: Chowdhery et al. 2022, arXiv 2204.02311, 5 (1e-4)."""
    initial_loss_scale: float = Field(65536.0, ge=1, le=2**24)
    """fp16: first factor of the loss. Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2."""
    loss_scale_steps: int = Field(2000, ge=1)
    """fp16: finite steps in a row before the factor is doubled."""

    def for_device(self, kind: str) -> "OptimConfig":
        """The same without anything automatic that the optimiser uses, for a type of device."""
        if self.optimizer != "muon" or self.muon_precision != "auto":
            return self
        return self.model_copy(update={"muon_precision": "bf16" if kind == "cuda" else "fp32"})

    @model_validator(mode="after")
    def _used(self) -> "OptimConfig":
        """Refuse a setting that the chosen optimiser or schedule would ignore."""
        belongs: dict[str, tuple[str, Any, tuple[str, ...]]] = {
            "final_lr_share": ("schedule", self.schedule, ("cosine", "linear", "wsd")),
            "decay_share": ("schedule", self.schedule, ("wsd",)),
            "decay_steps": ("schedule", self.schedule, ("step",)),
            "decay_factor": ("schedule", self.schedule, ("step", "plateau")),
            "plateau_patience": ("schedule", self.schedule, ("plateau",)),
            **dict.fromkeys(("beta1", "beta2", "eps"), ("optimizer", self.optimizer, ("adamw", "lamb", "muon"))),
            "momentum": ("optimizer", self.optimizer, ("muon",)),
            "muon_precision": ("optimizer", self.optimizer, ("muon",)),
        }
        for name, (switch, chosen, users) in belongs.items():
            if name in self.model_fields_set and chosen not in users:
                raise ValueError(f"{name} is used with {switch} = {' or '.join(users)} only, found {chosen}")
        if list(self.decay_steps) != sorted(set(self.decay_steps)) or min(self.decay_steps, default=1) < 1:
            raise ValueError(f"decay_steps rise from 1, found {list(self.decay_steps)}")
        if self.schedule == "step" and not self.decay_steps:
            raise ValueError("schedule step wants decay_steps")
        return self
