"""Learning-rate schedules, pure functions of the update's number and the held-out losses; and fp16 loss scaling.

All schedules but inverse_sqrt start from their full rate, at the end of the warm-up or at the beginning of a stage with
its own rate. They reach their final rate at the last step of the run or stage. The first update after the start is
already one step along the schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from train.config.optim import OptimConfig

HeldoutLosses = Sequence[tuple[int, float]]
"""Held-out losses in the order of evaluation: (number of updates made before the evaluation, loss)."""


@dataclass(frozen=True)
class StageSchedule:
    """The settings of a training stage's learning rate."""

    first_step: int
    """Number of the stage's first update; the first of the run is 1."""
    num_steps: int
    """Number of updates of the stage."""
    learning_rate: float | None = None
    """Learning rate at the beginning of the stage; None = the run's schedule continues."""
    schedule: str = "linear"
    """Schedule of the stage's own learning rate: cosine, linear or constant."""
    final_lr_share: float = 0.0
    """Learning rate at the end of the stage, as a share of the stage's `learning_rate`."""


@dataclass(frozen=True)
class ScheduleInputs:
    """What the learning rate depends on besides `[optim]` and the held-out losses."""

    steps: int
    """Number of updates of the run."""
    warmup_steps: int
    """Number of updates over which the rate rises linearly from zero."""
    peak_rate: float
    """Rate at the end of the warm-up."""
    stages: tuple[StageSchedule, ...] = ()
    """Training stages of the run; updates outside them follow the run's schedule."""


def learning_rate(step: int, course: ScheduleInputs, config: OptimConfig, heldout: HeldoutLosses = ()) -> float:
    """Return the learning rate of update `step` (1 = first). The warm-up also scales a stage's own rate.

    Sources: Loshchilov 2017, arXiv 1608.03983, equation 5 (cosine, one cycle); Hu et al. 2024, arXiv 2404.06395, 4.1
    (wsd; its decay is linear here, as in Hägele et al. 2024, arXiv 2405.18392); Vaswani et al. 2017, arXiv 1706.03762,
    5.3 (inverse_sqrt).
    """
    stage = next((s for s in course.stages if s.first_step <= step < s.first_step + s.num_steps), None)
    if stage is None or stage.learning_rate is None:
        peak = course.peak_rate
    else:
        peak = stage.learning_rate
    if step < course.warmup_steps:
        return peak * step / course.warmup_steps
    if stage is None or stage.learning_rate is None:
        return peak * _share(step, course, config, heldout)
    begin = max(stage.first_step - 1, course.warmup_steps)
    progress = _progress(step, begin, stage.first_step + stage.num_steps - 1)
    return peak * _decay(stage.schedule, progress, stage.final_lr_share)


def _share(step: int, course: ScheduleInputs, config: OptimConfig, heldout: HeldoutLosses) -> float:
    """Return the learning rate of the run's schedule at a step after the warm-up, as a share of the peak rate."""
    if config.schedule == "inverse_sqrt":
        return math.sqrt(max(1, course.warmup_steps) / step)
    if config.schedule == "step":
        return config.decay_factor ** sum(step > decay_step for decay_step in config.decay_steps)
    if config.schedule == "plateau":
        return config.decay_factor ** _reductions(step, heldout, config.plateau_patience)
    if config.schedule == "wsd":
        begin = max(course.warmup_steps, course.steps * (1 - config.decay_share))
        return _decay("linear", _progress(step, begin, course.steps), config.final_lr_share)
    progress = _progress(step, course.warmup_steps, course.steps)
    return _decay(config.schedule, progress, config.final_lr_share)


def _progress(step: int, begin: float, end: int) -> float:
    """Return the share of the steps from `begin` to `end` that are complete at `step`, 0 to 1."""
    return min(1.0, max(0.0, step - begin) / max(1.0, end - begin))


def _decay(schedule: str, progress: float, final_share: float) -> float:
    """Return the rate at `progress` through a schedule (0 = start, 1 = end), as a share of the rate at its start."""
    if schedule == "constant":
        return 1.0
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return final_share + (1 - final_share) * left


def _reductions(step: int, heldout: HeldoutLosses, patience: int) -> int:
    """Return how often the learning rate has been reduced before update `step`.

    The rate is reduced after every `patience` consecutive held-out losses without a new minimum.
    """
    lowest, without, reductions = math.inf, 0, 0
    for _, loss in (entry for entry in heldout if entry[0] < step):
        without = 0 if loss < lowest else without + 1
        lowest = loss if loss < lowest else lowest
        if without == patience:
            without, reductions = 0, reductions + 1
    return reductions


# Dynamic loss scaling for fp16: each step computes the next step's factor of the loss.

MAX_SCALE = float(2**24)
"""Maximum loss scale: a float32 loss times this factor is far from overflow, and no gradient needs a larger one."""


@dataclass(frozen=True)
class LossScale:
    """The factor by which the loss is multiplied before the backward pass, and the gradient divided after it.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
    """

    scale: float
    """The factor."""
    finite_steps: int
    """Consecutive steps with a finite gradient since the last change of the factor."""
    growth_steps: int
    """Number of such steps after which the factor is doubled."""

    def after(self, finite: bool) -> "LossScale":
        """Return the loss scale of the next step, 1 to 2^24.

        The scale is halved after a gradient that is not finite. It is doubled after `growth_steps` finite gradients
        in a row.
        """
        if not finite:
            # A scale of 1 cannot cause an overflow.
            return LossScale(max(1.0, self.scale / 2), 0, self.growth_steps)
        if self.finite_steps + 1 < self.growth_steps:
            return LossScale(self.scale, self.finite_steps + 1, self.growth_steps)
        return LossScale(min(MAX_SCALE, self.scale * 2), 0, self.growth_steps)


def first_loss_scale(config: OptimConfig) -> LossScale:
    """Return the loss scale of a run's first step."""
    return LossScale(config.initial_loss_scale, 0, config.loss_scale_steps)
