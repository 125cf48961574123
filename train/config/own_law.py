"""A law of loss that was fitted to runs of one's own, as a plan keeps it: its numbers, and how sure they are."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OwnLaw(BaseModel):
    """L(N, D) = floor + a/N^alpha + b/D^beta [nats/token] of one dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    floor: float = Field(ge=0)
    """E, the loss of a model without bounds [nats/token]."""
    a: float = Field(gt=0)
    """A."""
    b: float = Field(gt=0)
    """B."""
    alpha: float = Field(gt=0)
    """Exponent of N."""
    beta: float = Field(gt=0)
    """Exponent of D."""
    counts: Literal["all", "body"] = "all"
    """Whether N has the embeddings in it ("all", as a plan counts) or not."""
    held: tuple[str, ...] = ()
    """Numbers that were not fitted, but taken from `held_from`."""
    held_from: str = ""
    """Source of what was held."""
    intervals: dict[str, tuple[float, float]] = {}
    """Where each number lies with probability `share`, and `exponent`, that of C in the best N."""
    share: float = Field(0.9, gt=0, lt=1)
    """What the intervals hold of the fits to runs drawn anew."""
    num_runs: int = Field(ge=1)
    """Number of runs."""
    deviation: float = Field(ge=0)
    """Root of the mean square of ln(measured / fitted loss)."""
    dataset: str = ""
    """Digest of the dataset of all runs; empty = not known, or not one."""
    params: float = Field(gt=0)
    """N of the largest run."""
    tokens: float = Field(gt=0)
    """D of the longest run."""
    compute: float = Field(gt=0)
    """6ND of the dearest run [FLOPs]."""

    @property
    def source(self) -> str:
        """Where the law comes from."""
        of = f"dataset {self.dataset[:12]}" if self.dataset else "datasets that it does not name"
        return f"fitted to {self.num_runs} runs on {of}"

    def held_if(self, name: str) -> str:
        """Where a number comes from."""
        return self.held_from if self._is_held(name) else self.source

    def told(self, name: str) -> str:
        """How sure a number is, in words."""
        if self._is_held(name):
            return "held, not fitted"
        if name not in self.intervals:
            return "no interval"
        low, high = self.intervals[name]
        return f"{100 * self.share:g} % between {low:.4g} and {high:.4g}"

    def _is_held(self, name: str) -> bool:
        return name in self.held or (name == "exponent" and bool(self.held))
