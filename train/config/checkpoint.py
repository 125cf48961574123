"""The section `[checkpoint]`: when the state of a run is written, how, and how much of it is kept."""

from typing import Literal

from pydantic import model_validator

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
