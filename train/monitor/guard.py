"""The judgements of the guard: steps that are not finite, losses and gradients that jump, losses that no longer fall.

A state machine of values: a state and what a step measured give the next state and a verdict. The numbers are those
of the global batch, the same on every rank, so every rank comes to the same verdict without a word to the others; the
state is part of a checkpoint, so a run that is resumed judges as one that was never stopped.
"""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from schemas.errors import ContractError
from train.config.checkpoint import GuardConfig

MIN_DEVIATION = 1e-3
"""What a window's deviation counts at least [nats/token]: where losses stand still, the last digit is no spike."""
MIN_NORM_SHARE = 1e-2
"""What the deviation of gradient norms counts at least, as a share of their mean: a norm has the scale of its model."""
MAX_SPIKES_IN_A_ROW = 8
"""Spikes in a row that count as such: one more is the new level, and the window that was left begins anew with it."""


class Verdict(StrEnum):
    """What is to be done about a step whose loss and gradient are known, before the update."""

    PROCEED = "go on"
    """Make the update."""
    SKIP = "skip"
    """Not finite: make no update."""
    SPIKE = "spike"
    """Report the documents of the step and make the update; or rewind, as `on_spike` says."""
    STOP = "stop"
    """End the run: `stop_error` says why."""


class GuardState(BaseModel):
    """What the guard remembers behind a step; as JSON and back without a bit lost."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    non_finite: int = 0
    """Steps in a row up to the last that were not finite and count against `max_non_finite`."""
    skipped: int = 0
    """Steps without an update since the first."""
    losses: tuple[float, ...] = ()
    """The last losses, at most `spike_window`, oldest first, without spikes; empty where spikes are not watched."""
    norms: tuple[float, ...] = ()
    """The last gradient norms, in the same way; empty where the gradient is not watched."""
    spikes: int = 0
    """Spikes in a row up to the last step."""
    rewinds: int = 0
    """Rewinds of the run."""
    best_heldout: float | None = None
    """Lowest held-out loss [nats/token]; None before the first."""
    since_best: int = 0
    """Held-out losses since that one."""

    def to_json(self) -> dict[str, Any]:
        """The state as a JSON value; `GuardState.model_validate` takes it back."""
        return self.model_dump(mode="json")


Quantity = Literal["loss", "gradient"]
"""What may leave its band."""


class Band(NamedTuple):
    """Where losses [nats/token], or norms of the gradient, lay before a step."""

    mean: float
    """Mean of the window."""
    deviation: float
    """Standard deviation of the window, with n - 1 in the denominator; at least MIN_DEVIATION, or MIN_NORM_SHARE."""
    limit: float
    """Largest value that is no spike."""


class Bands(NamedTuple):
    """The band of each quantity; None = it is not watched, or its window is not full yet."""

    loss: Band | None
    gradient: Band | None

    def left(self, loss: float, grad_norm: float) -> tuple[Quantity, ...]:
        """What lies above its band."""
        above: tuple[Quantity, ...] = ()
        if self.loss is not None and loss > self.loss.limit:
            above += ("loss",)
        if self.gradient is not None and grad_norm > self.gradient.limit:
            above += ("gradient",)
        return above


def bands_of(state: GuardState, config: GuardConfig) -> Bands:
    """The bands that the steps up to here have set."""
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


def after_step(
    state: GuardState, config: GuardConfig, loss: float, grad_norm: float, loss_scale: float = 1.0
) -> tuple[GuardState, Verdict]:
    """The state behind a step and what is to be done about it; `loss` [nats/token] and `grad_norm` are unscaled.

    A gradient that overflows under a loss scale above 1, with a finite loss, is skipped and not counted in a row: the
    scale is halved for it, so it counts once the scale has come down to 1.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        counted = state.non_finite + (loss_scale <= 1 or not math.isfinite(loss))
        state = state.model_copy(update={"non_finite": counted, "skipped": state.skipped + 1})
        return state, Verdict.STOP if counted > config.max_non_finite else Verdict.SKIP
    state = state.model_copy(update={"non_finite": 0})
    above = bands_of(state, config).left(loss, grad_norm)
    if above and config.rewinds:
        return state, Verdict.STOP if state.rewinds >= config.max_rewinds else Verdict.SPIKE
    if above and state.spikes < MAX_SPIKES_IN_A_ROW:
        return state.model_copy(update={"spikes": state.spikes + 1}), Verdict.SPIKE
    losses, norms = state.losses, state.norms
    if config.spike_sigmas is not None:
        losses = (*(() if "loss" in above else losses), loss)[-config.spike_window :]
    if config.grad_sigmas is not None:
        norms = (*(() if "gradient" in above else norms), grad_norm)[-config.spike_window :]
    return state.model_copy(update={"losses": losses, "norms": norms, "spikes": 0}), Verdict.PROCEED


def after_heldout(state: GuardState, config: GuardConfig, loss: float) -> tuple[GuardState, bool]:
    """The state behind a held-out loss [nats/token], and whether the run ends; one that is not finite is no minimum."""
    best = state.best_heldout
    falls = best is None or (loss < best and loss <= best - config.min_improvement)
    if falls and math.isfinite(loss):
        return state.model_copy(update={"best_heldout": loss, "since_best": 0}), False
    state = state.model_copy(update={"since_best": state.since_best + 1})
    return state, config.patience is not None and state.since_best >= config.patience


def after_rewind(state: GuardState, restored: GuardState) -> GuardState:
    """The state to go on with from a checkpoint's: everything is as it was there but the number of rewinds."""
    return restored.model_copy(update={"rewinds": state.rewinds + 1})


def after_stage_change(state: GuardState) -> GuardState:
    """The state at the beginning of a stage: other data or lengths have a level of their own."""
    return state.model_copy(update={"losses": (), "norms": (), "spikes": 0})


def stop_error(state: GuardState, config: GuardConfig, step: int) -> ContractError:
    """The error that ends a run at `step`, for the state that came with Verdict.STOP."""
    if state.non_finite > config.max_non_finite:
        return ContractError(
            f"step {step}: expected at most guard.max_non_finite = {config.max_non_finite} steps in a row whose loss "
            f"or gradient is not finite, got {state.non_finite}. Look at the data of the step with `penstock trace`, "
            "raise guard.max_non_finite, or train anew at a lower optim.learning_rate."
        )
    return ContractError(
        f"step {step}: expected that {config.max_rewinds} rewinds (guard.max_rewinds) are enough, got another "
        f"spike. Raise guard.max_rewinds, or train anew at a lower optim.learning_rate."
    )
