"""What a search has found: the best layouts with their times and memory, and why the others were not taken."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from train.config.layout import LayoutConfig
from train.parallel.memory import Memory
from train.plan.search.candidates import Split, overrides, shown
from train.plan.search.cost import PARTS
from train.plan.search.devices import Cluster

SHOWN_PARTS = 6
"""Parts of a step's time that the table names, the longest first."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, and what a step in it is predicted to take."""

    split: Split
    layout: LayoutConfig
    """The whole section, with what the recipe says besides."""
    micro_batches: int
    """Micro-batches of a step, those that accumulate included, in the stage with most rows."""
    step_seconds: float
    """Mean over the steps of the run."""
    tokens_per_second: float
    """Positions of all ranks."""
    mfu: float
    """Share that counted FLOPs (attention's whole square, nothing computed again) make of the devices' dense bf16 peak,
    of a CPU's in its own precision."""
    memory: Memory
    """Of the rank and the stage of the run that need most."""
    parts: dict[str, float]
    """Seconds of a step by what they go into; they add up to step_seconds."""

    def layout_settings(self) -> dict[str, Any]:
        """What `[layout]` must say for it."""
        layout = self.layout
        made = overrides(self.split, layout.rows_at_once, layout.activation_checkpointing)
        return made | {"compile": layout.compile}

    @property
    def name(self) -> str:
        """In words."""
        mode = self.layout.activation_checkpointing
        again = {"none": "", "selective": ", cheap parts again", "full": ", layers again"}.get(mode, f", {mode}")
        turns = f"{self.micro_batches} micro-batch(es) of {self.layout.micro_batch}"
        return f"{shown(self.split)}; {turns}{again}{', compiled' if self.layout.compile else ''}"


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    cluster: Cluster
    best: tuple[Candidate, ...]
    """The fastest that fit, each with other axes than those before it; empty = none fits."""
    refused: dict[str, tuple[int, str]]
    """By reason: how many layouts, and one of them with its numbers."""
    limit: int
    """Bytes that a rank may use."""
    seconds: float
    """What the search took."""

    @property
    def searched(self) -> int:
        """Layouts looked at."""
        return len(self.best) + sum(count for count, _ in self.refused.values())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """As text: a block for each of the best, then the reasons."""
        device = self.cluster.device
        yield (
            f"{self.searched:,} layouts for {self.cluster}, {self.limit / 1e9:.4g} GB usable each, in "
            f"{self.seconds:.2f} s; predicted, not measured"
        )
        for place, each in enumerate(self.best, start=1):
            yield (
                f"{place}. {each.step_seconds:.4g} s a step, {each.tokens_per_second:,.0f} tokens/s, MFU "
                f"{100 * each.mfu:.1f} %, {each.memory.peak / 1e9:.4g} GB at its largest ({each.memory.peak_moment})"
            )
            yield f"   {each.name}"
            yield f"   {', '.join(_shares(each))}"
        if not self.best:
            yield "none fits"
        yield "not taken:"
        for reason, (count, example) in sorted(self.refused.items(), key=lambda item: -item[1][0]):
            yield f"   {count:>9,} {reason}; such as {example}"
        yield f"device: {device.source}. Uncertain: {device.uncertain or 'nothing, it was measured here'}."

    def meanings(self) -> Iterator[str]:
        """What the parts of a step's time are, a line each."""
        return (f"{name}: {meaning}" for name, meaning in PARTS.items())


def _shares(candidate: Candidate) -> Iterator[str]:
    """The largest parts of a step in per cent."""
    largest = sorted(candidate.parts.items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    return (f"{name} {100 * part / candidate.step_seconds:.0f} %" for name, part in largest if part > 0)
