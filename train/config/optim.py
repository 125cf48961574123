"""The section `[optim]`: the optimizer, its learning rate, and the limits of an update; every field is content."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.config import Section

ScheduleName = Literal["cosine", "linear", "wsd", "inverse_sqrt", "step", "plateau", "constant"]


class OptimConfig(Section):
    """The update of the weights; the plan replaces values of None."""

    optimizer: Literal["adamw", "adafactor", "lamb", "muon"] = "adamw"
    """Update rule. muon: Muon for the matrices of the layers, AdamW for everything else."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate; None = from the plan, whose rules are for AdamW. The same rate suits Muon; LAMB, whose
    updates are relative to the norm of a matrix, needs a larger one (You et al. 2020: 5e-3 for BERT at 32k
    sequences)."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up; None = from the plan."""
    schedule: ScheduleName = "cosine"
    """Schedule of the learning rate after the warm-up."""
    final_lr_share: float = Field(0.1, ge=0, le=1)
    """cosine, linear, wsd: rate at the end, as a share of the peak. Source: Hoffmann et al. 2022, section 3 (10×)."""
    decay_share: float = Field(0.1, gt=0, le=1)
    """wsd: share of the steps, at the end, over which the rate falls. Source: Hu et al. 2024, arXiv 2404.06395, 4.1."""
    decay_steps: tuple[int, ...] = ()
    """step: the updates, in ascending order, after which the rate is multiplied by `decay_factor`."""
    decay_factor: float = Field(0.5, gt=0, lt=1)
    """step, plateau: factor of the rate."""
    plateau_patience: int = Field(3, ge=1)
    """plateau: consecutive held-out losses without a new minimum before the rate falls."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices. Source: Brown et al. 2020, arXiv 2005.14165, appendix B."""
    decay_embeddings: bool = False
    """Apply weight decay to embeddings too; norms and biases never decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment (AdamW, also with Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment (AdamW, also with Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator (AdamW, also with Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon: momentum of the matrices. Source: Jordan 2024."""
    muon_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Muon: precision of the orthogonalization; auto: bf16 on a CUDA device, fp32 on a CPU. In bf16, as in Jordan
    2024, it is several times as fast on a GPU. But the last bits of a gradient, which differ between layouts, then
    change an update by 1e-2 of its norm instead of 1e-5."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Maximum gradient norm; None = no clipping. Source: Brown et al. 2020, appendix B."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of (log Z)² added to the cross-entropy. Source: Chowdhery et al. 2022, arXiv 2204.02311, 5 (1e-4)."""
    initial_loss_scale: float = Field(65536.0, ge=1, le=2**24)
    """fp16: initial factor of the loss. Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2."""
    loss_scale_steps: int = Field(2000, ge=1)
    """fp16: consecutive finite steps before the factor is doubled."""

    def for_device(self, kind: str) -> "OptimConfig":
        """Return the section with the automatic values that the optimizer uses set for a device type."""
        if self.optimizer != "muon" or self.muon_precision != "auto":
            return self
        return self.model_copy(update={"muon_precision": "bf16" if kind == "cuda" else "fp32"})

    @model_validator(mode="after")
    def _used(self) -> "OptimConfig":
        """Reject a setting that the chosen optimizer or schedule would ignore."""
        users_of: dict[str, tuple[str, Any, tuple[str, ...]]] = {
            "final_lr_share": ("schedule", self.schedule, ("cosine", "linear", "wsd")),
            "decay_share": ("schedule", self.schedule, ("wsd",)),
            "decay_steps": ("schedule", self.schedule, ("step",)),
            "decay_factor": ("schedule", self.schedule, ("step", "plateau")),
            "plateau_patience": ("schedule", self.schedule, ("plateau",)),
            **dict.fromkeys(("beta1", "beta2", "eps"), ("optimizer", self.optimizer, ("adamw", "lamb", "muon"))),
            "momentum": ("optimizer", self.optimizer, ("muon",)),
            "muon_precision": ("optimizer", self.optimizer, ("muon",)),
        }
        for name, (switch, chosen, users) in users_of.items():
            if name in self.model_fields_set and chosen not in users:
                raise ValueError(
                    f"{name}: expected {switch} = {' or '.join(users)}, got {chosen}. Remove {name}, or set {switch}."
                )
        if list(self.decay_steps) != sorted(set(self.decay_steps)) or min(self.decay_steps, default=1) < 1:
            raise ValueError(
                f"decay_steps: expected ascending steps from 1, got {list(self.decay_steps)}. "
                "Sort decay_steps and remove repeated steps."
            )
        if self.schedule == "step" and not self.decay_steps:
            raise ValueError("schedule = step requires decay_steps")
        return self
