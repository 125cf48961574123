"""The result of a layout search: the best layouts with times and memory, and the rejected ones by reason."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from train.config.layout import LayoutConfig
from train.parallel.memory import Memory
from train.plan.search.candidates import LayoutSplit, describe_split, layout_overrides
from train.plan.search.cost import STEP_COMPONENTS
from train.plan.search.devices import Cluster

SHOWN_PARTS = 6
"""Number of components of a step's time that are printed, longest first."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its predicted step time and memory."""

    split: LayoutSplit
    layout: LayoutConfig
    """The whole `[layout]` section, including other settings of the recipe."""
    micro_batches: int
    """Accumulated micro-batches of a step, in the training stage with most rows."""
    step_seconds: float
    """Mean seconds over the optimizer steps of the run."""
    tokens_per_second: float
    """Positions per second over all ranks."""
    mfu: float
    """Share of the devices' dense bf16 peak, or of a CPU's peak in its own precision; FLOPs count all attention pairs
    and no recomputation."""
    memory: Memory
    """Memory of the rank and the training stage with the largest peak."""
    parts: dict[str, float]
    """Seconds of a step by component; they add up to step_seconds."""

    def layout_settings(self) -> dict[str, Any]:
        """Return the settings of `[layout]` for this candidate."""
        layout = self.layout
        section = layout_overrides(self.split, layout.rows_at_once, layout.activation_checkpointing)
        return section | {"compile": layout.compile}

    @property
    def name(self) -> str:
        """A description of the layout."""
        mode = self.layout.activation_checkpointing
        again = {"none": "", "selective": ", cheap parts again", "full": ", layers again"}.get(mode, f", {mode}")
        turns = f"{self.micro_batches} micro-batch(es) of {self.layout.micro_batch}"
        return f"{describe_split(self.split)}; {turns}{again}{', compiled' if self.layout.compile else ''}"


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search."""

    cluster: Cluster
    best: tuple[Candidate, ...]
    """The fastest layouts that fit, each with different axes; empty = none fits."""
    refused: dict[str, tuple[int, str]]
    """By reason: the number of rejected layouts, and an example with its numbers."""
    limit: int
    """Memory limit of a rank [bytes]."""
    seconds: float
    """Duration of the search."""

    @property
    def searched(self) -> int:
        """Number of layouts examined."""
        return len(self.best) + sum(count for count, _ in self.refused.values())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the result as text: a block for each of the best layouts, then the reasons for rejection."""
        device = self.cluster.device
        yield (
            f"{self.searched:,} layouts for {self.cluster}, {self.limit / 1e9:.4g} GB usable each, in "
            f"{self.seconds:.2f} s; predicted, not measured"
        )
        for rank, candidate in enumerate(self.best, start=1):
            yield (
                f"{rank}. {candidate.step_seconds:.4g} s a step, {candidate.tokens_per_second:,.0f} tokens/s, MFU "
                f"{100 * candidate.mfu:.1f} %, {candidate.memory.peak / 1e9:.4g} GB at its largest "
                f"({candidate.memory.peak_moment})"
            )
            yield f"   {candidate.name}"
            yield f"   {', '.join(_shares(candidate))}"
        if not self.best:
            yield "none fits"
        yield "not taken:"
        for reason, (count, example) in sorted(self.refused.items(), key=lambda item: -item[1][0]):
            yield f"   {count:>9,} {reason}; such as {example}"
        yield f"device: {device.source}. Uncertain: {device.uncertain or 'nothing, it was measured here'}."

    def meanings(self) -> Iterator[str]:
        """Return a line for each component of a step's time with its meaning."""
        return (f"{name}: {meaning}" for name, meaning in STEP_COMPONENTS.items())


def _shares(candidate: Candidate) -> Iterator[str]:
    """Return the largest components of a step in per cent."""
    largest = sorted(candidate.parts.items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    return (f"{name} {100 * part / candidate.step_seconds:.0f} %" for name, part in largest if part > 0)
