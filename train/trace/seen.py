"""Which steps, epochs and checkpoints of a run saw documents, and which checkpoint is the last that did not."""

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.storage import Store
from train.checkpoint.folder import standing_notes
from train.trace.appearance import Appearance


@dataclass(frozen=True)
class Seen:
    """When a run sees something, by its plan, and what that means for its checkpoints that stand."""

    steps: tuple[int, ...]
    """Every step that sees it, in order, up to the end of the plan."""
    epochs: tuple[int, ...]
    """Passes over the source in which it is seen, from 0."""
    trained: int | None
    """Step of the newest checkpoint that stands; steps behind it are only planned. None = no checkpoint stands."""
    first_checkpoint: int | None
    """Step of the first checkpoint that saw it; None = none did."""
    last_checkpoint: int | None
    """Step of the last checkpoint that saw it: what was seen stays in the weights."""
    last_clean: int | None
    """Step of the last checkpoint that had not seen it; None = none stands, only training from the beginning is."""

    def describe(self) -> str:
        """The same in words."""
        if not self.steps:
            return "in no step of the plan: every checkpoint is clean"
        steps, epochs = self.steps, ", ".join(map(str, self.epochs))
        words = [f"{len(steps)} step(s), {steps[0]} to {steps[-1]}; epoch(s) {epochs}"]
        if self.trained is None:
            return "; ".join([*words, "no checkpoint stands"])
        if self.first_checkpoint is None:
            return "; ".join([*words, f"no checkpoint saw it yet, the last clean one is {self.last_clean}"])
        words.append(f"first checkpoint that saw it {self.first_checkpoint}, last {self.last_checkpoint}")
        clean = "none stands, train from the beginning" if self.last_clean is None else str(self.last_clean)
        return "; ".join([*words, f"last clean checkpoint {clean}"])


def seen_by(appearances: Iterable[Appearance], checkpoints: Iterable[int]) -> Seen:
    """When a run sees something, from all its appearances and the steps of the checkpoints that stand.

    A checkpoint of step s has made s updates, so it saw a step k if k <= s.
    """
    found = [(part.step, part.epoch) for part in appearances]
    steps, standing = sorted({step for step, _ in found}), sorted(checkpoints)
    saw = [step for step in standing if steps and step >= steps[0]]
    clean = [step for step in standing if not steps or step < steps[0]]
    return Seen(
        steps=tuple(steps),
        epochs=tuple(sorted({epoch for _, epoch in found})),
        trained=standing[-1] if standing else None,
        first_checkpoint=saw[0] if saw else None,
        last_checkpoint=saw[-1] if saw else None,
        last_clean=clean[-1] if clean else None,
    )


def standing_steps(run: Store) -> list[int]:
    """The steps of the checkpoints that stand in a run, oldest first; only mounted storage has any."""
    return [note.step for note in standing_notes(run)] if run.is_local else []
