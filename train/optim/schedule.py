"""The learning rate of every update, a pure function of its number, the run's course and the held-out losses.

All courses but inverse_sqrt begin at a border (the end of the warm-up, or the beginning of a stage with a rate of its
own), where they stand at their full rate, and end at the last step of the run or stage, where they stand at their
final share: the first update behind the border is one step further.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from train.config.optim import OptimConfig

Heldout = Sequence[tuple[int, float]]
"""Held-out losses in the order in which they were measured: (updates made before, loss)."""


@dataclass(frozen=True)
class StageCourse:
    """A stage as far as its learning rate goes."""

    first_step: int
    """Its first update, from 1."""
    num_steps: int
    """Its updates."""
    learning_rate: float | None = None
    """Rate at its beginning; None = the run's schedule goes on."""
    schedule: str = "linear"
    """cosine, linear or constant: course of that rate."""
    final_lr_share: float = 0.0
    """Where it ends, as a share."""


@dataclass(frozen=True)
class Course:
    """What a learning rate depends on beside `[optim]` and the held-out losses."""

    steps: int
    """Updates of the run."""
    warmup_steps: int
    """Updates over which the rate rises from zero, in proportion."""
    peak_rate: float
    """Rate at the end of the warm-up."""
    stages: tuple[StageCourse, ...] = ()
    """Stages of the run; updates that none of them holds follow the run's schedule."""


def learning_rate(step: int, course: Course, config: OptimConfig, heldout: Heldout = ()) -> float:
    """Learning rate of update `step` (1 = first). A warm-up scales the rate of a stage that begins within it too.

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
    return peak * _fall(stage.schedule, progress, stage.final_lr_share)


def _share(step: int, course: Course, config: OptimConfig, heldout: Heldout) -> float:
    """Share of the peak that the run's schedule has left at a step behind the warm-up."""
    if config.schedule == "inverse_sqrt":
        return math.sqrt(max(1, course.warmup_steps) / step)
    if config.schedule == "step":
        return config.decay_factor ** sum(step > border for border in config.decay_steps)
    if config.schedule == "plateau":
        return config.decay_factor ** _reductions(step, heldout, config.plateau_patience)
    if config.schedule == "wsd":
        begin = max(course.warmup_steps, course.steps * (1 - config.decay_share))
        return _fall("linear", _progress(step, begin, course.steps), config.final_lr_share)
    progress = _progress(step, course.warmup_steps, course.steps)
    return _fall(config.schedule, progress, config.final_lr_share)


def _progress(step: int, begin: float, end: int) -> float:
    """How far a step lies on the way from `begin` to `end`, 0 to 1."""
    return min(1.0, max(0.0, step - begin) / max(1.0, end - begin))


def _fall(schedule: str, progress: float, final_share: float) -> float:
    """Share of the rate that is left when a course has made this progress."""
    if schedule == "constant":
        return 1.0
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return final_share + (1 - final_share) * left


def _reductions(step: int, heldout: Heldout, patience: int) -> int:
    """How often `patience` held-out losses in a row, all measured before update `step`, brought no new minimum."""
    lowest, without, reductions = math.inf, 0, 0
    for _, loss in (entry for entry in heldout if entry[0] < step):
        without = 0 if loss < lowest else without + 1
        lowest = loss if loss < lowest else lowest
        if without == patience:
            without, reductions = 0, reductions + 1
    return reductions


# Dynamic loss scaling for fp16: the factor of the loss as a value that each step maps to the next.

MAX_SCALE = float(2**24)
"""Largest factor: a float32 loss times it is far from overflowing, and no gradient needs more."""


@dataclass(frozen=True)
class LossScale:
    """The factor that the loss is multiplied by before the backward pass, and the gradient divided by behind it.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
    """

    scale: float
    """The factor."""
    finite_steps: int
    """Steps in a row with a finite gradient since the factor last changed."""
    growth_steps: int
    """How many of them double it."""

    def after(self, finite: bool) -> "LossScale":
        """The scale of the next step: halved behind a gradient that is not finite, which is then not applied.

        At a factor of 1 it stays, and the fault is not one of scaling; doubling ends at 2^24.
        """
        if not finite:
            return LossScale(max(1.0, self.scale / 2), 0, self.growth_steps)
        if self.finite_steps + 1 < self.growth_steps:
            return LossScale(self.scale, self.finite_steps + 1, self.growth_steps)
        return LossScale(min(MAX_SCALE, self.scale * 2), 0, self.growth_steps)


def first_loss_scale(config: OptimConfig) -> LossScale:
    """The scale that a run begins with."""
    return LossScale(config.initial_loss_scale, 0, config.loss_scale_steps)
