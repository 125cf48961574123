"""Dynamic loss scaling for fp16: the factor of the loss as a value that each step maps to the next."""

from dataclasses import dataclass

from train.config.optim import OptimConfig

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
