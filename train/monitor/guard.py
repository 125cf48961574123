"""The guard: checks for non-finite steps, spikes of loss and gradient norm, and held-out losses that stop falling.

It is a pure state machine: a state and the loss and gradient norm of a step give the next state and a verdict. Both
numbers are those of the global batch, so every rank reaches the same verdict without communication. The state is part
of a checkpoint, so a resumed run reaches the same verdicts as an uninterrupted one.
"""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from schemas.errors import ContractError
from train.config.train import GuardConfig

MIN_DEVIATION = 1e-3
"""Minimum deviation of a window of losses [nats/token]: after constant losses, rounding is not a spike."""
MIN_NORM_SHARE = 1e-2
"""Minimum deviation of gradient norms as a share of their mean, since their scale depends on the model."""
MAX_SPIKES_IN_A_ROW = 8
"""Maximum number of consecutive spikes; the next value above the limit starts a new window and is not a spike."""


class Verdict(StrEnum):
    """What to do with a step, decided before its update from its loss and gradient norm."""

    PROCEED = "proceed"
    """Make the update."""
    SKIP = "skip"
    """Not finite: make no update."""
    SPIKE = "spike"
    """Report the documents of the step, then make the update or rewind, as set by `on_spike`."""
    STOP = "stop"
    """End the run with the error of `stop_error`."""


class GuardState(BaseModel):
    """The state of the guard after a step; JSON preserves it exactly."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    non_finite: int = 0
    """Consecutive non-finite steps, up to the last step, that count towards `max_non_finite`."""
    skipped: int = Field(default=0, ge=0, le=1 << 40)
    """Steps without an update in the whole run."""
    losses: tuple[float, ...] = ()
    """The last losses without spikes, at most `spike_window`, oldest first; empty if the loss is not watched."""
    norms: tuple[float, ...] = ()
    """The last gradient norms without spikes, likewise; empty if the gradient is not watched."""
    spikes: int = 0
    """Consecutive spikes up to the last step."""
    rewinds: int = 0
    """Rewinds of the run."""
    rewound: tuple[int, ...] = ()
    """Steps of the spikes that caused them, in order; empty in a checkpoint of an earlier version."""
    best_heldout: float | None = None
    """Lowest held-out loss [nats/token]; None = not measured yet."""
    since_best: int = 0
    """Held-out losses measured since the lowest."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON value; `GuardState.model_validate` restores it."""
        return self.model_dump(mode="json")


Quantity = Literal["loss", "gradient"]
"""A quantity that the guard watches."""


class Band(NamedTuple):
    """Mean, deviation and limit of the losses [nats/token] or gradient norms of the steps before a step."""

    mean: float
    """Mean of the window."""
    deviation: float
    """Standard deviation of the window, with n - 1 in the denominator.

    At least MIN_DEVIATION for losses, and MIN_NORM_SHARE of the mean for gradient norms."""
    limit: float
    """Largest value that is not a spike."""


class Bands(NamedTuple):
    """The bands of loss and gradient norm; a band is None if not watched, or if the window is not full yet."""

    loss: Band | None
    gradient: Band | None

    def left(self, loss: float, grad_norm: float) -> tuple[Quantity, ...]:
        """Return the names of the quantities, `loss` and `gradient`, that are above their limits."""
        above: tuple[Quantity, ...] = ()
        if self.loss is not None and loss > self.loss.limit:
            above += ("loss",)
        if self.gradient is not None and grad_norm > self.gradient.limit:
            above += ("gradient",)
        return above


def bands_of(state: GuardState, config: GuardConfig) -> Bands:
    """Return the bands of loss and gradient norm over the last `spike_window` steps without spikes."""
    window = config.spike_window
    return Bands(
        _level(state.losses[-window:], config.spike_sigmas, window, lambda mean: MIN_DEVIATION),
        _level(state.norms[-window:], config.grad_sigmas, window, lambda mean: MIN_NORM_SHARE * mean),
    )


def _level(values: Sequence[float], sigmas: float | None, number: int, least: Callable[[float], float]) -> Band | None:
    if sigmas is None or len(values) < number:
        return None
    mean = math.fsum(values) / number
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1))
    deviation = max(deviation, least(mean))
    return Band(mean, deviation, mean + sigmas * deviation)


def rewinds_before(state: GuardState, config: GuardConfig, step: int) -> int:
    """Return the number of rewinds whose spikes lie in the `rewind_window` steps before `step`."""
    return sum(step - spike < config.rewind_window for spike in state.rewound)


def after_step(
    state: GuardState, config: GuardConfig, loss: float, grad_norm: float, loss_scale: float = 1.0, step: int = 0
) -> tuple[GuardState, Verdict]:
    """Return the state after a step and the verdict on the step; `loss` [nats/token] and `grad_norm` are unscaled.

    `step`: number of the step, for the rewinds in the window before it; 0 = all rewinds count.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        # An overflow at a loss scale above 1 does not count, because the scale is then halved.
        counted = state.non_finite + (loss_scale <= 1 or not math.isfinite(loss))
        state = state.model_copy(update={"non_finite": counted, "skipped": state.skipped + 1})
        return state, Verdict.STOP if counted > config.max_non_finite else Verdict.SKIP
    state = state.model_copy(update={"non_finite": 0})
    above = bands_of(state, config).left(loss, grad_norm)
    if above and config.rewinds:
        spent = rewinds_before(state, config, step) >= config.max_rewinds
        return state, Verdict.STOP if spent else Verdict.SPIKE
    if above and state.spikes < MAX_SPIKES_IN_A_ROW:
        return state.model_copy(update={"spikes": state.spikes + 1}), Verdict.SPIKE
    losses, norms = state.losses, state.norms
    if config.spike_sigmas is not None:
        losses = (*(() if "loss" in above else losses), loss)[-config.spike_window :]
    if config.grad_sigmas is not None:
        norms = (*(() if "gradient" in above else norms), grad_norm)[-config.spike_window :]
    return state.model_copy(update={"losses": losses, "norms": norms, "spikes": 0}), Verdict.PROCEED


def after_heldout(state: GuardState, config: GuardConfig, loss: float) -> tuple[GuardState, bool]:
    """Return the state after a held-out loss [nats/token], and True if early stopping ends the run."""
    best = state.best_heldout
    falls = best is None or (loss < best and loss <= best - config.min_improvement)
    if falls and math.isfinite(loss):
        return state.model_copy(update={"best_heldout": loss, "since_best": 0}), False
    state = state.model_copy(update={"since_best": state.since_best + 1})
    return state, config.patience is not None and state.since_best >= config.patience


def after_rewind(state: GuardState, restored: GuardState, step: int) -> GuardState:
    """Return the guard state after a rewind: `restored` from the checkpoint, with one rewind more than `state`.

    `step`: step of the spike.
    """
    return with_rewinds(restored, (*state.rewound, step))


def with_rewinds(state: GuardState, spikes: Sequence[int]) -> GuardState:
    """Return the state with the rewinds that these steps caused."""
    return state.model_copy(update={"rewinds": len(spikes), "rewound": tuple(spikes)})


def after_stage_change(state: GuardState) -> GuardState:
    """Return the state at the start of a training stage, without the losses and gradient norms of earlier stages."""
    # Losses of other data or another row length are not comparable.
    return state.model_copy(update={"losses": (), "norms": (), "spikes": 0})


def stop_error(state: GuardState, config: GuardConfig, step: int) -> ContractError:
    """Return the error that ends a run at `step`; `state`: the state that `after_step` returned with Verdict.STOP."""
    if state.non_finite > config.max_non_finite:
        return ContractError(
            f"step {step}: expected at most guard.max_non_finite = {config.max_non_finite} steps in a row whose loss "
            f"or gradient is not finite, got {state.non_finite}. Inspect the data of the step with `penstock trace`, "
            "raise guard.max_non_finite, or train again at a lower optim.learning_rate."
        )
    return ContractError(
        f"step {step}: expected at most guard.max_rewinds = {config.max_rewinds} rewinds in guard.rewind_window = "
        f"{config.rewind_window} steps, got another spike. Raise guard.max_rewinds, or train again at a lower "
        "optim.learning_rate."
    )
