"""The section `[checkpoint]`: when the state of a run is written, how, and how much of it is kept."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config import Section, execution


class CheckpointConfig(Section):
    """When and how checkpoints are written."""

    every: int = execution(200, ge=0)
    """Steps between two checkpoints; 0 = only at the end."""
    keep: int = execution(2, ge=1)
    """Newest checkpoints that are kept; one that fails counts for nothing."""
    keep_every: int | None = execution(None, ge=1)
    """Checkpoints of steps that this divides, a multiple of `every`, are kept for good; None = none."""
    mode: Literal["sync", "async"] = execution("async")
    """async: training goes on while the state, copied to the host's memory, is written; a rank needs room there for
    all that it writes. sync: training stands still."""
    first: bool = execution(False)
    """Whether the initial state is written too, as step 0: a seed checkpoint, kept for good."""

    @model_validator(mode="after")
    def _used(self) -> "CheckpointConfig":
        if self.keep_every is not None and (not self.every or self.keep_every % self.every):
            raise ValueError(f"keep_every wants a multiple of every = {self.every}, found {self.keep_every}")
        return self


# The section `[guard]`: what is done about steps that are not finite, losses that jump or no longer fall.


class GuardConfig(Section):
    """Non-finite steps are skipped and counted; spikes are reported, or rewound; a run may end early."""

    max_non_finite: int = execution(3, ge=0)
    """Steps in a row whose loss or gradient may be infinite or not a number, each skipped; one more stops the run. On a
    GPU the run stops while the step after that one computes, whose figures are dropped."""
    spike_sigmas: float | None = Field(None, gt=0)
    """Deviations that a loss may lie above the mean of the last `spike_window` losses; one further above is a spike.
    None = not watched. OLMo 2 (arXiv 2501.00656) allows 6."""
    grad_sigmas: float | None = Field(None, gt=0)
    """The same of the gradient's norm, as it is before clipping: the trainer of OLMo 2 allows 6 here too, ZClip
    (arXiv 2504.02507) clips beyond 2.5, and finds plain norms near enough to normal within a window. None = not
    watched."""
    spike_window: int = Field(128, ge=8)
    """Losses and norms that mean and deviation are taken over; nothing is a spike before there are so many."""
    on_spike: Literal["report", "rewind"] = "report"
    """report: the documents of the step are listed. rewind: and training goes on from the checkpoint before without
    the samples of the step, which the skip list and `events.jsonl` record."""
    max_rewinds: int = execution(3, ge=1)
    """rewind: rewinds of a run; a spike behind them stops it."""
    quarantine: bool = execution(False)
    """Whether a spike is rewound, whatever `on_spike` says, and the documents that stand out in its batch are written
    to `train/quarantine.jsonl` and kept out of every later batch. What it takes out shows in the skip list's digest,
    so a run may go on with it or without."""
    patience: int | None = Field(None, ge=1)
    """Held-out losses in a row without a new minimum after which the run ends; None = it runs to its last step."""
    min_improvement: float = Field(0.0, ge=0)
    """What a held-out loss must fall by to count as a new minimum [nats/token]."""

    @model_validator(mode="after")
    def _used(self) -> "GuardConfig":
        """Refuse a setting that would be ignored."""
        rewinds, any_of = self.on_spike == "rewind", "spike_sigmas or grad_sigmas"
        problems = [
            (not self.watches and rewinds, f"on_spike = rewind wants {any_of}"),
            (not self.watches and self.quarantine, f"quarantine wants {any_of}, such as 6"),
            (not self.watches and self._given("spike_window"), f"spike_window wants {any_of}"),
            (not self.rewinds and self._given("max_rewinds"), "max_rewinds wants on_spike = rewind or quarantine"),
            (self.patience is None and self._given("min_improvement"), "min_improvement wants patience"),
        ]
        if found := [text for wrong, text in problems if wrong]:
            raise ValueError("; ".join(found))
        return self

    @property
    def watches(self) -> bool:
        """Whether anything can be a spike."""
        return self.spike_sigmas is not None or self.grad_sigmas is not None

    @property
    def rewinds(self) -> bool:
        """Whether training goes back behind a spike."""
        return self.quarantine or self.on_spike == "rewind"

    def _given(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)
