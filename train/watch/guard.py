"""The judgements of the guard: steps that are not finite, losses that jump, losses that no longer fall.

A state machine of values: a state and what a step measured give the next state and a verdict. The numbers are those
of the global batch, the same on every rank, so every rank comes to the same verdict without a word to the others; the
state is part of a checkpoint, so a run that is resumed judges as one that was never stopped.
"""

import math
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from schemas.errors import ContractError
from train.config.guard import GuardConfig

MIN_DEVIATION = 1e-3
"""What a window's deviation counts at least [nats/token]: where losses stand still, the last digit is no spike."""
MAX_SPIKES_IN_A_ROW = 8
"""Losses in a row that count as spikes: one more is the new level, and the window begins anew with it."""


class Verdict(StrEnum):
    """What is to be done about a step whose loss and gradient are known, before the update."""

    GO_ON = "go on"
    """Make the update."""
    SKIP = "skip"
    """Not finite: make no update."""
    SPIKE = "spike"
    """Report the documents of the step and make the update; or rewind, as `on_spike` says."""
    STOP = "stop"
    """End the run: `why_stopped` says why."""


class GuardState(BaseModel):
    """What the guard remembers behind a step; as JSON and back without a bit lost."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    non_finite: int = 0
    """Steps in a row up to the last that were not finite and count against `max_non_finite`."""
    skipped: int = 0
    """Steps without an update since the first."""
    losses: tuple[float, ...] = ()
    """The last losses, at most `spike_window`, oldest first, without spikes; empty where spikes are not watched."""
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


class Level(NamedTuple):
    """Where losses lay before a step [nats/token]."""

    mean: float
    """Mean of the window."""
    deviation: float
    """Standard deviation of the window, with n - 1 in the denominator; at least MIN_DEVIATION."""
    limit: float
    """Largest loss that is no spike."""


def level(state: GuardState, config: GuardConfig) -> Level | None:
    """Mean, deviation and limit of the window; None if spikes are not watched or the window is not full yet."""
    losses, number = state.losses[-config.spike_window :], config.spike_window
    if config.spike_sigmas is None or len(losses) < number:
        return None
    mean = math.fsum(losses) / number
    deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / (number - 1))
    deviation = max(deviation, MIN_DEVIATION)
    return Level(mean, deviation, mean + config.spike_sigmas * deviation)


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
    if config.spike_sigmas is None:
        return state, Verdict.GO_ON
    known = level(state, config)
    if known is None or loss <= known.limit:
        losses = (*state.losses, loss)[-config.spike_window :]
        return state.model_copy(update={"losses": losses, "spikes": 0}), Verdict.GO_ON
    if config.on_spike == "rewind":
        return state, Verdict.STOP if state.rewinds >= config.max_rewinds else Verdict.SPIKE
    if state.spikes >= MAX_SPIKES_IN_A_ROW:
        return state.model_copy(update={"losses": (loss,), "spikes": 0}), Verdict.GO_ON
    return state.model_copy(update={"spikes": state.spikes + 1}), Verdict.SPIKE


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


def at_new_stage(state: GuardState) -> GuardState:
    """The state at the beginning of a stage: other data or lengths have a level of their own."""
    return state.model_copy(update={"losses": (), "spikes": 0})


def why_stopped(state: GuardState, config: GuardConfig, step: int) -> ContractError:
    """The error that ends a run at `step`, for the state that came with Verdict.STOP."""
    if state.non_finite > config.max_non_finite:
        return ContractError(
            f"step {step}: promised at most guard.max_non_finite = {config.max_non_finite} steps in a row whose loss "
            f"or gradient is not finite, found {state.non_finite}; look at the data of the step with `penstock trace`, "
            "raise guard.max_non_finite, or train anew at a lower optim.learning_rate"
        )
    return ContractError(
        f"step {step}: promised that {config.max_rewinds} rewinds (guard.max_rewinds) are enough, found another "
        f"spike; raise guard.max_rewinds, or train anew at a lower optim.learning_rate"
    )
