"""The sections `[checkpoint]`, how checkpoints are written and kept, and `[guard]`, the checks after a step."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config import Section, execution


class CheckpointConfig(Section):
    """When and how checkpoints are written and kept."""

    every: int = execution(200, ge=0)
    """Steps between two checkpoints; 0 = only at the end."""
    keep: int = execution(2, ge=1)
    """Number of newest checkpoints that are kept; an invalid checkpoint does not count."""
    keep_every: int | None = execution(None, ge=1)
    """Checkpoints of every so many steps, a multiple of `every`, are kept permanently; None = none."""
    mode: Literal["sync", "async"] = execution("async")
    """async: training continues while the state, copied to the host's memory, is written; each rank needs host memory
    for all that it writes. sync: training waits."""
    first: bool = execution(False)
    """Write the initial state too, as step 0: a seed checkpoint, kept permanently."""

    @model_validator(mode="after")
    def _used(self) -> "CheckpointConfig":
        if self.keep_every is not None and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"keep_every: expected a multiple of every = {self.every}, got {self.keep_every}. "
                "Set keep_every to a multiple of every."
            )
        return self


# The section `[guard]`: the response to non-finite steps, spikes, and a loss that no longer falls.


class GuardConfig(Section):
    """Checks on steps: non-finite steps are skipped, spikes are reported or rewound, a run may end early."""

    max_non_finite: int = execution(3, ge=0)
    """Maximum number of consecutive steps with an infinite or NaN loss or gradient, each skipped; one more stops the
    run. On a GPU the run stops during the step after it, whose figures are discarded."""
    spike_sigmas: float | None = Field(None, gt=0)
    """Maximum distance of a loss above the mean of the last `spike_window` losses [standard deviations]; a larger one
    is a spike. None = no check. OLMo 2 (arXiv 2501.00656) allows 6."""
    grad_sigmas: float | None = Field(None, gt=0)
    """The same for the gradient norm before clipping: the trainer of OLMo 2 allows 6 here too; ZClip (arXiv
    2504.02507) clips beyond 2.5, and reports that norms are nearly normal within a window. None = no check."""
    spike_window: int = Field(128, ge=8)
    """Number of losses and norms for mean and deviation; before there are so many, no step is a spike."""
    on_spike: Literal["report", "rewind"] = "report"
    """report: the documents of the step are listed. rewind: training also resumes from the checkpoint before, without
    the samples of the step, which the skip list and `events.jsonl` record."""
    max_rewinds: int = execution(3, ge=1)
    """rewind: maximum number of rewinds in a run; the next spike stops it."""
    quarantine: bool = execution(False)
    """Rewind after a spike, for any `on_spike`, write the outlier documents of its batch to `train/quarantine.jsonl`,
    and exclude them from every later batch. The exclusions are part of the skip list's digest, so a run may be resumed
    with or without this setting."""
    patience: int | None = Field(None, ge=1)
    """Number of consecutive held-out losses without a new minimum after which the run ends; None = no early end."""
    min_improvement: float = Field(0.0, ge=0)
    """Minimum decrease of a held-out loss that counts as a new minimum [nats/token]."""

    @model_validator(mode="after")
    def _used(self) -> "GuardConfig":
        """Reject a setting that would be ignored."""
        rewinds, any_of = self.on_spike == "rewind", "spike_sigmas or grad_sigmas"
        problems = [
            (not self.watches and rewinds, f"on_spike = rewind requires {any_of}"),
            (not self.watches and self.quarantine, f"quarantine requires {any_of}, such as 6"),
            (not self.watches and self._given("spike_window"), f"spike_window requires {any_of}"),
            (not self.rewinds and self._given("max_rewinds"), "max_rewinds requires on_spike = rewind or quarantine"),
            (self.patience is None and self._given("min_improvement"), "min_improvement requires patience"),
        ]
        if messages := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(messages))
        return self

    @property
    def watches(self) -> bool:
        """True if any check for spikes is set."""
        return self.spike_sigmas is not None or self.grad_sigmas is not None

    @property
    def rewinds(self) -> bool:
        """True if training rewinds after a spike."""
        return self.quarantine or self.on_spike == "rewind"

    def _given(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)
