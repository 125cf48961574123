"""OPTIMIZERS, the list of optimizers, and the section `[optim]`: the optimizer, its learning rate, and its limits.

Every field of the section is content: it changes the trained weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from schemas.config import Section

STREAMED_NUMBERS = 1 << 22
"""With offloading: elements of the parameters that are brought to the device at once; a larger parameter is alone."""
NUMBERS_AT_ONCE = 1 << 24
"""Maximum number of elements of whole parameters that an update processes at once, to bound temporary memory."""
NEWTON_SCHULZ_STEPS = 5
"""Steps of Muon's Newton-Schulz iteration. Source: Jordan 2024, "Muon: An optimizer for hidden layers in neural
networks"."""


class StateBytes(NamedTuple):
    """Bytes of the float32 state of an optimizer, by the kind of parameter."""

    matrix: int
    """Bytes for each element of a matrix; this state is sharded like the matrix."""
    vector: int
    """Bytes for each element of a gain or bias; this state is sharded like the gain or bias."""
    side: int = 0
    """Bytes for each row and each column of a matrix; every rank with a shard of the matrix holds all of this state."""
    row: int = 0
    """Bytes for each row of a matrix; every rank with a shard of the matrix holds all of this state."""


@dataclass(frozen=True)
class DeclaredOptimizer:
    """Properties of one optimizer, read by the settings, the memory estimate, the cost model and the trainer."""

    rule: str
    """`module:class` of the update rule. The class is called with the parameters, and with `settings` by name."""
    state: StateBytes
    """Bytes of the optimizer's state, by the kind of parameter."""
    update_bytes: int
    """Bytes that an update reads and writes per element: 4 for each access to a weight, a gradient or a state."""
    settings: tuple[str, ...] = ()
    """Fields of `[optim]` that the update rule takes; a recipe may set them only for optimizers that list them."""
    others: str | None = None
    """Name of the optimizer of all parameters except the matrices of the layers; None = this optimizer."""
    workspace: Callable[[int, int, "OptimConfig"], int] = lambda gradient, numbers, config: 0
    """Function that returns the bytes of an update's large temporary tensors.

    Its arguments: bytes of the largest gradient, number of elements in all matrices of the layers, settings."""
    width_power: float | None = None
    """With muP: the rate of a layer's matrix is divided by the relative width to this power; None = not known."""
    matrix_flops: Callable[[int, int], int] | None = None
    """Function that returns the FLOPs of a matrix's update from its shorter and its longer side.

    None = the time of an update depends on memory bandwidth only."""

    @property
    def of_others(self) -> "DeclaredOptimizer":
        """The optimizer of all parameters except the matrices of the layers."""
        return OPTIMIZERS[self.others] if self.others else self

    @property
    def all_settings(self) -> set[str]:
        """Names of the `[optim]` fields that configure this optimizer and the optimizer `of_others`."""
        return {*self.settings, *self.of_others.settings}


def _muon_workspace(gradient: int, numbers: int, config: "OptimConfig") -> int:
    # The temporary tensors of an update: a chunk of matrices, and two products of the same size.
    return 3 * (4 if config.muon_precision == "fp32" else 2) * min(NUMBERS_AT_ONCE, numbers)


def _muon_flops(short: int, long: int) -> int:
    # Each step of the iteration computes three matrix products.
    return NEWTON_SCHULZ_STEPS * (4 * short * short * long + 2 * short**3)


OPTIMIZERS: Mapping[str, DeclaredOptimizer] = {
    "adamw": DeclaredOptimizer(
        rule="train.optim.adam:AdamW",
        state=StateBytes(matrix=8, vector=8),
        update_bytes=28,
        settings=("beta1", "beta2", "eps"),
        width_power=1.0,  # Yang et al. 2022, arXiv 2203.03466, table 8
    ),
    "adafactor": DeclaredOptimizer(
        rule="train.optim.adam:Adafactor",
        state=StateBytes(matrix=0, vector=4, side=4),
        update_bytes=16,
        workspace=lambda gradient, numbers, config: gradient,  # the squared gradient
    ),
    "lamb": DeclaredOptimizer(
        rule="train.optim.adam:Lamb",
        state=StateBytes(matrix=8, vector=8),
        update_bytes=44,
        settings=("beta1", "beta2", "eps"),
    ),
    "muon": DeclaredOptimizer(
        rule="train.optim.muon:Muon",
        state=StateBytes(matrix=4, vector=0),
        update_bytes=32,
        settings=("momentum", "muon_precision", "muon_coefficients"),
        # An update has the spectral norm 0.2·√max(m, n), and should have one that does not change with the width: Yang,
        # Simon and Bernstein 2023, arXiv 2310.17813, condition 1.
        width_power=0.5,
        others="adamw",
        workspace=_muon_workspace,
        matrix_flops=_muon_flops,
    ),
    "normuon": DeclaredOptimizer(
        rule="train.optim.normuon:NorMuon",
        state=StateBytes(matrix=4, vector=0, row=4),
        update_bytes=40,
        settings=("momentum", "muon_precision", "muon_coefficients", "normuon_beta2"),
        width_power=0.5,  # its updates have the Frobenius norm of Muon's
        others="adamw",
        workspace=_muon_workspace,
        matrix_flops=_muon_flops,
    ),
}
"""Every optimizer, by its value of `optim.optimizer`. A new one needs a row here, an update rule and a test."""

ScheduleName = Literal["cosine", "linear", "wsd", "inverse_sqrt", "step", "plateau", "constant"]


class OptimConfig(Section):
    """The optimizer and its learning rate; the plan replaces values of None."""

    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"  # type: ignore[valid-type]
    """Update rule. muon, normuon: Muon or NorMuon for the matrices of the layers, AdamW for everything else."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate; None = from the plan, whose rules are for AdamW. Muon works with the same
    rate. LAMB needs a larger one, since its updates are relative to the norm of a matrix (You et al. 2020: 5e-3 for
    BERT at 32k sequences)."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear warm-up; None = from the plan."""
    schedule: ScheduleName = "cosine"
    """Schedule of the learning rate after the warm-up."""
    final_lr_share: float = Field(0.1, ge=0, le=1)
    """With schedule = cosine, linear or wsd: rate at the end of the run, as a share of the peak rate.

    Source: Hoffmann et al. 2022, section 3 (a tenth)."""
    decay_share: float = Field(0.1, gt=0, le=1)
    """With schedule = wsd: share of the steps, at the end of the run, over which the rate falls.

    Source: Hu et al. 2024, arXiv 2404.06395, 4.1."""
    decay_steps: tuple[int, ...] = ()
    """With schedule = step: optimizer steps, ascending, after which the rate is multiplied by `decay_factor`."""
    decay_factor: float = Field(0.5, gt=0, lt=1)
    """With schedule = step or plateau: factor by which each reduction multiplies the rate."""
    plateau_patience: int = Field(3, ge=1)
    """With schedule = plateau: consecutive held-out losses without a new minimum before the rate is reduced."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices. Source: Brown et al. 2020, arXiv 2005.14165, appendix B."""
    decay_embeddings: bool = False
    """Apply weight decay to embeddings too; norms and biases never decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment (AdamW, also with Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment (AdamW, also with Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    eps: float = Field(1e-8, gt=0)
    """Number added to the denominator (AdamW, also with Muon; LAMB). Source: Brown et al. 2020, appendix B."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """With Muon: decay of the matrices' momentum. Source: Jordan 2024."""
    muon_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """With Muon: precision of the orthogonalization; auto: bf16 on a CUDA device, fp32 on a CPU. In bf16, as in Jordan
    2024, it is several times as fast on a GPU. But the last bits of a gradient, which differ between layouts, then
    change an update by 1e-2 of its norm instead of 1e-5."""
    muon_coefficients: Literal["jordan", "polar_express"] = "jordan"
    """With Muon: polynomials of the orthogonalization. jordan: the same one in each step (Jordan 2024); polar_express:
    one for each step, which come closer to orthogonal matrices (Amsel et al. 2025, arXiv 2505.16932, section 4)."""
    normuon_beta2: float = Field(0.95, ge=0, lt=1)
    """With optimizer = normuon: decay of the mean square of each row's updates. Source: Li et al. 2025, arXiv
    2510.05491, section 4."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Maximum gradient norm; "none" = no clipping. Source: Brown et al. 2020, appendix B."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of (log Z)² added to the cross-entropy; every `plan.recipe` sets 1e-5. Sources: Chowdhery et al. 2022,
    arXiv 2204.02311, 5 (1e-4); OLMo 2, arXiv 2501.00656, section 3.2 (1e-5)."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights in each update, such as 0.999; None = no average. Update t
    uses at most (1 + t) / (10 + t). The average needs 4 bytes for each parameter, and its held-out loss is measured
    beside that of the weights."""
    initial_loss_scale: float = Field(65536.0, ge=1, le=2**24)
    """With train.precision = fp16: initial factor of the loss. Source: Micikevicius et al. 2018, arXiv 1710.03740,
    section 3.2."""
    loss_scale_steps: int = Field(2000, ge=1)
    """With train.precision = fp16: consecutive steps with finite gradients before the factor is doubled."""

    def uses(self, name: str) -> bool:
        """Return True if the chosen optimizer, or its optimizer `of_others`, uses this `[optim]` field."""
        return name in OPTIMIZERS[self.optimizer].all_settings

    def for_device(self, kind: str) -> "OptimConfig":
        """Return the section with `muon_precision = auto` replaced by the value for a device type, if Muon is used."""
        if not self.uses("muon_precision") or self.muon_precision != "auto":
            return self
        return self.model_copy(update={"muon_precision": "bf16" if kind == "cuda" else "fp32"})

    @model_validator(mode="after")
    def _used(self) -> "OptimConfig":
        """Reject a setting that the chosen optimizer or schedule would ignore."""
        users_of = {
            "final_lr_share": ("schedule", ["cosine", "linear", "wsd"]),
            "decay_share": ("schedule", ["wsd"]),
            "decay_steps": ("schedule", ["step"]),
            "decay_factor": ("schedule", ["step", "plateau"]),
            "plateau_patience": ("schedule", ["plateau"]),
        }
        for name in chain(*(row.settings for row in OPTIMIZERS.values())):
            users_of[name] = "optimizer", [user for user, row in OPTIMIZERS.items() if name in row.all_settings]
        for name, (switch, users) in users_of.items():
            if name in self.model_fields_set and (chosen := getattr(self, switch)) not in users:
                raise ValueError(
                    f"{name}: expected {switch} = {' or '.join(users)}, got {chosen}. Remove {name}, or set {switch}."
                )
        if list(self.decay_steps) != sorted(set(self.decay_steps)) or min(self.decay_steps, default=1) < 1:
            raise ValueError(
                f"decay_steps: expected ascending steps from 1, got {list(self.decay_steps)}. "
                "Sort decay_steps and remove repeated steps."
            )
        if self.schedule == "step" and not self.decay_steps:
            raise ValueError("decay_steps: expected at least one step for schedule = step, got none. Set decay_steps.")
        return self
